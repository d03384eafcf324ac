"""How an answer is read: what is egressd's refusal, and what got through."""

from __future__ import annotations

import socket
import struct
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.inspector.refusal import Refused, refuse_http
from egressd.policy.reasons import Reason
from egressd.verify import wire
from egressd.verify.network import foreign
from egressd.verify.wire import DnsAnswer, Talk, got_through, is_refusal, parse_dns, plain_address

OWN = ("198.18.0.254", "127.0.0.1")


@pytest.mark.parametrize("reason", list(Reason), ids=lambda reason: reason.value)
@pytest.mark.parametrize("accept", ["*/*", "application/json"])
def test_every_refusal_of_egressds_is_known_as_one(reason: Reason, accept: str) -> None:
    refused = Refused("a" * 28, "sbx-1", ("a", "example"), 443, "GET", accept)
    assert is_refusal(refuse_http(reason, refused).to_http1())
    assert is_refusal(refuse_http(reason, refused).to_http1(head_only=True))


@pytest.mark.parametrize(
    ("talk", "found"),
    [
        pytest.param(Talk("", b"", "ECONNREFUSED"), None, id="no connection"),
        pytest.param(Talk("198.18.0.254", b"", "ECONNRESET"), None, id="a reset by egressd"),
        pytest.param(Talk("198.18.0.254", b"\x15\x03\x03\x00\x02\x02\x70", ""), None, id="an alert"),
        pytest.param(
            Talk("198.18.0.254", b"HTTP/1.1 403 egressd: denied: x\r\n\r\n", ""), None, id="a refusal"
        ),
        pytest.param(Talk("11.0.0.3", b"", ""), "connected from 11.0.0.3", id="another end than ours"),
        pytest.param(
            Talk("198.18.0.254", b"owned\n", ""),
            "an answer of 6 bytes that is not egressd's",
            id="a stranger's answer",
        ),
        pytest.param(
            Talk("198.18.0.254", b"HTTP/1.1 403 Forbidden\r\n\r\n", ""),
            "an answer of 26 bytes that is not egressd's",
            id="a stranger's refusal",
        ),
    ],
)
def test_what_got_through_is_what_did_not_end_at_egressd(talk: Talk, found: str | None) -> None:
    assert got_through(talk, OWN) == found


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("198.18.0.254", "198.18.0.254"),
        ("::ffff:198.18.0.254", "198.18.0.254"),
        ("fe80::1%eth0", "fe80::1"),
        ("2001:2::fe", "2001:2::fe"),
    ],
)
def test_an_end_is_told_without_zone_and_mapping(text: str, plain: str) -> None:
    assert plain_address(text) == plain


ANSWER = bytes.fromhex(
    "56458180000100020000000001610474657374000001000101610474657374000001000100000001000406060606"
)


def test_an_answer_is_read() -> None:
    message = ANSWER + b"\xc0\x0c" + struct.pack("!HHIH", 28, 1, 1, 16) + b"\x26" + bytes(15)
    assert parse_dns(message) == DnsAnswer(0, ((1, b"\6\6\6\6"), (28, b"\x26" + bytes(15))), "")
    assert parse_dns(message).addresses == ["6.6.6.6", "2600::"]


@given(st.binary(max_size=600))
def test_reading_an_answer_never_raises(message: bytes) -> None:
    parse_dns(message).addresses  # noqa: B018 - that it does not raise is the claim


@pytest.mark.parametrize("cut", range(len(ANSWER)))
def test_a_cut_answer_is_none(cut: int) -> None:
    assert parse_dns(ANSWER[:cut]).addresses in ([], ["6.6.6.6"])


@pytest.mark.parametrize(
    ("records", "found"),
    [
        pytest.param((), None, id="nothing"),
        pytest.param(((1, bytes((198, 18, 0, 2))),), None, id="the explaining address"),
        pytest.param(((1, bytes((11, 6, 6, 6))),), "the address 11.6.6.6", id="an address of the world"),
        pytest.param(((16, b"\4data"),), "records of the name itself", id="a text"),
        pytest.param(((5, b"\1a\0"),), "records of the name itself", id="another name"),
    ],
)
def test_an_answer_is_foreign_unless_it_is_egressds(
    records: tuple[tuple[int, bytes], ...], found: str | None
) -> None:
    assert foreign(DnsAnswer(0, records, "")) == found


def test_a_datagram_that_is_not_refused_is_seen() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert wire.udp("127.0.0.1", port, b"x", 0.05) == "sent, and not refused"
    assert wire.udp("127.0.0.1", port, b"x") == "sent as far as a closed port"


@pytest.mark.parametrize(
    ("answer", "secure"),
    [
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\nowned", b"owned", id="what is behind a yes"),
        pytest.param(
            b"HTTP/1.1 403 egressd: denied\r\n\r\n", b"HTTP/1.1 403 egressd: denied\r\n\r\n", id="a no"
        ),
    ],
)
def test_the_answer_to_a_connect_is_what_comes_behind_the_yes(
    answer: bytes, secure: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(2):
                client, _ = server.accept()
                with client:
                    client.recv(4096)
                    client.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        monkeypatch.setattr(wire.WAY, "proxy", (*server.getsockname(), ""))
        talks = wire.by_proxy("a.example", 80, b"data")
        next(talks)
        assert next(talks).received == secure
        thread.join()


def test_the_checksum_is_the_internets() -> None:
    assert wire.checksum(bytes.fromhex("0001f203f4f5f6f7")) == 0x220D  # RFC 1071, section 3
