"""What an accepted connection says first, the name it claims, and what the rules say of the two together."""

from __future__ import annotations

import asyncio

from egressd.gate.door.arrival import Http, Tls, Unreadable, first_bytes
from egressd.gate.door.entrance import Listening, claimed_host
from egressd.gate.door.passage import Passage
from egressd.gate.door.ssh import refuse_ssh, speaks_ssh
from egressd.gate.door.words import answered_in
from egressd.gate.inspector import inspect
from egressd.gate.tls.leaves import HTTP2
from egressd.gate.tls.stream import accept_plain
from egressd.journal.record import clip
from egressd.policy.attempt import Address, ConnectionAttempt, Decision, Name
from egressd.policy.names import BadHost, parse_name
from egressd.policy.reasons import Reason

_EXPLAIN_WAIT = 2.0
"""Seconds that a connection to a destination that is denied whatever it says may take to say something we can answer in."""


async def hear(passage: Passage, data: bytes) -> None:
    """Read on behind `data` until it can be told what this is, and judge it."""
    settings = passage.connection.services.settings
    target = passage.connection.destination
    host = target.proved or target.address
    timeout = settings.first_bytes_timeout
    if passage.judgement.explained:
        # Who waits for a server to speak first must learn of it too.
        timeout = min(timeout, _EXPLAIN_WAIT)
    elif host is not None:
        raw = passage.judgement.judge(ConnectionAttempt(host, target.port, "tcp"))
        if raw.allowed and raw.treatment == "relay":
            passage.connection.host = host
            raw, limit = passage.judgement.within_limits(raw, len(data))
            if raw.allowed:
                await passage.carry_opaque(raw, data)
            else:
                passage.decided(raw, limit)
            return
        if not passage.judgement.any_scheme(host, target.port):
            timeout = min(timeout, _EXPLAIN_WAIT)
    arrival = await first_bytes(passage.sock, data, timeout)
    if isinstance(arrival, Tls):
        await _hear_tls(passage, arrival)
    elif isinstance(arrival, Http):
        await hear_http(passage, arrival)
    else:
        _unreadable(passage, arrival, host)
        if speaks_ssh(arrival.data):
            await passage.say(refuse_ssh(passage.sentence()))


def _unreadable(passage: Passage, arrival: Unreadable, host: Name | Address | None) -> None:
    passage.connection.host = host
    decision = Decision("deny", arrival.reason)
    if host is not None and not passage.judgement.explained:
        rules = passage.judgement.judge(ConnectionAttempt(host, passage.connection.destination.port, "tcp"))
        if not rules.allowed and not passage.judgement.any_scheme(host, passage.connection.destination.port):
            decision = rules  # it was denied whatever it would have said
    passage.decided(decision, arrival.detail)


async def hear_http(passage: Passage, arrival: Http) -> None:
    """Judge a connection that speaks HTTP in the clear, and hand it to the inspector, which answers whatever it is."""
    target = passage.connection.destination
    host: Name | Address | BadHost | None = target.proved or target.address
    data = arrival.data
    if host is None or passage.judgement.explained:
        settings = passage.connection.services.settings
        seconds = _EXPLAIN_WAIT if passage.judgement.explained else settings.head_timeout
        listening = Listening(passage.sock, data, seconds, settings.head_bytes)
        host = await claimed_host(listening)
        data = listening.data
    if isinstance(host, BadHost):
        decision = Decision("deny", Reason.NOT_ALLOWED if passage.judgement.explained else host.reason)
    else:
        passage.connection.host = host
        _join(passage, host)
        decision = passage.judgement.refine(
            passage.judgement.judge(ConnectionAttempt(host, target.port, "http"))
        )
    if decision.allowed and decision.treatment != "inspect":
        decision = Decision("deny", Reason.SCHEME_NOT_ALLOWED, decision.entry)
    decision, limit = passage.judgement.within_limits(decision)
    passage.decided(decision, limit)
    passage.allowed = decision.allowed
    loop = asyncio.get_running_loop()
    passage.handed_on = True
    stream = await accept_plain(loop, passage.sock, b"")
    await inspect(passage.connection, stream, data)


def _join(passage: Passage, host: Name | Address | None) -> None:
    """Join the story of the query that led a client to our own address by this name."""
    connection = passage.connection
    if passage.judgement.nameless and connection.sandbox.own is not None and isinstance(host, tuple):
        connection.root_id = connection.sandbox.names.root_of(host) or connection.root_id


async def _hear_tls(passage: Passage, arrival: Tls) -> None:
    connection, hello = passage.connection, arrival.hello
    connection.tls = True
    detail = "ech" if hello.ech else None
    claimed: Name | BadHost | None = None
    if hello.sni is not None:
        connection.sni = clip(hello.sni)
        claimed = parse_name(hello.sni)
    _join(passage, claimed if isinstance(claimed, tuple) else None)
    decision, limit = passage.judgement.within_limits(
        passage.judgement.judge_hello(claimed, hello), len(arrival.data)
    )
    if not decision.allowed:
        passage.decided(decision, limit or detail)
        await passage.refuse_tls(decision, claimed, arrival)
    elif decision.treatment != "inspect":
        await passage.carry_opaque(decision, arrival.data, detail)
    elif HTTP2.encode("ascii") in hello.alpn and decision.reason is not Reason.INTERNAL_PAGE:
        await passage.mirror(decision, claimed, arrival, detail)
    else:
        context = passage.leaf(answered_in(hello))
        passage.decided(decision, detail)
        passage.allowed = True
        await passage.inspect_tls(context, arrival.data)
