"""The files' own tests: claims about single requests, judged by the same `decide` as the traffic.

A claim that fails keeps the file from loading. One that fails only because a rule of the file has expired since is a warning: an
expiry at midnight must not keep egressd from starting at night.
"""

from __future__ import annotations

import datetime as dt
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from egressd.policy import internal
from egressd.policy.attempt import Attempt, Decision, DnsQuestion, RequestAttempt
from egressd.policy.bodies import refuses
from egressd.policy.compile import CompiledPolicy, compile_policy
from egressd.policy.decide import decide
from egressd.policy.model import FiledTest, Test
from egressd.policy.reasons import Reason
from egressd.rulefiles.document import Document
from egressd.rulefiles.problems import Code, Findings, Place, quoted
from egressd.rulefiles.requestline import Asked, BadLine, parse_request_line
from egressd.rulefiles.shape import did_you_mean

_VERDICTS = ("allow", "deny", "ask")
_ADDRESS_TYPES = frozenset({"A", "AAAA"})


@dataclass(frozen=True, slots=True)
class Claims:
    """The tests of one file; `profile` is the one they speak of, None for all (the organisation's).

    With `group` it is the name of a group, which is judged alone, below the organisation's denials.
    """

    tests: Sequence[Test]
    document: Document
    profile: str | None
    group: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """One test judged under one profile: `failure` is how the decision differs from the claim, None when it holds.

    `expired` marks a failure that is none but for a rule that has expired since.
    """

    path: str
    place: Place
    asked: Asked
    claimed: str
    profile: str
    decision: Decision
    failure: str | None
    expired: bool = False
    group: bool = False


@dataclass(frozen=True, slots=True)
class _Claim:
    """One test taken apart."""

    index: int
    key: str
    asked: Asked
    test: Test


def judge(policy: CompiledPolicy, asked: Asked, now: float) -> Decision:
    """Return the decision on a request as written; a DNS question for anything but an address is denied. Total.

    As in a sandbox, egressd's own name is its own to answer, before any rule or the floor.
    """
    decision = _own(asked.attempt) or decide(policy, asked.attempt, now)
    if isinstance(asked.attempt, DnsQuestion) and decision.allowed and asked.dns_type not in _ADDRESS_TYPES:
        return Decision("deny", Reason.DNS_TYPE)
    return decision


def _own(attempt: Attempt) -> Decision | None:
    decision = internal.judge(attempt)
    if decision is None or not decision.allowed or not isinstance(attempt, RequestAttempt):
        return decision
    refused = internal.unanswered(
        attempt.method, attempt.target, body=attempt.body, upgrade=attempt.upgrade is not None
    )
    return decision if refused is None else Decision("deny", refused)


def check_claims(
    claims: Claims, policies: Mapping[str, CompiledPolicy], now: float, findings: Findings
) -> None:
    """Add a problem for each test that does not hold."""
    for outcome in outcomes(claims, policies, now, findings):
        if outcome.failure is None:
            continue
        code = Code.TEST_FAILED
        hint = f"egressd explain {shlex.quote(outcome.asked.text)} --profile {outcome.profile}"
        if outcome.group:
            hint = "a group's tests are judged of the group alone, below the organisation's denials"
        if outcome.expired:
            code = Code.TEST_EXPIRED
            hint = "a rule that it needs has expired; renew it, or give the test an `at:`"
        under = f" under {outcome.profile}" if claims.profile is None else ""
        message = f"{quoted(outcome.asked.text)}{under}: {outcome.failure}"
        findings.add(outcome.path, outcome.place, code, message, hint)


def outcomes(
    claims: Claims, policies: Mapping[str, CompiledPolicy], now: float, findings: Findings
) -> Iterator[Outcome]:
    """Yield how each test of a file comes out, under each profile that it speaks of; one that is no test is a problem."""
    for index, test in enumerate(claims.tests):
        profiles = _profiles(index, test, claims, policies, findings)
        ids = {entry.id for name in profiles for entry in policies[name].effective.entries}
        claim = _parsed(index, test, claims.document, ids, findings)
        for name in profiles if claim is not None else ():
            assert claim is not None
            yield _outcome(claim, claims, policies[name], name, now)


