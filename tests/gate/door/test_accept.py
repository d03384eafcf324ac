"""The accept loop: one sandbox's flood waits for itself, and who leaves leaves the backlog to a successor."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from egressd.gate.door.accept import Acceptor


def listener(backlog: int = 600) -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=backlog)


def knock(sock: socket.socket, count: int = 1) -> list[socket.socket]:
    """Connections that wait in the backlog."""
    return [socket.create_connection(sock.getsockname()) for _ in range(count)]


class Door:
    """What was accepted, in order, with the turn of the loop in which it was."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.open: list[socket.socket] = []

    def of(self, name: str) -> Callable[[socket.socket], Coroutine[Any, Any, None]]:
        async def carry(client: socket.socket) -> None:
            self.came.append(name)
            self.open.append(client)

        return carry

    def close(self, *others: socket.socket) -> None:
        for sock in (*self.open, *others):
            sock.close()


def test_five_hundred_that_wait_at_one_door_do_not_delay_who_comes_to_another() -> None:
    async def scenario() -> None:
        greedy, other, door = listener(), listener(), Door()
        waiting = [*knock(greedy, 500), *knock(other, 3)]
        acceptors = [Acceptor(greedy, door.of("greedy")), Acceptor(other, door.of("other"))]
        while door.came.count("other") < 3:  # noqa: ASYNC110 -- turns of the loop are what is counted
            await asyncio.sleep(0)
        assert door.came.index("other") <= 32
        assert door.came.count("greedy") <= 48
        while len(door.came) < 503:  # noqa: ASYNC110 -- as above
            await asyncio.sleep(0)
        for acceptor in acceptors:
            acceptor.close()
        door.close(*waiting)

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_who_closes_takes_what_waits_and_who_leaves_leaves_it() -> None:
    async def scenario() -> None:
        sock, door = listener(), Door()
        held = sock.dup()  # as control holds it
        leaving = Acceptor(sock, door.of("old"))
        waiting = knock(held, 5)
        leaving.leave()
        leaving.leave()
        await asyncio.sleep(0.01)
        assert door.came == []
        successor = Acceptor(held, door.of("new"))
        successor.close()
        await asyncio.sleep(0)
        assert door.came == ["new"] * 5
        door.close(*waiting)

    asyncio.run(scenario())


class Exhausted:
    """A listening socket of a process that has no descriptors left."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.empty = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sock, name)

    def accept(self) -> tuple[socket.socket, Any]:
        if self.empty:
            raise OSError(errno.EMFILE, "no descriptors")
        return self.sock.accept()


def test_without_descriptors_it_rests_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("egressd.gate.door.accept._REST", 0.02)

    async def scenario() -> None:
        sock, door = listener(), Door()
        tired: Any = Exhausted(sock)
        acceptor = Acceptor(tired, door.of("late"))
        waiting = knock(sock, 2)
        await asyncio.sleep(0.05)
        assert door.came == []
        tired.empty = False
        while len(door.came) < 2:  # noqa: ASYNC110 -- as above
            await asyncio.sleep(0.005)
        acceptor.close()
        door.close(*waiting)

    asyncio.run(asyncio.wait_for(scenario(), 5))
