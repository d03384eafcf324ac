"""The ClientHello parser: real hellos however they are cut, malformed ones by name, and never an
exception."""

from __future__ import annotations

import os
import ssl
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.tls.hello import (
    MAX_HANDSHAKE,
    MAX_WIRE,
    BadHello,
    ClientHello,
    HelloReader,
    NeedMore,
    looks_like_tls,
    parse_hello,
)


def real_hello(
    name: str | None = "api.example.com",
    alpn: tuple[str, ...] = (),
    lowest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2,
    highest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
) -> bytes:
    """Return what Python's own client says first."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = name is not None
    context.minimum_version, context.maximum_version = lowest, highest
    if alpn:
        context.set_alpn_protocols(list(alpn))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def vector(prefix: int, data: bytes) -> bytes:
    return len(data).to_bytes(prefix) + data


def extension(kind: int, data: bytes) -> bytes:
    return kind.to_bytes(2) + vector(2, data)


def server_name(name: bytes, kind: int = 0) -> bytes:
    return extension(0, vector(2, bytes([kind]) + vector(2, name)))


def body(
    *extensions: bytes,
    version: bytes = b"\x03\x03",
    session: bytes = b"s" * 32,
    suites: bytes = b"\x13\x01\x13\x02",
    compression: bytes = b"\x00",
    block: bytes | None = None,
) -> bytes:
    head = version + b"r" * 32 + vector(1, session) + vector(2, suites) + vector(1, compression)
    return head + (vector(2, b"".join(extensions)) if block is None else block)


def records(handshake: bytes, size: int = 2**14) -> bytes:
    """Cut handshake bytes into records of `size` bytes each."""
    return b"".join(
        b"\x16\x03\x01" + vector(2, handshake[at : at + size]) for at in range(0, len(handshake), size)
    )


def hello(*extensions: bytes, **parts: bytes) -> bytes:
    return records(b"\x01" + vector(3, body(*extensions, **parts)))


def recut(wire: bytes, size: int) -> bytes:
    """Return a one-record hello cut into records of `size` bytes."""
    assert int.from_bytes(wire[3:5]) == len(wire) - 5
    return records(wire[5:], size)


ALPN = extension(16, vector(2, vector(1, b"h2") + vector(1, b"http/1.1")))
VERSIONS = extension(43, vector(1, b"\x03\x04\x03\x03"))
ECH_OUTER = extension(
    0xFE0D, b"\x00" + b"\x00\x01\x00\x01" + b"\x07" + vector(2, b"k" * 32) + vector(2, b"x" * 144)
)
PSK = extension(41, b"anything")
POST_QUANTUM = extension(
    51, vector(2, b"\x11\xec" + vector(2, b"q" * 1216) + b"\x00\x1d" + vector(2, b"k" * 32))
)

REAL = {
    "plain": real_hello(),
    "without a server name": real_hello(None),
    "with protocols": real_hello(alpn=("h2", "http/1.1")),
    "TLS 1.2 only": real_hello(highest=ssl.TLSVersion.TLSv1_2),
    "TLS 1.3 only": real_hello(lowest=ssl.TLSVersion.TLSv1_3),
    "the longest name": real_hello("a" * 63 + "." + "b" * 63 + "." + "c" * 63 + "." + "d" * 61),
    "post-quantum size": hello(server_name(b"api.example.com"), ALPN, VERSIONS, POST_QUANTUM),
}


@pytest.mark.parametrize("wire", REAL.values(), ids=REAL.keys())
class TestRealHellos:
    def test_whole(self, wire: bytes) -> None:
        found = parse_hello(wire)
        assert isinstance(found, ClientHello)
        assert found.size == len(wire)

    def test_byte_by_byte(self, wire: bytes) -> None:
        reader, buffer = HelloReader(), bytearray()
        for byte in wire[:-1]:
            buffer.append(byte)
            assert reader.read(buffer) == NeedMore()
        buffer.append(wire[-1])
        assert reader.read(buffer) == parse_hello(wire)

    def test_with_junk_behind_it(self, wire: bytes) -> None:
        assert parse_hello(wire + b"\x16\x03\x03\xff\xff junk") == parse_hello(wire)
        assert parse_hello(bytearray(wire + wire)) == parse_hello(wire)

    def test_cut_at_every_offset(self, wire: bytes) -> None:
        assert {parse_hello(wire[:at]) for at in range(len(wire))} == {NeedMore()}

    @pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 50, 1400])
    def test_in_small_records(self, wire: bytes, size: int) -> None:
        whole, cut = parse_hello(wire), parse_hello(recut(wire, size))
        assert isinstance(whole, ClientHello)
        assert isinstance(cut, ClientHello)
        assert cut.size == len(recut(wire, size))
        assert (cut.sni, cut.alpn, cut.versions) == (whole.sni, whole.alpn, whole.versions)

    def test_every_byte_changed_is_a_value(self, wire: bytes) -> None:
        for at in range(len(wire)):
            for change in (0x01, 0x80, 0xFF):
                changed = bytearray(wire)
                changed[at] ^= change
                assert isinstance(parse_hello(changed), ClientHello | NeedMore | BadHello)


def test_every_field_is_read() -> None:
    early = extension(42, b"")
    wire = hello(server_name(b"API.example.com"), ALPN, VERSIONS, ECH_OUTER, early, PSK)
    assert parse_hello(wire + b"0-RTT") == ClientHello(
        sni=b"API.example.com",
        alpn=(b"h2", b"http/1.1"),
        versions=(0x0304, 0x0303),
        ech=True,
        psk=True,
        early_data=True,
        size=len(wire),
    )


def test_what_python_says_is_what_is_read() -> None:
    found = parse_hello(real_hello("registry.example.com", alpn=("h2", "http/1.1")))
    assert isinstance(found, ClientHello)
    assert found.sni == b"registry.example.com"
    assert found.alpn == (b"h2", b"http/1.1")
    assert found.versions == (0x0304, 0x0303)
    assert (found.ech, found.psk, found.early_data) == (False, False, False)


def test_a_hello_without_extensions_offers_its_legacy_version() -> None:
    found = parse_hello(hello(block=b""))
    assert isinstance(found, ClientHello)
    assert found.sni is None
    assert found.versions == (0x0303,)


def test_the_server_name_is_kept_raw() -> None:
    for name in (b"EVIL.test.", b"a b", b"\xff\x00*", b"127.0.0.1"):
        found = parse_hello(hello(server_name(name)))
        assert isinstance(found, ClientHello)
        assert found.sni == name


def test_an_inner_ech_marker_hides_nothing() -> None:
    found = parse_hello(hello(extension(0xFE0D, b"\x01")))
    assert isinstance(found, ClientHello)
    assert not found.ech


def record_of(length: int, content: bytes = b"", kind: int = 22, version: bytes = b"\x03\x01") -> bytes:
    return bytes([kind]) + version + length.to_bytes(2) + content


BAD = {
    "HTTP": (b"GET / HTTP/1.1\r\n", "not_tls"),
    "SSH": (b"SSH-2.0-x\r\n", "not_tls"),
    "a zero byte": (b"\x00", "not_tls"),
    "an alert first": (b"\x15\x03\x01\x00\x02\x01\x00", "not_tls"),
    "a handshake byte and then anything": (b"\x16\x04", "not_tls"),
    "SSLv2 hello with an SSLv2 version": (b"\x80\x2e\x01\x00\x02\x00\x15", "sslv2"),
    "SSLv2 hello that offers TLS": (b"\x80\x2e\x01\x03\x01\x00\x15", "sslv2"),
    "high bytes": (b"\xff\xff\xff\xff\xff", "not_tls"),
    "an unknown record version": (b"\x16\x03\x05", "record_version"),
    "another record version later": (record_of(1, b"\x01") + b"\x16\x02\x00", "record_version"),
    "an empty record": (record_of(0), "record_length"),
    "an empty record later": (record_of(1, b"\x01") + record_of(0), "record_length"),
    "a record one byte too long": (record_of(2**14 + 1), "record_length"),
    "a record length of 0xffff": (record_of(0xFFFF), "record_length"),
    "an alert within the hello": (record_of(1, b"\x01") + record_of(2, kind=21), "record_type"),
    "a ServerHello": (record_of(100, b"\x02"), "not_client_hello"),
    "an empty hello": (record_of(4, b"\x01\x00\x00\x00"), "hello_length"),
    "a hello one byte too long": (record_of(4, b"\x01" + (MAX_HANDSHAKE + 1).to_bytes(3)), "hello_length"),
    "more behind the hello in its record": (
        records(b"\x01" + vector(3, body()) + b"\x14"),
        "record_trailing",
    ),
    "more announced than the hello has": (record_of(100, b"\x01\x00\x00\x10"), "record_trailing"),
    "a hello of two bytes": (records(b"\x01" + vector(3, b"\x03\x03")), "hello_length"),
    "SSL 2 within": (hello(version=b"\x02\x00"), "hello_version"),
    "a session id of 33 bytes": (hello(session=b"s" * 33), "session_id"),
    "no cipher suites": (hello(suites=b""), "cipher_suites"),
    "an odd number of cipher suite bytes": (hello(suites=b"\x13\x01\x13"), "cipher_suites"),
    "no null compression": (hello(compression=b"\x01"), "compression"),
    "no compression at all": (hello(compression=b""), "compression"),
    "an extension block of one byte": (hello(block=b"\x00"), "extensions"),
    "an extension block past the end": (hello(block=b"\x00\x05"), "extensions"),
    "bytes behind the extensions": (hello(block=b"\x00\x00!"), "extensions"),
    "half an extension": (hello(b"\x00\x00\x00"), "extensions"),
    "an extension past the end": (hello(b"\x00\x10\x00\x09abc"), "extensions"),
    "two server_name extensions": (
        hello(server_name(b"a.test"), server_name(b"a.test")),
        "duplicate_extension",
    ),
    "two unknown extensions": (hello(extension(4242, b""), extension(4242, b"x")), "duplicate_extension"),
    "an empty server_name": (hello(extension(0, b"")), "server_name"),
    "an empty server name list": (hello(extension(0, vector(2, b""))), "server_name"),
    "an empty host_name": (hello(server_name(b"")), "server_name"),
    "another type of server name": (hello(server_name(b"a.test", kind=1)), "server_name"),
    "two names": (
        hello(extension(0, vector(2, b"\x00" + vector(2, b"a.test") + b"\x00" + vector(2, b"b.test")))),
        "server_name",
    ),
    "a byte behind the names": (
        hello(extension(0, vector(2, b"\x00" + vector(2, b"a.test")) + b"!")),
        "server_name",
    ),
    "an empty protocol list": (hello(extension(16, vector(2, b""))), "alpn"),
    "an empty protocol": (hello(extension(16, vector(2, b"\x00"))), "alpn"),
    "a protocol past the end": (hello(extension(16, vector(2, b"\x05h2"))), "alpn"),
    "no versions": (hello(extension(43, b"\x00")), "supported_versions"),
    "half a version": (hello(extension(43, b"\x03\x03\x04\x03")), "supported_versions"),
    "early data with content": (hello(extension(42, b"x")), "early_data"),
    "an extension behind pre_shared_key": (hello(PSK, ALPN), "psk"),
    "an ECH of an unknown type": (hello(extension(0xFE0D, b"\x02")), "ech"),
    "an empty ECH": (hello(extension(0xFE0D, b"")), "ech"),
    "an outer ECH without payload": (hello(extension(0xFE0D, b"\x00" * 10)), "ech"),
    "an inner ECH with content": (hello(extension(0xFE0D, b"\x01x")), "ech"),
}


@pytest.mark.parametrize(("wire", "detail"), BAD.values(), ids=BAD.keys())
class TestBadHellos:
    def test_the_detail_names_the_fault(self, wire: bytes, detail: str) -> None:
        assert parse_hello(wire) == BadHello(detail)  # type: ignore[arg-type] # the table holds plain strings

    def test_byte_by_byte_the_verdict_is_the_same_and_stays(self, wire: bytes, detail: str) -> None:
        reader, buffer = HelloReader(), bytearray()
        outcomes = []
        for byte in wire + b"junk":
            buffer.append(byte)
            outcomes.append(reader.read(buffer))
        assert outcomes[-1] == BadHello(detail)  # type: ignore[arg-type] # the table holds plain strings
        assert {type(outcome) for outcome in outcomes} <= {NeedMore, BadHello}


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (b"", None),
        (b"\x16", None),
        (b"\x16\x03", True),
        (b"\x16\x03\x01\x02\x00\x01", True),
        (b"\x16\x02", False),
        (b"GET / HTTP/1.1", False),
        (b"\x05\x01\x00", False),
        (b"\x80\x2e", None),
        (b"\x80\x2e\x01\x00\x02", True),
        (b"\x80\x2e\x02\x00\x02", False),
        (b"\xff\xff\xff\xff\xff", False),
    ],
)
def test_looks_like_tls(first: bytes, expected: bool | None) -> None:
    assert looks_like_tls(first) is expected


def test_the_longest_hello_in_the_smallest_records_is_read_in_linear_time() -> None:
    padding = extension(21, b"\x00" * (MAX_HANDSHAKE - len(body(server_name(b"a.test"))) - 4))
    handshake = b"\x01" + vector(3, body(server_name(b"a.test"), padding))
    wire = records(handshake, 1)
    assert len(wire) == MAX_WIRE
    reader, buffer, begin = HelloReader(), bytearray(), time.process_time()
    for at in range(0, len(wire), 3):
        buffer += wire[at : at + 3]
        found = reader.read(buffer)
    assert isinstance(found, ClientHello)
    assert found.sni == b"a.test"
    assert time.process_time() - begin < 5  # the square of 400,000 would be minutes


@given(st.binary(max_size=600))
def test_any_bytes_are_a_value(data: bytes) -> None:
    assert isinstance(parse_hello(data), ClientHello | NeedMore | BadHello)


@given(st.binary(max_size=300), st.integers(1, 300))
def test_any_hello_body_is_a_value_and_cutting_never_changes_it(data: bytes, size: int) -> None:
    handshake = b"\x01" + vector(3, data)
    whole, cut = parse_hello(records(handshake)), parse_hello(records(handshake, size))
    assert isinstance(whole, ClientHello | BadHello)
    assert type(whole) is type(cut)


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 16, 41, 42, 43, 51, 0xFE0D, 4242]), st.binary(max_size=40)), max_size=6
    )
)
def test_any_extensions_are_a_value(pairs: list[tuple[int, bytes]]) -> None:
    found = parse_hello(hello(*(extension(kind, data) for kind, data in pairs)))
    assert isinstance(found, ClientHello | BadHello)
    if isinstance(found, ClientHello):
        assert len({kind for kind, _ in pairs}) == len(pairs)


@given(st.binary(min_size=1, max_size=255))
def test_any_server_name_comes_back(name: bytes) -> None:
    found = parse_hello(hello(server_name(name)))
    assert isinstance(found, ClientHello)
    assert found.sni == name


def test_random_bytes_behind_a_true_beginning_never_raise() -> None:
    for _ in range(300):
        assert isinstance(
            parse_hello(REAL["plain"][:60] + os.urandom(200)), ClientHello | NeedMore | BadHello
        )
