"""What credentials.yaml may say: references to secrets and where each may go, never a secret.

These models hold the shape. What needs files, public suffixes or other entries is judged in `rulefiles`; the sources are read by
`credentials.providers` alone.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from egressd.policy.model import Said
from egressd.policy.values import Id, SchemaVersion, Text, Texts, UnfitError

MOST_LIFETIME = 12 * 3600
"""Longest life, in seconds, that a source may be asked to give a lease."""

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_FRAMING = frozenset(
    {
        "host",
        "connection",
        "content-length",
        "transfer-encoding",
        "te",
        "trailer",
        "upgrade",
        "expect",
        "keep-alive",
    }
    | {"accept-encoding", "range", "content-encoding", "http2-settings"}
)


def _printable(value: str) -> str:
    """A control character would end the header or the path that the text becomes a part of."""
    if value.isprintable():
        return value
    raise UnfitError("bad_value", "a text holds a control character, or one that nobody sees")


def _field_name(value: str) -> str:
    lower = value.lower()
    if not _TOKEN.fullmatch(value) or lower in _FRAMING or lower.startswith(("proxy-", "x-egressd-")):
        raise UnfitError(
            "bad_value", "a header field's name that neither frames nor routes the message, like x-api-key"
        )
    return lower


def _token(value: str) -> str:
    if not _TOKEN.fullmatch(value):
        raise UnfitError("bad_value", "a name of letters, digits and -._~, without spaces")
    return value


def _variable(value: str) -> str:
    if not _VARIABLE.fullmatch(value):
        raise UnfitError("bad_value", "a variable's name, like ANTHROPIC_API_KEY")
    return value


def _absolute(value: str) -> str:
    if not value.startswith("/") or "/../" in f"{value}/" or "\0" in value:
        raise UnfitError("bad_value", "an absolute path without `..`, like /run/secrets/name")
    return value


def _https(value: str) -> str:
    if not re.fullmatch(r"https://[^\s/?#@]+(/[^\s?#]*)?", value):
        raise UnfitError("bad_value", "an https URL without user, query or fragment")
    return value


def _service_url(value: str) -> str:
    """Loopback may be plain: a Vault agent or a fake beside egressd."""
    if re.fullmatch(r"http://(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?(/[^\s?#]*)?", value):
        return value
    return _https(value)


type Line = Annotated[Text, AfterValidator(_printable)]
type FieldName = Annotated[Text, AfterValidator(_field_name)]
type TokenText = Annotated[Text, AfterValidator(_token)]
type Variable = Annotated[Text, AfterValidator(_variable)]
type AbsolutePath = Annotated[Text, AfterValidator(_printable), AfterValidator(_absolute)]
type ServiceUrl = Annotated[Text, AfterValidator(_service_url)]
type Lifetime = Annotated[int, Field(ge=60, le=MOST_LIFETIME)]
"""Seconds."""


class _Choice(Said):
    """Exactly one of its keys is given."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    @model_validator(mode="after")
    def _one(self) -> Self:
        if len(self._given()) != 1:
            raise UnfitError("bad_value", f"exactly one of {', '.join(type(self).model_fields)}")
        return self

    @property
    def kind(self) -> str:
        """The key that is given."""
        return self._given()[0]

    def _given(self) -> list[str]:
        return [name for name in type(self).model_fields if getattr(self, name) is not None]


class SecretRef(_Choice):
    """Where a long-lived secret lies: a file, or a variable of egressd's own environment."""

    file: AbsolutePath | None = None
    env: Variable | None = None


class ExecSource(Said):
    """A command that prints an ExecCredential (client.authentication.k8s.io/v1): `status.token` and `expirationTimestamp`."""

    command: Annotated[list[Line], Field(min_length=1)]
    env: dict[Variable, Line] = Field(default_factory=dict)
    timeout: Annotated[int, Field(ge=1, le=60)] = 10
    """Seconds."""


