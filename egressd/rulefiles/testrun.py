"""All the tests of a rules folder judged, each with its outcome, and which rules none of them exercises."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from egressd.policy.model import TestsFile
from egressd.rulefiles.claims import Claims, Outcome, outcomes
from egressd.rulefiles.load import Rules
from egressd.rulefiles.problems import Findings, Place, Problems
from egressd.rulefiles.yaml import parse_model

_NOT_XML = {code: None for code in range(32) if code not in (9, 10, 13)}


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule as it is written once, whoever has it: its place, its id, and the profiles that have it."""

    place: str
    id: str
    effect: str
    profiles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TestRun:
    """What came of the tests; `idle` are the rules that decided none of them, of `rules` in all."""

    __test__ = False

    outcomes: tuple[Outcome, ...]
    rules: int
    idle: tuple[Rule, ...]

    @property
    def failures(self) -> list[Outcome]:
        """The tests that do not hold, those aside that only an expired rule is missing for."""
        return [outcome for outcome in self.outcomes if outcome.failure is not None and not outcome.expired]


def run_tests(rules: Rules, now: float, more: Iterable[Claims] = ()) -> TestRun | Problems:
    """Judge every test of the rules, and those of `more`; Problems where one is no test."""
    findings = Findings(rules.root)
    found: list[Outcome] = []
    for claims in (*rules.claims, *more):
        found += outcomes(claims, rules.groups if claims.group else rules.policies, now, findings)
    if findings.count:
        return findings.problems()
    today = dt.datetime.fromtimestamp(now, dt.UTC).date()
    every = _rules(rules, today)
    used = {outcome.decision.entry.place for outcome in found if outcome.decision.entry is not None}
    return TestRun(tuple(found), len(every), tuple(rule for rule in every if rule.place not in used))


def read_tests(content: bytes, name: str) -> Claims | Problems:
    """Return the tests of a file that lies outside the rules."""
    findings = Findings()
    loaded = parse_model(content, name, TestsFile, findings)
    if loaded is None:
        return findings.problems()
    model, document = loaded
    return Claims(model.tests, document, model.under)


def as_junit(run: TestRun) -> str:
    """Return the run as JUnit XML, a suite for each file; a rule that no test exercises is a skipped test."""
    suites = ElementTree.Element("testsuites", name="egressd test")
    by_file: dict[str, list[Outcome]] = {}
    for outcome in run.outcomes:
        by_file.setdefault(outcome.path, []).append(outcome)
    for path, found in by_file.items():
        failed = sum(outcome.failure is not None and not outcome.expired for outcome in found)
        suite = ElementTree.SubElement(
            suites, "testsuite", name=_xml(path), tests=str(len(found)), failures=str(failed), errors="0"
        )
        for outcome in found:
            _case(suite, outcome)
    if run.idle:
        number = str(len(run.idle))
        suite = ElementTree.SubElement(
            suites,
            "testsuite",
            name="rules that no test exercises",
            tests=number,
            failures="0",
            skipped=number,
        )
        for rule in run.idle:
            case = ElementTree.SubElement(suite, "testcase", name=rule.id, classname=_xml(rule.place))
            ElementTree.SubElement(case, "skipped", message="no test exercises this rule")
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, outcome: Outcome) -> None:
    case = ElementTree.SubElement(
        suite,
        "testcase",
        name=_xml(f"{outcome.claimed}: {outcome.asked.text}"),
        classname=_xml(outcome.profile),
        file=_xml(outcome.path),
        line=str(outcome.place.line),
    )
    if outcome.expired:
        ElementTree.SubElement(case, "skipped", message=_xml(f"a rule has expired: {outcome.failure}"))
    elif outcome.failure is not None:
        ElementTree.SubElement(case, "failure", message=_xml(outcome.failure))


def _xml(text: str) -> str:
    """Return what XML 1.0 may hold of a text."""
    return text.translate(_NOT_XML).encode("utf-8", "replace").decode("utf-8")


def _rules(rules: Rules, today: dt.date) -> Sequence[Rule]:
    found: dict[str, Rule] = {}
    for profile in rules.profiles:
        for entry in rules.effective(profile).entries:
            if entry.expires is not None and entry.expires < today:
                continue
            known = found.get(entry.place)
            profiles = known.profiles if known is not None else ()
            if profile not in profiles:
                found[entry.place] = Rule(entry.place, entry.id, entry.effect, (*profiles, profile))
    return sorted(found.values(), key=_order)


def _order(rule: Rule) -> tuple[str, Place]:
    path, _, line = rule.place.rpartition(":")
    return path, Place(int(line) if line.isdecimal() else 1)
