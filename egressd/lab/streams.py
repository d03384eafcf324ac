"""A small HTTP/2 server for the lab's origins: every stream is answered by a coroutine, as fast as its client reads.

hyper-h2 speaks the protocol, so that what egressd says to it is held against another implementation.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RequestReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from egressd.lab import calls
from egressd.lab.guards import DENIED
from egressd.lab.http1 import plain_address
from egressd.lab.mirrors import reflection
from egressd.lab.sightings import SeenRequest

_BLOCK = bytes(range(256)) * 256
_READ = 256 * 1024
_WINDOW = 1 << 20

type Headers = list[tuple[str, str]]


class Gone(Exception):
    """The client has given the stream up."""


@dataclass(eq=False)
class Stream:
    """One request and the way to answer it; `seen` is its record."""

    connection: Connection
    number: int
    seen: SeenRequest
    arrived: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    reset: bool = False

    async def chunks(self) -> AsyncIterator[bytes]:
        """The request body as it arrives, counted and hashed; its window is given back as it is taken."""
        digest = hashlib.sha256()
        while (block := await self.arrived.get()) is not None:
            self.seen.body_bytes += len(block)
            digest.update(block)
            self.seen.body_sha256 = digest.hexdigest()
            self.connection.took(self, len(block))
            await self.connection.flush()  # the client may be waiting for just this
            yield block

    async def messages(self) -> AsyncIterator[bytes]:
        """The messages of a gRPC call, each as it arrives."""
        held = b""
        async for block in self.chunks():
            held += block
            while len(held) >= 5 and len(held) >= (size := 5 + int.from_bytes(held[1:5])):
                yield held[5:size]
                held = held[size:]

    def start(self, status: int, headers: Sequence[tuple[str, str]] = (), *, end: bool = False) -> None:
        """Sends the head of an answer."""
        self.seen.status = status
        self.connection.say(self, [(":status", str(status)), *headers], end=end)

    async def send(self, data: bytes, *, end: bool = False) -> None:
        """Sends bytes of the body, as the windows allow; raises Gone when nobody wants them."""
        while data or end:
            room = await self.connection.room(self)
            piece, data = data[:room], data[room:]
            self.connection.put(self, piece, end=end and not data)
            await self.connection.flush()
            self.seen.sent += len(piece)
            end = end and bool(data)

    async def send_message(self, message: bytes) -> None:
        """Sends one gRPC message."""
        await self.send(b"\0" + len(message).to_bytes(4) + message)

    async def reply(
        self,
        status: int,
        body: bytes = b"",
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Sends a whole answer; HEAD gets the head alone."""
        bodiless = self.seen.method == "HEAD" or status in (204, 304)
        sized = [] if status in (204, 304) else [("content-length", str(len(body)))]
        self.start(status, [("server", "lab"), *sized, *headers], end=bodiless or not body)
        if body and not bodiless:
            await self.send(body, end=True)
        await self.connection.flush()


