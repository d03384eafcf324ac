"""What needs an approval on its way through the engine: put to people, held or refused, let through once and no more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from egressd.gate.asking import Asking
from egressd.gate.messages import Petition, Petitioned, Plea, Redeem, Redeemed
from egressd.gate.settings import Settings
from egressd.gate.standing import Row, Standing
from egressd.policy.attempt import Decision
from egressd.policy.effective import EffectiveEntry
from egressd.policy.grants import Grant, granted
from egressd.policy.reasons import Reason
from tests.gate.inspector.lab import HOST, Lab, entry, laboratory, run, wait_until

ASKS = entry(id="asking", effect="ask")
DENIES = entry(id="never", effect="deny", hosts=("other.test",))


async def origin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


class Control:
    """Control as one sandbox's worker knows it: it keeps grants, and spends those for one request once."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.heard: list[Petition | Plea | Redeem] = []
        self.spent: set[str] = set()
        self.silent = False
        self.asking = lab.services.asking = Asking()
        self.asking.attach(self.hear)

    def hear(self, message: Petition | Plea | Redeem) -> None:
        self.heard.append(message)
        answer: Petitioned | Redeemed
        if isinstance(message, Redeem):
            answer = Redeemed(ticket=message.ticket, ok=message.grant not in self.spent)
            self.spent.add(message.grant)
        else:
            answer = Petitioned(ticket=message.ticket, state="waiting", approval="apr-1")
        if not self.silent:
            asyncio.get_running_loop().call_soon(self.asking.heard, answer)

    def grant(self, **fields: Any) -> Grant:
        """As an approval of a person comes to the worker."""
        now = time.time()
        given: dict[str, Any] = {
            "id": "gnt-0000000000000001", "sandbox": self.lab.sandbox.id, "policy": self.lab.sandbox.policy.digest,
            "host": HOST, "scheme": "http", "port": 80, "scope": "request", "method": "GET", "path": "/a", "begins": now,
            "ends": now + 900,
        }  # fmt: skip
        made = Grant(**(given | fields))
        self.stand(made)
        return made

    def stand(self, *grants: Grant, state: str = "approved") -> None:
        sandbox = self.lab.sandbox
        row = Row.model_validate({"id": "apr-1", "what": "GET /a", "state": state, "asked": 0.0})
        sandbox.standing = Standing(grants=grants, rows=(row,))
        sandbox.policy = granted(sandbox.policy, grants, sandbox.id)
        for live in tuple(sandbox.live):
            live.rejudge(time.time())
        self.asking.moved(sandbox.id)


async def ask(
    lab: Lab, head: str = "GET /a", *, decision: Decision | None = None
) -> tuple[int, str, dict[str, str]]:
    connection = lab.connection()
    if decision is not None:
        connection.decision = decision
    client = await lab.dial(connection)
    answer = await client.ask(head)
    await client.over()
    return answer.status, answer.body.decode(), answer.headers


REFUSED = Decision("ask", Reason.APPROVAL_REQUIRED, ASKS)


def scene(
    test: Callable[[Lab, Control], Any], *entries: EffectiveEntry, settings: Settings | None = None
) -> None:
    async def play() -> None:
        async with laboratory(origin, *(entries or (ASKS, DENIES)), settings=settings) as lab:
            await test(lab, Control(lab))

    run(play())


def test_a_request_that_needs_an_approval_is_put_to_people_and_refused() -> None:
    async def test(lab: Lab, control: Control) -> None:
        status, body, fields = await ask(lab, "GET /a?key=secret", decision=REFUSED)
        assert (status, fields["x-egressd-reason"]) == (403, "approval_required")
        assert "apr-1" in body
        assert "http://egressd.internal/access" in body
        [petition] = control.heard
        assert isinstance(petition, Petition)
        assert (petition.method, petition.path, petition.host) == ("GET", "/a", HOST)
        assert lab.records.decisions() == [("ask", "approval_required")]
        assert lab.dialer.dials == []

    scene(test)


def test_where_control_says_nothing_it_is_refused_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("egressd.gate.asking.TIMEOUT", 0.05)

    async def test(lab: Lab, control: Control) -> None:
        control.silent = True
        status, body, _ = await ask(lab, decision=REFUSED)
        assert status == 403
        assert "could not be put to a person now" in body
        assert lab.dialer.dials == []

    scene(test)


