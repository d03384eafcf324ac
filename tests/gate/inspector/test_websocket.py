"""The WebSocket handshake and the looking at frames: tables, and laws under any cut of any bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.inspector.head import Field
from egressd.gate.inspector.websocket import (
    Agreed,
    FrameCheck,
    Offer,
    check_answer,
    close_frame,
    farewell_code,
    parse_offer,
)
from egressd.policy.reasons import Reason

KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
ACCEPT = b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
"""The example of RFC 6455 §1.3."""

ASKED: dict[bytes, bytes] = {
    b"Host": b"a.example",
    b"Upgrade": b"websocket",
    b"Connection": b"keep-alive, Upgrade",
    b"Sec-WebSocket-Key": KEY,
    b"Sec-WebSocket-Version": b"13",
}
ANSWERED: dict[bytes, bytes] = {
    b"Upgrade": b"WebSocket",
    b"Connection": b"upgrade",
    b"Sec-WebSocket-Accept": ACCEPT,
}


def fields(base: dict[bytes, bytes], **changes: bytes | None) -> tuple[Field, ...]:
    """The fields with some changed, added or (None) left out; names with _ for -."""
    changed = {name.replace("_", "-").encode(): value for name, value in changes.items()}
    return tuple((name, value) for name, value in (base | changed).items() if value is not None)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        pytest.param({}, None, id="as browsers send it"),
        pytest.param({"Connection": b"keep-alive"}, "Connection", id="Connection without upgrade"),
        pytest.param({"Sec_WebSocket_Version": b"12"}, "version", id="another version"),
        pytest.param({"Sec_WebSocket_Version": None}, "version", id="no version"),
        pytest.param({"Sec_WebSocket_Key": None}, "key", id="no key"),
        pytest.param({"Sec_WebSocket_Key": b"AAAA"}, "key", id="a key of three bytes"),
        pytest.param({"Sec_WebSocket_Key": b"!" * 24}, "key", id="a key that is no base64"),
        pytest.param({"Sec_WebSocket_Protocol": b"a b"}, "subprotocol", id="a subprotocol with a space"),
    ],
)
def test_what_a_client_must_ask_for(changes: dict[str, bytes | None], problem: str | None) -> None:
    offer = parse_offer("GET", fields(ASKED, **changes))
    if problem is None:
        assert isinstance(offer, Offer)
    else:
        assert isinstance(offer, str)
        assert problem in offer


def test_only_get_begins_a_websocket() -> None:
    assert isinstance(parse_offer("POST", fields(ASKED)), str)


def test_a_key_said_twice_is_none() -> None:
    assert isinstance(parse_offer("GET", (*fields(ASKED), (b"sec-websocket-key", KEY))), str)


OFFER = Offer(KEY, frozenset({b"chat", b"v2"}), frozenset({b"permessage-deflate"}))


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        pytest.param({}, Agreed(extended=False), id="plain"),
        pytest.param({"Sec_WebSocket_Protocol": b"v2"}, Agreed(extended=False), id="an offered subprotocol"),
        pytest.param(
            {"Sec_WebSocket_Extensions": b"permessage-deflate; server_max_window_bits=10"},
            Agreed(extended=True),
            id="an offered extension",
        ),
        pytest.param({"Sec_WebSocket_Accept": None}, "key", id="no proof"),
        pytest.param({"Sec_WebSocket_Accept": ACCEPT[:-2] + b"1="}, "key", id="a wrong proof"),
        pytest.param({"Upgrade": b"h2c"}, "something else", id="another protocol"),
        pytest.param({"Connection": None}, "something else", id="no Connection"),
        pytest.param({"Sec_WebSocket_Protocol": b"v3"}, "subprotocol", id="a subprotocol nobody asked for"),
        pytest.param({"Sec_WebSocket_Protocol": b"v2, chat"}, "subprotocol", id="two subprotocols"),
        pytest.param({"Sec_WebSocket_Extensions": b"mux"}, "extension", id="an extension nobody asked for"),
    ],
)
def test_what_a_server_may_answer(changes: dict[str, bytes | None], outcome: Agreed | str) -> None:
    answer = check_answer(OFFER, fields(ANSWERED, **changes))
    if isinstance(outcome, Agreed):
        assert answer == outcome
    else:
        assert isinstance(answer, str)
        assert outcome in answer


def frame(
    opcode: int, payload: bytes = b"", *, final: bool = True, masked: bool = True, bits: int = 0
) -> bytes:
    size = len(payload)
    short = size if size < 126 else 126 if size < 65536 else 127
    wide = {126: 2, 127: 8}.get(short, 0)
    head = bytes(((0x80 if final else 0) | bits | opcode, (0x80 if masked else 0) | short))
    return head + (size.to_bytes(wide) if wide else b"") + (b"abcd" if masked else b"") + payload


GOOD = {
    "a text": frame(1, b"hello"),
    "an empty one": frame(2),
    "fragments with a ping between": frame(1, b"a", final=False) + frame(9, b"x") + frame(0, b"b"),
    "126 bytes": frame(2, b"x" * 126),
    "65,535 bytes": frame(2, b"x" * 65535),
    "65,536 bytes": frame(2, b"x" * 65536),
    "a close behind a message": frame(1, b"bye") + frame(8, b"\x03\xe8"),
    "ten thousand fragments": frame(1, b"a", final=False) + frame(0, b"a", final=False) * 9_999 + frame(0),
}
BAD = {
    "not masked": (frame(1, b"a", masked=False), "masked"),
    "reserved bits": (frame(1, b"a", bits=0x40), "reserved bits"),
    "a reserved opcode": (frame(3, b"a"), "opcode"),
    "a reserved control opcode": (frame(0xB), "opcode"),
    "a fragmented ping": (frame(9, final=False), "control"),
    "a long ping": (frame(9, b"x" * 126), "control"),
    "a fragment of nothing": (frame(0, b"a"), "fragment"),
    "a message inside another": (frame(1, b"a", final=False) + frame(1, b"b"), "fragment"),
    "a length not written shortest": (b"\x81\xfe\x00\x05abcdhello", "length"),
    "a long length not written shortest": (b"\x81\xff" + (65535).to_bytes(8) + b"abcd", "length"),
    "a length with its highest bit set": (b"\x82\xff" + (1 << 63).to_bytes(8) + b"abcd", "length"),
    "something after a close": (frame(8) + frame(1, b"a"), "Close"),
}


@pytest.mark.parametrize("data", GOOD.values(), ids=GOOD)
@pytest.mark.parametrize("piece", [1, 3, 4096, 1 << 20])
def test_good_frames_pass_however_they_are_cut(data: bytes, piece: int) -> None:
    check = FrameCheck(masked=True, extended=False)
    for at in range(0, len(data), piece):
        assert check.feed(data[at : at + piece]) is None
    assert check.between


@pytest.mark.parametrize(("data", "problem"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("piece", [1, 4096])
def test_bad_frames_are_refused_however_they_are_cut(data: bytes, problem: str, piece: int) -> None:
    check = FrameCheck(masked=True, extended=False)
    found = [check.feed(data[at : at + piece]) for at in range(0, len(data), piece)]
    (said,) = [text for text in found if text is not None][:1]
    assert problem in said


def test_reserved_bits_pass_where_an_extension_was_agreed_on() -> None:
    assert FrameCheck(masked=True, extended=True).feed(frame(1, b"a", bits=0x40)) is None


def test_a_frame_of_an_exabyte_costs_nothing() -> None:
    check = FrameCheck(masked=False, extended=False)
    assert check.feed(b"\x82\x7f" + (1 << 60).to_bytes(8)) is None
    for _ in range(100):
        assert check.feed(b"x" * 65536) is None
    assert not check.between


@given(st.binary(max_size=300), st.integers(1, 40))
def test_any_bytes_are_read_the_same_however_they_are_cut(data: bytes, piece: int) -> None:
    whole, cut = FrameCheck(masked=True, extended=True), FrameCheck(masked=True, extended=True)
    verdict = whole.feed(data)
    pieces = [cut.feed(data[at : at + piece]) for at in range(0, len(data), piece)]
    assert next((text for text in pieces if text is not None), None) == verdict


@given(
    st.binary(max_size=60), st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=40)), max_size=6)
)
def test_the_handshake_is_total(method: bytes, listed: list[Field]) -> None:
    parse_offer(method.decode("latin-1"), tuple(listed))
    check_answer(OFFER, tuple(listed))


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (Reason.POLICY_CHANGED, 1008),
        (Reason.REVOKED, 1008),
        (Reason.SHUTDOWN, 1012),
        (Reason.BAD_FRAMING, 1002),
        (Reason.IDLE_TIMEOUT, 1001),
    ],
)
def test_a_client_is_told_why(reason: Reason, code: int) -> None:
    told = close_frame(farewell_code(reason), "why")
    assert told == b"\x88\x05" + code.to_bytes(2) + b"why"
    assert FrameCheck(masked=False, extended=False).feed(told) is None


def test_a_close_frame_is_never_too_long() -> None:
    assert len(close_frame(1008, "x" * 500)) == 2 + 125
