"""The policy as a mitmproxy addon: every request is judged here, and what goes on is made fit to go on.

The hooks deny first and allow last (law 1): a flow carries a refusal from the first line of
`requestheaders` on, and loses it in the last one, after the decision record was written. An exception on the
way leaves the refusal in place.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import sys
import time
import traceback
from collections.abc import Coroutine
from typing import Any, Final, cast

from mitmproxy import http

from egressd.credentials.attach import Body, Refused
from egressd.gate import access, internal
from egressd.gate.connection import Connection
from egressd.gate.inspector import credential, site, websocket
from egressd.gate.inspector.binding import Names, Unbound, bind
from egressd.gate.inspector.doh import asks_dns
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.fields import onward_request, onward_response
from egressd.gate.inspector.head import Field
from egressd.gate.inspector.refusal import Refusal, prefers_json
from egressd.gate.pages import Asked, Plea, Unanswered
from egressd.gate.recorder import AuditUnavailable
from egressd.policy.attempt import DENIED, ConnectionAttempt, Decision, RequestAttempt
from egressd.policy.bodies import refuses_head
from egressd.policy.decide import decide
from egressd.policy.names import BadHost, parse_authority
from egressd.policy.reasons import Reason

HOOK_TIMEOUT: Final = 30.0
"""Seconds that any hook may take."""

COMMIT_TIMEOUT: Final = 10.0
"""Seconds that the decision record of an allowed request may take to be written."""

BODY: Final = "egressd.body"
"""Set in a flow's metadata where its frames, and not its fields, say whether the request has a body (HTTP/2)."""

EXCHANGE: Final = "egressd"
"""Where a flow's metadata hold its exchange."""

_TO_US_ALONE: Final = ("proxy-authorization", "proxy-connection")
"""Fields between a sandbox and its proxy, with its token in one: nobody else's to see, and never sent on."""
_UPGRADE: Final = ((b"Connection", b"Upgrade"), (b"Upgrade", b"websocket"))
_HEADERS_ONLY_UPGRADES: Final = frozenset({"h2c"})
"""Upgrades that clients offer and do not need (RFC 7540 §3.2): the offer is taken out, the request served as HTTP/1.1."""


def exchange_of(flow: http.HTTPFlow) -> Exchange:
    """Return the account of a flow that `requestheaders` has seen; KeyError for any other."""
    return cast(Exchange, flow.metadata[EXCHANGE])


