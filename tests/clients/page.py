"""docs/clients.md from what was measured, and its table back again."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.clients.ground import Outcome, Ran

_CELL, _BEFORE = 150, 40
_HEAD = "| client | version | allowed | denied: what it shows | readable? | exit | tries | seconds | note |"
_INTRODUCTION = """\
# Real clients behind egressd

Written by `make clients`; do not edit. Each client runs twice in a sandbox of `egressd run`, against the lab's own servers:
one use that a rule allows and one that no rule allows. It gets what every sandbox gets, and no option or variable about
certificates or proxies besides. Connections are transparent: no proxy is configured anywhere.

* **allowed**: did the allowed use do all that it should?
* **denied: what it shows**: the line that says most; all of it is further down.
* **readable?** *yes*: the client itself prints why egressd refused. *status*: it prints the 403, and not why. *no*: it prints
  neither. Whatever a client hides, `curl http://egressd.internal/denials` in the sandbox shows, and `egressd log --verdict deny`
  outside.
* **tries**: how many requests to the refused host it made before it gave up.
* **seconds**: the allowed use / the denied one, on a machine with two cores, without the start of the sandbox.

"""
_NOTES = """\
## What to know

* `JAVA_TOOL_OPTIONS` makes every Java program say `Picked up JAVA_TOOL_OPTIONS: …` on standard error. The default trust stores of
  the host's Java are covered as well; the variable is for a Java that was brought along.
* Go also asks `sum.golang.org` for checksums; a rule for it is needed, or `GOSUMDB=off` (as here: the lab has no
  such notary).
* Container images come from three hosts: the registry, who hands out tokens, and who has the blobs. The same goes for crates
  (`index.crates.io`, `static.crates.io`) and Python (`pypi.org`, `files.pythonhosted.org`).
* apt repeats a refused index in every compression that it knows, so one refusal is many tries; none of them waits.
* `git clone git@github.com:…` goes by SSH, which no rule here allows: the client is told so in SSH's own words
  (`Received disconnect from …: egressd: denied: …`). By https it works.
* curl without `-f` and Chromium show a refusal as they show any page: with exit status 0.
* Chromium trusts what is in `~/.pki/nssdb`. Where `certutil` (Debian: `libnss3-tools`) is on the host, every sandbox finds
  a database there that has egressd's certificate; on a host without it there is none, and Chromium says
  `ERR_CERT_AUTHORITY_INVALID`.

"""


@dataclass(frozen=True, slots=True)
class Row:
    """What the table says of one client."""

    works: bool
    readable: str
    status: int
    tries: int


def line(outcome: Outcome) -> str:
    """One line for a terminal."""
    allowed, denied = outcome.allowed, outcome.denied
    return (
        f"{outcome.client.name:16} {outcome.version:18} {'works' if outcome.works else 'FAILS'} {allowed.seconds:.1f} s;"
        f" denied: exit {denied.status}, {denied.seconds:.1f} s, {len(denied.denied)} tries, readable: {denied.readable}"
    )


def details(outcome: Outcome) -> str:
    """Both uses of a client as they look on a terminal."""
    lines = [f"### {outcome.client.name}", ""]
    for ran in (outcome.allowed, outcome.denied):
        lines += ["```console", f"$ {ran.script}", *ran.last_lines, f"(exit status {ran.status})", "```", ""]
    return "\n".join(lines) + "\n"


def render(outcomes: Sequence[Outcome], skipped: Mapping[str, str]) -> str:
    """The whole page."""
    rows = [_HEAD, "|" + "---|" * (_HEAD.count("|") - 1)]
    rows += [_row(outcome) for outcome in outcomes]
    rows += [f"| {name} | | not tried: {reason} | | | | | | |" for name, reason in skipped.items()]
    table = "\n".join(rows) + "\n\n"
    return (
        _INTRODUCTION
        + table
        + _NOTES
        + "## All that they show\n\n"
        + "".join(map(details, outcomes)).rstrip()
        + "\n"
    )


def read(text: str) -> dict[str, Row]:
    """The rows of a page by client, without those that were not tried."""
    found: dict[str, Row] = {}
    for each in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", each)[1:-1]]
        if len(cells) == 9 and cells[5].isdigit():
            found[cells[0]] = Row(cells[2] == "works", cells[4], int(cells[5]), int(cells[6]))
    return found


def telling(ran: Ran) -> str:
    """What says most: the sentence with the reason and what stands before it, else the status, else the last line."""
    lines = [each.strip() for each in ran.last_lines]
    for wanted in ("(reason ", "403", "details = ", "Error", "error", "ERR"):
        found = [each for each in lines if wanted in each and not each.startswith('File "')]
        if not found:
            continue
        if wanted == "(reason " and "egressd: denied" not in found[-1]:  # folded into several lines
            found = [" ".join(lines[max(0, lines.index(found[-1]) - 3) :])]
        return found[-1]
    return lines[-1] if lines else ""


def _row(outcome: Outcome) -> str:
    denied = outcome.denied
    allowed = "works" if outcome.works else f"fails: {_code(telling(outcome.allowed))}"
    seconds = f"{outcome.allowed.seconds:.1f} / {denied.seconds:.1f}"
    cells = [
        outcome.client.name, outcome.version, allowed, _code(telling(denied)), denied.readable, str(denied.status),
        str(len(denied.denied)), seconds, outcome.client.helps,
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _code(text: str) -> str:
    """A code span of a table's cell: the reason must stay, so a long line loses what stands before the sentence."""
    before, sentence, after = text.partition("egressd: denied")
    if len(text) > _CELL and sentence:
        before = before if len(before) <= _BEFORE else f"{before[:_BEFORE]}… "
        end = after.find(")") + 1
        after = after if len(after) - end < 4 else f"{after[:end]} …"
    text = before + sentence + after
    if len(text) > _CELL and not sentence:
        text = f"{text[: _CELL - 1]}…"
    return "`" + text.replace("`", "'").replace("|", "\\|") + "`"
