"""egressd.internal: what is told there, and that nothing else is told and nothing leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate import internal
from egressd.gate.connection import Connection, Destination
from egressd.gate.dns.synthetic import SyntheticNames
from egressd.gate.internal import Asked, Page, Unanswered, answer, judge
from egressd.gate.limits import Budget
from egressd.gate.sandbox import Sandbox
from egressd.gate.settings import Settings
from egressd.journal.record import Record
from egressd.policy.attempt import Attempt, ConnectionAttempt, Decision, DnsQuestion, RequestAttempt
from egressd.policy.compile import compile_policy
from egressd.policy.decide import decide
from egressd.policy.effective import Effect, EffectiveEntry, EffectivePolicy, EntryLimits, Rate, Treatment
from egressd.policy.internal import PAGES
from egressd.policy.reasons import WORDS, Reason
from tests.gate.inspector.lab import Lab, laboratory, run

NOW = dt.datetime(2027, 1, 15, 8, tzinfo=dt.UTC).timestamp()
CERTIFICATE = b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
HOST = "egressd.internal"
SECRETS = ("team-payments", "anthropic-key", "known sink", "boss@example.com", "10.20.0.0", "SEC-412")
ENTRIES = (
    EffectiveEntry(
        id="org", place="organisation.yaml:4", effect="deny", origin="organisation", hosts=("bad.test",), because="known sink"
    ),
    EffectiveEntry(
        id="api", place="profiles/p.yaml:5", effect="allow", hosts=("api.test", "*.api.test"), requests=("POST /v1/messages",),
        credential="anthropic-key",
        limits=EntryLimits(requests=Rate(amount=600, seconds=60), upload=Rate(amount=5000, seconds=86400)),
        expires=dt.date(2027, 3, 31),
    ),
    EffectiveEntry(
        id="inner", place="profiles/p.yaml:9", effect="allow", hosts=("inner.test",), addresses=("10.20.0.0/16",),
        treatment="tunnel",
    ),
    EffectiveEntry(
        id="bare", place="profiles/p.yaml:12", effect="allow", addresses=("192.0.2.0/24",), treatment="relay", ports=(22, 5432)
    ),
    EffectiveEntry(id="pay", place="profiles/p.yaml:15", effect="ask", hosts=("pay.test",), approvers=("boss@example.com",)),
    EffectiveEntry(id="old", place="profiles/p.yaml:18", effect="allow", hosts=("old.test",), expires=dt.date(2027, 1, 14)),
)  # fmt: skip
POLICY = EffectivePolicy(profile="p", owner="team-payments", entries=ENTRIES)


def sandbox(policy: EffectivePolicy = POLICY, **fields: Any) -> Sandbox:
    settings = Settings()
    return Sandbox("sbx-1", compile_policy(policy), SyntheticNames(1), Budget(settings), **fields)


def text(path: str, of: Sandbox | None = None) -> str:
    page = answer(Asked("GET", path), of or sandbox(), CERTIFICATE, NOW)
    assert isinstance(page, Page)
    assert page.content_type == "text/plain; charset=utf-8"
    return page.body.decode("ascii")


def facts(path: str, of: Sandbox | None = None) -> dict[str, Any]:
    page = answer(Asked("GET", path, json=True), of or sandbox(), CERTIFICATE, NOW)
    assert isinstance(page, Page)
    assert page.content_type == "application/json"
    found = json.loads(page.body)
    assert isinstance(found, dict)
    return found


# who is asked


JUDGED: list[tuple[str, Attempt, str | None]] = [
    ("the name", DnsQuestion(internal.NAME), "internal_page"),
    ("another name", DnsQuestion(("evil", "test")), None),
    ("a name below it", DnsQuestion(("x", *internal.NAME)), None),
    ("http", ConnectionAttempt(internal.NAME, 80, "http"), "internal_page"),
    ("https", ConnectionAttempt(internal.NAME, 443, "https"), "internal_page"),
    ("a request", RequestAttempt(internal.NAME, 80, "http", "GET", "/"), "internal_page"),
    ("http on the port of https", ConnectionAttempt(internal.NAME, 443, "http"), "scheme_not_allowed"),
    ("TLS on the port of http", ConnectionAttempt(internal.NAME, 80, "https"), "scheme_not_allowed"),
    ("raw bytes", ConnectionAttempt(internal.NAME, 80, "tcp"), "scheme_not_allowed"),
    ("another port", ConnectionAttempt(internal.NAME, 22, "tcp"), "port_not_allowed"),
    (
        "a request on another port",
        RequestAttempt(internal.NAME, 8080, "http", "GET", "/"),
        "port_not_allowed",
    ),
    ("its address, which is the floor's business", ConnectionAttempt(internal.ADDRESS, 80, "http"), None),
]


@pytest.mark.parametrize(("attempt", "reason"), [row[1:] for row in JUDGED], ids=[row[0] for row in JUDGED])
def test_only_the_name_itself_on_its_own_ports_is_egressd_s(attempt: Attempt, reason: str | None) -> None:
    decision = judge(attempt)
    assert (decision.reason.value if decision is not None else None) == reason
    assert decision is None or decision.allowed == (reason == "internal_page")


def test_each_page_that_is_said_to_be_there_is() -> None:
    for path in PAGES:
        assert isinstance(answer(Asked("GET", path), sandbox(), CERTIFICATE, NOW), Page), path
    assert isinstance(answer(Asked("GET", "/other"), sandbox(), CERTIFICATE, NOW), Unanswered)


def test_no_rule_can_give_the_name_to_anybody_else() -> None:
    everything = EffectiveEntry(id="e", place="p.yaml:1", effect="allow", hosts=(f"*.{HOST}", HOST))
    policy = compile_policy(EffectivePolicy(profile="p", entries=(everything,)))
    for host in (internal.NAME, internal.ADDRESS):
        assert decide(policy, ConnectionAttempt(host, 443, "https"), NOW).reason.value.startswith("floor_")


# what is told


def test_the_index_names_every_page_and_says_what_to_do() -> None:
    shown = text("/")
    for path in ("/whoami", "/policy", "/denials", "/access", "/ca.crt"):
        assert f"http://egressd.internal{path}" in shown
        assert path in facts("/")["pages"]
    assert "x-egressd-reason" in shown
    assert "ask for it at /access" in shown


def test_whoami_is_the_sandbox_and_its_labels_cannot_forge_a_line() -> None:
    named = sandbox(labels={"task": "4711", "x": "a\nsandbox: other\u202e"}, traceparent="00-secret")
    assert text("/whoami", named).splitlines() == [
        "sandbox: sbx-1",
        "profile: p",
        f"policy: {named.policy.digest}",
        'label "task": "4711"',
        r'label "x": "a\nsandbox: other\u202e"',
    ]
    assert facts("/whoami", named)["labels"] == named.labels
    assert "secret" not in json.dumps(facts("/whoami", named))


def test_the_policy_reads_as_the_rules_were_meant() -> None:
    entries = text("/policy").split("\n\n")
    assert entries[0].startswith("What can be reached from this sandbox (profile p, policy ")
    assert "What is not listed is denied." in entries[0]
    assert [entry.rstrip() for entry in entries[1:]] == [
        "ALLOWED: api.test, *.api.test\n  https on port 443; every request is judged\n  POST /v1/messages\n"
        "  limit: 600 requests a minute\n  limit: 5000 bytes up a day\n  until the end of 2027-03-31 (UTC)\n"
        "  rule: api (profiles/p.yaml:5)",
        "ALLOWED: inner.test\n  https on port 443; TLS that is not opened\n  rule: inner (profiles/p.yaml:9)",
        "ALLOWED: 192.0.2.0/24\n  tcp on port 22, 5432; bytes that are not read\n  rule: bare (profiles/p.yaml:12)",
        "NEEDS A PERSON'S APPROVAL: pay.test\n  https on port 443; every request is judged\n  GET,HEAD /**\n"
        "  rule: pay (profiles/p.yaml:15)",
        "DENIED: bad.test\n  rule: org (organisation.yaml:4)",
    ]


def test_the_policy_as_json_says_the_same() -> None:
    told = facts("/policy")
    assert [entry["rule"] for entry in told["entries"]] == ["api", "inner", "bare", "pay", "org"]
    assert told["otherwise"] == "deny"
    assert told["entries"][0] == {
        "effect": "allow", "hosts": ["api.test", "*.api.test"], "schemes": ["https"], "ports": [443], "treatment": "inspect",
        "requests": ["POST /v1/messages"], "limits": ["600 requests a minute", "5000 bytes up a day"], "expires": "2027-03-31",
        "rule": "api", "place": "profiles/p.yaml:5",
    }  # fmt: skip


def test_a_profile_that_only_observes_says_what_holds() -> None:
    observing = POLICY.model_copy(update={"mode": "observe", "observe_until": dt.date(2027, 1, 20)})
    assert "let through and noted" in text("/policy", sandbox(observing))
    ended = POLICY.model_copy(update={"mode": "observe", "observe_until": dt.date(2027, 1, 14)})
    assert "What is not listed is denied." in text("/policy", sandbox(ended))


def test_rules_that_only_observe_are_told_by_what_passes() -> None:
    until = {"mode": "observe", "observe_until": dt.date(2027, 1, 20)}
    over = {"mode": "observe", "observe_until": dt.date(2027, 1, 14)}
    entries = (
        EffectiveEntry.model_validate(
            {"id": name, "place": "p.yaml:1", "effect": effect, "hosts": ("x.test",), **mode}
        )
        for name, effect, mode in (
            ("noted", "deny", until),
            ("tried", "allow", until),
            ("denies", "deny", over),
            ("gone", "allow", over),
        )
    )
    told = facts("/policy", sandbox(POLICY.model_copy(update={"entries": tuple(entries)})))
    assert [entry["rule"] for entry in told["entries"]] == ["tried", "denies"]


@pytest.mark.parametrize("path", ["/", "/whoami", "/policy", "/denials", "/ca.crt"])
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_nothing_that_operators_keep_for_themselves_is_told(path: str, as_json: bool) -> None:
    page = answer(Asked("GET", path, json=as_json), sandbox(), CERTIFICATE, NOW)
    assert isinstance(page, Page)
    assert [secret for secret in SECRETS if secret.encode() in page.body] == []


def test_every_effect_and_treatment_can_be_told() -> None:
    for effect in get_args(Effect):
        for treatment in get_args(Treatment):
            entry = EffectiveEntry(
                id="e", place="p.yaml:1", effect=effect, hosts=("a.test",), treatment=treatment
            )
            assert "rule: e (p.yaml:1)" in text(
                "/policy", sandbox(EffectivePolicy(profile="p", entries=(entry,)))
            )


def test_a_long_policy_is_cut_and_says_how_much_is_missing() -> None:
    hosts = tuple(f"h{number}.test" for number in range(5000))
    long = EffectiveEntry(id="long", place="p.yaml:1", effect="allow", hosts=hosts)
    more = tuple(
        EffectiveEntry(id=f"e{n}", place=f"p.yaml:{n}", effect="allow", hosts=(f"e{n}.test",))
        for n in range(500)
    )
    shown = text("/policy", sandbox(EffectivePolicy(profile="p", entries=(long, *more))))
    assert f"and {5000 - internal.MOST_HOSTS} more" in shown
    assert f"... and {501 - internal.MOST_ENTRIES} more entries" in shown
    assert len(shown) < 128 * 1024


def test_denials_are_told_with_their_words_and_the_next_step() -> None:
    denied = sandbox()
    assert text("/denials", denied) == "Nothing was refused lately.\n"
    record = Record(
        event="decision", sandbox="sbx-1", attempt_id="a1", root_id="a0", layer="request", verdict="deny",
        reason="path_not_allowed", rule="api", place="profiles/p.yaml:5", host="api.test", port=443, scheme="https", method="GET",
        path="/v2", address="198.18.1.7", upstream="192.0.2.99", detail="not for the sandbox", time="2027-01-15T08:00:00.000000Z",
    )  # fmt: skip
    denied.denials.note(record)
    denied.denials.note(dataclasses.replace(record, attempt_id="a2"))
    words = WORDS[Reason.PATH_NOT_ALLOWED]
    assert text("/denials", denied).split("\n\n")[1] == (
        "2027-01-15T08:00:00.000000Z GET https://api.test/v2 (2 times)\n"
        f"  reason: path_not_allowed: {words.says}\n  hint: {words.hint}\n"
        "  rule: api (profiles/p.yaml:5)\n  attempt: a2\n"
    )
    [told] = facts("/denials", denied)["denials"]
    assert (told["reason"], told["count"], told["attempt"]) == ("path_not_allowed", 2, "a2")
    assert not {"198.18.1.7", "192.0.2.99", "not for the sandbox"} & set(map(str, told.values()))


def test_the_certificate_is_given_as_it_is() -> None:
    assert answer(Asked("GET", "/ca.crt"), sandbox(), CERTIFICATE, NOW) == Page(
        "application/x-pem-file", CERTIFICATE
    )


# what is not answered


@pytest.mark.parametrize(
    ("asked", "reason", "status"),
    [
        pytest.param(Asked("POST", "/"), "method_not_allowed", 405, id="POST"),
        pytest.param(Asked("OPTIONS", "*"), "method_not_allowed", 405, id="OPTIONS *"),
        pytest.param(Asked("get", "/"), "method_not_allowed", 405, id="a method is spelled exactly"),
        pytest.param(Asked("GET", "/", body=True), "body_not_allowed", 400, id="a body"),
        pytest.param(Asked("GET", "/", upgrade=True), "upgrade_not_allowed", 400, id="an upgrade"),
        pytest.param(Asked("GET", "/nothing"), "path_not_allowed", 404, id="no such page"),
        pytest.param(Asked("GET", "/policy/"), "path_not_allowed", 404, id="a path is spelled exactly"),
        pytest.param(Asked("GET", "/../etc/passwd"), "path_not_allowed", 404, id="no file is ever read"),
        pytest.param(Asked("GET", ""), "path_not_allowed", 404, id="no path"),
    ],
)
def test_what_is_not_answered(asked: Asked, reason: str, status: int) -> None:
    refused = answer(asked, sandbox(), CERTIFICATE, NOW)
    assert isinstance(refused, Unanswered)
    assert (refused.reason.value, refused.status) == (reason, status)
    assert (refused.allow == "GET, HEAD") == (status == 405)


def test_without_a_certificate_there_is_no_page_of_it() -> None:
    assert isinstance(answer(Asked("GET", "/ca.crt"), sandbox(), b"", NOW), Unanswered)


@given(st.text(max_size=30), st.text(max_size=60), st.booleans(), st.booleans(), st.booleans())
def test_every_request_has_an_answer(
    method: str, target: str, as_json: bool, body: bool, upgrade: bool
) -> None:
    told = answer(Asked(method, target, as_json, body, upgrade), sandbox(), CERTIFICATE, NOW)
    assert isinstance(told, Page | Unanswered)
    assert isinstance(told, Unanswered) or (method in ("GET", "HEAD") and not body and not upgrade)


# through the inspector


async def refuse_to_be_asked(_reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    raise AssertionError("something left")


def own(lab: Lab, *, channel: str = "transparent", port: int = 80) -> Connection:
    connection = Connection(
        lab.sandbox, lab.services, "transparent", Destination(port, internal.ADDRESS, internal.NAME)
    )
    connection.channel = "absolute" if channel == "absolute" else "transparent"
    connection.host = internal.NAME
    connection.decision = judge(ConnectionAttempt(internal.NAME, port, "http")) or Decision(
        "deny", Reason.NOT_ALLOWED
    )
    return connection


ASKED = [
    pytest.param("GET /", HOST, 200, "internal_page", id="the index"),
    pytest.param("GET /policy?x=y", f"{HOST}:80", 200, "internal_page", id="a page, with port and query"),
    pytest.param("HEAD /whoami", HOST.upper(), 200, "internal_page", id="HEAD, in capitals"),
    pytest.param("POST /", HOST, 405, "method_not_allowed", id="POST"),
    pytest.param("DELETE /denials", HOST, 405, "method_not_allowed", id="DELETE"),
    pytest.param("GET /secret", HOST, 404, "path_not_allowed", id="no such page"),
    pytest.param(
        "GET /", "origin.test.example", 403, "authority_mismatch", id="another Host, one that is allowed"
    ),
    pytest.param("GET /", f"{HOST}:8080", 403, "authority_mismatch", id="another port in Host"),
    pytest.param("GET /", f"x.{HOST}", 403, "authority_mismatch", id="a name below"),
    pytest.param(
        "GET /\nUpgrade: websocket\nConnection: upgrade", HOST, 400, "upgrade_not_allowed", id="WebSocket"
    ),
    pytest.param(
        "GET http://origin.test.example/", HOST, 403, "authority_mismatch", id="an absolute target elsewhere"
    ),
]


@pytest.mark.parametrize(("head", "host", "status", "reason"), ASKED)
def test_the_inspector_answers_for_egressd_and_dials_nobody(
    head: str, host: str, status: int, reason: str
) -> None:
    async def test() -> None:
        async with laboratory(refuse_to_be_asked) as lab:
            client = await lab.dial(own(lab))
            told = await client.ask(head, host=host)
            assert (told.status, told.headers["x-egressd-reason"]) == (status, reason)
            assert (told.headers.get("allow") == "GET, HEAD") == (status == 405)
            assert told.headers["cache-control"] == "no-store"
            assert await client.closed() == b""
            assert lab.dialer.dials == []
            verdict = "allow" if status == 200 else "deny"
            assert lab.records.decisions() == [(verdict, reason)]
            assert lab.records.ends() == ["completed"]
            [end] = lab.records.of("end")
            assert end.status == status
            await client.over()

    run(test())


def test_the_page_is_json_for_who_asks_for_it() -> None:
    async def test() -> None:
        async with laboratory(refuse_to_be_asked) as lab:
            client = await lab.dial(own(lab))
            told = await client.ask("GET /whoami\nAccept: application/json", host=HOST)
            assert told.headers["content-type"] == "application/json"
            assert json.loads(told.body)["sandbox"] == lab.sandbox.id
            await client.over()

    run(test())


def test_a_revoked_sandbox_is_told_only_that() -> None:
    async def test() -> None:
        async with laboratory(refuse_to_be_asked) as lab:
            connection = own(lab)
            lab.sandbox.revoked = True
            client = await lab.dial(connection)
            told = await client.ask("GET /whoami", host=HOST)
            assert (told.status, told.headers["x-egressd-reason"]) == (403, "revoked")
            await client.over()

    run(test())


@pytest.mark.parametrize(
    ("target", "status", "reason"),
    [
        pytest.param(f"http://{HOST}/whoami", 200, "internal_page", id="its own port"),
        pytest.param(f"http://{HOST}:8080/whoami", 403, "port_not_allowed", id="another port"),
    ],
)
def test_a_proxy_connection_for_another_host_reaches_it_too(target: str, status: int, reason: str) -> None:
    async def test() -> None:
        async with laboratory(refuse_to_be_asked) as lab:
            connection = lab.connection()
            connection.channel = "absolute"
            client = await lab.dial(connection)
            told = await client.ask(f"GET {target}", host=target.split("/")[2])
            assert (told.status, told.headers["x-egressd-reason"]) == (status, reason)
            assert lab.dialer.dials == []
            await client.over()

    run(test())


def test_a_page_that_cannot_be_made_is_an_internal_error_and_nothing_leaves(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def explode(*_: object) -> Page:
        raise ZeroDivisionError

    monkeypatch.setattr(internal, "answer", explode)

    async def test() -> None:
        async with laboratory(refuse_to_be_asked) as lab:
            client = await lab.dial(own(lab))
            told = await client.ask("GET /", host=HOST)
            assert (told.status, told.headers["x-egressd-reason"]) == (502, "internal_error")
            assert lab.dialer.dials == []
            assert lab.records.decisions() == [("deny", "internal_error")]
            await client.over()

    run(test())
