"""Who issues short-lived credentials, as far as the lab needs them: each checks who asks; what it issues opens guarded hosts.

They stand for services that nobody can run at home (GitHub, Google, Microsoft Entra, a Kubernetes API server) or that are small
(an OAuth 2.0 token endpoint). What an issuer must be shown is set with `expect`; what it was asked for is in `asked`.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
import time
from typing import Any
from urllib.parse import parse_qs, unquote_plus

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from egressd.lab.guards import Guards
from egressd.lab.http1 import Exchange

GITHUB, OAUTH, GOOGLE, ENTRA, KUBERNETES, QUEUE = (
    "api.github.com",
    "login.lab-origin.com",
    "google.lab-origin.com",
    "entra.lab-origin.com",
    "kube.lab-origin.com",
    "queue.lab-origin.com",
)
LIFE = 600
"""Seconds."""

_JSON = {"Content-Type": "application/json"}


class Issuers:
    """All of them; `issued` has every credential that ever was, in order."""

    def __init__(self, guards: Guards) -> None:
        self.issued: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self._live = guards.live
        self._expected: dict[str, str] = {}
        self.sites = {
            GITHUB: self.github,
            OAUTH: self.oauth,
            GOOGLE: self.google,
            ENTRA: self.entra,
            KUBERNETES: self.kubernetes,
            QUEUE: self.queue,
        }

    def expect(self, issuer: str, value: str) -> None:
        """Says what an issuer must be shown: a secret, or the public key (PEM) of who signs; empty: it fails (503)."""
        self._expected[issuer] = value

    async def oauth(self, exchange: Exchange) -> None:
        """RFC 6749: a token for `client:secret`, in the Authorization field or in the form."""
        form = await _form(exchange)
        given = _basic(exchange) or f"{form.get('client_id')}:{form.get('client_secret')}"
        if not await self._admits(exchange, "oauth", given, form):
            return
        token = self._issue("oauth", "oat_")
        await _say(exchange, 200, {"access_token": token, "token_type": "Bearer", "expires_in": LIFE})

    async def github(self, exchange: Exchange) -> None:
        """An installation token for an app's JWT; its own DELETE takes it back."""
        given = (exchange.seen.header("authorization") or "").partition(" ")[2]
        if exchange.seen.method == "DELETE":
            known = given in self._live.get("github", ())
            self._take_back("github", given)
            await exchange.reply(204 if known else 401)
            return
        body = json.loads(await exchange.body() or b"{}")
        if await self._admits(exchange, "github", given, body, signed=True):
            chosen = [{"name": name, "full_name": f"acme/{name}"} for name in body.get("repositories", ())]
            answer = {"token": self._issue("github", "ghs_"), "expires_at": _ahead(), "repositories": chosen}
            answer |= {"permissions": body.get("permissions"), "repository_selection": "selected"}
            await _say(exchange, 201, answer)

    async def google(self, exchange: Exchange) -> None:
        """A token for a service account's JWT, and one of an impersonated account for that."""
        if exchange.seen.path.endswith(":generateAccessToken"):
            given = (exchange.seen.header("authorization") or "").removeprefix("Bearer ")
            body = json.loads(await exchange.body() or b"{}")
            if given in self._live.get("google", ()):
                self.asked.append({"issuer": "impersonated", **body})
                answer = {"accessToken": self._issue("impersonated", "ya29.i_"), "expireTime": _ahead()}
                await _say(exchange, 200, answer)
            else:
                await _say(exchange, 401, {"error": {"status": "UNAUTHENTICATED"}})
            return
        form = await _form(exchange)
        if await self._admits(exchange, "google", form.get("assertion", ""), form, signed=True):
            token = self._issue("google", "ya29.")
            await _say(exchange, 200, {"access_token": token, "token_type": "Bearer", "expires_in": LIFE})

    async def entra(self, exchange: Exchange) -> None:
        """A tenant's configuration, and a token for `client:secret` in the form."""
        tenant = exchange.seen.path.split("/")[1]
        if exchange.seen.method == "GET":
            base = f"https://{ENTRA}/{tenant}"
            ends = {"authorization_endpoint": "authorize", "token_endpoint": "token"}
            document = {name: f"{base}/oauth2/v2.0/{end}" for name, end in ends.items()}
            await _say(exchange, 200, {**document, "issuer": f"{base}/v2.0"})
            return
        form = await _form(exchange)
        if await self._admits(
            exchange, "entra", f"{form.get('client_id')}:{form.get('client_secret')}", form
        ):
            token = self._issue("entra", "eyJ")
            await _say(exchange, 200, {"access_token": token, "token_type": "Bearer", "expires_in": LIFE})

    async def kubernetes(self, exchange: Exchange) -> None:
        """`POST …/serviceaccounts/NAME/token` (authentication.k8s.io/v1 TokenRequest) for a bearer token."""
        body = json.loads(await exchange.body() or b"{}")
        given = (exchange.seen.header("authorization") or "").removeprefix("Bearer ")
        if await self._admits(exchange, "kubernetes", given, body):
            status = {"token": self._issue("kubernetes", "eyK"), "expirationTimestamp": _ahead()}
            await _say(exchange, 201, {**body, "status": status})

    async def queue(self, exchange: Exchange) -> None:
        """The users of a RabbitMQ (its management API): a password is good for as long as its user is there."""
        words = exchange.seen.path.strip("/").split("/")
        body = json.loads(await exchange.body() or b"{}")
        if not await self._admits(exchange, "queue", _basic(exchange), {"user": words[-1]}):
            return
        if words[:2] == ["api", "users"] and exchange.seen.method == "PUT":
            self._live.setdefault("queue", set()).add(body["password"])
            self.issued.append(body["password"])
            self._expected[f"user {words[2]}"] = body["password"]
        elif words[:2] == ["api", "users"] and exchange.seen.method == "DELETE":
            self._take_back("queue", self._expected.get(f"user {words[2]}", ""))
        await exchange.reply(204)

    async def _admits(
        self, exchange: Exchange, issuer: str, given: str, asked: dict[str, Any], *, signed: bool = False
    ) -> bool:
        """Is this who may ask? If not, it is told so here."""
        expected = self._expected.get(issuer, "")
        self.asked.append({"issuer": issuer, **asked})
        if not expected:
            await _say(exchange, 503, {"error": "temporarily_unavailable"})
            return False
        if signed:
            self.asked[-1]["claims"] = claims = _claims(given, expected)
            right = bool(claims) and float(claims.get("exp", 0)) > time.time()
        else:
            right = secrets.compare_digest(given.encode(), expected.encode())
        if not right:
            await _say(exchange, 401, {"error": "invalid_client"})
        return right

    def _issue(self, issuer: str, prefix: str) -> str:
        token = prefix + secrets.token_hex(20)
        self.issued.append(token)
        self._live.setdefault(issuer, set()).add(token)
        return token

    def _take_back(self, issuer: str, token: str) -> None:
        self._live.get(issuer, set()).discard(token)


