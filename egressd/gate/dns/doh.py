"""DNS over HTTPS: one POST a question, on one HTTP/2 connection (RFC 8484).

HTTP/2 only: it is the least that the RFC recommends (§5.2) and all that many servers still speak. Nothing but a
200 with an uncompressed `application/dns-message` is an answer; a redirect is none. No header says who asks
(§8.2).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import ClassVar, Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from egressd.gate.dns.lines import MAX_MESSAGE, Answer, Line, QuestionRefused, ReplyError
from egressd.gate.dns.servers import PORTS, Upstream
from egressd.gate.tls.stream import TlsStream

MEDIA_TYPE: Final = b"application/dns-message"
_MAX_HEADERS: Final = 16 * 1024
_MAX_AGE_DIGITS: Final = 9

type Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class _Response:
    age: int = 0
    started: bool = False
    body: bytearray = field(default_factory=bytearray)


class DohLine(Line):
    """A line that tells answers apart by their HTTP/2 streams."""

    alpn: ClassVar[str] = "h2"
    must_agree: ClassVar[bool] = True

    def __init__(self, stream: TlsStream, server: Upstream) -> None:
        super().__init__(stream, server)
        self._responses: dict[int, _Response] = {}
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding=None))
        self._h2.local_settings = Settings(
            client=True,
            initial_values={
                SettingCodes.ENABLE_PUSH: 0,
                SettingCodes.INITIAL_WINDOW_SIZE: MAX_MESSAGE,
                SettingCodes.MAX_HEADER_LIST_SIZE: _MAX_HEADERS,
            },
        )
        self._h2.initiate_connection()
        self._head: Headers = [
            (b":method", b"POST"),
            (b":scheme", b"https"),
            (b":authority", authority_of(server).encode("ascii")),
            (b":path", server.path.encode("ascii")),
            (b"accept", MEDIA_TYPE),
            (b"accept-encoding", b"identity"),
            (b"content-type", MEDIA_TYPE),
        ]
        self._flush()

    def _has_room(self) -> bool:
        return self._h2.open_outbound_streams < self._h2.remote_settings.max_concurrent_streams

    def _send(self, query: bytes) -> int:
        key = self._h2.get_next_available_stream_id()
        self._h2.send_headers(key, [*self._head, (b"content-length", str(len(query)).encode("ascii"))])
        self._h2.send_data(key, query, end_stream=True)
        self._responses[key] = _Response()
        self._flush()
        return key

    def _receive(self, data: bytes) -> None:
        try:
            events = self._h2.receive_data(data)
        finally:
            self._flush()  # a protocol error has its GOAWAY
        for event in events:
            self._handle(event)
        self._flush()

    def _handle(self, event: Event) -> None:
        match event:
            case ResponseReceived():
                self._start(event.stream_id, event.headers)
            case DataReceived():
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                self._take(event.stream_id, event.data)
            case StreamEnded():
                response = self._responses.pop(event.stream_id, None)
                if response is not None:
                    self._complete(event.stream_id, Answer(bytes(response.body), response.age))
            case StreamReset():
                self._responses.pop(event.stream_id, None)
                self._complete(event.stream_id, _reset_problem(event.error_code))
            case ConnectionTerminated():
                # h2 takes no frame after it, those that would still answer included: what waits is asked anew
                raise ReplyError("the server ended the connection")

    def _start(self, key: int, headers: Headers) -> None:
        response = self._responses.get(key)
        if response is None:
            return
        problem = _head_problem(headers)
        if problem is not None:
            self._refuse(key, problem)
        response.age = _age(headers)

    def _take(self, key: int, data: bytes) -> None:
        response = self._responses.get(key)
        if response is None:
            return
        response.body += data
        if len(response.body) > MAX_MESSAGE:
            self._refuse(key, "an answer that is too large")

    def _refuse(self, key: int, problem: str) -> None:
        self._responses.pop(key, None)
        self._complete(key, ReplyError(problem))
        self._reset(key)

    def _reset(self, key: int) -> None:
        """Want no more of a stream; one that has ended by itself meanwhile needs nothing."""
        with contextlib.suppress(ProtocolError):
            self._h2.reset_stream(key, ErrorCodes.CANCEL)

    def _give_up(self, key: int) -> None:
        self._responses.pop(key, None)
        self._reset(key)
        self._flush()

    def _goodbye(self) -> None:
        self._h2.close_connection()
        self._flush()

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data:
            self._stream.write(data)


def authority_of(server: Upstream) -> str:
    """Return what the request says of its host: the proven name or the address, and a port that is not 443."""
    host = server.name if server.name is not None else server.host
    return host if server.port == PORTS["https"] else f"{host}:{server.port}"


def _reset_problem(code: ErrorCodes | int | None) -> ReplyError:
    if code == ErrorCodes.REFUSED_STREAM:  # not processed: asking again is safe (RFC 9113 §8.7)
        return QuestionRefused("the server refused the stream")
    return ReplyError(f"the server reset the stream with error {int(code or 0)}")


def _head_problem(headers: Headers) -> str | None:
    """Return why a response cannot be an answer, by its head; nothing in it is the server's wording."""
    status = _values(headers, b":status")
    if status != [b"200"]:
        known = len(status) == 1 and len(status[0]) == 3 and status[0].isdigit()
        return f"HTTP status {status[0].decode('ascii')}" if known else "no HTTP status"
    if any(value.strip().lower() != b"identity" for value in _values(headers, b"content-encoding")):
        return "a compressed answer"
    types = [value.partition(b";")[0].strip().lower() for value in _values(headers, b"content-type")]
    return None if types == [MEDIA_TYPE] else "an answer that is no application/dns-message"


def _age(headers: Headers) -> int:
    """Return the Age of a response in seconds (RFC 9111 §5.1); one that is no number counts for nothing."""
    values = _values(headers, b"age")
    good = len(values) == 1 and values[0].isdigit() and len(values[0]) <= _MAX_AGE_DIGITS
    return int(values[0]) if good else 0


def _values(headers: Headers, name: bytes) -> list[bytes]:
    return [value for key, value in headers if key == name]
