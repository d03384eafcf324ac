"""The world's process: makes the namespaces, serves everything in them, answers its owner's questions.

Started by `Lab.build` with one socket as its channel: JSON lines, one question, one answer. When the
channel ends or the owner's process does, it kills what lives in the lab's namespaces, removes its
folder and exits, so that a killed owner leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from egressd.lab import topology
from egressd.lab.attacker import Attacker
from egressd.lab.capture import Capture
from egressd.lab.guards import Guard
from egressd.lab.names import ZONE, Zone, entry_from, serve_zone
from egressd.lab.namespaces import (
    CannotBuild,
    bind_configuration,
    enter_user_namespace,
    inhabitants,
    make_namespaces,
    write_configuration,
)
from egressd.lab.origins import Web, make_git
from egressd.lab.pki import KINDS, Authority
from egressd.lab.secure_names import serve_secure_zone

_DRAIN_AT_ONCE = 512


class World:
    """The servers of one lab and what they saw."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority((*topology.ORIGINS, *topology.ATTACKERS, topology.DNS, topology.DNS_V6))
        for kind in KINDS[1:]:
            self.authority.kinds[f"{kind}.lab-origin.com"] = kind
        (folder / "ca.pem").write_bytes(self.authority.root_pem())
        self.zone = Zone(ZONE)
        self.web = Web(self.authority, make_git(folder / "git"))
        self.attacker = Attacker(self.authority)
        self.captures = [
            Capture(origin, wire, self.attacker.see_packet) for origin, wire in topology.WIRE_TO.items()
        ]
        self._questions: dict[str, Callable[..., Any]] = {
            "requests": lambda: [asdict(seen) for seen in self.web.seen],
            "queries": lambda: [asdict(seen) for seen in self.zone.seen],
            "hits": self.hits,
            "flows": self.flows,
            "lost": self.lost,
            "forget": self.forget,
            "set_name": self.set_name,
            "set_certificate": self.set_certificate,
            "serve_folder": self.serve_folder,
            "issue": self.issue,
            "guard": self.guard,
            "relay": self.web.relay,
            "speak": self.web.speak,
            "expect": self.web.issuers.expect,
            "issued": lambda: self.web.issuers.issued,
            "asked": lambda: self.web.issuers.asked,
        }

    async def serve(self) -> None:
        """Starts every server; returns when all of them listen."""
        loop = asyncio.get_running_loop()
        for capture in self.captures:
            loop.add_reader(capture, capture.drain, _DRAIN_AT_ONCE)
        self.attacker.listen()
        for address in (topology.DNS, topology.DNS_V6):
            await serve_zone(self.zone, address)
            await serve_secure_zone(self.zone, self.authority, address)
        await self.web.serve()

    def answer(self, line: bytes) -> bytes:
        """Answers one question of the owner: `{"ask": NAME, …}` gets `{"value": …}` or `{"error": …}`."""
        try:
            question = json.loads(line)
            value = self._questions[question.pop("ask")](**question)
        except (ValueError, TypeError, KeyError) as error:
            return json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n"
        return json.dumps({"value": value}).encode() + b"\n"

    def hits(self) -> list[dict[str, Any]]:
        """What reached the attacker; the packets queued so far are read first."""
        self._drain()
        return [asdict(hit) for hit in self.attacker.hits]

    def flows(self) -> list[dict[str, Any]]:
        """The packets that left host and open."""
        self._drain()
        return [asdict(flow) for capture in self.captures for flow in capture.flows.values()]

    def lost(self) -> int:
        """The packets that the captures could not read."""
        return sum(capture.lost() for capture in self.captures)

    def forget(self) -> None:
        """Empties every record."""
        for capture in self.captures:
            capture.forget()
        self.web.seen.clear()
        self.zone.seen.clear()
        self.attacker.hits.clear()

    def set_name(self, name: str, entry: dict[str, object]) -> None:
        """Adds or replaces what DNS says for a name."""
        self.zone.set_name(name.lower(), entry_from(entry))

    def set_certificate(self, name: str, kind: str) -> None:
        """Chooses the kind of certificate a name gets from its next handshake on."""
        if kind not in KINDS:
            raise ValueError(f"no such kind of certificate: {kind} (one of {', '.join(KINDS)})")
        self.authority.kinds[name.lower()] = kind

    def serve_folder(self, name: str, folder: str) -> None:
        """Makes a host a site of the files below a folder."""
        self.web.serve_folder(name.lower(), Path(folder))

    def issue(self, name: str) -> str:
        """A good certificate and its key for a server of the owner's own."""
        return self.authority.issue(name.lower()).decode()

    def guard(self, name: str, guard: dict[str, Any] | None) -> None:
        """What a host asks for from now on."""
        if guard is not None:
            guard["keys"] = tuple(guard.get("keys", ()))
        self.web.guards.set_guard(name, None if guard is None else Guard(**guard))

    def _drain(self) -> None:
        for capture in self.captures:
            capture.drain()


def main(arguments: list[str]) -> int:
    """`world CHANNEL-FD FOLDER root|user`: builds, says so on the channel, serves until the channel ends."""
    channel = socket.socket(fileno=int(arguments[0]))
    folder, rootless = Path(arguments[1]), arguments[2] == "user"
    inodes: set[int] = set()
    try:
        owner = os.pidfd_open(os.getppid())
        write_configuration(folder / "etc")
        if rootless:
            enter_user_namespace()
        made = make_namespaces()
        bind_configuration(folder / "etc")
        descriptors = {"world": made.world, "host": made.host, "open": made.open}
        inodes = {os.fstat(descriptor).st_ino for descriptor in descriptors.values()}
        asyncio.run(_live(channel, owner, folder, descriptors))
    except Exception as error:  # whatever it was, the owner is waiting to be told
        with contextlib.suppress(OSError):
            channel.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        if not isinstance(error, CannotBuild):
            raise
        return 1
    finally:
        _sweep(inodes)
        shutil.rmtree(folder, ignore_errors=True)
    return 0


async def _live(channel: socket.socket, owner: int, folder: Path, descriptors: dict[str, int]) -> None:
    world = World(folder)
    await world.serve()
    reader, writer = await asyncio.open_connection(sock=channel)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(owner, ended.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    # A terminal's Ctrl-C reaches the whole process group; the owner decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ready = {name: {"fd": fd, "inode": os.fstat(fd).st_ino} for name, fd in descriptors.items()}
    writer.write(json.dumps({"value": ready}).encode() + b"\n")

    async def answer_all() -> None:
        while line := await reader.readline():
            writer.write(world.answer(line))
            await writer.drain()
        ended.set()

    answering = asyncio.create_task(answer_all())
    await ended.wait()
    answering.cancel()
    with contextlib.suppress(asyncio.CancelledError, OSError):
        await answering


def _sweep(inodes: set[int]) -> None:
    """Kills what still lives in the lab's namespaces; a second look catches what was just being started."""
    deadline = time.monotonic() + 2
    while inodes and (pids := inhabitants(inodes)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(OSError):  # gone meanwhile
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
