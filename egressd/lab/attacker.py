"""The attacker's host: takes every TCP connection and datagram on every port of his addresses and writes
it down.

TPROXY gives one listener all ports (see topology.world_ruleset); the socket's own name is then where
the client meant to go. Whatever it speaks, TLS, HTTP, DNS or nothing known, it gets an answer: an
attack that gets through must be seen to succeed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct

import dns.exception
import dns.message
import dns.rdatatype
import dns.rrset

from egressd.lab import topology
from egressd.lab.pki import Authority
from egressd.lab.sightings import Flow, Hit

_IPV6_RECVORIGDSTADDR = 74  # linux/in6.h
_IPV6_TRANSPARENT = 75
_IP_TRANSPARENT = 19  # linux/in.h
_IP_RECVORIGDSTADDR = 20
_KEPT = 4096
_MOST_HITS = 100_000
_ANSWER = b"owned\n"
_TLS_HANDSHAKE = 0x16
_ECHO_REQUESTS = {"icmp": 8, "icmp6": 128}


class Attacker:
    """Listens everywhere at once; `hits` is what reached him."""

    def __init__(self, authority: Authority) -> None:
        self.hits: list[Hit] = []
        self._context = authority.listening_context()
        self._sni = authority.sni
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self) -> None:
        """Opens the listeners in the current network namespace; needs CAP_NET_ADMIN and a running loop."""
        loop = asyncio.get_running_loop()
        for family in (socket.AF_INET, socket.AF_INET6):
            self._keep(loop.create_task(self._accept(_transparent(family, socket.SOCK_STREAM))))
            datagrams = _transparent(family, socket.SOCK_DGRAM)
            loop.add_reader(datagrams, self._receive, datagrams)

    def see_packet(self, flow: Flow, packet: bytes) -> None:
        """Takes note of a captured ICMP echo request to one of his addresses (the kernel answers those)."""
        if flow.address in topology.ATTACKERS and flow.port == _ECHO_REQUESTS.get(flow.protocol):
            header = 40 if flow.protocol == "icmp6" else (packet[0] & 15) * 4
            data = packet[header + 8 :].decode("latin-1")
            self._remember(Hit(flow.protocol, flow.address, flow.port, flow.source, data))

    def _remember(self, hit: Hit) -> None:
        if len(self.hits) < _MOST_HITS:
            self.hits.append(hit)

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, peer = await loop.sock_accept(listener)
            connection.setblocking(False)
            self._keep(loop.create_task(self._serve(connection, peer)))

    async def _serve(self, connection: socket.socket, peer: tuple[str, int]) -> None:
        address, port = connection.getsockname()[:2]
        hit = Hit("tcp", address, port, f"{peer[0]}:{peer[1]}")
        self._remember(hit)
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        context = self._context if await _speaks_tls(connection) else None
        writer: asyncio.StreamWriter | None = None
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: asyncio.StreamReaderProtocol(reader), connection, ssl=context
            )
            writer = asyncio.StreamWriter(transport, transport.get_protocol(), reader, loop)
            if (tls := writer.get_extra_info("ssl_object")) is not None:
                hit.sni = self._sni.get(tls)
            await _converse(reader, writer, hit)
        except (OSError, TimeoutError):
            pass  # the client is gone, or did not like the certificate: the hit stands
        finally:
            if writer is None:
                connection.close()
            else:
                writer.close()

    def _receive(self, listener: socket.socket) -> None:
        while True:
            try:
                data, ancillary, _, peer = listener.recvmsg(65535, 256)
            except BlockingIOError:
                return
            address, port = _destination(ancillary)
            hit = Hit("udp", address, port, f"{peer[0]}:{peer[1]}", data[:_KEPT].decode("latin-1"))
            self._remember(hit)
            _reply_from(address, port, peer, _dns_answer(data) if port == 53 else _ANSWER + data[:512])


async def _speaks_tls(connection: socket.socket) -> bool:
    """Whether the first byte is a TLS handshake's; a client that says nothing within half a second speaks
    none.
    """
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(connection, readable.set)
    try:
        async with asyncio.timeout(0.5):
            await readable.wait()
        return connection.recv(1, socket.MSG_PEEK) == bytes([_TLS_HANDSHAKE])
    except (TimeoutError, OSError):
        return False
    finally:
        loop.remove_reader(connection)


async def _converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hit: Hit) -> None:
    """Answers each thing said, in HTTP or DNS where that is what it looks like, and keeps the first bytes."""
    async with asyncio.timeout(30):
        while data := await reader.read(65536):
            hit.data = (hit.data + data.decode("latin-1"))[:_KEPT]
            if b" HTTP/1." in data[:8192]:
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(_ANSWER)}\r\nConnection: close\r\n\r\n"
                writer.write(head.encode() + _ANSWER)
                await writer.drain()
                return
            if hit.port == 53 and len(data) > 2:
                answer = _dns_answer(data[2:])
                writer.write(struct.pack("!H", len(answer)) + answer)
            else:
                writer.write(_ANSWER)
            await writer.drain()


def _dns_answer(query: bytes) -> bytes:
    """An answer that sends any name to the attacker; what is no query gets the plain answer."""
    try:
        message = dns.message.from_wire(query)
        response = dns.message.make_response(message)
        question = message.question[0]
    except (dns.exception.DNSException, IndexError, ValueError):
        return _ANSWER
    if question.rdtype == dns.rdatatype.A:
        response.answer.append(dns.rrset.from_text(question.name, 1, "IN", "A", topology.ATTACKER))
    return response.to_wire()


def _transparent(family: socket.AddressFamily, kind: socket.SocketKind) -> socket.socket:
    """A non-blocking socket that TPROXY may hand any destination to."""
    made = socket.socket(family, kind)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET:
        made.setsockopt(socket.SOL_IP, _IP_TRANSPARENT, 1)
        if kind == socket.SOCK_DGRAM:
            made.setsockopt(socket.SOL_IP, _IP_RECVORIGDSTADDR, 1)
    else:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.setsockopt(socket.IPPROTO_IPV6, _IPV6_TRANSPARENT, 1)
        if kind == socket.SOCK_DGRAM:
            made.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVORIGDSTADDR, 1)
    made.bind(("", topology.ATTACKER_PORT))
    if kind == socket.SOCK_STREAM:
        made.listen(256)
    return made


def _destination(ancillary: list[tuple[int, int, bytes]]) -> tuple[str, int]:
    """The datagram's destination from its control messages (a sockaddr_in or sockaddr_in6)."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_IP, _IP_RECVORIGDSTADDR):
            return str(ipaddress.ip_address(data[4:8])), struct.unpack_from("!H", data, 2)[0]
        if (level, kind) == (socket.IPPROTO_IPV6, _IPV6_RECVORIGDSTADDR):
            return str(ipaddress.ip_address(data[8:24])), struct.unpack_from("!H", data, 2)[0]
    return "", 0


def _reply_from(address: str, port: int, peer: tuple[str, int], data: bytes) -> None:
    """Sends a datagram from the address and port that the client wrote to."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sender.bind((address, port))
        sender.sendto(data, peer)
