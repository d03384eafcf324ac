"""Rules that never decide, wholly or in part, because others always decide before them.

What is said here is sure: a rule is only called shadowed when each of its hosts and requests is another's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from egressd.policy.compile import CompiledPolicy, Level, Rule
from egressd.policy.effective import EffectiveEntry
from egressd.rulefiles.narrowing import lanes
from egressd.rulefiles.origins import Origins
from egressd.rulefiles.overlaps import request_covers
from egressd.rulefiles.problems import Code, Findings, Place


def find_shadows(policy: CompiledPolicy, origins: Origins, findings: Findings) -> None:
    """Add a warning for each rule of a profile that never decides, repeats another, or has a part that cannot match."""
    by_id: dict[tuple[str, str], list[Rule]] = defaultdict(list)
    for rule in _rules(policy):
        by_id[rule.entry.place, rule.entry.id].append(rule)
    seen: dict[tuple[object, ...], EffectiveEntry] = {}
    for (place, _), rules in by_id.items():
        entry = rules[0].entry
        first = seen.setdefault(_selection(rules), entry)
        if first is not entry:
            message = f"{entry.id!r} says the same as {first.id!r} ({first.place})"
            _note(place, Code.DUPLICATE_RULE, message, "remove one of them", findings)
        elif entry.effect != "deny":
            _permits(place, rules, policy, origins, findings)


def _permits(
    place: str, rules: list[Rule], policy: CompiledPolicy, origins: Origins, findings: Findings
) -> None:
    shadows = [_shadow(rule, policy) for rule in rules]
    entry = rules[0].entry
    if all(shadow is not None for shadow in shadows):
        other = next(shadow for shadow in shadows if shadow is not None)
        verb = "denies" if other.entry.effect == "deny" else "decides"
        message = f"{entry.id!r} never decides: {other.entry.id!r} ({other.entry.place}) {verb} before it"
        _note(place, Code.SHADOWED, message, "remove it, or let it be the more specific one", findings)
        return
    for rule in rules:
        for where, message in _parts(rule, policy, origins):
            _note(where, Code.NEVER_MATCHES, message, "remove it, or what stands in its way", findings)


def _parts(rule: Rule, policy: CompiledPolicy, origins: Origins) -> Iterator[tuple[str, str]]:
    """Yield the hosts, schemes and ports of a rule that can never match, with where they stand."""
    entry = rule.entry
    for text in entry.hosts:
        denial = _denial(rule, text, policy)
        if denial is not None:
            where = origins.of_items(entry, "hosts", (text,))[0]
            yield where, f"{text} is denied as a whole by {denial.entry.id!r} ({denial.entry.place})"
    if entry.treatment == "relay":
        return
    used = lanes(entry)
    for scheme in entry.schemes:
        if all(scheme != one for one, _ in used):
            yield origins.of(entry, "schemes"), f"{scheme} has no port: its own is not among `ports`"
    for port in entry.ports:
        if all(port != one for _, one in used):
            yield origins.of(entry, "ports"), f"port {port} belongs to a scheme that is not named"


def _shadow(rule: Rule, policy: CompiledPolicy) -> Rule | None:
    """Return a rule that decides before this one on one of its hosts, if some rule does on every one."""
    found: Rule | None = None
    entry = rule.entry
    if not entry.hosts:
        return None
    for text in entry.hosts:
        wild = text.startswith("*.")
        level = policy.below.get(text[2:], ()) if wild else policy.exact.get(text, ())
        before = _denial(rule, text, policy) or _before(rule, level, wild=wild)
        if before is None:
            return None
        found = found or before
    return found


def _denial(rule: Rule, host: str, policy: CompiledPolicy) -> Rule | None:
    """Return a denial of everything that covers the host on all of the rule's ports, for as long as the rule lasts."""
    name = host.removeprefix("*.")
    levels: list[Level] = [policy.below.get(name, ())] if name != host else [policy.exact.get(name, ())]
    dot = name.find(".")
    while dot >= 0:
        levels.append(policy.below.get(name[dot + 1 :], ()))
        dot = name.find(".", dot + 1)
    for level in levels:
        for other in level:
            enforced = other.is_deny and other.entry.mode == "enforce"
            if enforced and not other.patterns and other.end >= rule.end and _has_lanes(other, rule):
                return other
    return None


def _before(rule: Rule, level: Level, *, wild: bool) -> Rule | None:
    permits = [other for other in level if not other.is_deny]
    for other in permits:
        if other is rule or other.is_trial or other.end < rule.end or not _has_lanes(other, rule):
            continue
        if other.is_opaque and not rule.is_opaque:
            # An inspected connection passes by a tunnel: that hides the rule only where it is the first of all.
            passed = wild or any(one.order < other.order for one in permits)
            if passed or rule.entry.effect == "ask":
                continue
        if _decides_before(other, rule):
            return other
    return None


def _decides_before(other: Rule, rule: Rule) -> bool:
    """Whether, of two rules for the same host, `other` takes all that `rule` covers."""
    if rule.is_opaque or other.is_opaque:
        # the first to cover the port carries the connection; an ask beside a tunnel asks for the whole of it
        return other.order < rule.order and rule.entry.effect != "ask"
    for mine in rule.patterns:
        standing = (mine.path.rank, rule.entry.effect != "ask", rule.order)
        if not any(
            (theirs.path.rank, other.entry.effect != "ask", other.order) < standing
            and request_covers(theirs, mine)
            for theirs in other.patterns
        ):
            return False
    return True


def _has_lanes(other: Rule, rule: Rule) -> bool:
    mine = lanes(rule.entry)
    return bool(mine) and all(other.covers(scheme, port) for scheme, port in mine)


def _rules(policy: CompiledPolicy) -> Iterator[Rule]:
    """Yield every rule once, in the order of the file."""
    levels = [*policy.exact.values(), *policy.below.values()]
    for _, _, shelf in policy.networks:
        levels += shelf.values()
    found = {rule.order: rule for level in levels for rule in level}
    found |= {rule.order: rule for rule in policy.web}
    yield from (found[order] for order in sorted(found))


def _selection(rules: list[Rule]) -> tuple[object, ...]:
    """What a rule speaks of and what it says, as it stands."""
    parts = []
    for rule in rules:
        entry = rule.entry
        reach = (entry.schemes, entry.ports, entry.treatment, frozenset(entry.requests), entry.body)
        parts.append(
            (entry.effect, entry.mode, frozenset(entry.hosts), entry.addresses, entry.public_web, *reach)
        )
    return tuple(parts)


def _note(place: str, code: Code, message: str, hint: str, findings: Findings) -> None:
    path, _, line = place.rpartition(":")
    findings.add(path, Place(int(line) if line.isdecimal() else 1), code, message, hint)