class OAuth2Source(Said):
    """A token of an OAuth 2.0 server (RFC 6749 client credentials and refresh token, RFC 7523 JWT bearer, RFC 8693 exchange)."""

    token_url: ServiceUrl
    grant: Literal["client_credentials", "refresh_token", "jwt_bearer", "token_exchange"] = (
        "client_credentials"
    )
    client_id: Line | None = None
    client_secret: SecretRef | None = None
    authentication: Literal["basic", "post", "none"] = "basic"
    refresh_token: SecretRef | None = None
    key: SecretRef | None = Field(
        None, description="jwt_bearer: the private key, PEM, that signs the assertion"
    )
    key_id: Line | None = None
    algorithm: Literal["RS256", "ES256", "EdDSA"] = "RS256"
    issuer: Line | None = None
    subject: Line | None = None
    subject_token: SecretRef | None = None
    subject_token_type: Line = "urn:ietf:params:oauth:token-type:access_token"  # noqa: S105 -- the name of a type (RFC 8693 §3)
    audience: Line | None = None
    resource: Line | None = None
    scopes: Annotated[list[Line], Field(min_length=1)] | None = None
    revocation_url: ServiceUrl | None = Field(
        None, description="where a token is given back (RFC 7009); left out: it stays good until it expires"
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        needed: tuple[str, ...] = {
            "client_credentials": ("client_id",),
            "refresh_token": ("refresh_token",),
            "jwt_bearer": ("key",),
            "token_exchange": ("subject_token",),
        }[self.grant]
        if self.grant == "client_credentials" and self.authentication != "none":
            needed += ("client_secret",)
        if self.client_secret is not None:
            needed += ("client_id",)
        missing = [name for name in needed if getattr(self, name) is None]
        if self.grant == "jwt_bearer" and self.issuer is None and self.client_id is None:
            missing.append("issuer")
        if missing:
            raise UnfitError("bad_value", f"the grant {self.grant} needs {' and '.join(missing)} too")
        return self


class GitHubAppSource(Said):
    """An installation token of a GitHub App, for these repositories and permissions only."""

    app_id: Annotated[int, Field(ge=1)]
    installation_id: Annotated[int, Field(ge=1)]
    private_key: SecretRef
    api: ServiceUrl = "https://api.github.com"
    repositories: Annotated[list[TokenText], Field(min_length=1)]
    permissions: Annotated[dict[TokenText, Literal["read", "write"]], Field(min_length=1)]


class AwsStsSource(Said):
    """Keys of AWS STS AssumeRole: with an inline session policy, and session tags from the sandbox's labels."""

    role_arn: Line
    region: TokenText
    access_key_id: Line | None = None
    secret_access_key: SecretRef | None = None
    """Both left out: botocore's own chain of egressd's environment."""
    external_id: Line | None = None
    session_policy: Annotated[dict[Text, Any], Field(min_length=1)] | None = None
    policy_arns: Annotated[list[Line], Field(min_length=1, max_length=10)] | None = None
    tags: Annotated[list[TokenText], Field(min_length=1)] | None = Field(
        None, description="labels of the sandbox that become session tags"
    )
    duration: Annotated[int, Field(ge=900, le=MOST_LIFETIME)] = 900
    endpoint: ServiceUrl | None = None


class GcpSource(Said):
    """An access token of a Google service account, its own or an impersonated one's."""

    key: SecretRef | None = Field(
        None, description="service account key, JSON; left out: application default"
    )
    impersonate: Line | None = None
    scopes: Annotated[list[Line], Field(min_length=1)]
    lifetime: Lifetime = 900
    token_url: ServiceUrl | None = None
    iam_url: ServiceUrl | None = None


class AzureSource(Said):
    """A token of Microsoft Entra ID: by client secret, or by a federated token file."""

    tenant_id: TokenText
    client_id: TokenText
    client_secret: SecretRef | None = None
    federated_token: SecretRef | None = None
    scope: Line
    authority: ServiceUrl = "https://login.microsoftonline.com"


class VaultAppRole(Said):
    """Log in by AppRole."""

    role_id: Line
    secret_id: SecretRef
    mount: TokenText = "approle"


class VaultJwt(Said):
    """Log in by a JWT, a Kubernetes service account token for one."""

    role: Line
    jwt: SecretRef
    mount: TokenText = "jwt"


class VaultAuth(_Choice):
    """How egressd itself logs in: exactly one."""

    token: SecretRef | None = None
    approle: VaultAppRole | None = None
    jwt: VaultJwt | None = None


class VaultSource(Said):
    """A secret of Vault or OpenBao: a field of a kv v2 secret, or of a dynamic one, whose lease is renewed and revoked."""

    address: ServiceUrl
    auth: VaultAuth
    path: Line
    """`secret/data/name` of kv v2, or the path of a dynamic secret such as `aws/creds/role`."""
    field: Line = "value"
    namespace: Line | None = None
    ca: AbsolutePath | None = None


class KubernetesSource(Said):
    """A token of a Kubernetes service account by the TokenRequest API."""

    namespace: TokenText
    service_account: TokenText
    audiences: Annotated[list[Line], Field(min_length=1)] | None = None
    duration: Annotated[int, Field(ge=600, le=MOST_LIFETIME)] = 600
    server: ServiceUrl | None = None
    token: SecretRef | None = None
    ca: AbsolutePath | None = None

    @model_validator(mode="after")
    def _own_token_stays(self) -> Self:
        if self.server is not None and self.token is None:
            raise UnfitError(
                "bad_value",
                "`server` needs `token`: the token of egressd's own cluster is not for other servers",
            )
        return self


class Source(_Choice):
    """Where the credential comes from: exactly one."""

    env: Variable | None = None
    file: AbsolutePath | None = None
    exec: ExecSource | None = None
    oauth2: OAuth2Source | None = None
    github_app: GitHubAppSource | None = None
    aws_sts: AwsStsSource | None = None
    gcp: GcpSource | None = None
    azure: AzureSource | None = None
    vault: VaultSource | None = None
    kubernetes: KubernetesSource | None = None


class SigV4(Said):
    """AWS Signature Version 4: region and service are the credential's, never the client's."""

    service: TokenText
    region: TokenText


class Placeholder(Said):
    """A dummy of the right shape that the sandbox gets; the secret replaces it in the named slots of its destination only.

    `variable` names the sandbox's environment variable that holds it; its text is `prefix` and random characters of `charset`, of
    `length` together.
    """

    variable: Variable
    prefix: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")] = ""
    length: Annotated[int, Field(ge=24, le=512)] = 40
    charset: Literal["alnum", "hex", "base64url", "digits"] = "alnum"
    headers: Annotated[list[FieldName], Field(min_length=1)] | None = None
    query: Annotated[list[TokenText], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.headers is None and self.query is None:
            raise UnfitError("bad_value", "a placeholder names its slots: `headers` or `query`")
        if self.length - len(self.prefix) < 20:
            raise UnfitError(
                "bad_value", "at least 20 characters behind the prefix, or others could guess it"
            )
        return self


class Attach(_Choice):
    """How the credential goes into a request: exactly one."""

    header: FieldName | None = None
    """The secret is the field's whole value."""
    bearer: Literal[True] | None = None
    """`Authorization: Bearer SECRET` (RFC 6750)."""
    basic: Line | None = None
    """`Authorization: Basic`, with this user's name and the secret for the password (RFC 7617); git's is x-access-token."""
    query: TokenText | None = None
    path: TokenText | None = None
    """The path segment `{NAME}` of the request, written by the client, is replaced."""
    cookie: TokenText | None = None
    sigv4: SigV4 | None = None
    placeholder: Placeholder | None = None


class Binding(Said):
    """Hosts and requests that a credential may be attached to."""

    hosts: Texts
    requests: Texts


class Credential(Said):
    """A reference to a secret, where it may go and how it is attached.

    `range: true` lets a `Range` pass; else it is taken out, because a part of a body hides from the mask. `mask` names members of
    JSON responses (`access_token`) whose values are masked. `token_requests: true` lets requests pass that issue tokens of this
    credential's own authority (STS, OAuth token endpoints).
    """

    for_: Annotated[list[Binding], Field(min_length=1, alias="for")]
    source: Source
    attach: Attach
    client_credentials: Literal["strip", "deny"] = "strip"
    slots: Annotated[list[FieldName], Field(min_length=1)] | None = Field(
        None, description="further header fields of this API that hold a key"
    )
    range: bool = False
    mask: Annotated[list[TokenText], Field(min_length=1)] | None = None
    token_requests: bool = False


class CredentialsFile(Said):
    """credentials.yaml: references to secrets, never secrets."""

    schema_version: SchemaVersion = Field(alias="schema")
    credentials: Annotated[dict[Id, Credential], Field(min_length=1)]
