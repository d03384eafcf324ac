from __future__ import annotations

import datetime as dt
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.policy.effective import EffectiveEntry, EntryLimits, Rate
from egressd.rulefiles.load import Rules, load_rules, load_source
from egressd.rulefiles.problems import MOST, Code, Findings, Problems
from egressd.rulefiles.source import RuleSource, read_source

NOW = dt.datetime(2026, 12, 1, 12, tzinfo=dt.UTC).timestamp()

SERVICE = """schema: 1
service: forge
description: fetching
owner: team
reviewed: 2026-11-30
sources: [its manual]
parameters:
  repos: {type: repo}
  region: {type: enum, values: [eu, us]}
entries:
  - hosts: ["{region}.forge.example.com"]
    requests: ["GET /{repo}/info"]
  - hosts_from: lists/docs.txt
"""


def source(profile: str, **more: str) -> RuleSource:
    files = {
        "organisation.yaml": "schema: 1\n",
        "services/forge.yaml": SERVICE,
        "lists/docs.txt": "docs.example.com\n",
        "profiles/box.yaml": f"schema: 1\nprofile: box\n{profile}",
    }
    files |= {name.replace("__", "/"): text for name, text in more.items()}
    return RuleSource({path: text.encode() for path, text in files.items()}, "rules")


def loaded(profile: str, **more: str) -> Rules:
    rules = load_source(source(profile, **more), now=NOW)
    assert isinstance(rules, Rules), str(rules)
    return rules


def entries(profile: str) -> tuple[EffectiveEntry, ...]:
    return loaded(profile).effective("box").entries


def codes(profile: str, **more: str) -> list[Code]:
    found = load_source(source(profile, **more), now=NOW)
    return [problem.code for problem in found] if isinstance(found, Problems) else []


def test_an_allow_without_more_is_https_on_443() -> None:
    (entry,) = entries("allow:\n  - hosts: [a.example.com]\n")
    assert (entry.schemes, entry.ports, entry.treatment) == (("https",), (443,), "inspect")


@pytest.mark.parametrize(
    ("schemes", "ports"),
    [("[http]", (80,)), ("[https, http]", (443, 80)), ("[http]\n    ports: [8080]", (8080,))],
)
def test_ports_follow_the_schemes_unless_they_are_named(schemes: str, ports: tuple[int, ...]) -> None:
    (entry,) = entries(f"allow:\n  - hosts: [a.example.com]\n    schemes: {schemes}\n")
    assert entry.ports == ports


def test_a_deny_without_more_is_every_port_and_scheme() -> None:
    (entry,) = entries("deny:\n  - hosts: [a.example.com]\n")
    assert (entry.schemes, entry.ports, entry.requests) == (("https", "http"), (), ())


def test_a_service_becomes_an_entry_for_each_of_its_groups_with_the_rules_id_and_place() -> None:
    made = entries("allow:\n  - service: forge\n    with: {repos: [a/b, 'c/*'], region: [eu, us]}\n")
    assert [(one.id, one.place, one.via) for one in made] == [
        ("forge", "profiles/box.yaml:4", "services/forge.yaml:11"),
        ("forge", "profiles/box.yaml:4", "services/forge.yaml:13"),
    ]
    assert made[0].hosts == ("eu.forge.example.com", "us.forge.example.com")
    assert made[0].requests == ("GET /a/b/info", "GET /c/*/info")
    assert made[1].hosts == ("docs.example.com",)


def test_entries_stand_in_the_order_of_the_file_whatever_their_effect() -> None:
    made = entries(
        "allow:\n  - hosts: [a.example.com]\nask:\n  - hosts: [b.example.com]\ndeny:\n  - hosts: [c.example.com]\n"
    )
    assert [one.id for one in made] == ["a-example-com", "ask-b-example-com", "deny-c-example-com"]


