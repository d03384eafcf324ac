"""One credential by itself: that its source says all it needs, and that what comes of it fits into the request as told.

What is refused here could never work, or would give a secret away; what is only doubtful is a warning.
"""

from __future__ import annotations

from egressd.policy.credential import AzureSource, Credential, OAuth2Source, Placeholder, Source
from egressd.policy.requests import RequestPattern, parse_request_pattern
from egressd.rulefiles.document import Document, Step
from egressd.rulefiles.problems import Code, Findings

_BARE = frozenset({"oauth2", "github_app", "gcp", "azure", "kubernetes", "exec"})
"""Sources whose tokens come without the word `Bearer`."""

_ONLY_FOR = {
    "refresh_token": ("refresh_token",),
    "subject_token": ("token_exchange",),
}
_OURS = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "SHELL",
        "TERM",
        "LANG",
        "TZ",
        "PWD",
        "IFS",
        "ENV",
        "BASH_ENV",
        "PYTHONPATH",
        "NODE_OPTIONS",
    }
)
_OUR_PREFIXES = ("EGRESSD_", "LC_", "LD_", "DYLD_")
_OUR_ENDINGS = ("_CA_BUNDLE", "_CERT_FILE", "_CERT_DIR", "_CAINFO", "_CA_CERTS", "_PROXY")


def check_credential(name: str, credential: Credential, document: Document, findings: Findings) -> None:
    """Add the problems that one credential has whatever the rules say."""
    one = _One(name, credential, document, findings)
    one.check_source()
    one.check_attach()