class PolicyAddon:
    """The policy for the flows of one connection."""

    def __init__(self, connection: Connection, *, holds_bodies: bool = False) -> None:
        """`connection` says whose flows they are and where they may go.

        `holds_bodies` says that whoever carries them out holds a body back until it was looked into (`Outgoing`): where nobody
        does, what a rule allows by its body is denied.
        """
        self.connection = connection
        self._holds_bodies = holds_bodies

    # hooks, named as mitmproxy names them

    def requestheaders(self, flow: http.HTTPFlow) -> Coroutine[Any, Any, None] | None:
        """Judge a request before any of it is sent; the coroutine of an allowed one admits it once that is written down."""
        exchange = Exchange(self.connection)
        flow.metadata[EXCHANGE] = exchange
        flow.request.stream = False
        flow.response = as_response(exchange.refuse(Reason.INTERNAL_ERROR))
        exchange.method = flow.request.method
        exchange.target = flow.request.path
        exchange.accept = flow.request.headers.get("accept")
        decision, detail = self._judge(flow, exchange)
        if decision.verdict == "ask" and self.connection.services.asking is not None:
            return self._ask(flow, exchange, decision, detail)
        if not decision.allowed:
            flow.response = as_response(exchange.deny(decision, detail))
            return None
        if decision.reason is Reason.INTERNAL_PAGE:
            return self._answer_ourselves(flow, exchange, decision)
        return self._pass(flow, exchange, decision)

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        """Make a response fit for the sandbox and let it stream."""
        exchange = exchange_of(flow)
        if not exchange.admitted or flow.response is None:
            return
        exchange.status = flow.response.status_code
        flow.response.headers = http.Headers(onward_response(_fields(flow.response)))
        flow.response.stream = True
        if addons := self.connection.services.inspection:
            site.show(addons, flow)

    # approvals

    async def _ask(
        self, flow: http.HTTPFlow, exchange: Exchange, decision: Decision, detail: str | None
    ) -> None:
        """Put a request to people and refuse it; where it may be held, let it go on if one allows it in time."""
        connection, asking = self.connection, self.connection.services.asking
        assert asking is not None
        if exchange.attempt is not None:
            opaque = decision.treatment != "inspect"
            exchange.petitioned = await asking.petition(
                connection.sandbox.id, exchange.attempt, opaque=opaque
            )
        seconds = connection.services.settings.approval_hold
        waits = exchange.petitioned is not None and exchange.petitioned.state == "waiting"
        if seconds and waits and self._leads_there():
            await asking.hold(connection.sandbox.id, lambda: self._is_settled(exchange), seconds)
            decision, detail = self._judge(flow, exchange)
            if decision.allowed:
                admitting = self._pass(flow, exchange, decision)
                if admitting is not None:
                    await admitting
                return
        flow.response = as_response(exchange.deny(decision, detail))

    def _is_settled(self, exchange: Exchange) -> bool:
        """Whether people have spoken about a request that is held, or the sandbox has gone."""
        sandbox, answer = self.connection.sandbox, exchange.petitioned
        row = next(
            (row for row in sandbox.standing.rows if answer is not None and row.id == answer.approval), None
        )
        return sandbox.revoked or (row is not None and row.state != "waiting")

    def _leads_there(self) -> bool:
        """Whether a connection leads to its host by itself, though it was made before anybody allowed it.

        One to an address where many names lead is begun anew, as is one that was answered in HTTP/2 without its server.
        """
        connection = self.connection
        if connection.decision.allowed:
            return True
        return connection.destination.proved == connection.host and connection.alpn != "h2"

    async def _plead(self, flow: http.HTTPFlow, exchange: Exchange, decision: Decision, plea: Plea) -> None:
        """Put a sandbox's own request for access to people, and tell it what comes of it."""
        asking, sandbox = self.connection.services.asking, self.connection.sandbox
        answer = await asking.plead(sandbox.id, plea.request, plea.why) if asking is not None else None
        told = access.pleaded(answer, as_json=prefers_json(exchange.accept))
        flow.response = as_response(exchange.answer(decision, told))

    # the judgement

    def _pass(
        self, flow: http.HTTPFlow, exchange: Exchange, decision: Decision
    ) -> Coroutine[Any, Any, None] | None:
        """Go on with a request that the policy allows: ask the site's addons, then have it admitted."""
        refused = self._inspect(flow, decision)
        if refused is not None:
            flow.response = as_response(exchange.deny(*refused))
            return None
        exchange.decision, exchange.policy = decision, self.connection.sandbox.policy
        return self._admit(flow, exchange)

    def _inspect(self, flow: http.HTTPFlow, decision: Decision) -> tuple[Decision, str] | None:
        """Ask the site's own addons about a request that the policy allows; return its denial if it is refused."""
        addons = self.connection.services.inspection
        if not addons:
            return None
        for name in _TO_US_ALONE:
            flow.request.headers.pop(name, None)
        try:
            who = site.ask(addons, flow)
        except Exception as error:  # noqa: BLE001 # law 1: an addon that fails refuses
            traceback.print_exception(error, limit=8, file=sys.stderr)
            return Decision(
                "deny", Reason.INTERNAL_ERROR, decision.entry
            ), f"inspection: {type(error).__name__}"
        if who is None:
            return None
        return Decision("deny", Reason.DENIED_BY_INSPECTION, decision.entry), f"by {who}"

    def _answer_ourselves(
        self, flow: http.HTTPFlow, exchange: Exchange, decision: Decision
    ) -> Coroutine[Any, Any, None] | None:
        assert exchange.attempt is not None
        attempt, sandbox = exchange.attempt, self.connection.sandbox
        asked = Asked(
            attempt.method,
            attempt.target,
            prefers_json(exchange.accept),
            attempt.body,
            attempt.upgrade is not None,
        )
        services = self.connection.services
        answer = internal.answer(asked, sandbox, services.certificate, time.time())
        if isinstance(answer, Plea):
            later = services.asking.wait_to_plead(sandbox.id) if services.asking is not None else 0.0
            if not later:
                return self._plead(flow, exchange, decision, answer)
            exchange.retry_after = min(math.ceil(later), 3600)
            answer = Unanswered(
                Reason.RATE_LIMITED, 429, "Ask less often; see /access for what waits already."
            )
        flow.response = as_response(exchange.answer(decision, answer))
        return None

    def _judge(self, flow: http.HTTPFlow, exchange: Exchange) -> tuple[Decision, str | None]:
        connection, request = self.connection, flow.request
        fields = _fields(request)
        hosts = [value for name, value in fields if name.lower() == b"host"]
        authority = request.data.authority
        exchange.host_raw = b", ".join((*hosts, authority) if authority else hosts).decode("latin-1") or None
        if connection.sandbox.revoked:
            return Decision("deny", Reason.REVOKED), None
        per_request = connection.channel == "absolute" and connection.decision != DENIED
        asked = connection.decision.verdict == "ask"
        if not connection.decision.allowed and not per_request and not asked:
            return connection.decision, None
        names = Names(
            host=connection.host,
            port=connection.destination.port,
            scheme="https" if connection.tls else "http",
            sni=connection.sni,
            per_request=per_request,
        )
        bound = bind(names, hosts, authority)
        if isinstance(bound, Unbound):
            if bound.reason is Reason.AUTHORITY_MISMATCH and request.is_http2:
                return self._mismatch(hosts, authority), bound.detail
            return Decision("deny", bound.reason), bound.detail
        exchange.bound = bound
        if all(raw == bound.authority for raw in (*hosts, authority) if raw):
            exchange.host_raw = None  # nothing was spelled otherwise
        own = (bound.host, bound.port) == (connection.host, connection.destination.port)
        if own and not connection.decision.allowed and not asked:
            return connection.decision, None
        decision, detail = self._decide(flow, exchange, fields)
        if own and asked and decision.allowed and not self._leads_there():
            return connection.decision, "approved since, on a connection that leads nowhere"
        return decision, detail

    def _mismatch(self, hosts: list[bytes], authority: bytes) -> Decision:
        """A client that reuses an HTTP/2 connection for another name (RFC 9113 §9.1.1): 421 sends it to a connection of its own.

        It is told so of names that this sandbox may go to anyway, and only where all that it names is one name.
        """
        claims = {parse_authority(raw, 443) for raw in (*hosts, authority) if raw}
        claim = claims.pop() if len(claims) == 1 else None
        if claim is not None and not isinstance(claim, BadHost):
            attempt = ConnectionAttempt(claim.host, claim.port, "https")
            if decide(self.connection.sandbox.policy, attempt, time.time()).allowed:
                return Decision("deny", Reason.MISDIRECTED_REQUEST)
        return Decision("deny", Reason.AUTHORITY_MISMATCH)

    def _decide(
        self, flow: http.HTTPFlow, exchange: Exchange, fields: tuple[Field, ...]
    ) -> tuple[Decision, str | None]:
        assert exchange.bound is not None
        request, upgrade = flow.request, _upgrade(fields)
        attempt = RequestAttempt(
            host=exchange.bound.host,
            port=exchange.bound.port,
            scheme="https" if exchange.bound.scheme == "https" else "http",
            method=request.method,
            target=request.path,
            upgrade=upgrade,
            body=_has_body(flow),
            doh=asks_dns(request.path, fields),
        )
        exchange.attempt = attempt
        own = internal.judge(attempt)
        if own is not None:
            return own, None
        decision = decide(self.connection.sandbox.policy, attempt, time.time())
        if not decision.allowed:
            return decision, None
        if request.method in ("TRACE", "CONNECT"):
            return Decision("deny", Reason.METHOD_NOT_ALLOWED, decision.entry), "never forwarded"
        if upgrade is not None:
            if upgrade != "websocket" or request.http_version != "HTTP/1.1":
                return Decision(
                    "deny", Reason.UPGRADE_NOT_ALLOWED, decision.entry
                ), f"upgrade to {upgrade[:32]}"
            offer = websocket.parse_offer(request.method, fields)
            if isinstance(offer, str):
                return Decision("deny", Reason.BAD_REQUEST, decision.entry), offer
            exchange.offer = offer
        if decision.treatment != "inspect":
            # Another entry won than for the connection, and it says that what passes is not to be opened.
            return Decision(
                "deny", Reason.SCHEME_NOT_ALLOWED, decision.entry
            ), f"treatment {decision.treatment}"
        problem = self._body_problem(decision, attempt, fields) or credential.problem_of(
            exchange, decision, request, time.time()
        )
        if problem is not None:
            return Decision("deny", problem.reason, decision.entry), problem.detail
        over = exchange.charge(decision.entry, _size(request, fields))
        if over is not None:
            return Decision("deny", over.reason, decision.entry), over.limit
        return decision, None

    def _body_problem(
        self, decision: Decision, attempt: RequestAttempt, fields: tuple[Field, ...]
    ) -> Refused | None:
        """Return why a request cannot have the body that its rule asks for; whether it has is seen when it is whole."""
        if decision.entry is None or not decision.entry.body:
            return None
        why = refuses_head(fields, has_body=attempt.body)
        if why is None and not self._holds_bodies:
            why = "nobody here holds bodies back"
        return Refused(Reason.BODY_MISMATCH, why) if why is not None else None

    async def _admit(self, flow: http.HTTPFlow, exchange: Exchange) -> None:
        """Get the credential, write the decision down, then let the request go: the order is the law."""
        request = flow.request
        assert exchange.bound is not None
        has_body = _has_body(flow)
        request.headers = http.Headers(onward_request(_fields(request), exchange.bound.authority))
        refused = await credential.lend(exchange, request, has_body=has_body)
        if refused is not None:
            flow.response = as_response(
                exchange.deny(Decision("deny", refused.reason, exchange.decision.entry), refused.detail)
            )
            return
        if exchange.decision.entry is not None and exchange.decision.entry.body:
            if exchange.body is Body.CHUNKS:
                mismatch = Decision("deny", Reason.BODY_MISMATCH, exchange.decision.entry)
                flow.response = as_response(exchange.deny(mismatch, "its chunks are signed one by one"))
                return
            exchange.body = Body.WHOLE
        if exchange.lease is not None and (changed := self._late(exchange)) is not None:
            flow.response = as_response(
                exchange.deny(Decision("deny", changed), "while a lease was asked for")
            )
            return
        if exchange.decision.once and not await self._redeem(exchange):
            asks = exchange.decision.entry is not None and exchange.decision.entry.effect == "ask"
            again = Decision("ask", Reason.APPROVAL_REQUIRED, exchange.decision.entry)
            used = again if asks else Decision("deny", Reason.NOT_ALLOWED)
            flow.response = as_response(exchange.deny(used, "its grant was for one request, which has come"))
            return
        try:
            refusal, exchange.refusal, exchange.status = exchange.refusal, None, None
            async with asyncio.timeout(COMMIT_TIMEOUT):
                await exchange.commit()
        except (AuditUnavailable, TimeoutError):
            flow.response = as_response(exchange.deny(Decision("deny", Reason.AUDIT_UNAVAILABLE)))
            return
        late = self._late(exchange)  # what came while the record was written
        if late is not None:
            exchange.refusal = refusal
            flow.response = as_response(exchange.refuse(late))
            return
        if exchange.offer is not None:
            request.headers = http.Headers(_fields(request) + _UPGRADE)
        if request.http_version == "HTTP/1.0" or not has_body:
            request.headers.pop("expect", None)  # nothing to invite, or nobody who understands the invitation
        request.data.authority = b""
        request.data.host = _address_text(exchange)
        request.data.port = exchange.bound.port
        request.data.scheme = exchange.bound.scheme.encode()
        request.stream = True
        flow.response = None
        exchange.admitted = True

    async def _redeem(self, exchange: Exchange) -> bool:
        """Have a grant for one request spent on this one, by control, which does so once; from here on the request holds it."""
        asking, grant, attempt = self.connection.services.asking, exchange.decision.grant, exchange.attempt
        if asking is None or grant is None or attempt is None:
            return False
        if not await asking.redeem(self.connection.sandbox.id, grant, exchange.attempt_id):
            return False
        exchange.attempt = dataclasses.replace(attempt, redeemed=grant)
        return True

    def _late(self, exchange: Exchange) -> Reason | None:
        """Say why a request that was allowed may no longer go."""
        sandbox = self.connection.sandbox
        if sandbox.revoked:
            return Reason.REVOKED
        if sandbox.policy is not exchange.policy and not exchange.may_go(time.time()):
            return Reason.POLICY_CHANGED
        return None


