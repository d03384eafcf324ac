from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.dns.synthetic import CAPACITY, FIRST, LAST, SyntheticNames
from egressd.policy.reasons import Reason

A = ("a", "test")
B = ("b", "test")


def stored(names: SyntheticNames, name: tuple[str, ...]) -> IPv4Address:
    address = names.reserve(name)
    assert isinstance(address, IPv4Address)
    names.confirm(name)
    return address


def test_the_range_has_16384_addresses_from_198_18_1_0() -> None:
    assert (str(FIRST), str(LAST), CAPACITY) == ("198.18.1.0", "198.18.64.255", 16_384)


def test_a_pending_pair_is_invisible_until_it_is_stored() -> None:
    names = SyntheticNames()
    address = names.reserve(A)
    assert address == FIRST
    assert names.address_of(A) is None
    assert names.name_of(FIRST) is None
    assert names.reserve(A) == FIRST, "a second query meanwhile gets the same address"
    names.confirm(A)
    assert names.address_of(A) == FIRST
    assert names.name_of(FIRST) == A


def test_names_and_addresses_are_one_to_one() -> None:
    names = SyntheticNames()
    assert stored(names, A) == FIRST
    assert stored(names, B) == FIRST + 1
    assert stored(names, A) == FIRST
    assert list(names.pairs()) == [(A, FIRST), (B, FIRST + 1)]
    assert len(names) == 2


@pytest.mark.parametrize("address", [LAST, IPv4Address("11.0.0.1"), IPv6Address("::ffff:198.18.1.0")])
def test_an_address_that_was_never_given_has_no_name(address: IPv4Address | IPv6Address) -> None:
    names = SyntheticNames()
    stored(names, A)
    assert names.name_of(address) is None


def test_past_the_cap_there_is_a_reason_and_what_is_held_stays() -> None:
    names = SyntheticNames(2)
    stored(names, A)
    names.reserve(B)  # pending names count: they hold their address
    assert names.reserve(("c", "test")) is Reason.DNS_BUDGET
    assert names.reserve(A) == FIRST
    assert names.reserve(B) == FIRST + 1


def test_the_last_address_of_the_range_is_given_and_none_after_it() -> None:
    names = SyntheticNames()
    given_out = [stored(names, (str(number), "test")) for number in range(CAPACITY)]
    assert given_out[-1] == LAST
    assert len(set(given_out)) == CAPACITY
    assert names.reserve(A) is Reason.DNS_BUDGET


def test_a_new_worker_takes_the_pairs_over_and_gives_fresh_addresses_above_them() -> None:
    names = SyntheticNames()
    names.restore([(A, FIRST + 5)])
    assert names.name_of(FIRST + 5) == A
    assert stored(names, B) == FIRST + 6
    assert names.root_of(A) is None


def test_a_range_used_up_before_the_restart_stays_used_up() -> None:
    names = SyntheticNames()
    names.restore([(A, LAST)])
    assert names.reserve(B) is Reason.DNS_BUDGET


@pytest.mark.parametrize(
    "pairs",
    [
        [(A, FIRST), (B, FIRST)],
        [(A, FIRST), (A, FIRST + 1)],
        [(A, FIRST - 1)],
        [(A, LAST + 1)],
    ],
    ids=["one address for two names", "two addresses for one name", "below the range", "above the range"],
)
def test_pairs_that_contradict_each_other_change_nothing(
    pairs: list[tuple[tuple[str, ...], IPv4Address]],
) -> None:
    names = SyntheticNames()
    with pytest.raises(ValueError, match=r"198\.18"):
        names.restore(pairs)
    assert len(names) == 0
    assert names.reserve(A) == FIRST


def test_pairs_cannot_be_restored_over_a_pending_address() -> None:
    names = SyntheticNames()
    names.reserve(A)
    with pytest.raises(ValueError, match="before the first query"):
        names.restore([(B, FIRST)])


def test_the_latest_query_is_the_root_of_later_connections() -> None:
    names = SyntheticNames()
    names.touch(A, "before it is stored")
    assert names.root_of(A) is None
    stored(names, A)
    names.touch(A, "q1")
    names.touch(A, "q2")
    assert names.root_of(A) == "q2"


@pytest.mark.parametrize("cap", [0, -1, CAPACITY + 1])
def test_a_cap_outside_the_range_is_an_error(cap: int) -> None:
    with pytest.raises(ValueError, match="names"):
        SyntheticNames(cap)


@given(
    st.lists(st.tuples(st.sampled_from(["reserve", "confirm", "restart"]), st.integers(0, 9)), max_size=80)
)
def test_no_address_ever_stands_for_two_names(steps: list[tuple[str, int]]) -> None:
    names = SyntheticNames()
    ever: dict[IPv4Address, tuple[str, ...]] = {}
    for step, number in steps:
        name = (str(number), "test")
        if step == "reserve":
            names.reserve(name)
        elif step == "confirm":
            names.confirm(name)
        else:  # a new worker knows only what was stored
            pairs = list(names.pairs())
            names = SyntheticNames()
            names.restore(pairs)
        for held, address in names.pairs():
            assert ever.setdefault(address, held) == held
            assert names.name_of(address) == held
