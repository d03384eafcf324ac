"""The first bytes say which protocol arrives, whole or one at a time."""

import asyncio
import socket
import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.door.arrival import Http, Recogniser, Tls, Unreadable, first_bytes, original_destination
from egressd.policy.reasons import Reason


def recognise(data: bytes) -> object:
    return Recogniser().read(data)


def hello(name: str = "api.example.com") -> bytes:
    outgoing = ssl.MemoryBIO()
    context = ssl.create_default_context()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\n", id="origin form"),
        pytest.param(b"get / HTTP/1.1\r\n", id="lower case is HTTP and the inspector refuses it"),
        pytest.param(b"OPTIONS * HTTP/1.1\r\n", id="asterisk form"),
        pytest.param(b"GET http://a.test/ HTTP/1.1\r\n", id="absolute form"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="HTTP-12 h2c preface goes to the inspector"),
        pytest.param(b"CONNECT a.test:443 HTTP/1.1\r\n", id="HTTP-10 CONNECT goes to the inspector"),
    ],
)
def test_http_is_recognised_whole_and_bytewise(data: bytes) -> None:
    assert isinstance(recognise(data), Http)
    for end in range(len(data)):
        assert recognise(data[:end]) is None or isinstance(recognise(data[:end]), Http), data[:end]


def test_a_hello_is_recognised_only_when_it_is_whole() -> None:
    data = hello()
    for end in range(len(data)):
        assert recognise(data[:end]) is None
    bytewise = Recogniser()
    assert [bytewise.read(data[n : n + 1]) for n in range(len(data) - 1)] == [None] * (len(data) - 1)
    arrival = bytewise.read(data[-1:])
    assert isinstance(arrival, Tls)
    assert arrival.data == data
    assert arrival == recognise(data)
    assert arrival.hello.sni == b"api.example.com"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", Reason.UNKNOWN_PROTOCOL, id="ENG-03 SSH"),
        pytest.param(b"EHLO x\r\n", Reason.UNKNOWN_PROTOCOL, id="HTTP-22 SMTP"),
        pytest.param(b"\x05\x01\x00", Reason.UNKNOWN_PROTOCOL, id="HTTP-22 SOCKS5"),
        pytest.param(b"\x04\x01\x00\x50", Reason.UNKNOWN_PROTOCOL, id="HTTP-22 SOCKS4"),
        pytest.param(b"\x00\x01\x02\x03", Reason.UNKNOWN_PROTOCOL, id="ENG-03 binary"),
        pytest.param(b"\x16\x03\x01\xff\xff" + b"\0" * 20, Reason.BAD_TLS, id="TLS-22 record length"),
        pytest.param(b"GET\thttp://a/ HTTP/1.1\r\n", Reason.UNKNOWN_PROTOCOL, id="HTTP-20 tabs"),
        pytest.param(b"A" * 500, Reason.UNKNOWN_PROTOCOL, id="a method without an end"),
    ],
)
def test_what_is_neither_is_unreadable(data: bytes, reason: Reason) -> None:
    arrival = recognise(data)
    assert isinstance(arrival, Unreadable)
    assert arrival.reason is reason


@given(st.binary(max_size=600))
def test_no_bytes_make_it_raise(data: bytes) -> None:
    recognise(data)
    recognise(b"\x16\x03\x01" + data)


def run_first_bytes(sent: bytes, *, close: bool, timeout: float) -> object:
    async def body() -> object:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.sendall(sent)
            if close:
                theirs.shutdown(socket.SHUT_WR)
            return await first_bytes(ours, b"", timeout)

    return asyncio.run(body())


@pytest.mark.parametrize(
    ("sent", "close", "reason"),
    [
        pytest.param(b"", False, Reason.HEAD_TIMEOUT, id="DOS-01 silence"),
        pytest.param(b"GE", False, Reason.HEAD_TIMEOUT, id="DOS-01 half a method"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01", False, Reason.HEAD_TIMEOUT, id="half a hello"),
        pytest.param(b"", True, Reason.CLIENT_CLOSED, id="closed without a byte"),
        pytest.param(b"GE", True, Reason.UNKNOWN_PROTOCOL, id="closed in the first word"),
    ],
)
def test_the_wait_for_first_bytes_ends(sent: bytes, close: bool, reason: Reason) -> None:
    arrival = run_first_bytes(sent, close=close, timeout=0.05)
    assert isinstance(arrival, Unreadable)
    assert arrival.reason is reason


def test_a_connection_to_the_listener_itself_has_no_original_destination() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert original_destination(accepted) is None
