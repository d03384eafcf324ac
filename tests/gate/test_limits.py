"""What the limits of rules and profile let pass, by an injected clock."""

from __future__ import annotations

from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate import account as module
from egressd.gate import limits as limits_module
from egressd.gate.account import PROFILE, Account, Kind, Over
from egressd.gate.limits import Budget, Fold, Level, kept, limited
from egressd.gate.settings import Settings
from egressd.policy.effective import EffectiveEntry, EffectivePolicy, EntryLimits, Rate
from egressd.policy.reasons import Reason

A, B, C = (("a", "example", "com"), ("b", "example", "com"), ("c", "example", "com"))


def rate(amount: int, seconds: int = 60) -> Rate:
    return Rate(amount=amount, seconds=seconds)


def entry(
    name: str = "api", *, hosts: tuple[str, ...] = ("*.example.com",), **limits: object
) -> EffectiveEntry:
    return EffectiveEntry(
        id=name,
        place="p.yaml:1",
        effect="allow",
        hosts=hosts,
        limits=EntryLimits.model_validate(limits),
    )


def policy(*entries: EffectiveEntry, **limits: object) -> EffectivePolicy:
    return EffectivePolicy(profile="p", entries=entries, limits=EntryLimits.model_validate(limits))


def account(entry: EffectiveEntry, **profile: object) -> Account:
    return Budget(Settings()).account(0.0, policy(entry, **profile), entry)


def ask(account: Account, now: float = 0.0, host: object = A, size: int = 100, by: str = "c1") -> str | None:
    """One request; None where it passes, else which limit it is over."""
    over = account.request(now, by, host, size)  # type: ignore[arg-type]  # Name or Address
    return over.limit if over is not None else None


# repeats


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 100, allow_nan=False)), max_size=60))
def test_nothing_folded_is_lost(calls: list[tuple[str, float]]) -> None:
    fold: Fold[str] = Fold(10)
    seen = 0
    for key, now in calls:
        seen += sum(count for _, count in fold.take(now))
        seen += fold.first(key, now)
    assert seen + sum(count for _, count in fold.drain()) == len(calls)
    assert not fold


def test_the_first_of_a_kind_is_recorded_and_the_rest_counted_once_the_window_ends() -> None:
    fold: Fold[str] = Fold(10)
    assert [fold.first("a", now) for now in (0.0, 1.0, 2.0)] == [True, False, False]
    assert fold.first("b", 5.0)
    assert fold.take(9.9) == []
    assert fold.take(10.0) == [("a", 2)]
    assert fold.first("a", 10.5)
    assert fold.take(15.0) == []


# what control sets


def test_connections_are_counted_and_given_back() -> None:
    budget = Budget(Settings(connections=2))
    assert budget.connection(0.0) is None
    assert budget.connection(0.0) is None
    assert budget.connection(0.0) == Over(Reason.TOO_MANY_CONNECTIONS, "connections of the sandbox")
    budget.release()
    assert budget.open_connections == 1
    assert budget.connection(0.0) is None


def test_a_second_release_is_an_error_and_not_a_wider_limit() -> None:
    budget = Budget(Settings(connections=1))
    assert budget.connection(0.0) is None
    budget.release()
    with pytest.raises(RuntimeError):
        budget.release()
    assert [budget.connection(0.0) is None for _ in range(2)] == [True, False]


def test_new_connections_have_a_rate_and_what_is_over_it_may_come_back() -> None:
    budget = Budget(Settings(connections=50, new_connections_per_second=5))
    assert [budget.connection(0.0) for _ in range(10)] == [None] * 10
    over = budget.connection(0.0)
    assert over is not None
    assert (over.reason, over.limit) == (Reason.RATE_LIMITED, "new connections of the sandbox")
    assert over.wait == pytest.approx(0.2)
    assert budget.open_connections == 10
    assert [budget.connection(1.0) is None for _ in range(6)] == [True] * 5 + [False]


class Room:
    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0

    def take(self, held: int) -> bool:
        assert held == self.taken
        self.taken += self.taken < self.most
        return held < self.most

    def give(self) -> None:
        self.taken -= 1


