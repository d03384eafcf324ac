"""HTTP/2 heads, strictly (RFC 9113 §8): header sections in, what they say or why not out; and back. Pure; reading is total.

The result is the same `RequestHead` and `ResponseHead` as HTTP/1 has, judged by the same code. Nothing is repaired on the way to
an origin: no name is folded, no field joined, no value trimmed. Values of an origin are trimmed, as they are in HTTP/1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from mitmproxy import http

from egressd.gate.inspector.binding import Bound
from egressd.gate.inspector.head import (
    CHUNKED,
    MAX_FIELDS,
    NOT_VALUE,
    TOKEN,
    UNTIL_CLOSE,
    BadHead,
    Field,
    Length,
    RequestHead,
    ResponseHead,
    declared_length,
    parse_target,
)
from egressd.policy.reasons import Reason

VERSION: Final = b"HTTP/2.0"
FIELD_COST: Final = 32
"""What a field counts besides its bytes in the size of a header list (§6.5.2)."""

CONNECTION_SPECIFIC: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade", b"http2-settings"}
)
"""Fields that HTTP/2 has frames for, or no use (§8.2.2)."""

_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Z-]{1,32}")
_PATH = re.compile(rb"[\x21-\x7e]+")
_STATUS = re.compile(rb"[1-5][0-9]{2}")
_REQUEST_PSEUDO = frozenset({b":method", b":scheme", b":authority", b":path", b":protocol"})
_RESPONSE_PSEUDO = frozenset({b":status"})


@dataclass(frozen=True, slots=True)
class _Section:
    """A header section whose fields are well-formed, each pseudo-header once and before all others."""

    pseudo: dict[bytes, bytes]
    fields: tuple[Field, ...]


def parse_request(fields: tuple[Field, ...], *, ended: bool, limit: int) -> RequestHead | BadHead:
    """Return the request that a header section is, of at most `limit` bytes; `ended` where no body follows."""
    method, path = _shown(fields, b":method"), _shown(fields, b":path")
    section = _section(fields, _REQUEST_PSEUDO, limit)
    if isinstance(section, BadHead):
        return BadHead(section.reason, section.detail, method, path)
    problem = _request_problem(section)
    target = None if problem else parse_target(method, path)
    if problem or target is None or target[1]:
        return problem or BadHead(Reason.BAD_REQUEST, "the path is malformed", method, path)
    length = _length(section.fields, ended=ended)
    if isinstance(length, str):
        return BadHead(Reason.BAD_FRAMING, length, method, path)
    expected = [value.lower() for name, value in section.fields if name == b"expect"]
    if expected not in ([], [b"100-continue"]):
        return BadHead(Reason.BAD_HEADER, "the only expectation is 100-continue, said once", method, path)
    return RequestHead(
        method=method,
        target=path,
        scheme=section.pseudo[b":scheme"],
        authority=section.pseudo.get(b":authority", b""),
        path=target[2],
        version=VERSION,
        fields=section.fields,
        length=length,
        close=False,
    )


def parse_response(
    fields: tuple[Field, ...], *, method: bytes, ended: bool, limit: int
) -> ResponseHead | BadHead:
    """Return the response that a header section is, as the answer to a request of `method`."""
    section = _section(_trimmed(fields), _RESPONSE_PSEUDO, limit)
    if isinstance(section, BadHead):
        return BadHead(Reason.UPSTREAM_PROTOCOL, section.detail)
    digits = section.pseudo.get(b":status", b"")
    if _STATUS.fullmatch(digits) is None or digits == b"101":
        return BadHead(Reason.UPSTREAM_PROTOCOL, "the status is malformed")
    status = int(digits)
    bodiless = status in (204, 304) or method == b"HEAD"
    length: Length | str = 0 if bodiless or status < 200 else _length(section.fields, ended=ended)
    if isinstance(length, str):
        return BadHead(Reason.UPSTREAM_PROTOCOL, length)
    if status < 200 and ended:
        return BadHead(Reason.UPSTREAM_PROTOCOL, "an interim response ends its stream")
    return ResponseHead(VERSION, status, b"", section.fields, length, close=False)


def parse_trailers(fields: tuple[Field, ...], limit: int) -> tuple[Field, ...] | BadHead:
    """Return the trailers that a header section is."""
    section = _section(_trimmed(fields), frozenset(), limit)
    return section if isinstance(section, BadHead) else section.fields


def write_request(
    method: bytes, path: bytes, fields: tuple[Field, ...], bound: Bound, *, trailers: bool
) -> tuple[Field, ...]:
    """Return the head that goes upstream, to where the exchange is bound whatever the message says.

    `trailers` asks for them, as gRPC servers want to be asked. Raises ValueError where an addon has made a field that would
    not be read as it is written.
    """
    pseudo = (
        (b":method", method),
        (b":scheme", bound.scheme.encode("ascii")),
        (b":authority", bound.authority),
        (b":path", path),
    )
    plain = (field for field in _plain(fields) if field[0] != b"host")
    return _readable((*pseudo, *plain, *(((b"te", b"trailers"),) if trailers else ())))


def write_response(response: http.Response) -> tuple[Field, ...]:
    """Return the head that goes to the client; raises ValueError as `write_request`."""
    return _readable(
        ((b":status", str(response.status_code).encode("ascii")), *_plain(response.headers.fields))
    )


def _plain(fields: tuple[Field, ...]) -> Iterator[Field]:
    for name, value in fields:
        lower = name.lower()
        if lower not in CONNECTION_SPECIFIC:
            yield lower, value


def _readable(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    if any(_field_problem(name, value) is not None for name, value in fields):
        raise ValueError("a field that cannot be written")
    return fields


def _trimmed(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    return tuple((name, value.strip(b" \t")) for name, value in fields)


def _shown(fields: tuple[Field, ...], name: bytes) -> bytes:
    """The first value of a pseudo-header, for the record of a request that may be refused."""
    return next((value for found, value in fields if found == name), b"")


def _section(fields: tuple[Field, ...], known: frozenset[bytes], limit: int) -> _Section | BadHead:
    if sum(len(name) + len(value) + FIELD_COST for name, value in fields) > limit:
        return BadHead(Reason.HEAD_TOO_LARGE, f"more than {limit} bytes of head")
    if len(fields) > MAX_FIELDS:
        return BadHead(Reason.HEAD_TOO_LARGE, f"more than {MAX_FIELDS} header fields")
    pseudo: dict[bytes, bytes] = {}
    plain: list[Field] = []
    for name, value in fields:
        if name[:1] == b":":
            if name not in known or name in pseudo or plain:
                return BadHead(Reason.BAD_HEADER, "a pseudo-header is unknown, doubled or late")
            pseudo[name] = value
        else:
            plain.append((name, value))
        problem = _field_problem(name, value)
        if problem is not None:
            return BadHead(Reason.BAD_HEADER, problem)
    return _Section(pseudo, tuple(plain))


def _field_problem(name: bytes, value: bytes) -> str | None:
    bare = name.removeprefix(b":")
    if TOKEN.fullmatch(bare) is None or bare != bare.lower():
        return "a header name is malformed"
    if NOT_VALUE.search(value) is not None:
        return "a header value holds a control character"
    if value != value.strip(b" \t"):
        return "a header value has whitespace round it"
    if name in CONNECTION_SPECIFIC or (name == b"te" and value.lower() != b"trailers"):
        return "a field that HTTP/2 does not have"
    return None


def _request_problem(section: _Section) -> BadHead | None:
    pseudo = section.pseudo
    method, path = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    if b":protocol" in pseudo:
        # RFC 8441 is not offered: what asks for it all the same is told to open a connection of its own.
        return BadHead(Reason.UPGRADE_NOT_ALLOWED, "extended CONNECT", method, path)
    if method == b"CONNECT":
        return BadHead(Reason.NESTED_CONNECT, "CONNECT inside a connection", method, path)
    if _METHOD.fullmatch(method) is None:
        return BadHead(Reason.BAD_REQUEST, "the method is malformed", method, path)
    if _PATH.fullmatch(path) is None:
        return BadHead(Reason.BAD_REQUEST, "the path is malformed", method, path)
    if pseudo.get(b":scheme") != b"https":
        return BadHead(Reason.AUTHORITY_MISMATCH, "the scheme is not the connection's", method, path)
    return None


def _length(fields: tuple[Field, ...], *, ended: bool) -> Length | str:
    """The length of a body: what the fields say, 0 where the stream has ended, and else as its frames will tell."""
    declared = declared_length(fields, VERSION)
    if isinstance(declared, str):
        return declared
    if ended:
        return 0 if declared in (0, UNTIL_CLOSE) else "the stream ends before the length that is declared"
    return CHUNKED if declared == UNTIL_CLOSE else declared
