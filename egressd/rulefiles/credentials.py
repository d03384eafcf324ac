"""Credentials as rules see them: that a named one exists, that its own definition covers the rule, that no two meet.

The binding lives with the secret (law 7): a rule can only use a credential where the credential's `for:` says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from egressd.policy.effective import EffectiveEntry
from egressd.policy.model import Id, Said, SchemaVersion, Text, Texts, UnfitError
from egressd.policy.requests import RequestPattern, parse_request_pattern
from egressd.rulefiles.document import Document
from egressd.rulefiles.hosts import read_pattern
from egressd.rulefiles.overlaps import HostIndex, covers, patterns, request_covers, requests_meet
from egressd.rulefiles.problems import Code, Findings, Place
from egressd.rulefiles.services import check_request
from egressd.rulefiles.shape import did_you_mean
from egressd.rulefiles.yaml import parse_model

type Free = str | int | bool | list[Free] | dict[str, Free]


def _printable(values: dict[str, Free]) -> dict[str, Free]:
    """No text here is more than a line: a control character would end the header or the path that it becomes a part of."""
    waiting: list[Free] = [values]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            waiting += value
        elif isinstance(value, str) and not value.isprintable():
            raise UnfitError("bad_value", "a text holds a control character, or one that nobody sees")
    return values


class Binding(Said):
    """Hosts and requests that a credential may be attached to."""

    hosts: Texts
    requests: Texts


class Credential(Said):
    """A reference to a secret and where it may go; what `source` and `attach` hold is the broker's to judge."""

    for_: Annotated[list[Binding], Field(min_length=1, alias="for")]
    source: Annotated[dict[Text, Free], Field(min_length=1, max_length=1), AfterValidator(_printable)]
    attach: Annotated[dict[Text, Free], Field(min_length=1), AfterValidator(_printable)]
    client_credentials: Literal["strip", "deny"] = "strip"


class CredentialsFile(Said):
    """credentials.yaml: references to secrets, never secrets."""

    schema_version: SchemaVersion = Field(alias="schema")
    credentials: Annotated[dict[Id, Credential], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Used:
    """An effective entry with a credential, and where that is written."""

    entry: EffectiveEntry
    path: str
    place: Place


def read_credentials(content: bytes, path: str, findings: Findings) -> CredentialsFile | None:
    """Return the credentials file, or None after adding its problems."""
    loaded = parse_model(content, path, CredentialsFile, findings, quotes=False)
    if loaded is None:
        return None
    model, document = loaded
    for name, credential in model.credentials.items():
        for index, binding in enumerate(credential.for_):
            _check_binding(name, index, binding, document, findings)
    return model


def check_uses(uses: list[Used], known: CredentialsFile | None, findings: Findings) -> None:
    """Add the problems of every use of a credential in one profile; without a file only its own shape is judged."""
    for used in uses:
        _check_use(used, findings)
        if known is not None and used.entry.credential is not None:
            _check_known(used, used.entry.credential, known, findings)
    if known is None and uses:
        names = ", ".join(sorted({used.entry.credential or "" for used in uses}))
        first = min(uses, key=lambda used: used.place)
        message = f"not checked against their definitions: {names}"
        findings.add(first.path, first.place, Code.CREDENTIAL_UNCHECKED, message, "give --credentials FILE")
    _check_conflicts(uses, findings)


def _check_binding(name: str, index: int, binding: Binding, document: Document, findings: Findings) -> None:
    for position, host in enumerate(binding.hosts):
        place = document.place("credentials", name, "for", index, "hosts", position)
        read_pattern(host, document.path, place, findings, permits=True)
    for position, request in enumerate(binding.requests):
        steps = ("credentials", name, "for", index, "requests", position)
        check_request(request, document.path, document, steps, findings)


def _check_use(used: Used, findings: Findings) -> None:
    entry = used.entry
    if entry.schemes != ("https",):
        hint = "leave http out; a credential is attached over verified https only"
        findings.add(
            used.path,
            used.place,
            Code.CREDENTIAL_CONSTRAINT,
            "`credential` with a scheme other than https",
            hint,
        )
    if not entry.hosts:
        message = "`credential` without hosts: what it is for is said by name"
        findings.add(used.path, used.place, Code.CREDENTIAL_CONSTRAINT, message)
    if not entry.requests:
        via = f" (nor does {entry.via})" if entry.via else ""
        hint = "name the requests that may carry it"
        findings.add(
            used.path, used.place, Code.CREDENTIAL_CONSTRAINT, f"`credential` without `requests`{via}", hint
        )
    if entry.treatment != "inspect":
        message = (
            f"`credential` needs an inspected connection; {entry.via or 'this one'} is a {entry.treatment}"
        )
        findings.add(used.path, used.place, Code.CREDENTIAL_CONSTRAINT, message)


def _check_known(used: Used, name: str, known: CredentialsFile, findings: Findings) -> None:
    credential = known.credentials.get(name)
    if credential is None:
        names = sorted(known.credentials)
        message = f"there is no credential {name!r}{did_you_mean(name, names)}"
        findings.add(used.path, used.place, Code.UNKNOWN_CREDENTIAL, message, f"known: {', '.join(names)}")
        return
    for host in patterns(used.entry.hosts):
        bindings = [
            binding
            for binding in credential.for_
            if any(covers(wide, host) for wide in patterns(binding.hosts))
        ]
        bound = [request for binding in bindings for request in _parsed(binding.requests)]
        for request in _parsed(used.entry.requests):
            if not any(request_covers(wide, request) for wide in bound):
                shown = f"{'*.' if host.wildcard else ''}{'.'.join(host.name)}"
                message = f"{name!r} is not for {request.text!r} at {shown}"
                hint = "widen the credential's `for:`, or narrow this entry"
                findings.add(used.path, used.place, Code.CREDENTIAL_NOT_COVERED, message, hint)
                return


def _parsed(texts: Iterable[str]) -> list[RequestPattern]:
    found = (parse_request_pattern(text) for text in texts)
    return [pattern for pattern in found if isinstance(pattern, RequestPattern)]


def _check_conflicts(uses: list[Used], findings: Findings) -> None:
    """Two credentials for one request: which one went out would hang on the order of a file."""
    index = HostIndex(used.entry for used in uses)
    order = {id(used.entry): position for position, used in enumerate(uses)}
    for position, used in enumerate(uses):
        told: set[str] = set()
        for pattern in patterns(used.entry.hosts):
            for other in index.meeting(pattern):
                earlier = order[id(other)] < position
                if not earlier or other.credential == used.entry.credential or other.id in told:
                    continue
                if requests_meet(used.entry, other):
                    told.add(other.id)
                    message = f"{used.entry.credential!r} here and {other.credential!r} at {other.place} for one request"
                    hint = "let their requests or hosts differ"
                    findings.add(used.path, used.place, Code.CREDENTIAL_CONFLICT, message, hint)
