"""Law 3 for one request: the names that it and its connection carry are one name, or it is refused. Pure.

The names: what the destination proved (a synthetic address, a CONNECT, the target of a request to a proxy),
the server name of the hello, the Host field or `:authority`, and the authority of an absolute-form target.
Duplicates are never joined, and nothing is decided on a name that the request alone brings, but for a request
to a proxy, whose target is its destination.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from egressd.policy.attempt import Address, Name
from egressd.policy.names import Authority, BadHost, format_host, parse_authority, parse_name
from egressd.policy.reasons import Reason

DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Names:
    """What a connection says of where its requests go; `host` is None where its destination proves nothing and it says nothing.

    `per_request` is a plain connection to a proxy, on which every target is a destination of its own.
    """

    host: Name | Address | None
    port: int
    scheme: str
    sni: str | None = None
    per_request: bool = False


@dataclass(frozen=True, slots=True)
class Bound:
    """The one destination that every name agrees on."""

    host: Name | Address
    port: int
    scheme: str

    @property
    def authority(self) -> bytes:
        """The Host field that goes upstream: the judged name, with the port where it is not the scheme's own."""
        text = format_host(self.host)
        return (text if self.port == DEFAULT_PORTS[self.scheme] else f"{text}:{self.port}").encode("ascii")


@dataclass(frozen=True, slots=True)
class Unbound:
    """Names that do not agree, or are none."""

    reason: Reason
    detail: str


def bind(names: Names, hosts: Sequence[bytes], authority: bytes = b"") -> Bound | Unbound:
    """Return where a request goes that carries these Host fields and, in absolute form or HTTP/2, this authority."""
    default_port = DEFAULT_PORTS[names.scheme]
    claimed = _claims(hosts, authority, default_port)
    if isinstance(claimed, Unbound):
        return claimed
    if names.per_request:
        if not authority:
            return Unbound(Reason.BAD_REQUEST, "a proxy takes absolute-form targets")
        target = claimed[
            -1
        ]  # RFC 9112 §3.2.2: the destination, whatever Host says, which must not say otherwise
        bound = Bound(target.host, target.port, names.scheme)
    elif names.host is None:
        return Unbound(Reason.SYNTHETIC_UNMAPPED, "the destination stands for no name")
    else:
        bound = Bound(names.host, names.port, names.scheme)
    if names.sni is not None and isinstance(names.host, tuple) and parse_name(names.sni) != names.host:
        return Unbound(Reason.SNI_MISMATCH, "the server name of the hello is not the judged name")
    for claim in claimed:
        # A port that is left out reads as the scheme's own: clients leave it out on other ports too.
        if claim.host != bound.host or claim.port not in (bound.port, default_port):
            return Unbound(Reason.AUTHORITY_MISMATCH, "the request names another host than its connection")
    return bound


def _claims(hosts: Sequence[bytes], authority: bytes, default_port: int) -> list[Authority] | Unbound:
    """Return what the request itself names: its Host, and its authority where it has one."""
    if len(hosts) > 1:
        return Unbound(Reason.DUPLICATE_HOST, f"{len(hosts)} Host fields")
    if not hosts and not authority:
        return Unbound(Reason.BAD_HOST, "no Host field")
    claims = []
    for raw in (*hosts, authority) if authority else hosts:
        claim = parse_authority(raw, default_port)
        if isinstance(claim, BadHost):
            return Unbound(claim.reason, claim.detail)
        claims.append(claim)
    return claims
