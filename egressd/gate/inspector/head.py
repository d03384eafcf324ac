"""HTTP/1 heads, strictly: the bytes of a request or response head in, what they say or why not out. Pure and total.

This is the only parser of heads. mitmproxy's own is lax (bare LF, folds, `HTTP/9.9`, tabs for spaces), so its layers are handed
requests and responses made from what is parsed here, and no second parser can see another head in the same bytes.

The theory (RFC 9112): lines end in CRLF and in nothing else; a head ends at its first empty line; one space
separates the parts of a first line; a field is `name:value` with a token for a name and no fold. The length
of a body is said once: by one Content-Length of plain digits, or by one Transfer-Encoding that is exactly
`chunked`, or by neither (§6). Everything else may be read differently by two parsers, and is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from egressd.policy.reasons import Reason

MAX_FIELDS: Final = 256
"""More header fields than this is `head_too_large`: each costs far more to handle than its bytes say."""

MAX_INTERIM: Final = 16
"""Interim responses (1xx) before a final one."""

CHUNKED: Final = None
"""The length of a body whose end the chunked coding tells."""

UNTIL_CLOSE: Final = -1
"""The length of a response body that ends when its connection does."""

type Field = tuple[bytes, bytes]
type Length = int | None
"""Bytes of a body, `CHUNKED` or `UNTIL_CLOSE`."""

TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_REQUEST_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,32}) ([\x21-\x7e]+) HTTP/([0-9])\.([0-9])")
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: ([\t\x20-\x7e\x80-\xff]*))?")
_ABSOLUTE = re.compile(rb"([Hh][Tt][Tt][Pp][Ss]?)://([^/?#]*)([/?][^#]*)?")
NOT_VALUE: Final = re.compile(rb"[^\t\x20-\x7e\x80-\xff]")
_DIGITS = re.compile(rb"0|[1-9][0-9]{0,17}")
_NO_LETTER = re.compile(rb"[^a-z0-9]")
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


@dataclass(frozen=True, slots=True)
class BadHead:
    """A head that is refused: the reason, fixed words, and method and target where they could be read."""

    reason: Reason
    detail: str
    method: bytes = b""
    target: bytes = b""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request head; `scheme` and `authority` are empty but for the absolute form, `path` is the origin form with its query."""

    method: bytes
    target: bytes
    scheme: bytes
    authority: bytes
    path: bytes
    version: bytes
    fields: tuple[Field, ...]
    length: Length
    close: bool


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """A response head; `close` says that its connection carries no further response."""

    version: bytes
    status: int
    phrase: bytes
    fields: tuple[Field, ...]
    length: Length
    close: bool


class HeadScan:
    """Where a head ends in bytes that arrive piece by piece, each byte looked at once."""

    __slots__ = ("_line", "_seen")

    def __init__(self) -> None:
        """Begin at the first byte of a head."""
        self._line = 0
        self._seen = 0

    def find(self, data: bytes | bytearray) -> int | BadHead | None:
        """Return the size of the head with its empty line, None while it has not ended.

        A bare LF is refused as soon as it is seen.
        """
        while (newline := data.find(b"\n", self._seen)) >= 0:
            if newline == 0 or data[newline - 1] != 0x0D:
                reason = Reason.BAD_REQUEST if self._line == 0 else Reason.BAD_HEADER
                return BadHead(reason, "a line ends without CR")
            self._seen = newline + 1
            if newline - 1 == self._line:
                return newline + 1
            self._line = newline + 1
        self._seen = len(data)
        return None


def parse_request_head(raw: bytes) -> RequestHead | BadHead:
    """Return the request head that `raw` (which ends with its empty line) is, or why it is refused."""
    lines = _lines(raw)
    line = _REQUEST_LINE.fullmatch(lines[0])
    if line is None:
        return BadHead(Reason.BAD_REQUEST, "the request line is malformed")
    method, target, major, minor = line.groups()
    problem = _line_problem(method, target, major, minor)
    target_parts = None if problem else parse_target(method, target)
    if problem or target_parts is None:
        return problem or BadHead(Reason.BAD_REQUEST, "the request target is malformed", method, target)
    fields = parse_fields(lines[1:])
    if isinstance(fields, BadHead):
        return BadHead(fields.reason, fields.detail, method, target)
    version = b"HTTP/1." + minor
    length = declared_length(fields, version)
    if isinstance(length, str):
        return BadHead(Reason.BAD_FRAMING, length, method, target)
    expected = [value.lower() for name, value in fields if name.lower() == b"expect"]
    if expected not in ([], [b"100-continue"]):
        return BadHead(Reason.BAD_HEADER, "the only expectation is 100-continue, said once", method, target)
    scheme, authority, path = target_parts
    return RequestHead(
        method=method,
        target=target,
        scheme=scheme,
        authority=authority,
        path=path,
        version=version,
        fields=fields,
        length=0 if length is UNTIL_CLOSE else length,
        # A 1.0 client that asks to stay is closed on all the same: it must be ready for that, and one rule is enough.
        close=version == b"HTTP/1.0" or b"close" in connection_options(fields),
    )


