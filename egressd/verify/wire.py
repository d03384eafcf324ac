"""Bytes on a network, as the probes send them: TCP, TLS, UDP, ICMP, DNS; errors are values."""

from __future__ import annotations

import re
import socket
import ssl
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from egressd.verify.probe import word
from egressd.verify.scene import Scene

PROXY = ("127.0.0.1", 3128)
SECONDS = 2.0
_SENT = "sent, and not refused"
_READ = 8192
_PROXIED_SECONDS = 1.0
_CONNECT_SECONDS = 0.7
"""egressd listens on this very machine; a connection that takes longer is going somewhere else, or nowhere."""
_ALERT = 0x15
"""The first byte of a TLS alert, which is all that egressd says where it cannot say more (RFC 8446, 5.1)."""

_REFUSAL = re.compile(rb"egressd: |x-egressd-reason:", re.IGNORECASE)


class Way:
    """How this network leads to egressd.

    `proxy` is its own proxy, with what it wants as `Proxy-Authorization`; None where there is none. `own_answers` are what the
    addresses that egressd's DNS gives begin with. In a `quiet` network what is refused may be told by nobody: there the capture
    outside alone shows what left.
    """

    def __init__(self) -> None:
        self.proxy: tuple[str, int, str] | None = (*PROXY, "")
        self.own_answers: tuple[str, ...] = ("198.18.", "198.19.")
        self.quiet = False

    def lead(self, scene: Scene) -> None:
        """Take it from the scene."""
        self.proxy, self.own_answers, self.quiet = scene.proxy, scene.own_answers, scene.quiet


WAY = Way()


class Talk(NamedTuple):
    """One try to talk: `local` is our end's address ("" when there was no connection), `error` why it ended early."""

    local: str
    received: bytes
    error: str


def family_of(address: str) -> socket.AddressFamily:
    """The address family of a literal address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def tcp(address: str, port: int, data: bytes, seconds: float = SECONDS) -> Talk:
    """Connect to a literal address, say `data`, read what comes until the end, silence or enough."""
    with socket.socket(family_of(address), socket.SOCK_STREAM) as sock:
        sock.settimeout(min(seconds, _CONNECT_SECONDS))
        try:
            sock.connect((address, port))
        except OSError as error:
            return Talk("", b"", word(error))
        sock.settimeout(seconds)
        return _converse(sock, plain_address(sock.getsockname()[0]), data)


def tls(
    address: str, port: int, name: str | None, data: bytes, *, first: bytes = b"", seconds: float = SECONDS
) -> Talk:
    """Speak TLS for `name`, verified by nobody, and say `data` in it; `first` is said before, to a proxy that answers 200."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    local = ""
    try:
        with socket.socket(family_of(address), socket.SOCK_STREAM) as raw:
            raw.settimeout(min(seconds, _CONNECT_SECONDS))
            raw.connect((address, port))
            raw.settimeout(seconds)
            local = plain_address(raw.getsockname()[0])
            if first:
                raw.sendall(first)
                answer = raw.recv(_READ)
                if not is_established(answer):
                    return Talk(local, answer, "")
            with context.wrap_socket(raw, server_hostname=name, suppress_ragged_eofs=True) as sock:
                return _converse(sock, local, data)
    except OSError as error:  # an alert is one too
        return Talk(local, b"", word(error))


def connect(host: str, port: int) -> bytes:
    """A CONNECT request for a host as it is to be spelled."""
    return f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n{_identity()}\r\n".encode("latin-1")


def _identity() -> str:
    """Who we are to egressd's own proxy, as a field of a request."""
    return f"Proxy-Authorization: {WAY.proxy[2]}\r\n" if WAY.proxy is not None and WAY.proxy[2] else ""


def get_by_proxy(host: str, url: str, seconds: float = SECONDS) -> Talk:
    """Ask egressd's own proxy for an absolute target."""
    if WAY.proxy is None:
        return Talk("", b"", "no proxy")
    return tcp(*WAY.proxy[:2], request(host, url, more=_identity()), seconds)


