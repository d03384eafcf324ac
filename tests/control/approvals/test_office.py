"""The office of approvals: what can be asked for, who may say yes, and that every way of failing is no approval."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from egressd.control.approvals.book import (
    FRESH_SANDBOX,
    HEARD_SANDBOX,
    LIFE,
    PATIENCE,
    REFUSED,
    SHORT,
    WAITING_SANDBOX,
    Given,
    Item,
    Refused,
)
from egressd.control.approvals.office import Office
from egressd.control.approvals.people import BadPeople, Caller, People, PeopleFile
from egressd.control.sandboxes import SandboxState
from egressd.gate.messages import Petition, Petitioned, Plea, Redeem, Redeemed
from egressd.policy.compile import compile_policy
from egressd.policy.decide import decide
from egressd.policy.effective import EffectivePolicy
from egressd.policy.grants import granted
from tests.policy.entries import NOON, allow, ask, deny, request

BOX, OTHER = "sbx-00000000000000000001", "sbx-00000000000000000002"
OPERATOR = Caller("uid 0 pid 1", uid=0)
ENTRIES = (
    ask("pay.test", id="asking", requests=("ANY /**",)),
    ask("keyed.test", id="keyed", requests=("POST /v1/**",), credential="stripe"),
    ask("bank.test", id="bank", requests=("POST /**",), approvers=("oncall",)),
    ask("pinned.test", id="pinned", treatment="tunnel"),
    allow("open.test", id="open", requests=("GET /**",)),
    deny("evil.test", id="evil"),
    deny("bad.test", id="org", origin="organisation"),
)
PEOPLE = PeopleFile.model_validate(
    {
        "schema": 1,
        "people": {
            "alice": {"groups": ["oncall"], "token_sha256": hashlib.sha256(b"alices-token").hexdigest()},
            "bob": {"groups": ["oncall"], "certificate": "bob@example.com"},
            "root": {"uid": 0},
        },
    }
)
ALICE = Caller("uid 1000 pid 7", uid=1000, token="alices-token")
BOB = Caller("10.0.0.9 as 'bob@example.com'", certificate="bob@example.com")


class Floor:
    """Sandboxes that nobody carries, and a journal."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, SandboxState] = {}
        self.records: list[dict[str, Any]] = []
        self.full = False
        self.stood: list[str] = []

    def find(self, sandbox_id: str) -> SandboxState | None:
        return self.sandboxes.get(sandbox_id)

    def stand(self, sandbox_id: str) -> None:
        self.stood.append(sandbox_id)

    def recorded_all(self, records: Sequence[dict[str, Any]]) -> bool:
        if not self.full:
            self.records.extend(records)
        return not self.full

    @property
    def details(self) -> list[str]:
        return [record["detail"] for record in self.records]