def test_a_connection_takes_what_all_sandboxes_share_and_gives_it_back() -> None:
    room = Room(2)
    budget = Budget(Settings(), room=room)
    assert [budget.connection(0.0) is None for _ in range(3)] == [True, True, False]
    assert budget.connection(0.0) == Over(Reason.TOO_MANY_CONNECTIONS, "descriptors of the worker")
    budget.release()
    assert room.taken == budget.open_connections == 1
    assert budget.connection(0.0) is None


def test_dns_queries_are_counted_by_the_minute() -> None:
    budget = Budget(Settings(dns_queries_per_minute=2))
    assert [budget.dns_query(0.0) for _ in range(3)] == [True, True, False]
    assert budget.dns_query(30.0)


# requests


def test_requests_are_counted_for_each_entry_by_itself() -> None:
    first, second = entry("one", requests=rate(2)), entry("two", requests=rate(2))
    rules = policy(first, second)
    budget = Budget(Settings())
    one, two = (budget.account(0.0, rules, each) for each in (first, second))
    assert [ask(one) for _ in range(3)] == [None, None, "requests of rule one"]
    assert ask(two) is None


def test_entries_of_one_service_share_what_they_have() -> None:
    first, second = entry("pypi", requests=rate(2)), entry("pypi", requests=rate(2))
    rules, budget = policy(first, second), Budget(Settings())
    assert ask(budget.account(0.0, rules, first)) is None
    assert ask(budget.account(0.0, rules, second)) is None
    assert ask(budget.account(0.0, rules, first)) == "requests of rule pypi"


def test_the_profiles_limits_apply_on_top() -> None:
    first, second = entry("one", requests=rate(9)), entry("two")
    rules, budget = policy(first, second, requests=rate(2)), Budget(Settings())
    one, two = (budget.account(0.0, rules, each) for each in (first, second))
    assert [ask(one), ask(two), ask(one), ask(two)] == [None, None, *["requests of the profile"] * 2]


def test_what_only_observe_mode_allows_is_bound_by_the_profile() -> None:
    budget = Budget(Settings())
    free = budget.account(0.0, policy(requests=rate(1)), None)
    assert [ask(free), ask(free)] == [None, "requests of the profile"]


def test_a_refusal_says_when_to_come_back() -> None:
    bound = account(entry(requests=rate(2, 60)))
    assert [ask(bound), ask(bound)] == [None, None]
    assert bound.request(0.0, "c1", A, 1) == Over(Reason.RATE_LIMITED, "requests of rule api", 30.0)
    assert Over(Reason.RATE_LIMITED, "", 29.2).retry_after == 30
    assert Over(Reason.RATE_LIMITED, "", 0.01).retry_after == 1
    assert Over(Reason.TOO_MANY_CONNECTIONS, "").retry_after is None


def test_a_refusal_costs_nothing() -> None:
    bound = account(entry(requests=rate(2), new_hosts=rate(2)), requests=rate(9), upload=rate(1000, 86_400))
    assert ask(bound, size=2000) == "upload of the profile"
    assert [ask(bound), ask(bound), ask(bound)] == [None, None, "requests of rule api"]


def test_no_limits_bind_nothing() -> None:
    bound = account(entry())
    assert all(ask(bound, size=10**9) is None for _ in range(1000))
    assert bound.upload.room(0.0, 10**9) == bound.download.room(0.0, 10**9) == 10**9


# bytes


@pytest.mark.parametrize(
    ("size", "passes"),
    [
        pytest.param(50_000, True, id="as much as there is"),
        pytest.param(50_001, False, id="a byte more"),
    ],
)
def test_a_request_goes_only_where_its_head_has_room(size: int, passes: bool) -> None:
    bound = account(entry(upload=rate(50_000, 86_400)))
    assert (ask(bound, size=size) is None) is passes


def test_a_head_that_has_room_in_a_moment_may_wait_for_it() -> None:
    bound = account(entry(upload=rate(10_000, 1)))
    bound.upload.take(0.0, 10_000)
    assert ask(bound, size=10_000) is None
    assert ask(bound, size=10_001) == "upload of rule api", "it never will"