async def _form(exchange: Exchange) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs((await exchange.body()).decode()).items()}


async def _say(exchange: Exchange, status: int, value: dict[str, Any]) -> None:
    await exchange.reply(status, json.dumps(value).encode(), _JSON)


def _basic(exchange: Exchange) -> str:
    """`user:password`, form-encoded as RFC 6749 section 2.3.1 has them; empty where there is none."""
    scheme, _, value = (exchange.seen.header("authorization") or "").partition(" ")
    try:
        return unquote_plus(base64.b64decode(value).decode()) if scheme == "Basic" else ""
    except (binascii.Error, UnicodeDecodeError):
        return ""


def _ahead() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + LIFE))


def _claims(token: str, public: str) -> dict[str, Any]:
    """The claims of a JWT that this key signed (RS256, RFC 7515); none of any other."""
    try:
        head, _, signature = token.rpartition(".")
        key = serialization.load_pem_public_key(public.encode())
        assert isinstance(key, rsa.RSAPublicKey)
        key.verify(_decoded(signature), head.encode(), padding.PKCS1v15(), hashes.SHA256())
        claims = json.loads(_decoded(head.partition(".")[2]))
    except (InvalidSignature, ValueError):
        return {}
    return claims if isinstance(claims, dict) else {}


def _decoded(part: str) -> bytes:
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