def test_limits_of_entry_and_profile_are_rates() -> None:
    rules = loaded(
        "limits: {connections: 8, download: 1GiB/hour}\nallow:\n  - hosts: [a.example.com]\n"
        "    limits: {requests: 600/minute, upload: 50MB/day}\n"
    )
    effective = rules.effective("box")
    assert effective.limits == EntryLimits(connections=8, download=Rate(amount=2**30, seconds=3600))
    assert effective.entries[0].limits == EntryLimits(
        requests=Rate(amount=600, seconds=60), upload=Rate(amount=50_000_000, seconds=86400)
    )


def test_the_organisations_denials_stand_before_every_profiles_rules() -> None:
    rules = loaded(
        "allow:\n  - hosts: [a.example.com]\n",
        **{
            "organisation.yaml": "schema: 1\ndeny:\n  - hosts: [b.example.com]\n",
            "profiles__other.yaml": "schema: 1\nprofile: other\n",
        },
    )
    assert rules.profiles == ["box", "other"]
    for name in rules.profiles:
        first = rules.effective(name).entries[0]
        assert (first.id, first.origin, first.effect) == ("org-deny-b-example-com", "organisation", "deny")


def test_an_organisation_deny_of_requests_and_a_tunnel_do_not_go_together() -> None:
    organisation = 'schema: 1\ndeny:\n  - hosts: ["*.example.com"]\n    requests: ["POST /**"]\n'
    profile = "allow:\n  - hosts: [a.example.com]\n    treatment: tunnel\n"
    assert codes(profile, **{"organisation.yaml": organisation}) == [Code.NOT_INSPECTED]
    assert codes(profile.replace("tunnel", "inspect"), **{"organisation.yaml": organisation}) == []


def test_an_expired_denial_of_the_organisation_is_said() -> None:
    organisation = "schema: 1\ndeny:\n  - hosts: [b.example.com]\n    expires: 2026-11-30\n"
    assert [warning.code for warning in loaded("", **{"organisation.yaml": organisation}).warnings] == [
        Code.EXPIRED
    ]


def test_a_file_name_that_is_no_text_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "rules"
    (folder / "profiles").mkdir(parents=True)
    (folder / "organisation.yaml").write_text("schema: 1\n")
    (folder / "profiles" / "\udcff\x1b[2J.yaml").write_text("schema: 1\nprofile: x\n")
    found = load_rules(folder, now=NOW)
    assert isinstance(found, Problems)
    assert str(found).isascii()
    assert "\x1b" not in str(found)
    assert found.items[0].code is Code.NAME_MISMATCH
    assert len(read_source(folder, Findings()).digest) == 16


def test_a_profile_cannot_take_the_organisations_id() -> None:
    organisation = "schema: 1\ndeny:\n  - id: sinks\n    hosts: [b.example.com]\n"
    profile = "allow:\n  - id: sinks\n    hosts: [a.example.com]\n"
    assert codes(profile, **{"organisation.yaml": organisation}) == [Code.DUPLICATE_ID]


def test_the_organisations_tests_hold_under_every_profile() -> None:
    organisation = 'schema: 1\ntests:\n  - {deny: "GET https://a.example.com/"}\n'
    found = load_source(
        source("allow:\n  - hosts: [a.example.com]\n", **{"organisation.yaml": organisation}), now=NOW
    )
    assert isinstance(found, Problems)
    assert found.only_tests_failed
    assert "under box" in str(found)


def test_a_wrong_service_is_reported_once_and_not_again_where_it_is_used() -> None:
    broken = SERVICE.replace("GET /{repo}/info", "GET {repo}")
    assert codes("allow:\n  - service: forge\n", **{"services__forge.yaml": broken}) == [Code.BAD_REQUEST]