def test_a_day_that_is_used_up_names_the_time_that_is_left() -> None:
    bound = account(entry(upload=rate(86_400, 86_400)))
    bound.upload.take(0.0, 86_400)
    over = bound.request(0.0, "c1", A, 500)
    assert over is not None
    assert over.retry_after == 500


def test_bytes_are_bound_by_the_entry_and_by_the_profile() -> None:
    bound = account(entry(upload=rate(100), download=rate(300)), upload=rate(200), download=rate(30))
    assert bound.upload.room(0.0, 1000) == 100
    assert bound.download.room(0.0, 1000) == 30


# new hosts


def test_a_name_counts_once() -> None:
    bound = account(entry(new_hosts=rate(2, 60)))
    asked = [ask(bound, host=host) for host in (A, A, B, A, B, C, A)]
    assert asked == [None, None, None, None, None, "new_hosts of rule api", None]


def test_a_name_counts_again_after_the_time_of_the_limit() -> None:
    bound = account(entry(new_hosts=rate(1, 60)))
    assert ask(bound, 0.0, A) is None
    assert ask(bound, 59.0, A) is None
    assert ask(bound, 61.0, A) is None
    assert ask(bound, 61.0, B) == "new_hosts of rule api"


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry(hosts=("a.example.com", "b.example.com"), new_hosts=rate(1)), id="only written names"),
        pytest.param(
            entry(hosts=("a.example.com", "b.example.com", "*.example.org"), new_hosts=rate(1)),
            id="written names beside a wildcard",
        ),
    ],
)  # fmt: skip
def test_names_that_somebody_wrote_down_are_not_new(entry: EffectiveEntry) -> None:
    bound = account(entry, new_hosts=rate(1))
    assert [ask(bound, host=host) for host in (A, B, A)] == [None, None, None]


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry(new_hosts=rate(1)), id="a wildcard"),
        pytest.param(
            EffectiveEntry(
                id="api",
                place="p:1",
                effect="allow",
                public_web=True,
                limits=EntryLimits(new_hosts=rate(1)),
            ),
            id="the public web",
        ),
    ],
)  # fmt: skip
def test_names_that_nobody_wrote_down_are_new(entry: EffectiveEntry) -> None:
    assert [ask(account(entry), host=host) for host in (A,)] == [None]
    bound = account(entry)
    assert [ask(bound, host=host) for host in (A, B)] == [None, "new_hosts of rule api"]


def test_the_profile_counts_the_new_names_of_all_its_rules() -> None:
    first, second = entry("one"), entry("two", hosts=("*.b.example.com",))
    rules, budget = policy(first, second, new_hosts=rate(1)), Budget(Settings())
    assert ask(budget.account(0.0, rules, first), host=A) is None
    assert ask(budget.account(0.0, rules, second), host=B) == "new_hosts of the profile"


def test_a_bare_address_is_as_good_as_a_name() -> None:
    bound = Budget(Settings()).account(0.0, policy(new_hosts=rate(1)), None)
    assert ask(bound, host=IPv4Address("192.0.2.1")) is None
    assert ask(bound, host=IPv4Address("192.0.2.2")) == "new_hosts of the profile"


def test_so_many_names_are_remembered_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KNOWN", 2)
    bound = account(entry(new_hosts=rate(4, 60)))
    assert [ask(bound, host=host) for host in (A, B, C, C, A, B)] == [None] * 5 + ["new_hosts of rule api"]


# connections


def test_connections_are_counted_by_entry_until_they_are_over() -> None:
    only = entry(connections=2)
    rules, budget = policy(only), Budget(Settings())
    bound = budget.account(0.0, rules, only)
    assert [bound.connect(0.0, name) is None for name in ("c1", "c2", "c3", "c1")] == [
        True,
        True,
        False,
        True,
    ]
    over = bound.connect(0.0, "c3")
    assert over == Over(Reason.TOO_MANY_CONNECTIONS, "connections of rule api")
    budget.leave("c1")
    budget.leave("c1")
    assert bound.connect(0.0, "c3") is None


