"""The book of what was asked for and what people said. Pure: every clock reading is handed in, nothing is sent or written.

Nothing here is kept on disk, on purpose: a sandbox ends with the daemon that carries it, and a grant with its sandbox, so after a
restart there is nothing left that one could be for. What was granted, by whom and why is in the journal for good.

Two clocks run for each grant and each question, the wall's and one that only goes forward; whichever says so first ends it.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from egressd.control.approvals.people import Person
from egressd.control.approvals.subject import Case, Length, Subject, grant_of
from egressd.gate.buckets import TokenBucket
from egressd.policy.grants import Grant, Scope

WAITING_SANDBOX: Final = 20
WAITING: Final = 1_000
"""Questions that wait for people, of one sandbox and in all; more are not taken."""
HEARD_SANDBOX: Final = (200, 10.0)
"""Questions of one sandbox that are looked at, repetitions too, and in how many seconds: more than a sound worker sends."""
FRESH_SANDBOX: Final = (30, 600.0)
FRESH: Final = (600, 600.0)
"""New questions of one sandbox and in all, and in how many seconds."""
GRANTS_SANDBOX: Final = 100
KEPT: Final = 2_000
"""Questions that were answered, and grants that are over, and are still told of."""
PATIENCE: Final = 3_600.0
"""Seconds that a question waits for an answer."""
REFUSED: Final = 3_600.0
"""Seconds in which what a person has refused is not asked again."""
MOST_WORDS: Final = 500
SHORT: Final = 900.0
LIFE: Final = 86_400.0
"""Seconds of a short grant, within which one for a single request has to be used; and most of one for a sandbox's life."""

type ItemState = Literal["waiting", "approved", "denied", "lapsed"]
type GrantState = Literal["live", "spent", "expired", "revoked", "lapsed"]
type Asker = Literal["traffic", "sandbox", "operator"]


@dataclass(frozen=True, slots=True)
class Moment:
    """Now, by both clocks: Unix seconds, and seconds that only go forward."""

    wall: float
    steady: float


@dataclass(frozen=True, slots=True)
class Voice:
    """Somebody who has spoken: in words for the record, and as whom he is known, if he is."""

    told: str
    person: Person | None = None

    @property
    def name(self) -> str:
        """How he is called where it is shown."""
        return self.person.name if self.person is not None else self.told


@dataclass(slots=True)
class Item:
    """One question. `words` are the sandbox's own, as it sent them; `votes` those who have approved so far."""

    id: str
    case: Case
    asker: Asker
    asked: float
    steady: float
    words: str = ""
    count: int = 1
    last: float = 0.0
    state: ItemState = "waiting"
    scope: Scope | None = None
    length: Length | None = None
    votes: list[Voice] = field(default_factory=list)
    by: str = ""
    because: str = ""
    decided: float | None = None
    grant: str | None = None

    @property
    def subject(self) -> Subject:
        """What is asked for."""
        return self.case.subject


@dataclass(slots=True)
class Given:
    """One grant and how it stands; `until` is the steady reading at which it is over."""

    grant: Grant
    item: str
    what: str
    length: Length
    by: str
    because: str
    until: float
    state: GrantState = "live"
    over: float | None = None
    over_by: str = ""
    attempt: str = ""

    def lives(self, now: Moment) -> bool:
        """Whether it lets anything through, by both clocks; one that is spent is there for its request alone."""
        timely = self.grant.begins <= now.wall < self.grant.ends and now.steady < self.until
        return self.state in ("live", "spent") and timely


class Refused(Exception):
    """What a person wants cannot be done: not any more or not in this way (409), not by him (403), not here and now (503)."""

    def __init__(self, detail: str, hint: str = "", *, status: int = 409) -> None:
        super().__init__(detail)
        self.detail, self.hint, self.status = detail, hint, status


