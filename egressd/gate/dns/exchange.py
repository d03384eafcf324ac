"""One question to one configured server over our own sockets.

The query is built fresh from (name, type, IN): own id, own source port, own spelling (0x20), own OPT
record. The reply must come from the asked address and repeat the id and the question letter for letter. The
sockets are connected, so that the kernel drops strangers' datagrams and says at once when nobody listens.
Over TLS (see `lines`) questions share a connection, which gives them ids, and are padded to one size.
dnspython makes and reads the messages; what it raises on hostile bytes is no closed set and never leaves
this module.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket

import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rdatatype

from egressd.gate.dns.lines import Lines, ReplyError, connect, open_socket, sockaddr
from egressd.gate.dns.servers import Upstream

PAYLOAD = 1232
"""The UDP size that we advertise: fits the smallest IPv6 MTU (DNS flag day 2020)."""

PADDED = 128
"""Encrypted queries are padded to a multiple of so many bytes, that their sizes tell less (RFC 8467 §4.1)."""

_LETTER = re.compile(rb"[A-Za-z]")


async def exchange(
    server: Upstream, name: dns.name.Name, kind: dns.rdatatype.RdataType, lines: Lines | None = None
) -> dns.message.Message:
    """Ask one server once, by TCP where UDP cannot carry the reply; raises OSError or ReplyError.

    `lines` are the server's own where its transport is encrypted, None where it is not.
    """
    if lines is not None:
        return await _ask_line(lines, name, kind)
    if server.transport not in ("udp", "tcp"):
        raise ReplyError("an encrypted transport without its lines")  # never in clear (DNS-28)
    query = _query(name, kind, secrets.randbelow(1 << 16))
    if server.transport == "udp":
        reply = await _ask_udp(server, query)
        if reply is not None:
            return reply
    return await _ask_tcp(server, query)


def _query(
    name: dns.name.Name, kind: dns.rdatatype.RdataType, number: int, pad: int = 0
) -> dns.message.Message:
    return dns.message.make_query(_mixed_case(name), kind, use_edns=0, payload=PAYLOAD, id=number, pad=pad)


async def _ask_line(lines: Lines, name: dns.name.Name, kind: dns.rdatatype.RdataType) -> dns.message.Message:
    query = _query(name, kind, 0, PADDED)  # id 0: RFC 8484 §4.1 for caches; other lines give their own
    answer = await lines.ask(query.to_wire())
    reply = _checked(answer.wire, query)
    for held in reply.answer if answer.age else ():
        held.ttl = max(0, held.ttl - answer.age)  # RFC 8484 §5.1
    return reply


async def _ask_udp(server: Upstream, query: dns.message.Message) -> dns.message.Message | None:
    """Return the reply to our query, None when TCP is needed; what is no reply to it is not seen (DNS-11)."""
    loop = asyncio.get_running_loop()
    with open_socket(server, socket.SOCK_DGRAM) as sock:
        sock.connect(sockaddr(server))  # a fresh source port each time
        await loop.sock_sendall(sock, query.to_wire())
        while True:
            data = await loop.sock_recv(sock, 0xFFFF)
            if _says_cut(data, query):
                return None
            head = _head(data, query)
            if head is None:
                continue
            # Who changes our spelling may be guessing at the question: over TCP nobody guesses.
            if head.flags & dns.flags.TC or head.question[0].name.labels != query.question[0].name.labels:
                return None
            return _whole(data)


async def _ask_tcp(server: Upstream, query: dns.message.Message) -> dns.message.Message:
    with await connect(server) as sock:
        message = query.to_wire()
        await asyncio.get_running_loop().sock_sendall(sock, len(message).to_bytes(2) + message)
        data = await _receive(sock, int.from_bytes(await _receive(sock, 2)))
    return _checked(data, query)


async def _receive(sock: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = await asyncio.get_running_loop().sock_recv(sock, length - len(data))
        if not more:
            raise ReplyError("the reply was cut off")
        data += more
    return data


def _says_cut(data: bytes, query: dns.message.Message) -> bool:
    """Whether a datagram says no more than that the reply is cut, not even to what: a forged one only makes us use TCP."""
    if len(data) < 6:
        return False
    flags = dns.flags.Flag(int.from_bytes(data[2:4]))
    cut = bool(flags & dns.flags.QR and flags & dns.flags.TC)
    return cut and int.from_bytes(data[:2]) == query.id and int.from_bytes(data[4:6]) == 0


def _head(data: bytes, query: dns.message.Message) -> dns.message.Message | None:
    """Return header and question of a reply to `query`, None for anything else."""
    try:
        head = dns.message.from_wire(data, question_only=True, ignore_trailing=True)
    except Exception:  # noqa: BLE001 no closed set, and all of it means: not our reply
        return None
    answers = head.flags & dns.flags.QR and head.opcode() == dns.opcode.QUERY
    return head if answers and head.id == query.id and head.question == query.question else None


def _checked(data: bytes, query: dns.message.Message) -> dns.message.Message:
    """Return the reply that a stream brought; one that is none to `query`, or cut, raises ReplyError."""
    head = _head(data, query)
    if head is None or head.flags & dns.flags.TC:
        raise ReplyError("a reply to another question")
    return _whole(data)


def _whole(data: bytes) -> dns.message.Message:
    try:
        return dns.message.from_wire(data)
    except Exception as error:  # noqa: BLE001 as above, but it answers our question: the server is broken
        raise ReplyError(f"a malformed reply ({type(error).__name__})") from None


def _mixed_case(name: dns.name.Name) -> dns.name.Name:
    """Return the name in a random spelling, which a reply must repeat (draft-vixie-dnsext-dns0x20)."""
    return dns.name.Name(_LETTER.sub(_either_case, label) for label in name.labels)


def _either_case(letter: re.Match[bytes]) -> bytes:
    return letter[0].swapcase() if secrets.randbits(1) else letter[0]