def tls_by_proxy(host: str, port: int, name: str | None, data: bytes, seconds: float = SECONDS) -> Talk:
    """Speak TLS for `name` in a CONNECT to a host."""
    if WAY.proxy is None:
        return Talk("", b"", "no proxy")
    return tls(*WAY.proxy[:2], name, data, first=connect(host, port), seconds=seconds)


def is_established(answer: bytes) -> bool:
    """Whether a proxy said yes to a CONNECT; egressd also does in order to say in TLS why not."""
    return b" 200" in answer.split(b"\r\n")[0]


def by_proxy(host: str, port: int, data: bytes) -> Iterator[Talk]:
    """Ask egressd's own proxy for a host: by a GET of an absolute target, then `data` in a CONNECT, in clear and by TLS."""
    if WAY.proxy is None:
        return
    yield get_by_proxy(host, f"http://{host}:{port}/", _PROXIED_SECONDS)
    clear = tcp(*WAY.proxy[:2], connect(host, port) + data, _PROXIED_SECONDS)
    head, _, rest = clear.received.partition(b"\r\n\r\n")
    yield clear._replace(received=rest) if is_established(head) else clear
    yield tls_by_proxy(host, port, None, data, _PROXIED_SECONDS)


def _converse(sock: socket.socket, local: str, data: bytes) -> Talk:
    received = b""
    try:
        sock.sendall(data)
        while len(received) < _READ:
            part = sock.recv(_READ)
            if not part:
                return Talk(local, received, "")
            received += part
    except OSError as error:
        return Talk(local, received, word(error))
    return Talk(local, received, "")


def got_through(talk: Talk, own_ends: Sequence[str]) -> str | None:
    """What got through in a try that should have been refused, or None.

    `own_ends` are the addresses that our end has where the network holds nothing but egressd. From any other the
    packets went elsewhere, whatever came back; and whatever came back that is no refusal came from somebody else.
    """
    if not talk.local:
        return None
    if talk.local not in own_ends:
        return f"connected from {talk.local}"
    if is_refusal(talk.received):
        return None
    return f"an answer of {len(talk.received)} bytes that is not egressd's"


def is_refusal(received: bytes) -> bool:
    """Whether this is what egressd says when it refuses: nothing, an alert, or its own words."""
    if not received or received[0] == _ALERT:
        return True
    return bool(_REFUSAL.search(received))


def plain_address(text: str) -> str:
    """An address without zone, a mapped one as the IPv4 address that it is."""
    bare = text.partition("%")[0]
    return bare[7:] if bare.startswith("::ffff:") and "." in bare else bare


def udp(address: str, port: int, data: bytes, seconds: float = 0.3) -> str | None:
    """Send one datagram: None when the packet filter stopped it, else what became of it.

    A refusal by the firewall is EPERM at once, EACCES behind an administrative prohibition. A refused port or silence
    mean that the packet went on its way.
    """
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as sock:
        sock.settimeout(seconds)
        try:
            sock.connect((address, port))
            sock.send(data)
            answer = sock.recv(_READ)
        except socket.timeout:  # noqa: UP041 - before Python 3.10 it was no TimeoutError
            return unanswered()
        except ConnectionRefusedError:
            return "sent as far as a closed port"
        except OSError:
            return None
    return f"answered with {len(answer)} bytes"


def unanswered() -> str | None:
    """What it means that something was sent and nobody said anything."""
    return None if WAY.quiet else _SENT


class DnsAnswer(NamedTuple):
    """What a resolver said: `rcode` -1 where there was no answer, which `error` explains; `records` are (type, data)."""

    rcode: int
    records: tuple[tuple[int, bytes], ...]
    error: str

    @property
    def addresses(self) -> list[str]:
        """The A and AAAA records."""
        families = {1: socket.AF_INET, 28: socket.AF_INET6}
        return [
            socket.inet_ntop(families[kind], data)
            for kind, data in self.records
            if (kind, len(data)) in {(1, 4), (28, 16)}
        ]


