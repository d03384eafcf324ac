"""How `egressd run` hands a sandbox over: whole, in order, by who may; and whatever breaks on the way ends it."""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from egressd.control import attaching, peers
from egressd.control.attaching import Attaching
from egressd.control.config import load_config
from egressd.control.trust import Trust
from egressd.gate.channel import sealed, unsealed
from egressd.policy.effective import EffectivePolicy
from egressd.wiring.spec import SandboxSpec
from tests.control.household import House, until

ENTER = {"type": "enter", "profile": "lab", "labels": {"task": "7"}}
LISTENERS = [{"kind": "transparent", "family": 4}, {"kind": "dns-udp", "family": 4}]
NOTHING = {"connections": 0, "dns_connections": 0, "dns_datagrams": 0, "packets": 0}


class Run:
    """A `run` that says what the test has it say."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        found = peers.connect(scene.path, socket.SOCK_SEQPACKET)
        assert found is not None
        self.sock = found
        self.sock.setblocking(False)
        self.fds: list[int] = []

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        content = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.sock.sendmsg([content], rights)

    async def hear(self) -> dict[str, Any]:
        """The next message; an empty one where the daemon has hung up."""
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self.sock, readable.set)
        try:
            async with asyncio.timeout(5):
                await readable.wait()
            content, fds, _, _ = socket.recv_fds(self.sock, 65536, 8)
        except ConnectionResetError:
            return {}
        finally:
            loop.remove_reader(self.sock)
        self.fds = list(fds)
        return dict(json.loads(content)) if content else {}

    async def enter(self) -> str:
        """Be told who the sandbox is."""
        self.send(ENTER)
        entered = await self.hear()
        assert entered["type"] == "entered", entered
        self.payloads = [unsealed(fd) for fd in self.fds]
        return str(entered["sandbox"])

    def made(self, *, workspace: str = "/tmp/nowhere") -> None:
        """Hand over two sockets."""
        spec = SandboxSpec(workspace=workspace, env={"PATH": ""}, home="/root")
        payload = sealed(TypeAdapter(SandboxSpec).dump_json(spec))
        ours = [socket.socket() for _ in LISTENERS]
        self.send({"type": "made", "listeners": LISTENERS}, [payload, *(one.fileno() for one in ours)])
        os.close(payload)
        for one in ours:
            one.close()

    async def whole(self) -> str:
        """Come to where the command runs."""
        sandbox = await self.enter()
        self.made()
        assert await self.hear() == {"type": "served"}
        self.send({"type": "proved"})
        await until(lambda: self.scene.stage(sandbox) == "ready")
        return sandbox


class Scene:
    """A house with an attach socket."""

    def __init__(self, house: House, folder: Path) -> None:
        self.house = house
        self.path = folder / "attach.sock"
        state = {"HOME": str(folder), "EGRESSD_RULES": str(house.rules)}
        self.config = load_config({}, state, euid=1000)
        sock = peers.listen(self.path, socket.SOCK_SEQPACKET)
        self.attaching = Attaching(house.roster, self.config, Trust(folder / "trust", 3), sock)

    def stage(self, sandbox: str) -> str | None:
        life = self.house.roster.find(sandbox)
        return life.stage if life is not None else None

    async def empty(self) -> None:
        """Nothing is left of anybody."""
        await until(lambda: self.house.roster.living == () and self.house.carrier.carried == {})
        assert self.house.files() == []


def play(tmp_path: Path, body: Callable[[Scene], Awaitable[None]], *, most: int = 10) -> None:
    async def main() -> None:
        house = House(tmp_path, most=most)
        scene = Scene(house, tmp_path)
        scene.attaching.start()
        before = len(os.listdir("/proc/self/fd"))
        try:
            await body(scene)
            await scene.empty()
            await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
        finally:
            await scene.attaching.stop()
            house.estate.close()

    asyncio.run(main())


def test_a_sandbox_is_handed_over_served_proved_and_let_go(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        run = Run(scene)
        sandbox = await run.whole()
        state = scene.house.carrier.carried[sandbox]
        assert [(one.kind, one.family) for one in state.listeners] == [("transparent", 4), ("dns-udp", 4)]
        assert state.labels == {"task": "7"}
        policy = EffectivePolicy.model_validate_json(run.payloads[0])
        assert policy == state.policy
        assert run.payloads[1:] == [b"null", b"{}"]  # no credentials, no placeholders
        run.send({"type": "ended", "counted": NOTHING | {"connections": 3}})
        assert await run.hear() == {"type": "gone"}
        run.sock.close()
        assert scene.house.carrier.details(sandbox)[:2] == ["ready", "ended"]
        [lost] = [record for record in scene.house.carrier.records if record["event"] == "lost"]
        assert (lost["sandbox"], lost["count"]) == (sandbox, 3)

    play(tmp_path, body)


@pytest.mark.parametrize("steps", range(4))
def test_a_run_that_dies_at_any_step_is_a_sandbox_that_ends(tmp_path: Path, steps: int) -> None:
    async def body(scene: Scene) -> None:
        run = Run(scene)
        if steps == 1:
            await run.enter()
        elif steps == 2:
            await run.enter()
            run.made()
            await run.hear()
        elif steps == 3:
            await run.whole()
        run.sock.close()

    play(tmp_path, body)


def test_a_revoked_sandbox_is_told_to_its_run_and_waits_for_the_counts(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        run = Run(scene)
        sandbox = await run.whole()
        life = scene.house.roster.find(sandbox)
        assert life is not None
        ending = asyncio.create_task(scene.house.roster.end(life, "revoked"))
        assert await run.hear() == {"type": "revoked", "why": "revoked"}
        assert scene.house.carrier.carried == {}  # its flows do not wait for its run
        run.send({"type": "ended", "counted": NOTHING})
        await ending
        assert await run.hear() == {"type": "gone"}
        run.sock.close()

    play(tmp_path, body)


def test_a_run_that_does_not_answer_keeps_nothing_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def body(scene: Scene) -> None:
        run = Run(scene)
        sandbox = await run.whole()
        await scene.house.roster.end_all("revoked")
        assert scene.stage(sandbox) == "gone"
        run.sock.close()

    monkeypatch.setattr(attaching, "COUNT_SECONDS", 0.1)
    play(tmp_path, body)
    assert "the kernel's counts were not told" in capsys.readouterr().err


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"{",
        b"\xff" * 100,
        b"[" * 60_000,
        {"type": "made", "listeners": LISTENERS},
        {"type": "proved"},
        {"type": "ended", "counted": None},
        {"type": "served"},
        ENTER | {"more": 1},
        ENTER | {"profile": "x" * 200},
    ],
)
def test_what_is_out_of_turn_or_no_message_ends_the_connection(tmp_path: Path, message: Any) -> None:
    async def body(scene: Scene) -> None:
        run = Run(scene)
        if message != b"":
            run.send(message)
        else:
            run.sock.shutdown(socket.SHUT_WR)
        assert await run.hear() == {}
        run.sock.close()

    play(tmp_path, body)


@pytest.mark.parametrize("given", ["too few", "too many", "no sockets", "no payload"])
def test_descriptors_that_are_not_what_was_said_are_refused_and_closed(tmp_path: Path, given: str) -> None:
    async def body(scene: Scene) -> None:
        run = Run(scene)
        await run.enter()
        payload = sealed(
            b"{}"
            if given == "no payload"
            else TypeAdapter(SandboxSpec).dump_json(SandboxSpec("/w", {}, "/h"))
        )
        null = os.open("/dev/null", os.O_RDONLY)
        one = socket.socket()
        fds = {
            "too few": [payload, one.fileno()],
            "too many": [payload, *[one.fileno()] * 3],
            "no sockets": [payload, null, null],
            "no payload": [payload, one.fileno(), one.fileno()],
        }[given]
        run.send({"type": "made", "listeners": LISTENERS}, fds)
        for fd in (payload, null):
            os.close(fd)
        one.close()
        answer = await run.hear()
        assert (answer["type"], "cannot be used" in answer["detail"]) == ("refused", True)
        run.sock.close()

    play(tmp_path, body)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (ENTER | {"profile": "none"}, "there is no profile 'none'"),
        (ENTER | {"profile": "../lab"}, "there is no profile"),
        (ENTER | {"version": 2}, "another version"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(tmp_path: Path, message: Any, said: str) -> None:
    async def body(scene: Scene) -> None:
        run = Run(scene)
        run.send(message)
        answer = await run.hear()
        assert answer["type"] == "refused"
        assert said in answer["detail"]
        run.sock.close()

    play(tmp_path, body)


def test_a_sandbox_that_could_write_the_rules_is_refused(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        run = Run(scene)
        await run.enter()
        run.made(workspace=str(scene.house.rules))
        answer = await run.hear()
        assert answer["type"] == "refused"
        assert "could write" in answer["detail"]
        assert "--standalone" in answer["hint"]
        run.sock.close()

    play(tmp_path, body)


def test_no_more_than_there_may_be(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        first = Run(scene)
        await first.enter()
        second = Run(scene)
        second.send(ENTER)
        answer = await second.hear()
        assert (answer["type"], "there are 1 sandboxes" in answer["detail"]) == ("refused", True)
        for run in (first, second):
            run.sock.close()

    play(tmp_path, body, most=1)


def test_the_silent_do_not_keep_others_out_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(scene: Scene) -> None:
        silent = [Run(scene) for _ in range(3)]
        await until(lambda: scene.attaching.waiting == 2)
        late = [await one.hear() for one in silent]  # refused, or let go when their time was up
        assert [one.get("detail") for one in late if one] == ["too many are waiting"]
        run = Run(scene)
        await run.whole()
        for one in (*silent, run):
            one.sock.close()

    monkeypatch.setattr(attaching, "WAITING", 2)
    monkeypatch.setattr(attaching, "ENTER_SECONDS", 0.3)
    play(tmp_path, body)


def test_who_may_not_speak_is_told_so_before_it_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(scene: Scene) -> None:
        run = Run(scene)
        run.send(ENTER)
        assert await run.hear() == {
            "type": "refused",
            "detail": "it is in a pid namespace of its own",
            "hint": "",
        }
        run.sock.close()

    monkeypatch.setattr(peers, "refusal", lambda _: "it is in a pid namespace of its own")
    play(tmp_path, body)


@pytest.mark.parametrize(
    "labels", [{str(n): "" for n in range(33)}, {"x" * 65: ""}, {"": ""}, {"a": "x" * 257}]
)
def test_labels_that_no_record_takes_are_refused(tmp_path: Path, labels: dict[str, str]) -> None:
    async def body(scene: Scene) -> None:
        run = Run(scene)
        run.send(ENTER | {"labels": labels})
        answer = await run.hear()
        assert (answer["type"], "label" in answer["detail"]) == ("refused", True)
        run.sock.close()

    play(tmp_path, body)
