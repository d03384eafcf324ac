"""A visit whose parts fail: whatever raises, nothing goes upstream, one decision is recorded, the client is let go."""

from __future__ import annotations

import asyncio
import datetime as dt
import socket
import ssl
import time
from collections.abc import Callable
from ipaddress import IPv4Address
from typing import Any

import pytest

from egressd.gate.connection import Services
from egressd.gate.dialer import Dialed, DialFailed
from egressd.gate.dns.synthetic import SyntheticNames
from egressd.gate.door import entering, judgement
from egressd.gate.door.entrance import TRANSPARENT, Entrance
from egressd.gate.door.visit import Visit
from egressd.gate.limits import Budget
from egressd.gate.recorder import AuditUnavailable
from egressd.gate.sandbox import Sandbox
from egressd.gate.settings import Settings
from egressd.journal.record import Record
from egressd.policy.compile import compile_policy
from egressd.policy.effective import EffectiveEntry, EffectivePolicy
from egressd.policy.reasons import Reason

NAME = ("pinned", "example", "com")
ENTRIES = (
    EffectiveEntry(id="pinned", place="p.yaml:1", effect="allow", hosts=("pinned.example.com",), treatment="tunnel"),
    EffectiveEntry(
        id="web", place="p.yaml:2", effect="allow", hosts=("web.example.com",), requests=("GET,HEAD /**",),
        schemes=("https", "http"), ports=(443, 80),
    ),
    EffectiveEntry(
        id="raw", place="p.yaml:3", effect="allow", hosts=("raw.example.com",), treatment="relay", ports=(22,)
    ),
)  # fmt: skip


class Recorder:
    """Keeps records; `fault` fails every commit."""

    def __init__(self, fault: Exception | None) -> None:
        self.records: list[Record] = []
        self.fault = fault

    def put(self, record: Record) -> None:
        self.records.append(record)

    async def commit(self, record: Record) -> None:
        if self.fault is not None:
            raise self.fault
        self.records.append(record)


class FakeDialer:
    """Hands out one end of a socket pair and counts the dials."""

    def __init__(self, fault: Exception | DialFailed | None, address: str) -> None:
        self.dials = 0
        self.address = IPv4Address(address)
        self.dialed = asyncio.Event()
        self.fault = fault
        self.far: socket.socket | None = None

    async def dial(self, host: Any, port: int, permit: Callable[[Any], Reason | None]) -> Dialed | DialFailed:
        self.dials += 1
        if isinstance(self.fault, DialFailed):
            return self.fault
        if self.fault is not None:
            raise self.fault
        self.far, near = socket.socketpair()
        near.setblocking(False)
        self.far.setblocking(False)
        self.dialed.set()
        return Dialed(near, self.address)


class Leaves:
    """No certificate can be had."""

    def context_for(self, host: str, alpn: str) -> ssl.SSLContext:
        raise OSError("no leaf")

    def explain_context_for(self, sandbox: str, host: str, now: float, alpn: str) -> ssl.SSLContext | None:
        raise OSError("no leaf")


def hello(name: str) -> bytes:
    outgoing = ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


OWN = hello("egressd.internal")
PINNED, WEB, RAW = (hello(f"{host}.example.com") for host in ("pinned", "web", "raw"))


class Scene:
    """A visit of one client, with what it met."""

    def __init__(
        self,
        *,
        audit: Exception | None = None,
        dial: Exception | DialFailed | None = None,
        destination: str | None = None,
        port: int = 443,
        revoked: bool = False,
        connections: int = 10,
        address: str = "192.0.2.1",
        entrance: Entrance = TRANSPARENT,
    ) -> None:
        self.entrance = entrance
        settings = Settings(
            first_bytes_timeout=0.2, head_timeout=0.2, idle_timeout=5, connections=connections
        )
        self.recorder = Recorder(audit)
        self.dialer = FakeDialer(dial, address)
        names = SyntheticNames()
        self.addresses = {}
        for host in ("pinned", "web", "raw"):
            name = (host, "example", "com")
            reserved = names.reserve(name)
            assert isinstance(reserved, IPv4Address)
            names.confirm(name)
            self.addresses[host] = reserved
        policy = compile_policy(EffectivePolicy(profile="p", entries=ENTRIES))
        self.sandbox = Sandbox("sbx-1", policy, names, Budget(settings), revoked=revoked)
        self.services = Services(settings, self.recorder, self.dialer, Leaves())  # type: ignore[arg-type]  # fakes
        self.destination = self.addresses.get(
            destination or "", IPv4Address(destination) if destination and destination[0].isdigit() else None
        )
        self.port = port

    def play(
        self,
        monkeypatch: pytest.MonkeyPatch,
        sent: bytes,
        act: Callable[[Scene, socket.socket, Visit], Any] | None = None,
    ) -> bytes:
        """Run the visit while the client sends `sent` and reads to the end; returns what it read."""
        wanted = (self.destination, self.port) if self.destination is not None else None
        monkeypatch.setattr(entering, "original_destination", lambda sock: wanted)

        async def body() -> bytes:
            client, ours = socket.socketpair()
            client.setblocking(False)
            ours.setblocking(False)
            with client:
                visit = Visit(ours, self.sandbox, self.services, self.entrance)
                task = asyncio.ensure_future(visit.run())
                loop = asyncio.get_running_loop()
                await loop.sock_sendall(client, sent)
                if act is not None:
                    await act(self, client, visit)
                got = b""
                async with asyncio.timeout(5):
                    try:
                        while part := await loop.sock_recv(client, 4096):
                            got += part
                        client.shutdown(socket.SHUT_WR)
                    except ConnectionError:
                        pass
                    await task
                if self.dialer.far is not None:
                    self.dialer.far.close()
                return got

        return asyncio.run(body())

    def decisions(self) -> list[tuple[str | None, str | None]]:
        return [
            (r.verdict, r.reason)
            for r in self.recorder.records
            if r.event == "decision" and r.layer == "connection"
        ]


