"""Lending: a worker gets exactly what control's own rules and the credential's own binding give, whatever it asks for."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable, Coroutine

import pytest
from pydantic import SecretStr

from egressd.control.lending import Lending
from egressd.control.sandboxes import SandboxState
from egressd.credentials.broker import Broker
from egressd.credentials.lease import Lease, Token
from egressd.credentials.providers.base import For, Minted, SourceFailed
from egressd.gate.messages import Ask
from egressd.policy.credential import CredentialsFile
from egressd.policy.effective import EffectiveEntry, EffectivePolicy

NOW = 1_800_000_000.0
CANARY = "canary-5c0ffee"
FILE = CredentialsFile.model_validate(
    {
        "schema": 1,
        "credentials": {
            "key": {
                "for": [
                    {"hosts": ["api.example.com"], "requests": ["GET,POST /v1/**", "WEBSOCKET /v1/live"]}
                ],
                "source": {"env": "KEY"},
                "attach": {"bearer": True},
            },
            "other": {
                "for": [{"hosts": ["*.example.com"], "requests": ["ANY /**"]}],
                "source": {"env": "OTHER"},
                "attach": {"bearer": True},
            },
        },
    }
)


def entry(**changes: object) -> EffectiveEntry:
    fields: dict[str, object] = {
        "id": "api",
        "place": "a.yaml:1",
        "effect": "allow",
        "hosts": ("api.example.com",),
        "requests": ("GET,POST /v1/**", "GET /v2/**", "WEBSOCKET /v1/live"),
        "ports": (443, 8443),
        "credential": "key",
    }
    return EffectiveEntry.model_validate(fields | changes)


def policy(*entries: EffectiveEntry, **changes: object) -> EffectivePolicy:
    return EffectivePolicy.model_validate({"profile": "p", "entries": entries or (entry(),), **changes})


def ask(**changes: object) -> Ask:
    fields: dict[str, object] = {
        "ticket": 1,
        "sandbox": "sbx-1",
        "credential": "key",
        "method": "GET",
        "scheme": "https",
        "host": "api.example.com",
        "port": 443,
        "target": "/v1/models?page=1",
    }
    return Ask.model_validate(fields | changes)


class Source:
    def __init__(self, meanwhile: Callable[[], None] | None = None, fails: bool = False) -> None:
        self.minted: list[For] = []
        self.meanwhile, self.fails = meanwhile, fails

    async def mint(self, for_: For) -> Minted:
        self.minted.append(for_)
        if self.meanwhile is not None:
            self.meanwhile()
        if self.fails:
            raise SourceFailed("down")
        return Minted(Token(value=SecretStr(CANARY)), NOW + 900)

    async def close(self) -> None:
        """Nothing is open."""


class Stand:
    def __init__(self, source: Source | None = None, *, said: EffectivePolicy | None = None) -> None:
        self.source = source or Source()
        self.told: list[str] = []
        broker = Broker(FILE, wall=lambda: NOW, provide=lambda *_: self.source, tell=self.told.append)
        self.lending = Lending(broker, FILE, wall=lambda: NOW, tell=self.told.append)
        self.sandbox = SandboxState(
            "sbx-1", said or policy(), (), {"task": "t"}, placeholders={"key": "dummy"}
        )

    async def lend(self, question: Ask) -> Lease | None:
        return await self.lending.lend(self.sandbox, question)


def run(test: Coroutine[None, None, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


REFUSED: list[tuple[str, Ask]] = [
    ("a credential that no rule attaches", ask(credential="other")),
    ("a credential that there is not", ask(credential="none")),
    ("no credential", ask(credential="")),
    ("another host", ask(host="evil.example.com")),
    (
        "another host, where the credential might go but no rule leads",
        ask(host="b.example.com", credential="other"),
    ),
    ("an address", ask(host="11.0.0.1")),
    ("an address in brackets", ask(host="[::1]")),
    ("no host", ask(host="")),
    ("a host in no name's form", ask(host="api.example.com:443")),
    ("a host with a NUL", ask(host="api.example.com\0")),
    ("the metadata service", ask(host="metadata.google.internal")),
    ("in the clear", ask(scheme="http", port=80)),
    ("another port", ask(port=444)),
    ("another method", ask(method="DELETE")),
    ("a method in small letters", ask(method="get")),
    ("TRACE", ask(method="TRACE")),
    ("another path", ask(target="/v3/models")),
    ("a path that the rule allows and the binding does not", ask(target="/v2/models")),
    ("a way up", ask(target="/v1/../v2/models")),
    ("an encoded way up", ask(target="/v1/%2e%2e/v2")),
    ("another's target", ask(target="https://evil.example.com/v1/x")),
    ("no target", ask(target="")),
    ("an upgrade that no rule names", ask(upgrade="websocket", target="/v1/models")),
    ("an upgrade to something else", ask(upgrade="h2c")),
    ("in another's name", ask(sandbox="sbx-2")),
]


@pytest.mark.parametrize("question", [case[1] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_nothing_is_lent_and_no_source_is_asked_for(question: Ask) -> None:
    async def test() -> None:
        stand = Stand()
        assert await stand.lend(question) is None
        assert stand.source.minted == []
        assert len(stand.told) == 1, "and the operator hears of it: a sound worker does not ask so"
        assert CANARY not in stand.told[0]

    run(test())


POLICIES: list[tuple[str, EffectivePolicy]] = [
    ("no rules", EffectivePolicy(profile="p")),
    ("a rule without the credential", policy(entry(credential=None))),
    ("a deny before it", policy(entry(id="no", effect="deny", credential=None, requests=()), entry())),
    ("a rule that asks", policy(entry(effect="ask", approvers=("a",)))),
    ("a rule that has expired", policy(entry(expires=dt.date(2026, 1, 1)))),
    (
        "a more specific rule with another credential",
        policy(entry(hosts=("*.example.com",)), entry(id="exact", credential="other")),
    ),
    ("observe mode", policy(mode="observe", observe_until=dt.date(2027, 1, 31))),
]


@pytest.mark.parametrize("said", [case[1] for case in POLICIES], ids=[case[0] for case in POLICIES])
def test_control_judges_by_its_own_rules(said: EffectivePolicy) -> None:
    async def test() -> None:
        stand = Stand(said=said)
        assert await stand.lend(ask()) is None
        assert stand.source.minted == []

    run(test())


@pytest.mark.parametrize(
    "question",
    [
        pytest.param(ask(), id="a request"),
        pytest.param(ask(method="POST", target="/v1/messages"), id="another method"),
        pytest.param(ask(upgrade="websocket", target="/v1/live"), id="an upgrade that both name"),
        pytest.param(ask(port=8443), id="a port that the rule names"),
    ],
)
def test_what_rules_and_binding_give_is_lent(question: Ask) -> None:
    async def test() -> None:
        stand = Stand()
        lease = await stand.lend(question)
        assert lease is not None
        assert (lease.sandbox, lease.credential, lease.placeholder) == ("sbx-1", "key", "dummy")
        assert lease.secrets() == (CANARY,)
        assert stand.source.minted == [For("sbx-1", {"task": "t"})]
        assert stand.told == []

    run(test())


def test_a_denial_that_only_observes_takes_no_credential_away() -> None:
    async def test() -> None:
        until = {"mode": "observe", "observe_until": dt.date(2999, 1, 1)}
        noted = entry(id="no", effect="deny", credential=None, requests=(), **until)
        assert await Stand(said=policy(noted, entry())).lend(ask()) is not None

    run(test())


def test_rules_that_change_while_the_source_is_asked_count() -> None:
    async def test() -> None:
        stand = Stand()

        def change() -> None:
            stand.sandbox.policy = EffectivePolicy(profile="p")

        stand.source.meanwhile = change
        assert await stand.lend(ask()) is None
        assert len(stand.source.minted) == 1

    run(test())


def test_a_definition_that_changes_counts_at_once() -> None:
    narrowed = CredentialsFile.model_validate(
        {
            "schema": 1,
            "credentials": {
                "key": {
                    "for": [{"hosts": ["api.example.com"], "requests": ["GET /v1/models"]}],
                    "source": {"env": "KEY"},
                    "attach": {"bearer": True},
                }
            },
        }
    )

    async def test() -> None:
        stand = Stand()
        lease = await stand.lend(ask())
        assert lease is not None
        assert [one.id for one in stand.lending.replace(narrowed)] == [lease.id]
        assert await stand.lend(ask(target="/v1/messages")) is None
        again = await stand.lend(ask())
        assert again is not None
        assert again.id != lease.id

    run(test())


def test_a_source_that_fails_is_no_lease_and_recovers() -> None:
    async def test() -> None:
        stand = Stand(Source(fails=True))
        assert await stand.lend(ask()) is None
        assert stand.told == ["credential key for sbx-1: not available: down"]

    run(test())


def test_a_sandbox_that_has_ended_gets_nothing() -> None:
    async def test() -> None:
        stand = Stand()
        assert await stand.lend(ask()) is not None
        await stand.lending.end("sbx-1")
        assert await stand.lend(ask()) is None
        await stand.lending.close()

    run(test())


def test_what_breaks_inside_is_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError(CANARY)

    for part in ("decide", "compile_steps", "parse_name"):
        with monkeypatch.context() as patch:

            async def test() -> None:
                stand = Stand()
                patch.setattr(f"egressd.control.lending.{part}", broken)  # noqa: B023 -- run at once
                assert await stand.lend(ask()) is None
                assert stand.told == ["credential key: not lent: RuntimeError"]

            run(test())
