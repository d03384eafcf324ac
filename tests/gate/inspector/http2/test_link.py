"""One side of a connection against RFC 9113: what ends a stream, what ends the connection, what no peer can make us do."""

from __future__ import annotations

import pytest
from hpack import Decoder, Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from egressd.gate.inspector.http2 import frames
from egressd.gate.inspector.http2.events import Broken, Data, Event, GoingAway, Head, Reset, Roomier, Surplus
from egressd.gate.inspector.http2.frames import Code, FrameReader, Oversized, frame
from egressd.gate.inspector.http2.link import Link, Terms
from egressd.gate.inspector.http2.patience import Patience
from egressd.policy.reasons import Reason

TERMS = Terms(head_bytes=16_384, window=65_536, most_window=262_144, connection_window=131_072, streams=4)
HELLO = frames.PREFACE + frame(frames.SETTINGS, 0, 0)
GET = [(b":method", b"GET"), (b":scheme", b"https"), (b":authority", b"a.example"), (b":path", b"/")]


def block(fields: list[tuple[bytes, bytes]] = GET, encoder: Encoder | None = None) -> bytes:
    return (encoder or Encoder()).encode(fields)


def head(stream: int = 1, *, flags: int = frames.END_HEADERS, data: bytes | None = None) -> bytes:
    return frame(frames.HEADERS, flags, stream, block() if data is None else data)


def server() -> Link:
    link = Link(TERMS, server=True)
    assert link.receive(HELLO, 0.0) == [Roomier()]
    link.take()
    return link


def client(streams: int = 1) -> Link:
    """A client with open streams whose requests are complete."""
    link = Link(TERMS, server=False)
    link.receive(frame(frames.SETTINGS, 0, 0), 0.0)
    for _ in range(streams):
        link.send_head(link.open(), GET, end=True)
    link.take()
    return link


def said(link: Link) -> list[tuple[int, int, int, bytes]]:
    """What a link has to say, by frames."""
    reader, found = FrameReader(), []
    reader.feed(link.take())
    while (one := reader.next()) is not None:
        assert not isinstance(one, Oversized)
        found.append((one.kind, one.flags, one.stream, one.payload))
    return found


def test_the_greeting_says_what_we_take() -> None:
    link = Link(TERMS, server=True)
    settings_frame, window = said(link)
    assert settings_frame[:3] == (frames.SETTINGS, 0, 0)
    assert frames.settings_of(settings_frame[3]) == {
        frames.INITIAL_WINDOW_SIZE: 65_536,
        frames.MAX_HEADER_LIST_SIZE: 16_384,
        frames.MAX_CONCURRENT_STREAMS: 4,
    }
    assert window == (frames.WINDOW_UPDATE, 0, 0, (131_072 - 65_535).to_bytes(4))


def test_a_client_says_its_preface_and_wants_no_push() -> None:
    out = Link(TERMS, server=False).take()
    assert out.startswith(frames.PREFACE)
    reader = FrameReader()
    reader.feed(out[len(frames.PREFACE) :])
    first = reader.next()
    assert not isinstance(first, Oversized | None)
    assert (frames.settings_of(first.payload) or {})[frames.ENABLE_PUSH] == 0


