"""What `egressd check` says of rules that load: likely mistakes, each with why it matters.

A lint is no error: the rules are in force as they stand. One that is meant is silenced on its line, with the reason (`silences`).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from dataclasses import replace

from egressd.rulefiles.load import Rules
from egressd.rulefiles.origins import Origins
from egressd.rulefiles.problems import LINTS, Code, Findings, Place, Problem
from egressd.rulefiles.shadows import find_shadows
from egressd.rulefiles.silences import heeded
from egressd.rulefiles.smells import Nose

WHY: dict[Code, str] = {
    Code.SHADOWED: "a rule that never decides is read as one that does: its limits, its credential, its end bind nothing",
    Code.DUPLICATE_RULE: "two rules that say the same will one day be changed apart, and only the first counts",
    Code.NEVER_MATCHES: "somebody believes that this part of the rule lets something through, and it cannot",
    Code.NEVER_MATCHED: "a permission that nobody uses is only of use to an attacker",
    Code.EXPIRES_SOON: "what ends at midnight is noticed at night",
    Code.NO_OWNER: "nobody can be asked whether the rule is still needed",
    Code.MULTI_TENANT: "anybody can get a place on the host, to be read from there or to be written to",
    Code.DENY_WITHOUT_APEX: "`*.name` never covers the name itself, which stays open",
    Code.HOST_TYPO: "a mistyped host is registered by whoever waits for the mistake",
    Code.UPLOAD_API: "who may both read and upload there can carry out whatever a sandbox holds",
    Code.TUNNEL_FRONTING: "in a tunnel only the TLS hello is judged; on shared front ends it does not say whose site is reached",
    Code.WIDE_PORTS: "a host rarely serves on many ports; each one is another service behind the same rule",
    Code.BAD_SILENCE: "a silence without a reason, or of nothing, hides the next warning",
}
"""Each lint, and why it matters."""

SOON = dt.timedelta(days=14)


def lint(rules: Rules, today: dt.date, *, matched: Iterable[tuple[str, str]] | None = None) -> list[Problem]:
    """Return the warnings of the rules and every lint, without those that are silenced, in order of place.

    `matched` are the rules, as (profile, id), that decided something in recorded traffic; None where none is given.
    """
    findings = Findings(rules.root)
    origins = Origins(rules.source)
    for profile in rules.profiles:
        find_shadows(rules.compiled(profile), origins, findings)
    Nose(rules, origins, findings, today, SOON).search()
    if matched is not None:
        _unmatched(rules, set(matched), findings)
    placed = [_with_column(problem, rules) for problem in findings.warnings]
    known = LINTS if matched is not None else LINTS - {Code.NEVER_MATCHED}
    return sorted(heeded([*rules.warnings, *placed], rules.source, known))


def _unmatched(rules: Rules, matched: set[tuple[str, str]], findings: Findings) -> None:
    """Note rules that permit and decided nothing; what is in several profiles counts once one of them used it."""
    used: set[str] = set()
    unused: dict[str, str] = {}
    for profile in rules.profiles:
        for entry in rules.effective(profile).entries:
            if (profile, entry.id) in matched:
                used.add(entry.place)
            elif entry.effect != "deny":
                unused.setdefault(entry.place, entry.id)
    for place, name in unused.items():
        if place not in used:
            path, _, line = place.rpartition(":")
            message = f"{name!r} decided nothing in the recorded traffic"
            findings.add(
                path, Place(int(line)), Code.NEVER_MATCHED, message, "remove it, or shorten its life: expires"
            )


def _with_column(problem: Problem, rules: Rules) -> Problem:
    """Return the problem at the first word of its line."""
    content = rules.source.files.get(problem.path.removeprefix(f"{rules.root}/"), b"")
    lines = content.decode("utf-8", "replace").split("\n")
    if problem.column != 1 or problem.line > len(lines):
        return problem
    line = lines[problem.line - 1]
    return replace(problem, column=len(line) - len(line.lstrip(" -")) + 1)