def _profiles(
    index: int, test: Test, claims: Claims, policies: Mapping[str, CompiledPolicy], findings: Findings
) -> list[str]:
    named = test.under if isinstance(test, FiledTest) and test.under is not None else None
    wanted = named or claims.profile
    if wanted is None:
        return sorted(policies)
    if wanted in policies:
        return [wanted]
    place = claims.document.place("tests", index, "under") if named else claims.document.place("under")
    message = f"there is no profile {wanted!r}{did_you_mean(wanted, sorted(policies))}"
    findings.add(claims.document.path, place, Code.UNKNOWN_PROFILE, message)
    return []


def _outcome(claim: _Claim, claims: Claims, policy: CompiledPolicy, name: str, now: float) -> Outcome:
    moment = claim.test.at.timestamp() if claim.test.at is not None else now
    decision = _with_body(claim, judge(policy, claim.asked, moment))
    failure = _failure(claim, decision)
    expired = False
    if failure is not None and claim.test.at is None:
        revived = _with_body(claim, judge(_without_expiry(policy), claim.asked, now))
        expired = _failure(claim, revived) is None
    place = claims.document.place("tests", claim.index, claim.key)
    path = claims.document.path
    return Outcome(path, place, claim.asked, claim.key, name, decision, failure, expired, claims.group)


def _with_body(claim: _Claim, decision: Decision) -> Decision:
    """Judge the body that a test gives, where the rule that decides looks at bodies; without one it is what the rule asks for."""
    entry, body = decision.entry, claim.test.json_
    if decision.verdict == "deny" or entry is None or not entry.body or body is None:
        return decision
    content = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
    return decision if refuses(entry.body, content) is None else Decision("deny", Reason.BODY_MISMATCH, entry)


def _parsed(index: int, test: Test, document: Document, ids: set[str], findings: Findings) -> _Claim | None:
    given = [verdict for verdict in _VERDICTS if getattr(test, verdict) is not None]
    if len(given) != 1:
        message = "a test has exactly one of: allow, deny, ask"
        findings.add(document.path, document.place("tests", index), Code.BAD_TEST, message)
        return None
    key = given[0]
    asked = parse_request_line(getattr(test, key))
    sound = True
    if isinstance(asked, BadLine):
        place = document.place("tests", index, key)
        findings.add(
            document.path, place, Code.BAD_TEST, f"{quoted(getattr(test, key))}: {asked.detail}", asked.hint
        )
        return None
    if test.rule is not None and test.rule not in ids:
        place = document.place("tests", index, "rule")
        message = f"no rule has the id {quoted(test.rule)}{did_you_mean(test.rule, sorted(ids))}"
        findings.add(document.path, place, Code.UNKNOWN_RULE, message)
        sound = False
    reasons = [reason.value for reason in Reason]
    if test.reason is not None and test.reason not in reasons:
        place = document.place("tests", index, "reason")
        message = f"no reason is called {quoted(test.reason)}{did_you_mean(test.reason, reasons)}"
        findings.add(document.path, place, Code.BAD_TEST, message)
        sound = False
    return _Claim(index, key, asked, test) if sound else None


def _failure(claim: _Claim, decision: Decision) -> str | None:
    """Return how the decision differs from the claim, or None when it holds."""
    rule = decision.entry.id if decision.entry is not None else None
    expected: list[str] = [claim.key]
    got: list[str] = [decision.verdict]
    if claim.test.rule is not None:
        expected.append(f"by {claim.test.rule}")
    if claim.test.reason is not None:
        expected.append(f"({claim.test.reason})")
    holds = (
        decision.verdict == claim.key
        and claim.test.rule in (None, rule)
        and claim.test.reason in (None, decision.reason.value)
    )
    if holds:
        return None
    if decision.entry is not None:
        got.append(f"by {rule} ({decision.entry.place})")
    got.append(f"({decision.reason})")
    return f"expected {' '.join(expected)}, got {' '.join(got)}"


@lru_cache(maxsize=8)
def _without_expiry(policy: CompiledPolicy) -> CompiledPolicy:
    """Return the policy as it was while every rule of it was in force, and what observes observed."""
    effective, never = policy.effective, dt.date.max
    entries = tuple(
        entry.model_copy(
            update={"expires": None, "observe_until": never if entry.mode == "observe" else None}
        )
        for entry in effective.entries
    )
    until = never if effective.mode == "observe" else None
    return compile_policy(effective.model_copy(update={"entries": entries, "observe_until": until}))