FAULTS = [
    pytest.param(RuntimeError("boom"), id="an exception"),
    pytest.param(OSError(5, "io"), id="an I/O error"),
    pytest.param(TimeoutError(), id="a timeout"),
    pytest.param(RecursionError(), id="a recursion"),
    pytest.param(MemoryError(), id="no memory"),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_policy_that_fails_denies(
    monkeypatch: pytest.MonkeyPatch, fault: Exception, capfd: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(destination="pinned")

    def broken(*_: object) -> None:
        raise fault

    monkeypatch.setattr(judgement, "decide", broken)
    scene.play(monkeypatch, hello("pinned.example.com"))
    assert scene.decisions() == [("deny", "internal_error")]
    assert scene.dialer.dials == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_dialer_that_fails_ends_the_allowed_visit_with_a_record(
    monkeypatch: pytest.MonkeyPatch, fault: Exception, capfd: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(destination="pinned", dial=fault)
    scene.play(monkeypatch, hello("pinned.example.com"))
    assert scene.decisions() == [("allow", "rule")]
    assert [r.reason for r in scene.recorder.records if r.event == "end"] == ["internal_error"]


def test_an_upstream_that_cannot_be_reached_is_told_by_an_alert(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(destination="pinned", dial=DialFailed(Reason.UPSTREAM_UNREACHABLE, "refused"))
    assert scene.play(monkeypatch, hello("pinned.example.com"))[:1] == b"\x15"
    assert [r.reason for r in scene.recorder.records if r.event == "end"] == ["upstream_unreachable"]


def test_no_record_no_dial(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(destination="pinned", audit=AuditUnavailable("full"))
    scene.play(monkeypatch, hello("pinned.example.com"))
    assert scene.decisions() == [("deny", "audit_unavailable")]
    assert scene.dialer.dials == 0


@pytest.mark.parametrize("name", ["web", "denied"], ids=["for an allowed name", "to explain"])
def test_no_certificate_no_connection(
    monkeypatch: pytest.MonkeyPatch, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(destination="web" if name == "web" else "198.18.0.2")
    scene.play(monkeypatch, hello(f"{name}.example.com"))
    assert scene.decisions() == [("deny", "internal_error" if name == "web" else "not_allowed")]
    assert scene.dialer.dials == 0


@pytest.mark.parametrize(
    ("scene", "sent", "reason"),
    [
        pytest.param({"destination": None}, b"", "no_original_dst", id="NET-19 the listener itself"),
        pytest.param({"destination": "198.18.77.1"}, b"", "synthetic_unmapped", id="a synthetic address of no name"),
        pytest.param({"destination": "198.18.0.4"}, b"", "synthetic_unmapped", id="a reserved synthetic address"),
        pytest.param({"destination": "198.18.0.3", "port": 22}, b"SSH-2.0-x\r\n", "port_not_allowed", id="our page, port 22"),
        pytest.param({"destination": "198.18.0.3", "port": 8443}, OWN, "port_not_allowed", id="our own page's other ports, TLS"),
        pytest.param({"destination": "198.18.0.3", "port": 80}, OWN, "scheme_not_allowed", id="TLS on our own page's http port"),
        pytest.param({"destination": "198.18.0.3"}, WEB, "sni_mismatch", id="another server name at our own page"),
        pytest.param({"destination": "198.18.0.3", "port": 80}, b"SSH-2.0-x\r\n", "unknown_protocol", id="our page speaks HTTP"),
        pytest.param({"destination": "198.18.0.3", "port": 80, "revoked": True}, b"", "revoked", id="revoked, our page"),
        pytest.param({"destination": "pinned", "revoked": True}, b"", "revoked", id="a revoked sandbox"),
        pytest.param({"destination": "pinned", "connections": 0}, b"", "too_many_connections", id="DOS-01 over the budget"),
        pytest.param({"destination": "pinned"}, b"", "head_timeout", id="DOS-01 silence"),
        pytest.param({"destination": "pinned"}, b"SSH-2.0-x\r\n", "unknown_protocol", id="ENG-03 neither TLS nor HTTP"),
        pytest.param({"destination": "pinned"}, b"\x16\x03\x01\xff\xff", "bad_tls", id="TLS-22 a bad record"),
        pytest.param({"destination": "pinned", "port": 8443}, PINNED, "port_not_allowed", id="TLS-21 another port"),
        pytest.param({"destination": "pinned"}, WEB, "sni_mismatch", id="TLS-01 another server name"),
        pytest.param({"destination": "198.18.0.2"}, WEB, "synthetic_unmapped", id="an allowed name at the explaining address"),
        pytest.param({"destination": "11.6.6.6"}, WEB, "ip_literal", id="TLS-05 an address of its own choosing"),
        pytest.param({"destination": "169.254.169.254", "port": 80}, b"", "floor_metadata", id="metadata, in silence"),
        pytest.param({"destination": "raw", "port": 443}, RAW, "port_not_allowed", id="a relay's other port"),
    ],
)  # fmt: skip
def test_what_is_refused_before_any_page(
    monkeypatch: pytest.MonkeyPatch,
    scene: dict[str, Any],
    sent: bytes,
    reason: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    connections = scene.pop("connections", 10)
    played = Scene(**scene)
    if connections == 0:
        while played.sandbox.budget.connection(time.monotonic()) is None:
            pass
    played.play(monkeypatch, sent)
    assert played.decisions() == [("deny", reason)]
    assert played.dialer.dials == 0


def test_a_relay_lets_the_server_speak_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(scene: Scene, client: socket.socket, visit: Visit) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(5):
            await scene.dialer.dialed.wait()
            assert scene.dialer.far is not None
            await loop.sock_sendall(scene.dialer.far, b"220 hello\r\n")
            assert await loop.sock_recv(client, 100) == b"220 hello\r\n"
            client.shutdown(socket.SHUT_WR)
            scene.dialer.far.close()

    scene = Scene(destination="raw", port=22)
    scene.play(monkeypatch, b"", act)
    assert scene.decisions() == [("allow", "rule")]
    assert [r.treatment for r in scene.recorder.records if r.event == "decision"] == ["relay"]


@pytest.mark.parametrize(
    ("entries", "lives"),
    [
        pytest.param(ENTRIES, True, id="the same rules"),
        pytest.param(ENTRIES[1:], False, id="the rule is gone"),
        pytest.param(
            (ENTRIES[0].model_copy(update={"expires": dt.date(2020, 1, 1)}),),
            False,
            id="the rule has expired",
        ),
        pytest.param(
            (ENTRIES[0].model_copy(update={"addresses": ("198.51.100.0/24",)}),),
            False,
            id="the address lies outside",
        ),
        pytest.param(
            (ENTRIES[0].model_copy(update={"treatment": "inspect"}),), False, id="it is to be inspected now"
        ),
        pytest.param(
            (*ENTRIES, EffectiveEntry(id="no", place="p.yaml:9", effect="deny", hosts=("*.example.com",))),
            False,
            id="a deny was added",
        ),
    ],
)
def test_an_open_tunnel_is_judged_again_when_the_rules_change(
    monkeypatch: pytest.MonkeyPatch, entries: tuple[EffectiveEntry, ...], lives: bool
) -> None:
    async def act(scene: Scene, client: socket.socket, visit: Visit) -> None:
        async with asyncio.timeout(5):
            await scene.dialer.dialed.wait()
            assert scene.dialer.far is not None
            loop = asyncio.get_running_loop()
            assert await loop.sock_recv(scene.dialer.far, 4096)  # the tunnel is open
        scene.sandbox.policy = compile_policy(EffectivePolicy(profile="p", entries=entries))
        for live in tuple(scene.sandbox.live):
            live.rejudge(time.time())
        client.shutdown(socket.SHUT_WR)
        scene.dialer.far.close()

    scene = Scene(destination="pinned", address="11.0.0.1")
    scene.play(monkeypatch, PINNED, act)
    ends = [r.reason for r in scene.recorder.records if r.event == "end"]
    assert ends == ["completed" if lives else "policy_changed"]


def test_a_cut_ends_a_tunnel_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(scene: Scene, client: socket.socket, visit: Visit) -> None:
        async with asyncio.timeout(5):
            await scene.dialer.dialed.wait()
        for live in tuple(scene.sandbox.live):
            live.cut(Reason.REVOKED)

    scene = Scene(destination="pinned")
    scene.play(monkeypatch, hello("pinned.example.com"), act)
    assert [r.reason for r in scene.recorder.records if r.event == "end"] == ["revoked"]
    assert scene.sandbox.live == set()