def test_a_connection_counts_for_every_entry_that_it_carried_a_request_of() -> None:
    first, second = entry("one"), entry("two", connections=1)
    rules, budget = policy(first, second, connections=2), Budget(Settings())
    one, two = (budget.account(0.0, rules, each) for each in (first, second))
    assert one.connect(0.0, "c1") is None
    assert ask(two, by="c1") is None
    assert one.connect(0.0, "c2") is None
    assert ask(two, by="c2") == "connections of rule two"
    assert ask(one, by="c3") == "connections of the profile"
    budget.leave("c1")
    assert ask(two, by="c2") is None
    assert one.connect(0.0, "c3") is None


# reloads


def test_a_reload_fills_nothing_and_clamps_what_is_more_than_the_new_amount() -> None:
    budget = Budget(Settings())
    before = entry(requests=rate(10, 3600))
    old = budget.account(0.0, policy(before), before)
    assert [ask(old) for _ in range(4)] == [None] * 4
    for amount, left in ((100, 6), (5, 5), (10, 5)):
        after = entry(requests=rate(amount, 3600))
        rules = policy(after)
        budget.adopt(0.0, rules)
        assert budget.buckets(0.0, [("api", after.limits)], "requests")[0][1].level(0.0) == left
    assert [ask(old) for _ in range(6)] == [None] * 5 + ["requests of rule api"], "what is open is bound too"


def test_a_rule_that_is_taken_out_and_put_back_is_not_filled_by_that() -> None:
    budget, limited = Budget(Settings()), entry(requests=rate(2, 3600))
    rules = policy(limited)
    assert [ask(budget.account(0.0, rules, limited)) for _ in range(2)] == [None, None]
    budget.adopt(1.0, policy())
    assert ask(budget.account(2.0, rules, limited), 2.0) == "requests of rule api"
    budget.adopt(3600.0, policy())
    budget.adopt(7200.0, policy())
    assert [ask(budget.account(7200.0, rules, limited), 7200.0) for _ in range(2)] == [None, None]


def test_a_policy_that_was_swapped_without_a_word_is_adopted() -> None:
    budget, limited = Budget(Settings()), entry(requests=rate(1))
    assert ask(budget.account(0.0, policy(entry()), None)) is None
    bound = budget.account(0.0, policy(limited), limited)
    assert [ask(bound), ask(bound)] == [None, "requests of rule api"]


# deaths


class Control:
    """What control keeps of a sandbox, and the budgets of the workers that died."""

    def __init__(self, rules: EffectivePolicy) -> None:
        self.rules = rules
        self.now = 0.0
        self.levels: dict[tuple[str, Kind, str], tuple[float, float]] = {}
        self.budget = Budget(Settings(dns_queries_per_minute=10), self.keep)

    def keep(self, owner: str, kind: Kind, tokens: float, host: str = "") -> None:
        self.levels[owner, kind, host] = (tokens, self.now)

    def die(self) -> None:
        self.budget = Budget(Settings(dns_queries_per_minute=10), self.keep)
        levels = [
            Level(owner, kind, tokens, self.now - told, host)
            for (owner, kind, host), (tokens, told) in self.levels.items()
        ]
        self.budget.restore(self.now, self.rules, levels)

    def account(self) -> Account:
        return self.budget.account(self.now, self.rules, self.rules.entries[0])


def test_a_death_fills_nothing() -> None:
    control = Control(policy(entry(requests=rate(3, 3600), upload=rate(1000, 3600)), requests=rate(9, 3600)))
    assert [ask(control.account()) for _ in range(3)] == [None] * 3
    control.account().upload.take(0.0, 900)
    assert [control.budget.dns_query(0.0) for _ in range(11)] == [True] * 10 + [False]
    control.die()
    assert not control.budget.dns_query(0.0)
    assert ask(control.account()) == "requests of rule api"
    assert control.account().upload.room(0.0, 1000) <= 100
    control.now = 1200.0
    control.die()
    assert [ask(control.account(), 1200.0) for _ in range(2)] == [None, "requests of rule api"]


def test_levels_that_the_policy_knows_nothing_of_are_left_out() -> None:
    budget = Budget(Settings())
    limited = entry(requests=rate(3))
    budget.restore(
        0.0, policy(limited), [Level("other", "requests", 0.0, 0.0), Level("api", "upload", 0.0, 0.0)]
    )
    assert ask(budget.account(0.0, policy(limited), limited)) is None


