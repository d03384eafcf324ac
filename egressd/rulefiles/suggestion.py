"""Proposed rules as a file of a group, which passes `egressd check` and carries its evidence and its tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from egressd.policy.compile import compile_policy
from egressd.policy.values import slug
from egressd.rulefiles.ceiling import excess
from egressd.rulefiles.claims import judge
from egressd.rulefiles.load import Rules, load_source
from egressd.rulefiles.problems import Problems, printable
from egressd.rulefiles.requestline import Asked, parse_request_line
from egressd.rulefiles.source import GROUPS, RuleSource
from egressd.rulefiles.suggest import Proposal, Wishes

MOST_REQUESTS = 64
MOST_TESTS = 3


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A file and what could not be put into it, by why."""

    text: str
    rules: int


def suggestion(wishes: Wishes, proposals: list[Proposal], group: str) -> Suggestion | Problems:
    """Return the file, with what could not stand in it left out and counted; Problems only if it then does not load."""
    taken = {entry.id for entry in wishes.rules.effective(wishes.profile).entries}
    named: list[tuple[str, Proposal]] = []
    for proposal in proposals:
        named.append((_named(proposal, taken), proposal))
        taken.add(named[-1][0])
    loaded = _loaded(wishes, named, group)
    if isinstance(
        loaded, Problems
    ):  # find which: one of many texts that programs chose is no pattern after all
        whys = {name: _unloadable(wishes, name, proposal, group) for name, proposal in named}
        named = _kept(wishes, named, whys)
        loaded = _loaded(wishes, named, group) if named else loaded
    if named and not isinstance(loaded, Problems):
        named = _kept(wishes, named, _unfit(wishes, loaded, named, group))
        loaded = _loaded(wishes, named, group) if named else loaded
    if not named:
        return Suggestion("", 0)
    return loaded if isinstance(loaded, Problems) else Suggestion(_text(wishes, named, group), len(named))


def _kept(
    wishes: Wishes, named: list[tuple[str, Proposal]], whys: dict[str, str | None]
) -> list[tuple[str, Proposal]]:
    for name, proposal in named:
        why = whys[name]
        if why is not None:
            wishes.left_out[why] += proposal.evidence.times
    return [one for one in named if whys[one[0]] is None]


def _loaded(wishes: Wishes, named: list[tuple[str, Proposal]], group: str) -> Rules | Problems:
    source = wishes.rules.source
    text = _text(wishes, named, group)
    return load_source(
        RuleSource(source.files | {f"{GROUPS}/{group}.yaml": text.encode()}, source.root), now=wishes.now
    )


def _unloadable(wishes: Wishes, name: str, proposal: Proposal, group: str) -> str | None:
    loaded = _loaded(wishes, [(name, proposal)], group)
    return "what would make no valid rule" if isinstance(loaded, Problems) else None


def _unfit(
    wishes: Wishes, loaded: Rules, named: list[tuple[str, Proposal]], group: str
) -> dict[str, str | None]:
    """Return of each rule why it cannot be proposed: the ceiling has no room for it, or it would not help."""
    names = {name for name, _ in named}
    entries = [one for one in loaded.groups[group].effective.entries if one.id in names]
    top = loaded.top
    over = {one.id for one in entries if top is not None and excess(top, one)}
    effective = wishes.rules.effective(wishes.profile)
    widened = compile_policy(effective.model_copy(update={"entries": (*effective.entries, *entries)}))
    whys: dict[str, str | None] = {}
    for name, proposal in named:
        asked = [parse_request_line(sample) for sample in proposal.samples]
        helps = all(isinstance(one, Asked) and judge(widened, one, wishes.now).allowed for one in asked)
        whys[name] = None if helps else "what other rules of the profile would still refuse"
        if name in over:
            whys[name] = "what is beyond the organisation's ceiling"
    return whys


def _named(proposal: Proposal, taken: set[str]) -> str:
    stem = slug(proposal.service or proposal.host)[:56].strip("-")
    return next(
        name for n in range(1, len(taken) + 3) if (name := stem if n == 1 else f"{stem}-{n}") not in taken
    )


def _text(wishes: Wishes, kept: list[tuple[str, Proposal]], group: str) -> str:
    return "\n".join(_lines(wishes, kept, group)) + "\n"


def _lines(wishes: Wishes, kept: list[tuple[str, Proposal]], group: str) -> Iterator[str]:
    owner = wishes.rules.effective(wishes.profile).owner
    yield "# yaml-language-server: $schema=../schema.json"
    yield f"# Proposed by `egressd suggest` from what was refused under {wishes.profile}. Read every rule before you"
    yield "# keep it: what a sandbox tried is not what it should be allowed. To use it, name it in the profile: `groups:`."
    yield "schema: 1"
    yield f"group: {json.dumps(group)}"
    if owner is not None:
        yield f"owner: {json.dumps(owner)}"
    yield "allow:"
    for name, proposal in kept:
        yield from _entry(name, proposal)
    yield "tests:"
    for name, proposal in kept:
        for sample in proposal.samples[:MOST_TESTS]:
            yield f"  - {{allow: {json.dumps(sample)}, rule: {json.dumps(name)}}}"
        scheme, rest = proposal.samples[0].partition(" ")[2].split("://", 1)
        other = f"DELETE {scheme}://{rest.partition('/')[0]}/nothing/of/this"
        yield f"  - {{deny: {json.dumps(other)}}}"


def _entry(name: str, proposal: Proposal) -> Iterator[str]:
    evidence = proposal.evidence
    when = evidence.first if evidence.first == evidence.last else f"{evidence.first} to {evidence.last}"
    by = f"{len(evidence.sandboxes)} sandbox{'es' if len(evidence.sandboxes) != 1 else ''}"
    because = f"{evidence.times} attempts by {by}, {when}, like {evidence.example}"
    yield f"  - id: {json.dumps(name)}"
    if proposal.service is not None:
        yield f"    service: {json.dumps(proposal.service)}"
        if proposal.values:
            given = ", ".join(f"{key}: {json.dumps(values)}" for key, values in proposal.values.items())
            yield f"    with: {{{given}}}"
    else:
        usual = {"https": 443, "http": 80}[proposal.scheme]
        yield f"    hosts: [{json.dumps(proposal.host)}]"
        if proposal.scheme != "https":
            yield "    schemes: [http]"
        if proposal.port != usual:
            yield f"    ports: [{proposal.port}]"
        yield "    requests:"
        yield from (
            f"      - {json.dumps(request)}" for request in _joined(proposal.requests)[:MOST_REQUESTS]
        )
    yield f"    because: {json.dumps(printable(because))}"


def _joined(requests: list[str]) -> list[str]:
    """Return requests with the methods of one path together."""
    paths: dict[str, list[str]] = {}
    for request in requests:
        method, _, path = request.partition(" ")
        paths.setdefault(path, []).append(method)
    return [f"{','.join(methods)} {path}" for path, methods in paths.items()]
