"""The lobby: whoever proves to be of a sandbox goes on into it, everybody else is refused and written down once."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from ipaddress import IPv4Address

import pytest

from egressd.gate.door import lobby as lobbies
from egressd.gate.door.entrance import Entrance, Way
from egressd.gate.door.hops import read_networks
from egressd.gate.door.lobby import Lobby
from egressd.gate.door.tokens import GUESSES, Register
from egressd.gate.settings import Settings
from egressd.gate.strangers import Strangers
from egressd.journal.record import NOBODY, Record
from tests.fuzz.hops import header

HERE = IPv4Address("127.0.0.1")
TOKEN = "t0ken-of-a"
HEAD = b"CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com:443\r\n"
REQUEST = b"\x05\x01\x00\x03\x0fapi.example.com\x01\xbb"


def authorized(user: str = "sbx-a", token: str = TOKEN, head: bytes = HEAD) -> bytes:
    return head + b"Proxy-Authorization: Basic " + base64.b64encode(f"{user}:{token}".encode()) + b"\r\n\r\n"


def login(user: str = "sbx-a", token: str = TOKEN) -> bytes:
    return bytes((1, len(user))) + user.encode() + bytes((len(token),)) + token.encode()


@dataclass
class Book:
    records: list[Record] = field(default_factory=list)

    def put(self, record: Record) -> None:
        self.records.append(record)

    async def commit(self, record: Record) -> None:
        raise AssertionError("nothing of a stranger waits for the journal")


@dataclass
class Scene:
    """A lobby on loopback, whose every client comes from 127.0.0.1 unless a hop says otherwise."""

    way: Way
    source: IPv4Address | None = None
    hops: tuple[str, ...] = ()
    kept: bool | Exception = True
    settings: Settings = field(default_factory=lambda: Settings(head_timeout=0.3, first_bytes_timeout=0.3))
    book: Book = field(default_factory=Book)
    admitted: list[tuple[str, Entrance]] = field(default_factory=list)
    claims: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.register = Register()
        self.register.enter("sbx-a", hashlib.sha256(TOKEN.encode()).digest(), self.source)
        self.register.enter("sbx-b", hashlib.sha256(b"t0ken-of-b").digest(), IPv4Address("172.30.0.4"))

    async def claim(self, sandbox: str, source: object) -> bool:
        self.claims.append((sandbox, str(source)))
        if isinstance(self.kept, Exception):
            raise self.kept
        return self.kept

    async def admit(self, sandbox: str, sock: socket.socket, entrance: Entrance) -> None:
        self.admitted.append((sandbox, entrance))
        sock.close()

    def play(self, *clients: bytes, act: Callable[[Lobby], Awaitable[None]] | None = None) -> list[bytes]:
        """Let each client connect, say its piece and read to the end; return what each was told."""
        return asyncio.run(self._play(clients, act))

    async def _play(
        self, clients: tuple[bytes, ...], act: Callable[[Lobby], Awaitable[None]] | None
    ) -> list[bytes]:
        strangers = Strangers(self.book)
        lobby = Lobby(self.settings, self.register, strangers, self.claim, self.admit)
        told = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            for said in clients:
                told.append(await self._meet(listener, lobby, said, act))
        strangers.flush()
        return told

    async def _meet(
        self,
        listener: socket.socket,
        lobby: Lobby,
        said: bytes,
        act: Callable[[Lobby], Awaitable[None]] | None,
    ) -> bytes:
        loop = asyncio.get_running_loop()
        client = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
        for sock in (client, ours):
            sock.setblocking(False)
        task = asyncio.ensure_future(lobby.receive(ours, self.way, 443, read_networks(self.hops)))
        await loop.sock_sendall(client, said)
        if act is not None:
            await act(lobby)
        told = b""
        try:
            async with asyncio.timeout(5):
                while part := await loop.sock_recv(client, 4096):
                    told += part
        except ConnectionError:
            pass
        client.close()
        await asyncio.gather(task, return_exceptions=True)
        return told

    @property
    def strays(self) -> list[tuple[str, str | None, str | None]]:
        return [(record.sandbox, record.reason, record.source) for record in self.book.records]


# a token


@pytest.mark.parametrize(
    ("way", "said", "answer", "data"),
    [
        pytest.param("explicit", authorized() + b"\x16\x03", b"", authorized() + b"\x16\x03", id="CONNECT"),
        pytest.param(
            "explicit", authorized(head=b"GET http://a.test/ HTTP/1.1\r\n"), b"",
            authorized(head=b"GET http://a.test/ HTTP/1.1\r\n"), id="absolute form",
        ),
        pytest.param("socks", b"\x05\x02\x00\x02" + login() + REQUEST, b"\x05\x02\x01\x00", REQUEST, id="SOCKS"),
    ],
)  # fmt: skip
def test_a_token_names_its_sandbox_and_its_first_source_is_kept(
    way: Way, said: bytes, answer: bytes, data: bytes
) -> None:
    scene = Scene(way)
    assert scene.play(said) == [answer]
    assert scene.claims == [("sbx-a", "127.0.0.1")]
    assert scene.register.owner(HERE) == "sbx-a"
    [(sandbox, entrance)] = scene.admitted
    assert (sandbox, entrance.way, entrance.source, entrance.data) == ("sbx-a", way, HERE, data)
    assert entrance.greeted is (way == "socks")
    assert scene.strays == []


def test_a_source_that_is_known_is_not_claimed_again() -> None:
    scene = Scene("explicit", source=HERE)
    scene.play(authorized(), HEAD + b"\r\n")
    assert [sandbox for sandbox, _ in scene.admitted] == ["sbx-a", "sbx-a"]
    assert scene.claims == []


@pytest.mark.parametrize("way", ["socks", "direct"])
def test_a_known_source_needs_no_token(way: Way) -> None:
    scene = Scene(way, source=HERE)
    scene.play(b"\x05\x01\x00" if way == "socks" else b"")
    assert [sandbox for sandbox, _ in scene.admitted] == ["sbx-a"]


def status(answer: bytes) -> bytes:
    return answer.split(b" ")[1]


def test_only_who_brings_nothing_and_is_unknown_is_asked() -> None:
    scene = Scene("explicit")
    [asked] = scene.play(HEAD + b"\r\n")
    assert status(asked) == b"407"
    assert b'\r\nproxy-authenticate: Basic realm="egressd"' in asked
    assert b"\r\nconnection: close\r\n" in asked
    assert scene.strays == [(NOBODY, "unknown_sandbox", "127.0.0.1")]
    assert scene.book.records[0].status == 407
    assert scene.admitted == []


WRONG = [
    pytest.param(authorized(token="x"), "bad_proxy_token", id="a wrong token"),
    pytest.param(authorized(user="sbx-x"), "bad_proxy_token", id="a wrong user"),
    pytest.param(authorized(user=TOKEN, token=""), "bad_proxy_token", id="a token as the user"),
    pytest.param(
        authorized("sbx-b", "t0ken-of-b"), "token_source_mismatch", id="CRED-16 a neighbour's token"
    ),
    pytest.param(HEAD + b"Proxy-Authorization: Bearer abc\r\n\r\n", "bad_proxy_token", id="another scheme"),
    pytest.param(
        authorized().replace(b"\r\n\r\n", b"\r\n") + authorized(head=b""), "bad_header", id="two tokens"
    ),
]


@pytest.mark.parametrize("source", [None, HERE], ids=["from nowhere known", "from a sandbox"])
@pytest.mark.parametrize(("said", "reason"), WRONG)
def test_wrong_credentials_are_refused_without_asking_again(
    said: bytes, reason: str, source: IPv4Address | None
) -> None:
    scene = Scene("explicit", source=source)
    [answer] = scene.play(said)
    assert status(answer) in (b"403", b"400")
    assert b"proxy-authenticate" not in answer
    assert scene.strays == [("sbx-a" if source else NOBODY, reason, "127.0.0.1")]
    assert scene.admitted == []
    seen = answer.decode() + repr(scene.book.records)
    assert "t0ken" not in seen
    assert "sbx-b" not in answer.decode()


def test_wrong_credentials_by_socks_are_refused_in_its_words() -> None:
    scene = Scene("socks")
    assert scene.play(b"\x05\x01\x02" + login(token="x") + REQUEST) == [b"\x05\x02\x01\x01"]
    assert scene.strays == [(NOBODY, "bad_proxy_token", "127.0.0.1")]


def test_guesses_are_limited_and_folded() -> None:
    scene = Scene("socks")
    told = scene.play(
        *[b"\x05\x01\x02" + login(token=f"x{n}") for n in range(GUESSES)], b"\x05\x01\x02" + login()
    )
    assert told == [b"\x05\x02\x01\x01"] * (GUESSES + 1)
    assert scene.admitted == []
    counted = [(record.reason, record.count) for record in scene.book.records]
    assert counted == [("bad_proxy_token", None), ("rate_limited", None), ("bad_proxy_token", GUESSES - 1)]


# what is no request


@pytest.mark.parametrize(
    ("way", "said", "answer", "reason"),
    [
        pytest.param("explicit", b"\x05\x01\x00", b"HTTP/1.1 403", "unknown_protocol", id="HTTP-22 SOCKS on the HTTP port"),
        pytest.param("explicit", b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 400", "bad_request", id="HTTP-03 origin form"),
        pytest.param("explicit", b"CONNECT a.test:443 HT", b"HTTP/1.1 408", "head_timeout", id="DOS-01 half a head"),
        pytest.param("explicit", HEAD + b"X: " + b"y" * 70_000, b"HTTP/1.1 431", "head_too_large", id="a long head"),
        pytest.param("explicit", header("192.0.2.9"), b"HTTP/1.1 403", "unknown_protocol", id="a PROXY header of no hop"),
        pytest.param("socks", b"GET / HTTP/1.1\r\n\r\n", b"", "unknown_protocol", id="HTTP on the SOCKS port"),
        pytest.param("socks", b"\x04\x01\x00\x50\x01\x02\x03\x04\0", b"\x00\x5b", "bad_request", id="SOCKS4"),
        pytest.param("socks", b"\x05\x01\x00", b"\x05\xff", "unknown_sandbox", id="a client that has no token"),
        pytest.param("socks", b"\x05\x01\x02\x01\x05", b"\x05\x02", "head_timeout", id="half a login"),
        pytest.param("direct", b"\x16\x03\x01", b"", "unknown_sandbox", id="our own address, from nobody"),
    ],
)  # fmt: skip
def test_what_is_nobody_s_is_refused_and_written_down_once(
    way: Way, said: bytes, answer: bytes, reason: str
) -> None:
    scene = Scene(way)
    [told] = scene.play(said)
    assert told.startswith(answer)
    assert scene.strays == [(NOBODY, reason, "127.0.0.1")]
    assert scene.admitted == []
    assert scene.book.records[0].layer == "connection"


def test_what_a_known_source_says_badly_is_its_sandbox_s_to_refuse() -> None:
    scene = Scene("explicit", source=HERE)
    scene.play(b"GET / HTTP/1.1\r\n\r\n")
    [(sandbox, entrance)] = scene.admitted
    assert (sandbox, entrance.data) == ("sbx-a", b"GET / HTTP/1.1\r\n\r\n")


# hops


def test_a_listed_hop_says_where_a_connection_comes_from() -> None:
    scene = Scene("explicit", hops=("127.0.0.0/8",))
    scene.play(header("172.30.0.3", tlvs=b"\x03\x00\x04abcd") + authorized())
    assert scene.claims == [("sbx-a", "172.30.0.3")]
    [(_, entrance)] = scene.admitted
    assert (str(entrance.source), entrance.data) == ("172.30.0.3", authorized())


@pytest.mark.parametrize(
    ("said", "detail"),
    [
        pytest.param(authorized(), "no PROXY protocol header", id="a hop that says nothing"),
        pytest.param(b"PROXY TCP4 172.30.0.3 172.30.0.2 1 2\r\n", "no PROXY protocol header", id="version 1"),
        pytest.param(header("172.30.0.3")[:20], "no PROXY protocol header in time", id="half a header"),
        pytest.param(b"", "no PROXY protocol header in time", id="silence"),
    ],
)
def test_a_listed_hop_must_say_it(said: bytes, detail: str) -> None:
    scene = Scene("explicit", hops=("127.0.0.0/8",), source=HERE)
    assert scene.play(said) == [b""]
    assert [(r.reason, r.detail, r.source) for r in scene.book.records] == [("bad_hop", detail, None)]
    assert scene.admitted == []


def test_a_health_check_of_a_hop_is_the_hop_s_own() -> None:
    scene = Scene("direct", hops=("127.0.0.1/32",))
    scene.play(b"\r\n\r\n\0\r\nQUIT\n\x20\x00\x00\x00")
    assert scene.strays == [(NOBODY, "unknown_sandbox", "127.0.0.1")]


def test_an_unlisted_peer_is_not_believed() -> None:
    scene = Scene("explicit", hops=("10.0.0.0/8",))
    [told] = scene.play(header("172.30.0.4") + authorized("sbx-b", "t0ken-of-b"))
    assert status(told) == b"403"
    assert scene.strays == [(NOBODY, "unknown_protocol", "127.0.0.1")]


# what fails


@pytest.mark.parametrize(
    ("kept", "reason"),
    [
        pytest.param(False, "token_source_mismatch", id="another has the source"),
        pytest.param(TimeoutError(), "audit_unavailable", id="control does not answer"),
        pytest.param(RuntimeError("x"), "audit_unavailable", id="an exception"),
    ],
)
def test_a_source_that_control_did_not_keep_lets_nobody_in(kept: bool | Exception, reason: str) -> None:
    scene = Scene("explicit", kept=kept)
    scene.play(authorized())
    assert scene.strays == [(NOBODY, reason, "127.0.0.1")]
    assert scene.admitted == []
    assert scene.register.owner(HERE) is None


def test_a_judgement_that_raises_refuses(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    for way, said in (("explicit", authorized()), ("direct", b"")):
        scene = Scene(way)  # type: ignore[arg-type]  # one of its values
        monkeypatch.setattr(scene.register, "judge", broken)
        scene.play(said)
        assert scene.strays == [(NOBODY, "internal_error", "127.0.0.1")]
        assert scene.admitted == []


def test_a_neighbour_cannot_fill_the_lobby(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lobbies, "GUESTS_OF_ONE", 0)
    scene = Scene("explicit")
    scene.play(authorized())
    assert scene.strays == [(NOBODY, "too_many_connections", "127.0.0.1")]


def test_who_is_in_when_it_closes_is_written_down() -> None:
    async def act(lobby: Lobby) -> None:
        async with asyncio.timeout(5):
            while not lobby._guests:  # noqa: ASYNC110 -- plain state, nothing sets an event
                await asyncio.sleep(0)
        await lobby.close()

    scene = Scene("explicit")
    scene.play(b"CONNECT a", act=act)
    assert scene.strays == [(NOBODY, "shutdown", "127.0.0.1")]


def test_nobody_is_left_in_the_lobby() -> None:
    seen: list[int] = []

    async def act(lobby: Lobby) -> None:
        seen.append(lobby._guests.total())

    Scene("explicit").play(authorized(), b"\x05", HEAD + b"\r\n", act=act)
    assert seen[-1] <= 1


def test_every_prefix_of_good_credentials_lets_nobody_in() -> None:
    whole = authorized()
    scene = Scene("explicit", settings=Settings(head_timeout=0.01, first_bytes_timeout=0.1))
    scene.play(*[whole[:end] for end in range(0, len(whole), 7)])
    assert scene.admitted == []
    assert sum(record.count or 1 for record in scene.book.records) == len(range(0, len(whole), 7))


def test_a_redirected_connection_is_its_source_s_or_nobody_s() -> None:
    known = Scene("transparent", source=HERE)
    known.play(b"anything")
    assert [(name, entrance.way, entrance.source) for name, entrance in known.admitted] == [
        ("sbx-a", "transparent", HERE)
    ]
    stranger = Scene("transparent")
    assert stranger.play(b"anything") == [b""]
    assert stranger.admitted == []
    assert [(r.sandbox, r.reason, r.channel, r.source) for r in stranger.book.records] == [
        (NOBODY, "unknown_sandbox", "transparent", str(HERE))
    ]
