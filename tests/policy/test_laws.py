"""The laws of deciding, over policies and attempts that nobody thought of."""

from __future__ import annotations

import datetime as dt
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from egressd.policy.addresses import BLOCKS, classify, is_floor_name
from egressd.policy.attempt import (
    Address,
    Attempt,
    ConnectionAttempt,
    Decision,
    DnsQuestion,
    Name,
    RequestAttempt,
)
from egressd.policy.compile import CompiledPolicy, compile_policy
from egressd.policy.decide import decide, permit_address, trials
from egressd.policy.effective import EffectiveEntry, EffectivePolicy
from egressd.policy.names import BadHost, parse_host
from egressd.policy.reasons import WORDS, Reason
from tests.policy.entries import NOON, allow, deny

YESTERDAY, TODAY = dt.date(2027, 3, 30), dt.date(2027, 3, 31)

HOSTS = [
    "a.b.test",
    "b.test",
    "c.b.test",
    "d.c.b.test",
    "example.com",
    "metadata.google.internal",
    "x.localhost",
]
PATTERNS = [*HOSTS, "*.b.test", "*.c.b.test", "*.google.internal", "*.example.com"]
REQUESTS = [
    "GET,HEAD /**",
    "ANY /**",
    "GET /a",
    "GET /A/*",
    "POST /a/**",
    "WEBSOCKET /a",
    "GET /a?k=v",
    "GET /@*%2F*",
]
NETWORKS = ["10.0.0.0/8", "10.1.0.0/16", "11.0.0.0/24", "0.0.0.0/0", "fc00::/7", "100.64.0.0/10"]
TARGETS = [
    "/",
    "/a",
    "/A/b",
    "/a/b",
    "/a?k=v",
    "/a?k=w&k=v",
    "/@x%2Fy",
    "/a/../b",
    "/%61",
    "/a;b",
    "*",
    "/" + "x" * 9000,
]

SOME_REQUESTS = st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=2, unique=True).map(tuple)
SCHEMES = st.sampled_from([("https",), ("http",), ("https", "http")])
PORTS = st.lists(st.sampled_from([443, 80, 8443]), min_size=1, max_size=2, unique=True).map(tuple)
EXPIRES = st.sampled_from([None, None, YESTERDAY, TODAY])


@st.composite
def permits(draw: st.DrawFn) -> EffectiveEntry:
    """Any allow or ask that compiles."""
    fields: dict[str, Any] = {
        "effect": draw(st.sampled_from(["allow", "allow", "ask"])),
        "ports": draw(PORTS),
    }
    match draw(st.sampled_from(["hosts", "hosts", "hosts", "confined", "literal", "web"])):
        case "literal":
            fields["addresses"] = tuple(
                draw(st.lists(st.sampled_from(NETWORKS), min_size=1, max_size=2, unique=True))
            )
        case "web":
            return _entry(effect="allow", public_web=True, expires=draw(EXPIRES))
        case kind:
            fields["hosts"] = tuple(
                draw(st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2, unique=True))
            )
            if kind == "confined":
                fields["addresses"] = (draw(st.sampled_from(NETWORKS)),)
    fields["treatment"] = draw(st.sampled_from(["inspect", "inspect", "inspect", "tunnel", "relay"]))
    if fields["treatment"] == "inspect":
        fields["schemes"] = draw(SCHEMES)
        fields["requests"] = draw(st.just(()) | SOME_REQUESTS)
    return _entry(**fields, expires=draw(EXPIRES))


@st.composite
def denials(draw: st.DrawFn) -> EffectiveEntry:
    """Any deny that compiles."""
    destination: dict[str, Any] = draw(
        st.sampled_from(
            [{"hosts": (pattern,)} for pattern in PATTERNS]
            + [{"addresses": (network,)} for network in NETWORKS]
        )
    )
    return _entry(
        effect="deny",
        **destination,
        origin=draw(st.sampled_from(["profile", "organisation"])),
        schemes=draw(SCHEMES),
        ports=draw(st.just(()) | PORTS),
        requests=draw(st.just(()) | SOME_REQUESTS),
        expires=draw(EXPIRES),
    )


def _entry(**fields: Any) -> EffectiveEntry:
    return EffectiveEntry(id="r", place="p.yaml:1", **fields)


