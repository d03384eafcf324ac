from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from egressd.policy.effective import Rate
from egressd.policy.model import ProfileFile, json_schema
from egressd.policy.values import UnfitError, parse_moment, parse_rate, slug

RATES = [
    ("600/minute", False, Rate(amount=600, seconds=60)),
    ("1/second", False, Rate(amount=1, seconds=1)),
    ("50MB/day", True, Rate(amount=50_000_000, seconds=86400)),
    ("1kB/hour", True, Rate(amount=1000, seconds=3600)),
    ("2GB/hour", True, Rate(amount=2 * 10**9, seconds=3600)),
    ("1KiB/hour", True, Rate(amount=1024, seconds=3600)),
    ("3MiB/hour", True, Rate(amount=3 * 2**20, seconds=3600)),
    ("1GiB/hour", True, Rate(amount=2**30, seconds=3600)),
    ("500/hour", True, Rate(amount=500, seconds=3600)),
]


@pytest.mark.parametrize(("text", "counts_bytes", "rate"), RATES, ids=[text for text, _, _ in RATES])
def test_a_limit_is_an_amount_in_a_period(text: str, counts_bytes: bool, rate: Rate) -> None:
    assert parse_rate(text, counts_bytes=counts_bytes) == rate


@pytest.mark.parametrize(
    "text",
    [
        "",
        "600",
        "600/min",
        "600 /minute",
        "-1/hour",
        "0/hour",
        "1.5MB/day",
        "5mb/day",
        "1KB/day",
        "٣/hour",
        "1/hour\n",
    ],
)
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"limit|period|unit"):
        parse_rate(text, counts_bytes=True)


def test_what_is_counted_has_no_unit() -> None:
    with pytest.raises(ValueError, match="no unit"):
        parse_rate("5MB/day", counts_bytes=False)


@pytest.mark.parametrize(
    ("text", "hour"), [("2027-03-31", 12), ("2027-03-31T18:00Z", 18), ("2027-03-31 18:00:00Z", 18)]
)
def test_a_day_is_its_noon_and_a_time_is_utc(text: str, hour: int) -> None:
    assert parse_moment(text) == dt.datetime(2027, 3, 31, hour, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    "text",
    ["2027-02-30", "2027-3-1", "2027-03-31T18:00", "2027-03-31T18:00+01:00", "20270331", 20270331, None],
)
def test_a_time_without_a_zone_or_out_of_the_calendar_is_refused(text: object) -> None:
    with pytest.raises(UnfitError):
        parse_moment(text)


@given(st.text(max_size=200))
def test_a_slug_is_an_id_or_nothing(text: str) -> None:
    made = slug(text)
    assert not made or ProfileFile.model_validate({"schema": 1, "profile": made}).profile == made


@pytest.mark.parametrize("name", ["", "A", "a_b", "-a", "a-", "a--b", "a" * 65, "ä", "a\n"])
def test_an_id_is_kebab_case(name: str) -> None:
    with pytest.raises(ValidationError):
        ProfileFile.model_validate({"schema": 1, "profile": name})


@pytest.mark.parametrize("version", [0, 2, "1", 1.0, True, None])
def test_only_schema_1_is_read(version: object) -> None:
    with pytest.raises(ValidationError):
        ProfileFile.model_validate({"schema": version, "profile": "a"})


def test_the_json_schema_is_closed_wherever_the_models_are() -> None:
    definitions = json_schema()["$defs"]
    assert {
        "ProfileFile",
        "ServiceFile",
        "OrganisationFile",
        "AllowEntry",
        "DenyEntry",
        "AskEntry",
    } <= definitions.keys()
    for name, part in definitions.items():
        if "properties" in part:
            assert part["additionalProperties"] is False, name
