"""The credential of a request, from the rule that names it to the bytes that carry it.

A request that a rule gives a credential has three states: *asked for*, when it is judged; *lent*, when control has given a lease
and the request has lost every key of its own; *sealed*, when its bytes are made. Only sealed ones hold the secret, and they are
judged once more: what leaves is what the rules allow with this credential, to the one host that all names agree on, over TLS that
was verified. Each step refuses what the one before it has not earned (law 1).
"""

from __future__ import annotations

import dataclasses
import time
from typing import Final, NamedTuple

from mitmproxy import http

from egressd.credentials import attach, placeholders
from egressd.credentials.attach import Refused
from egressd.credentials.sigv4 import Seed
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.head import Field
from egressd.gate.leases import Asked
from egressd.policy.attempt import Decision, RequestAttempt
from egressd.policy.decide import decide
from egressd.policy.names import format_host
from egressd.policy.reasons import Reason

_NO_BROKER: Final = Refused(Reason.CREDENTIAL_UNAVAILABLE, "no broker")


def problem_of(exchange: Exchange, decision: Decision, request: http.Request, now: float) -> Refused | None:
    """Return why a request that the rules allow may not go on: it cannot have its credential, or it gives a placeholder away."""
    entry, connection = decision.entry, exchange.connection
    wanted = entry.credential if entry is not None else None
    everywhere, mine = connection.services.placeholders, connection.sandbox.placeholders
    if everywhere or mine:
        # That of its own credential is left to `attach`, which knows where it belongs.
        strays = (text for name, text in mine.items() if name != wanted)
        others = placeholders.Strangers(everywhere, mine.values())
        found = placeholders.seek(strays, request.path, request.headers.fields, others)
        if found is not None:
            return Refused(Reason.PLACEHOLDER_LEAK, found)
    if wanted is None:
        return None
    if exchange.bound is None or exchange.bound.scheme != "https" or not connection.tls:
        return Refused(Reason.CREDENTIAL_NEEDS_TLS, "the client's side is in the clear")
    if decision.reason is Reason.OBSERVED or connection.sandbox.policy.observes(now):
        return Refused(Reason.CREDENTIAL_UNAVAILABLE, "the profile only observes")
    return None if connection.services.leases is not None else _NO_BROKER


async def lend(exchange: Exchange, request: http.Request, *, has_body: bool) -> Refused | None:
    """Get the lease of an allowed request whose fields are those that go on, and take from it what keys it brought itself.

    Returns why there is none. A request that no credential goes with stays as it is.
    """
    wanted, attempt = exchange.credential, exchange.attempt
    if wanted is None:
        return None
    sandbox, leases = exchange.connection.sandbox, exchange.connection.services.leases
    if leases is None or attempt is None:
        return _NO_BROKER
    lease = leases.held((sandbox.id, wanted))
    if lease is None:
        lease = await leases.lease(_asked(sandbox.id, wanted, attempt))
    if lease is None:
        return Refused(Reason.CREDENTIAL_UNAVAILABLE, "no lease")
    if (lease.sandbox, lease.credential) != (sandbox.id, wanted):
        return Refused(Reason.CREDENTIAL_UNAVAILABLE, "the lease is another's")
    prepared = attach.prepare(lease, request.method, request.path, request.headers.fields, has_body=has_body)
    if isinstance(prepared, Refused):
        return prepared
    request.path = prepared.target
    request.headers = http.Headers(prepared.fields)
    exchange.lease, exchange.body, exchange.taken = lease, prepared.body, prepared.taken
    return None


def _asked(sandbox: str, credential: str, attempt: RequestAttempt) -> Asked:
    return Asked(
        sandbox=sandbox,
        credential=credential,
        method=attempt.method,
        scheme=attempt.scheme,
        host=format_host(attempt.host),
        port=attempt.port,
        target=attempt.target,
        upgrade=attempt.upgrade,
    )


class Sealed(NamedTuple):
    """What the head of a request is made of when its bytes go upstream; it is written and not kept.

    `seed` is what the chunks of its body are signed from.
    """

    target: bytes
    fields: tuple[Field, ...]
    seed: Seed | None = None

    def __repr__(self) -> str:
        """Tell nothing of it."""
        return "Sealed(…)"


def seal(exchange: Exchange, request: http.Request, payload: bytes = b"") -> Sealed | Refused:
    """Return the request as its bytes go upstream.

    `payload` is the body where it was kept to be signed. The lease is the exchange's; a request that no credential goes with
    stays as it is.
    """
    lease, data = exchange.lease, request.data
    if lease is None:
        if exchange.credential is not None:
            return Refused(Reason.CREDENTIAL_UNAVAILABLE, "bare")
        return Sealed(data.path, data.headers.fields)
    assert exchange.bound is not None
    now, authority = time.time(), exchange.bound.authority
    attached = attach.attach(
        lease, authority.decode("ascii"), request.method, request.path, data.headers.fields, now, payload
    )
    if isinstance(attached, Refused):
        return attached
    hosts = [value for name, value in attached.fields if name.lower() == b"host"]
    if hosts != [authority] or lease.sandbox != exchange.connection.sandbox.id:
        return Refused(Reason.AUTHORITY_MISMATCH, "the bytes name another host")
    refused = _judged(exchange, request.method, attached.judged, now)
    if refused is not None:
        return refused
    return Sealed(attached.target.encode("utf-8", "surrogateescape"), attached.fields, attached.seed)


def _judged(exchange: Exchange, method: str, target: str, now: float) -> Refused | None:
    """Judge the final bytes: they are one request more, whose credential has to be the one that is in them."""
    sandbox, attempt, decision = exchange.connection.sandbox, exchange.attempt, exchange.decision
    assert attempt is not None
    if sandbox.policy is not exchange.policy or (method, target) != (attempt.method, attempt.target):
        # Else they are, by the same rules, what was decided: `decide` would say it again.
        decision = decide(sandbox.policy, dataclasses.replace(attempt, method=method, target=target), now)
    if not sandbox.revoked and exchange.stands_by(decision, now):
        return None
    if exchange.may_go(
        now
    ):  # it is the secret, or the slots that were cleared, that make another request of it
        return Refused(Reason.CREDENTIAL_UNAVAILABLE, "the rules do not allow the final bytes")
    return Refused(Reason.POLICY_CHANGED, "judged on the final bytes")