class World:
    """An office, two sandboxes under one policy, and two clocks."""

    def __init__(self, people: People | None = None, *, four_eyes: bool = True) -> None:
        self.floor = Floor()
        self.wall, self.steady = NOON, 1000.0
        self.told: list[str] = []
        self.office = Office(
            people,
            four_eyes=four_eyes,
            tell=lambda word, _item, _given: self.told.append(word),
            wall=lambda: self.wall,
            steady=lambda: self.steady,
        )
        self.office.attach_still(self.floor)
        self.policy = EffectivePolicy(profile="p", entries=ENTRIES)
        for box in (BOX, OTHER):
            self.floor.sandboxes[box] = SandboxState(box, self.policy, ())

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds
        self.office.look()

    async def petition(
        self, line: str = "POST https://pay.test/v1/refunds", box: str = BOX, **fields: Any
    ) -> Petitioned:
        attempt = request(line)
        host = ".".join(attempt.host) if isinstance(attempt.host, tuple) else str(attempt.host)
        asked = Petition(
            ticket=7, sandbox=box, scheme=attempt.scheme, host=host,
            port=attempt.port, method=attempt.method, path=attempt.target, **fields,
        )  # fmt: skip
        answer = await self.office.hear(asked, self.floor.sandboxes[box])
        assert isinstance(answer, Petitioned)
        assert answer.ticket == 7
        return answer

    async def item(self, line: str = "POST https://pay.test/v1/refunds") -> Item:
        return self.office.book.items[(await self.petition(line)).approval]

    async def approve(
        self,
        item: Item,
        scope: Any = "request",
        length: Any = "once",
        caller: Caller = OPERATOR,
        policy: str | None = None,
    ) -> Given | None:
        await self.office.approve(item, scope, length, policy or item.case.policy, caller, "because")
        return self.office.book.grants.get(item.grant) if item.grant is not None else None

    async def redeem(
        self, grant: str, box: str = BOX, attempt: str = "a1", sandbox: str | None = None
    ) -> bool:
        """Ask as the worker that carries `box`, for `sandbox`."""
        message = Redeem(ticket=1, sandbox=sandbox or box, grant=grant, attempt=attempt)
        answer = await self.office.hear(message, self.floor.sandboxes[box])
        assert isinstance(answer, Redeemed)
        return answer.ok

    def verdict(self, line: str, box: str = BOX) -> str:
        """What the sandbox's worker would say, by what it was told."""
        sandbox = self.floor.sandboxes[box]
        policy = granted(compile_policy(sandbox.policy), sandbox.standing.grants, box)
        return decide(policy, request(line), self.wall).verdict


def play(scene: Callable[[World], Awaitable[None]], *args: Any, **options: Any) -> None:
    async def run() -> None:
        await scene(World(*args, **options))

    asyncio.run(run())


LINE = "POST https://pay.test/v1/refunds"


def test_what_asks_is_put_to_people_approved_passes_and_ends() -> None:
    async def scene(world: World) -> None:
        item = await world.item()
        assert world.verdict(LINE) == "ask"
        given = await world.approve(item, length="15m")
        assert given is not None
        assert (world.verdict(LINE), world.verdict(LINE, OTHER)) == ("allow", "ask")
        assert world.floor.stood[-1] == BOX
        world.passes(SHORT)
        assert (world.verdict(LINE), given.state, world.floor.sandboxes[BOX].standing.grants) == (
            "ask",
            "expired",
            (),
        )
        assert world.told == ["asked", "approved", "expired"]
        words = [detail.split(" ")[0] for detail in world.floor.details]
        assert words == ["asked", "approved", "expired"]
        assert "by uid 0 pid 1: because" in world.floor.details[1]
        assert world.floor.records[1]["grant"] == given.grant.id

    play(scene)


def test_repetitions_are_one_question() -> None:
    async def scene(world: World) -> None:
        item = await world.item("DELETE https://pay.test/charges/4711")
        for path in ("4712", "4711", "0a1b2c3d4e5f"):
            assert (await world.petition(f"DELETE https://pay.test/charges/{path}")).approval == item.id
        assert item.count == 4
        assert [option.scope for option in item.case.options] == ["request", "template", "host"]
        assert item.subject.template == "/charges/*"
        assert (await world.petition("GET https://pay.test/charges/4711")).approval != item.id
        assert (await world.petition("DELETE https://pay.test/charges/4711", OTHER)).approval != item.id

    play(scene)


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        pytest.param("GET https://evil.test/", "denied_by_rule", id="what a rule denies"),
        pytest.param("GET https://bad.test/", "denied_by_organisation", id="what the organisation denies"),
        pytest.param("GET http://169.254.169.254/latest", "cannot be asked for", id="metadata by address"),
        pytest.param("GET https://metadata.google.internal/", "floor", id="a name on the floor"),
        pytest.param("GET http://egressd.internal/", "answers this itself", id="egressd itself"),
        pytest.param("TRACE https://pay.test/", "method", id="a method that is never carried"),
        pytest.param("POST https://pay.test/a/../b", "more than one way", id="a path with dot segments"),
        pytest.param("POST https://pay.test//b", "more than one way", id="a double slash"),
        pytest.param("POST https://pay.test/%62", "more than one way", id="a needless escape"),
        pytest.param("POST https://pay.test/a?b=c", "more than one way", id="a query where none belongs"),
        pytest.param("GET https://pinned.test/", "in another way", id="a request where nobody reads"),
    ],
)  # fmt: skip
def test_some_things_are_never_asked(line: str, detail: str) -> None:
    async def scene(world: World) -> None:
        answer = await world.petition(line)
        assert (answer.state, answer.approval) == ("refused", "")
        assert detail in answer.detail
        assert list(world.office.book.items) == []

    play(scene)


