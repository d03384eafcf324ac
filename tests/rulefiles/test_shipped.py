"""The rules that we ship: sound, quiet, current, and refusing what they must."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from egressd.cli.main import app
from egressd.policy.credential import Attach, CredentialsFile, Source
from egressd.rulefiles.claims import judge
from egressd.rulefiles.credentials import load_credentials
from egressd.rulefiles.load import Rules, load_rules
from egressd.rulefiles.problems import Code
from egressd.rulefiles.requestline import Asked, parse_request_line
from egressd.rulefiles.schema import schema_text

ROOT = Path(__file__).resolve().parent.parent.parent
RULES = ROOT / "rules"
EXAMPLE = (RULES / "credentials.example.yaml").read_text()
NOON = 1_796_126_400.0  # 2026-12-01T12:00Z


@pytest.fixture(scope="module")
def rules() -> Rules:
    found = load_rules(RULES, now=NOON)
    assert isinstance(found, Rules), str(found)
    return found


def test_the_shipped_rules_load_without_a_warning(rules: Rules) -> None:
    assert rules.warnings == ()
    assert rules.profiles == ["coding-agent", "locked-down"]


def test_the_schema_is_current() -> None:
    hint = "python -m egressd.rulefiles.schema > rules/schema.json"
    assert (RULES / "schema.json").read_text() == schema_text(), hint


def test_the_schema_of_credentials_is_current() -> None:
    hint = "python -m egressd.rulefiles.schema credentials > rules/credentials.schema.json"
    assert (RULES / "credentials.schema.json").read_text() == schema_text("credentials"), hint


def test_the_example_of_credentials_shows_every_source_and_every_way() -> None:
    loaded = load_credentials(RULES / "credentials.example.yaml")
    assert isinstance(loaded, CredentialsFile), str(loaded)
    shown = loaded.credentials.values()
    assert {one.source.kind for one in shown} == set(Source.model_fields)
    assert {one.attach.kind for one in shown} == set(Attach.model_fields)
    assert EXAMPLE.startswith("# yaml-language-server: $schema=credentials.schema.json\n")


def test_the_example_of_credentials_has_nothing_to_be_warned_of_but_that_no_rule_uses_it() -> None:
    found = load_rules(RULES, now=NOON, credentials=RULES / "credentials.example.yaml")
    assert isinstance(found, Rules), str(found)
    assert {warning.code for warning in found.warnings} == {Code.CREDENTIAL_UNUSED}


def test_the_commands_of_the_readme_do_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands = (RULES / "README.md").read_text().split("```sh\n")[1].split("```")[0].splitlines()
    statuses = [CliRunner().invoke(app, shlex.split(command)[1:]).exit_code for command in commands]
    assert statuses == [0, 1], commands


@pytest.mark.parametrize("path", sorted(RULES.glob("*/*.yaml")), ids=lambda path: path.name)
def test_editors_find_the_schema_from_every_rule_file(path: Path) -> None:
    assert path.read_text().startswith("# yaml-language-server: $schema=../schema.json\n")


@pytest.mark.parametrize("name", ["coding-agent", "locked-down"])
@pytest.mark.parametrize(
    "request_line",
    [
        "GET http://169.254.169.254/latest/meta-data/iam/security-credentials/",
        "GET http://[::ffff:169.254.169.254]/",
        "GET http://0xa9fea9fe/",
        "GET http://metadata.google.internal/",
        "GET https://127.0.0.1/",
        "POST https://pastebin.com/api/api_post.php",
        "GET https://x.ngrok.io/",
        "GET https://dns.google/resolve?name=secret.example.com",
        "POST https://pypi.org/legacy/",
        "PUT https://registry.npmjs.org/left-pad",
        "POST https://github.com/mallory/x.git/git-receive-pack",
        "POST https://api.github.com/gists",
        "POST https://api.anthropic.com/v1/files",
        "GET https://1.1.1.1/",
        "tcp://smtp.example.com:25",
    ],
)
def test_no_shipped_profile_lets_this_out(rules: Rules, name: str, request_line: str) -> None:
    asked = parse_request_line(request_line)
    assert isinstance(asked, Asked)
    assert judge(rules.compiled(name), asked, NOON).verdict == "deny"


def test_locked_down_lets_nothing_out_that_coding_agent_does(rules: Rules) -> None:
    for line in (RULES / "profiles" / "coding-agent.yaml").read_text().splitlines():
        if line.strip().startswith("- {allow:"):
            asked = parse_request_line(line.split('"')[1])
            assert isinstance(asked, Asked)
            assert judge(rules.compiled("locked-down"), asked, NOON).verdict == "deny"
