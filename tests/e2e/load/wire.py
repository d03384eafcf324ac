"""Connections, counted before they are opened, and what is said on them."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .books import Load

RESOLVER = "198.18.0.1", 53
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset
PATIENCE = 25.0
"""Seconds for anything that must come: long enough for a killed worker to be replaced on a busy machine."""
UNANSWERED = (OSError, EOFError, ssl.SSLError, ValueError)
"""How an attempt ends that is refused, cut, or met a dying worker: all of it is expected here."""


@contextmanager
def connected(load: Load, address: str, port: int, timeout: float = PATIENCE) -> Iterator[socket.socket]:
    """A counted connection."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as sock:
        sock.settimeout(timeout)
        load.count("connections")
        sock.connect((address, port))
        yield sock


@contextmanager
def secured(
    load: Load, name: str, *, sni: str | None = None, alpn: tuple[str, ...] = ()
) -> Iterator[ssl.SSLSocket]:
    """A counted connection to a name, with TLS."""
    with connected(load, address_of(load, name), 443) as sock, tls(load, sock, sni or name, alpn) as stream:
        yield stream


def tls(load: Load, sock: socket.socket, name: str, alpn: tuple[str, ...] = ()) -> ssl.SSLSocket:
    context = load.trusting
    if alpn:
        context = ssl.create_default_context()
        context.set_alpn_protocols(list(alpn))
    return context.wrap_socket(sock, server_hostname=name)


def reset(sock: socket.socket) -> None:
    """Have the closing send a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def hello(name: str) -> bytes:
    """The bytes of a ClientHello."""
    out = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), out, server_hostname=name).do_handshake()
    return out.read()


class Reader:
    """What a connection answers."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._held = b""

    def line(self) -> bytes:
        while b"\n" not in self._held:
            self._more()
        line, _, self._held = self._held.partition(b"\n")
        return line.rstrip(b"\r")

    def exactly(self, size: int) -> bytes:
        while len(self._held) < size:
            self._more()
        data, self._held = self._held[:size], self._held[size:]
        return data

    def _more(self) -> None:
        data = self._sock.recv(65536)
        if not data:
            raise EOFError
        self._held += data

    def answer(self, load: Load, number: int, *, pause: float = 0.0) -> int:
        """Read a response whole, note its status, and return it. `pause`: before each piece of its body."""
        status = int(self.line().split()[1])
        load.requests[number][1] = status
        fields = {}
        while line := self.line():
            name, _, value = line.partition(b":")
            fields[name.lower()] = value.strip().lower()
        left = int(fields.get(b"content-length", b"0"))
        while left:
            time.sleep(pause)
            left -= len(self.exactly(min(left, 16384)))
        if fields.get(b"connection") == b"close":
            raise EOFError
        return status


def head(
    number: int, host: str, method: str = "GET", path: str = "/", *fields: str, end: str = "\r\n"
) -> bytes:
    """A request's head, whose path or query names its number."""
    mark = (
        f"{path}{'&' if '?' in path else '?'}id{number}=1"
        if "?" in path or method == "POST"
        else f"{path}id{number}"
    )
    return "\r\n".join([f"{method} {mark} HTTP/1.1", f"host: {host}", *fields, end]).encode()


def get(
    load: Load, kind: str, sock: socket.socket, reader: Reader, host: str, *rest: str, pause: float = 0.0
) -> int:
    """Make one request and read its answer."""
    number = load.serial(kind)
    sock.sendall(head(number, host, *rest))
    return reader.answer(load, number, pause=pause)


def question(name: str, kind: int = 1, ident: int = 1) -> bytes:
    """A DNS query (RFC 1035 section 4.1)."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack("!6H", ident, 0x100, 1, 0, 0, 0) + labels + struct.pack("!xHH", kind, 1)


def ask(
    load: Load, name: str, kind: int = 1, server: tuple[str, int] = RESOLVER, message: bytes | None = None
) -> bytes:
    """Send one datagram to a resolver and return the answer; a short wait, since nobody sends it again."""
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(1.0)
        load.count("dns_udp")
        sock.sendto(question(name, kind) if message is None else message, server)
        return sock.recv(4096)


def address_of(load: Load, name: str) -> str:
    """Return the address of a name; it is asked for once."""
    while name not in load.addresses:
        with suppress(*UNANSWERED):
            load.addresses[name] = socket.inet_ntoa(ask(load, name)[-4:])
    return load.addresses[name]