CONNECTION_ERRORS: dict[str, tuple[bytes, Code]] = {
    "a stream of the other side": (head(2), Code.PROTOCOL_ERROR),
    "headers of no stream": (head(0), Code.PROTOCOL_ERROR),
    "data of no stream": (frame(frames.DATA, 0, 0, b"x"), Code.PROTOCOL_ERROR),
    "data of a stream that is not open": (frame(frames.DATA, 0, 1, b"x"), Code.PROTOCOL_ERROR),
    "data after the end": (head(1, flags=5) + frame(frames.DATA, 0, 1, b"x"), Code.STREAM_CLOSED),
    "headers after the end": (head(1, flags=5) + head(1), Code.STREAM_CLOSED),
    "more padding than frame": (
        head(1) + frame(frames.DATA, frames.PADDED, 1, b"\x05abc"),
        Code.PROTOCOL_ERROR,
    ),
    "padding in an empty frame": (head(1) + frame(frames.DATA, frames.PADDED, 1), Code.PROTOCOL_ERROR),
    "headers with more padding than frame": (frame(frames.HEADERS, 12, 1, b"\xff"), Code.PROTOCOL_ERROR),
    "a priority cut short in headers": (frame(frames.HEADERS, 0x24, 1, b"\0\0\0"), Code.PROTOCOL_ERROR),
    "a frame inside a header section": (
        head(1, flags=0) + frame(frames.PING, 0, 0, b"12345678"),
        Code.PROTOCOL_ERROR,
    ),
    "an unknown frame inside a header section": (head(1, flags=0) + frame(0xEE, 0, 1), Code.PROTOCOL_ERROR),
    "a continuation of another stream": (
        head(1, flags=0) + frame(frames.CONTINUATION, 4, 3),
        Code.PROTOCOL_ERROR,
    ),
    "a continuation of nothing": (frame(frames.CONTINUATION, 4, 1), Code.PROTOCOL_ERROR),
    "a header section that cannot be decompressed": (
        head(data=b"\xff\xff\xff\xff\xff"),
        Code.COMPRESSION_ERROR,
    ),
    "an index that means nothing": (head(data=b"\xbf\xff"), Code.COMPRESSION_ERROR),
    "a table larger than agreed": (head(data=b"\x3f\xff\xff\x03"), Code.COMPRESSION_ERROR),
    "a priority of the wrong size": (frame(frames.PRIORITY, 0, 1, b"1234"), Code.FRAME_SIZE_ERROR),
    "a priority of no stream": (frame(frames.PRIORITY, 0, 0, b"12345"), Code.PROTOCOL_ERROR),
    "a reset of a stream that is not open": (
        frame(frames.RST_STREAM, 0, 1, b"\0\0\0\0"),
        Code.PROTOCOL_ERROR,
    ),
    "a reset of no stream": (frame(frames.RST_STREAM, 0, 0, b"\0\0\0\0"), Code.PROTOCOL_ERROR),
    "a reset of the wrong size": (head(1) + frame(frames.RST_STREAM, 0, 1, b"\0"), Code.FRAME_SIZE_ERROR),
    "settings of a stream": (frame(frames.SETTINGS, 0, 1), Code.PROTOCOL_ERROR),
    "settings cut short": (frame(frames.SETTINGS, 0, 0, b"12345"), Code.FRAME_SIZE_ERROR),
    "an acknowledgement with settings": (
        frame(frames.SETTINGS, 1, 0, b"\0\1\0\0\0\0"),
        Code.FRAME_SIZE_ERROR,
    ),
    "a push setting of 2": (frames.settings({frames.ENABLE_PUSH: 2}), Code.PROTOCOL_ERROR),
    "a small frame size": (frames.settings({frames.MAX_FRAME_SIZE: 16_383}), Code.PROTOCOL_ERROR),
    "a large frame size": (frames.settings({frames.MAX_FRAME_SIZE: 1 << 24}), Code.PROTOCOL_ERROR),
    "a large window": (frames.settings({frames.INITIAL_WINDOW_SIZE: 1 << 31}), Code.FLOW_CONTROL_ERROR),
    "settings that make a window too large": (
        head(1)
        + frames.window_update(1, 2**31 - 1 - 65_535)
        + frames.settings({frames.INITIAL_WINDOW_SIZE: 65_536}),
        Code.FLOW_CONTROL_ERROR,
    ),
    "a push": (frame(frames.PUSH_PROMISE, 4, 1, b"\0\0\0\2"), Code.PROTOCOL_ERROR),
    "a ping of a stream": (frame(frames.PING, 0, 1, b"12345678"), Code.PROTOCOL_ERROR),
    "a ping of the wrong size": (frame(frames.PING, 0, 0, b"1234567"), Code.FRAME_SIZE_ERROR),
    "a farewell of a stream": (frame(frames.GOAWAY, 0, 1, bytes(8)), Code.PROTOCOL_ERROR),
    "a farewell cut short": (frame(frames.GOAWAY, 0, 0, bytes(7)), Code.FRAME_SIZE_ERROR),
    "a window update of the wrong size": (frame(frames.WINDOW_UPDATE, 0, 0, b"123"), Code.FRAME_SIZE_ERROR),
    "a window update of nothing": (frames.window_update(0, 0), Code.PROTOCOL_ERROR),
    "a window update too far": (frames.window_update(0, 2**31 - 1), Code.FLOW_CONTROL_ERROR),
    "a window update of a stream that is not open": (frames.window_update(1, 1), Code.PROTOCOL_ERROR),
    "a frame longer than agreed": (frames.head_of(frames.DATA, 0, 1, 16_385), Code.FRAME_SIZE_ERROR),
    "more data than the window of the stream": (
        head(1) + frame(frames.DATA, 0, 1, bytes(16_384)) * 4 + frame(frames.DATA, 0, 1, b"x"),
        Code.FLOW_CONTROL_ERROR,
    ),
    "more data than the window of the connection": (
        b"".join(head(stream) + frame(frames.DATA, 0, stream, bytes(16_384)) * 3 for stream in (1, 3, 5)),
        Code.FLOW_CONTROL_ERROR,
    ),
    "a head without end": (
        head(1, flags=0, data=b"") + frame(frames.CONTINUATION, 0, 1, bytes(16_384)) * 3,
        Code.ENHANCE_YOUR_CALM,
    ),
    "DOS-06 continuations without end": (
        head(1, flags=0, data=b"") + frame(frames.CONTINUATION, 0, 1) * 64,
        Code.ENHANCE_YOUR_CALM,
    ),
}


