"""Header fields that end at a proxy: what is taken out of a message before it goes on. Pure.

Both functions keep the order and the spelling of what stays, and keep the fields that frame the message: mitmproxy's layers write
the body as these say.
"""

from __future__ import annotations

from typing import Final

from egressd.gate.inspector.head import Field, connection_options

_HOP_BY_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade", b"http2-settings"}
)
"""RFC 9110 §7.6.1 and §7.8, RFC 7540 §3.2.1."""

_OVERRIDES: Final = frozenset(
    {b"x-http-method-override", b"x-http-method", b"x-method-override"}
    | {b"x-original-url", b"x-rewrite-url", b"x-http-path-override"}
)
"""A rule judges the method and the path of the request line; no field may make them others at the origin."""

_ALTERNATIVES: Final = frozenset({b"alt-svc"})
"""RFC 7838: an invitation to go round by another host, port or protocol."""

_KEPT: Final = frozenset({b"host", b"content-length", b"transfer-encoding"})
"""What a Connection field may not name away."""

_OWN_PREFIX: Final = b"x-egressd-"
"""Says that egressd speaks; a site may not say so."""

_TRAILER_BANNED: Final = frozenset(
    {
        b"content-length",
        b"transfer-encoding",
        b"host",
        b"set-cookie",
        b"content-encoding",
        b"content-type",
        b"content-range",
    }
    | {b"authorization", b"www-authenticate", b"location", b"cache-control", b"trailer"}
)
"""RFC 9110 §6.5.1: fields that frame, route, authenticate or control have no place in trailers."""


def onward_request(fields: tuple[Field, ...], authority: bytes) -> tuple[Field, ...]:
    """Return the fields of a request as they go upstream, with `authority` for Host, in its place or else first."""
    named = connection_options(fields) - _KEPT
    result: list[Field] = []
    host_seen = False
    for name, value in fields:
        lower = _folded(name)
        if lower in _HOP_BY_HOP or lower in _OVERRIDES or lower in named or lower.startswith(b"proxy-"):
            continue
        if lower == b"host":
            host_seen = True
            result.append((name, authority))
        elif lower == b"transfer-encoding":
            # No case matters to us, as RFC 9112 §7 has it; an origin to which it does would read requests out of the body.
            result.append((name, b"chunked"))
        else:
            result.append((name, value))
    return tuple(result) if host_seen else ((b"Host", authority), *result)


def onward_response(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """Return the fields of a response as the sandbox gets them."""
    named = connection_options(fields) - _KEPT
    return tuple((name, value) for name, value in fields if not _ends_here(name.lower(), named))


def onward_trailers(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """Return the trailers of a response that go on; none of them was or becomes a header."""
    return tuple(
        (name, value)
        for name, value in fields
        if name.lower() not in _TRAILER_BANNED and not _ends_here(name.lower(), frozenset())
    )


def onward_request_trailers(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """Return the trailers of a request that go on, where any do."""
    return tuple(
        (name, value)
        for name, value in onward_trailers(fields)
        if _folded(name) not in _OVERRIDES
        and not _folded(name).startswith(b"proxy-")
        and _folded(name) not in _TRAILER_BANNED
        and _folded(name) != b"cookie"
    )


def _ends_here(lower: bytes, named: frozenset[bytes]) -> bool:
    return (
        lower in _HOP_BY_HOP
        or lower in _ALTERNATIVES
        or lower in named
        or lower.startswith(_OWN_PREFIX)
        or lower in (b"proxy-authenticate", b"proxy-authentication-info")
    )


def _folded(name: bytes) -> bytes:
    """A field's name as a gateway that maps `_` to `-` sees it: no spelling hides from the lists above."""
    return name.lower().replace(b"_", b"-")