def test_problems_of_all_files_come_together_sorted_by_place() -> None:
    found = load_source(
        source(
            "allow:\n  - hosts: [A.example.com]\n  - hosts: ['*']\n",
            **{"profiles__other.yaml": "schema: 1\nprofile: other\nalow: []\n", "lists__docs.txt": "x\n"},
        ),
        now=NOW,
    )
    assert isinstance(found, Problems)
    where = [(problem.path, problem.line, problem.code) for problem in found]
    assert where == [
        ("rules/lists/docs.txt", 1, Code.BAD_HOST),
        ("rules/profiles/box.yaml", 4, Code.NOT_NORMAL),
        ("rules/profiles/box.yaml", 5, Code.BAD_WILDCARD),
        ("rules/profiles/other.yaml", 3, Code.UNKNOWN_KEY),
    ]


def test_a_file_full_of_mistakes_does_not_fill_the_terminal() -> None:
    hosts = ", ".join(f"'x{index}..example.com'" for index in range(MOST + 50))
    found = load_source(source(f"allow:\n  - hosts: [{hosts}]\n"), now=NOW)
    assert isinstance(found, Problems)
    assert (len(found.items), found.left_out, len(found)) == (MOST, 50, MOST + 50)
    assert str(found).endswith("… and 50 more")


def test_file_content_cannot_write_on_the_terminal() -> None:
    text = str(load_source(source('allow:\n  - hosts: ["\\e[2Jx\\u202e\\n.example.com"]\n'), now=NOW))
    assert "\x1b" not in text
    assert "\u202e" not in text


LISTS = [
    ("\n", [Code.EMPTY_LIST]),
    ("a.example.com # why\n  b.example.com\n", []),
    ("a.example.com b.example.com\n", [Code.BAD_HOST]),
    ("a.example.com\na.example.com\n", [Code.DUPLICATE_ITEM]),
    ("A.example.com\n", [Code.NOT_NORMAL]),
    ("*.com\n", [Code.PUBLIC_SUFFIX]),
]


@pytest.mark.parametrize(("text", "expected"), LISTS)
def test_a_list_is_one_host_a_line(text: str, expected: list[Code]) -> None:
    assert codes("", **{"lists__docs.txt": text}) == expected


def test_the_last_valid_day_ends_at_midnight_utc() -> None:
    profile = 'allow:\n  - hosts: [a.example.com]\n    expires: 2026-12-01\ntests:\n  - {allow: "GET https://a.example.com/"}\n'
    just_before = dt.datetime(2026, 12, 1, 23, 59, 59, tzinfo=dt.UTC).timestamp()
    assert [warning.code for warning in loaded_at(profile, just_before).warnings] == []
    after = loaded_at(profile, just_before + 1)
    assert [warning.code for warning in after.warnings] == [Code.EXPIRED, Code.TEST_EXPIRED]


def loaded_at(profile: str, now: float) -> Rules:
    rules = load_source(source(profile), now=now)
    assert isinstance(rules, Rules), str(rules)
    return rules


def test_observing_that_has_ended_loads_and_is_said() -> None:
    rules = loaded("mode: observe\nobserve_until: 2026-11-30\n")
    assert [warning.code for warning in rules.warnings] == [Code.EXPIRED]


@pytest.mark.parametrize(
    "profile",
    [
        "mode: observe\nobserve_until: 2026-12-01\n",
        "allow:\n  - hosts: [a.example.com]\n    mode: observe\n    observe_until: 2026-12-01\n",
        "allow:\n  - hosts: [a.example.com]\ndeny:\n  - {hosts: [a.example.com], mode: observe, observe_until: 2026-12-01}\n",
    ],
    ids=["a profile", "an allow", "a denial"],
)
def test_observing_that_ends_at_midnight_keeps_nobody_from_starting(profile: str) -> None:
    profile += 'tests:\n  - {allow: "GET https://a.example.com/"}\n'
    just_before = dt.datetime(2026, 12, 1, 23, 59, 59, tzinfo=dt.UTC).timestamp()
    assert loaded_at(profile, just_before).warnings == ()
    after = loaded_at(profile, just_before + 1)
    assert {warning.code for warning in after.warnings} == {Code.EXPIRED, Code.TEST_EXPIRED}