ENTRIES = st.lists(permits() | denials(), max_size=5)
ENDS = st.sampled_from([None, None, YESTERDAY, TODAY])
ADDRESSES = st.ip_addresses() | st.sampled_from(BLOCKS).map(lambda block: block.network.network_address)
NAMES = st.sampled_from([tuple(host.split(".")) for host in HOSTS])
SOME_HOST: st.SearchStrategy[Name | Address] = NAMES | ADDRESSES
METHODS = st.sampled_from(["GET", "HEAD", "POST", "get", "CONNECT", "TRACE", "\ud800"])
UPGRADES = st.sampled_from([None, None, "websocket", "h2c"])
ATTEMPTS: st.SearchStrategy[Attempt] = st.one_of(
    st.builds(DnsQuestion, NAMES),
    st.builds(
        ConnectionAttempt,
        SOME_HOST,
        st.sampled_from([443, 80, 8443, 22]),
        st.sampled_from(["https", "http", "tcp"]),
    ),
    st.builds(
        RequestAttempt,
        SOME_HOST,
        st.sampled_from([443, 80, 8443]),
        st.sampled_from(["https", "http"]),
        METHODS,
        st.sampled_from(TARGETS),
        UPGRADES,
        st.booleans(),
        st.booleans(),
    ),
)


def make(entries: list[EffectiveEntry], end: dt.date | None = None) -> CompiledPolicy:
    mode = "enforce" if end is None else "observe"
    return compile_policy(
        EffectivePolicy.model_validate(
            {"profile": "p", "entries": entries, "mode": mode, "observe_until": end}
        )
    )


@given(ENTRIES, ENDS, denials(), ATTEMPTS, ADDRESSES, st.integers(0, 5))
def test_adding_a_deny_never_allows_more(
    entries: list[EffectiveEntry],
    end: dt.date | None,
    deny: EffectiveEntry,
    attempt: Attempt,
    address: Address,
    place: int,
) -> None:
    before = decide(make(entries, end), attempt, NOON)
    changed = make([*entries[:place], deny, *entries[place:]], end)
    after = decide(changed, attempt, NOON)
    if not before.allowed:
        assert not after.allowed
    if before.verdict == "deny":
        assert after.verdict == "deny"
    if permit_address(make(entries, end), before, address) is not None:
        assert permit_address(changed, after, address) is not None


@given(ENTRIES, permits(), ATTEMPTS)
def test_adding_an_allow_denies_only_what_treatment_or_canonical_form_explain(
    entries: list[EffectiveEntry], extra: EffectiveEntry, attempt: Attempt
) -> None:
    before, after = decide(make(entries), attempt, NOON), decide(make([*entries, extra]), attempt, NOON)
    if not before.allowed or after.allowed:
        return
    if after.verdict == "ask":
        assert extra.effect == "ask" or any(
            entry.effect == "ask" for entry in entries
        )  # a tie, or now the most specific
    elif after.reason is not Reason.PATH_AMBIGUOUS:  # the new entry looks at paths
        opaque = [entry for entry in [*entries, extra] if entry.treatment != "inspect"]
        assert opaque, f"{before} became {after}"


@given(ENTRIES, ENDS, ATTEMPTS)
def test_an_expired_entry_is_an_absent_one(
    entries: list[EffectiveEntry], end: dt.date | None, attempt: Attempt
) -> None:
    live = [entry for entry in entries if entry.expires != YESTERDAY]
    assert decide(make(entries, end), attempt, NOON) == decide(make(live, end), attempt, NOON)


@given(ENTRIES, ATTEMPTS)
def test_observing_that_is_over_enforces(entries: list[EffectiveEntry], attempt: Attempt) -> None:
    assert decide(make(entries, YESTERDAY), attempt, NOON) == decide(make(entries), attempt, NOON)


@example(
    [deny("a.test", schemes=("http",), ports=()), allow("a.test", schemes=("http",), ports=(443,))],
    DnsQuestion(("a", "test")),
)
@given(ENTRIES, ATTEMPTS)
def test_observing_changes_only_the_default_deny(entries: list[EffectiveEntry], attempt: Attempt) -> None:
    enforced, observed = decide(make(entries), attempt, NOON), decide(make(entries, TODAY), attempt, NOON)
    if observed.reason is Reason.OBSERVED:
        assert enforced.verdict == "deny"
        noted = (enforced.reason, enforced.entry)
        assert observed == Decision("allow", Reason.OBSERVED, None, "inspect", True, *noted)
        # A name is asked for on account of any port: one may be denied by a rule, and another by default.
        assert enforced.entry is None or isinstance(attempt, DnsQuestion)
    elif enforced.verdict != "deny":
        assert observed == enforced
    else:
        assert observed.verdict == "deny"


