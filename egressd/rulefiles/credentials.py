"""credentials.yaml, read: what each credential is by itself. No problem of this file ever shows a value of it.

Whoever makes a mistake here may have written a secret where only a reference can stand. So a problem says the place and what to
write, and shows no more of the file than words that everybody knows, host names and requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from egressd.policy.credential import Credential, CredentialsFile
from egressd.rulefiles import secrets
from egressd.rulefiles.credential_shape import check_credential
from egressd.rulefiles.document import Document, Node, Step
from egressd.rulefiles.hosts import read_pattern, shared_suffix
from egressd.rulefiles.problems import Code, Findings, Place, Problems, quoted
from egressd.rulefiles.services import check_request
from egressd.rulefiles.shape import Told, fit
from egressd.rulefiles.yaml import load_document, read_bytes

_EXAMPLE = "rules/credentials.example.yaml shows every source and every way to attach"
_HINTS = {
    **dict.fromkeys(("file", "ca"), "the whole path, like /run/secrets/NAME"),
    "env": "a variable of egressd's own environment, like FORGE_TOKEN",
    **dict.fromkeys(
        ("token_url", "revocation_url", "iam_url", "address", "endpoint", "server", "api", "authority"),
        "begin with https://; only a service of this machine may be plain: http://127.0.0.1:8200",
    ),
    "source": "exactly one, like `source: {file: /run/secrets/NAME}`",
    "attach": "exactly one, like `attach: {bearer: true}` or `attach: {header: x-api-key}`",
    "for": 'like `for: [{hosts: [api.example.com], requests: ["GET /v1/**"]}]`',
    "schema": "write `schema: 1`",
    "auth": "exactly one of token, approle, jwt",
    "credentials": "like `credentials: {forge: {for: [...], source: {...}, attach: {...}}}`",
    "client_credentials": "strip takes the sandbox's own keys out, deny refuses the request",
    "bearer": "write `bearer: true`; the secret comes from `source` by itself",
    **dict.fromkeys(
        ("header", "headers", "slots"), "a header field's name that carries keys, like x-api-key"
    ),
    **dict.fromkeys(("timeout", "duration", "lifetime", "length"), "a whole number within these bounds"),
    "placeholder": "like `placeholder: {variable: API_KEY, prefix: sk-, length: 51, headers: [x-api-key]}`",
    "command": "a list: [/usr/local/bin/NAME, argument]",
    "hosts": "a list of names, like [api.example.com]",
    "requests": 'a list, like ["GET /v1/**"]',
}
"""What to write, by the key that is wrong."""


@dataclass(frozen=True, slots=True)
class Known:
    """The credentials file, with the places of what it says."""

    model: CredentialsFile = field(repr=False)
    document: Document = field(repr=False)


def load_credentials(path: Path) -> CredentialsFile | Problems:
    """Return what the file at `path` says, or all its problems, none of which shows a value of it. Total; reads one file."""
    findings = Findings()
    content = read_bytes(path, str(path), findings)
    known = read_credentials(content, str(path), findings) if content is not None else None
    return known.model if known is not None and not findings.count else findings.problems()


def read_credentials(content: bytes, path: str, findings: Findings) -> Known | None:
    """Return the credentials file, or None after adding its problems. Total."""
    document = load_document(content, path, findings, quotes=False)
    if document is None:
        return None
    before = findings.count
    told = _check_texts(document, findings)
    model = fit(
        document,
        CredentialsFile,
        findings,
        quotes=False,
        reword=lambda said, detail: None if said.place in told else _reworded(said, detail),
    )
    if model is None or findings.count != before:
        return None
    for name, credential in model.credentials.items():
        _check_bindings(name, credential, document, findings)
        check_credential(name, credential, document, findings)
    return Known(model, document)


def _check_texts(document: Document, findings: Findings) -> set[Place]:
    """Add the problems of single texts, whatever they are for; return their places, of which no more needs to be said."""
    told: set[Place] = set()
    for place in secrets.written_secrets(document.root):
        findings.add(
            document.path, place, Code.INLINE_SECRET, f"a secret itself: {secrets.NEVER}", secrets.REFER
        )
        told.add(place)
    for place, text in _texts(document.root):
        if not text.isprintable() and place not in told:
            message = "a text holds a control character, or one that nobody sees"
            findings.add(
                document.path, place, Code.BAD_VALUE, message, "remove it; no text here has two lines"
            )
            told.add(place)
    return told


def _texts(root: Node) -> Iterator[tuple[Place, str]]:
    """Yield every text of the file, keys too: none is more than a line, for it becomes a part of a header or a path."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node.scalar, str):
            yield node.place, node.scalar
        yield from ((place, key) for key, place in node.keys.items())
        waiting += [*(node.items or ()), *(node.fields or {}).values()]