def test_what_is_allowed_by_now_is_said_to_be() -> None:
    async def scene(world: World) -> None:
        assert (await world.petition("GET https://open.test/a")).state == "approved"

    play(scene)


def test_a_connection_that_nobody_reads_is_asked_for_as_one() -> None:
    async def scene(world: World) -> None:
        message = Petition(ticket=1, sandbox=BOX, scheme="https", host="pinned.test", port=443, opaque=True)
        answer = await world.office.hear(message, world.floor.sandboxes[BOX])
        assert isinstance(answer, Petitioned)
        item = world.office.book.items[answer.approval]
        [option] = item.case.options
        assert (option.scope, option.lengths) == ("connection", ("15m", "life"))
        with pytest.raises(Refused):
            await world.approve(item, "connection", "once")
        assert await world.approve(item, "connection", "15m") is not None

    play(scene)


def test_a_sandbox_asks_in_its_own_words_which_stay_its_own() -> None:
    async def scene(world: World) -> None:
        sandbox = world.floor.sandboxes[BOX]
        why = "trust me\n\x1b[31mAPPROVED by root\u202e"
        plea = Plea(ticket=1, sandbox=BOX, request="GET https://new.test/page?x=1", why=why)
        answer = await world.office.hear(plea, sandbox)
        assert isinstance(answer, Petitioned)
        item = world.office.book.items[answer.approval]
        assert (item.words, item.subject.path, item.case.decision.verdict) == (why, "/page", "deny")
        assert all(detail.isprintable() for detail in world.floor.details)
        await world.office.hear(plea.model_copy(update={"why": "other words"}), sandbox)
        assert item.words == why
        given = await world.approve(item)
        assert given is not None
        assert world.verdict("GET https://new.test/page") == "allow"
        for line in (
            "nonsense",
            "GET https://evil.test/",
            "dns:a.test",
            "GET https://[::1]/",
            "tcp://new.test:22",
        ):
            refused = await world.office.hear(plea.model_copy(update={"request": line}), sandbox)
            assert isinstance(refused, Petitioned)
            assert refused.state == "refused", line

    play(scene)


def test_floods_are_held_off_for_each_sandbox_by_itself() -> None:
    async def scene(world: World) -> None:
        states = [
            (await world.petition(f"GET https://pay.test/page-{chr(97 + n)}")).state
            for n in range(WAITING_SANDBOX + 2)
        ]
        assert states == ["waiting"] * WAITING_SANDBOX + ["refused"] * 2
        assert (await world.petition(box=OTHER)).state == "waiting"
        for item in list(world.office.book.waiting()):
            world.office.deny(item, OPERATOR, "")
        more = [
            (await world.petition(f"PUT https://pay.test/page-{chr(97 + n)}")).state
            for n in range(WAITING_SANDBOX)
        ]
        assert more.count("waiting") == FRESH_SANDBOX[0] - WAITING_SANDBOX

    play(scene)