def _size(request: http.Request, fields: tuple[Field, ...]) -> int:
    """Return the bytes of a request's head, as it came."""
    line = len(request.data.method) + len(request.data.path) + len(b"  HTTP/1.1\r\n\r\n")
    return line + sum(len(name) + len(value) + len(b": \r\n") for name, value in fields)


def _address_text(exchange: Exchange) -> str:
    assert exchange.bound is not None
    host = exchange.bound.host
    return ".".join(host) if isinstance(host, tuple) else str(host)


def _fields(message: http.Message) -> tuple[Field, ...]:
    return message.headers.fields


def as_response(refusal: Refusal) -> http.Response:
    """Return the refusal in mitmproxy's form, for a stock mitmproxy; our engine writes the refusal itself."""
    response = http.Response.make(refusal.status, refusal.body, refusal.fields)
    response.reason = refusal.phrase
    return response


def _upgrade(fields: tuple[Field, ...]) -> str | None:
    """Return the protocol that a request wants instead, in lower case, whether or not Connection names it."""
    offers = (
        b",".join(value for name, value in fields if name.lower() == b"upgrade").decode("latin-1").lower()
    )
    wanted = [offer.strip() for offer in offers.split(",") if offer.strip()]
    wanted = [offer for offer in wanted if offer not in _HEADERS_ONLY_UPGRADES]
    return min(wanted, key=lambda offer: offer == "websocket", default=None)  # any other one first


def _has_body(flow: http.HTTPFlow) -> bool:
    return bool(flow.metadata.get(BODY)) or any(
        name.lower() == b"transfer-encoding" or (name.lower() == b"content-length" and value != b"0")
        for name, value in _fields(flow.request)
    )
