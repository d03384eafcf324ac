"""Credentials as rules see them: that a named one exists, that its own definition covers the rule, that no two meet.

The binding lives with the secret (law 7): a rule can only use a credential where the credential's `for:` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from egressd.policy.credential import Binding, CredentialsFile
from egressd.policy.effective import EffectiveEntry
from egressd.policy.requests import RequestPattern, parse_request_pattern
from egressd.rulefiles.document import Document, Node
from egressd.rulefiles.hosts import read_pattern
from egressd.rulefiles.overlaps import HostIndex, covers, patterns, request_covers, requests_meet
from egressd.rulefiles.problems import Code, Findings, Place, Problems
from egressd.rulefiles.services import check_request
from egressd.rulefiles.shape import did_you_mean, fit
from egressd.rulefiles.yaml import load_document, read_bytes


@dataclass(frozen=True, slots=True)
class Known:
    """The credentials file, with the places of what it says."""

    model: CredentialsFile
    document: Document


@dataclass(frozen=True, slots=True)
class Used:
    """An effective entry with a credential, and where that is written."""

    entry: EffectiveEntry
    path: str
    place: Place


def load_credentials(path: Path) -> CredentialsFile | Problems:
    """Return what the file at `path` says, or all its problems, none of which shows a value of it. Total; reads one file."""
    findings = Findings()
    content = read_bytes(path, str(path), findings)
    known = read_credentials(content, str(path), findings) if content is not None else None
    return known.model if known is not None and not findings.count else findings.problems()


def read_credentials(content: bytes, path: str, findings: Findings) -> Known | None:
    """Return the credentials file, or None after adding its problems."""
    document = load_document(content, path, findings)
    if document is None:
        return None
    before = findings.count
    for place, text in _texts(document.root):
        if not text.isprintable():
            findings.add(
                path, place, Code.BAD_VALUE, "a text holds a control character, or one that nobody sees"
            )
    model = fit(document, CredentialsFile, findings, quotes=False)
    if model is None or findings.count != before:
        return None
    for name, credential in model.credentials.items():
        for index, binding in enumerate(credential.for_):
            _check_binding(name, index, binding, document, findings)
    return Known(model, document)


def _texts(root: Node) -> Iterator[tuple[Place, str]]:
    """Yield every text of the file, keys too: none is more than a line, for it becomes a part of a header or a path."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node.scalar, str):
            yield node.place, node.scalar
        yield from ((place, key) for key, place in node.keys.items())
        waiting += [*(node.items or ()), *(node.fields or {}).values()]


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