def test_a_worker_that_asks_without_end_is_not_looked_at() -> None:
    async def scene(world: World) -> None:
        item = await world.item()
        for _ in range(HEARD_SANDBOX[0] - 1):
            await world.petition()
        assert item.count == HEARD_SANDBOX[0]
        assert (await world.petition()).state == "refused"
        assert item.count == HEARD_SANDBOX[0]
        assert world.floor.stood == [BOX]  # nothing new was to be told
        assert (await world.petition(box=OTHER)).state == "waiting"
        world.passes(HEARD_SANDBOX[1])
        assert (await world.petition()).state == "waiting"

    play(scene)


def test_what_was_refused_is_not_asked_again_for_a_while() -> None:
    async def scene(world: World) -> None:
        item = await world.item()
        world.office.deny(item, OPERATOR, "no")
        assert (await world.petition()).state == "denied"
        with pytest.raises(Refused):
            await world.approve(item)
        world.passes(REFUSED)
        assert (await world.petition()).state == "waiting"

    play(scene)


def test_nobody_who_answers_is_no_answer() -> None:
    async def scene(world: World) -> None:
        item = await world.item()
        world.passes(PATIENCE)
        assert item.state == "lapsed"
        assert (await world.petition()).approval != item.id

    play(scene)


# failing


def test_nothing_is_granted_that_the_journal_cannot_hold() -> None:
    async def scene(world: World) -> None:
        item = await world.item()
        world.floor.full = True
        with pytest.raises(Refused, match="journal") as refused:
            await world.approve(item)
        assert refused.value.status == 503
        assert (item.state, item.votes, world.verdict(LINE)) == ("waiting", [], "ask")
        world.floor.full = False
        given = await world.approve(item, length="15m")
        assert given is not None
        world.floor.full = True
        world.office.revoke(given, OPERATOR)  # what is taken back is, whatever can be written
        assert world.verdict(LINE) == "ask"

    play(scene)


def test_an_office_without_control_grants_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    async def scene(world: World) -> None:
        item = await world.item()
        await world.office.close()
        with pytest.raises(Refused):
            await world.approve(item)
        assert not await world.redeem("gnt-0000000000000001")

    play(scene)


def test_whatever_raises_is_no_approval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def scene(world: World) -> None:
        item = await world.item()
        given = await world.approve(item)
        assert given is not None

        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("the store is broken")

        monkeypatch.setattr(world.office.book, "redeem", broken)
        monkeypatch.setattr(world.office.book, "known", broken)
        assert not await world.redeem(given.grant.id)
        assert (await world.petition("GET https://pay.test/x")).state == "refused"

    play(scene)


def test_a_grant_for_one_request_is_spent_once_by_its_own_sandbox() -> None:
    async def scene(world: World) -> None:
        given = await world.approve(await world.item())
        assert given is not None
        grant = given.grant.id
        assert not await world.redeem(grant, OTHER)
        assert not await world.redeem(grant, BOX, sandbox=OTHER)
        assert not await world.redeem("gnt-ffffffffffffffff")
        assert await asyncio.gather(*(world.redeem(grant, attempt=f"a{n}") for n in range(5))) == [
            True,
            *[False] * 4,
        ]
        assert (given.state, given.attempt) == ("spent", "a0")
        [kept] = world.floor.sandboxes[BOX].standing.grants
        assert kept.spent  # its request may go on
        assert world.verdict(LINE) == "ask"
        world.passes(SHORT)
        assert world.floor.sandboxes[BOX].standing.grants == ()

    play(scene)


@pytest.mark.parametrize(
    ("wall", "steady"),
    [
        pytest.param(SHORT, 1.0, id="the wall's clock was set forward"),
        pytest.param(-5.0, 1.0, id="it was set back before the grant began"),
        pytest.param(1.0, SHORT, id="it was held, and the other one went on"),
        pytest.param(-3600.0, SHORT, id="it was set back, and the time is over"),
    ],
)
def test_whichever_clock_says_so_first_ends_a_grant(wall: float, steady: float) -> None:
    async def scene(world: World) -> None:
        given = await world.approve(await world.item())
        assert given is not None
        world.wall += wall
        world.steady += steady
        assert not await world.redeem(given.grant.id)
        world.office.look()
        assert given.state == "expired"
        assert world.floor.sandboxes[BOX].standing.grants == ()

    play(scene)


