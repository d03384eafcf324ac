"""What flags mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from egressd.cli.given import Given
from egressd.cli.options import given_config, label_of, seconds


@pytest.mark.parametrize(
    ("text", "value"), [("10s", 10), ("500ms", 0.5), ("1.5s", 1.5), ("2m", 120), ("1h", 3600), ("7", 7)]
)
def test_a_duration_is_read_as_people_write_it(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "s", "0", "0s", "-1s", "1 s", "1d", "1e3", "inf", "٣s", "9" * 400])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no duration"):
        seconds(text)


def test_a_duration_that_is_refused_is_told_by_its_flag() -> None:
    with pytest.raises(ValueError, match=r"^--ttl 'soon' is no duration"):
        seconds("soon", "--ttl")


def test_a_label_is_a_key_and_all_behind_the_first_equals_sign() -> None:
    assert label_of("task=a=b") == ("task", "a=b")
    assert label_of("task=") == ("task", "")


@pytest.mark.parametrize("text", ["", "task", "=value"])
def test_what_is_no_label_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="k=v is wanted"):
        label_of(text)


def test_the_flags_of_this_call_are_on_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "egressd.yaml"
    file.write_text("rules: from-file\njournal: from-file\n")
    monkeypatch.setattr("egressd.cli.options.GIVEN", Given(config=file, rules=Path("/given")))
    config = given_config(journal="-", ca_dir=Path("/ca"), dns_upstream="udp://192.0.2.1")
    assert (config.rules, config.journal, config.ca.ca) == (Path("/given"), "-", Path("/ca"))
    assert config.dns.upstream == "udp://192.0.2.1"
