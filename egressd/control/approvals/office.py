"""The office of approvals: hears what workers put to people, has it answered, gives and takes grants, and writes everything down.

Control alone gives grants, and by its own copy of the rules; a worker is told of them and enforces them. A worker that has fallen
could let out what it likes of the sandboxes that it carries, granted or not; what it cannot do is get a credential or a grant
of another sandbox, make the record say that somebody approved, or have a grant for one request counted twice.

A grant is in the journal before anything can go by it: where that cannot be written, it is not given. A grant is taken back
first and recorded then: where that cannot be written, it is taken back all the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from egressd.control.approvals.book import Asker, Book, Given, GrantState, Item, Moment, Refused, Voice
from egressd.control.approvals.people import Caller, People, Person
from egressd.control.approvals.proposal import NoProposal, Proposal, propose
from egressd.control.approvals.subject import Case, Length, Subject, Unaskable, assess, subject_of
from egressd.control.sandboxes import SandboxState
from egressd.control.voice import say
from egressd.gate.messages import Petition, Petitioned, Plea, Redeem, Redeemed
from egressd.gate.standing import MOST_ROWS, Row, Standing, State
from egressd.journal.record import Record, new_id, timestamp
from egressd.policy.attempt import ConnectionAttempt, RequestAttempt
from egressd.policy.compile import CompiledPolicy, compile_policy
from egressd.policy.decide import decide
from egressd.policy.effective import EffectivePolicy
from egressd.policy.grants import Scope, granted
from egressd.rulefiles.problems import printable
from egressd.rulefiles.requestline import BadLine, parse_request_line
from egressd.rulefiles.source import RuleSource

LOOK: Final = 1.0
"""Seconds between two looks for what is over."""
_NOT_NOW: Final = "nobody can be asked now"


class Floor(Protocol):
    """Where the sandboxes are: the supervisor."""

    def find(self, sandbox_id: str) -> SandboxState | None:
        """Return a sandbox that is carried."""

    def stand(self, sandbox_id: str) -> None:
        """Tell a sandbox's workers how its requests stand."""

    def recorded_all(self, records: Sequence[dict[str, Any]]) -> bool:
        """Write records; returns whether they are in the journal."""


type Tell = Callable[[str, Item | None, Given | None], None]
"""Is told of what happens: a word, the question it is about, and the grant, if there is one."""


def _quiet(_word: str, _item: Item | None, _given: Given | None) -> None:
    """Nobody is told."""