def parse_response_head(raw: bytes, method: bytes, version: bytes) -> ResponseHead | BadHead:
    """Return the response head that `raw` is, as the answer to a request of `method` and `version`."""
    lines = _lines(raw)
    line = _STATUS_LINE.fullmatch(lines[0])
    if line is None:
        return BadHead(Reason.UPSTREAM_PROTOCOL, "the status line is malformed")
    minor, status_digits, phrase = line.groups()
    fields = parse_fields(lines[1:])
    if isinstance(fields, BadHead):
        return BadHead(Reason.UPSTREAM_PROTOCOL, fields.detail)
    own_version = b"HTTP/1." + minor
    length = declared_length(fields, own_version)
    if isinstance(length, str):
        return BadHead(Reason.UPSTREAM_PROTOCOL, length)
    status = int(status_digits)
    bodiless = status < 200 or status in (204, 304) or method == b"HEAD"
    if length is CHUNKED and (version == b"HTTP/1.0" or status < 200 or status == 204):
        return BadHead(Reason.UPSTREAM_PROTOCOL, "chunked where no chunked body can be")
    return ResponseHead(
        version=own_version,
        status=status,
        phrase=phrase or b"",
        fields=fields,
        length=0 if bodiless else length,
        close=minor == b"0"
        or b"close" in connection_options(fields)
        or (not bodiless and length == UNTIL_CLOSE),
    )


def parse_fields(lines: list[bytes]) -> tuple[Field, ...] | BadHead:
    """Return the fields of a header or trailer section, whitespace round the values removed."""
    if len(lines) > MAX_FIELDS:
        return BadHead(Reason.HEAD_TOO_LARGE, f"more than {MAX_FIELDS} header fields")
    fields = []
    for line in lines:
        if line[:1] in (b" ", b"\t"):
            return BadHead(Reason.BAD_HEADER, "a header field is folded")
        name, colon, value = line.partition(b":")
        if not colon or TOKEN.fullmatch(name) is None:
            return BadHead(Reason.BAD_HEADER, "a header name is malformed")
        if NOT_VALUE.search(value) is not None:
            return BadHead(Reason.BAD_HEADER, "a header value holds a control character")
        fields.append((name, value.strip(b" \t")))
    return tuple(fields)


def connection_options(fields: tuple[Field, ...]) -> frozenset[bytes]:
    """Return the options that the Connection fields name, in lower case (RFC 9110 §7.6.1)."""
    return frozenset(
        option.strip(b" \t").lower()
        for name, value in fields
        if name.lower() == b"connection"
        for option in value.split(b",")
        if option.strip(b" \t")
    )


def _lines(raw: bytes) -> list[bytes]:
    return raw.removesuffix(b"\r\n\r\n").split(b"\r\n")


def _line_problem(method: bytes, target: bytes, major: bytes, minor: bytes) -> BadHead | None:
    """Return why a well-formed request line is refused all the same."""
    if method == b"PRI":
        return BadHead(Reason.BAD_REQUEST, "HTTP/2 without negotiation", method, target)
    if major != b"1" or minor not in (b"0", b"1"):
        return BadHead(Reason.BAD_REQUEST, "the HTTP version is neither 1.1 nor 1.0", method, target)
    if method != method.upper():
        # Methods are case-sensitive (RFC 9110 §9.1), but a parser that folds them would frame `head` or `connect` its own way.
        return BadHead(Reason.BAD_REQUEST, "the method is not in upper case", method, target)
    if method == b"CONNECT":
        return BadHead(Reason.NESTED_CONNECT, "CONNECT inside a connection", method, target)
    return None


def parse_target(method: bytes, target: bytes) -> tuple[bytes, bytes, bytes] | None:
    """Return scheme, authority and origin form of a request target (RFC 9112 §3.2), None where it is none."""
    if target == b"*":
        return (b"", b"", target) if method == b"OPTIONS" else None
    if target.startswith(b"/"):
        # `//host/` is an authority to a parser of URI references, `#` begins a fragment, which is never sent.
        return None if target.startswith(b"//") or b"#" in target else (b"", b"", target)
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None or not absolute.group(2):
        return None
    scheme, authority, rest = absolute.groups(default=b"")
    path = rest if rest.startswith(b"/") else b"/" + rest
    return None if path.startswith(b"//") else (scheme.lower(), authority, path)


def declared_length(fields: tuple[Field, ...], version: bytes) -> Length | str:
    """Return the length that the fields declare (`UNTIL_CLOSE` when they declare none), or what is wrong with them."""
    lengths, codings = [], []
    for name, value in fields:
        lower = name.lower()
        if lower == b"content-length":
            lengths.append(value)
        elif lower == b"transfer-encoding":
            codings.append(value)
        elif _NO_LETTER.sub(b"-", lower) in _FRAMING:
            # Gateways in front of origins fold `_`, some of them every such character, into the real name.
            return "a framing field is spelled with another character for its hyphen"
    if codings:
        if lengths:
            return "both Content-Length and Transfer-Encoding"
        if len(codings) > 1 or codings[0].lower() != b"chunked":
            return "the transfer coding is not chunked, once"
        if version == b"HTTP/1.0":
            return "Transfer-Encoding in HTTP/1.0"
        return CHUNKED
    if not lengths:
        return UNTIL_CLOSE
    if len(lengths) > 1:
        return "more than one Content-Length"
    if _DIGITS.fullmatch(lengths[0]) is None:
        return "the Content-Length is not a plain number"
    return int(lengths[0])
