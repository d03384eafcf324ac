from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_check import RULES, nothing_given, run

__all__ = ["nothing_given"]

ALLOWED = "GET https://pypi.org/simple/requests/"
DENIED = "POST https://pypi.org/simple/"
ASKED = "GET https://github.com/else/where/info/refs?service=git-upload-pack"


def explain(request: str, *words: str) -> tuple[int, str, str]:
    return run("explain", request, "--rules", RULES, *words)


@pytest.mark.parametrize(
    ("request_line", "status", "first"),
    [
        (ALLOWED, 0, f"allow (inspect): {ALLOWED} under coding-agent"),
        (DENIED, 1, f"deny: {DENIED} under coding-agent"),
        (ASKED, 1, f"ask: {ASKED} under coding-agent"),
        ("dns:pypi.org", 0, "allow (inspect): dns:pypi.org under coding-agent"),
        ("tcp://pypi.org:22", 1, "deny: tcp://pypi.org:22 under coding-agent"),
    ],
)
def test_the_verdict_comes_first_and_is_the_status(request_line: str, status: int, first: str) -> None:
    got, out, err = explain(request_line, "--profile", "coding-agent")
    assert (got, err) == (status, "")
    assert out.splitlines()[0] == first


def test_the_rule_is_named_with_its_file_and_line() -> None:
    _, out, _ = explain(ALLOWED, "--profile", "coding-agent")
    line = (RULES / "profiles" / "coding-agent.yaml").read_text().splitlines().index("  - service: pypi") + 1
    assert f"  rule:   pypi ({RULES}/profiles/coding-agent.yaml:{line})\n" in out


def test_json_is_one_object() -> None:
    status, out, _ = explain(DENIED, "--profile", "coding-agent", "--json")
    found = json.loads(out)
    assert status == 1
    assert (found["verdict"], found["reason"], found["rule"]) == ("deny", "method_not_allowed", None)
    assert found["tried"][0]["rule"] == "pypi"
    assert found["tried"][0]["standing"] == "misses"


def keyed(request: str, *words: str | Path) -> tuple[int, str, str]:
    whole = RULES.parent / "tests" / "golden" / "15-a-credential"
    given = ("--credentials", whole / "credentials.yaml", "--profile", "box")
    return run("explain", request, "--rules", whole / "rules", *given, *words)


def test_the_credential_is_named_with_its_field_its_rule_and_its_binding() -> None:
    status, out, _ = keyed("POST https://api.example.com/v1/messages")
    assert status == 0
    assert "  credential: models, in the header field x-api-key\n    rule models names it (" in out
    assert "credentials.yaml:6)\n" in out
    _, out, _ = keyed("GET https://docs.example.com/")
    assert "  credential: none (rule docs names none)\n" in out


def test_json_has_the_credential() -> None:
    found = json.loads(keyed("POST https://api.example.com/v1/messages", "--json")[1])["credential"]
    assert (found["name"], found["how"]) == ("models", "in the header field x-api-key")
    assert found["for"].endswith("credentials.yaml:6")
    assert json.loads(explain(ALLOWED, "--profile", "coding-agent", "--json")[1])["credential"] is None


def test_a_bad_credentials_file_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "credentials.yaml").write_text("schema: 1\ncredentials: {a: hunter2}\n")
    status, out, err = explain(
        ALLOWED, "--profile", "coding-agent", "--credentials", str(tmp_path / "credentials.yaml")
    )
    assert (status, out) == (2, "")
    assert "credentials.yaml:2:18: wrong_type: " in err
    assert "hunter2" not in err


def test_the_profile_may_come_from_the_environment_and_has_no_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert explain(ALLOWED)[0] == 2
    monkeypatch.setenv("EGRESSD_PROFILE", "coding-agent")
    assert explain(ALLOWED)[0] == 0
    assert explain(ALLOWED, "--profile", "locked-down")[0] == 1


@pytest.mark.parametrize(
    ("request_line", "words", "says"),
    [
        ("get https://pypi.org/", ("--profile", "coding-agent"), "hint: write GET"),
        (ALLOWED, ("--profile", "coding-agnet"), "did you mean 'coding-agent'?"),
        (ALLOWED, ("--profile", "coding-agent", "--at", "tomorrow"), "--at 'tomorrow'"),
        (ALLOWED, ("--profile", "coding-agent", "--rules", __file__), "unreadable"),
    ],
)
def test_bad_input_is_status_2_and_says_why_on_stderr(
    request_line: str, words: tuple[str, ...], says: str
) -> None:
    status, out, err = explain(request_line, *words)
    assert (status, out) == (2, "")
    assert says in err