@st.composite
def observers(draw: st.DrawFn) -> EffectiveEntry:
    """Any rule that observes, today or until yesterday."""
    made = draw((permits() | denials()).filter(lambda one: one.effect != "ask" and _may_observe(one)))
    end = draw(st.sampled_from([TODAY, TODAY, YESTERDAY]))
    return made.model_copy(update={"mode": "observe", "observe_until": end, "id": "observer"})


def _may_observe(one: EffectiveEntry) -> bool:
    return bool(one.hosts) or one.effect == "allow"


MIXED = st.lists(permits() | denials() | observers() | observers(), min_size=1, max_size=5)


@given(MIXED, ENDS, ATTEMPTS)
def test_a_rule_that_observes_changes_denials_into_noted_allows_alone(
    entries: list[EffectiveEntry], end: dt.date | None, attempt: Attempt
) -> None:
    found = make(entries, end)
    enforced = compile_policy(found.effective.enforced())
    observed, would = decide(found, attempt, NOON), decide(enforced, attempt, NOON)
    if would.verdict != "deny":
        assert observed == would
    elif observed.would_deny:
        assert observed.verdict in ("allow", "ask")
        assert (observed.would_reason, observed.would_entry and observed.would_entry.id) == (
            would.reason,
            would.entry and would.entry.id,
        )
        if observed.reason is not Reason.OBSERVED and observed.entry is not None:
            assert observed.entry.mode == "enforce"
    else:
        assert observed.verdict == "deny"


@given(MIXED, ATTEMPTS)
def test_rules_that_no_longer_observe_are_enforced(entries: list[EffectiveEntry], attempt: Attempt) -> None:
    over = [
        one.model_copy(update={"observe_until": YESTERDAY}) if one.mode == "observe" else one
        for one in entries
    ]
    enforced = compile_policy(make(entries).effective.enforced())
    ended, wanted = decide(make(over), attempt, NOON), decide(enforced, attempt, NOON)
    assert (ended.verdict, ended.reason, ended.treatment) == (wanted.verdict, wanted.reason, wanted.treatment)
    assert not ended.would_deny


@given(ENTRIES, MIXED, ATTEMPTS)
def test_a_denial_in_force_holds_beside_rules_that_observe(
    entries: list[EffectiveEntry], mixed: list[EffectiveEntry], attempt: Attempt
) -> None:
    trials_ = [one for one in mixed if one.mode == "observe" and one.effect == "allow"]
    before, after = decide(make(entries), attempt, NOON), decide(make([*entries, *trials_]), attempt, NOON)
    if before.verdict != "deny" or (before.entry is not None and not isinstance(attempt, DnsQuestion)):
        assert after == before


@given(ENTRIES, ENDS, ATTEMPTS, ADDRESSES)
def test_no_policy_lifts_the_floor(
    entries: list[EffectiveEntry], end: dt.date | None, attempt: Attempt, address: Address
) -> None:
    compiled = make(entries, end)
    found = decide(compiled, attempt, NOON)
    host = attempt.name if isinstance(attempt, DnsQuestion) else attempt.host
    below = is_floor_name(host) if isinstance(host, tuple) else classify(host).reason
    if isinstance(host, tuple) and below is not None:
        assert found == Decision("deny", below)
    if not isinstance(host, tuple) and classify(host).kind == "floor":
        assert found == Decision("deny", below) if below is not None else False
    if classify(address).kind == "floor":
        assert permit_address(compiled, found, address) is not None


@given(ENTRIES, ENDS, ATTEMPTS, ADDRESSES)
def test_special_addresses_need_a_rule_that_names_them(
    entries: list[EffectiveEntry], end: dt.date | None, attempt: Attempt, address: Address
) -> None:
    compiled = make(entries, end)
    found = decide(compiled, attempt, NOON)
    if permit_address(compiled, found, address) is None and classify(address).kind == "special":
        assert found.entry is not None
        assert found.entry.addresses


@given(ENTRIES, ENDS, ATTEMPTS)
def test_a_name_is_looked_up_when_and_only_when_some_connection_could_be_made(
    entries: list[EffectiveEntry], end: dt.date | None, attempt: Attempt
) -> None:
    if isinstance(attempt, DnsQuestion) and end is None:
        compiled = make(entries)
        connections = [
            decide(compiled, ConnectionAttempt(attempt.name, port, scheme), NOON).verdict
            for port in (443, 80, 8443)
            for scheme in ("https", "http", "tcp")
        ]
        expected = "allow" if "allow" in connections else "ask" if "ask" in connections else "deny"
        assert decide(compiled, attempt, NOON).verdict == expected


