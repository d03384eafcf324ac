"""The ClientHello parser in any pieces, beside OpenSSL's: who reads a server name from it reads the same one."""

from __future__ import annotations

import ssl
import sys

from egressd.gate.tls.hello import BadHello, ClientHello, HelloReader, NeedMore, looks_like_tls, parse_hello
from tests.fuzz.target import JUNK, Target, offsets_of, pieces_of


def check(data: bytes) -> None:
    """Hold every law of hellos."""
    outcome = parse_hello(data)
    for pieces in pieces_of(data):
        assert _in_pieces(pieces) == outcome, "the hello depends on how it was cut"
    tls = looks_like_tls(data)
    if isinstance(outcome, ClientHello):
        assert tls
        assert 0 < outcome.size <= len(data)
        for at in offsets_of(data, outcome.size):
            assert isinstance(parse_hello(data[:at]), NeedMore), "a hello that is not all there"
        for junk in JUNK:
            assert parse_hello(data[: outcome.size] + junk) == outcome, "what lies behind a hello changes it"
    elif isinstance(outcome, BadHello):
        for junk in JUNK:
            assert parse_hello(data + junk) == outcome, "more bytes mend a bad hello"
        if outcome.detail in ("not_tls", "sslv2"):
            assert tls is (outcome.detail == "sslv2")
    _agree_with_openssl(data, outcome)


def _agree_with_openssl(data: bytes, outcome: object) -> None:
    for name in _openssl_reads(data):
        if isinstance(outcome, BadHello):
            continue
        assert isinstance(outcome, ClientHello), "OpenSSL has read a hello and we wait for more"
        ours = None if outcome.sni is None else outcome.sni.decode("ascii", "backslashreplace")
        assert ours == name, "OpenSSL serves another name"


def _openssl_reads(data: bytes) -> list[str | None]:
    """Return the server name (None where there is none) that OpenSSL's server acts on; empty where it does not get so far."""
    _NAMES.clear()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    incoming.write(data)
    # A name outside ASCII never gets to the callback: Python tells the hook, which would print, and ends the handshake.
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        _SERVER.wrap_bio(incoming, outgoing, server_side=True).do_handshake()
    except (ssl.SSLError, ValueError):
        pass
    finally:
        sys.unraisablehook = hook
    return list(_NAMES)


def _note(_: ssl.SSLObject, name: str | None, __: ssl.SSLContext) -> int:
    _NAMES.append(name)
    return ssl.ALERT_DESCRIPTION_HANDSHAKE_FAILURE


def _server() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.sni_callback = _note
    return context


_NAMES: list[str | None] = []
_SERVER = _server()


def _in_pieces(pieces: list[bytes]) -> object:
    reader, buffer = HelloReader(), bytearray()
    outcome: object = reader.read(buffer)
    for piece in pieces:
        buffer += piece
        outcome = reader.read(buffer)
    return outcome


def hello_of(name: bytes | None, *, new: bool = True) -> bytes:
    """Return a hello as clients send it, in one record; made here, so that it is the same in every run."""
    extensions = [
        _extension(0, _vector(2, b"\0" + _vector(2, name))) if name else b"",
        _extension(10, b"\0\x02\0\x1d"),
        _extension(11, b"\x01\0"),
        _extension(13, b"\0\x04\x04\x03\x08\x04"),
        _extension(16, _vector(2, b"\x02h2\x08http/1.1")),
        _extension(23, b""),
    ]
    if new:
        extensions += [
            _extension(43, b"\x02\x03\x04"),
            _extension(51, _vector(2, b"\0\x1d" + _vector(2, b"K" * 32))),
        ]
    suites = b"\x13\x01\xc0\x2f\xc0\x2b"
    body = b"\x03\x03" + b"R" * 32 + _vector(1, b"S" * 32) + _vector(2, suites) + b"\x01\0"
    return b"\x16\x03\x01" + _vector(2, b"\x01" + _vector(3, body + _vector(2, b"".join(extensions))))


def _vector(prefix: int, data: bytes) -> bytes:
    return len(data).to_bytes(prefix) + data


def _extension(kind: int, data: bytes) -> bytes:
    return kind.to_bytes(2) + _vector(2, data)


def _in_records(hello: bytes, size: int) -> bytes:
    message = hello[5:]
    return b"".join(
        hello[:3] + len(part).to_bytes(2) + part
        for part in (message[at : at + size] for at in range(0, len(message), size))
    )


_OLD = hello_of(b"api.example.com", new=False)
_NEW = hello_of(b"api.example.com")
TARGET = Target(
    "hellos",
    check,
    parse_hello,
    seeds=(
        _OLD,
        _NEW,
        hello_of(None),
        _in_records(_OLD, 40),
        _in_records(_OLD, 1)[:300],
        b"\x80\x2e\x01\x00\x02",
        b"GET /",
    ),
    words=(
        b"\x16\x03\x01",
        b"\0\0",
        b"\0\x10",
        b"\0\x2b",
        b"\xfe\x0d",
        b"\0\x29",
        b"\0\x2a",
        b"api.example.com",
        b"evil.test",
        b"\0\0\0\x0e\0\x0c\0\0\x09evil.test",
        b"\x02h2",
        b"\x03\x03",
        b"\x03\x04",
        b"\0\x01",
        b"\xff\xff",
        b"\x15\x03\x01\0\x02\x01\0",
    ),
    most=2048,
    quick=1500,
)