class _One:
    """A credential being checked."""

    def __init__(self, name: str, credential: Credential, document: Document, findings: Findings) -> None:
        self._name = name
        self._credential = credential
        self._document = document
        self._findings = findings

    def check_source(self) -> None:
        source = self._credential.source
        command = source.exec.command[0] if source.exec is not None else "/"
        if "/" in command and not command.startswith("/"):
            message = "a relative path: which command runs would depend on where egressd starts"
            self._note(
                ("source", "exec", "command", 0), Code.BAD_VALUE, message, "like /usr/local/bin/forge-token"
            )
        if source.oauth2 is not None:
            self._check_oauth2(source.oauth2)
        if source.aws_sts is not None and (source.aws_sts.access_key_id is None) != (
            source.aws_sts.secret_access_key is None
        ):
            message = "`access_key_id` and `secret_access_key` come together"
            hint = "give both; or neither, and botocore looks in egressd's own environment"
            self._note(("source", "aws_sts"), Code.MISSING_KEY, message, hint)
        if source.azure is not None:
            self._check_azure(source.azure)

    def _check_oauth2(self, oauth2: OAuth2Source) -> None:
        where = ("source", "oauth2")
        for key, grants in _ONLY_FOR.items():
            if getattr(oauth2, key) is not None and oauth2.grant not in grants:
                message = f"`{key}` is not for the grant {oauth2.grant}"
                self._note(
                    (*where, key),
                    Code.NOT_TOGETHER,
                    message,
                    f"write `grant: {grants[0]}`, or remove it",
                    key=True,
                )
        if oauth2.client_secret is not None and oauth2.authentication == "none":
            message = "`client_secret` with `authentication: none`"
            self._note(
                (*where, "client_secret"),
                Code.NOT_TOGETHER,
                message,
                "write basic or post, or remove it",
                key=True,
            )

    def _check_azure(self, azure: AzureSource) -> None:
        given = [key for key in ("client_secret", "federated_token") if getattr(azure, key) is not None]
        if len(given) != 1:
            message = "exactly one of client_secret, federated_token"
            code = Code.NOT_TOGETHER if given else Code.MISSING_KEY
            self._note(
                ("source", "azure"), code, message, "a federated token needs no secret that lives long"
            )

    def check_attach(self) -> None:
        attach, source = self._credential.attach, self._credential.source
        if attach.sigv4 is not None and source.kind not in ("aws_sts", "vault"):
            message = f"`sigv4` signs with AWS keys, which `{source.kind}` does not give"
            self._note(
                ("attach", "sigv4"), Code.ATTACH_MISFIT, message, "use `source: {aws_sts: ...}`", key=True
            )
        if source.aws_sts is not None and attach.sigv4 is None:
            message = f"`aws_sts` gives AWS keys, which go by signature and not by `{attach.kind}`"
            hint = "write `attach: {sigv4: {service: s3, region: eu-west-1}}`"
            self._note(("attach", attach.kind), Code.ATTACH_MISFIT, message, hint, key=True)
        self._check_header(attach.header, source)
        if attach.path is not None:
            self._check_path()
        if attach.placeholder is not None:
            self._check_placeholder(attach.placeholder)

    def _check_header(self, header: str | None, source: Source) -> None:
        if header == "authorization" and source.kind in _BARE:
            message = f"`authorization` would hold the bare token of `{source.kind}`, without a scheme"
            self._note(("attach", "header"), Code.ATTACH_DOUBTFUL, message, "write `attach: {bearer: true}`")
        if header == "cookie":
            message = "`header: cookie` makes the secret the whole field, its name included"
            self._note(("attach", "header"), Code.ATTACH_DOUBTFUL, message, "write `attach: {cookie: NAME}`")

    def _check_path(self) -> None:
        """The path is judged with `{NAME}` in it, and again with the secret: only `*` covers both."""
        for index, binding in enumerate(self._credential.for_):
            if not any(takes_path(text) for text in binding.requests):
                message = "no request here has a `*` where `{NAME}` could stand, and then the secret"
                where = ("for", index, "requests")
                self._note(where, Code.ATTACH_MISFIT, message, 'like "POST /services/*/send"', key=True)

    def _check_placeholder(self, placeholder: Placeholder) -> None:
        variable = placeholder.variable
        if variable in _OURS or variable.startswith(_OUR_PREFIXES) or variable.upper().endswith(_OUR_ENDINGS):
            message = "a variable that egressd sets, or that steers programs"
            hint = "name the one that the client reads its key from, like ANTHROPIC_API_KEY"
            self._note(("attach", "placeholder", "variable"), Code.ATTACH_MISFIT, message, hint)
        if placeholder.headers is None:
            for index, binding in enumerate(self._credential.for_):
                if not any(takes_parameter(text, placeholder.query or []) for text in binding.requests):
                    message = "no request here lets the placeholder stand in its query"
                    hint = "leave the query out of a pattern, or end it with `&*`"
                    self._note(("for", index, "requests"), Code.ATTACH_MISFIT, message, hint, key=True)

    def _note(
        self, steps: tuple[Step, ...], code: Code, message: str, hint: str = "", *, key: bool = False
    ) -> None:
        where = ("credentials", self._name, *steps)
        place = self._document.key_place(*where) if key else self._document.place(*where)
        self._findings.add(self._document.path, place, code, message, hint)


def takes_path(request: str) -> bool:
    """Say whether a pattern covers a path both with a placeholder and with a secret in it."""
    pattern = parse_request_pattern(request)
    return not isinstance(pattern, RequestPattern) or pattern.path.rank > 0


def takes_parameter(request: str, keys: list[str]) -> bool:
    """Say whether a pattern covers a query in which one of `keys` has a value that no pattern can spell."""
    pattern = parse_request_pattern(request)
    if not isinstance(pattern, RequestPattern) or pattern.query is None:
        return True
    return pattern.query.open and not {key.lower() for key in keys} <= pattern.query.keys


def loses_parameter(request: str, key: str) -> bool:
    """Say whether a pattern asks for a parameter that is taken out of the request, as the credential's own slot."""
    pattern = parse_request_pattern(request)
    return (
        isinstance(pattern, RequestPattern)
        and pattern.query is not None
        and key.lower().replace("-", "_") in {known.replace("-", "_") for known in pattern.query.keys}
    )
