"""One request and what becomes of it: the account that its records are written from.

An exchange begins denied. It gets exactly one `decision` record and exactly one `end` record, whatever happens in between.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from egressd.credentials.attach import Body
from egressd.credentials.lease import Lease
from egressd.gate.account import Account, Over
from egressd.gate.asking import hint_of
from egressd.gate.connection import Connection
from egressd.gate.inspector.binding import Bound
from egressd.gate.inspector.refusal import Refusal, Refused, answer_http, refuse_http
from egressd.gate.inspector.veil import Veil
from egressd.gate.inspector.websocket import Offer
from egressd.gate.messages import Petitioned
from egressd.gate.pages import Page, Unanswered
from egressd.gate.permission import Permission, Place, permit_place
from egressd.journal.record import Record, clip, new_id, timestamp
from egressd.policy.attempt import DENIED, Decision, RequestAttempt
from egressd.policy.bodies import Conditions
from egressd.policy.compile import CompiledPolicy
from egressd.policy.decide import decide
from egressd.policy.effective import EffectiveEntry
from egressd.policy.names import format_host, hide_userinfo
from egressd.policy.reasons import Reason

EARLY: Final = "answered before the end of the request"
"""What the record says of an exchange whose client has its whole answer, though it had not sent all."""

_KEY_LIMIT = 64


@dataclass(slots=True)
class Exchange:
    """A request on `connection`; `bound` is where it goes once its names agree, `up` and `down` count bytes to and from there;
    `offer` is what a WebSocket handshake asks for.

    `admitted` is set last of all, after the decision record was written: it is the one thing that lets a byte out.
    """

    connection: Connection
    method: str | None = None
    target: str | None = None
    accept: str | None = None
    host_raw: str | None = None
    bound: Bound | None = None
    attempt: RequestAttempt | None = None
    offer: Offer | None = None
    decision: Decision = DENIED
    policy: CompiledPolicy | None = None
    """The rules that it was decided by."""
    account: Account | None = None
    """The limits that bind it, once it was counted against them."""
    retry_after: int | None = None
    petitioned: Petitioned | None = None
    """What came of putting it to people."""
    lease: Lease | None = None
    """What is attached to it, and may not come back in its response."""
    body: Body = Body.PASSES
    """What becomes of its body."""
    taken: tuple[str, ...] = ()
    """The slots in which it brought a key of its own, which is gone."""
    admitted: bool = False
    refusal: Refusal | None = None
    status: int | None = None
    up: int = 0
    down: int = 0
    upstream: Place | None = None
    attempt_id: str = field(default_factory=new_id)
    started: float = field(default_factory=time.monotonic)
    decided: bool = False
    ended: bool = False
    _veil: Veil | None = None

    @property
    def veil(self) -> Veil | None:
        """What lies over its response; None for an exchange without a lease, and for that one alone."""
        if self._veil is None and self.lease is not None:
            self._veil = Veil(self.lease.masking, keys=self.lease.token_requests)
        return self._veil

    @property
    def credential(self) -> str | None:
        """The credential that goes with it, by the rule that decided."""
        return self.decision.entry.credential if self.decision.entry is not None else None

    def decision_record(self, detail: str | None = None) -> Record:
        """Return the decision record of this request."""
        record = self._record("decision").decided(self.decision)
        record.detail = detail
        record.host_raw = clip(hide_userinfo(self.host_raw), 256) if self.host_raw is not None else None
        if self.refusal is not None:
            record.status = self.refusal.status
        record.credential = self.credential
        if self.lease is not None:
            record.lease = self.lease.id
            if self.lease.expires is not None:
                record.lease_expires = timestamp(self.lease.expires)
        return record

    def _record(self, event: str) -> Record:
        assert event in ("decision", "end")
        record = self.connection.record(
            "decision" if event == "decision" else "end", "request", self.attempt_id
        )
        record.method = self.method
        if self.target is not None:
            path, mark, query = hide_userinfo(self.target).partition("?")
            record.path = path
            record.query = redacted_query(query) if mark else None
        if self.bound is not None:
            record.host = format_host(self.bound.host)
            record.port = self.bound.port
            record.scheme = self.bound.scheme
        return record

    def may_go(self, now: float) -> bool:
        """Say whether the rules now in force let this request, of which nothing has left yet, go as it is."""
        if self.attempt is None:
            return False
        return self.stands_by(decide(self.connection.sandbox.policy, self.attempt, now), now)

    def stands_by(self, decision: Decision, now: float) -> bool:
        """Say whether a decision by the rules now in force allows this request as it is: read, and with this very credential.

        A lease that has merely expired does not end what was begun with it; one that was taken back does.
        """
        if not decision.allowed or decision.treatment != "inspect":
            return False
        if _bodies(decision) != _bodies(self.decision):
            return False  # what is held back of it, or has passed, was to be another body
        wanted = decision.entry.credential if decision.entry is not None else None
        if self.lease is None or wanted is None:
            return self.lease is None and wanted is None
        connection, leases = self.connection, self.connection.services.leases
        stands = leases is not None and leases.stands(self.lease)
        return wanted == self.lease.credential and stands and not connection.sandbox.policy.observes(now)

    def may_live(self, now: float) -> bool:
        """Say whether this request, judged anew, may still go on, and at the address it goes to."""
        if not self.admitted or self.attempt is None:
            return not self.admitted
        policy = self.connection.sandbox.policy
        decision = decide(policy, self.attempt, now)
        if not self.stands_by(decision, now):
            return False
        if self.upstream is None:
            return True
        return permit_place(policy, decision, self.upstream, port=self.attempt.port, now=now) is None

    @property
    def permission(self) -> Permission:
        """What says of each address why this request may not go there, if it may not (law 4)."""
        port = self.bound.port if self.bound is not None else None
        return Permission(self.connection.sandbox.policy, self.decision, port)

    def permits(self, place: Place) -> Reason | None:
        """Say why this request may not go to `place`, None if it may."""
        return self.permission(place)

    def refuse(self, reason: Reason, own: Unanswered | None = None) -> Refusal:
        """Make and keep the response that says why this request was refused; nothing is recorded by it.

        `own` are the particulars of a refusal by egressd's own pages.
        """
        connection = self.connection
        hint, approval = own.hint if own is not None else None, None
        if reason is Reason.APPROVAL_REQUIRED and connection.services.asking is not None:
            hint, approval = (
                hint_of(self.petitioned),
                self.petitioned.approval if self.petitioned is not None else None,
            )
        refused = Refused(
            attempt_id=self.attempt_id,
            sandbox=connection.sandbox.id,
            host=self.bound.host if self.bound is not None else connection.host,
            port=self.bound.port if self.bound is not None else connection.destination.port,
            method=self.method,
            accept=self.accept,
            retry_after=self._retry_after(reason),
            status=own.status if own is not None else None,
            hint=hint,
            allow=own.allow if own is not None else None,
            approval=approval or None,
        )
        self.admitted = False
        self.refusal = refuse_http(reason, refused)
        self.status = self.refusal.status
        return self.refusal

    def _retry_after(self, reason: Reason) -> int | None:
        if reason is not Reason.RATE_LIMITED:
            return None
        return self.retry_after if self.retry_after is not None else self.connection.retry_after

    def charge(self, entry: EffectiveEntry | None, size: int) -> Over | None:
        """Count this request, which `entry` allows and whose head has `size` bytes, against its limits; over one, say which."""
        assert self.bound is not None
        connection, now = self.connection, time.monotonic()
        sandbox = connection.sandbox
        self.account = sandbox.budget.account(now, sandbox.policy.effective, entry, self.bound.host)
        over = self.account.request(now, connection.attempt_id, self.bound.host, size)
        self.retry_after = over.retry_after if over is not None else None
        return over

    def deny(self, decision: Decision, detail: str | None = None) -> Refusal:
        """Decide against the request, once: make its response and write its decision record."""
        refusal = self.refuse(decision.reason)
        self._decided_by(decision, detail)
        return refusal

    def give_up(self, reason: Reason, detail: str) -> Refusal:
        """Make the response that says why the request cannot go on, and decide against it if nothing was decided yet."""
        if not self.decided:
            self.deny(Decision("deny", reason), detail)
        return self.refuse(reason)

    @property
    def ending(self) -> Reason:
        """How a refused request ends: completed by the refusal that was decided, or for what has refused it since."""
        assert self.refusal is not None
        judged = self.decided and self.refusal.reason is self.decision.reason
        return Reason.COMPLETED if judged else self.refusal.reason

    def answer(self, allowed: Decision, answer: Page | Unanswered) -> Refusal:
        """Answer the request as egressd itself, and write its decision record; it is never admitted, so nothing leaves."""
        if isinstance(answer, Unanswered):
            refusal = self.refuse(answer.reason, answer)
            self._decided_by(Decision("deny", answer.reason), "at egressd itself")
            return refusal
        self.admitted = False
        self.refusal = answer_http(answer.content_type, answer.body, self.attempt_id)
        self.status = self.refusal.status
        self._decided_by(allowed, None)
        return self.refusal

    def _decided_by(self, decision: Decision, detail: str | None) -> None:
        self.decision, self.lease = decision, None
        if not self.decided:
            self.decided = True
            self.connection.services.recorder.put(self.decision_record(detail))

    async def commit(self) -> None:
        """Write the decision record and return once it is written; raises AuditUnavailable, and then it counts as
        not written."""
        self.decided = True  # from here on it is on its way: an end that comes first must not decide again
        try:
            taken = f"its own keys were taken out: {', '.join(self.taken)}" if self.taken else None
            body = "its body is still to be looked into" if _bodies(self.decision) else None
            said = "; ".join(filter(None, (taken, body))) or None
            await self.connection.services.recorder.commit(self.decision_record(said))
        except BaseException:
            self.decided = False
            raise

    def end(self, reason: Reason, detail: str | None = None) -> None:
        """Write the `end` record; the first call is the one that counts. What was never decided is denied first."""
        if self.ended:
            return
        self.ended = True
        if not self.decided:  # and nobody was told anything
            self.decided, self.admitted, self.refusal, self.status = True, False, None, None
            self.decision = Decision("deny", reason if reason not in _ENDINGS else Reason.INTERNAL_ERROR)
            self.connection.services.recorder.put(self.decision_record(detail))
        if self._veil is not None and self._veil.found:
            detail = "; ".join(filter(None, (detail, "the credential was masked in what came back")))
        if self._veil is not None and self._veil.taken:
            taken = f"taken out of what came back: {', '.join(self._veil.taken)}"[:200]
            detail = "; ".join(filter(None, (detail, taken)))
        record = self._record("end")
        record.reason = reason.value
        record.status = self.status
        record.bytes_up, record.bytes_down = self.up, self.down
        record.upstream = str(self.upstream) if self.upstream is not None else None
        record.duration_ms = round((time.monotonic() - self.started) * 1000, 3)
        record.detail = detail
        if self.decision.allowed and reason in _DENIALS:
            record.verdict = "deny"  # allowed by name, refused by what the name resolved to
        self.connection.services.recorder.put(record)


def _bodies(decision: Decision) -> Conditions:
    return decision.entry.body if decision.entry is not None else ()


_ENDINGS = frozenset({Reason.COMPLETED, Reason.RULE, Reason.GRANT, Reason.OBSERVED, Reason.EXPLAINED})
_DENIALS = frozenset(
    {Reason.SPECIAL_ADDRESS, Reason.ADDRESS_OUTSIDE_RULE, Reason.IP_LITERAL}
    | {
        Reason.BODY_MISMATCH,
        Reason.CREDENTIAL_NEEDS_TLS,
        Reason.PLACEHOLDER_LEAK,
        Reason.TOKEN_REQUEST,
        Reason.UNSIGNABLE,
    }
    | {reason for reason in Reason if reason.value.startswith("floor_")}
)


def redacted_query(query: str) -> str:
    """Return a query with every value replaced by its length, `key=<5>`.

    What has no key, or too odd a one, is a value as a whole.
    """
    parts = []
    for part in query.split("&")[:_KEY_LIMIT]:
        key, equals, value = part.partition("=")
        if equals and len(key) <= _KEY_LIMIT and key.isprintable():
            parts.append(f"{key}=<{len(value)}>")
        else:
            parts.append(f"<{len(part)}>")
    return "&".join(parts)