@given(ENTRIES, ATTEMPTS)
def test_no_request_is_allowed_on_a_connection_that_is_not(
    entries: list[EffectiveEntry], attempt: Attempt
) -> None:
    if isinstance(attempt, RequestAttempt):
        compiled = make(entries)
        if decide(compiled, attempt, NOON).allowed:
            carrier = ConnectionAttempt(attempt.host, attempt.port, attempt.scheme)
            assert decide(compiled, carrier, NOON).allowed


@given(ENTRIES, ENDS, ATTEMPTS)
def test_the_entry_that_decided_says_so_itself(
    entries: list[EffectiveEntry], end: dt.date | None, attempt: Attempt
) -> None:
    compiled = make(entries, end)
    found = decide(compiled, attempt, NOON)
    said = {id(trial.entry): trial for trial in trials(compiled, attempt, NOON)}
    if (
        found.entry is not None
        and found.reason in (Reason.RULE, Reason.APPROVAL_REQUIRED)
        and found.treatment == "inspect"
    ):
        assert said[id(found.entry)].outcome == "covers"
    if found.entry is None:
        assert found.reason not in (Reason.RULE, Reason.DENIED_BY_RULE, Reason.DENIED_BY_ORGANISATION)


@given(ENTRIES, st.sampled_from(HOSTS), st.data())
def test_spelling_never_changes_a_verdict(
    entries: list[EffectiveEntry], host: str, data: st.DataObject
) -> None:
    spelled = "".join(data.draw(st.sampled_from([letter, letter.upper()])) for letter in host) + data.draw(
        st.sampled_from(["", "."])
    )
    found, plain = parse_host(spelled), parse_host(host)
    assert not isinstance(found, BadHost)
    assert not isinstance(plain, BadHost)
    compiled = make(entries)
    assert decide(compiled, ConnectionAttempt(found, 443, "https"), NOON) == decide(
        compiled, ConnectionAttempt(plain, 443, "https"), NOON
    )


@given(st.sampled_from(HOSTS), ATTEMPTS)
def test_a_wildcard_never_covers_its_apex(host: str, attempt: Attempt) -> None:
    wild = _entry(
        effect="allow", hosts=(f"*.{host}",), requests=("ANY,WEBSOCKET /**",), ports=(443, 80, 8443)
    )
    name = attempt.name if isinstance(attempt, DnsQuestion) else attempt.host
    if name == tuple(host.split(".")):
        assert decide(make([wild]), attempt, NOON).verdict == "deny"


@given(ENTRIES)
def test_the_digest_is_stable_and_tells_policies_apart(entries: list[EffectiveEntry]) -> None:
    assert make(entries).digest == make(entries).digest
    again = EffectivePolicy.model_validate_json(make(entries).effective.model_dump_json())
    assert compile_policy(again).digest == make(entries).digest
    assert make([*entries, _entry(effect="deny", hosts=("z.test",))]).digest != make(entries).digest


ANY_TEXT = st.text(max_size=30)
ANY_NAME = st.lists(ANY_TEXT, max_size=4).map(tuple)
ANY_HOST: st.SearchStrategy[Name | Address] = ANY_NAME | NAMES | st.ip_addresses()
ANYTHING: st.SearchStrategy[Attempt] = st.one_of(
    st.builds(DnsQuestion, ANY_NAME),
    st.builds(ConnectionAttempt, ANY_HOST, st.integers(), st.sampled_from(["https", "http", "tcp"])),
    st.builds(
        RequestAttempt,
        ANY_HOST,
        st.integers(),
        st.sampled_from(["https", "http"]),
        ANY_TEXT,
        ANY_TEXT.map(lambda text: "/" + text) | ANY_TEXT,
        st.none() | ANY_TEXT,
        st.booleans(),
        st.booleans(),
    ),
)


@settings(max_examples=200)
@given(ENTRIES, ENDS, ANYTHING | ATTEMPTS, st.floats(), ADDRESSES)
def test_deciding_is_total(
    entries: list[EffectiveEntry], end: dt.date | None, attempt: Attempt, now: float, address: Address
) -> None:
    compiled = make(entries, end)
    found = decide(compiled, attempt, now)
    assert found.reason in WORDS
    assert (found.verdict == "allow") is (found.reason in (Reason.RULE, Reason.OBSERVED))
    permitted = permit_address(compiled, found, address, port=443, now=now)
    assert permitted is None or permitted in WORDS
    trials(compiled, attempt, now)