def test_without_anybody_to_ask_it_is_refused() -> None:
    async def test(lab: Lab, _: Control) -> None:
        lab.services.asking = None
        assert (await ask(lab))[0] == 403

    scene(test)


def test_what_was_granted_goes_through_and_says_by_what() -> None:
    async def test(lab: Lab, control: Control) -> None:
        made = control.grant()
        assert (await ask(lab))[:2] == (200, "ok")
        assert lab.records.decisions() == [("allow", "grant")]
        [record] = lab.records.of("decision")
        assert (record.grant, record.rule) == (made.id, "asking")
        assert (await ask(lab, "GET /b"))[0] == 403

    scene(test)


def test_a_grant_for_one_request_lets_one_through_when_two_come_at_once() -> None:
    async def test(lab: Lab, control: Control) -> None:
        control.grant(once=True)
        answers = await asyncio.gather(*(ask(lab) for _ in range(8)))
        assert sorted(answer[0] for answer in answers) == [200, *[403] * 7]
        assert lab.records.decisions().count(("allow", "grant")) == 1
        assert len([message for message in control.heard if isinstance(message, Redeem)]) == 8
        assert (await ask(lab))[0] == 403  # nor once more

    scene(test)


def test_a_grant_for_one_request_of_a_default_denial_ends_as_one() -> None:
    async def test(lab: Lab, control: Control) -> None:
        control.grant(once=True)
        assert (await ask(lab))[0] == 200
        status, _, fields = await ask(lab)
        assert (status, fields["x-egressd-reason"]) == (403, "not_allowed")

    scene(test, DENIES)


def test_a_grant_that_control_does_not_know_lets_nothing_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("egressd.gate.asking.TIMEOUT", 0.05)

    async def test(lab: Lab, control: Control) -> None:
        control.grant(once=True)
        control.silent = True
        assert (await ask(lab))[0] == 403
        assert lab.dialer.dials == []

    scene(test)


def test_a_request_that_holds_a_spent_grant_goes_on_and_a_revoked_one_is_cut() -> None:
    async def test(lab: Lab, control: Control) -> None:
        asked = asyncio.Event()

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
            asked.set()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(slow, "127.0.0.1", 0)
        lab.dialer.port = server.sockets[0].getsockname()[1]
        made = control.grant(once=True)
        client = await lab.dial()
        client.send(f"GET /a HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        assert (await client.head()).status == 200
        await asked.wait()
        control.stand(made.model_copy(update={"spent": True}), state="used")
        assert lab.records.ends() == []
        control.stand()
        await wait_until(lambda: lab.records.ends() == ["policy_changed"])
        await client.close()
        server.close()
        await server.wait_closed()

    scene(test)


def test_a_request_is_held_until_a_person_has_spoken() -> None:
    async def test(lab: Lab, control: Control) -> None:
        asking = asyncio.ensure_future(ask(lab, decision=REFUSED))
        await wait_until(lambda: control.heard)
        control.grant()
        assert (await asking)[:2] == (200, "ok")
        refused = asyncio.ensure_future(ask(lab, "GET /b", decision=REFUSED))
        await wait_until(lambda: len(control.heard) == 2)
        control.stand(state="denied")
        assert (await refused)[0] == 403

    scene(test, settings=Settings(approval_hold=15))


def test_what_is_held_where_its_connection_leads_nowhere_is_refused_at_once() -> None:
    async def test(lab: Lab, control: Control) -> None:
        connection = lab.connection()
        connection.decision, connection.destination.proved = REFUSED, None
        client = await lab.dial(connection)
        assert (await client.ask("GET /a")).status == 403
        await client.over()
        control.grant()  # and it is not let through there later
        client = await lab.dial(connection)
        assert (await client.ask("GET /a")).status == 403
        assert lab.dialer.dials == []

    scene(test, settings=Settings(approval_hold=15))


def test_a_held_request_is_not_let_through_by_a_sandbox_that_has_ended() -> None:
    async def test(lab: Lab, control: Control) -> None:
        asking = asyncio.ensure_future(ask(lab, decision=REFUSED))
        await wait_until(lambda: control.heard)
        lab.sandbox.revoked = True
        control.grant()
        assert (await asking)[2]["x-egressd-reason"] == "revoked"
        assert lab.dialer.dials == []

    scene(test, settings=Settings(approval_hold=15))
