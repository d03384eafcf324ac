from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from egressd.policy.paths import PathPattern, Target, parse_path_pattern
from egressd.rulefiles.load import Rules, load_rules, load_source
from egressd.rulefiles.problems import Problems
from egressd.rulefiles.source import RuleSource
from egressd.rulefiles.suggest import Wishes, propose
from egressd.rulefiles.suggestion import Suggestion, suggestion
from egressd.rulefiles.templates import MOST_TEMPLATES, Templates
from tests.rulefiles.test_composition import NOW, load
from tests.rulefiles.test_recorded import ODD, REQUEST, VALUES

SHIPPED = Path(__file__).resolve().parent.parent.parent / "rules"
DENIED = REQUEST | {
    "verdict": "deny",
    "reason": "not_allowed",
    "rule": None,
    "time": "2026-11-30T10:00:00.000000Z",
}


def patterns(paths: list[str]) -> list[str]:
    templates = Templates()
    for path in paths:
        templates.add(path, 1)
    return [text for text, _, _ in templates.patterns()]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["/a/b", "/a/c"], ["/a/b", "/a/c"]),
        (["/a/b", "/a/c", "/a/d", "/a/e"], ["/a/*"]),
        (["/v1/users/17/avatar", "/v1/users/18/avatar"], ["/v1/users/*/avatar"]),
        (["/o/9f86d081884c7d65"], ["/o/*"]),
        (["/a//b", "/a/../b", "/a;b"], []),
        ([f"/pkg/n{n}/v{n}.tgz" for n in range(200)], ["/pkg/*/*"]),
        ([f"/x{n}/y{n}" for n in range(500)], []),
        (
            [f"/a/{'/'.join(str(k) + 'k' for k in range(n))}" for n in range(1, 80)],
            ["/a/0k", "/a/0k/1k", "/a/0k/1k/**"],
        ),
        (["/a", "/b", "/c", "/d", "/e"], ["/a", "/b", "/c", "/d", "/e"]),
        (["/17", "/"], ["/"]),
    ],
    ids=[
        *(
            "few stay as they are",
            "four alike are one",
            "numbers are objects",
            "so are hashes",
            "no second reading",
        ),
        *("a crowd, segment by segment", "a crowd at the top", "a crowd of depths"),
        *("no bare star", "an object at the top"),
    ],
)
def test_paths_become_the_narrowest_patterns(paths: list[str], expected: list[str]) -> None:
    assert patterns(paths) == expected


@given(
    st.lists(
        st.lists(st.sampled_from(["a", "b", "1", "deadbeef00", "c.d", "", "*"]), min_size=1, max_size=6),
        max_size=120,
    )
)
def test_every_path_is_in_a_pattern_or_lost_and_no_pattern_is_everything(segments: list[list[str]]) -> None:
    templates = Templates()
    paths = ["/" + "/".join(one) for one in segments]
    for path in paths:
        templates.add(path, 1)
    found = templates.patterns()
    parsed = [parse_path_pattern(text) for text, _, _ in found]
    assert len(found) <= MOST_TEMPLATES
    assert sum(times for _, times, _ in found) + templates.lost == len(paths)
    assert all(isinstance(one, PathPattern) and not one.is_everything for one in parsed)
    if not templates.lost:
        for path in paths:
            assert any(isinstance(one, PathPattern) and one.allows(Target(path)) for one in parsed), path


def suggested(
    rules: Rules, profile: str, *records: Mapping[str, object], least: int = 1
) -> tuple[str, dict[str, int]]:
    wishes = Wishes(rules, profile, NOW)
    for record in records:
        wishes.take(DENIED | {"profile": profile} | dict(record))
    made = suggestion(wishes, propose(wishes, least), "suggested")
    assert isinstance(made, Suggestion), str(made)
    if made.text:
        files = rules.source.files | {"groups/suggested.yaml": made.text.encode()}
        loaded = load_source(RuleSource(files), now=NOW)
        assert isinstance(loaded, Rules), f"{loaded}\n{made.text}"
    return made.text, dict(wishes.left_out)


@pytest.fixture(scope="module")
def shipped() -> Rules:
    rules = load_rules(SHIPPED, now=NOW)
    assert isinstance(rules, Rules), str(rules)
    return rules


