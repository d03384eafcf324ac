"""HTTP/2: a link under any bytes, and the engine between a hostile client and a hostile origin, on streams in memory.

Input of both: a byte of options, then either raw bytes or (most of the time) a script of frames, so that chance spends itself on
what frames mean and not on their lengths. A script is lines: kind, flags, stream, payload; the payload of a HEADERS frame may
be fields as text, which are compressed on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
from collections import Counter

from hpack import Encoder

from egressd.gate.inspector.head import BadHead, RequestHead
from egressd.gate.inspector.http2 import frames
from egressd.gate.inspector.http2.events import Broken, Data, Event, Head
from egressd.gate.inspector.http2.frames import PREFACE
from egressd.gate.inspector.http2.heads import parse_request, parse_response, parse_trailers
from egressd.gate.inspector.http2.link import Link, Terms
from egressd.journal.record import Record
from tests.fuzz.target import JUNK, Target, offsets_of, pieces_of
from tests.gate.inspector.http2.scene import Scene, tls_entry
from tests.gate.inspector.lab import HOST

_TERMS = Terms(16 * 1024, 100, 200, 1 << 20)
_RAW, _NO_PREFACE, _ORIGIN = 0x80, 0x40, 0x20
_ENTRIES = (tls_entry(requests=("GET /**", "POST /a")),)


def wire_of(script: bytes) -> bytes:
    """Return the frames that a script spells."""
    encoder, out = Encoder(), bytearray()
    for line in script.split(b"\n"):
        if len(line) < 3:
            continue
        kind, flags, stream, payload = line[0] % 12, line[1], line[2] % 16, line[3:]
        if kind in (frames.HEADERS, frames.CONTINUATION) and b":" in payload:
            fields = [_field(text) for text in payload.split(b"|")]
            payload = encoder.encode(fields)
            flags &= ~(frames.PADDED | frames.PRIORITIZED)
        elif kind == frames.WINDOW_UPDATE and len(payload) < 4:
            payload = payload.rjust(4, b"\0")
        elif kind == frames.SETTINGS and len(payload) % 6:
            payload += bytes(-len(payload) % 6)
        out += frames.frame(kind, flags, stream, payload)
    return bytes(out)


def _field(text: bytes) -> tuple[bytes, bytes]:
    name, _, value = (text[1:] if text[:1] == b":" else text).partition(b":")
    return (b":" if text[:1] == b":" else b"") + name, value


def _wire(data: bytes) -> tuple[int, bytes]:
    options, rest = (data[0], data[1:]) if data else (0, b"")
    wire = rest if options & _RAW else wire_of(rest)
    greeting = b"" if options & _NO_PREFACE else b"" if options & _RAW and options & _ORIGIN else PREFACE
    return options, greeting + wire


def _read(pieces: list[bytes], *, server: bool) -> tuple[list[Event], bytes]:
    link, events = Link(_TERMS, server=server), list[Event]()
    for piece in pieces:
        events += link.receive(piece, 0.0)
    return events, link.take()


def check_link(data: bytes) -> None:
    """Hold every law of one side of a connection."""
    options, wire = _wire(data)
    server = not options & _ORIGIN
    if not server:
        wire = wire.removeprefix(PREFACE)
    events, said = _read([wire], server=server)
    for pieces in pieces_of(wire):
        assert _read(pieces, server=server) == (events, said), "what a peer says depends on how it was cut"
    assert sum(isinstance(event, Broken) for event in events) <= 1
    assert not any(isinstance(event, Broken) for event in events[:-1]), (
        "something is read after the connection broke"
    )
    for at in offsets_of(wire)[-8:]:
        cut, _ = _read([wire[:at]], server=server)
        assert cut == events[: len(cut)], "what is not all there says something else"
    for junk in JUNK:
        more, _ = _read([wire + junk], server=server)
        assert more[: len(events)] == events, "what comes later changes what was said"
    taken = Counter[int]()
    for event in events:
        if isinstance(event, Data):
            taken[event.stream] += len(event.data)
            assert taken[event.stream] <= _TERMS.window, "a stream brings more than its window holds"
        if isinstance(event, Head):
            _check_request(parse_request(event.fields, ended=event.ended, limit=8192))
            parse_response(event.fields, method=b"GET", ended=event.ended, limit=8192)
            parse_trailers(event.fields, 8192)


def _check_request(head: RequestHead | BadHead) -> None:
    if isinstance(head, BadHead):
        return
    assert head.method == head.method.upper() not in (b"CONNECT", b"")
    assert head.path.startswith(b"/") or (head.path, head.method) == (b"*", b"OPTIONS")
    assert head.scheme == b"https"
    for name, value in head.fields:
        assert name == name.lower()
        assert name not in (b"connection", b"transfer-encoding", b"upgrade")
        assert not re.search(rb"[\0\r\n:]", name)
        assert not re.search(rb"[\0\r\n]", value), "a field that is two in HTTP/1"


def check_engine(data: bytes) -> None:
    """Hold every law of a connection: whatever both sides say, upstream bytes stand behind an allow that was recorded."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        asyncio.run(_run(data))
    assert not said.getvalue(), said.getvalue()[-2000:]


async def _run(data: bytes) -> None:
    client, _, origin = data.partition(b"\n\n")
    _, asked = _wire(client)
    async with Scene(*_ENTRIES) as scene:
        scene.client.acknowledges = False
        for piece in list(pieces_of(asked))[-1]:
            scene.client_stream.arrive(piece)
            await _turn()
            _check_upstream(scene)
        answered = wire_of(origin)
        if scene.origin_stream.owner is not None:
            scene.origin_stream.arrive(frames.settings({}) + answered)
            await _turn()
            _check_upstream(scene)
        scene.client_stream.end()
        await _turn()
    _check_records(scene.records.all)


