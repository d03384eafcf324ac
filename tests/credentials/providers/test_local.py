"""Secrets on this machine: a variable, a file that changes, a command."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from egressd.credentials.lease import Token
from egressd.credentials.providers.base import For, Minted, SourceFailed, provider_of
from egressd.policy.credential import ExecSource, Source

ANYBODY = For("sbx-1", {"task": "t"})
CANARY = "canary-5c0ffee"


def mint(source: Source) -> Minted:
    return asyncio.run(provider_of("x", source).mint(ANYBODY))


def value(minted: Minted) -> str:
    assert isinstance(minted.material, Token)
    return minted.material.value.get_secret_value()


def command(script: str, **more: Any) -> Source:
    return Source(exec=ExecSource(command=["/bin/sh", "-c", script], **more))


def printing(answer: object) -> str:
    return f"printf %s '{json.dumps(answer)}'"


def answer(token: object = CANARY, **status: object) -> dict[str, object]:
    version = "client.authentication.k8s.io/v1"
    return {"apiVersion": version, "kind": "ExecCredential", "status": {"token": token, **status}}


def test_a_variable_is_a_token_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", CANARY)
    minted = mint(Source(env="A_TOKEN"))
    assert value(minted) == CANARY
    assert minted.expires is None
    assert CANARY not in repr(minted)


def test_a_file_is_read_anew_each_time(tmp_path: Path) -> None:
    path = tmp_path / "token"
    provider = provider_of("x", Source(file=str(path)))
    with pytest.raises(SourceFailed, match="No such file"):
        asyncio.run(provider.mint(ANYBODY))
    for text in ("one", "two"):
        path.write_text(text)
        path.chmod(0o600)
        minted = asyncio.run(provider.mint(ANYBODY))
        assert value(minted) == text
        assert minted.keep <= 1.0


def test_a_command_prints_a_token_and_its_end() -> None:
    minted = mint(command(printing(answer(expirationTimestamp="2027-01-15T08:00:00Z"))))
    assert value(minted) == CANARY
    assert minted.expires == 1_800_000_000.0
    assert mint(command(printing(answer()))).expires is None


@pytest.mark.parametrize(
    ("script", "why"),
    [
        pytest.param(f"echo {CANARY}", "no ExecCredential", id="a bare token"),
        pytest.param("true", "no ExecCredential", id="nothing"),
        pytest.param(printing(answer() | {"kind": "Secret"}), "no ExecCredential", id="another kind"),
        pytest.param(printing(answer() | {"apiVersion": "v1"}), "no ExecCredential", id="another version"),
        pytest.param(printing(answer() | {"status": {}}), "no ExecCredential", id="no token"),
        pytest.param(printing(answer(token=[CANARY])), "no ExecCredential", id="a token that is no text"),
        pytest.param(
            printing(answer(expirationTimestamp=CANARY)), "no ExecCredential", id="an end that is no time"
        ),
        pytest.param(
            printing(answer(expirationTimestamp="2027-01-15T08:00:00")),
            "no ExecCredential",
            id="an end in no time zone",
        ),
        pytest.param(f"echo {CANARY} >&2; {printing(answer())}; exit 3", "status 3", id="a failure"),
        pytest.param("kill -9 $$", "status -9", id="a sudden end"),
        pytest.param("head -c 100000 /dev/zero; sleep 60", "more than 64 KiB", id="a flood"),
    ],
)
def test_what_a_command_may_not_do_is_told_without_what_it_printed(script: str, why: str) -> None:
    began = time.monotonic()
    with pytest.raises(SourceFailed, match=why) as failed:
        mint(command(script))
    assert CANARY not in str(failed.value)
    assert failed.value.__suppress_context__ or failed.value.__context__ is None
    assert time.monotonic() - began < 10


def test_a_command_that_is_not_there_is_told() -> None:
    with pytest.raises(SourceFailed, match="cannot be started: No such file"):
        mint(Source(exec=ExecSource(command=["/nowhere/at/all"])))


def test_a_command_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    began = time.monotonic()
    with pytest.raises(SourceFailed, match="did not end within 1 s"):
        mint(command(f"sleep 600 & echo $! > {told}; wait", timeout=1))
    assert time.monotonic() - began < 5
    child = int(told.read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and running(child):
        time.sleep(0.02)
    assert not running(child)


def written(path: Path) -> None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and not (path.exists() and path.read_text().strip()):
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_command_gets_what_its_definition_says_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTHERS_SECRET", CANARY)
    seen = tmp_path / "seen"
    script = f"tr '\\0' '\\n' < /proc/self/environ > {seen}; ls /proc/self/fd >> {seen}; pwd >> {seen}; {printing(answer())}"
    mint(command(script, env={"ROLE": "reader"}))
    lines = seen.read_text().split()
    assert {line for line in lines if "=" in line} == {
        "ROLE=reader",
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    assert lines[-1] == "/"
    assert {line for line in lines if line.isdigit()} <= {"0", "1", "2", "3"}


def test_a_command_that_is_given_up_does_not_go_on(tmp_path: Path) -> None:
    told = tmp_path / "pid"

    async def give_up() -> None:
        task = asyncio.create_task(provider_of("x", command(f"echo $$ > {told}; sleep 600")).mint(ANYBODY))
        await asyncio.to_thread(written, told)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(give_up(), 10))
    assert not running(int(told.read_text()))
