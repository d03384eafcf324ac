"""One sandbox from make to destroy, in a process of its own: `driver.py JOB.json` prints what was seen as JSON.

A process of its own because it may have to become another user (rootless), and because signals and terminals are a
process's own. Stands in for the gate: it says on every connection where the connection was going, answers every query
with one address, and reads the packet log.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import socket
import struct
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from egressd.gate.packets import DroppedPacket, parse_nflog  # noqa: E402 - after the path is known
from egressd.wiring.identity import write_maps  # noqa: E402
from egressd.wiring.kernel import MS_BIND, MS_PRIVATE, MS_REC, mount  # noqa: E402
from egressd.wiring.namespace import Bind, Namespace, SandboxSpec, WiringError  # noqa: E402

ANSWER = "198.18.1.0"
_ORIGINAL_DST = {4: (socket.IPPROTO_IP, 80, 16), 6: (socket.IPPROTO_IPV6, 80, 28)}


def become(uid: int) -> None:
    """An ordinary user who can reach the interpreter, wherever root keeps it."""
    prefix = Path(sys.base_prefix)
    closed = next((p for p in reversed(prefix.parents) if not p.stat().st_mode & 0o001), None)
    if closed is not None:
        os.unshare(os.CLONE_NEWNS)
        mount("none", "/", "", MS_REC | MS_PRIVATE)
        held = os.open(prefix, os.O_PATH)
        mount("tmpfs", str(closed), "tmpfs", 0, "mode=0755")
        prefix.mkdir(parents=True)
        mount(f"/proc/self/fd/{held}", str(prefix), "", MS_BIND | MS_REC)
        os.close(held)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def original_destination(connection: socket.socket, family: int) -> list[Any]:
    level, option, size = _ORIGINAL_DST[family]
    raw = connection.getsockopt(level, option, size)
    port = struct.unpack_from("!H", raw, 2)[0]
    if family == 4:
        return [socket.inet_ntop(socket.AF_INET, raw[4:8]), port]
    return [socket.inet_ntop(socket.AF_INET6, raw[8:24]), port]


class Gate:
    """The stand-in: counts and answers."""

    def __init__(self, made: Namespace) -> None:
        self.made = made
        self.connections: list[Any] = []
        self.queries: list[Any] = []
        self.packets: list[DroppedPacket] = []
        self.command: dict[str, Any] = {}
        self.paused = asyncio.Event()
        self.heard = asyncio.Event()
        self.tasks = [
            asyncio.create_task(getattr(self, "_" + listener.kind.replace("-", "_"))(listener))
            for listener in made.listeners
        ]

    async def _transparent(self, listener: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, peer = await loop.sock_accept(listener.socket)
            with connection:
                seen = original_destination(connection, listener.family)
                self.connections.append([listener.family, *seen])
                if seen == ["192.0.2.77", 1]:
                    self.command = look_from_outside(self.made)
                    self.paused.set()
                with contextlib.suppress(OSError):
                    await loop.sock_sendall(connection, json.dumps([seen, peer[0]]).encode())

    _explicit = _dns_tcp = _transparent

    async def _dns_udp(self, listener: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            query, peer = await loop.sock_recvfrom(listener.socket, 4096)
            kind = struct.unpack_from("!H", query, query.index(0, 12) + 1)[0]
            self.queries.append([listener.family, peer[0], kind])
            question = query[12 : query.index(0, 12) + 5]
            record = (
                b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 1, 4) + socket.inet_aton(ANSWER)
                if kind == 1
                else b""
            )
            counts = struct.pack("!HHHHH", 0x8180, 1, 1 if record else 0, 0, 0)
            await loop.sock_sendto(listener.socket, query[:2] + counts + question + record, peer)

    async def _nflog(self, listener: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            parsed = parse_nflog(await loop.sock_recv(listener.socket, 65536))
            assert isinstance(parsed, tuple), parsed
            self.packets += parsed
            self.heard.set()

    async def logged(self, count: int) -> None:
        """Wait for that many dropped packets."""
        while len(self.packets) < count:
            self.heard.clear()
            await self.heard.wait()

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        results = await asyncio.gather(*self.tasks, return_exceptions=True)
        for result in results:
            if not isinstance(result, asyncio.CancelledError):
                raise AssertionError(result)


def look_from_outside(made: Namespace) -> dict[str, Any]:
    """What the host sees of the command while it runs."""
    assert made._command is not None
    pid = made._command._process()
    user, pids = os.readlink(f"/proc/{pid}/ns/user"), os.readlink(f"/proc/{pid}/ns/pid")
    uids = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Uid:")
    )
    neighbours = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if user == os.readlink(process / "ns/user") or pids == os.readlink(process / "ns/pid"):
                neighbours.append((process / "cmdline").read_bytes().split(b"\0")[0].decode())
    return {"uids": sorted({int(word) for word in uids.split()[1:]}), "neighbours": sorted(neighbours)}


async def run(job: dict[str, Any]) -> dict[str, Any]:
    spec = dict(job["spec"])
    spec["binds"] = tuple(Bind.parse(text) for text in spec.get("binds", ()))
    for key in ("sockets", "masks"):
        spec[key] = tuple(spec.get(key, ()))
    open_before = len(os.listdir("/proc/self/fd"))
    began = time.monotonic()
    made = await Namespace.make(SandboxSpec(**spec))
    result: dict[str, Any] = {"began": open_before, "notes": list(made.notes), "host_uid": made.host_uid}
    try:
        result["make_ms"] = (time.monotonic() - began) * 1000
        gate = Gate(made)
        result["probes"] = [
            asdict(await made.probe_dns("a.test")),
            asdict(await made.probe_dns("a.test", server="127.0.0.53")),
            (await made.probe_tcp("203.0.113.9", 8443)).received.decode(),
        ]
        result["missing"] = await made.missing_rules()
        began = time.monotonic()
        launching = asyncio.create_task(made.launch(job["command"], stdio=tuple(job.get("stdio", (0, 1, 2)))))
        if "signal_after_connection" in job:
            await gate.paused.wait()
            os.kill(os.getpid(), job["signal_after_connection"])
        if "cancel_after_connection" in job:
            await gate.paused.wait()
            launching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await launching
        else:
            result["status"] = await launching
        result["launch_ms"] = (time.monotonic() - began) * 1000
        counted = await made.counted()
        assert counted is not None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(gate.logged(counted.packets), 2)
        await gate.stop()
        result |= {"connections": gate.connections, "queries": gate.queries, "command": gate.command}
        result |= {"packets": [asdict(packet) for packet in gate.packets], "counted": counted._asdict()}
    finally:
        await made.destroy()
        await made.destroy()  # may be called again
    result["left"] = len(os.listdir("/proc/self/fd"))
    return result


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    out = os.open(sys.argv[2], os.O_WRONLY | os.O_CLOEXEC)
    if job.get("shell"):
        # In a private mount namespace, as root: make this machine lack something.
        os.unshare(os.CLONE_NEWNS)
        mount("none", "/", "", MS_REC | MS_PRIVATE)
        subprocess.run(["/bin/sh", "-ec", job["shell"]], check=True)
    if job.get("become"):
        become(job["become"])
    if job.get("nested"):
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # dumpable again, or /proc/self is not ours to write
        uid, gid = os.getuid(), os.getgid()
        os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS)
        write_maps(os.getpid(), [(0, uid, 1)], [(0, gid, 1)])
    try:
        result = asyncio.run(run(job))
    except WiringError as error:
        result = {"error": [error.command, error.stderr, error.hint]}
    os.write(out, json.dumps(result).encode())


if __name__ == "__main__":
    main()