class Connection:
    """One accepted connection and the streams on it."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        remember: Callable[[SeenRequest], None],
        sni: Mapping[ssl.SSLObject, str],
        refuses: Callable[[SeenRequest], dict[str, str] | None],
    ) -> None:
        self.requests = 0
        self._reader, self._writer = reader, writer
        self._remember = remember
        self._sni = sni
        self._refuses = refuses
        self._h2 = H2Connection(H2Configuration(client_side=False, header_encoding="latin-1"))
        self._streams: dict[int, Stream] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._opened = asyncio.Condition()

    async def serve(self) -> None:
        """Answers streams until either side ends the connection."""
        # Not `update`: that counts as said only once it was acknowledged, and by then it was never said.
        self._h2.local_settings = Settings(
            client=False, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW}
        )
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_WINDOW)
        try:
            await self.flush()
            while data := await self._reader.read(_READ):
                for event in self._h2.receive_data(data):
                    await self._hear(event)
                await self.flush()
        except (ProtocolError, OSError, ssl.SSLError):
            with contextlib.suppress(OSError):
                self._writer.write(self._h2.data_to_send())
        finally:
            for stream in self._streams.values():
                stream.reset = stream.seen.aborted = True
            for task in self._tasks:
                task.cancel()
            self._writer.close()

    async def _hear(self, event: Event) -> None:
        if isinstance(event, RequestReceived):
            self._begin(event)
        elif isinstance(event, WindowUpdated | StreamReset | ConnectionTerminated):
            stream = self._streams.get(getattr(event, "stream_id", 0) or 0)
            if isinstance(event, StreamReset) and stream is not None:
                stream.reset = stream.seen.aborted = True
                stream.arrived.put_nowait(None)
            async with self._opened:
                self._opened.notify_all()
        elif (
            isinstance(event, DataReceived | TrailersReceived | StreamEnded)
            and event.stream_id in self._streams
        ):
            stream = self._streams[event.stream_id]
            if isinstance(event, DataReceived):
                stream.arrived.put_nowait(event.data)
                self._h2.acknowledge_received_data(
                    event.flow_controlled_length - len(event.data), event.stream_id
                )
            elif isinstance(event, TrailersReceived):
                stream.seen.trailers = [[str(name), str(value)] for name, value in event.headers]
            else:
                stream.arrived.put_nowait(None)

    def _begin(self, event: RequestReceived) -> None:
        fields = [(str(name), str(value)) for name, value in event.headers]
        pseudo = dict(fields)
        tls = self._writer.get_extra_info("ssl_object")
        peer, local = self._writer.get_extra_info("peername"), self._writer.get_extra_info("sockname")
        seen = SeenRequest(
            method=pseudo[":method"],
            host=pseudo.get(":authority", "").partition(":")[0],
            target=pseudo[":path"],
            headers=[[name, value] for name, value in fields if name[0] != ":"],
            peer=f"{plain_address(peer[0])}:{peer[1]}",
            address=plain_address(local[0]),
            port=local[1],
            tls=tls is not None,
            sni=None if tls is None else self._sni.get(tls),
        )
        self._remember(seen)
        self.requests += 1
        stream = self._streams[event.stream_id] = Stream(self, event.stream_id, seen)
        task = asyncio.get_running_loop().create_task(self._answer(stream))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, stream: Stream) -> None:
        try:
            refusal = self._refuses(stream.seen)
            if refusal is None:
                await _HANDLERS.get(stream.seen.path, echo)(stream)
            else:
                await stream.reply(401, DENIED, [(name.lower(), value) for name, value in refusal.items()])
            await self.flush()
        except (Gone, OSError):
            stream.seen.aborted = True
        except ProtocolError:
            with contextlib.suppress(ProtocolError, OSError):
                self._h2.reset_stream(stream.number, ErrorCodes.INTERNAL_ERROR)
                await self.flush()
        finally:
            self._streams.pop(stream.number, None)

    # for streams

    def say(self, stream: Stream, headers: Headers, *, end: bool) -> None:
        """Sends a header section."""
        if stream.reset:
            raise Gone
        self._h2.send_headers(stream.number, headers, end_stream=end)

    async def room(self, stream: Stream) -> int:
        """How much may be sent now; waits until it is something."""
        while not stream.reset:
            room = min(self._h2.local_flow_control_window(stream.number), self._h2.max_outbound_frame_size)
            if room > 0:
                return room
            async with self._opened:
                await self._opened.wait()
        raise Gone

    def put(self, stream: Stream, data: bytes, *, end: bool) -> None:
        """Sends data for which there is room."""
        if stream.reset:
            raise Gone
        self._h2.send_data(stream.number, data, end_stream=end)

    def took(self, stream: Stream, count: int) -> None:
        """Gives windows back."""
        if not stream.reset:
            self._h2.acknowledge_received_data(count, stream.number)
            self._writer.write(self._h2.data_to_send())

    def leave(self, last: int) -> None:
        """Says that streams after `last` will not be looked at; what hyper-h2 cannot say without ending everything."""
        self._writer.write(b"\0\0\x08\x07\0\0\0\0\0" + last.to_bytes(4) + bytes(4))

    async def flush(self) -> None:
        """Hands what there is to the socket."""
        if data := self._h2.data_to_send():
            self._writer.write(data)
            await self._writer.drain()


async def echo(stream: Stream) -> None:
    """What arrived: method, host, target, headers in order, body size and sha256, trailers."""
    async for _ in stream.chunks():
        pass
    seen = stream.seen
    answer: dict[str, object] = {
        "method": seen.method,
        "host": seen.host,
        "target": seen.target,
        "sni": seen.sni,
    }
    answer |= {"http": 2, "headers": seen.headers, "trailers": seen.trailers}
    answer |= {"n": seen.body_bytes, "sha256": seen.body_sha256}
    await stream.reply(200, json.dumps(answer).encode(), [("content-type", "application/json")])


async def _count(stream: Stream) -> None:
    await stream.reply(200, str(stream.connection.requests).encode(), [("content-type", "text/plain")])


def _asked(stream: Stream, key: str, default: str) -> str:
    pairs = (pair.partition("=") for pair in stream.seen.target.partition("?")[2].split("&"))
    return {name: value for name, _, value in pairs}.get(key, default)


async def _big(stream: Stream) -> None:
    """`?bytes=N`: a download of known bytes, 0 to 255 over and over."""
    left = int(_asked(stream, "bytes", "200000000"))
    stream.start(200, [("content-length", str(left))], end=stream.seen.method == "HEAD" or not left)
    while left and stream.seen.method != "HEAD":
        block = _BLOCK[:left]
        left -= len(block)
        await stream.send(block, end=not left)


async def _stalled(stream: Stream) -> None:
    """Never reads the body that it is sent."""
    await asyncio.sleep(float(_asked(stream, "seconds", "60")))
    await stream.reply(200, b"at last\n")


async def _slowly(stream: Stream) -> None:
    """`?rate=N`: reads the body that it is sent at N bytes a second."""
    rate = float(_asked(stream, "rate", "10000000"))
    async for block in stream.chunks():
        await asyncio.sleep(len(block) / rate)
    await stream.reply(200, str(stream.seen.body_bytes).encode())


async def _mirror(stream: Stream) -> None:
    """`?as=SHAPE`: says the request's head back."""
    headers, pieces = reflection(stream.seen, _asked(stream, "as", "plain"))
    stream.start(200, [(name.lower(), value) for name, value in headers.items()])
    for number, piece in enumerate(pieces):
        await stream.send(piece, end=number == len(pieces) - 1)


