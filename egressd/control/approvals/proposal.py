"""A question as a rule for good: a patch of the profile's file, which passes `egressd check` and carries a test of its own.

Nothing is written: the patch goes the way of every change of rules, by whoever reviews those. What would not load, would not
allow the request, or breaks a test of the rules is not proposed, and why is said.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from egressd.control.approvals.subject import Case, Subject
from egressd.policy.attempt import RequestAttempt
from egressd.policy.compile import DEFAULT_PORTS
from egressd.policy.decide import decide
from egressd.policy.grants import Scope
from egressd.policy.values import slug
from egressd.rulefiles.document import Document
from egressd.rulefiles.load import Rules, load_source
from egressd.rulefiles.problems import Findings, Problems
from egressd.rulefiles.source import PROFILES, RuleSource
from egressd.rulefiles.yaml import load_document


@dataclass(frozen=True, slots=True)
class Proposal:
    """A patch for `patch -p1` or `git apply` in the rules folder; `file` is what it changes, `rule` the new rule's id."""

    file: str
    rule: str
    patch: str


class NoProposal(Exception):
    """No such rule is proposed; the text says why."""


def propose(source: RuleSource, case: Case, scope: Scope, note: str, now: float) -> Proposal:
    """Return the patch that allows what was asked for, in this scope, for good; raises NoProposal. Reads and writes nothing."""
    subject, path = case.subject, f"{PROFILES}/{case.profile}.yaml"
    content = source.files.get(path)
    if content is None:
        raise NoProposal(f"the rules have no file {path}")
    requests = _requests(subject, scope)
    rule = _rule_id(subject, content)
    text = content.decode("utf-8", "strict")
    made = _insert(text, path, "allow", list(_entry(rule, case, scope, requests, note)))
    made = _insert(
        made, path, "tests", [f"- {{allow: {json.dumps(_sample(subject))}, rule: {json.dumps(rule)}}}"]
    )
    changed = RuleSource(source.files | {path: made.encode()}, source.root)
    found = decide(_loaded(changed, now, tested=False).compiled(case.profile), subject.attempt, now)
    if not found.allowed or found.entry is None or found.entry.id != rule:
        raise NoProposal("another rule would still decide: change that one by hand")
    _loaded(changed, now, tested=True)
    return Proposal(path, rule, _diff(text, made, path))


def _loaded(source: RuleSource, now: float, *, tested: bool) -> Rules:
    loaded = load_source(source, now=now, tested=tested)
    if isinstance(loaded, Problems):
        first = str(next(iter(loaded))).splitlines()[0]
        raise NoProposal(f"the rules would not load with it: {first}")
    return loaded


def _requests(subject: Subject, scope: Scope) -> str | None:
    if scope == "connection" or subject.opaque:
        if scope != "connection" or not subject.opaque:
            raise NoProposal("that scope is none of what was asked for")
        return None
    if scope == "host":
        return "ANY /**"
    path = subject.template if scope == "template" else subject.path
    if path is None:
        raise NoProposal("that scope is none of what was asked for")
    if scope == "request" and "*" in path:
        raise NoProposal("a path with a * of its own cannot be spelled in a rule")
    return f"{subject.method} {path}"


def _rule_id(subject: Subject, content: bytes) -> str:
    stem = f"approved-{slug(subject.host)}"[:56].strip("-")
    return next(
        name for n in range(1, 1000) if (name := stem if n == 1 else f"{stem}-{n}").encode() not in content
    )


def _entry(rule: str, case: Case, scope: Scope, requests: str | None, note: str) -> Iterator[str]:
    subject, asks = case.subject, case.entry
    yield f"- id: {json.dumps(rule)}"
    yield f"  hosts: [{json.dumps(subject.host)}]"
    if subject.scheme == "http":
        yield "  schemes: [http]"
    if subject.opaque:
        yield f"  treatment: {'relay' if subject.scheme == 'tcp' else 'tunnel'}"
    if subject.scheme == "tcp" or DEFAULT_PORTS[subject.scheme] != subject.port:
        yield f"  ports: [{subject.port}]"
    if asks is not None and asks.addresses:
        yield f"  addresses: [{', '.join(json.dumps(net) for net in asks.addresses)}]"
    if requests is not None:
        yield f"  requests: [{json.dumps(requests)}]"
    if asks is not None and asks.credential is not None and scope != "host":
        yield f"  credential: {json.dumps(asks.credential)}"
    yield f"  because: {json.dumps(note)}"


def _sample(subject: Subject) -> str:
    if subject.opaque and subject.scheme == "https":
        return (
            f"GET https://{subject.host}:{subject.port}/"
            if subject.port != 443
            else f"GET https://{subject.host}/"
        )
    attempt = subject.attempt
    return subject.what if not isinstance(attempt, RequestAttempt) or subject.path else f"{subject.what}/"


def _insert(text: str, path: str, key: str, lines: list[str]) -> str:
    """Return the file with an item put first into a block list of its top level, which is made at its end if there is none."""
    document = load_document(text.encode(), path, Findings())
    if document is None or document.root.fields is None:
        raise NoProposal(f"{path} cannot be read")
    rows = text.splitlines(keepends=True)
    if rows and not rows[-1].endswith("\n"):
        rows[-1] += "\n"
    if key not in document.root.fields:
        return "".join([*rows, f"{key}:\n", *(f"  {line}\n" for line in lines)])
    at, indent = _first(document, key, rows)
    return "".join([*rows[:at], *(f"{indent}{line}\n" for line in lines), *rows[at:]])


def _first(document: Document, key: str, rows: list[str]) -> tuple[int, str]:
    """Return before which row (from 0) the first item of a list stands, and how far in."""
    node = document.root.fields[key] if document.root.fields is not None else None
    row = node.items[0].place.line - 1 if node is not None and node.items else -1
    line = rows[row] if 0 <= row < len(rows) else ""
    if not line.lstrip(" ").startswith("- ") or row < document.key_place(key).line:
        raise NoProposal(
            f"`{key}` is not written as one item a line, so no patch is made; `egressd fmt` lays it out"
        )
    return row, line[: len(line) - len(line.lstrip(" "))]


def _diff(before: str, after: str, path: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
