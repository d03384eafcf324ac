"""Sandboxes of one shared listener at two workers: each is served by its own, whichever of them dies or is replaced."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from egressd.control.desk import Desk
from egressd.control.hearing import Hearing
from egressd.control.neighbours import Arrival, Arrivals, Neighbours, spreads
from egressd.control.recording import Recording
from egressd.control.sandboxes import SandboxListener, SandboxState, new_sandbox_id
from egressd.control.sources import ProxyToken, SharedListeners, Sources
from egressd.gate.messages import Introduce, Introduced, Records, Written
from egressd.journal.writer import Journal
from tests.control.fleet import PATIENCE, POLICY, Fleet, descriptors, fleet, until


class Guest:
    """A sandbox that has nothing but a token, and the address that its clients come from."""

    def __init__(self, port: int, source: str, profile: str) -> None:
        token = ProxyToken.new()
        self.port, self.source, self.profile = port, source, profile
        policy = POLICY.model_copy(update={"profile": profile})
        self.state = SandboxState(new_sandbox_id(), policy, (), token=token.digest)
        self.id = self.state.id
        self.basic = base64.b64encode(f"{self.id}:{token.text}".encode()).decode()

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(self.source, 0))

    def request(self, more: str = "") -> bytes:
        return (
            "GET http://egressd.internal/whoami HTTP/1.1\r\nHost: egressd.internal\r\n"
            f"Proxy-Authorization: Basic {self.basic}\r\n{more}\r\n"
        ).encode()

    async def get(self, more: str = "", *, seconds: float = PATIENCE) -> tuple[int, str]:
        """Ask who it is: status and body."""
        async with asyncio.timeout(seconds):
            reader, writer = await self.open()
            with contextlib.closing(writer):
                writer.write(self.request(more))
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
                return int(head.split()[1]), body.decode()

    async def served(self) -> None:
        """It is served, as itself."""
        status, body = await self.get()
        assert status == 200, body
        assert self.id in body
        assert self.profile in body


class House:
    """Two workers, one listener, and a sandbox at each of them; the first worker has the listener."""

    def __init__(self, made: Fleet, port: int) -> None:
        self.made, self.supervisor = made, made.supervisor
        self.own, self.neighbour = Guest(port, "127.9.0.1", "first"), Guest(port, "127.9.0.2", "second")

    @property
    def pids(self) -> tuple[int | None, ...]:
        return self.supervisor.worker_pids

    def reasons(self) -> list[object]:
        """Why connections were refused."""
        return [record["reason"] for record in self.made.records(verdict="deny", layer="connection")]

    async def kill(self, number: int) -> None:
        """Kill a worker; returns once control knows."""
        pid, deaths = self.pids[number], self.supervisor.deaths
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: self.supervisor.deaths > deaths, "its end")


@contextlib.asynccontextmanager
async def house(path: Path, **options: Any) -> AsyncIterator[House]:
    async with fleet(path, workers=2, **options) as made:
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        await made.supervisor.share(SharedListeners("explicit", (SandboxListener("explicit", 4, listener),)))
        built = House(made, listener.getsockname()[1])
        for guest in (built.own, built.neighbour):
            await made.supervisor.add(guest.state)
        yield built


def run(scenario: Any, path: Path, **options: Any) -> None:
    async def stage() -> None:
        async with house(path, **options) as built:
            await scenario(built)

    asyncio.run(asyncio.wait_for(stage(), 2 * PATIENCE))


def test_each_is_served_by_its_own_worker_over_one_listener_and_nobody_passes_for_it(tmp_path: Path) -> None:
    async def scenario(built: House) -> None:
        own, neighbour = built.own, built.neighbour
        assert [list(post.sandboxes) for post in built.supervisor._posts] == [[own.id], [neighbour.id]]
        before = descriptors()
        for guest in (own, neighbour, own, neighbour):
            await guest.served()
        assert (own.state.source, neighbour.state.source) == ("127.9.0.1", "127.9.0.2")
        assert (await neighbour.get(f"X-Long: {'x' * 40_000}\r\n"))[0] == 200
        thief = Guest(own.port, "127.9.0.3", "")
        thief.basic = neighbour.basic
        assert (await thief.get())[0] == 403
        thief.source, thief.basic = neighbour.source, "bm9ib2R5Om5vYm9keQ=="
        assert (await thief.get())[0] == 403
        refused = ["token_source_mismatch", "bad_proxy_token"]
        await until(lambda: built.reasons() == refused, "both records")
        await neighbour.served()
        await built.supervisor.remove(neighbour.id)
        assert (await neighbour.get())[0] in (403, 407)
        again = Guest(own.port, neighbour.source, "third")
        await built.supervisor.add(again.state)
        for guest in (own, again):
            await guest.served()
        assert built.supervisor.deaths == 0
        await until(lambda: descriptors() <= before, "the end of what was handed on")

    run(scenario, tmp_path)


def test_connections_wait_for_the_successor_of_either_worker(tmp_path: Path) -> None:
    async def scenario(built: House) -> None:
        for guest in (built.own, built.neighbour):
            await guest.served()
        reader, writer = await built.neighbour.open()
        writer.write(built.neighbour.request()[:-2])
        for number in (0, 1):
            pids = built.pids
            await built.kill(number)
            both = await asyncio.gather(built.own.get(), built.neighbour.get())
            assert [status for status, _ in both] == [200, 200]
            assert built.pids[1 - number] == pids[1 - number]
            assert built.pids[number] not in (pids[number], None)
        writer.close()
        await reader.read()

    run(scenario, tmp_path)


def test_replacing_the_workers_refuses_nobody(tmp_path: Path) -> None:
    async def scenario(built: House) -> None:
        over, served = False, 0

        async def ask(guest: Guest) -> None:
            nonlocal served
            while not over:
                await guest.served()
                served += 1

        asking = [asyncio.create_task(ask(guest)) for guest in (built.own, built.neighbour)]
        await until(lambda: served > 4, "the first answers")
        await built.supervisor.roll(5.0)
        known = served
        await until(lambda: served > known + 4, "answers of the fresh ones")
        over = True
        await asyncio.gather(*asking)
        assert built.supervisor.deaths == 0

    run(scenario, tmp_path)


class Reception:
    """A worker that hands a connection on, and one that takes it; by control's own sockets, without a process."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.other = socket.create_server(("127.0.0.1", 0))
        self.shares = {"e": SharedListeners("e", (SandboxListener("explicit", 4, self.listener),))}
        self.neighbours = Neighbours(self.shares)
        self.state = SandboxState(new_sandbox_id(), POLICY, (), token="00" * 32, source="127.9.2.1")
        self.neighbours.enter(self.state, self)
        self.welcomed: list[Arrival] = []
        self.told: list[Any] = []
        self.closing = [self.listener, self.other]

    def welcome(self, arrival: Arrival) -> None:
        self.welcomed.append(arrival)
        arrival.answer(None)

    def worker(self) -> Any:
        return SimpleNamespace(name="w", channel=SimpleNamespace(send=self.told.append))

    def connection(self, source: str, listener: socket.socket) -> socket.socket:
        client = socket.create_connection(listener.getsockname(), source_address=(source, 0))
        self.closing.append(client)
        return listener.accept()[0]

    def introduce(self, made: socket.socket | int, **changes: Any) -> None:
        fields = {"introduction": 1, "sandbox": self.state.id, "way": "explicit", "source": "127.9.2.1"}
        fd = made if isinstance(made, int) else made.detach()
        try:
            self.neighbours.introduce(self.worker(), Introduce.model_validate(fields | changes), fd)
        finally:
            with pytest.raises(OSError, match="Bad file"):
                os.fstat(fd)

    def close(self) -> None:
        for sock in self.closing:
            sock.close()


