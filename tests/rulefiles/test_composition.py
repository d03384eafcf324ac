"""Profiles put together: no way of writing one weakens what stands above it."""

from __future__ import annotations

import datetime as dt
import functools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from egressd.policy.attempt import Attempt, ConnectionAttempt, DnsQuestion, RequestAttempt
from egressd.policy.compile import CompiledPolicy, compile_policy
from egressd.policy.decide import decide
from egressd.policy.effective import EntryLimits, Rate
from egressd.rulefiles.load import Rules, load_source
from egressd.rulefiles.problems import Code, Problems
from egressd.rulefiles.source import RuleSource

NOW = dt.datetime(2026, 12, 1, 12, tzinfo=dt.UTC).timestamp()

HOSTS = ["a.example.com", "x.a.example.com", "b.example.com", "*.example.com", "*.a.example.com"]
REQUESTS = ["GET /**", "GET /a/**", "GET /a/*", "POST /a/b", "ANY /**", "GET,HEAD /b", "GET /a/b?k=v"]
NAMES = [
    ("a", "example", "com"),
    ("x", "a", "example", "com"),
    ("b", "example", "com"),
    ("c", "example", "com"),
]
TARGETS = ["/", "/a/", "/a/b", "/a/b/c", "/b", "/a/b?k=v", "/a/b?k=w"]
AMBIGUOUS = ["/a//b", "/a/%62"]
ORDER = {"deny": 0, "ask": 1, "allow": 2}

type Written = dict[str, object]


def load(**files: object) -> Rules | Problems:
    """Rules from plain values: JSON is YAML."""
    source = {name.replace("__", "/") + ".yaml": json.dumps(value).encode() for name, value in files.items()}
    return load_source(RuleSource(source), now=NOW)


def entry(name: int, *, permits: bool) -> st.SearchStrategy[Written]:
    hosts = st.lists(st.sampled_from(HOSTS), min_size=1, max_size=2, unique=True)
    requests = st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=2, unique=True)
    inspected = st.fixed_dictionaries({"id": st.just(f"r{name}"), "hosts": hosts, "requests": requests})
    tunnel = st.fixed_dictionaries(
        {"id": st.just(f"r{name}"), "hosts": hosts, "treatment": st.just("tunnel")}
    )
    bare = st.fixed_dictionaries({"id": st.just(f"r{name}"), "hosts": hosts})
    return st.one_of(inspected, inspected, tunnel, bare) if permits else st.one_of(inspected, bare)


@st.composite
def sections(draw: st.DrawFn, first: int = 0) -> dict[str, list[Written]]:
    said: dict[str, list[Written]] = {}
    for number in range(first, first + draw(st.integers(1, 4))):
        effect = draw(st.sampled_from(["allow", "allow", "ask", "deny"]))
        said.setdefault(effect, []).append(draw(entry(number, permits=effect != "deny")))
    return said


@st.composite
def child(draw: st.DrawFn, parent: dict[str, list[Written]]) -> Written:
    """A profile that extends `parent` in some way, legal or not."""
    said: Written = {"schema": 1, "profile": "child", "extends": "parent"}
    permits = [(effect, one) for effect in ("allow", "ask") for one in parent.get(effect, [])]
    without, tightened = [], {"allow": [], "ask": []}  # type: ignore[var-annotated]  # filled below
    for effect, one in permits:
        what = draw(st.sampled_from(["keep", "drop", "tighten", "ask"]))
        if what == "drop":
            without.append(one["id"])
        elif what == "ask":
            tightened["ask"].append(one)
        elif what == "tighten":
            new = draw(entry(0, permits=True)) | {"id": one["id"]}
            keeps = draw(st.booleans())
            tightened[effect].append(new | ({"hosts": one["hosts"]} if keeps else {}))
    deny = draw(st.lists(entry(50, permits=False), max_size=1))
    said |= {key: value for key, value in (("without", without), ("deny", deny)) if value}
    return said | {key: value for key, value in tightened.items() if value}