def test_accepting_a_risk_takes_a_reason() -> None:
    web = "allow:\n  - public_web: read\n    limits: {requests: 1/hour, new_hosts: 1/hour, upload: 1MB/day}\n"
    private = "  - hosts: [r.example.com]\n    addresses: [10.0.0.0/8]\n"
    sinks = {"services__exfil-sinks.yaml": SERVICE_SINKS}
    assert codes(web + private, **sinks) == [Code.MIXED_PUBLIC]
    assert codes("accept: {mixed-public: reviewed in SEC-1}\n" + web + private, **sinks) == []
    assert codes(web) == [Code.UNKNOWN_SERVICE], "the sinks that it always denies must be there"


SERVICE_SINKS = """schema: 1
service: exfil-sinks
description: takers of data
owner: team
reviewed: 2026-11-30
sources: [common knowledge]
entries:
  - hosts: [paste.example.net]
"""


def test_the_digest_tells_equal_folders_from_others() -> None:
    one, same, other = source(""), source(""), source("owner: me\n")
    assert one.digest == same.digest != other.digest


def test_a_folder_is_read_once_and_links_are_followed(tmp_path: Path) -> None:
    real = tmp_path / "real"
    for path, content in source("").files.items():
        (real / path).parent.mkdir(parents=True, exist_ok=True)
        (real / path).write_bytes(content)
    (tmp_path / "rules").symlink_to(real)  # as a Kubernetes volume is laid out
    findings = Findings()
    read = read_source(tmp_path / "rules", findings)
    assert findings.errors == []
    assert read.files == source("").files
    assert isinstance(load_rules(tmp_path / "rules", now=NOW), Rules)


def test_a_folder_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    found = load_rules(tmp_path / "none")
    assert isinstance(found, Problems)
    assert [problem.code for problem in found] == [Code.UNREADABLE]


ALL = (
    "owner: me\nlimits: {connections: 3}\nallow:\n  - service: forge\n    with: {repos: a/b, region: eu}\n"
    "  - id: x\n    hosts: ['*.a.example.com', b.example.com]\n    requests: ['GET /a?b=c&*']\n    expires: 2027-01-01\n"
    "  - hosts: [c.example.com]\n    treatment: relay\n    ports: [5432]\n    addresses: [10.0.0.0/8]\n"
    "deny:\n  - hosts_from: lists/docs.txt\nask:\n  - hosts: [d.example.com]\n    approvers: [me]\n"
    "tests:\n  - {allow: 'tcp://c.example.com:5432', at: 2026-12-01}\n"
)


@given(st.data())
def test_loading_is_total_whatever_a_file_has_become(data: st.DataObject) -> None:
    base = source(ALL).files
    path = data.draw(st.sampled_from(sorted(base)))
    content = base[path]
    at = data.draw(st.integers(0, len(content)))
    cut = data.draw(st.integers(0, 12))
    put = data.draw(
        st.one_of(
            st.binary(max_size=4),
            st.sampled_from([b"[]", b"{}", b"1", b"x", b"'", b"\n  - ", b"*", b"{repo}"]),
        )
    )
    load_source(RuleSource({**base, path: content[:at] + put + content[at + cut :]}), now=NOW)


def test_two_thousand_rules_with_a_hundred_thousand_hosts_load_in_seconds() -> None:
    lines = ["allow:"]
    for rule in range(2000):
        hosts = [f"{'*.' if host % 5 == 0 else ''}h{host}.r{rule}.example.com" for host in range(50)]
        lines += [
            f"  - id: r{rule}",
            f"    hosts: ['{"', '".join(hosts)}']",
            f"    requests: ['GET /p{rule}/**']",
        ]
    began = time.process_time()
    rules = loaded("\n".join(lines) + "\n")
    assert len(rules.effective("box").entries) == 2000
    assert time.process_time() - began < 30, "2 s on a slow machine; thirty would be something quadratic"
