"""`egressd credentials check`: every source tried, none shown."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from egressd.cli.given import GIVEN
from egressd.cli.main import app
from egressd.credentials import trial
from egressd.credentials.lease import Token
from egressd.credentials.providers.base import For, Minted, SourceFailed
from egressd.credentials.trial import try_source
from egressd.policy.credential import Credential

CANARY = "canary-5c0ffee"
FOR = 'for: [{hosts: [api.example.com], requests: ["GET /v1/**"]}]'
EXEC = (
    '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", '
    '"status": {"token": "canary-5c0ffee", "expirationTimestamp": "2099-01-01T00:00:00Z"}}'
)


@pytest.fixture(autouse=True)
def nothing_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("EGRESSD_RULES", "EGRESSD_CONFIG", "EGRESSD_PROFILE", "EGRESSD_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(GIVEN, "config", None)
    monkeypatch.setattr(GIVEN, "rules", None)
    monkeypatch.setattr("egressd.control.secrecy.close_process", lambda: None)  # it would close this one
    monkeypatch.setenv("KEY", CANARY)


def written(tmp_path: Path, **sources: str) -> Path:
    path = tmp_path / "credentials.yaml"
    entries = "".join(
        f"  {name}:\n    {FOR}\n    source: {source}\n    attach: {{bearer: true}}\n"
        for name, source in sources.items()
    )
    path.write_text(f"schema: 1\ncredentials:\n{entries}")
    return path


def run(*words: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["credentials", "check", *map(str, words)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert CANARY not in result.output
    return result.exit_code, result.stdout, result.stderr


def test_each_source_is_a_line_with_its_end(tmp_path: Path) -> None:
    script = tmp_path / "answer.json"
    script.write_text(EXEC)
    path = written(tmp_path, plain="{env: KEY}", short=f"{{exec: {{command: [/bin/cat, {script}]}}}}")
    status, out, err = run("--credentials", path)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "plain  env   ok, until its source changes"
    assert re.fullmatch(r"short  exec  ok, until 2099-01-01T00:00:00Z \(\d+ min\)", lines[1])


def test_one_that_fails_is_status_1_and_the_others_are_told_too(tmp_path: Path) -> None:
    path = written(tmp_path, good="{env: KEY}", bad=f"{{file: {tmp_path}/none}}")
    status, out, _ = run("--credentials", path)
    assert status == 1
    assert out.splitlines() == [
        "good  env   ok, until its source changes",
        f"bad   file  failed: {tmp_path}/none: No such file or directory",
    ]
    assert run("good", "--credentials", path)[0] == 0


def test_json_is_one_object_a_credential(tmp_path: Path) -> None:
    status, out, _ = run("--json", "--credentials", written(tmp_path, good="{env: KEY}", bad="{env: NONE}"))
    assert status == 1
    good, bad = map(json.loads, out.splitlines())
    assert good == {"credential": "good", "source": "env", "ok": True, "expires": None, "trouble": None}
    assert (bad["ok"], bad["trouble"]) == (False, "the variable NONE is not set")


def test_bad_input_is_status_2(tmp_path: Path) -> None:
    path = written(tmp_path, good="{env: KEY}")
    assert run("god", "--credentials", path)[::2] == (
        2,
        "there is no credential god\nhint: credentials here: good\n",
    )
    assert run("--label", "x", "--credentials", path)[0] == 2
    path.write_text(
        f"schema: 1\ncredentials:\n  a:\n    {FOR}\n    source: {{evn: KEY}}\n    attach: {{bearer: true}}\n"
    )
    status, out, err = run("--credentials", path)
    assert (status, out) == (2, "")
    assert "credentials.yaml:5:14: unknown_key" in err
    status, _, err = run()
    assert status == 2
    assert "there is no " in err


def test_the_configuration_s_own_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EGRESSD_CREDENTIALS", str(written(tmp_path, good="{env: KEY}")))
    assert run()[0] == 0


SAID = Credential.model_validate(
    {
        "for": [{"hosts": ["a.example.com"], "requests": ["GET /**"]}],
        "source": {"env": "X"},
        "attach": {"bearer": True},
    }
)


class Source:
    def __init__(self, *, fails: Exception | None = None, left: Exception | None = None) -> None:
        self.fails, self.left = fails, left
        self.asked: list[For] = []
        self.revoked = self.closed = 0

    async def mint(self, for_: For) -> Minted:
        self.asked.append(for_)
        if self.fails is not None:
            raise self.fails

        async def revoke() -> None:
            self.revoked += 1
            if self.left is not None:
                raise self.left

        return Minted(Token(value=SecretStr(CANARY)), 4_000_000_000.0, revoke)

    async def close(self) -> None:
        self.closed += 1


def test_what_was_given_is_given_back_and_the_source_closed() -> None:

    source = Source()
    tried = asyncio.run(try_source("a", SAID, {"task": "t"}, provide=lambda *_: source))
    assert (tried.trouble, tried.expires, tried.left) == (None, 4_000_000_000.0, None)
    assert source.asked == [For(trial.NOBODY, {"task": "t"})]
    assert (source.revoked, source.closed) == (1, 1)


def test_nothing_that_a_library_raises_is_shown() -> None:

    failed = asyncio.run(try_source("a", SAID, {}, provide=lambda *_: Source(fails=ValueError(CANARY))))
    assert failed.trouble == "ValueError"
    known = asyncio.run(
        try_source("a", SAID, {}, provide=lambda *_: Source(fails=SourceFailed("status 503")))
    )
    assert known.trouble == "status 503"
    kept = asyncio.run(try_source("a", SAID, {}, provide=lambda *_: Source(left=KeyError(CANARY))))
    assert (kept.trouble, kept.left) == (None, "KeyError")