def test_a_rule_has_method_path_evidence_and_tests(shipped: Rules) -> None:
    records = [
        {"host": "files.example.com", "path": f"/d/{n}.txt", "sandbox": f"s{n}", "attempt_id": "e" * 28}
        for n in range(5)
    ]
    text, _ = suggested(
        shipped, "coding-agent", *records, {"host": "files.example.com", "path": "/up", "method": "PUT"}
    )
    file = yaml.safe_load(text)
    (entry,) = file["allow"]
    assert entry["hosts"] == ["files.example.com"]
    assert entry["requests"] == ["GET /d/*", "PUT /up"]
    assert entry["because"] == f"6 attempts by 6 sandboxes, 2026-11-30, like {'e' * 28}"
    assert {"allow": "GET https://files.example.com/d/0.txt", "rule": "files-example-com"} in file["tests"]
    assert {"deny": "DELETE https://files.example.com/nothing/of/this"} in file["tests"]


def test_a_service_is_proposed_where_one_fits_with_all_values_that_were_asked_for(shipped: Rules) -> None:
    records = [
        {
            "host": "github.com",
            "path": f"/{repo}/git-upload-pack",
            "method": "POST",
            "reason": "path_not_allowed",
        }
        for repo in ("else/one", "else/two")
    ]
    text, _ = suggested(shipped, "locked-down", *records)
    entry = yaml.safe_load(text)["allow"][0]
    assert entry["service"].startswith("github")
    assert entry["with"] == {"repos": ["else/one", "else/two"]}


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ({"host": "pastebin.com"}, "hosts of exfil-sinks, which is for denials"),
        ({"host": "gist.github.com"}, "denied on purpose by these rules"),
        ({"host": "pypi.org", "path": "/simple/x/"}, "allowed by these rules already"),
        ({"host": "192.0.2.7"}, "bare addresses, which are better asked for by name"),
        ({"host": "x.example.com", "path": "/a//b"}, "paths too many or too odd for a narrow pattern"),
        (
            {"host": "x.example.com", "reason": "query_not_allowed"},
            "a query that the rules do not allow, whose values are not recorded",
        ),
        ({"host": "x.example.com", "layer": "connection"}, "connections, of which no request is known"),
    ],
)
def test_what_is_not_proposed_is_said(shipped: Rules, record: dict[str, object], why: str) -> None:
    assert suggested(shipped, "coding-agent", record) == ("", {why: 1})


def test_what_was_tried_too_seldom_is_left_out(shipped: Rules) -> None:
    record = {"host": "x.example.com", "path": "/a"}
    assert suggested(shipped, "coding-agent", record, least=2) == ("", {"requests made less than 2 times": 1})
    assert suggested(shipped, "coding-agent", record, record, least=2)[0]


def test_nothing_beyond_the_ceiling_is_proposed() -> None:
    rules = load(
        organisation={"schema": 1, "ceiling": {"allow": [{"hosts": ["*.example.net"]}]}},
        profiles__box={"schema": 1, "profile": "box"},
    )
    assert isinstance(rules, Rules)
    text, left = suggested(rules, "box", {"host": "a.example.com"}, {"host": "a.example.net"})
    assert "a.example.net" in text
    assert "a.example.com" not in text
    assert left == {"what is beyond the organisation's ceiling": 1}


def test_what_an_observed_profile_let_through_is_proposed_too() -> None:
    observed = {"schema": 1, "profile": "box", "mode": "observe", "observe_until": "2026-12-20"}
    rules = load(organisation={"schema": 1}, profiles__box=observed)
    assert isinstance(rules, Rules), str(rules)
    record = {
        "verdict": "allow",
        "reason": "observed",
        "would_deny": True,
        "host": "a.example.com",
        "path": "/x",
    }
    assert 'requests:\n      - "GET /x"' in suggested(rules, "box", record)[0]


PATHS = st.text(st.sampled_from("ab/*{}\"'\\:#\n\x1b%2é?&= "), max_size=12).map(lambda text: f"/{text}")
METHODS = st.sampled_from(["GET", "POST", "ANY", "CONNECT", "get", "X-Y", "WEBSOCKET", "a b"])
HOSTS = st.sampled_from(
    [
        "a.example.com",
        "github.com",
        "x",
        "UPPER.example.com",
        "*.example.com",
        "xn--bcher-kva.example",
        "[::1]",
    ]
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.fixed_dictionaries({"path": PATHS, "method": METHODS, "host": HOSTS}), max_size=6),
    st.dictionaries(st.sampled_from([*sorted(REQUEST), "time", "attempt_id", "sandbox"]), VALUES | ODD),
)
def test_whatever_programs_sent_the_file_loads_and_its_tests_hold(
    records: list[dict[str, object]], odd: dict[str, object]
) -> None:
    rules = load(organisation={"schema": 1}, profiles__box={"schema": 1, "profile": "box", "owner": "o"})
    assert not isinstance(rules, Problems)
    suggested(rules, "box", *records, odd)  # which holds it
