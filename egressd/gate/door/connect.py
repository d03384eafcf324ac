"""The head of an explicit proxy request (RFC 9112 §3.2): CONNECT, or an absolute-form target. Pure.

Only what the door needs is read here: whether it is a tunnel, and for which authority. The head of a request that goes on to
the inspector is judged again there, on the same bytes, by the strict head check.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from egressd.policy.names import Authority, BadHost, parse_authority
from egressd.policy.reasons import Reason

_LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([^ \r\n]+) HTTP/1\.[01]\r\n")
_METHOD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]")
_BEGUN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]*(?: [^ \r\n]*(?: [\x21-\x7e]*\r?)?)?")
_BEGUN_BYTES = 64
"""How much of a request line that has not ended is looked at, again with each piece: enough to tell it from another protocol."""

_SCHEME_PORTS = {b"http": 80, b"https": 443}


@dataclass(frozen=True, slots=True)
class NeedMore:
    """The head has not ended yet."""


@dataclass(frozen=True, slots=True)
class Tunnel:
    """A CONNECT; `size` bytes of the input were its head, what follows is the tunnel's."""

    authority: Authority
    size: int


@dataclass(frozen=True, slots=True)
class Absolute:
    """A request in absolute form; its bytes go on to the inspector whole."""

    authority: Authority


@dataclass(frozen=True, slots=True)
class BadHead:
    """No proxy request: why, what stood in the authority's place, and what to do instead if the reason's words are too wide."""

    reason: Reason
    detail: str
    authority: bytes = b""
    hint: str | None = None


def parse_proxy_head(data: bytes) -> Tunnel | Absolute | BadHead | NeedMore:
    """Return what the first request on an explicit proxy connection asks for; total over bytes.

    CONNECT takes an authority with a port (RFC 9110 §9.3.6). Origin-form is `bad_request`: a proxy is not the origin.
    """
    line_end = data.find(b"\n")
    if line_end < 0:
        # SOCKS, TLS and their like end no line: they must not wait for one.
        begun = _BEGUN.fullmatch(data[:_BEGUN_BYTES])
        return NeedMore() if begun else BadHead(_unlike(data), f"first bytes {data[:24].hex()}")
    line = _LINE.match(data)
    if line is None or line.end() != line_end + 1:
        return BadHead(_unlike(data), "the request line is malformed")
    method, target = line.group(1), line.group(2)
    if method == b"CONNECT":
        return _tunnel(data, target)
    scheme, separator, rest = target.partition(b"://")
    default_port = _SCHEME_PORTS.get(scheme.lower())
    if not separator or default_port is None:
        hint = "This is a proxy: send http targets in absolute form, and use CONNECT for https."
        return BadHead(Reason.BAD_REQUEST, "a proxy takes absolute-form http targets", hint=hint)
    if default_port == 443:  # TLS would start at egressd, so the request itself would cross in clear
        return BadHead(Reason.BAD_REQUEST, "https needs CONNECT", hint="Use CONNECT for https.")
    raw = re.split(rb"[/?#]", rest, maxsplit=1)[0]
    authority = parse_authority(raw, default_port)
    if isinstance(authority, BadHost):
        return BadHead(authority.reason, authority.detail, raw)
    return Absolute(authority)


def _unlike(data: bytes) -> Reason:
    """Why what is no request line is refused: it is a bad one, or none at all."""
    return Reason.BAD_REQUEST if _METHOD.match(data) else Reason.UNKNOWN_PROTOCOL


def _tunnel(data: bytes, target: bytes) -> Tunnel | BadHead | NeedMore:
    authority = parse_authority(target, None)
    if isinstance(authority, BadHost):
        return BadHead(authority.reason, authority.detail, target)
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return NeedMore()
    for field in data[data.index(b"\n") + 1 : end].split(b"\r\n"):
        name, colon, value = field.partition(b":")
        if field and (not colon or not name or name != name.strip() or b"\n" in field or b"\0" in field):
            return BadHead(Reason.BAD_HEADER, "header field", target)
        if name.lower() in (b"content-length", b"transfer-encoding") and value.strip() != b"0":
            return BadHead(Reason.BAD_FRAMING, "CONNECT with a body", target)
    return Tunnel(authority, end + 4)
