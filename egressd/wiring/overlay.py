"""Packet rules among other people's: chains of our own, jumped to before anything else, and nothing else touched. Pure.

A namespace that is ours alone has a ruleset of its own (`ruleset`). A host's, a pod's or a container's has the rules of others
(a container engine, a service mesh, an administrator) in it, which stay as they are. So what is there must be known before a text
is made: every function takes what iptables-save printed.

iptables-restore is atomic per table. Tables are applied in the order in which an overlay names them and undone in the reverse
order, so that what closes comes first and goes last.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from egressd.wiring.ruleset import Table, meaning, parse_tables

PREFIX: Final = "EGRESSD"
"""How the name of every chain of ours begins; only jumps to such chains may stand before a jump of ours."""


@dataclass(frozen=True, slots=True)
class Jump:
    """A rule of a built-in chain that leads to one of ours; `match` says which packets, all of them if empty."""

    hook: str
    match: str = ""

    def rule(self, chain: str) -> str:
        """The rule without its chain."""
        return f"{self.match} -j {chain}".lstrip()


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of ours; `changing` says that rules come and go in it by themselves, and `rules` is not all that it may have."""

    name: str
    rules: tuple[str, ...] = ()
    jumps: tuple[Jump, ...] = ()
    changing: bool = False


type Overlay = tuple[tuple[str, tuple[Chain, ...]], ...]
"""Chains by table, in the order in which tables are applied."""


def applied(overlay: Overlay, saved: str) -> str:
    """The iptables-restore --noflush text that puts an overlay in place; empty where it is. Chains that change are left."""
    tables = parse_tables(saved)
    return "".join(
        _apply_table(name, chains, tables.get(name) or Table())
        for name, chains in overlay
        if _differences(name, chains, tables.get(name))
    )


def undone(overlay: Overlay, saved: str) -> str:
    """The text that takes away what is there of an overlay, and nothing else; empty where nothing is."""
    tables = parse_tables(saved)
    return "".join(
        _undo_table(name, chains, tables.get(name) or Table()) for name, chains in reversed(overlay)
    )


def missing(overlay: Overlay, saved: str) -> list[str]:
    """How what is in force differs from the overlay; an empty list means that it does not."""
    tables = parse_tables(saved)
    return [problem for name, chains in overlay for problem in _differences(name, chains, tables.get(name))]


def remnants(overlay: Overlay, saved: str) -> list[str]:
    """What is there of an overlay, as `table chain`."""
    tables = parse_tables(saved)
    return [
        f"*{name} {chain.name}"
        for name, chains in overlay
        for chain in chains
        if name in tables and chain.name in tables[name].policies
    ]


def _apply_table(name: str, chains: tuple[Chain, ...], have: Table) -> str:
    lines = [f"*{name}"]
    kept = {chain.name for chain in chains if chain.changing and chain.name in have.policies}
    # To name a chain of one's own empties it.
    lines += [f":{chain.name} - [0:0]" for chain in chains if chain.name not in kept]
    for chain in chains:
        if chain.name not in kept:
            lines += [f"-A {chain.name} {rule}" for rule in chain.rules]
    for chain, jump, present in _jumps(chains, have):
        lines += [f"-D {jump.hook} {jump.rule(chain.name)}"] * present
        lines.append(f"-I {jump.hook} 1 {jump.rule(chain.name)}")
    return "\n".join([*lines, "COMMIT", ""])


def _undo_table(name: str, chains: tuple[Chain, ...], have: Table) -> str:
    lines = [
        f"-D {jump.hook} {jump.rule(chain.name)}" for chain, jump, n in _jumps(chains, have) for _ in range(n)
    ]
    there = [chain.name for chain in chains if chain.name in have.policies]
    lines += [f"-F {chain}" for chain in there] + [f"-X {chain}" for chain in there]
    return "\n".join([f"*{name}", *lines, "COMMIT", ""]) if lines else ""


def _jumps(chains: tuple[Chain, ...], have: Table) -> Iterator[tuple[Chain, Jump, int]]:
    """Every jump and how often it is there."""
    for chain in chains:
        for jump in chain.jumps:
            present = Counter(have.rules.get(jump.hook, ()))
            yield chain, jump, present[meaning(jump.rule(chain.name))]


def _differences(name: str, chains: tuple[Chain, ...], have: Table | None) -> list[str]:
    if have is None:
        return [f"*{name}: table missing"]
    problems: list[str] = []
    for chain in chains:
        if chain.name not in have.policies:
            problems.append(f"*{name} {chain.name}: chain missing")
        elif not chain.changing:
            problems += _rule_differences(
                f"*{name} {chain.name}", chain.rules, have.rules.get(chain.name, [])
            )
        problems += [
            problem for jump in chain.jumps for problem in _jump_differences(name, chain, jump, have)
        ]
    return problems


def _rule_differences(place: str, rules: tuple[str, ...], present: list[str]) -> list[str]:
    wanted = [meaning(rule) for rule in rules]
    if wanted == present:
        return []
    lost, foreign = Counter(wanted) - Counter(present), Counter(present) - Counter(wanted)
    problems = [f"{place}: missing: {rule}" for rule in lost]
    problems += [f"{place}: unexpected: {rule}" for rule in foreign]
    return problems or [f"{place}: rules in another order"]


def _jump_differences(table: str, chain: Chain, jump: Jump, have: Table) -> list[str]:
    rule, present = meaning(jump.rule(chain.name)), have.rules.get(jump.hook, [])
    place = f"*{table} {jump.hook}"
    if rule not in present:
        return [f"{place}: missing: {rule}"]
    if present.count(rule) > 1:
        return [f"{place}: repeated: {rule}"]
    before = [other for other in present[: present.index(rule)] if not _is_ours(other)]
    return [f"{place}: stands before {chain.name}: {other}" for other in before]


def _is_ours(rule: str) -> bool:
    return any(
        word == "-j" and target.startswith(PREFIX)
        for word, target in zip(rule.split(), rule.split()[1:], strict=False)
    )