@pytest.mark.parametrize(("data", "code"), CONNECTION_ERRORS.values(), ids=CONNECTION_ERRORS)
def test_what_ends_the_connection(data: bytes, code: Code) -> None:
    link = server()
    if "connection" in str(
        data[:0]
    ):  # never: the encoder of each head above is its own, so tables stay in step
        raise AssertionError
    events = link.receive(data, 0.0)
    assert isinstance(events[-1], Broken)
    assert events[-1].code is code
    assert link.broken
    assert said(link)[-1][:3] == (frames.GOAWAY, 0, 0)
    assert link.receive(head(7), 0.0) == []


def test_a_header_bomb_is_no_memory() -> None:
    encoder = Encoder()
    bomb = block([(b"x", b"y" * 3_000)], encoder) + b"\xbe" * 10_000
    (broken,) = server().receive(frame(frames.HEADERS, 4, 1, bomb), 0.0)
    assert broken == Broken(
        Code.ENHANCE_YOUR_CALM, Reason.HEAD_TOO_LARGE, "a header section is far too large"
    )


def test_what_is_no_http2_is_told_at_once() -> None:
    link = Link(TERMS, server=True)
    (broken,) = link.receive(b"GET / HTTP/1.1\r\n", 0.0)
    assert isinstance(broken, Broken)
    assert broken.reason is Reason.BAD_REQUEST


@pytest.mark.parametrize("first", [frame(frames.PING, 0, 0, bytes(8)), frame(frames.SETTINGS, frames.ACK, 0)])
def test_settings_come_first(first: bytes) -> None:
    (broken,) = Link(TERMS, server=True).receive(frames.PREFACE + first, 0.0)
    assert isinstance(broken, Broken)


STREAM_ERRORS: dict[str, tuple[bytes, Code]] = {
    "trailers that do not end the stream": (head(1), Code.PROTOCOL_ERROR),
    "a window update of nothing": (frames.window_update(1, 0), Code.PROTOCOL_ERROR),
    "a window update too far": (frames.window_update(1, 2**31 - 1), Code.FLOW_CONTROL_ERROR),
}


@pytest.mark.parametrize(("data", "code"), STREAM_ERRORS.values(), ids=STREAM_ERRORS)
def test_what_ends_one_stream(data: bytes, code: Code) -> None:
    link = server()
    link.receive(head(1) + head(3), 0.0)
    assert link.receive(data, 0.0)[0] == Reset(1, code, ours=True)
    assert said(link) == [(frames.RST_STREAM, 0, 1, int(code).to_bytes(4))]
    assert not link.broken
    assert link.receive(frame(frames.DATA, 1, 3, b"on"), 0.0) == [Data(3, b"on", 2, True)]
    assert link.receive(frame(frames.DATA, 0, 1, b"late"), 0.0) == []


def test_what_a_stream_says() -> None:
    link = server()
    padded = frame(frames.DATA, frames.PADDED, 1, b"\x03abc\0\0\0")
    prioritised = frame(frames.HEADERS, 0x2C, 1, b"\x02\0\0\0\x01\x10" + block() + b"\0\0")
    assert link.receive(prioritised, 0.0) == [Head(1, tuple(GET), False, opens=True)]
    assert link.receive(padded, 0.0) == [Data(1, b"abc", 3, False)]
    trailers = Encoder().encode([(b"x-sum", b"1")])
    assert link.receive(frame(frames.HEADERS, 5, 1, trailers), 0.0) == [
        Head(1, ((b"x-sum", b"1"),), True, opens=False)
    ]
    assert link.receive(frame(frames.PING, 0, 0, b"01234567"), 0.0) == []
    assert said(link)[-1] == (frames.PING, frames.ACK, 0, b"01234567")
    assert link.receive(frame(0xEE, 0xFF, 0x7FFFFFFF, b"an extension"), 0.0) == []
    assert link.receive(frame(frames.GOAWAY, 0, 0, bytes(7) + b"\xff" + b"debug"), 0.0) == [
        GoingAway(0, Code.INTERNAL_ERROR)
    ]


