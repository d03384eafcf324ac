"""A worker that falls to what it reads: started in a real one's place, it does what `GET /attack/NAME?WORD` on egressd.internal
says.

It is isolated and confined as every worker, and is one until then. It has its channel, as raw as it is, and `control`'s words.
"""

from __future__ import annotations

import array
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

START = f"import runpy, sys; sys.argv[:1] = [{__file__!r}]; runpy.run_path({__file__!r}, run_name='__main__')"
"""What a worker is started with instead."""


class Hostile:
    """What the attacker has: the worker's end of the channel."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    @property
    def socket(self) -> socket.socket:
        assert self.worker._channel is not None
        return self.worker._channel._sock  # type: ignore[no-any-return] # the attacker's own way in

    def raw(self, data: bytes, fds: tuple[int, ...] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.socket.setblocking(True)  # floods wait for control, who cannot be hurried
        try:
            self.socket.sendmsg([data], rights)
        finally:
            self.socket.setblocking(False)

    def say(self, **fields: Any) -> None:
        self.raw(json.dumps(fields).encode())

    def own(self) -> str:
        return next(iter(self.worker._tenants))  # type: ignore[no-any-return] # as above

    # what is said

    def record(self, sandbox: str, **changes: Any) -> None:
        fields = {
            "event": "decision",
            "sandbox": sandbox,
            "attempt_id": "0" * 16,
            "root_id": "0" * 16,
            "layer": "request",
            "verdict": "deny",
            "reason": "not_allowed",
            "host": "forged.example.com",
        }
        self.say(type="records", batch=1, records=[fields | changes])

    def pair(self, sandbox: str) -> None:
        self.say(type="pair", pair=1, sandbox=sandbox, name="forged.example.com", address="198.18.9.9")

    def spent(self, sandbox: str) -> None:
        self.say(type="spent", sandbox=sandbox, owner="api", kind="requests", tokens=-1e300)

    def ask(self, sandbox: str, host: str = "api.example.com", ticket: int = 1) -> None:
        self.say(
            type="ask",
            ticket=ticket,
            sandbox=sandbox,
            credential="key",
            method="GET",
            scheme="https",
            host=host,
            port=443,
            target="/",
        )

    def elsewhere(self, sandbox: str) -> None:
        self.ask(sandbox, "evil.example.com")

    def claim(self, sandbox: str) -> None:
        self.say(type="claim", claim=1, sandbox=sandbox, source="10.9.9.9")

    def poison(self, word: str) -> None:
        name, _, address = word.partition(",")
        self.say(type="pair", pair=1, sandbox=self.own(), name=name, address=address)

    def names(self, _word: str) -> None:
        for number in range(20_000):
            address = f"198.18.{1 + number // 256 % 64}.{number % 256}"
            self.say(
                type="pair", pair=number, sandbox=self.own(), name=f"n{number}.example.com", address=address
            )

    def malformed(self, word: str) -> None:
        self.raw(bytes.fromhex(word))

    def oversized(self, _word: str) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.raw(b'{"type": "ready"' + b" " * 150_000 + b"}")

    def flood(self, word: str) -> None:
        for _ in range(int(word)):
            self.say(type="spent", sandbox=self.own(), owner="api", kind="requests", tokens=1.0)

    def journal_flood(self, word: str) -> None:
        for _ in range(int(word)):
            self.record(self.own())

    def questions(self, word: str) -> None:
        for number in range(int(word)):
            self.ask(self.own(), ticket=number)

    def descriptors(self, word: str) -> None:
        count, each = map(int, word.split(","))
        held = os.pipe()
        for _ in range(count):
            self.raw(b'{"type": "ready"}', held * (each // 2))

    def lies(self, sandbox: str) -> None:
        for fields in (
            {"type": "ready"},
            {"type": "drained"},
            {"type": "serving", "sandbox": sandbox},
            {"type": "gone", "sandbox": sandbox},
            {"type": "sharing", "share": "explicit"},
            {"type": "adopted", "sandboxes": [sandbox] * 50, "policy": "x"},
        ):
            self.say(**fields)

    def program(self, _word: str) -> None:
        os.execv("/bin/sh", ["sh"])

    def files(self, path: str) -> None:
        os.open(path, os.O_RDONLY)
        self.say(type="pair", pair=1, sandbox="read-it", name="x", address="1.1.1.1")


def main() -> None:
    """Be a worker whose page of attacks is open."""
    from egressd.gate import internal
    from egressd.gate import worker as real
    from egressd.gate.pages import Plea

    held: list[Hostile] = []
    init, answer = real.Worker.__init__, internal.answer

    def remember(self: Any, *arguments: Any) -> None:
        init(self, *arguments)
        held.append(Hostile(self))

    def attacked(asked: internal.Asked, *rest: Any) -> internal.Page | Plea | internal.Unanswered:
        if asked.target.startswith("/attack/"):
            name, _, word = asked.target.removeprefix("/attack/").partition("?")
            act: Callable[[str], None] = getattr(held[0], name)
            try:
                act(word)
            except OSError as error:
                return internal.Page("text/plain", f"{type(error).__name__}\n".encode())
            return internal.Page("text/plain", b"done\n")
        return answer(asked, *rest)

    real.Worker.__init__ = remember  # type: ignore[method-assign,assignment] # the attacker's own way in
    internal.answer = attacked  # type: ignore[assignment] # as above
    real.start(sys.argv[1:])


if __name__ == "__main__":
    main()
