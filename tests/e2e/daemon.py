"""`egressd serve` in the lab, and what an operator does with it."""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from egressd.lab import Lab
from egressd.lab.lab import clean_env
from egressd.lab.stand import Stand
from tests.e2e.conftest import SHIPPED, until
from tests.e2e.test_drills import line_of, running

_MORE = """explicit: {{addresses: [127.0.0.1], http: {http}, socks: {socks}}}
serve: {{drain_timeout: 5, health: "127.0.0.1:{health}"}}
"""


def ports(offset: int = 0) -> str:
    """The daemon's keys in egressd.yaml; daemons that live side by side have ports of their own."""
    return _MORE.format(http=23128 + offset, socks=21080 + offset, health=15021 + offset)


class _OverUnix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("egressd", timeout=30)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(30)
        self.sock.connect(str(self._path))


class Daemon:
    """A daemon of a stand; `start` again after `kill` is its successor."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.socket = stand.directory / "control.sock"
        self.log = stand.directory / "daemon.log"
        self.notified = self._hear()
        self.process: subprocess.Popen[Any]

    def _hear(self) -> socket.socket:
        path = self.stand.directory / "notify.sock"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        sock.bind(str(path))
        path.chmod(0o666)
        return sock

    def start(self, **env: str) -> None:
        """Start it, and wait until it says that it is ready."""
        self.begin(**env)
        self.notified.settimeout(0.2)
        deadline = time.monotonic() + 40
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.said()
            with contextlib.suppress(TimeoutError):
                if "READY=1" in self.notified.recv(4096).decode().split("\n"):
                    return
        pytest.fail("the daemon did not get ready")

    def begin(self, **env: str) -> None:
        """Start it without waiting."""
        self._forget()
        stand = self.stand
        named = {"NOTIFY_SOCKET": str(stand.directory / "notify.sock")}
        with self.log.open("a") as log:
            self.process = stand.lab.popen_host(
                stand.egressd("serve"), cwd=str(stand.directory), env=clean_env(stand.lab, trust=False) | named | env,
                privileged=not stand.lab.rootless, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
            )  # fmt: skip

    def _forget(self) -> None:
        """Lose what a predecessor said that was killed before anybody listened."""
        with contextlib.suppress(BlockingIOError, TimeoutError):
            while True:
                self.notified.recv(4096, socket.MSG_DONTWAIT)

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """Ask the control API."""
        connection = _OverUnix(self.socket)
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def create(self, **wanted: Any) -> dict[str, Any]:
        """Make a sandbox of the explicit wiring."""
        status, made = self.ask("POST", "/v1/sandboxes", {"profile": "lab"} | wanted)
        assert status == 201, made
        return dict(made)

    def revoke(self, sandbox: str) -> dict[str, Any]:
        """End a sandbox."""
        status, gone = self.ask("DELETE", f"/v1/sandboxes/{sandbox}")
        assert status == 200, gone
        return dict(gone)

    @property
    def living(self) -> list[dict[str, Any]]:
        """The sandboxes that are not gone."""
        return list(self.ask("GET", "/v1/sandboxes")[1]["sandboxes"])

    def end(self, number: int = signal.SIGTERM) -> int:
        """End it by a signal; returns its status."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return self.process.wait(30)

    def workers(self) -> set[int]:
        """The pids of its worker processes."""
        return workers_of(self.process.pid)

    def files(self) -> list[str]:
        """What of sandboxes lies in the state directory."""
        return sorted(path.name for path in (self.stand.directory / "state/sandboxes").iterdir())

    def said(self) -> str:
        """What it told its operator."""
        return self.log.read_text()


def workers_of(pid: int) -> set[int]:
    """The worker processes below a process."""
    found = set()
    for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"egressd.gate.worker" in Path(f"/proc/{text}/cmdline").read_bytes():
                found.add(int(text))
            found |= workers_of(int(text))
    return found


def curl(
    stand: Stand, made: Mapping[str, Any], url: str, *, source: str = "127.0.0.7", more: str = ""
) -> str:
    """What curl prints of a request by way of an explicit sandbox's proxy, from an address of the loopback."""
    bundle = stand.directory / "ca-trust" / "bundle.crt"
    script = f"curl -sS --max-time 20 --interface {source} --cacert {bundle} -o /dev/null -w '%{{http_code}}' {more} {url}"
    done = stand.lab.host_exec(
        ["sh", "-c", script], env=clean_env(stand.lab, trust=False) | made["environment"]
    )
    return done.stdout + done.stderr


