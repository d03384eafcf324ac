"""Authlib's authorization server on loopback: it authenticates clients, checks assertions, rotates refresh tokens.

Token exchange it does not bring: here it is a grant of its own, by RFC 8693, on Authlib's authentication and errors.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

from authlib.integrations.flask_oauth2 import AuthorizationServer
from authlib.oauth2.rfc6749 import (
    BaseGrant,
    ClientMixin,
    InvalidRequestError,
    OAuth2Error,
    TokenEndpointMixin,
    TokenMixin,
    grants,
)
from authlib.oauth2.rfc7009 import RevocationEndpoint
from authlib.oauth2.rfc7523 import JWTBearerGrant
from flask import Flask
from joserfc import jwk
from werkzeug.serving import WSGIRequestHandler, make_server

EXCHANGE: Final = "urn:ietf:params:oauth:grant-type:token-exchange"
ACCESS_TOKEN: Final = "urn:ietf:params:oauth:token-type:access_token"
SCOPES: Final = ("orders.read", "orders.write")
LIFE: Final = 900
FAMILIES: Final = ("RSA", "EC", "OKP")
"""What the name of a client with a key begins with."""


class InvalidTarget(OAuth2Error):  # type: ignore[misc]  # Authlib ships no types
    """RFC 8693 §2.2.2."""

    error = "invalid_target"


class Client(ClientMixin):  # type: ignore[misc]  # Authlib ships no types
    """A client that may authenticate in one way, and use the grants that its server has."""

    def __init__(self, name: str, secret: str, method: str = "client_secret_basic", key: str = "") -> None:
        self.name, self.secret, self.method, self.key = name, secret, method, key

    def get_client_id(self) -> str:
        return self.name

    def get_allowed_scope(self, scope: str | None) -> str:
        return " ".join(one for one in (scope or "").split() if one in SCOPES)

    def check_client_secret(self, client_secret: str) -> bool:
        return secrets.compare_digest(self.secret.encode(), client_secret.encode())

    def check_endpoint_auth_method(self, method: str, endpoint: str) -> bool:
        return method == self.method

    def check_grant_type(self, grant_type: str) -> bool:
        return True


class Given(TokenMixin):  # type: ignore[misc]  # Authlib ships no types
    """A token that was given; `form` is what was asked."""

    def __init__(self, client: Client, token: dict[str, Any], form: dict[str, str]) -> None:
        self.client, self.token, self.form, self.live = client, token, form, True

    def check_client(self, client: Client) -> bool:
        return client is self.client

    def get_scope(self) -> str:
        return str(self.token.get("scope") or " ".join(SCOPES))

    def get_expires_in(self) -> int:
        return int(self.token["expires_in"])

    def is_expired(self) -> bool:
        return False

    def is_revoked(self) -> bool:
        return not self.live


class Issuer:
    """What the server knows: `clients`, the `refresh` tokens that are good now, what it `gave`, and `thefts` it has seen."""

    def __init__(self) -> None:
        self.url = ""
        self.clients: dict[str, Client] = {}
        self.gave: dict[str, Given] = {}
        self.refresh: dict[str, Given] = {}
        self.used: set[str] = set()
        self.thefts = 0
        self.subjects: dict[str, str] = {}
        """Subject tokens of others, good for an exchange for the audience beside them."""
        self.rotates = True

    def client(self, name: str, secret: str, method: str = "client_secret_basic", key: str = "") -> Client:
        made = self.clients[name] = Client(name, secret, method, key)
        return made

    def first_refresh_token(self, client: Client) -> str:
        token = secrets.token_hex(24)
        self.refresh[token] = Given(client, {"scope": " ".join(SCOPES), "expires_in": LIFE}, {})
        return token

    def is_live(self, token: str) -> bool:
        return token in self.gave and self.gave[token].live


METHODS: Final = ["client_secret_basic", "client_secret_post", "none"]


class ByClient(grants.ClientCredentialsGrant):  # type: ignore[misc]  # Authlib ships no types
    """RFC 6749 §4.4."""

    TOKEN_ENDPOINT_AUTH_METHODS = METHODS


class ByRefresh(grants.RefreshTokenGrant):  # type: ignore[misc]  # Authlib ships no types
    """RFC 6749 §6."""

    TOKEN_ENDPOINT_AUTH_METHODS = METHODS

    @property
    def INCLUDE_NEW_REFRESH_TOKEN(self) -> bool:  # noqa: N802 -- Authlib's name
        return bool(self.server.issuer.rotates)

    def authenticate_refresh_token(self, refresh_token: str) -> Given | None:
        issuer: Issuer = self.server.issuer
        if refresh_token in issuer.used:  # RFC 9700 §4.14.2: the whole family ends
            issuer.thefts += 1
            issuer.refresh.clear()
        return issuer.refresh.get(refresh_token)

    def authenticate_user(self, refresh_token: Given) -> str:
        return "operator"

    def revoke_old_credential(self, refresh_token: Given) -> None:
        issuer: Issuer = self.server.issuer
        if issuer.rotates:
            old = self.request.form["refresh_token"]
            issuer.refresh.pop(old, None)
            issuer.used.add(old)


class ByAssertion(JWTBearerGrant):  # type: ignore[misc]  # Authlib ships no types
    """RFC 7523 §2.1."""

    def resolve_issuer_client(self, issuer: str) -> Client | None:
        clients: dict[str, Client] = self.server.issuer.clients
        return clients.get(issuer)

    def resolve_client_public_key(self, client: Client) -> Any:
        family: Literal["RSA", "EC", "OKP"] = next(one for one in FAMILIES if client.name.startswith(one))
        return jwk.import_key(client.key, family)

    def authenticate_user(self, subject: str) -> str | None:
        return subject if subject in {*self.server.issuer.clients, "agent@example.com"} else None

    def has_granted_permission(self, client: Client, user: str) -> bool:
        return True

    def get_audiences(self) -> list[str]:
        return [f"{self.server.issuer.url}/token", "https://issuer.example"]


class ByExchange(BaseGrant, TokenEndpointMixin):  # type: ignore[misc]  # Authlib ships no types
    """RFC 8693 §2.1."""

    GRANT_TYPE = EXCHANGE
    TOKEN_ENDPOINT_AUTH_METHODS = METHODS

    def validate_token_request(self) -> None:
        self.request.client = self.authenticate_token_endpoint_client()
        form = self.request.form
        if form.get("subject_token_type") != ACCESS_TOKEN:
            raise InvalidRequestError("subject_token_type")
        audience = self.server.issuer.subjects.get(form.get("subject_token", ""))
        if audience is None:
            raise InvalidRequestError("subject_token")  # RFC 8693 §2.2.2
        if form.get("audience") != audience:
            raise InvalidTarget
        self.validate_requested_scope()

    def create_token_response(self) -> tuple[int, dict[str, Any], Any]:
        token = self.generate_token(scope=self.request.payload.scope, include_refresh_token=False)
        token["issued_token_type"] = ACCESS_TOKEN
        self.save_token(token)
        return 200, token, self.TOKEN_RESPONSE_HEADER


class Revocation(RevocationEndpoint):  # type: ignore[misc]  # Authlib ships no types
    """RFC 7009."""

    CLIENT_AUTH_METHODS = METHODS

    def query_token(self, token_string: str, token_type_hint: str) -> Given | None:
        assert token_type_hint == "access_token"
        gave: dict[str, Given] = self.server.issuer.gave
        return gave.get(token_string)

    def revoke_token(self, token: Given, request: Any) -> None:
        token.live = False


def _server(issuer: Issuer) -> Flask:
    app = Flask("issuer")
    app.config["OAUTH2_REFRESH_TOKEN_GENERATOR"] = True
    app.config["OAUTH2_TOKEN_EXPIRES_IN"] = dict.fromkeys(
        (grant.GRANT_TYPE for grant in (ByClient, ByRefresh, ByAssertion, ByExchange)), LIFE
    )

    def save(token: dict[str, Any], request: Any) -> None:
        given = Given(request.client, token, dict(request.form))
        issuer.gave[token["access_token"]] = given
        if "refresh_token" in token:
            issuer.refresh[token["refresh_token"]] = given

    server = AuthorizationServer(app, query_client=issuer.clients.get, save_token=save)
    server.scopes_supported = list(SCOPES)
    server.issuer = issuer
    for grant in (ByClient, ByRefresh, ByAssertion, ByExchange):
        server.register_grant(grant)
    server.register_endpoint(Revocation)

    @app.post("/token")
    def token() -> Any:
        return server.create_token_response()

    @app.post("/revoke")
    def revoke() -> Any:
        return server.create_endpoint_response("revocation")

    return app


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002 -- werkzeug's name
        """A request line is not worth a line."""


@contextmanager
def issuing() -> Iterator[Issuer]:
    issuer = Issuer()
    server = make_server("127.0.0.1", 0, _server(issuer), threaded=True, request_handler=_Quiet)
    issuer.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield issuer
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