def test_other_rules_end_what_was_reviewed_under_these() -> None:
    async def scene(world: World) -> None:
        given = await world.approve(await world.item(), length="life")
        waiting = await world.item("GET https://pay.test/other")
        assert given is not None
        sandbox = world.floor.sandboxes[BOX]
        sandbox.policy = EffectivePolicy(profile="p", entries=(*ENTRIES, allow("new.test", id="new")))
        assert world.verdict(LINE) == "ask"  # at once, before anybody has looked
        assert not await world.redeem(given.grant.id)
        with pytest.raises(Refused, match="rules have changed"):
            await world.approve(waiting)
        world.office.look()
        assert (given.state, waiting.state, sandbox.standing.grants) == ("lapsed", "lapsed", ())

    play(scene)


def test_an_approval_names_the_rules_that_were_looked_at() -> None:
    async def scene(world: World) -> None:
        item = await world.item()
        with pytest.raises(Refused, match="rules have changed"):
            await world.approve(item, policy="0" * 16)

    play(scene)


def test_a_grant_goes_with_its_sandbox() -> None:
    async def scene(world: World) -> None:
        given = await world.approve(await world.item(), length="life")
        waiting = await world.item("GET https://pay.test/other")
        assert given is not None
        del world.floor.sandboxes[BOX]
        world.office.look()
        assert (given.state, waiting.state) == ("lapsed", "lapsed")
        with pytest.raises(Refused):
            await world.approve(waiting)

    play(scene)


def test_a_life_is_a_day_at_most_and_no_longer_than_the_sandboxs() -> None:
    async def scene(world: World) -> None:
        given = await world.approve(await world.item(), length="life")
        assert given is not None
        assert given.grant.ends - given.grant.begins == LIFE
        world.floor.sandboxes[BOX].expires = NOON + 60
        short = await world.approve(await world.item("GET https://pay.test/x"), length="15m")
        assert short is not None
        assert short.grant.ends == NOON + 60
        world.floor.sandboxes[BOX].expires = NOON
        with pytest.raises(Refused, match="time is over"):
            await world.approve(await world.item("GET https://pay.test/y"))

    play(scene)


@pytest.mark.parametrize(
    ("scope", "length"),
    [("template", "once"), ("connection", "15m"), ("host", "once"), ("all", "15m"), ("request", "forever")],
)
def test_what_is_not_offered_is_not_granted(scope: str, length: str) -> None:
    async def scene(world: World) -> None:
        item = await world.item()
        with pytest.raises(Refused):
            await world.approve(item, scope, length)
        assert (item.votes, item.state) == ([], "waiting")

    play(scene)


def test_a_host_is_offered_last_with_what_else_it_opens() -> None:
    async def scene(world: World) -> None:
        item = await world.item("POST https://keyed.test/v1/charges")
        last = item.case.options[-1]
        assert last.scope == "host"
        opened = " ".join(last.opens)
        for said in ("every method and path", "the rule keyed", "the credential stripe"):
            assert said in opened

    play(scene)


# who


def test_the_rules_approvers_alone_may_approve_and_anybody_may_refuse() -> None:
    async def scene(world: World) -> None:
        item = await world.item("POST https://bank.test/transfer")
        for caller in (OPERATOR, Caller("uid 1000", uid=1000), Caller("x", uid=1000, token="wrong")):
            with pytest.raises(Refused) as refused:
                await world.approve(item, caller=caller)
            assert refused.value.status == 403
        given = await world.approve(item, caller=ALICE)
        assert given is not None
        assert given.by == "alice (uid 1000 pid 7)"
        other = await world.item("POST https://bank.test/other")
        world.office.deny(other, OPERATOR, "")
        assert other.state == "denied"

    play(scene, People(PEOPLE))