def attempts(*, ambiguous: bool) -> list[Attempt]:
    found: list[Attempt] = []
    for name in NAMES:
        found.append(DnsQuestion(name))
        for scheme, port in (("https", 443), ("http", 80), ("https", 8443)):
            found.append(ConnectionAttempt(name, port, scheme))  # type: ignore[arg-type]  # the literals above
        for target in TARGETS + (AMBIGUOUS if ambiguous else []):
            for method in ("GET", "POST", "DELETE"):
                found.append(RequestAttempt(name, 443, "https", method, target))
        found.append(RequestAttempt(name, 443, "https", "GET", "/a/b", upgrade="websocket"))
    return found


def holds(below: CompiledPolicy, above: CompiledPolicy, tried: list[Attempt]) -> None:
    """Nothing passes below that does not pass above, and nothing unread that is read there."""
    for attempt in tried:
        mine, theirs = decide(below, attempt, NOW), decide(above, attempt, NOW)
        assert ORDER[mine.verdict] <= ORDER[theirs.verdict], (attempt, mine, theirs)
        if mine.allowed and not isinstance(attempt, DnsQuestion):
            assert mine.treatment == "inspect" or theirs.treatment == "tunnel", (attempt, mine, theirs)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_profile_that_extends_another_never_allows_more(data: st.DataObject) -> None:
    parent = data.draw(sections())
    rules = load(
        organisation={"schema": 1},
        profiles__parent={"schema": 1, "profile": "parent", **parent},
        profiles__child=data.draw(child(parent)),
    )
    if isinstance(rules, Rules):
        holds(rules.compiled("child"), rules.compiled("parent"), attempts(ambiguous=True))
        for lost in rules.effective("parent").entries:
            assert lost.effect != "deny" or lost in rules.effective("child").entries


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_profile_weakens_what_the_organisation_says(data: st.DataObject) -> None:
    deny = data.draw(st.lists(entry(90, permits=False), max_size=1))
    most = data.draw(st.lists(entry(91, permits=True), min_size=1, max_size=2))
    ceiling = [{key: value for key, value in one.items() if key != "id"} for one in most]
    organisation: Written = {"schema": 1, "ceiling": {"allow": ceiling}} | ({"deny": deny} if deny else {})
    parent = data.draw(sections())
    group = {"schema": 1, "group": "shared", **data.draw(sections(20))}
    adds = {key: value for key, value in data.draw(sections(40)).items() if key != "deny"}
    below = data.draw(child(parent)) | {"groups": ["shared"]} | ({"adds": adds} if adds else {})
    files = {"profiles__parent": {"schema": 1, "profile": "parent", **parent}, "profiles__child": below}
    rules = load(organisation=organisation, groups__shared=group, **files)
    if not isinstance(rules, Rules):
        return
    floor = compile_policy(
        rules.effective("child").model_copy(
            update={
                "entries": tuple(e for e in rules.effective("child").entries if e.origin == "organisation")
            }
        )
    )
    for profile in rules.profiles:
        for attempt in attempts(ambiguous=True):
            mine = decide(rules.compiled(profile), attempt, NOW)
            if decide(floor, attempt, NOW).reason == "denied_by_organisation":
                assert mine.verdict == "deny"
            # an ambiguous path is no more than the same rule's `/**` takes, whatever else the ceiling spells
            ambiguous = isinstance(attempt, RequestAttempt) and attempt.target in AMBIGUOUS
            assert mine.verdict == "deny" or ambiguous or within(attempt, mine.treatment, ceiling), attempt


@functools.lru_cache(maxsize=256)
def alone(part: str) -> CompiledPolicy:
    """A profile that allows one part of a ceiling."""
    top = {"schema": 1, "profile": "top", "allow": [json.loads(part)]}
    rules = load(organisation={"schema": 1}, profiles__top=top)
    assert isinstance(rules, Rules)
    return rules.compiled("top")