def test_at_judges_another_day(tmp_path: Path) -> None:
    for path, text in {
        "organisation.yaml": "schema: 1\n",
        "profiles/box.yaml": "schema: 1\nprofile: box\nallow:\n  - hosts: [a.example.com]\n    expires: 2099-03-31\n",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)

    def status(at: str) -> int:
        return run(
            "explain", "GET https://a.example.com/", "--rules", tmp_path, "--profile", "box", "--at", at
        )[0]

    assert [status(at) for at in ("2099-03-31T23:59Z", "2099-04-01T00:00Z", "2099-03-31")] == [0, 1, 0]


def test_a_verb_loads_nothing_of_the_others() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from egressd.cli.main import app\n"
        f"assert CliRunner().invoke(app, ['check', {str(RULES)!r}]).exit_code == 0\n"
        "heavy = {'mitmproxy', 'aiohttp', 'dnslib', 'pyroute2', 'cryptography', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {sorted(heavy)}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


ATTEMPT = "01a3185c51a41122334455667788"
RECORD = {
    "time": "2026-12-01T12:00:00.000000Z",
    "event": "decision",
    "sandbox": "sbx-1",
    "attempt_id": ATTEMPT,
    "layer": "request",
    "verdict": "allow",
    "reason": "rule",
    "rule": "github-clone",
    "place": "profiles/coding-agent.yaml:13",
    "profile": "coding-agent",
    "policy": "0000000000000000",
    "host": "github.com",
    "port": 443,
    "scheme": "https",
    "method": "GET",
    "path": "/acme/widgets/info/refs",
    "query": "service=<15>",
}


def journal(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "journal.jsonl"
    other = RECORD | {"attempt_id": "0" * 28}
    path.write_text("".join(json.dumps(record) + "\n" for record in (other, RECORD | changes)))
    return path


def test_an_attempt_is_explained_by_its_record_and_by_the_rules(tmp_path: Path) -> None:
    status, out, _ = run("explain", ATTEMPT, "--journal", journal(tmp_path), "--rules", RULES)
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "recorded: allow: GET https://github.com/acme/widgets/info/refs?service=<15>"
    assert "sandbox sbx-1, profile coding-agent" in lines[1]
    assert "  note:   the rules have changed since; below is what they say now" in lines
    assert (
        "allow (inspect): GET https://github.com/acme/widgets/info/refs?service=<15> under coding-agent"
        in lines
    )
    assert next(line for line in lines if line.startswith("  rule:   github-clone (") and "rules" in line)


def test_the_same_as_json_has_the_record_whole(tmp_path: Path) -> None:
    _, out, _ = run("explain", ATTEMPT, "--journal", journal(tmp_path), "--rules", RULES, "--json")
    told = json.loads(out)
    assert told["recorded"] == {"record": RECORD, "same_rules": False}
    assert told["rule"] == "github-clone"


def test_an_attempt_that_no_rule_decided_has_its_record_told(tmp_path: Path) -> None:
    path = journal(tmp_path, verdict="deny", reason="bad_framing", rule=None)
    status, out, _ = run("explain", ATTEMPT, "--journal", path, "--rules", RULES)
    assert status == 1
    assert "reason: bad_framing (the length of the message is ambiguous)" in out
    assert "no rule decided this" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["f" * 28], "no decision on ffff"),
        (["GET https://a.example.com/"], "is no attempt id"),
    ],
)
def test_what_is_not_in_the_journal_is_bad_input(tmp_path: Path, words: list[str], says: str) -> None:
    status, out, err = run("explain", *words, "--journal", journal(tmp_path), "--rules", RULES)
    assert (status, out) == (2, "")
    assert says in err


def test_a_record_cannot_write_on_a_terminal(tmp_path: Path) -> None:
    path = journal(tmp_path, sandbox="\x1b[2J", path="/\x1b[2J", reason="\x1b[2J")
    _, out, _ = run("explain", ATTEMPT, "--journal", path, "--rules", RULES)
    assert "\x1b" not in out