@given(st.lists(st.tuples(st.floats(0, 20), st.booleans()), max_size=80), st.integers(1, 40))
def test_no_way_to_live_and_die_lets_more_requests_pass_than_the_limit(
    steps: list[tuple[float, bool]], amount: int
) -> None:
    control, passed, began = Control(policy(entry(requests=rate(amount, 60)))), 0, None
    for gap, dies in steps:
        control.now += gap
        if ask(control.account(), control.now) is None:
            passed += 1
            began = control.now if began is None else began
        if dies:
            control.die()
    span = control.now - began if began is not None else 0.0
    assert passed <= amount + span * amount / 60 + 1e-6


# successors


def test_a_successor_goes_on_with_half_and_what_is_open_with_the_other_half() -> None:
    control = Control(policy(entry(requests=rate(8, 3600)), upload=rate(1000, 3600)))
    open_ = control.account()
    assert [ask(open_) for _ in range(2)] == [None] * 2
    before = control.budget
    before.part(0.0, control.rules)
    control.die()
    assert [ask(open_) for _ in range(4)] == [None] * 3 + ["requests of rule api"]
    assert [ask(control.account()) for _ in range(4)] == [None] * 3 + ["requests of rule api"]
    assert open_.upload.room(0.0, 1000) == 500
    assert control.account().upload.room(0.0, 1000) == 500
    assert not before.dns_query(0.0)
    assert control.budget.dns_query(0.0)


def test_what_is_left_behind_is_never_refilled_nor_told_nor_made_anew() -> None:
    control = Control(policy(entry(requests=rate(4, 60))))
    open_, before = control.account(), control.budget
    before.part(0.0, control.rules)
    told = dict(control.levels)
    assert [ask(open_, 3600.0) for _ in range(3)] == [None, None, "requests of rule api"]
    assert control.levels == told
    before.part(9.0, control.rules)
    before.adopt(9.0, policy(entry(requests=rate(400, 60))))
    assert ask(open_, 3600.0) == "requests of rule api"
    late = entry("late", requests=rate(4, 60))
    assert ask(before.account(9.0, policy(late), late), 9.0) == "requests of rule late"
    assert control.levels == told


@given(
    st.lists(st.tuples(st.floats(0, 20), st.sampled_from(["", "", "die", "part"])), max_size=80),
    st.integers(1, 40),
)
def test_no_way_to_be_succeeded_lets_more_requests_pass_than_the_limit(
    steps: list[tuple[float, str]], amount: int
) -> None:
    control, passed, began = Control(policy(entry(requests=rate(amount, 60)))), 0, None
    left: list[Account] = []
    for gap, event in steps:
        control.now += gap
        for one in (*left, control.account()):
            if ask(one, control.now) is None:
                passed += 1
                began = control.now if began is None else began
        if event == "part":
            left.append(control.account())
            control.budget.part(control.now, control.rules)
        if event:
            control.die()
    span = control.now - began if began is not None else 0.0
    assert passed <= amount + span * amount / 60 + 1e-6


# connections begun, names looked up, destinations by themselves


def test_connections_that_begin_are_counted_once_for_each_rule_and_for_the_profile() -> None:
    first, second = entry("one", new_connections=rate(2)), entry("two")
    rules, budget = policy(first, second, new_connections=rate(3)), Budget(Settings())
    one, two = budget.account(0.0, rules, first), budget.account(0.0, rules, second)
    assert [one.connect(0.0, f"c{n}") for n in (1, 2, 1, 2)] == [None] * 4
    over = one.connect(0.0, "c3")
    assert over is not None
    assert (over.reason, over.limit) == (Reason.RATE_LIMITED, "new_connections of rule one")
    assert over.retry_after == 30
    assert two.connect(0.0, "c3") is None
    over = two.connect(0.0, "c4")
    assert over is not None
    assert over.limit == "new_connections of the profile"
    assert over.wait == pytest.approx(20)
    budget.leave("c1")
    assert one.connect(0.0, "c5") is not None, "what has ended has begun all the same"
    assert one.connect(60.0, "c5") is None


