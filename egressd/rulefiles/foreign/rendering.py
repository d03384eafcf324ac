"""A foreign allowlist as a profile of ours: a file that passes `egressd check`, with every note as a comment where it begins."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator

from egressd.policy.model import MOST_OBSERVE_DAYS
from egressd.rulefiles.foreign.allowlist import Form, Permission, Section
from egressd.rulefiles.load import load_source
from egressd.rulefiles.problems import Problems
from egressd.rulefiles.source import ORGANISATION, PROFILES, RuleSource

_USUAL = (443, 80)


def render(section: Section, form: Form, file: str, today: dt.date) -> str:
    """Return the profile's text; raises RuntimeError if it would not load, which no list should bring about."""
    text = "\n".join(_lines(section, form, file, today)) + "\n"
    path = f"{PROFILES}/{section.name}.yaml"
    source = RuleSource({ORGANISATION: b"schema: 1\n", path: text.encode()})
    moment = dt.datetime.combine(today, dt.time(12), dt.UTC).timestamp()
    loaded = load_source(source, now=moment)
    if isinstance(loaded, Problems):
        raise RuntimeError(f"the file would not load:\n{loaded}")
    return text


def _lines(section: Section, form: Form, file: str, today: dt.date) -> Iterator[str]:
    yield "# yaml-language-server: $schema=../schema.json"
    yield f"# Imported from {json.dumps(file)} ({form}) on {today}. Such a list lets every request through to a host that it"
    yield "# names; egressd can say which: narrow `requests:` by what the journal shows, and use services where there are some."
    if section.notes:
        yield "# Not carried over:"
        for note in sorted(section.notes, key=lambda note: note.line):
            yield f"#   line {note.line}: {note.text}: {note.why}{' (LETS THROUGH MORE)' if note.wider else ''}"
    yield "schema: 1"
    yield f"profile: {section.name}"
    yield f"owner: {json.dumps(section.owner or 'nobody yet')}"
    if section.observes:
        yield "mode: observe # the action was `report`"
        yield f"observe_until: {today + dt.timedelta(days=MOST_OBSERVE_DAYS)}"
    if section.allowed:
        yield "allow:"
        for number, permission in enumerate(section.allowed, 1):
            yield from _permission(permission, "" if len(section.allowed) == 1 else f"-{number}")
    if section.denied:
        yield "deny:"
        yield "  - id: imported-denials"
        yield from _hosts(section.denied)


def _permission(permission: Permission, suffix: str) -> Iterator[str]:
    ports = permission.ports
    schemes = "[http]" if ports == (80,) else "[https]" if ports == (443,) else "[https, http]"
    requests = ", ".join(map(json.dumps, permission.requests))
    if permission.hosts:
        yield f"  - id: imported{suffix}"
        yield from _hosts(permission.hosts)
        yield f"    schemes: {schemes}"
        if ports and ports not in ((443,), (80,)):
            yield f"    ports: [{', '.join(map(str, ports))}]"
        yield f"    requests: [{requests}]"
    if permission.addresses:
        yield f"  - id: imported-addresses{suffix}"
        yield "    addresses:"
        yield from (f"      - {json.dumps(one)} # line {line}" for one, line in permission.addresses.items())
        yield f"    schemes: {schemes}"
        yield f"    ports: [{', '.join(map(str, ports or _USUAL))}]"
        yield f"    requests: [{requests}]"


def _hosts(hosts: dict[str, int]) -> Iterator[str]:
    yield "    hosts:"
    yield from (f"      - {json.dumps(one)} # line {line}" for one, line in hosts.items())
