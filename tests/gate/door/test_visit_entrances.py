"""A visit by SOCKS, by CONNECT, and to egressd's own address: judged alike, told in the client's own protocol, recorded once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from ipaddress import IPv4Address
from typing import Any

import pytest

from egressd.gate.dialer import DialFailed
from egressd.gate.door.entrance import Entrance
from egressd.gate.door.visit import Visit
from egressd.policy.reasons import Reason
from tests.gate.door.test_visit import PINNED, RAW, WEB, Scene, hello

GREETING = b"\x05\x01\x00"
CHOSEN = b"\x05\x00"
SUCCEEDED = b"\x05\x00\x00\x01" + bytes(6)
NOT_ALLOWED = b"\x05\x02\x00\x01" + bytes(6)
NO_SUCH_COMMAND = b"\x05\x07\x00\x01" + bytes(6)
SOURCE = IPv4Address("172.30.0.3")


def ask(name: str, port: int = 443, command: int = 1) -> bytes:
    return bytes((5, command, 0, 3, len(name))) + name.encode() + port.to_bytes(2)


def socks_scene(**options: Any) -> Scene:
    return Scene(entrance=Entrance("socks", source=SOURCE), **options)


def direct_scene(port: int = 443, **options: Any) -> Scene:
    return Scene(entrance=Entrance("direct", port, source=SOURCE), **options)


@pytest.mark.parametrize(
    ("sent", "answer", "reason"),
    [
        pytest.param(ask("denied.example.com", 22), CHOSEN + NOT_ALLOWED, "not_allowed", id="a denied name"),
        pytest.param(ask("pinned.example.com", 22), CHOSEN + NOT_ALLOWED, "port_not_allowed", id="another port"),
        pytest.param(ask("169.254.169.254", 25), CHOSEN + NOT_ALLOWED, "floor_metadata", id="META-01 metadata"),
        pytest.param(ask("0xa9fea9fe", 25), CHOSEN + NOT_ALLOWED, "floor_metadata", id="IP-01 metadata, hexadecimal"),
        pytest.param(ask("localhost", 5432), CHOSEN + NOT_ALLOWED, "floor_name", id="localhost"),
        pytest.param(ask("11.6.6.6", 22), CHOSEN + NOT_ALLOWED, "ip_literal", id="IP-15 a bare address"),
        pytest.param(ask("evil\0.example.com"), CHOSEN + NOT_ALLOWED, "bad_host", id="NAME-07 NUL"),
        pytest.param(ask("web.example.com", 0), CHOSEN + NOT_ALLOWED, "bad_port", id="NAME-24 port zero"),
        pytest.param(ask("web.example.com", command=2), CHOSEN + NO_SUCH_COMMAND, "protocol_not_allowed", id="BIND"),
        pytest.param(ask("web.example.com", command=3), CHOSEN + NO_SUCH_COMMAND, "protocol_not_allowed", id="UDP ASSOCIATE"),
        pytest.param(b"", CHOSEN, "head_timeout", id="DOS-01 silence after the greeting"),
        pytest.param(b"\x05\x01\x00", CHOSEN, "head_timeout", id="DOS-01 half a request"),
    ],
)  # fmt: skip
def test_socks_says_no_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, answer: bytes, reason: str
) -> None:
    scene = socks_scene()
    assert scene.play(monkeypatch, GREETING + sent) == answer
    assert scene.decisions() == [("deny", reason)]
    assert scene.dialer.dials == 0
    [record] = scene.recorder.records
    assert (record.channel, record.source) == ("socks", "172.30.0.3")


@pytest.mark.parametrize(
    ("sent", "answer", "reason"),
    [
        pytest.param(b"\x04\x01\x00\x50\x01\x02\x03\x04\0", b"\0\x5b" + bytes(6), "bad_request", id="SOCKS4"),
        pytest.param(b"\x05\x01\x01", b"\x05\xff", "unknown_sandbox", id="GSSAPI alone"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", b"", "unknown_protocol", id="HTTP-22 HTTP on the SOCKS port"),
        pytest.param(b"\x16\x03\x01\x02\x00", b"", "unknown_protocol", id="TLS on the SOCKS port"),
        pytest.param(b"\x05\x01\x02\x05\x01", b"\x05\x02\x01\x01", "bad_request", id="a login of another version"),
    ],
)  # fmt: skip
def test_what_is_no_socks5_is_refused(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, answer: bytes, reason: str
) -> None:
    scene = socks_scene()
    assert scene.play(monkeypatch, sent) == answer
    assert scene.decisions() == [("deny", reason)]


def test_a_listener_that_says_who_it_is_takes_any_login(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = socks_scene()
    sent = b"\x05\x01\x02" + b"\x01\x01u\x01p" + ask("denied.example.com", 22)
    assert scene.play(monkeypatch, sent) == b"\x05\x02\x01\x00" + NOT_ALLOWED
    assert "u" not in [record.detail for record in scene.recorder.records]


@pytest.mark.parametrize(
    ("name", "first", "reason"),
    [
        pytest.param("denied.example.com", b"SSH-2.0-x\r\n", "not_allowed", id="neither TLS nor HTTP"),
        pytest.param("web.example.com", hello("pinned.example.com"), "sni_mismatch", id="TLS-01 another server name"),
        pytest.param("pinned.example.com", b"\x16\x03\x01\xff\xff", "bad_tls", id="a bad hello"),
    ],
)  # fmt: skip
def test_on_443_it_says_yes_so_that_the_client_can_be_told_why_not(
    monkeypatch: pytest.MonkeyPatch, name: str, first: bytes, reason: str
) -> None:
    scene = socks_scene()
    told = scene.play(monkeypatch, GREETING + ask(name) + first)
    assert told.startswith(CHOSEN + SUCCEEDED)
    assert scene.decisions() == [("deny", reason)]
    assert scene.dialer.dials == 0


def test_what_was_sent_in_one_piece_or_byte_by_byte_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = GREETING + ask("pinned.example.com") + PINNED

    async def act(scene: Scene, client: socket.socket, visit: Visit) -> None:
        for byte in sent:
            await asyncio.get_running_loop().sock_sendall(client, bytes((byte,)))
            await asyncio.sleep(0)

    whole, bytewise = (socks_scene(dial=DialFailed(Reason.UPSTREAM_UNREACHABLE, "x")) for _ in range(2))
    assert whole.play(monkeypatch, sent) == bytewise.play(monkeypatch, b"", act)
    assert whole.decisions() == bytewise.decisions() == [("allow", "rule")]
    assert [record.sni for record in bytewise.recorder.records] == ["pinned.example.com"] * 2


@pytest.mark.parametrize("size", range(len(GREETING + ask("pinned.example.com")) + 1))
def test_a_client_that_leaves_at_any_byte_leaves_one_record(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    async def act(scene: Scene, client: socket.socket, visit: Visit) -> None:
        client.shutdown(socket.SHUT_WR)

    scene = socks_scene()
    scene.play(monkeypatch, (GREETING + ask("pinned.example.com"))[:size], act)
    assert scene.decisions() == [("deny", "client_closed")]


def test_a_relay_by_socks_lets_the_server_speak_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(scene: Scene, client: socket.socket, visit: Visit) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(5):
            await scene.dialer.dialed.wait()
            assert scene.dialer.far is not None
            await loop.sock_sendall(scene.dialer.far, b"220 hello\r\n")
            got = b""
            while len(got) < 23:
                got += await loop.sock_recv(client, 100)
            assert got == CHOSEN + SUCCEEDED + b"220 hello\r\n"
            client.shutdown(socket.SHUT_WR)
            scene.dialer.far.close()

    scene = socks_scene()
    scene.play(monkeypatch, GREETING + ask("raw.example.com", 22), act)
    assert scene.decisions() == [("allow", "rule")]
    assert [r.treatment for r in scene.recorder.records if r.event == "decision"] == ["relay"]


type Act = Callable[[Scene, socket.socket, Visit], Awaitable[None]]


@pytest.mark.parametrize(
    ("port", "sent", "reason", "host"),
    [
        pytest.param(443, hello("denied.example.com"), "not_allowed", "denied.example.com", id="a denied name"),
        pytest.param(443, hello("pinned.example.com")[:9] + b"\0", "head_timeout", None, id="half a hello"),
        pytest.param(443, RAW, "port_not_allowed", "raw.example.com", id="a relay's name: nothing proves it here"),
        pytest.param(443, b"SSH-2.0-x\r\n", "unknown_protocol", None, id="ENG-03 neither TLS nor HTTP"),
        pytest.param(443, b"", "head_timeout", None, id="DOS-01 silence"),
        pytest.param(80, PINNED, "port_not_allowed", "pinned.example.com", id="TLS on the port for HTTP"),
        pytest.param(443, b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\0", "unknown_protocol", None, id="a PROXY header of no hop"),
    ],
)  # fmt: skip
def test_at_our_own_address_only_what_a_client_claims_is_known(
    monkeypatch: pytest.MonkeyPatch,
    port: int,
    sent: bytes,
    reason: str,
    host: str | None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    scene = direct_scene(port)
    scene.play(monkeypatch, sent)
    assert scene.decisions() == [("deny", reason)]
    assert scene.dialer.dials == 0
    [record] = scene.recorder.records
    assert (record.channel, record.host, record.port, record.address) == ("direct", host, port, None)


def no_sni() -> bytes:
    import ssl

    outgoing, context = ssl.MemoryBIO(), ssl.create_default_context()
    context.check_hostname = False
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


def test_tls_03_without_a_server_name_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = direct_scene()
    assert scene.play(monkeypatch, no_sni()) == bytes((21, 3, 3, 0, 2, 2, 112))
    assert scene.decisions() == [("deny", "no_sni")]


def test_an_allowed_name_is_dialled_by_that_name_and_joins_its_query(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = direct_scene(dial=DialFailed(Reason.UPSTREAM_UNREACHABLE, "x"))
    scene.sandbox.own = ()
    scene.sandbox.names.note(("pinned", "example", "com"), "root-of-the-query")
    scene.play(monkeypatch, PINNED)
    assert scene.decisions() == [("allow", "rule")]
    assert scene.dialer.dials == 1
    assert {record.root_id for record in scene.recorder.records} == {"root-of-the-query"}


GOOD = b"GET / HTTP/1.1\r\nHost: web.example.com\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "connection", "asked"),
    [
        pytest.param(GOOD, ("allow", "rule"), ("allow", "rule"), id="an allowed name"),
        pytest.param(GOOD.replace(b"web", b"denied"), ("deny", "not_allowed"), ("deny", "not_allowed"), id="a denied name"),
        pytest.param(b"GET / HTTP/1.1\r\nX: y\r\n\r\n", ("deny", "bad_host"), ("deny", "bad_host"), id="no Host"),
        pytest.param(GOOD.replace(b"web", b"we b"), ("deny", "bad_host"), ("deny", "bad_host"), id="a Host that is none"),
        pytest.param(
            GOOD.replace(b"Host", b"Host: denied.example.com\r\nHost"), ("deny", "not_allowed"), ("deny", "not_allowed"),
            id="two Hosts, the denied one first",
        ),
        pytest.param(
            GOOD.replace(b"\r\n\r\n", b"\r\nHost: denied.example.com\r\n\r\n"), ("allow", "rule"), ("deny", "duplicate_host"),
            id="two Hosts, the denied one last",
        ),
        pytest.param(
            GOOD.replace(b" /", b" http://denied.example.com/"), ("allow", "rule"), ("deny", "authority_mismatch"),
            id="HTTP-10 another authority in the target",
        ),
        pytest.param(
            b"GET / HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n", ("deny", "floor_metadata"), ("deny", "floor_metadata"),
            id="HTTP-03 metadata in Host",
        ),
    ],
)  # fmt: skip
def test_on_port_80_host_is_what_is_judged(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, connection: tuple[str, str], asked: tuple[str, str]
) -> None:
    scene = direct_scene(80, dial=DialFailed(Reason.UPSTREAM_UNREACHABLE, "x"))
    scene.play(monkeypatch, sent)
    decided = [(r.layer, r.verdict, r.reason) for r in scene.recorder.records if r.event == "decision"]
    assert decided == [("connection", *connection), ("request", *asked)]
    assert scene.dialer.dials == (1 if asked[0] == "allow" else 0)


def test_http_09_a_later_request_for_another_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = direct_scene(80)
    own = b"GET /whoami HTTP/1.1\r\nHost: egressd.internal\r\n\r\n"
    told = scene.play(monkeypatch, own + GOOD)
    assert told.startswith(b"HTTP/1.1 200 ")
    assert scene.dialer.dials == 0
    decided = [(r.layer, r.reason) for r in scene.recorder.records if r.event == "decision"]
    assert decided[:2] == [("connection", "internal_page"), ("request", "internal_page")]
    assert ("request", "rule") not in decided


@pytest.mark.parametrize("way", ["explicit", "socks", "direct"])
def test_bytes_that_were_read_before_the_sandbox_was_known_count(
    monkeypatch: pytest.MonkeyPatch, way: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    read = {
        "explicit": b"CONNECT web.example.com:443 HTTP/1.1\r\n\r\n",
        "socks": ask("web.example.com"),
        "direct": b"",
    }[way]
    scene = Scene(entrance=Entrance(way, 443, SOURCE, read + WEB[:40], greeted=True))
    scene.play(monkeypatch, WEB[40:])
    assert scene.decisions()[0][1] in ("rule", "internal_error")
    assert [record.sni for record in scene.recorder.records][:1] == ["web.example.com"]


OURS = IPv4Address("172.30.0.2")


@pytest.mark.parametrize(
    ("way", "said"),
    [
        pytest.param("socks", GREETING + b"\x05\x01\x00\x01" + OURS.packed + b"\x01\xbb", id="SOCKS"),
        pytest.param("explicit", b"CONNECT 172.30.0.2:443 HTTP/1.1\r\n\r\n", id="CONNECT"),
    ],
)
@pytest.mark.parametrize(
    ("own", "first", "decided"),
    [
        pytest.param((OURS,), PINNED, ("allow", "rule"), id="an allowed name led there"),
        pytest.param((OURS,), hello("denied.example.com"), ("deny", "not_allowed"), id="a denied name"),
        pytest.param((OURS,), no_sni(), ("deny", "no_sni"), id="TLS-03 no server name"),
        pytest.param(None, PINNED, ("deny", "ip_literal"), id="names lead elsewhere"),
        pytest.param((IPv4Address("172.30.0.9"),), PINNED, ("deny", "ip_literal"), id="another address"),
    ],
)
def test_a_client_of_a_proxy_may_ask_for_the_address_that_its_names_lead_to(
    monkeypatch: pytest.MonkeyPatch,
    way: Any,
    said: bytes,
    own: tuple[IPv4Address, ...] | None,
    first: bytes,
    decided: tuple[str, str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    scene = Scene(entrance=Entrance(way), dial=DialFailed(Reason.UPSTREAM_UNREACHABLE, "x"))
    scene.sandbox.own = own
    scene.play(monkeypatch, said + first)
    [found] = scene.decisions()
    assert found == decided
    assert scene.dialer.dials == (decided[0] == "allow")


def test_a_request_in_absolute_form_for_our_own_address_is_for_an_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene(entrance=Entrance("explicit"))
    scene.sandbox.own = (OURS,)
    scene.play(monkeypatch, b"GET http://172.30.0.2/ HTTP/1.1\r\nHost: web.example.com\r\n\r\n")
    assert [r.verdict for r in scene.recorder.records if r.event == "decision"] == ["deny", "deny"]
    assert scene.dialer.dials == 0