def test_a_connection_that_has_no_place_has_not_begun() -> None:
    bound = account(entry(new_connections=rate(1), connections=1))
    assert bound.connect(0.0, "c1") is None
    assert bound.connect(0.0, "c2") == Over(Reason.TOO_MANY_CONNECTIONS, "connections of rule api")


def test_names_under_a_wildcard_are_counted_as_they_are_looked_up() -> None:
    bound = account(entry(hosts=("*.example.com", "a.example.com"), names=rate(1)), names=rate(2))
    assert [bound.name(0.0, name) for name in (A, B, B)] == [None] * 3
    over = bound.name(0.0, C)
    assert over is not None
    assert (over.reason, over.limit) == (Reason.DNS_BUDGET, "names of rule api")
    assert over.wait == pytest.approx(60)
    assert bound.name(60.0, C) is None
    assert account(entry(hosts=("a.example.com",), names=rate(1))).name(0.0, A) is None


def of(budget: Budget, rules: EffectivePolicy, host: object, now: float = 0.0) -> Account:
    return budget.account(now, rules, rules.entries[0], host)  # type: ignore[arg-type] # Name or Address


def test_each_destination_has_its_own_bytes() -> None:
    rules = policy(entry(upload_per_host=rate(1000), download_per_host=rate(500)), upload=rate(1500))
    budget = Budget(Settings())
    assert of(budget, rules, A) is of(budget, rules, A)
    a, b = of(budget, rules, A), of(budget, rules, B)
    a.upload.take(0.0, 1000)
    assert a.upload.room(0.0, 10) == 0
    assert ask(a, size=100) == "upload_per_host of rule api"
    assert b.upload.room(0.0, 1000) == 500, "the profile's are everybody's"
    assert b.download.room(0.0, 1000) == 500
    a.download.take(0.0, 500)
    assert (a.download.room(0.0, 1), b.download.room(0.0, 1)) == (0, 1)


def test_without_such_a_limit_there_is_one_account_for_all_destinations() -> None:
    rules = policy(entry(upload=rate(1000)))
    budget = Budget(Settings())
    assert of(budget, rules, A) is of(budget, rules, B)


def test_destinations_past_so_many_share_what_one_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "HOSTS", 1)
    rules = policy(entry(upload_per_host=rate(1000)))
    budget = Budget(Settings())
    of(budget, rules, A).upload.take(0.0, 900)
    of(budget, rules, B).upload.take(0.0, 900)
    assert of(budget, rules, C).upload.room(0.0, 1000) == 100
    assert of(budget, rules, A).upload.room(0.0, 1000) == 100


def test_no_death_fills_what_a_destination_has_used() -> None:
    control = Control(policy(entry(upload_per_host=rate(1600, 86_400))))
    of(control.budget, control.rules, A).upload.take(0.0, 1600)
    control.die()
    assert of(control.budget, control.rules, A).upload.room(0.0, 1000) == 0
    assert of(control.budget, control.rules, B).upload.room(0.0, 1000) == 1000
    of(control.budget, control.rules, B)
    control.budget.part(0.0, control.rules)
    assert of(control.budget, control.rules, C).upload.room(0.0, 1000) == 0, (
        "met by nobody before: the successor's"
    )
    control.die()
    assert of(control.budget, control.rules, B).upload.room(0.0, 1000) <= 800


def test_levels_of_a_destination_where_there_is_none_and_the_reverse_are_left_out() -> None:
    rules = policy(entry(requests=rate(3), upload_per_host=rate(1000)))
    budget = Budget(Settings())
    budget.restore(
        0.0,
        rules,
        [Level("api", "requests", 0.0, 0.0, "a.example.com"), Level("api", "upload_per_host", 0.0, 0.0)],
    )
    assert ask(of(budget, rules, A)) is None
    assert of(budget, rules, A).upload.room(0.0, 1000) == 1000


# what control accepts


def test_what_a_policy_limits() -> None:
    rules = policy(entry(requests=rate(1)), entry("two", connections=3), download=rate(7))
    assert limited(rules) == {("api", "requests"): rate(1), (PROFILE, "download"): rate(7)}
    assert kept(rules) == {("api", "requests"), (PROFILE, "download"), (PROFILE, "dns")}
