"""Read a TLS ClientHello from the first bytes of a connection, strictly and without answering.

What is read here decides where the bytes go, so a hello that two parsers could read in two ways is refused:
every vector fills its frame exactly, no extension comes twice, nothing follows the hello in its last record.
The wire may be cut anywhere, down to records of one byte; the records are joined before anything is judged,
or a fragmented hello would hide its server name.

No function here raises on bytes. RFC 8446 sections 4.1.2, 4.2 and 5.1; RFC 6066 section 3; RFC 7301 section
3.1; RFC 9849.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

MAX_HANDSHAKE: Final = 64 * 1024
"""The longest hello that is read, in bytes, without its 4-byte handshake header."""

MAX_WIRE: Final = 6 * (4 + MAX_HANDSHAKE)
"""The most wire bytes such a hello can take: records of one byte cost five more each."""

MAX_RECORD: Final = 2**14
"""A plaintext record (RFC 8446 section 5.1); the 256 bytes more are for encrypted ones."""

type Detail = Literal[
    "not_tls",
    "sslv2",
    "record_type",
    "record_version",
    "record_length",
    "record_trailing",
    "not_client_hello",
    "hello_length",
    "hello_version",
    "session_id",
    "cipher_suites",
    "compression",
    "extensions",
    "duplicate_extension",
    "server_name",
    "alpn",
    "supported_versions",
    "early_data",
    "psk",
    "ech",
]

_HANDSHAKE: Final = 22
_CLIENT_HELLO: Final = 1
_SERVER_NAME: Final = 0
_ALPN: Final = 16
_PRE_SHARED_KEY: Final = 41
_EARLY_DATA: Final = 42
_SUPPORTED_VERSIONS: Final = 43
_ECH: Final = 0xFE0D


@dataclass(frozen=True, slots=True)
class ClientHello:
    """What a client says before anything is encrypted; all of it is a claim.

    `sni` is the raw host_name, not judged and not normalised; None when the extension is absent. `versions`
    are the offered ones as on the wire (0x0303 is TLS 1.2), `legacy_version` alone for a client without
    supported_versions. `size` counts the wire bytes that the hello took, record headers included: what lies
    behind it is `data[size:]`.
    """

    sni: bytes | None
    alpn: tuple[bytes, ...]
    versions: tuple[int, ...]
    ech: bool
    psk: bool
    early_data: bool
    size: int


@dataclass(frozen=True, slots=True)
class NeedMore:
    """The bytes are the beginning of a possible hello."""


@dataclass(frozen=True, slots=True)
class BadHello:
    """No more bytes can make a hello of this; `detail` is for the record.

    `not_tls` and `sslv2` are said of the first bytes alone; any other detail means malformed TLS.
    """

    detail: Detail


type Outcome = ClientHello | NeedMore | BadHello

_NEED_MORE: Final = NeedMore()


def looks_like_tls(first: bytes | bytearray) -> bool | None:
    """Tell whether the first bytes are for `parse_hello` (True) or not (False); None when they are too few.

    An SSLv2 hello counts as TLS: its refusal is `bad_tls`, and no other protocol of ours begins with such a
    byte.
    """
    if not first:
        return None
    if first[0] == _HANDSHAKE:
        return None if len(first) < 2 else first[1] == 3
    if first[0] & 0x80:
        return None if len(first) < 5 else _is_sslv2(first)
    return False


def parse_hello(data: bytes | bytearray) -> Outcome:
    """Read one ClientHello from the beginning of `data`, which may be cut or have anything behind it."""
    return HelloReader().read(data)


class HelloReader:
    """Reads a hello from a buffer that grows, each byte once.

    A caller that got NeedMore appends to the same buffer and reads again; starting over for every byte of a
    drip-fed hello would cost the square of its length.
    """

    __slots__ = ("_at", "_handshake", "_outcome")

    def __init__(self) -> None:
        self._handshake = bytearray()
        self._at = 0
        self._outcome: Outcome = _NEED_MORE

    def read(self, wire: bytes | bytearray) -> Outcome:
        """Read on in `wire`, of which everything seen before is the beginning; a final outcome stays."""
        if isinstance(self._outcome, NeedMore):
            self._outcome = self._read(wire)
        return self._outcome

    def _read(self, wire: bytes | bytearray) -> Outcome:
        while True:
            self._skim(wire)
            if self._at == len(wire):
                return _NEED_MORE
            if (problem := self._judge_record(wire)) is not None:
                return BadHello(problem)
            begin = self._at + 5
            if len(wire) < begin:
                return _NEED_MORE
            length = int.from_bytes(wire[self._at + 3 : begin])
            # The handshake header is judged as soon as it is there, so that nobody waits for the rest of what
            # is refused anyhow.
            header = bytes(self._handshake[:4])
            header += bytes(wire[begin : begin + min(length, 4 - len(header))])
            have = len(self._handshake) + length
            if (problem := _judge_handshake(header, have)) is not None:
                return BadHello(problem)
            if len(wire) < begin + length:
                return _NEED_MORE
            self._handshake += wire[begin : begin + length]
            self._at = begin + length
            if len(header) == 4 and have == 4 + int.from_bytes(header[1:]):
                return _parse_body(bytes(self._handshake[4:]), self._at)

    def _skim(self, wire: bytes | bytearray) -> None:
        """Take whole, faultless records that do not end the hello; 65,000 of one byte must not hold up the
        loop."""
        handshake, at, end = self._handshake, self._at, len(wire)
        if len(handshake) < 4:
            return
        total = 4 + int.from_bytes(handshake[1:4])
        while end - at >= 5 and wire[at] == _HANDSHAKE and wire[at + 1] == 3 and wire[at + 2] <= 4:
            length = wire[at + 3] << 8 | wire[at + 4]
            beyond = at + 5 + length
            if not 0 < length <= MAX_RECORD or beyond > end or len(handshake) + length >= total:
                break
            handshake += wire[at + 5 : beyond]
            at = beyond
        self._at = at

    def _judge_record(self, wire: bytes | bytearray) -> Detail | None:
        """Return what is wrong with the (perhaps incomplete) record header at the reading position."""
        first = self._at == 0
        head = wire[self._at : self._at + 5]
        if head[0] != _HANDSHAKE:
            if not first:
                return "record_type"
            if not head[0] & 0x80:
                return "not_tls"
            if len(head) < 5:
                return None
            return "sslv2" if _is_sslv2(head) else "not_tls"
        if len(head) > 1 and head[1] != 3:
            return "not_tls" if first else "record_version"
        if len(head) > 2 and head[2] > 4:
            return "record_version"
        # RFC 8446 section 5.1: no empty handshake fragments.
        if len(head) == 5 and not 0 < int.from_bytes(head[3:]) <= MAX_RECORD:
            return "record_length"
        return None


def _is_sslv2(head: bytes | bytearray) -> bool:
    """Tell whether five bytes begin an SSLv2 CLIENT-HELLO (RFC 6101 appendix E): length, type 1, version."""
    return bool(head[0] & 0x80) and head[2] == 1 and (head[3] == 3 or head[3:5] == b"\x00\x02")


def _judge_handshake(header: bytes, have: int) -> Detail | None:
    """Return what is wrong with up to 4 bytes of handshake header, when the records hold `have` bytes."""
    if header and header[0] != _CLIENT_HELLO:
        return "not_client_hello"
    if len(header) < 4:
        return None
    length = int.from_bytes(header[1:])
    if not 0 < length <= MAX_HANDSHAKE:
        return "hello_length"
    # Keys change after a ClientHello, so nothing may share its last record (RFC 8446 section 5.1).
    return "record_trailing" if have > 4 + length else None


class _ShortError(Exception):
    """A vector does not fill its frame; never leaves this module."""


class _Cursor:
    """Reads big-endian integers and prefixed vectors; raises _ShortError instead of reading past the end."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def done(self) -> bool:
        return self._at == len(self._data)

    def take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise _ShortError
        piece = self._data[self._at : end]
        self._at = end
        return piece

    def integer(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, prefix: int) -> bytes:
        return self.take(self.integer(prefix))