def _reworded(said: Told, detail: Mapping[str, Any]) -> Told:
    """Say what does not fit without a word of the file, and always with a way out."""
    kind, steps, given = detail["type"], detail["loc"], detail["input"]
    last = str(steps[-1]) if steps else ""
    if kind == "extra_forbidden":
        return _unknown(said, last, given)
    if said.code is Code.BAD_ID:
        return replace(
            said, message="a name has small letters, digits and single hyphens", hint="like forge-read"
        )
    named = [step for step in steps if isinstance(step, str) and step != "[key]"]
    hint = (
        _HINTS.get(named[-1], _EXAMPLE) if named else f"begin with `schema: 1` and `credentials:`; {_EXAMPLE}"
    )
    if kind in ("model_type", "model_attributes_type", "dict_type") and isinstance(given, str | int | float):
        message = f"expected a mapping, found {_kind(given)}: {secrets.NEVER}"
        if detail.get("ctx", {}).get("class_name") == "SecretRef":
            return replace(said, code=Code.INLINE_SECRET, message=message, hint=secrets.REFER)
        return replace(said, message=message, hint=hint)
    message = said.message.removeprefix("this: ")
    if said.message.startswith("this") and message == said.message:
        message = f"no such `{last}`{said.message.removeprefix('this')}"
    return replace(said, message=message, hint=_own(said, kind, last) or hint)


def _kind(given: str | float) -> str:
    return "a text" if isinstance(given, str) else "a number"


def _own(said: Told, kind: str, last: str) -> str:
    """The hint that was there already, where it says more than the key's own and holds nothing of the file."""
    said_better = kind in ("literal_error", "too_short", "string_too_short") and last != "bearer"
    return said.hint if said_better else ""


def _unknown(said: Told, key: str, given: object) -> Told:
    shown = quoted(key) if secrets.is_word(key) else "a key that nothing here is called"
    if secrets.says_secret(key) and not isinstance(given, dict | list):
        return replace(said, code=Code.INLINE_SECRET, message=f"{shown}: {secrets.NEVER}", hint=secrets.REFER)
    _, near, meant = said.message.partition(" (did you mean ")
    hint = f"write {meant.removesuffix('?)')}" if near else said.hint
    return replace(said, message=f"{shown}{near}{meant}", hint=hint)


def _check_bindings(name: str, credential: Credential, document: Document, findings: Findings) -> None:
    for index, binding in enumerate(credential.for_):
        where: tuple[Step, ...] = ("credentials", name, "for", index)
        for position, host in enumerate(binding.hosts):
            place = document.place(*where, "hosts", position)
            _check_host(host, document.path, place, findings)
            if credential.attach.sigv4 is None and (suffix := shared_suffix(host)) is not None:
                message = f"{quoted(host)} covers names that anybody can get at {suffix}; whoever has one gets the secret"
                findings.add(
                    document.path, place, Code.SHARED_SUFFIX, message, "name the hosts that are needed"
                )
        for position, request in enumerate(binding.requests):
            apart = Findings()
            shown = secrets.shows_request(request)
            check_request(
                request, document.path, document, (*where, "requests", position), findings if shown else apart
            )
            _withheld(apart, "this is no request", 'like "GET,HEAD /path/**"', findings)


def _check_host(host: str, path: str, place: Place, findings: Findings) -> None:
    apart = Findings()
    read_pattern(host, path, place, findings if secrets.shows_host(host) else apart, permits=True)
    _withheld(
        apart, "this is no host in normal form", "a name in small letters, like api.example.com", findings
    )


def _withheld(apart: Findings, message: str, hint: str, findings: Findings) -> None:
    """Add problems whose own words would show what may be a secret."""
    for problem in apart.errors:
        findings.add(problem.path, Place(problem.line, problem.column), problem.code, message, hint)
