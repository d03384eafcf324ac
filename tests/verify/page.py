"""docs/verify.md: what is written by hand, and the tables of probes, which the probes themselves write.

`python -m tests.verify.page` brings the page up to date.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from egressd.cli import verify_outside
from egressd.verify import inside
from egressd.verify.probe import Probe, in_order

PAGE = Path(__file__).parents[2] / "docs/verify.md"
BEGIN, END = "<!-- the probes write what follows -->\n", "<!-- as far as here -->\n"
TITLES = {
    "works": "First, that anything works at all",
    "network": "The network",
    "names": "Names",
    "neighbours": "The host and other sandboxes",
    "privilege": "Power",
    "kernel": "The kernel's other doors",
    "processes": "Processes",
    "files": "Files",
    "secrets": "Secrets and trust",
    "outside": "Made from outside",
}


def probes() -> list[Probe | verify_outside.OutsideProbe]:
    """Every probe, in the order in which they are made."""
    assert inside.MODULES
    return [*in_order(), *verify_outside.PROBES]


def render() -> str:
    """The tables."""
    parts = []
    for part, several in groupby(probes(), key=lambda each: each.part):
        rows = [f"| `{each.name}` | {each.tries} | {each.why} | {each.proves} |" for each in several]
        head = ["| probe | what it tries | why it matters | what `held` means |", "|---|---|---|---|"]
        parts.append("\n".join([f"### {TITLES[part]}", "", *head, *rows, ""]))
    return "\n".join(parts)


def with_tables(page: str) -> str:
    """The page with its tables made anew."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{render()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