async def _turn() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


def _check_upstream(scene: Scene) -> None:
    allowed = [record for record in scene.records.of("decision") if record.verdict == "allow"]
    if not scene.origin_stream.written:
        return
    assert allowed, "bytes went upstream and no allow was recorded"
    for record in allowed:
        assert record.host == HOST, "another host was allowed"
        assert (record.method, record.path) == ("POST", "/a") or record.method == "GET"


def _check_records(records: list[Record]) -> None:
    decided = [record.attempt_id for record in records if record.event == "decision"]
    ended = [record.attempt_id for record in records if record.event == "end"]
    assert len(set(decided)) == len(decided)
    assert len(set(ended)) == len(ended), "an attempt ends twice"
    assert set(ended) <= set(decided)
    allowed = {
        record.attempt_id for record in records if record.event == "decision" and record.verdict == "allow"
    }
    assert allowed <= set(ended), "an allowed request has no end"
    assert not [record for record in records if record.reason == "internal_error"], "a fault of ours"


def _ask(
    stream: int, method: bytes, path: bytes, more: bytes = b"", *, flags: int = 5, host: bytes = HOST.encode()
) -> bytes:
    head = b"|".join(
        [
            b":method:" + method,
            b":scheme:https",
            b":authority:" + host,
            b":path:" + path,
            *([more] if more else []),
        ]
    )
    return bytes((1, flags, stream)) + head + b"\n"


_SETTINGS = bytes((4, 0, 0)) + b"\n"
_ACK = bytes((4, 1, 0)) + b"\n"
_ANSWER = bytes((1, 4, 1)) + b":status:200|content-type:text/plain\n" + bytes((0, 1, 1)) + b"hello\n"
_WORDS = (
    b"\n",
    b"\n\n",
    b"\x00\x01\x01body",
    b"\x01\x05\x03",
    b"\x01\x04\x05",
    b"\x03\0\x01\0\0\0\x08",
    b"\x07\0\0\0\0\0\0\0\0\0\0",
    b"\x08\0\0\x7f\xff\xff\xff",
    b"\x08\0\x01\0\0\0\x01",
    b"\x09\x04\x01",
    b"\x06\0\0pingping",
    b"\x05\x04\x01",
    b"\x04\0\0\0\x04\x7f\xff\xff\xff",
    b"|",
    b":method:POST",
    b":method:CONNECT",
    b":path:/a",
    b":authority:evil.test",
    b"host:evil.test",
    b"content-length:5",
    b"transfer-encoding:chunked",
    b":protocol:websocket",
    b"connection:close",
    b"te:trailers",
    b":status:200",
    b":status:100",
    b":status:204",
    b"expect:100-continue",
    b"cookie:a",
    b"X:y",
    b" ",
    b"\r",
    b"\0",
)
_SEEDS = (
    b"\0" + _SETTINGS + _ask(1, b"GET", b"/b") + _ACK,
    b"\0" + _SETTINGS + _ask(1, b"POST", b"/a", b"content-length:4", flags=4) + b"\x00\x01\x01body\n",
    b"\0"
    + _SETTINGS
    + _ask(1, b"GET", b"/", host=b"evil.test")
    + _ask(3, b"GET", b"/x", b"cookie:a|cookie:b"),
    b"\0"
    + _SETTINGS
    + _ask(1, b"GET", b"/", flags=1)
    + bytes((9, 4, 1))
    + b"x:y\n"
    + b"\x03\0\x01\0\0\0\x08\n",
    b"\0"
    + _SETTINGS
    + _ask(1, b"POST", b"/a", flags=4)
    + b"\x00\x08\x01\x02ab\0\0\n"
    + bytes((1, 5, 1))
    + b"x-trailer:1\n",
    b"\0" + _SETTINGS + b"\x06\0\0pingping\n\x08\0\0\0\x01\0\0\n\x02\0\x01\0\0\0\0\x10\n",
    b"\0" + _SETTINGS + _ask(1, b"POST", b"/a", flags=4) + (bytes((0, 0, 1)) + b"x" * 60 + b"\n") * 2,
    b"\0" + _SETTINGS + _ask(1, b"CONNECT", b"/") + _ask(3, b"GET", b"/", b":protocol:websocket"),
    bytes((_RAW,))
    + frames.settings({3: 5})
    + frames.header_block(1, b"\x82\x87\x84\x41\x86\xa0\xe4\x1d\x13\x9d\x09", end=True),
)

LINK = Target(
    "http2_link",
    check_link,
    lambda data: _read([_wire(data)[1]], server=True),
    seeds=(*_SEEDS, bytes((_ORIGIN,)) + _SETTINGS + _ANSWER, bytes((_NO_PREFACE | _RAW,)) + PREFACE[:10]),
    words=_WORDS,
    most=900,
    quick=700,
)
ENGINE = Target(
    "http2_engine",
    check_engine,
    lambda data: _read([_wire(data)[1]], server=True),
    seeds=(
        *(seed + b"\n" + _ANSWER for seed in _SEEDS),
        _SEEDS[1] + b"\n" + bytes((1, 4, 1)) + b":status:100\n" + _ANSWER + b"\x07\0\0\0\0\0\0\0\0\0\0\n",
    ),
    words=_WORDS,
    most=700,
    quick=700,
)