@pytest.mark.parametrize("piece", [1, 2, 7, 1000])
def test_frames_are_read_however_they_are_cut(piece: int) -> None:
    data = HELLO + frames.header_block(1, block(), end=False, limit=5) + frame(frames.DATA, 1, 1, b"body")
    link, events = Link(TERMS, server=True), list[Event]()
    for at in range(0, len(data), piece):
        events += link.receive(data[at : at + piece], 0.0)
    assert events == [Roomier(), Head(1, tuple(GET), False, opens=True), Data(1, b"body", 4, True)]


def test_one_stream_too_many_is_refused_and_nothing_else() -> None:
    link = server()
    encoder = Encoder()
    events = link.receive(b"".join(head(stream, data=block(GET, encoder)) for stream in (1, 3, 5, 7, 9)), 0.0)
    assert [type(event) for event in events] == [Head, Head, Head, Head, Surplus]
    assert said(link) == [(frames.RST_STREAM, 0, 9, int(Code.REFUSED_STREAM).to_bytes(4))]
    link.reset(1, Code.CANCEL)
    assert isinstance(
        link.receive(head(11, data=block(GET, encoder)), 0.0)[0], Head
    )  # the tables are in step


def answered(link: Link, stream: int) -> None:
    link.send_head(stream, [(b":status", b"403")], end=True)
    link.let_finish(stream)
    link.take()


def test_a_peer_that_has_its_answer_may_finish_what_it_sends_and_is_not_heard() -> None:
    link = server()
    assert [type(event) for event in link.receive(head(1), 0.0)] == [Head]
    answered(link, 1)
    sent = left = TERMS.window
    while sent < 1_000_000:
        assert left >= 16_384, "nobody gives the window back"
        assert link.receive(frame(frames.DATA, 0, 1, bytes(16_384)), 0.0) == []
        sent, left = sent + 16_384, left - 16_384
        for kind, _, stream, payload in said(link):
            assert kind == frames.WINDOW_UPDATE
            left += int.from_bytes(payload) if stream == 1 else 0
    assert link.streams == 1
    assert link.receive(frame(frames.DATA, frames.END_STREAM, 1, b""), 0.0) == []
    assert link.streams == 0
    assert frames.RST_STREAM not in {kind for kind, *_ in said(link)}


def test_a_peer_that_does_not_finish_is_reset_in_the_end() -> None:
    link = server()
    link.receive(head(1), 0.0)
    answered(link, 1)
    resets = []
    for _ in range(1100):
        link.receive(frame(frames.DATA, 0, 1, bytes(16_384)), 0.0)
        resets += [payload for kind, _, _, payload in said(link) if kind == frames.RST_STREAM]
    assert resets == [int(Code.NO_ERROR).to_bytes(4)]
    assert not link.broken


def test_streams_whose_rest_nobody_wants_take_no_room() -> None:
    link = server()
    encoder = Encoder()
    link.receive(b"".join(head(stream, data=block(GET, encoder)) for stream in (1, 3, 5, 7)), 0.0)
    for stream in (1, 5):
        answered(link, stream)
    (event,) = link.receive(head(9, data=block(GET, encoder)), 0.0)
    assert isinstance(event, Head)
    assert [(kind, stream) for kind, _, stream, _ in said(link)] == [
        (frames.RST_STREAM, 1),
        (frames.RST_STREAM, 5),
    ]


def test_a_link_that_leaves_says_so_to_who_opens_a_stream() -> None:
    link = server()
    link.receive(head(1), 0.0)
    link.take_no_more()
    assert said(link) == []
    assert isinstance(link.receive(head(3), 0.0)[0], Surplus)
    assert said(link) == [
        (frames.GOAWAY, 0, 0, (1).to_bytes(4) + bytes(4)),
        (frames.RST_STREAM, 0, 3, int(Code.REFUSED_STREAM).to_bytes(4)),
    ]
    link.go_away()
    assert said(link) == []
    link.send_head(1, [(b":status", b"200")], end=True)  # what is open goes on
    assert said(link)[0][0] == frames.HEADERS


