"""`egressd rollback` as people call it, where no daemon runs and where one does."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from egressd.cli.given import GIVEN
from egressd.cli.main import app
from egressd.control import peers
from egressd.control.api_server import ApiServer
from egressd.control.archive import Archive
from tests.control.household import House, read, write_rules

CREDENTIALS = """schema: 1
credentials:
  {name}:
    for: [{{hosts: [api.example.com], requests: ["ANY /**"]}}]
    source: {{file: /run/secrets/key}}
    attach: {{header: x-api-key}}
"""


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("EGRESSD_PROFILE", "EGRESSD_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("config", "rules", "verbose"):
        monkeypatch.setattr(GIVEN, name, None)
    file = tmp_path / "egressd.yaml"
    file.write_text(
        "schema: 1\nrules: rules\njournal: journal.jsonl\nstate_dir: state\n"
        "control_socket: run/control.sock\ncredentials: credentials.yaml\n"
    )
    (tmp_path / "credentials.yaml").write_text(CREDENTIALS.format(name="other"))
    monkeypatch.setenv("EGRESSD_CONFIG", str(file))
    return tmp_path


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["rollback", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def adopted(place: Path, now: float, host: str) -> str:
    rules = read(write_rules(place / "rules", lab=host))
    archive = Archive(place / "state", place / "rules")
    archive.keep(rules.source, lambda: map(rules.effective, rules.profiles), now)
    return rules.digest


def test_without_a_daemon_it_says_what_would_change_and_changes_nothing(place: Path) -> None:
    good, bad = adopted(place, 1.0, "good.example.com"), adopted(place, 2.0, "bad.example.com")
    (place / "rules" / "lists").mkdir()
    (place / "rules" / "lists" / "new.txt").write_text("x.example.com\n")
    now = read(place / "rules").digest
    status, out, err = run(good[:6])
    assert status == 1
    assert out.splitlines()[1:] == ["  removed lists/new.txt", "  changed profiles/lab.yaml"]
    assert err == (
        "egressd: no daemon runs, and nothing was changed\n"
        f"hint: `egressd rollback {good} --write` rewrites the folder\n"
    )
    assert read(place / "rules").digest == now
    found = json.loads(run(good, "--json")[1])
    assert found["files"][0] == {"path": "lists/new.txt", "how": "removed"}
    assert bad != now


def test_with_write_the_folder_is_what_it_was_and_what_it_held_is_kept(place: Path) -> None:
    good = adopted(place, 1.0, "good.example.com")
    profile = place / "rules" / "profiles" / "lab.yaml"
    profile.chmod(0o640)
    adopted(place, 2.0, "bad.example.com")
    profile.write_text("profile: half a fi")
    (place / "rules" / "notes.md").write_text("not a rule file")
    unsound = Archive(place / "state", place / "rules")
    status, out, err = run(good, "--write")
    assert (status, err) == (0, "")
    assert out.startswith(f"in force: {good}, gone back to from ")
    assert read(place / "rules").digest == good
    assert profile.stat().st_mode & 0o777 == 0o640
    assert (place / "rules" / "notes.md").exists()
    assert not list((place / "rules").rglob(".*"))
    newest = unsound.kept()[0]
    assert unsound.read(newest.digest).files["profiles/lab.yaml"] == b"profile: half a fi"
    (record,) = [
        json.loads(line) for line in (place / "journal.jsonl").read_text().splitlines() if "rewritten" in line
    ]
    assert record["event"] == "policy"
    assert f"to {good}, by uid" in record["detail"]


def test_the_list_names_what_is_in_force(place: Path) -> None:
    good, bad = adopted(place, 1.0, "good.example.com"), adopted(place, 2.0, "bad.example.com")
    status, out, _ = run("--list")
    assert status == 0
    assert out.splitlines() == [
        f"* {bad}  1970-01-01T00:00:02.000000Z  1 profile",
        f"  {good}  1970-01-01T00:00:01.000000Z  1 profile",
    ]
    policy = json.loads(run("--list", "--json")[1])["kept"][1]["policies"]["lab"]
    assert run(policy, "--write")[0] == 0
    assert read(place / "rules").digest == good


def test_what_is_not_kept_cannot_be_gone_back_to(place: Path) -> None:
    adopted(place, 1.0, "good.example.com")
    assert run() == (1, "", "egressd: no earlier rules are kept\nhint: egressd rollback --list\n")
    assert run("0123456789abcdef")[0] == 1
    assert run("not-a-digest")[0] == 2
    assert run("../../etc/passwd")[0] == 2


def test_rules_that_no_longer_load_are_not_written(place: Path) -> None:
    write_rules(place / "rules", lab="api.example.com")
    (place / "rules" / "profiles" / "lab.yaml").write_text(
        'schema: 1\nprofile: lab\nallow:\n  - hosts: [api.example.com]\n    requests: ["GET /**"]\n    credential: key\n'
    )
    (place / "credentials.yaml").write_text(CREDENTIALS.format(name="key"))
    rules = read(place / "rules")
    Archive(place / "state", place / "rules").keep(rules.source, list, 1.0)
    bad = adopted(place, 2.0, "api.example.com")
    (place / "credentials.yaml").write_text(CREDENTIALS.format(name="other"))
    status, _, err = run(rules.digest, "--write")
    assert status == 2
    assert "unknown_credential" in err
    assert read(place / "rules").digest == bad


def test_a_daemon_goes_back_and_passes_the_folder_over(place: Path) -> None:
    house_rules, ends = served(place)
    try:
        good, bad = house_rules
        status, out, _ = run("--list")
        assert (status, out.splitlines()[0].split()[:2]) == (0, ["*", bad])
        assert run() == (0, f"in force: {good}, gone back to from {bad}\n", "")
        assert read(place / "rules").digest == bad
        _, out, err = run("--list")
        assert out.splitlines()[1].startswith(f"* {good}")
        assert err == f"the rules folder ({bad}) is passed over until it changes\n"
        assert run("0123456789abcdef")[0] == 1
        assert run(good, "--write")[0] == 0
        assert read(place / "rules").digest == good
    finally:
        ends()


def served(place: Path) -> tuple[tuple[str, str], Callable[[], None]]:
    """A daemon's API in a thread of its own, with rules that were adopted twice; returns their digests and what ends it."""
    import threading

    began, over = threading.Event(), threading.Event()
    digests: list[str] = []

    async def serve() -> None:
        house = House(place)
        server = ApiServer()
        digests.append(await house.adopt(1.0, lab="good.example.com"))
        digests.append(await house.adopt(2.0, lab="bad.example.com"))
        await server.start_unix(house, peers.listen(place / "run" / "control.sock", socket.SOCK_STREAM))
        began.set()
        try:
            await asyncio.to_thread(over.wait, 60)
        finally:
            await server.stop()
            house.estate.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert began.wait(30)

    def ends() -> None:
        over.set()
        thread.join(30)

    return (digests[0], digests[1]), ends
