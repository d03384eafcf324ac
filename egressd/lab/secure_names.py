"""The lab's DNS over TLS (port 853) and over HTTPS, by the same zone and with certificates of the lab's root."""

from __future__ import annotations

import asyncio
import contextlib
from typing import cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded
from h2.exceptions import ProtocolError

from egressd.lab import topology
from egressd.lab.names import Zone, carry_messages
from egressd.lab.pki import Authority

PATH = "/dns-query"
_MEDIA_TYPE = "application/dns-message"
_MOST = 0xFFFF


async def serve_secure_zone(zone: Zone, authority: Authority, address: str) -> None:
    """Answers by both encrypted transports at `address` until the loop ends."""

    async def over_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await carry_messages(zone, "tls", reader, writer)

    async def over_https(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ProtocolError):  # the client is gone, or speaks something else
            await _Exchanges(zone, reader, writer).carry()
        writer.close()

    for port, alpn, carry in (
        (topology.DOT_PORT, "dot", over_tls),
        (topology.DOH_PORT, "h2", over_https),
    ):
        await asyncio.start_server(carry, address, port, ssl=authority.listening_context((alpn,)))


class _Exchanges:
    """The requests of one HTTP/2 connection, answered as their waits are over."""

    def __init__(self, zone: Zone, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._zone = zone
        self._reader = reader
        self._writer = writer
        self._h2 = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        self._heads: dict[int, dict[str, str]] = {}
        self._bodies: dict[int, bytearray] = {}

    async def carry(self) -> None:
        """Serves until the client ends it; raises OSError or ProtocolError."""
        self._h2.initiate_connection()
        self._flush()
        peer = self._writer.get_extra_info("peername")
        while data := await self._reader.read(_MOST):
            for event in self._h2.receive_data(data):
                match event:
                    case RequestReceived():
                        # header_encoding makes all of them text
                        self._heads[event.stream_id] = dict(cast("list[tuple[str, str]]", event.headers))
                        self._bodies[event.stream_id] = bytearray()
                    case DataReceived():
                        self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                        body = self._bodies[event.stream_id]
                        body += event.data[: _MOST - len(body)]
                    case StreamEnded():
                        head = self._heads.pop(event.stream_id)
                        body = self._bodies.pop(event.stream_id)
                        self._answer(event.stream_id, head, bytes(body), f"{peer[0]}:{peer[1]}")
            self._flush()

    def _answer(self, stream: int, head: dict[str, str], body: bytes, peer: str) -> None:
        if head.get(":path") != PATH:
            self._send(stream, "404", b"")
        elif head.get(":method") != "POST":
            self._send(stream, "405", b"")
        elif head.get("content-type") != _MEDIA_TYPE:
            self._send(stream, "415", b"")
        else:
            reply = self._zone.answer(body, "https", peer)
            if reply.wire is not None:
                loop = asyncio.get_running_loop()
                loop.call_later(reply.wait, self._send, stream, "200", reply.wire)

    def _send(self, stream: int, status: str, body: bytes) -> None:
        """Sends an answer; the zone's are smaller than the smallest window of a stream that clients begin with."""
        head = [(":status", status), ("content-length", str(len(body)))]
        with contextlib.suppress(ProtocolError):  # the stream was reset meanwhile
            self._h2.send_headers(stream, [*head, ("content-type", _MEDIA_TYPE)] if body else head)
            self._h2.send_data(stream, body, end_stream=True)
            self._flush()

    def _flush(self) -> None:
        self._writer.write(self._h2.data_to_send())