@contextlib.contextmanager
def daemon(lab: Lab, rules: str, more: str | None = None, **options: Any) -> Iterator[Daemon]:
    """A stand whose daemon runs; ended at the end, with nothing left."""
    lab.forget()
    with Stand(lab, rules, shipped=SHIPPED, more=ports() if more is None else more, **options) as stand:
        made = Daemon(stand)
        try:
            made.start()
            yield made
            if made.process.poll() is None:
                made.ask("DELETE", "/v1/sandboxes")
                workers = made.workers()
                assert made.end() == 0, made.said()
                assert not made.socket.exists()
                assert made.files() == []
                until(lambda: not any(map(alive, workers)), what="the end of the workers")
        except BaseException:
            print(made.said())  # noqa: T201 -- for whoever reads the failure
            raise
        finally:
            made.end(signal.SIGKILL)
            made.notified.close()


def alive(pid: int) -> bool:
    """Whether a process runs."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def open_sockets(pid: int) -> int:
    """How many descriptors a process holds."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def wait_for(process: subprocess.Popen[Any], condition: Callable[[], object], what: str) -> None:
    """Wait for a condition, while a process lives."""

    def held() -> object:
        if process.poll() is not None:
            pytest.fail(f"ended with {process.returncode} before {what}")
        return condition()

    until(held, 30, what)


RULES = """schema: 1
profile: lab
owner: e2e
allow:
  - id: api
    hosts: [api.lab-origin.com]
    requests: ["GET,HEAD /**", "WEBSOCKET /ws"]
  - id: pinned
    hosts: [api.anthropic.com]
    treatment: tunnel
  - id: raw
    hosts: [deb.debian.org]
    treatment: relay
    ports: [22]
"""
"""What the daemon's sandboxes may do, mostly."""
ALLOWED, DENIED = "https://api.lab-origin.com/echo", "https://pastebin.com/"


OPEN = r"""
import os, socket, ssl, sys, threading
def tell(*words): print(*words, flush=True)
def follow(name, sock):
    try:
        while part := sock.recv(65536): pass
        tell(name, "cut")
    except OSError as error: tell(name, "cut")
trusting, opaque = ssl.create_default_context(), ssl._create_unverified_context()
UPGRADE = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
UPGRADE += "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
def stream(host, context, path, more=""):
    sock = context.wrap_socket(socket.create_connection((host, 443)), server_hostname=host)
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode())
    return sock, sock.recv(12)
kept = []
for name, make in (
    ("download", lambda: stream("api.lab-origin.com", trusting, "/sse?events=600&gap=0.1")),
    ("websocket", lambda: stream("api.lab-origin.com", trusting, "/ws", UPGRADE)),
    ("tunnel", lambda: stream("api.anthropic.com", opaque, "/sse?events=600&gap=0.1")),
    ("relay", lambda: (lambda s: (s, s.recv(4)))(socket.create_connection(("deb.debian.org", 22)))),
):
    sock, first = make()
    tell(name, first)
    kept.append(sock)
    threading.Thread(target=follow, args=(name, sock), daemon=True).start()
tell("open", os.environ["EGRESSD_SANDBOX"])
sys.stdin.readline()
tell("still", threading.active_count() - 1)
sys.stdin.readline()
"""


@contextlib.contextmanager
def flows(stand: Stand) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A sandbox with a download, a WebSocket, a tunnel and a relay open; its process and its id."""
    (stand.workspace / "flows.py").write_text(OPEN)
    with running(stand, "exec /usr/bin/python3 flows.py") as process:
        assert line_of(process) == "download b'HTTP/1.1 200'"
        assert line_of(process) == "websocket b'HTTP/1.1 101'"
        assert line_of(process) == "tunnel b'HTTP/1.1 200'"
        assert line_of(process) == "relay b'SSH-'"
        word, sandbox = line_of(process).split()
        assert word == "open"
        yield process, sandbox


def children(pid: int) -> set[int]:
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def kill(stand: Stand, pid: int) -> None:
    done = stand.lab.host_exec(["kill", "-9", str(pid)])
    assert done.returncode == 0, done.stderr


def stderr_of(process: subprocess.Popen[str]) -> str:
    """What a process that has ended said; nothing else reads it."""
    assert process.stderr is not None
    text = ""
    while select.select([process.stderr], [], [], 5)[0] and (part := process.stderr.readline()):
        text += part
    return text


def seconds(text: str) -> float:
    return dt.datetime.fromisoformat(text).timestamp()


def load_allowance() -> float:
    """What a machine that does other things as well adds, in seconds."""
    running_now = float(Path("/proc/loadavg").read_text().split()[0])
    return 0.3 * max(0.0, running_now - 1.0)