def test_a_client_hears_its_own_streams_only() -> None:
    status = Encoder().encode([(b":status", b"200")])
    assert client().receive(head(1, data=status), 0.0) == [
        Head(1, ((b":status", b"200"),), False, opens=False)
    ]
    for stream in (2, 3):
        assert isinstance(client().receive(head(stream, data=status), 0.0)[-1], Broken)
    push = frames.settings({frames.ENABLE_PUSH: 1})
    assert isinstance(client().receive(push, 0.0)[-1], Broken)


def test_the_peer_says_how_many_streams_it_takes() -> None:
    link = client(0)
    may_open = [link.can_open]
    link.receive(frames.settings({frames.MAX_CONCURRENT_STREAMS: 1}), 0.0)
    link.send_head(link.open(), GET, end=True)
    may_open.append(link.can_open)
    link.receive(frame(frames.HEADERS, 5, 1, Encoder().encode([(b":status", b"204")])), 0.0)
    may_open.append(link.can_open)
    assert may_open == [True, False, True]


# windows


def test_a_window_comes_back_when_somebody_has_taken_the_bytes_and_grows_where_they_keep_up() -> None:
    link = client()
    link.receive(head(1, data=Encoder().encode([(b":status", b"200")])), 0.0)
    link.receive(frame(frames.DATA, 0, 1, bytes(16_384)) * 3, 0.0)
    assert said(link) == []
    link.taken(1, 16_384, keeps_up=False)
    assert said(link) == []
    link.taken(1, 16_384, keeps_up=False)
    assert said(link) == [(frames.WINDOW_UPDATE, 0, 1, (32_768).to_bytes(4))]
    grown = []
    for _ in range(40):
        link.taken(1, 16_384, keeps_up=True)
        grown += [
            int.from_bytes(payload) for kind, _, _, payload in said(link) if kind == frames.WINDOW_UPDATE
        ]
    assert max(grown) <= TERMS.most_window
    given = 40 * 16_384 + TERMS.most_window - TERMS.window
    assert given - TERMS.most_window // 2 <= sum(grown) <= given


def test_the_window_of_the_connection_comes_back_for_padding_and_for_streams_that_are_over() -> None:
    link = server()
    link.receive(head(1), 0.0)
    link.reset(1, Code.CANCEL)
    link.take()
    for _ in range(30):
        link.receive(frame(frames.DATA, 0, 1, bytes(16_384)), 0.0)
        assert not link.broken
    assert [kind for kind, *_ in said(link)].count(frames.WINDOW_UPDATE) == 7


def test_data_is_sent_as_far_as_both_windows_go() -> None:
    link = server()
    link.receive(head(1) + head(3), 0.0)
    link.send_head(1, [(b":status", b"200")])
    for _ in range(3):
        link.send_data(1, bytes(16_384))
    assert link.room(1) == link.room(3) == 65_535 - 3 * 16_384
    assert link.receive(frames.window_update(0, 100_000), 0.0) == [Roomier()]
    assert link.room(1) == 65_535 - 3 * 16_384
    assert link.room(3) == 65_535
    link.receive(frames.settings({frames.INITIAL_WINDOW_SIZE: 0}), 0.0)
    assert link.room(1) < 0
    assert link.room(3) == 0
    with pytest.raises(AssertionError):
        link.send_data(3, b"x")
    link.receive(frames.window_update(1, 100_000), 0.0)
    assert link.room(1) == 100_000 - 3 * 16_384


def test_no_peer_chooses_how_much_we_remember() -> None:
    link = server()
    link.receive(frames.settings({frames.HEADER_TABLE_SIZE: 1 << 30}), 0.0)
    assert link._sections._encoder.header_table_size == 4096
    link.receive(frames.settings({frames.HEADER_TABLE_SIZE: 100}), 0.0)
    link.receive(head(1), 0.0)
    link.take()
    link.send_head(1, [(b":status", b"200"), (b"x-a", b"b" * 50)])
    decoder = Decoder()
    ((kind, _, _, payload),) = said(link)
    assert kind == frames.HEADERS
    assert list(decoder.decode(payload, raw=True)) == [(b":status", b"200"), (b"x-a", b"b" * 50)]
    assert decoder.header_table_size == 100