class Office:
    """The approvals of one process. `people` may be exchanged while it runs."""

    def __init__(
        self,
        people: People | None = None,
        *,
        four_eyes: bool = True,
        source: Callable[[], RuleSource] | None = None,
        tell: Tell = _quiet,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nobody can ask before `attach`. `four_eyes` wants two people wherever a credential could go along; `source` are the
        rule files in force, for proposals.
        """
        self.people = people or People()
        self.book = Book()
        self.serial = 0
        """Greater after every change."""
        self._four_eyes = four_eyes
        self._source = source
        self._tell = tell
        self._wall, self._steady = wall, steady
        self._floor: Floor | None = None
        self._compiled: dict[str, tuple[EffectivePolicy, CompiledPolicy]] = {}
        self._looking: asyncio.Task[None] | None = None

    def attach(self, floor: Floor) -> None:
        """Speak for the sandboxes of a supervisor from now on; in a running loop."""
        self.attach_still(floor)
        self._looking = asyncio.get_running_loop().create_task(self._keep_looking())

    def attach_still(self, floor: Floor) -> None:
        """Do the same, and leave it to the caller to `look`."""
        self._floor = floor

    async def close(self) -> None:
        """Stop: nothing is asked, granted or ended any more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        self._floor = None

    @property
    def now(self) -> Moment:
        """Now, by both clocks."""
        return Moment(self._wall(), self._steady())

    # what workers say

    async def hear(self, message: Petition | Plea | Redeem, sandbox: SandboxState) -> Petitioned | Redeemed:
        """Answer a worker that carries the sandbox. Total: whatever fails is no approval."""
        try:
            if isinstance(message, Redeem):
                return Redeemed(ticket=message.ticket, ok=self._redeem(message, sandbox))
            if not self.book.hears(sandbox.id, self.now):
                return Petitioned(ticket=message.ticket, state="refused", detail=_NOT_NOW)
            policy = await self._policy(sandbox)
            if isinstance(message, Plea):
                found = self._pleaded(message, policy)
                words = message.why
            else:
                found = subject_of(
                    sandbox.id, message.scheme, message.host, message.port, message.method, message.path,
                    opaque=message.opaque,
                )  # fmt: skip
                words = ""
            answer = self._put(found, policy, sandbox, "sandbox" if words else "traffic", words)
            return answer.model_copy(update={"ticket": message.ticket})
        except Exception as error:  # noqa: BLE001 -- law 1: nothing is approved
            say(f"an approval could not be asked for: {type(error).__name__}: {error}")
            if isinstance(message, Redeem):
                return Redeemed(ticket=message.ticket, ok=False)
            return Petitioned(ticket=message.ticket, state="refused", detail=_NOT_NOW)

    def _pleaded(self, plea: Plea, policy: CompiledPolicy) -> Subject | Unaskable:
        return subject_from_line(plea.sandbox, plea.request, policy, self._wall())

    def _put(
        self,
        subject: Subject | Unaskable,
        policy: CompiledPolicy,
        sandbox: SandboxState,
        asker: Asker,
        words: str,
    ) -> Petitioned:
        if isinstance(subject, Unaskable):
            return Petitioned(ticket=0, state="refused", detail=subject.detail)
        now = self.now
        case = assess(policy, subject, now.wall)
        if isinstance(case, Unaskable):
            state = "approved" if case.allowed else "refused"
            return Petitioned.model_validate({"ticket": 0, "state": state, "detail": _ascii(case.detail)})
        item = self.book.known(subject, case.policy, now)
        if item is not None:
            self.book.repeat(item, words, now)
            self.serial += 1
            state = "denied" if item.state == "denied" else "waiting"
            return Petitioned.model_validate({"ticket": 0, "state": state, "approval": item.id})
        full = self.book.room(sandbox.id, asker, now)
        if full is not None:
            return Petitioned(ticket=0, state="refused", detail=full)
        item = self._open(case, asker, words, sandbox)
        return Petitioned(ticket=0, state="waiting", approval=item.id)

    def _open(self, case: Case, asker: Asker, words: str, sandbox: SandboxState, by: str = "") -> Item:
        item = self.book.open(case, asker, words, self.now)
        said = f": {printable(words)}" if words else ""
        whom = {"traffic": "by a request", "sandbox": "in the sandbox's own words", "operator": f"by {by}"}[
            asker
        ]
        self._record(item, f"asked {item.id} {whom}{said}", sandbox)
        self._changed(sandbox.id, "asked", item)
        return item

    def _redeem(self, message: Redeem, sandbox: SandboxState) -> bool:
        """Nothing is waited for here, so that of two that come at once one is first."""
        if message.sandbox != sandbox.id:
            return False
        given = self.book.redeem(
            sandbox.id, message.grant, message.attempt, sandbox.policy.digest(), self.now
        )
        if given is None:
            return False
        item = self.book.items.get(given.item)
        self._record(
            item, f"used {given.grant.id} of {given.item} by attempt {message.attempt}", sandbox, given
        )
        self._changed(sandbox.id, "used", item, given)
        return True

    # what people say

    async def ask(self, sandbox_id: str, request: str, by: Caller) -> Item:
        """Ask for a request of a sandbox as an operator; raises Refused."""
        sandbox = self._sandbox(sandbox_id)
        policy = await self._policy(sandbox)
        subject = subject_from_line(sandbox_id, request, policy, self._wall())
        case = assess(policy, subject, self._wall()) if isinstance(subject, Subject) else subject
        if isinstance(case, Unaskable):
            raise Refused(case.detail)
        now = self.now
        item = self.book.known(case.subject, case.policy, now)
        if item is not None and item.state == "waiting":
            return item
        full = self.book.room(sandbox_id, "operator", now)
        if full is not None:
            raise Refused(full)
        return self._open(case, "operator", "", sandbox, by.told)

    async def approve(
        self, item: Item, scope: Scope, length: Length, policy: str, caller: Caller, because: str
    ) -> Item:
        """Approve a question as reviewed under the rules of this digest; raises Refused.

        Where two people are needed the first one's word is kept, and the question waits on.
        """
        sandbox = self._sandbox(item.subject.sandbox)
        voice = self._voice(item, caller)
        compiled = await self._policy(sandbox)
        # From here on nothing is waited for.
        if not policy == item.case.policy == compiled.digest == sandbox.policy.digest():
            raise Refused(
                "the rules have changed since it was reviewed", "look at it again once it is asked again"
            )
        now = self.now
        case = assess(compiled, item.subject, now.wall)
        if isinstance(case, Unaskable):
            raise Refused(f"it can no longer be approved: {case.detail}")
        self.book.vote(item, scope, length, voice)
        if len(item.votes) < self.needed(item):
            self._record(
                item,
                f"approved {item.id} first, {scope} for {length}, by {voice.told}{_why(because)}",
                sandbox,
            )
            self._changed(sandbox.id, "seconded", item)
            return item
        try:
            given = self.book.give(item, because, now, self._left(sandbox, now))
            text = f"approved {item.id}: {given.grant.id}, {scope} for {length}, by {given.by}{_why(because)}"
            if not self._record(item, text, sandbox, given):
                raise Refused("the journal cannot be written, so nothing is granted", status=503)
        except Refused:
            self.book.unvote(item)
            raise
        self.book.enter(item, given, now)
        self._changed(sandbox.id, "approved", item, given)
        return item

    def deny(self, item: Item, caller: Caller, because: str) -> Item:
        """Refuse a question; raises Refused. Whoever may speak here may do that."""
        self.book.deny(item, Voice(_told(caller, self._person(caller))), because, self.now)
        self._record(item, f"denied {item.id} by {item.by}{_why(because)}", self._find(item.subject.sandbox))
        self._changed(item.subject.sandbox, "denied", item)
        return item

    def revoke(self, given: Given, caller: Caller, because: str = "") -> Given:
        """Take a grant back; what goes on by it is cut. Raises Refused where it is over already."""
        if given.state not in ("live", "spent"):
            raise Refused(f"it is {given.state} already")
        self._end(given, "revoked", f"{_told(caller, self._person(caller))}{_why(because)}")
        return given

    async def propose(self, item: Item, scope: Scope) -> Proposal:
        """Return a question as a change of the rules; raises NoProposal."""
        source = self._source() if self._source is not None else None
        if source is None:
            raise NoProposal("there are no rule files here")
        when = timestamp(item.asked)[:10]
        return await asyncio.to_thread(
            propose, source, item.case, scope, f"proposed from {item.id}, asked {when}", self._wall()
        )

    def sandbox_of(self, item: Item) -> SandboxState | None:
        """Return the sandbox that a question is about, while it is carried."""
        return self._find(item.subject.sandbox)

    def needed(self, item: Item) -> int:
        """How many people must approve a question."""
        return 2 if self._four_eyes and item.case.credentials else 1

    # inside

    def _voice(self, item: Item, caller: Caller) -> Voice:
        """Return who approves, if he may; raises Refused."""
        person, case = self._person(caller), item.case
        if case.approvers and (person is None or not person.is_one_of(case.approvers)):
            wanted = ", ".join(case.approvers)
            hint = (
                "show who you are: --as-token-file"
                if self.people
                else "approvals.people says who they are; there is no such file"
            )
            raise Refused(f"the rule wants an approver of: {wanted}", hint, status=403)
        if self.needed(item) > 1 and person is None:
            goes = ", ".join(case.credentials)
            hint = "approvals.people says who people are; approvals.four_eyes: false asks for one alone"
            raise Refused(
                f"a credential could go along ({goes}), so two known people must approve",
                hint,
                status=403,
            )
        return Voice(_told(caller, person), person)

    def _person(self, caller: Caller) -> Person | None:
        found = self.people.who(caller)
        if isinstance(found, str):
            raise Refused(found, status=403)
        return found

    def _left(self, sandbox: SandboxState, now: Moment) -> float | None:
        return sandbox.expires - now.wall if sandbox.expires is not None else None

    def _find(self, sandbox_id: str) -> SandboxState | None:
        return self._floor.find(sandbox_id) if self._floor is not None else None

    def _sandbox(self, sandbox_id: str) -> SandboxState:
        sandbox = self._find(sandbox_id)
        if sandbox is None:
            raise Refused("there is no such sandbox")
        return sandbox

    async def _policy(self, sandbox: SandboxState) -> CompiledPolicy:
        """Return a sandbox's newest policy with its grants, compiled beside the loop."""
        while True:
            said = sandbox.policy
            known = self._compiled.get(sandbox.id)
            if known is None or known[0] is not said:
                known = said, await asyncio.to_thread(compile_policy, said)
                self._compiled[sandbox.id] = known
            if said is sandbox.policy:
                return granted(known[1], sandbox.standing.grants, sandbox.id)

    def _changed(
        self, sandbox_id: str, word: str = "", item: Item | None = None, given: Given | None = None
    ) -> None:
        """Tell whoever has to know: the sandbox's workers first."""
        self.serial += 1
        sandbox = self._find(sandbox_id)
        if sandbox is not None and self._floor is not None:
            standing = self._standing(sandbox_id)
            if standing != sandbox.standing:
                sandbox.standing = standing
                self._floor.stand(sandbox_id)
        if word:
            self._tell(word, item, given)

    def _standing(self, sandbox_id: str) -> Standing:
        now = self.now
        grants = tuple(given.grant for given in self.book.of(sandbox_id) if given.lives(now))
        items = [item for item in reversed(self.book.items.values()) if item.subject.sandbox == sandbox_id]
        return Standing(grants=grants, rows=tuple(self._row(item) for item in items[:MOST_ROWS]))

    def _row(self, item: Item) -> Row:
        given = self.book.grants.get(item.grant) if item.grant is not None else None
        states: dict[str, State] = {"waiting": "waiting", "denied": "denied", "lapsed": "ended"}
        state: State = states.get(item.state, "ended")
        if given is not None and given.state in ("live", "spent"):
            state = "approved" if given.state == "live" else "used"
        live = state == "approved" and given is not None
        return Row(
            id=item.id,
            what=item.subject.what,
            state=state,
            asked=item.asked,
            until=given.grant.ends if live and given is not None else None,
            covers=given.what if live and given is not None else "",
        )

    def _end(self, given: Given, state: GrantState, by: str) -> None:
        """Take back first, record then: nothing goes by it any more, whatever the journal says."""
        self.book.end(given, state, by, self.now)
        item = self.book.items.get(given.item)
        self._changed(given.grant.sandbox, state, item, given)
        sandbox = self._find(given.grant.sandbox)
        self._record(
            item, f"{state} {given.grant.id} of {given.item}{f': {by}' if by else ''}", sandbox, given
        )

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 -- the next look must come; grants end in the worker by its own clock too
                say(f"approvals: {type(error).__name__}: {error}")

    def look(self) -> None:
        """End what is over: by time, by other rules, or with its sandbox."""
        items, grants = self.book.overdue(self.now)
        for given in grants:
            self._end(given, "expired", "")
        for item in items:
            self._lapse(item, "nobody has answered")
        digests: dict[str, str | None] = {}
        for given in [one for one in self.book.grants.values() if one.state in ("live", "spent")]:
            why = self._gone(given.grant.sandbox, given.grant.policy, digests)
            if why is not None:
                self._end(given, "lapsed", why)
        for item in self.book.waiting():
            why = self._gone(item.subject.sandbox, item.case.policy, digests)
            if why is not None:
                self._lapse(item, why)
        for sandbox_id in [known for known in self._compiled if self._find(known) is None]:
            del self._compiled[sandbox_id]
            self.book.leave(sandbox_id)

    def _gone(self, sandbox_id: str, policy: str, digests: dict[str, str | None]) -> str | None:
        if sandbox_id not in digests:
            sandbox = self._find(sandbox_id)
            digests[sandbox_id] = sandbox.policy.digest() if sandbox is not None else None
        if digests[sandbox_id] is None:
            return "its sandbox has ended"
        return None if digests[sandbox_id] == policy else "the rules have changed since it was reviewed"

    def _lapse(self, item: Item, why: str) -> None:
        self.book.lapse(item, why, self.now)
        self._record(item, f"lapsed {item.id}: {why}", self._find(item.subject.sandbox))
        self._changed(item.subject.sandbox, "lapsed", item)

    def _record(
        self, item: Item | None, detail: str, sandbox: SandboxState | None, given: Given | None = None
    ) -> bool:
        """Write down what happened; returns whether it is in the journal."""
        if self._floor is None:
            return False
        attempt_id = new_id()
        record = Record(
            event="approval", sandbox=_NOBODYS, attempt_id=attempt_id, root_id=attempt_id, detail=detail
        )
        if sandbox is not None:
            record.labels, record.traceparent = sandbox.labels or None, sandbox.traceparent
        if item is not None:
            subject, entry = item.subject, item.case.entry
            record.sandbox, record.profile, record.policy = (
                subject.sandbox,
                item.case.profile,
                item.case.policy,
            )
            record.host, record.port, record.scheme = subject.host, subject.port, subject.scheme
            record.method, record.path = subject.method or None, subject.path or None
            if entry is not None:
                record.rule, record.place = entry.id, entry.place
        if given is not None:
            record.sandbox, record.grant = given.grant.sandbox, given.grant.id
        return self._floor.recorded_all([record.as_dict()])


_NOBODYS: Final = "-"


def subject_from_line(sandbox: str, line: str, policy: CompiledPolicy, now: float) -> Subject | Unaskable:
    """Return the subject of a request as people and sandboxes write it (`METHOD URL`, `tcp://host:port`), or why it is none."""
    asked = parse_request_line(line)
    if isinstance(asked, BadLine):
        return Unaskable(_ascii(f"{asked.detail}; {asked.hint}" if asked.hint else asked.detail))
    attempt = asked.attempt
    if not isinstance(attempt, RequestAttempt | ConnectionAttempt) or not isinstance(attempt.host, tuple):
        return Unaskable("ask for a request, METHOD URL, with the host's name")
    host = ".".join(attempt.host)
    if isinstance(attempt, ConnectionAttempt):
        return subject_of(sandbox, "tcp", host, attempt.port, opaque=True)
    if decide(policy, attempt, now).treatment == "tunnel":
        return subject_of(sandbox, "https", host, attempt.port, opaque=True)
    method = "WEBSOCKET" if attempt.upgrade else attempt.method
    path = attempt.target.partition("?")[0]
    return subject_of(sandbox, attempt.scheme, host, attempt.port, method, path)


def _told(caller: Caller, person: Person | None) -> str:
    return f"{person.name} ({caller.told})" if person is not None else caller.told


def _why(because: str) -> str:
    return f": {printable(because)}" if because else ""


def _ascii(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("ascii")[:200]