def within(attempt: Attempt, treatment: str, ceiling: list[Written]) -> bool:
    """Whether some part of the ceiling, as a profile of its own, lets this out, and no less read."""
    for part in ceiling:
        found = decide(alone(json.dumps(part)), attempt, NOW)
        unread = isinstance(attempt, DnsQuestion) or treatment == "inspect" or found.treatment == "tunnel"
        if found.allowed and unread:
            return True
    return False


def test_the_laws_above_are_tried_on_rules_that_load() -> None:
    """A generator whose every profile is refused would prove nothing: these are drawn by the same parts, and load."""
    parent = {"allow": [{"id": "r0", "hosts": ["a.example.com"], "requests": ["GET /**"]}]}
    for tight in (
        {"without": ["r0"]},
        {"allow": [{"id": "r0", "hosts": ["a.example.com"], "requests": ["GET /a/*"]}]},
    ):
        rules = load(
            organisation={"schema": 1, "ceiling": {"allow": [{"hosts": ["*.example.com"]}]}},
            profiles__parent={"schema": 1, "profile": "parent", **parent},
            profiles__child={"schema": 1, "profile": "child", "extends": "parent", **tight},
        )
        assert isinstance(rules, Rules), str(rules)


WIDE = {"id": "wide", "hosts": ["*.example.com"], "treatment": "tunnel"}
NARROW = {"id": "narrow", "hosts": ["a.example.com"], "requests": ["GET /a"]}
UNTIL = {"mode": "observe", "observe_until": "2026-12-20"}
LATER = {"mode": "observe", "observe_until": "2026-12-24"}


@pytest.mark.parametrize(
    ("parent", "below", "code"),
    [
        ({"allow": [NARROW, WIDE]}, {"without": ["narrow"]}, Code.NOT_NARROWER),
        ({"allow": [NARROW, WIDE]}, {"without": ["wide"]}, None),
        ({"allow": [NARROW]}, {"without": ["narow"]}, Code.UNKNOWN_RULE),
        ({"allow": [NARROW]}, {"adds": {"allow": [WIDE]}}, None),
        ({"allow": [NARROW]}, {"allow": [WIDE]}, Code.NOT_NARROWER),
        ({"allow": [NARROW]}, {"adds": {"allow": [NARROW]}}, Code.DUPLICATE_ID),
        ({"allow": [NARROW]}, {"ask": [NARROW]}, None),
        ({"ask": [NARROW]}, {"allow": [NARROW]}, Code.NOT_NARROWER),
        ({"allow": [WIDE]}, {"allow": [{**WIDE, "treatment": "inspect"}]}, None),
        ({"allow": [NARROW]}, {"allow": [{**NARROW, "expires": "2027-01-01"}]}, None),
        ({"allow": [NARROW]}, {"allow": [{**NARROW, **UNTIL}]}, Code.NOT_NARROWER),
        ({"allow": [{**NARROW, **UNTIL}]}, {"allow": [NARROW]}, Code.NOT_NARROWER),
        ({"allow": [{**NARROW, **UNTIL}]}, {"allow": [{**NARROW, **LATER}]}, Code.NOT_NARROWER),
        ({"allow": [{**NARROW, **LATER}]}, {"allow": [{**NARROW, **UNTIL}]}, None),
    ],
    ids=[
        "leaving out a rule that hides a tunnel",
        "leaving out the tunnel",
        "leaving out what is not there",
        "adding under adds",
        "adding in allow",
        "adding under an id that is taken",
        "asking where it was allowed",
        "allowing where it was asked",
        "inspecting what was a tunnel",
        "ending sooner",
        "observing what is enforced",
        "enforcing what is observed",
        "observing for longer",
        "observing less long",
    ],
)
def test_a_child_may_narrow_and_adds_only_where_it_says_so(
    parent: Written, below: Written, code: Code | None
) -> None:
    rules = load(
        organisation={"schema": 1},
        profiles__parent={"schema": 1, "profile": "parent", **parent},
        profiles__child={"schema": 1, "profile": "child", "extends": "parent", **below},
    )
    found = [problem.code for problem in rules] if isinstance(rules, Problems) else [None]
    assert code in found, str(rules)


