"""README.md is true: its commands run, its rule file loads, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from egressd.gate.inspector.refusal import Refused, refuse_http
from egressd.lab import Lab
from egressd.lab.stand import Stand
from egressd.policy.reasons import Reason
from egressd.rulefiles.load import load_rules
from egressd.rulefiles.problems import Problems

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    "README.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/records.md",
    "docs/catalogue.md",
    "docs/clients.md",
    "docs/credentials.md",
    "docs/dns.md",
    "docs/limits.md",
    "docs/lints.md",
    "docs/pull-requests.md",
    "docs/rollout.md",
    "docs/rules.md",
    "docs/serve.md",
    "docs/verify.md",
    "docs/wirings.md",
    "rules/README.md",
]
ATTEMPT = re.compile(r"\b[0-9a-f]{28}\b")
VARYING = re.compile(
    r"\d{4}-\d\d-\d\dT[\d:.]+Z|\bsbx-[0-9a-f]+\b|\b[0-9a-f]{28}\b|\b(up|down) [\d.]+ [kMGT]?B\b|\b[\d.]+ m?s\b"
)


class Example(NamedTuple):
    """A command as README shows it, and what it prints there."""

    command: str
    shown: str


def text(page: str = "README.md") -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text(), re.MULTILINE | re.DOTALL)


def examples(verb: str) -> list[Example]:
    found = [Example(*block.removeprefix("$ ").split("\n", 1)) for block in blocks("console")]
    return [each for each in found if each.command.startswith(f"egressd {verb} ")]


def same(line: str) -> str:
    """Return a line without what differs from run to run, its columns one space apart."""
    return " ".join(VARYING.sub("*", line).split())


def same_lines(printed: str) -> list[str]:
    return [same(line) for line in printed.splitlines()]


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    rules = text("rules/profiles/coding-agent.yaml").replace("profile: coding-agent", "profile: lab")
    with Lab.build() as lab, Stand(lab, rules, shipped=ROOT / "rules") as stand:
        yield stand


def run(stand: Stand, command: str) -> subprocess.CompletedProcess[str]:
    arguments = stand.egressd(*shlex.split(command)[1:])
    return stand.lab.host_exec(arguments, cwd=str(stand.workspace), timeout=60.0)


@pytest.mark.root
@pytest.mark.e2e
def test_what_readme_runs_prints_what_readme_shows(stand: Stand) -> None:
    shown = examples("run")
    assert len(shown) == 2
    for example in shown:
        ran = run(stand, example.command)
        assert same_lines(ran.stdout) == same_lines(example.shown), ran.stderr


@pytest.mark.root
@pytest.mark.e2e
def test_the_journal_then_holds_the_lines_that_readme_shows(stand: Stand) -> None:
    run(stand, examples("run")[0].command)
    (example,) = examples("log")
    printed = iter(same_lines(run(stand, example.command).stdout))
    for line in same_lines(example.shown):
        assert line in printed, line


def test_the_denial_in_readme_is_the_one_that_clients_get() -> None:
    shown = examples("run")[1].shown
    (attempt,) = ATTEMPT.findall(shown)
    refused = Refused(attempt, "sbx", ("example", "com"), 443, "GET", "*/*")
    assert shown.encode() == refuse_http(Reason.NOT_ALLOWED, refused).body


def test_explain_begins_as_readme_shows() -> None:
    (example,) = examples("explain")
    command = [sys.executable, "-m", "egressd", "--rules", "rules", *shlex.split(example.command)[1:]]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 1
    assert ran.stdout.startswith(example.shown)


def test_the_rule_file_loads_and_its_own_tests_hold(tmp_path: Path) -> None:
    (block,) = blocks("yaml")
    name = block.splitlines()[0].removeprefix("# rules/")
    shutil.copytree(ROOT / "rules", tmp_path / "rules")
    (tmp_path / "rules" / name).write_text(block)
    rules = load_rules(tmp_path / "rules")
    assert not isinstance(rules, Problems), str(rules)
    assert "docs-writer" in rules.profiles


def test_the_make_targets_exist() -> None:
    targets = set(re.findall(r"^make (\w+)", "\n".join(blocks("sh")), re.MULTILINE))
    assert targets == {"demo", "test"}
    assert targets <= set(re.findall(r"^(\w+):", text("Makefile"), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_something(page: str) -> None:
    here = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text(page)):
        assert target.startswith("https://") or (here / target).exists(), target