class Book:
    """The questions and grants of all sandboxes of one process."""

    def __init__(self) -> None:
        """Nobody has asked for anything."""
        self.items: OrderedDict[str, Item] = OrderedDict()
        self.grants: OrderedDict[str, Given] = OrderedDict()
        self._known: dict[tuple[str, ...], Item] = {}
        self._waiting: Counter[str] = Counter()
        self._fresh: dict[str, TokenBucket] = {}
        self._heard: dict[str, TokenBucket] = {}
        self._all = TokenBucket(*FRESH)

    # asking

    def hears(self, sandbox: str, now: Moment) -> bool:
        """Whether one more question of a sandbox is looked at now."""
        return self._heard.setdefault(sandbox, TokenBucket(*HEARD_SANDBOX)).take(now.steady)

    def known(self, subject: Subject, policy: str, now: Moment) -> Item | None:
        """Return the question that this one repeats: it waits, or was refused a while ago under the same rules."""
        item = self._known.get(subject.key)
        if item is None or item.case.policy != policy:
            return None
        refused = item.state == "denied" and now.steady - item.steady < REFUSED
        return item if item.state == "waiting" or refused else None

    def repeat(self, item: Item, words: str, now: Moment) -> None:
        """Count a repetition. Words may be added as long as nobody has spoken, and are never changed."""
        item.count += 1
        item.last = now.wall
        if words and not item.words and not item.votes and item.state == "waiting":
            item.words = words[:MOST_WORDS]

    def room(self, sandbox: str, asker: Asker, now: Moment) -> str | None:
        """Return why no new question of a sandbox is taken now, None where one is; that counts as having asked."""
        if self._waiting[sandbox] >= WAITING_SANDBOX:
            return "too many requests of this sandbox wait for a person already"
        if self._waiting.total() >= WAITING:
            return "too many requests wait for a person already"
        if asker == "operator":
            return None
        bucket = self._fresh.setdefault(sandbox, TokenBucket(*FRESH_SANDBOX))
        if not bucket.take(now.steady):
            return "this sandbox has asked for too much in the last minutes"
        return None if self._all.take(now.steady) else "too much was asked for in the last minutes"

    def open(self, case: Case, asker: Asker, words: str, now: Moment) -> Item:
        """Take a new question."""
        item = Item(
            f"apr-{secrets.token_hex(8)}",
            case,
            asker,
            now.wall,
            now.steady,
            words[:MOST_WORDS],
            last=now.wall,
        )
        self.items[item.id] = item
        self._known[case.subject.key] = item
        self._waiting[case.subject.sandbox] += 1
        self._trim()
        return item

    # answering

    def vote(self, item: Item, scope: Scope, length: Length, voice: Voice) -> None:
        """Take an approval; raises Refused where it is none that can be given, or says something else than the first."""
        self._still(item)
        option = next((one for one in item.case.options if one.scope == scope), None)
        if option is None or length not in option.lengths:
            raise Refused(f"{scope} for {length} is none of what can be granted here")
        if item.votes and (item.scope, item.length) != (scope, length):
            first = f"{item.votes[0].name} has approved {item.scope} for {item.length}"
            raise Refused(first, "approve the same, or deny it")
        if any(self._same(vote, voice) for vote in item.votes):
            raise Refused(f"{voice.name} has approved it already", "somebody else is needed")
        item.scope, item.length = scope, length
        item.votes.append(voice)

    def unvote(self, item: Item) -> None:
        """Take the last approval back: what follows of it could not be done."""
        item.votes.pop()
        if not item.votes:
            item.scope = item.length = None

    def give(self, item: Item, because: str, now: Moment, life: float | None) -> Given:
        """Return the grant that a question's votes are for; it counts once it is put in by `enter`.

        `life` are the seconds that the sandbox still has, None for no end of its own. Raises Refused.
        """
        assert item.scope is not None
        assert item.length is not None
        sandbox = item.subject.sandbox
        if sum(1 for _ in self.of(sandbox)) >= GRANTS_SANDBOX:
            raise Refused(f"the sandbox has {GRANTS_SANDBOX} grants", "revoke some of them")
        seconds = LIFE if item.length == "life" else SHORT
        seconds = min(seconds, life) if life is not None else seconds
        if seconds <= 0:
            raise Refused("the sandbox's time is over")
        grant = grant_of(
            f"gnt-{secrets.token_hex(8)}", item.subject, item.case.policy, item.scope, now.wall, now.wall + seconds,
            once=item.length == "once",
        )  # fmt: skip
        covers = next(option.covers for option in item.case.options if option.scope == item.scope)
        by = " and ".join(vote.told for vote in item.votes)
        return Given(grant, item.id, covers, item.length, by, because, now.steady + seconds)

    def enter(self, item: Item, given: Given, now: Moment) -> None:
        """Have a grant count from now on."""
        self.grants[given.grant.id] = given
        item.grant = given.grant.id
        self._close(item, "approved", given.by, given.because, now)

    def deny(self, item: Item, voice: Voice, because: str, now: Moment) -> None:
        """Refuse a question; raises Refused."""
        self._still(item)
        self._close(item, "denied", voice.told, because, now)
        item.steady = now.steady

    def lapse(self, item: Item, why: str, now: Moment) -> None:
        """Nobody has answered, or there is nothing left to answer."""
        self._close(item, "lapsed", "", why, now)

    # grants

    def of(self, sandbox: str) -> Iterator[Given]:
        """Yield a sandbox's grants that are not over."""
        yield from (
            given
            for given in self.grants.values()
            if given.grant.sandbox == sandbox and given.state in ("live", "spent")
        )

    def redeem(self, sandbox: str, grant: str, attempt: str, policy: str, now: Moment) -> Given | None:
        """Spend a grant for one request on an attempt, once; None where it cannot be."""
        given = self.grants.get(grant)
        if given is None or given.grant.sandbox != sandbox or not given.grant.once:
            return None
        if given.state != "live" or not given.lives(now) or given.grant.policy != policy:
            return None
        given.state, given.attempt = "spent", attempt
        given.grant = given.grant.model_copy(update={"spent": True})
        return given

    def end(self, given: Given, state: GrantState, by: str, now: Moment) -> None:
        """End a grant."""
        given.state, given.over, given.over_by = state, now.wall, by
        self._trim()

    def overdue(self, now: Moment) -> tuple[list[Item], list[Given]]:
        """Return the questions that nobody has answered in time, and the grants whose time is over."""
        items = [
            item
            for item in self.items.values()
            if item.state == "waiting" and now.steady - item.steady >= PATIENCE
        ]
        grants = [
            given
            for given in self.grants.values()
            if given.state in ("live", "spent") and not given.lives(now)
        ]
        return items, grants

    def leave(self, sandbox: str) -> None:
        """Forget how often a sandbox that has gone has asked."""
        self._fresh.pop(sandbox, None)
        self._heard.pop(sandbox, None)

    def waiting(self) -> Iterable[Item]:
        """Return the questions that wait, oldest first."""
        return [item for item in self.items.values() if item.state == "waiting"]

    # inside

    @staticmethod
    def _same(one: Voice, other: Voice) -> bool:
        return one.person is None or other.person is None or one.person.name == other.person.name

    @staticmethod
    def _still(item: Item) -> None:
        if item.state != "waiting":
            by = f" by {item.by}" if item.by else ""
            raise Refused(f"it was {item.state} already{by}")

    def _close(self, item: Item, state: ItemState, by: str, because: str, now: Moment) -> None:
        item.state, item.by, item.because, item.decided = state, by, because, now.wall
        sandbox = item.subject.sandbox
        self._waiting[sandbox] -= 1
        if self._waiting[sandbox] <= 0:
            del self._waiting[sandbox]

    def _trim(self) -> None:
        """Keep all that waits or lives, and of the rest the latest."""
        for item in [item for item in self.items.values() if item.state != "waiting"][
            : max(0, len(self.items) - WAITING - KEPT)
        ]:
            del self.items[item.id]
            if self._known.get(item.subject.key) is item:
                del self._known[item.subject.key]
        over = [given for given in self.grants.values() if given.state not in ("live", "spent")]
        for given in over[: max(0, len(over) - KEPT)]:
            del self.grants[given.grant.id]
