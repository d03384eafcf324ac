"""Comments that silence a warning on their line: `# lint: ok CODE: the reason`, several codes joined by commas.

Only warnings can be silenced, errors never. A silence that gives no reason, names no warning, or silences nothing is itself one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from egressd.rulefiles.problems import WARNINGS, Code, Findings, Place, Problem, quoted
from egressd.rulefiles.shape import did_you_mean
from egressd.rulefiles.source import RuleSource

_MARK = re.compile(r"(?:^|\s)#\s*lint:")
_WELL = re.compile(r"\s*ok ([a-z_]+(?:\s*,\s*[a-z_]+)*)\s*:\s*(\S.*)")
_HOW = "write `# lint: ok wide_ports: the reason`"


def heeded(
    problems: Iterable[Problem], source: RuleSource, searched: frozenset[Code] = WARNINGS
) -> Iterator[Problem]:
    """Yield the warnings that no comment on their line silences, then what is wrong with the silences.

    A silence of a lint that was not among those `searched` for cannot be called needless.
    """
    silences = _silences(source)
    used: set[tuple[str, int, str]] = set()
    for problem in problems:
        path = problem.path.removeprefix(f"{source.root}/") if source.root else problem.path
        key = (path, problem.line, problem.code.value)
        if key in silences and problem.severity == "warning":
            used.add(key)
        else:
            yield problem
    findings = Findings(source.root)
    for key in silences.keys() - used:
        path, line, code = key
        place = Place(line, silences[key])
        if code not in {each.value for each in WARNINGS}:
            known = sorted(each.value for each in WARNINGS)
            message = (
                f"no warning is called {quoted(code)}{did_you_mean(code, known)}"
                if code
                else "it says nothing"
            )
            findings.add(path, place, Code.BAD_SILENCE, message, _HOW)
        elif Code(code) in searched or Code(code) not in _LATER:
            findings.add(path, place, Code.BAD_SILENCE, f"it silences no {code} here", "remove it")
    yield from findings.warnings


_LATER = frozenset({Code.NEVER_MATCHED, Code.CREDENTIAL_UNCHECKED})
"""Warnings that come or go with what else is given to `check`."""


def _silences(source: RuleSource) -> dict[tuple[str, int, str], int]:
    """Return the column of each silence by path, line and code; a malformed one has no code."""
    found: dict[tuple[str, int, str], int] = {}
    for path, content in source.files.items():
        if b"lint:" not in content:
            continue
        for number, line in enumerate(content.decode("utf-8", "replace").split("\n"), 1):
            mark = _MARK.search(line)
            if mark is None:
                continue
            well = _WELL.fullmatch(line[mark.end() :].rstrip())
            codes = [code.strip() for code in well[1].split(",")] if well else [""]
            for code in codes:
                found[path, number, code] = line.index("#", mark.start()) + 1
    return found