def question(name: str, kind: int) -> bytes:
    """A query with one question (RFC 1035, section 4)."""
    labels = [label.encode("ascii", "replace") for label in name.rstrip(".").split(".")]
    wire = b"".join(bytes((len(label),)) + label for label in labels) + b"\0"
    return struct.pack("!6H", 0x5645, 0x0100, 1, 0, 0, 0) + wire + struct.pack("!HH", kind, 1)


def dns(
    server: str, name: str, kind: int = 1, *, over: str = "udp", port: int = 53, seconds: float = SECONDS
) -> DnsAnswer:
    """Ask one question (RFC 1035, section 4); `kind` is the record type's number."""
    if not server:
        return DnsAnswer(-1, (), "no resolver")
    query = question(name, kind)
    kinds = {"udp": socket.SOCK_DGRAM, "tcp": socket.SOCK_STREAM}
    try:
        with socket.socket(family_of(server), kinds[over]) as sock:
            sock.settimeout(seconds)
            sock.connect((server, port))
            if over == "udp":
                sock.send(query)
                return parse_dns(sock.recv(_READ))
            sock.sendall(struct.pack("!H", len(query)) + query)
            answer = b""
            while len(answer) < 2 or len(answer) < 2 + int.from_bytes(answer[:2], "big"):
                part = sock.recv(_READ)
                if not part:
                    break
                answer += part
            return parse_dns(answer[2:])
    except OSError as error:
        return DnsAnswer(-1, (), word(error))


def parse_dns(message: bytes) -> DnsAnswer:
    """Read the answer section; total."""
    try:
        flags, questions, answers = struct.unpack_from("!HHH", message, 2)
        at = 12
        for _ in range(questions):
            at = _skip_name(message, at) + 4
        records = []
        for _ in range(answers):
            at = _skip_name(message, at)
            kind, _, _, size = struct.unpack_from("!HHIH", message, at)
            at += 10
            records.append((kind, message[at : at + size]))
            at += size
    except (struct.error, IndexError):
        return DnsAnswer(-1, (), "no DNS message")
    return DnsAnswer(flags & 15, tuple(records), "")


def _skip_name(message: bytes, at: int) -> int:
    while message[at]:
        if message[at] >= 0xC0:
            return at + 2
        at += message[at] + 1
    return at + 1


def checksum(data: bytes) -> int:
    """The Internet checksum (RFC 1071)."""
    padded = data + b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def echo(address: str, data: bytes, kind: int, seconds: float = 0.5) -> str | None:
    """Send an ICMP echo request by a socket of `kind` (SOCK_DGRAM or SOCK_RAW): None when it was refused.

    Raises OSError when no such socket can be had.
    """
    six = family_of(address) == socket.AF_INET6
    protocol = socket.IPPROTO_ICMPV6 if six else socket.IPPROTO_ICMP
    with socket.socket(family_of(address), kind, protocol) as sock:
        sock.settimeout(seconds)
        header = struct.pack("!BBHHH", 128 if six else 8, 0, 0, 0x5645, 1)
        if not six:
            header = header[:2] + struct.pack("!H", checksum(header + data)) + header[4:]
        try:
            sock.connect((address, 0))
            sock.send(header + data)
            answer = sock.recv(_READ)
        except socket.timeout:  # noqa: UP041 - before Python 3.10 it was no TimeoutError
            return unanswered()
        except OSError:
            return None
    return f"answered with {len(answer)} bytes"


def request(host: str, path: str = "/", method: str = "GET", more: str = "") -> bytes:
    """A whole request without a body."""
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{more}Connection: close\r\n\r\n".encode("latin-1")
