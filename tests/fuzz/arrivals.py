"""Which protocol a connection speaks, in any pieces."""

from __future__ import annotations

from egressd.gate.door.arrival import Http, Recogniser, Tls, Unreadable
from egressd.gate.tls.hello import ClientHello, parse_hello
from tests.fuzz.hellos import TARGET as HELLOS
from tests.fuzz.proxy_heads import TARGET as HEADS
from tests.fuzz.target import JUNK, Target, offsets_of, pieces_of


def check(data: bytes) -> None:
    """Hold every law of arrivals."""
    outcome = _verdict(_read([data]))
    for pieces in pieces_of(data):
        assert _verdict(_read(pieces)) == outcome, "the protocol depends on how it was cut"
    whole = Recogniser().read(data)
    if isinstance(whole, Tls):
        assert isinstance(parse_hello(data), ClientHello)
        for at in offsets_of(data, whole.hello.size):
            assert Recogniser().read(data[:at]) is None, "a hello that is not all there"
    if whole is not None:
        assert whole.data == data
        for junk in JUNK:
            assert _verdict(_read([data + junk])) == outcome, "what comes later changes the protocol"


def _read(pieces: list[bytes]) -> object:
    recogniser = Recogniser()
    for piece in pieces:
        outcome = recogniser.read(piece)
        if outcome is not None:
            return outcome
    return None


def _verdict(outcome: object) -> object:
    match outcome:
        case Tls():
            return outcome.hello
        case Unreadable():
            return outcome.reason
        case Http():
            return Http
    return None


TARGET = Target(
    "arrivals",
    check,
    lambda data: Recogniser().read(data),
    seeds=(
        *HELLOS.seeds,
        *HEADS.seeds,
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\n",
        b"EHLO x\r\n",
        b"GET " + b"a" * 390,
        b"\0\0\0\x08\x04\xd2\x16\x2f",
    ),
    words=(*HELLOS.words, *HEADS.words),
    most=900,
)