def test_secrets_are_never_put_into_the_table() -> None:
    link = client(0)
    for _ in range(2):
        link.send_head(link.open(), [*GET, (b"authorization", b"Bearer s3cr3t"), (b"cookie", b"k=s3cr3t")])
    assert link.take().count(b"s3cr3t") == 4
    decoder = Decoder()
    link.send_head(link.open(), [(b"authorization", b"Bearer s3cr3t")])
    ((_, _, _, payload),) = said(link)
    assert [field.indexable for field in decoder.decode(payload, raw=True)] == [False]


# floods


@pytest.mark.parametrize(
    ("cheap", "least"),
    [
        pytest.param(frame(frames.PING, 0, 0, bytes(8)), 1_900, id="pings"),
        pytest.param(frame(frames.SETTINGS, 0, 0), 1_900, id="settings"),
        pytest.param(frame(frames.SETTINGS, frames.ACK, 0), 1_900, id="acknowledgements"),
        pytest.param(frame(frames.PRIORITY, 0, 1, bytes(5)), 1_900, id="priorities"),
        pytest.param(frames.window_update(1, 1), 1_900, id="window updates by the byte"),
        pytest.param(frame(frames.DATA, 0, 1), 1_900, id="empty data"),
        pytest.param(frame(frames.DATA, frames.PADDED, 1, b"\0"), 1_900, id="data of padding alone"),
        pytest.param(frame(0xEE, 0, 0), 1_900, id="extensions"),
        pytest.param(frame(frames.GOAWAY, 0, 0, bytes(8)), 190, id="farewells"),
        pytest.param(frame(frames.RST_STREAM, 0, 1, bytes(4)), 190, id="resets of a stream that is over"),
    ],
)
def test_a_flood_ends_the_connection_and_a_habit_does_not(cheap: bytes, least: int) -> None:
    link = server()
    link.receive(head(1), 0.0)
    for number in range(3 * least):  # more, over minutes
        assert not any(isinstance(event, Broken) for event in link.receive(cheap, number * 100 / least))
    link = server()
    link.receive(head(1), 0.0)
    for number in range(10 * least):  # noqa: B007 # read after the loop
        if link.receive(cheap, 0.0)[-1:] == [Broken(Code.ENHANCE_YOUR_CALM, Reason.FLOOD, FLOOD)]:
            break
    assert least <= number <= 2_100


FLOOD = "frames that ask for work and carry nothing"


def test_a_rapid_reset_ends_the_connection() -> None:
    link, encoder = server(), Encoder()
    for number in range(1, 2_000, 2):
        opened = head(number, data=block(GET, encoder))
        if isinstance(link.receive(opened + frames.reset(number, Code.CANCEL), 0.0)[-1], Broken):
            break
    assert 350 < number < 450  # two hundred streams


def test_streams_that_are_answered_may_be_as_many_as_they_like() -> None:
    link, encoder = server(), Encoder()
    for number in range(1, 10_000, 2):
        assert len(link.receive(head(number, flags=5, data=block(GET, encoder)), 0.0)) == 1
        link.send_head(number, [(b":status", b"204")], end=True)
        link.receive(frame(frames.PING, 0, 0, bytes(8)), 0.0)
        link.take()
    assert not link.broken


def test_patience_comes_back() -> None:
    patience = Patience()
    assert patience.spend(Patience.FULL, 0.0)
    assert not patience.spend(1, 0.0)
    assert patience.spend(99, 1.0)
    patience.earn(10**9)
    assert patience.spend(Patience.FULL, 1.0)
    assert not patience.spend(1, 0.5)  # a clock that goes back gives nothing


# laws

_FRAMES = st.builds(
    frame,
    st.integers(0, 12),
    st.integers(0, 255),
    st.integers(0, 9),
    st.one_of(st.binary(max_size=40), st.just(block()), st.just(bytes(8)), st.just(bytes(4))),
)


@settings(max_examples=300, deadline=None)
@given(st.booleans(), st.lists(st.one_of(_FRAMES, st.binary(max_size=30)), max_size=12), st.integers(1, 64))
def test_no_bytes_raise_and_how_they_are_cut_changes_nothing(
    by_client: bool, parts: list[bytes], piece: int
) -> None:
    def read(cut: int) -> tuple[list[Event], bytes]:
        link = server() if by_client else client(2)
        data, events = b"".join(parts), list[Event]()
        for at in range(0, len(data), cut):
            events += link.receive(data[at : at + cut], 0.0)
        for event in events:
            if isinstance(event, Data):
                link.give_back(event.size)
                link.taken(event.stream, len(event.data), keeps_up=True)
        return events, link.take()

    assert read(1 << 20) == read(piece)
