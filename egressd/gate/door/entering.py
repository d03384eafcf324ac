"""Where an accepted connection is to go: what the kernel, a proxy's client or the port says of it."""

from __future__ import annotations

import asyncio
import re
from ipaddress import IPv4Address, ip_address

from egressd.gate import internal
from egressd.gate.connection import Destination
from egressd.gate.dns.gatekeeper import EXPLAIN
from egressd.gate.dns.synthetic import RANGE
from egressd.gate.door import socks
from egressd.gate.door.arrival import Http, original_destination
from egressd.gate.door.connect import Absolute, BadHead
from egressd.gate.door.entrance import Listening, any_method, greet, proxy_head, socks_request, source_of
from egressd.gate.door.hearing import hear, hear_http
from egressd.gate.door.hops import BadHop, bare
from egressd.gate.door.passage import Passage
from egressd.gate.door.socks import BadSocks
from egressd.gate.inspector.refusal import Refused, refuse_http
from egressd.policy.attempt import ConnectionAttempt, Decision
from egressd.policy.names import Authority
from egressd.policy.reasons import Reason

_EXPLAINABLE = frozenset({80, 443})
"""Ports where a client is told of a denial in HTTP, after its proxy protocol has said yes."""
_ACCEPT_FIELD = re.compile(rb"\r?\n[Aa][Cc][Cc][Ee][Pp][Tt]:[ \t]*([^\r\n]{0,1024})")


async def enter(passage: Passage) -> None:
    """Learn where a connection is to go, by the way that it came in, and what it says; then hand it on or refuse it."""
    if passage.entrance.hops:
        settings = passage.connection.services.settings
        source = await source_of(passage.sock, passage.entrance.hops, settings.first_bytes_timeout)
        if isinstance(source, BadHop):
            passage.deny(Reason.BAD_HOP, source.detail)
            return
        passage.connection.source = source
    match passage.entrance.way:
        case "transparent":
            await _transparent(passage)
        case "explicit":
            await _explicit(passage)
        case "socks":
            await _socks(passage)
        case "direct":
            await _direct(passage)


async def _transparent(passage: Passage) -> None:
    destination = original_destination(passage.sock)
    if destination is None:
        passage.deny(Reason.NO_ORIGINAL_DST)
        return
    address, port = destination
    passage.connection.destination = target = Destination(port=port, address=address)
    if isinstance(address, IPv4Address) and address in RANGE:
        names = passage.connection.sandbox.names
        target.proved = names.name_of(address) if address != internal.ADDRESS else internal.NAME
        passage.judgement.explained = address == EXPLAIN
        if target.proved is None and not passage.judgement.explained:
            passage.deny(Reason.SYNTHETIC_UNMAPPED)
            return
        if target.proved is not None:
            passage.connection.root_id = names.root_of(target.proved) or passage.connection.root_id
    await hear(passage, b"")


async def _direct(passage: Passage) -> None:
    """A connection to egressd's own address: the port says how it is meant, and the client alone for which name."""
    passage.connection.destination = Destination(port=passage.entrance.port)
    await hear(passage, passage.entrance.data)


async def _explicit(passage: Passage) -> None:
    settings = passage.connection.services.settings
    listening = Listening(passage.sock, passage.entrance.data, settings.head_timeout, settings.head_bytes)
    head = await proxy_head(listening)
    if isinstance(head, BadHead):
        await _refuse_head(passage, head, listening.data)
        return
    _lead_to(passage, head.authority, tunnel=not isinstance(head, Absolute))
    if isinstance(head, Absolute):
        passage.connection.channel = "absolute"
        await hear_http(passage, Http(listening.data))
        return
    await asyncio.get_running_loop().sock_sendall(
        passage.sock, b"HTTP/1.1 200 Connection established\r\n\r\n"
    )
    await hear(passage, listening.data[head.size :])


async def _socks(passage: Passage) -> None:
    settings = passage.connection.services.settings
    listening = Listening(passage.sock, passage.entrance.data, settings.head_timeout, settings.head_bytes)
    if not passage.entrance.greeted:
        login = await greet(listening, any_method)
        if isinstance(login, BadSocks):
            await _refuse_socks(passage, login)
            return
        if login is not None:  # who it is, the listener has said
            await listening.say(socks.judge_login(ok=True))
    request = await socks_request(listening)
    if isinstance(request, BadSocks):
        await _refuse_socks(passage, request)
        return
    _lead_to(passage, request.authority, tunnel=True)
    target = passage.connection.destination
    if target.port not in _EXPLAINABLE and not passage.judgement.any_way():
        # Nothing that speaks there could be told in its own protocol; SOCKS can.
        passage.connection.host = request.authority.host
        refused = passage.judgement.judge(ConnectionAttempt(request.authority.host, target.port, "tcp"))
        passage.decided(refused)
        await passage.say(socks.reply(socks.NOT_ALLOWED))
        return
    await asyncio.get_running_loop().sock_sendall(passage.sock, socks.reply(socks.SUCCEEDED))
    await hear(passage, listening.data)


def _lead_to(passage: Passage, authority: Authority, *, tunnel: bool) -> None:
    passage.connection.destination = target = Destination(port=authority.port)
    if isinstance(authority.host, tuple):
        target.proved = authority.host
    elif not (tunnel and _is_ours(passage, authority)):
        target.address = authority.host


def _is_ours(passage: Passage, authority: Authority) -> bool:
    """Whether a proxy's client was led here by a name that it asked for itself; for which one, only the client can say."""
    own = passage.connection.sandbox.own
    if own is None or authority.port not in _EXPLAINABLE:
        return False
    return authority.host in (own or (bare(ip_address(passage.sock.getsockname()[0])),))


async def _refuse_socks(passage: Passage, refused: BadSocks) -> None:
    passage.decided(Decision("deny", refused.reason), refused.detail, refused.authority)
    if refused.reply:
        await passage.say(refused.reply)


async def _refuse_head(passage: Passage, head: BadHead, data: bytes) -> None:
    passage.decided(Decision("deny", head.reason), head.detail, head.authority)
    if head.reason is Reason.CLIENT_CLOSED:
        return
    accept = _ACCEPT_FIELD.search(data)
    refused = Refused(
        passage.connection.attempt_id,
        passage.connection.sandbox.id,
        accept=accept.group(1).decode("latin-1") if accept else None,
        hint=head.hint,
    )
    await passage.say(refuse_http(head.reason, refused).to_http1())