def _parse_body(body: bytes, size: int) -> ClientHello | BadHello:
    """Parse a whole ClientHello body; `size` is what it took on the wire."""
    cursor = _Cursor(body)
    detail: Detail = "hello_length"
    try:
        legacy = cursor.integer(2)
        if legacy >> 8 != 3:
            return BadHello("hello_version")
        cursor.take(32)
        detail = "session_id"
        if len(cursor.vector(1)) > 32:
            return BadHello(detail)
        detail = "cipher_suites"
        if len(suites := cursor.vector(2)) < 2 or len(suites) % 2:
            return BadHello(detail)
        detail = "compression"
        if 0 not in cursor.vector(1):  # the null method MUST be offered (RFC 5246 section 7.4.1.2)
            return BadHello(detail)
        detail = "extensions"
        # A hello may end here (RFC 5246); after an extension block it must.
        block = b"" if cursor.done else cursor.vector(2)
    except _ShortError:
        return BadHello(detail)
    if not cursor.done:
        return BadHello("extensions")
    return _parse_extensions(block, legacy, size)


def _parse_extensions(block: bytes, legacy: int, size: int) -> ClientHello | BadHello:
    """Parse the extension block: unknown types are passed over, none may come twice (RFC 8446 4.2)."""
    found: dict[int, bytes] = {}
    cursor = _Cursor(block)
    try:
        while not cursor.done:
            if _PRE_SHARED_KEY in found:  # it MUST be the last (RFC 8446 section 4.2.11)
                return BadHello("psk")
            kind = cursor.integer(2)
            value = cursor.vector(2)
            if kind in found:
                return BadHello("duplicate_extension")
            found[kind] = value
    except _ShortError:
        return BadHello("extensions")
    detail: Detail = "extensions"
    try:
        detail = "server_name"
        sni = _server_name(found[_SERVER_NAME]) if _SERVER_NAME in found else None
        detail = "alpn"
        alpn = _protocols(found[_ALPN]) if _ALPN in found else ()
        detail = "supported_versions"
        versions = _versions(found[_SUPPORTED_VERSIONS]) if _SUPPORTED_VERSIONS in found else (legacy,)
        detail = "early_data"
        if found.get(_EARLY_DATA):
            raise _ShortError
        detail = "ech"
        ech = _ech_is_outer(found[_ECH]) if _ECH in found else False
    except _ShortError:
        return BadHello(detail)
    return ClientHello(sni, alpn, versions, ech, _PRE_SHARED_KEY in found, _EARLY_DATA in found, size)