@pytest.fixture
def reception() -> Iterator[Reception]:
    made = Reception()
    yield made
    made.close()


def test_a_connection_of_a_neighbour_is_handed_on(reception: Reception) -> None:
    reception.introduce(reception.connection("127.9.2.1", reception.listener), data="R0VU")
    assert [arrival.message.data for arrival in reception.welcomed] == ["R0VU"]
    assert reception.told == [Introduced(introduction=1)]


def test_one_of_a_sandbox_that_has_ended_is_not(reception: Reception) -> None:
    reception.neighbours.leave(reception.state.id)
    reception.introduce(reception.connection("127.9.2.1", reception.listener))
    assert reception.told == [Introduced(introduction=1, reason="revoked")]
    assert not reception.welcomed


def test_one_that_was_reset_meanwhile_is_not(reception: Reception) -> None:
    made = reception.connection("127.9.2.1", reception.listener)
    client = reception.closing[-1]
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    with contextlib.suppress(ConnectionError):
        made.recv(1)
    reception.introduce(made)
    assert reception.told == [Introduced(introduction=1, reason="client_closed")]


def _pipe(_: Reception) -> int:
    ours, theirs = os.pipe()
    os.close(theirs)
    return ours


FORGED: dict[str, Callable[[Reception], socket.socket | int]] = {
    "from another address": lambda at: at.connection("127.9.2.2", at.listener),
    "by another listener": lambda at: at.connection("127.9.2.1", at.other),
    "that is a listener itself": lambda at: at.listener.dup(),
    "that is none": _pipe,
    "within the machine": lambda _: socket.socketpair()[0],
    "of datagrams": lambda _: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "that is not connected": lambda _: socket.socket(),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the other half of a pair
@pytest.mark.parametrize("forged", FORGED)
def test_what_no_listener_accepted_from_there_is_not_and_ends_who_hands_it_on(
    reception: Reception, forged: str
) -> None:
    with pytest.raises(ValueError, match=r"connection|listener|socket"):
        reception.introduce(FORGED[forged](reception))
    assert not reception.welcomed
    assert not reception.told


@pytest.mark.parametrize("changes", [{"source": "127.9.2.2"}, {"way": "socks"}, {"data": "=R0V"}])
def test_neither_is_what_it_tells_falsely(reception: Reception, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        reception.introduce(reception.connection("127.9.2.1", reception.listener), **changes)
    assert not reception.welcomed


def test_a_hop_that_is_listed_may_speak_for_its_clients(reception: Reception) -> None:
    hops = (SandboxListener("explicit", 4, reception.listener, hops=("127.9.3.0/24",)),)
    reception.shares["e"] = SharedListeners("e", hops)
    reception.introduce(reception.connection("127.9.3.1", reception.listener))
    assert len(reception.welcomed) == 1
    with pytest.raises(ValueError, match="from elsewhere"):
        reception.introduce(reception.connection("127.9.4.1", reception.listener))


def test_those_that_wait_for_a_worker_are_bounded_and_answered_when_their_sandbox_ends(
    reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("egressd.control.neighbours.WAITING", 2)
    arrivals = Arrivals()
    message = Introduce(introduction=7, sandbox=reception.state.id, way="socks", source="127.9.2.1")
    for _ in range(3):
        arrivals.take(Arrival(message, socket.socket(), reception.worker()), None)
    assert reception.told == [Introduced(introduction=7, reason="too_many_connections")]
    arrivals.settle(None, {reception.state.id})
    arrivals.settle(None, ())
    assert reception.told[1:] == [Introduced(introduction=7, reason="revoked")] * 2


def test_only_connections_are_handed_on() -> None:
    with socket.socket() as sock:
        explicit, dns = SandboxListener("explicit", 4, sock), SandboxListener("dns-udp", 4, sock)
        assert [spreads(each) for each in ([explicit], [explicit, dns], [])] == [True, False, False]


def test_a_worker_writes_of_a_neighbour_what_it_refused_and_no_more(
    tmp_path: Path, reception: Reception
) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    lost: Any = SimpleNamespace(sandboxes={}, worker=None, workers=())
    hearing = Hearing(lost, Recording(journal), Desk(None), Sources(), print, reception.neighbours)
    hearing.enter(reception.state.id)
    refused = {
        "event": "decision", "verdict": "deny", "layer": "connection", "sandbox": reception.state.id,
        "attempt_id": "0" * 16, "root_id": "0" * 16, "reason": "bad_proxy_token",
    }  # fmt: skip
    hearing.hear(reception.worker(), Records(batch=1, records=(refused,)), [])
    assert reception.told == [Written(batch=1, ok=True)]
    for changes in ({"verdict": "allow"}, {"event": "end"}, {"layer": "request"}):
        with pytest.raises(ValueError, match="neighbour"):
            hearing.hear(reception.worker(), Records(batch=2, records=(refused | changes,)), [])
    stranger = Introduce(introduction=1, sandbox="sbx-of-nobody", way="socks", source="127.9.2.1")
    with pytest.raises(ValueError, match="neighbour"):
        hearing.hear(reception.worker(), stranger, [os.dup(0)])
    journal.close()