@pytest.mark.parametrize("named", [{}, {"groups": ["shared"]}], ids=["nobody names", "a profile names"])
@pytest.mark.parametrize(
    "entry",
    [
        {"allow": [{**NARROW, "mode": "observe"}]},
        {"allow": [{**NARROW, **UNTIL, "credential": "key"}]},
        {"deny": [{"addresses": ["10.0.0.0/8"], **UNTIL}]},
        {"deny": [{"hosts": ["a.example.com"], "mode": "observe", "observe_until": "2027-12-01"}]},
    ],
    ids=["without an end", "with a credential", "a denial of addresses", "for too long"],
)
def test_what_cannot_only_observe_is_a_problem_of_the_group(named: Written, entry: Written) -> None:
    rules = load(
        organisation={"schema": 1},
        groups__shared={"schema": 1, "group": "shared", **entry},
        profiles__a={"schema": 1, "profile": "a", **named},
    )
    assert isinstance(rules, Problems)
    assert [problem.code for problem in rules] == [Code.OBSERVE]


def test_what_extends_a_profile_with_a_mistake_does_not_repeat_it() -> None:
    rules = load(
        organisation={"schema": 1},
        profiles__parent={"schema": 1, "profile": "parent", "allow": [{"hosts": ["A.example.com"]}]},
        profiles__child={"schema": 1, "profile": "child", "extends": "parent", "without": ["a-example-com"]},
    )
    assert isinstance(rules, Problems)
    assert [problem.code for problem in rules] == [Code.NOT_NORMAL]


def test_limits_are_inherited_and_the_ceilings_are_put_on_every_profile() -> None:
    rules = load(
        organisation={"schema": 1, "ceiling": {"limits": {"upload": "1MB/day"}}},
        profiles__parent={"schema": 1, "profile": "parent", "limits": {"requests": "60/minute"}},
        profiles__child={"schema": 1, "profile": "child", "extends": "parent", "limits": {"connections": 3}},
    )
    assert isinstance(rules, Rules), str(rules)
    upload, requests = Rate(amount=10**6, seconds=86400), Rate(amount=60, seconds=60)
    assert rules.effective("parent").limits == EntryLimits(upload=upload, requests=requests)
    assert rules.effective("child").limits == EntryLimits(upload=upload, requests=requests, connections=3)


def test_a_long_chain_of_profiles_is_followed_to_its_end() -> None:
    files = {
        f"profiles__p{n}": {"schema": 1, "profile": f"p{n}"} | ({"extends": f"p{n - 1}"} if n else {})
        for n in range(1500)
    }
    rules = load(organisation={"schema": 1}, **files)
    assert isinstance(rules, Rules), str(rules)


def test_the_examples_of_the_page_load_together() -> None:
    page = (Path(__file__).resolve().parent.parent.parent / "docs" / "rules.md").read_text()
    organisation, group, reader = [part.split("```")[0] for part in page.split("```yaml\n")[1:4]]
    agent = """schema: 1
profile: agent
limits: {requests: 600/minute}
allow:
  - {id: forge, hosts: [forge.example.com]}
  - {id: news, hosts: [news.example.com]}
"""
    files = {
        "organisation.yaml": organisation.replace("deny:\n  - service: exfil-sinks\n", ""),
        "groups/python-reading.yaml": group,
        "profiles/reader.yaml": reader.replace("papers.example.org", "papers.example.com"),
        "profiles/agent.yaml": agent,
    }
    rules = load_source(RuleSource({path: text.encode() for path, text in files.items()}), now=NOW)
    assert isinstance(rules, Rules), str(rules)
    over = load_source(
        RuleSource(
            {path: text.encode() for path, text in (files | {"profiles/reader.yaml": reader}).items()}
        ),
        now=NOW,
    )
    assert isinstance(over, Problems)
    assert [problem.code for problem in over] == [Code.OVER_CEILING]