def _whole(data: bytes, prefix: int) -> _Cursor:
    """Return a cursor over the one vector that `data` must be, no byte more; it may not be empty."""
    outer = _Cursor(data)
    inner = _Cursor(outer.vector(prefix))
    if not outer.done or inner.done:
        raise _ShortError
    return inner


def _server_name(data: bytes) -> bytes:
    """Return the one host_name (RFC 6066 section 3); two names or an undefined type have two readings."""
    names = _whole(data, 2)
    if names.integer(1) != 0:
        raise _ShortError
    name = names.vector(2)
    if not name or not names.done:
        raise _ShortError
    return name


def _protocols(data: bytes) -> tuple[bytes, ...]:
    names = _whole(data, 2)
    found: list[bytes] = []
    while not names.done:
        if not (name := names.vector(1)):
            raise _ShortError
        found.append(name)
    return tuple(found)


def _versions(data: bytes) -> tuple[int, ...]:
    versions = _whole(data, 1)
    found: list[int] = []
    while not versions.done:
        found.append(versions.integer(2))
    return tuple(found)


def _ech_is_outer(data: bytes) -> bool:
    """Tell an outer ECH extension, a hidden name or GREASE, from the inner marker (RFC 9849 section 5)."""
    cursor = _Cursor(data)
    kind = cursor.integer(1)
    if kind == 1 and cursor.done:
        return False
    if kind != 0:
        raise _ShortError
    cursor.take(5)  # the HPKE suite and the configuration id
    cursor.vector(2)  # enc: empty after a HelloRetryRequest
    if not cursor.vector(2) or not cursor.done:
        raise _ShortError
    return True