async def _slow(stream: Stream) -> None:
    await asyncio.sleep(float(_asked(stream, "seconds", "1")))
    await stream.reply(200, b"at last\n")


async def _events(stream: Stream) -> None:
    """`?events=N&gap=S`: server-sent events, each when it is due."""
    stream.start(200, [("content-type", "text/event-stream")])
    count = int(_asked(stream, "events", "5"))
    for number in range(count):
        if number:
            await asyncio.sleep(float(_asked(stream, "gap", "0.1")))
        await stream.send(f"data: {number}\n\n".encode(), end=number == count - 1)


async def _early_hints(stream: Stream) -> None:
    stream.connection.say(stream, [(":status", "103"), ("link", "</style.css>; rel=preload")], end=False)
    await stream.reply(200, b"final")


async def _trailers(stream: Stream) -> None:
    stream.start(200, [("trailer", "x-sum")])
    await stream.send(b"hello")
    stream.connection.say(stream, [("x-sum", "1234")], end=True)


async def _early(stream: Stream) -> None:
    """Refuses with 413 before it has read the body."""
    await stream.reply(413, b"too large")


async def _drain(stream: Stream) -> None:
    """Says farewell, then answers slowly what it has been asked before."""
    stream.connection.leave(stream.number)
    await asyncio.sleep(0.2)
    await stream.reply(200, b"the last of this connection\n")


_HANDLERS: dict[str, Callable[[Stream], Awaitable[None]]] = {
    "/n": _count,
    "/big": _big,
    "/stalled": _stalled,
    "/slowly": _slowly,
    "/mirror": _mirror,
    "/slow": _slow,
    "/sse": _events,
    "/103": _early_hints,
    "/trailers": _trailers,
    "/early": _early,
    "/drain": _drain,
    "/lab.Echo/Say": calls.say,
    "/lab.Echo/Many": calls.many,
    "/lab.Echo/Collect": calls.collect,
    "/lab.Echo/Chat": calls.chat,
    "/lab.Echo/Fail": calls.fail,
}
