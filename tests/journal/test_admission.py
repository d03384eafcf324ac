"""What a worker may put into the journal, and what it may not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.journal.admission import CLOCK_TOLERANCE, BadRecord, admit, encode
from egressd.journal.record import FIELDS, TEXT_LIMIT, Record, clip, new_id, timestamp, to_line
from egressd.journal.stream_sink import STREAM_LINE_LIMIT

NOW = 1_800_000_000.0


def sound(**fields: Any) -> dict[str, Any]:
    """A decision as a worker sends it, changed by `fields`."""
    record = Record(
        event="decision",
        sandbox="box",
        attempt_id="a1",
        root_id="a1",
        layer="connection",
        verdict="deny",
        reason="not_allowed",
        time=timestamp(NOW),
    )
    return record.as_dict() | fields


def test_a_sound_record_is_admitted_as_it_is_and_awaits_its_number() -> None:
    given_ = sound(host="a.example", port=443, labels={"task": "7"}, duration_ms=1.5, would_deny=True)
    admitted = admit(given_, {"box"}, NOW)
    assert admitted == given_ | {"seq": None}
    assert list(admitted)[:4] == list(FIELDS[:4])


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        pytest.param({"verdikt": "allow"}, "unknown field", id="a field nobody knows"),
        pytest.param({"detail": {"a": 1}}, "not text", id="structure where text belongs"),
        pytest.param({"host": ["a"]}, "not text", id="a list where text belongs"),
        pytest.param({"labels": {"a": {"b": "c"}}}, "not text to text", id="structure inside labels"),
        pytest.param({"labels": {"k" * 65: "v"}}, "not text to text", id="a giant label key"),
        pytest.param({"labels": {str(n): "v" for n in range(33)}}, "at most 32", id="too many labels"),
        pytest.param({"labels": "task=7"}, "at most 32", id="labels that are no mapping"),
        pytest.param({"seq": 7}, "control's", id="a number of its own"),
        pytest.param({"schema": 2}, "control's", id="another schema"),
        pytest.param({"sandbox": "other"}, "another worker's", id="another worker's sandbox"),
        pytest.param({"sandbox": None}, "no sandbox", id="nobody's sandbox"),
        pytest.param({"event": "sandbox"}, "from a worker", id="a sandbox's life"),
        pytest.param({"event": "policy"}, "from a worker", id="a policy's life"),
        pytest.param({"event": "party"}, "none of its values", id="an event nobody knows"),
        pytest.param({"event": ["end"]}, "none of its values", id="an event that cannot be hashed"),
        pytest.param({"event": "lost"}, "without count", id="a loss without its count"),
        pytest.param({"reason": "because"}, "none of its values", id="a reason nobody knows"),
        pytest.param({"reason": None}, "without reason", id="a decision without a reason"),
        pytest.param({"verdict": "maybe"}, "none of its values", id="a verdict nobody knows"),
        pytest.param({"layer": None}, "without layer", id="a decision at no layer"),
        pytest.param({"port": 65_536}, "out of range", id="a port above 65535"),
        pytest.param({"port": True}, "not a number", id="a port that is true"),
        pytest.param({"port": 443.0}, "not a number", id="a port with a fraction"),
        pytest.param({"bytes_up": 10**400}, "out of range", id="a number no float holds"),
        pytest.param({"count": 0}, "out of range", id="nothing, counted"),
        pytest.param({"duration_ms": float("nan")}, "out of range", id="a duration that is no number"),
        pytest.param({"duration_ms": float("inf")}, "out of range", id="an endless duration"),
        pytest.param({"duration_ms": -1}, "out of range", id="a duration before its start"),
        pytest.param({"would_deny": 1}, "neither true nor false", id="a flag that is a number"),
        pytest.param({"attempt_id": "a\nb"}, "no identifier", id="an id with a line end"),
        pytest.param({"attempt_id": "a" * 65}, "no identifier", id="a long id"),
        pytest.param({"root_id": 7}, "no identifier", id="an id that is a number"),
        pytest.param({"time": "yesterday"}, "RFC 3339", id="a time in words"),
        pytest.param({"time": timestamp(NOW) + "\n"}, "RFC 3339", id="a time with a line end"),
        pytest.param({"time": NOW}, "RFC 3339", id="a time that is a number"),
    ],
)
def test_what_no_sound_worker_sends_is_refused(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BadRecord, match=complaint):
        admit(sound() | fields, {"box"}, NOW)


def test_control_itself_may_tell_of_sandboxes_and_policies() -> None:
    assert admit(sound(event="sandbox", sandbox="any"), None, NOW)["event"] == "sandbox"
    assert admit(sound(event="policy", sandbox="-"), None, NOW)["event"] == "policy"


@pytest.mark.parametrize("offset", [-CLOCK_TOLERANCE - 1, CLOCK_TOLERANCE + 1, -1e9])
def test_a_time_far_from_controls_clock_is_replaced(offset: float) -> None:
    assert admit(sound(time=timestamp(NOW + offset)), {"box"}, NOW)["time"] == timestamp(NOW)


@pytest.mark.parametrize("offset", [-CLOCK_TOLERANCE + 1, 0, CLOCK_TOLERANCE - 1])
def test_a_time_near_controls_clock_is_kept(offset: float) -> None:
    assert admit(sound(time=timestamp(NOW + offset)), {"box"}, NOW)["time"] == timestamp(NOW + offset)


def test_a_record_without_a_time_gets_controls() -> None:
    assert admit(sound(time=None), {"box"}, NOW)["time"] == timestamp(NOW)


def test_a_text_clipped_at_its_source_is_not_clipped_again() -> None:
    clipped = clip("x" * 5000)
    assert admit(sound(path=clipped), {"box"}, NOW)["path"] == clipped


def test_a_text_that_nobody_clipped_is_clipped_with_length_and_hash() -> None:
    path = admit(sound(path="/" + "é" * 50_000), {"box"}, NOW)["path"]
    assert len(path) < TEXT_LIMIT + 64
    assert "[100001 bytes, sha256 " in path


def test_a_record_of_many_long_texts_still_fits_a_line_and_keeps_the_marks_of_its_source() -> None:
    # twelve bytes of JSON for one character, the worst there is
    long = clip("😀" * 5000)
    fields = admit(sound(path=long, query=long, host_raw=long, sni=long, detail=long), {"box"}, NOW)
    line = encode(fields, STREAM_LINE_LIMIT)
    assert len(line) <= STREAM_LINE_LIMIT
    assert json.loads(line)["path"].endswith(long[-40:])


def test_a_record_that_fits_in_no_form_is_refused() -> None:
    fields = admit(sound(labels={"é" * 60 + str(n): "é" * 256 for n in range(32)}), {"box"}, NOW)
    with pytest.raises(BadRecord, match="a record of"):
        encode(fields, STREAM_LINE_LIMIT)


text = st.text(st.characters(exclude_categories=())) | st.text('\x00\x1b\x7f\x85\u2028\u202e\ud800\n"\\a')


@given(st.dictionaries(st.sampled_from(["host_raw", "path", "sni", "detail", "alpn"]), text))
def test_whatever_text_a_sandbox_chose_makes_one_line_of_printable_ascii(fields: dict[str, str]) -> None:
    line = encode(admit(sound() | fields, {"box"}, NOW), STREAM_LINE_LIMIT)
    assert line.endswith(b"\n")
    assert all(0x20 <= byte < 0x7F for byte in line[:-1])
    assert json.loads(line)["reason"] == "not_allowed"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*FIELDS, "more"]), json_values))
def test_admission_is_total(fields: dict[str, Any]) -> None:
    try:
        line = encode(admit(sound() | fields, {"box"}, NOW), STREAM_LINE_LIMIT)
    except BadRecord:
        return
    written = json.loads(line)
    assert written["sandbox"] == "box"
    assert set(written) <= set(FIELDS)


@given(st.binary(max_size=3000))
def test_bytes_that_are_no_text_are_kept_by_escapes_within_the_limit(raw: bytes) -> None:
    kept = clip(raw)
    assert len(kept) <= TEXT_LIMIT + 64
    to_line({"host_raw": kept})


def test_ids_sort_by_time_and_are_28_hex_digits() -> None:
    ids = [new_id() for _ in range(3)]
    assert all(len(bytes.fromhex(id_)) == 14 for id_ in ids)
    assert len(set(ids)) == 3
    assert [id_[:12] for id_ in ids] == sorted(id_[:12] for id_ in ids)
