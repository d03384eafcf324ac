"""The shipped services against the traffic of the tools that they are for.

`profiles/NAME.yaml` is a rule file like any other: it uses the one service NAME, and its tests are what the service's tools send,
reads that must pass and writes that must not. `refused.txt` is tried under each of them besides.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from egressd.policy.attempt import RequestAttempt
from egressd.policy.compile import CompiledPolicy, compile_policy
from egressd.policy.model import ProfileFile, ServiceFile
from egressd.rulefiles.claims import judge
from egressd.rulefiles.load import Rules, load_rules
from egressd.rulefiles.problems import Findings
from egressd.rulefiles.requestline import Asked, parse_request_line
from egressd.rulefiles.yaml import parse_model

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parents[1] / "rules"
PROFILES = HERE / "profiles"
NOON = 1_796_126_400.0  # 2026-12-01T12:00Z
READS = {"GET", "HEAD"}


def _read[M: (ProfileFile, ServiceFile)](path: Path, model: type[M]) -> M:
    findings = Findings()
    loaded = parse_model(path.read_bytes(), path.name, model, findings)
    assert loaded is not None, str(findings.problems())
    return loaded[0]


SERVICES = {path.stem: _read(path, ServiceFile) for path in sorted((SHIPPED / "services").glob("*.yaml"))}
TRAFFIC = {path.stem: _read(path, ProfileFile) for path in sorted(PROFILES.glob("*.yaml"))}


def asked(line: str) -> Asked:
    found = parse_request_line(line)
    assert isinstance(found, Asked), f"{line}: {found}"
    return found


def refused_lines() -> list[tuple[str, frozenset[str]]]:
    lines = [line for line in (HERE / "refused.txt").read_text().splitlines() if line and line[0] != "#"]
    parted = [line.partition(" !") for line in lines]
    return [(line, frozenset(but.split())) for line, _, but in parted]


REFUSED = refused_lines()


def lay(folder: Path, profiles: dict[str, str]) -> Rules:
    for part in ("services", "lists"):
        shutil.copytree(SHIPPED / part, folder / part)
    shutil.copy(SHIPPED / "organisation.yaml", folder)
    (folder / "profiles").mkdir()
    for name, text in profiles.items():
        (folder / "profiles" / f"{name}.yaml").write_text(text)
    rules = load_rules(folder, now=NOON)
    assert isinstance(rules, Rules), str(rules)
    return rules


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Rules:
    """One profile a service; that they load means that every test in them holds."""
    texts = {path.stem: path.read_text() for path in PROFILES.glob("*.yaml")}
    return lay(tmp_path_factory.mktemp("alone") / "rules", texts)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Rules:
    """All services in one profile: `reading` without those that write, `all` with them."""
    texts = {}
    for name, accesses in (("reading", {"read", "call"}), ("all", {"read", "call", "write"})):
        lines = ["schema: 1", f"profile: {name}", "accept: {own-keys: nothing is sent}", "allow:"]
        for service, profile in TRAFFIC.items():
            if SERVICES[service].access not in accesses:
                continue
            lines.append(f"  - service: {service}")
            if given := profile.allow[0].with_:
                lines.append(f"    with: {given}")
        texts[name] = "\n".join(lines) + "\n"
    return lay(tmp_path_factory.mktemp("together") / "rules", texts)


def test_every_service_has_its_traffic_and_nothing_else_has() -> None:
    assert set(TRAFFIC) == set(SERVICES)


@pytest.mark.parametrize("name", TRAFFIC)
def test_the_traffic_is_of_this_one_service(name: str) -> None:
    profile, denials_only = TRAFFIC[name], SERVICES[name].access == "deny"
    entries = profile.deny if denials_only else profile.allow
    assert [entry.service for entry in entries] == [name]
    assert not (profile.allow if denials_only else profile.deny)
    assert not profile.ask
    assert profile.mode == "enforce"
    if not denials_only:
        assert [test for test in profile.tests if test.allow], "no tool's request is allowed"
        assert all(test.rule == name for test in profile.tests if test.allow)


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if service.access != "deny"])
def test_it_shows_a_write_that_is_refused(name: str, alone: Rules) -> None:
    """At least two, one of them in a method that writes, and one on a host that the service does reach."""
    denied = [asked(test.deny).attempt for test in TRAFFIC[name].tests if test.deny]
    requests = [attempt for attempt in denied if isinstance(attempt, RequestAttempt)]
    assert len(requests) >= 2
    assert any(attempt.method not in READS for attempt in requests)
    policy = alone.compiled(name)
    reached = [
        attempt
        for attempt in requests
        if isinstance(attempt.host, tuple) and policy.levels_of_name(attempt.host)
    ]
    assert reached, "every refusal is of a host that the service does not name"


@pytest.mark.parametrize("name", [name for name, service in SERVICES.items() if service.access != "deny"])
def test_its_traffic_would_notice_if_any_group_of_hosts_were_opened(name: str, alone: Rules) -> None:
    """Each entry in turn is made to take every request: some refusal must then be missed."""
    effective = alone.effective(name)
    denied = [test.deny for test in TRAFFIC[name].tests if test.deny]
    denied += [line for line, but in REFUSED if name not in but]
    for index, entry in enumerate(effective.entries):
        if entry.effect == "deny":
            continue  # the organisation's
        entries = list(effective.entries)
        entries[index] = entry.model_copy(update={"requests": ("ANY /**",)})
        opened = compile_policy(effective.model_copy(update={"entries": tuple(entries)}))
        assert any(judge(opened, asked(line), NOON).verdict != "deny" for line in denied), entry.hosts


def test_every_claim_of_every_tool_holds(alone: Rules) -> None:
    assert alone.profiles == sorted(TRAFFIC)
    assert alone.tests > sum(len(profile.tests) for profile in TRAFFIC.values())  # and the organisation's
    assert alone.warnings == ()


@pytest.mark.parametrize("name", TRAFFIC)
def test_nothing_that_must_be_refused_gets_out(name: str, alone: Rules) -> None:
    policy = alone.compiled(name)
    for line, but in REFUSED:
        verdict = judge(policy, asked(line), NOON).verdict
        assert verdict == ("allow" if name in but else "deny"), line


def test_an_exception_names_a_service_that_writes() -> None:
    named = {name for _, but in REFUSED for name in but}
    assert {SERVICES[name].access for name in named} == {"write"}


def _allowed_claims() -> list[tuple[str, str]]:
    return [(name, test.allow) for name, profile in TRAFFIC.items() for test in profile.tests if test.allow]


def test_services_do_not_take_from_each_other(together: Rules) -> None:
    """Where one service binds paths on a host, targets there must be canonical for the others too."""
    policy = together.compiled("all")
    lost = [
        f"{name}: {line}"
        for name, line in _allowed_claims()
        if judge(policy, asked(line), NOON).verdict != "allow"
    ]
    assert lost == []


def _out(policy: CompiledPolicy) -> list[str]:
    return [line for line, _ in REFUSED if judge(policy, asked(line), NOON).verdict != "deny"]


def test_all_reading_services_together_let_nothing_out(together: Rules) -> None:
    assert _out(together.compiled("reading")) == []


def test_writing_lets_out_what_it_says(together: Rules) -> None:
    assert set(_out(together.compiled("all"))) == {line for line, but in REFUSED if but}


def test_a_service_for_denials_cannot_be_allowed(tmp_path: Path) -> None:
    for part in ("services", "lists"):
        shutil.copytree(SHIPPED / part, tmp_path / part)
    shutil.copy(SHIPPED / "organisation.yaml", tmp_path)
    (tmp_path / "profiles").mkdir()
    text = "schema: 1\nprofile: a\nallow:\n  - service: exfil-sinks\n"
    (tmp_path / "profiles" / "a.yaml").write_text(text)
    problems = load_rules(tmp_path, now=NOON)
    assert "not_together: exfil-sinks is for denials" in str(problems)