def test_where_nobody_says_who_people_are_nobody_is_an_approver() -> None:
    async def scene(world: World) -> None:
        with pytest.raises(Refused, match="oncall"):
            await world.approve(await world.item("POST https://bank.test/transfer"))

    play(scene)


def test_a_credential_needs_two_known_people_who_say_the_same() -> None:
    async def scene(world: World) -> None:
        line = "POST https://keyed.test/v1/charges"
        item = await world.item(line)
        with pytest.raises(Refused, match="two known people"):
            await world.approve(item, caller=Caller("uid 1000", uid=1000))
        assert await world.approve(item, caller=ALICE) is None
        assert (item.state, world.verdict(line)) == ("waiting", "ask")
        with pytest.raises(Refused, match="already"):
            await world.approve(item, caller=ALICE)
        with pytest.raises(Refused, match="alice has approved request for once"):
            await world.approve(item, "host", "life", BOB)
        given = await world.approve(item, caller=BOB)
        assert given is not None
        assert "alice" in given.by
        assert "bob" in given.by
        assert world.verdict(line) == "allow"
        assert any("first" in detail for detail in world.floor.details)

    play(scene, People(PEOPLE))


def test_one_is_enough_where_that_was_said() -> None:
    async def scene(world: World) -> None:
        assert await world.approve(await world.item("POST https://keyed.test/v1/charges")) is not None

    play(scene, four_eyes=False)


@pytest.mark.parametrize(
    "people",
    [
        {"alice": {"groups": ["a"]}},
        {"alice": {"uid": 1}, "bob": {"uid": 1}},
        {"alice": {"certificate": "a"}, "bob": {"certificate": "a"}},
        {"alice": {"token_sha256": "0" * 64}, "bob": {"token_sha256": "0" * 64}},
    ],
    ids=["by nothing", "one uid", "one certificate", "one token"],
)
def test_people_who_cannot_be_told_apart_are_none(people: dict[str, Any]) -> None:
    with pytest.raises(BadPeople):
        People(PeopleFile.model_validate({"schema": 1, "people": people}))


def test_a_token_that_is_shown_decides_alone() -> None:
    found = People(PEOPLE).who(Caller("uid 0", uid=0, token="wrong"))
    assert isinstance(found, str)


def test_an_operator_asks_on_a_sandboxs_behalf() -> None:
    async def scene(world: World) -> None:
        item = await world.office.ask(BOX, "GET https://new.test/page", OPERATOR)
        assert (item.asker, item.words) == ("operator", "")
        assert await world.office.ask(BOX, "GET https://new.test/page", OPERATOR) is item
        for sandbox, line in (
            (BOX, "GET https://evil.test/"),
            (BOX, "GET https://open.test/"),
            ("sbx-none", "GET https://a.test/"),
        ):
            with pytest.raises(Refused):
                await world.office.ask(sandbox, line, OPERATOR)

    play(scene)


def test_the_sandbox_is_shown_how_its_requests_stand_and_nobodys_name() -> None:
    async def scene(world: World) -> None:
        first, second, third = [await world.item(f"POST https://pay.test/{name}") for name in ("a", "b", "c")]
        await world.approve(first)
        world.office.deny(second, OPERATOR, "secret reason")
        standing = world.floor.sandboxes[BOX].standing
        assert [(row.id, row.state) for row in standing.rows] == [
            (third.id, "waiting"),
            (second.id, "denied"),
            (first.id, "approved"),
        ]
        assert first.grant is not None
        await world.redeem(first.grant)
        text = world.floor.sandboxes[BOX].standing.model_dump_json()
        assert '"used"' in text
        for hidden in ("uid 0", "secret reason", "because"):
            assert hidden not in text

    play(scene)
