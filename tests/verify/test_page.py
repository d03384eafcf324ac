"""docs/verify.md: every probe is in it, in its own words."""

from __future__ import annotations

import re

from tests.verify import page


def text() -> str:
    return page.PAGE.read_text(encoding="utf-8")


def test_the_tables_are_what_the_probes_say() -> None:
    assert text() == page.with_tables(text()), "python -m tests.verify.page brings the page up to date"


def test_every_probe_has_its_row() -> None:
    rows = re.findall(r"^\| `([a-z0-9-]+)` \|", text(), re.MULTILINE)
    assert rows == [probe.name for probe in page.probes()]
    assert len(set(rows)) == len(rows) > 75


def test_every_word_of_a_probe_fits_into_a_row_of_a_table() -> None:
    for probe in page.probes():
        for words in (probe.tries, probe.why, probe.proves):
            assert words, probe.name
            assert "|" not in words, probe.name
            assert words.isprintable(), probe.name
