"""The arena: two sandboxes of one egressd and a place without egressd, in one lab, for as long as a module's attacks last.

An attack is a piece of Python on top of `inside.py`. It is made first where there is no egressd, where it must succeed, then in
sandbox A, where it must fail in the right way; then A and B each make a request that is allowed, which must work.
"""

from __future__ import annotations

import json
import re
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from egressd.lab import Lab, clean_env, topology
from egressd.lab.stand import Stand

INSIDE = Path(__file__).with_name("inside.py")
SHIPPED = Path(__file__).parents[2] / "rules"
RULES = """schema: 1
profile: lab
owner: bypass
allow:
  - service: pypi
  - service: github-clone
    with: {repos: ["acme/*"]}
  - id: api
    hosts: [api.lab-origin.com]
    requests: ["GET,HEAD /**", "POST /upload", "POST /echo"]
  - id: wild
    hosts: ["*.wild-lab.com"]
  - id: plain
    hosts: [www.lab-origin.com]
    schemes: [http]
  - id: hostile
    hosts: ["*.lab-origin.com"]
  - id: pinned
    hosts: [api.anthropic.com]
    treatment: tunnel
  - id: public-path
    hosts: [registry.npmjs.org]
    requests: ["GET /public/**"]
deny:
  - id: no-paste
    hosts: [pastebin.com, "*.pastebin.com"]
    because: known sink
  - id: never-x
    hosts: [x.wild-lab.com]
"""
_ALIVE = "/n?alive"
"""What is asked to see that life goes on."""
_PATIENCE = 30.0
_BOOK = "witness"
_SETTLE = 0.25
"""Seconds over which a record or a captured packet may still be on its way."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an attack in the sandbox, before life went on."""

    lab: Lab
    said: str
    records: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Row:
    """One way round and its right outcome.

    `code` is what the attacker runs. `wins` is found (a regular expression) in what it says where there is no egressd; None where
    there is nothing to win there, for the reason `moot`. `sees` is found in what it says in the sandbox. `records` are (layer,
    verdict, reason) that must be among the attempt's records, in any order; `rule` is the deciding rule's id
    where one decides. `reaches` are hosts that may be reached all the same (an allowed part of the attack), `asks` names that DNS
    may be asked for; everything else stays untouched. `shows` are fields that one of the records has, all of them; a pattern
    is searched in the field's text. `title` tells rows of one id apart. `zone` is what DNS says for names from then on (see
    `Lab.set_name`). `decisions` is how many attempts it comes to, each with a record. `also` asserts what is particular to it.
    `wired` False says that the wiring has no part in it, so that it need not be tried as root and rootless.
    """

    id: str
    code: str
    sees: str
    records: tuple[tuple[str, str, str], ...]
    wins: str | None = None
    moot: str = ""
    rule: str | None = None
    reaches: tuple[str, ...] = ()
    seconds: float = 12.0
    note: str = ""
    title: str = ""
    asks: tuple[str, ...] = ()
    shows: Mapping[str, object] = field(default_factory=dict)
    zone: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    decisions: int | None = None
    also: Callable[[Outcome], None] | None = None
    wired: bool = True

    def __str__(self) -> str:
        return f"{self.id} {self.title}".strip()


class Driver:
    """A process of `inside.py` that runs code for us."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert self._line(_PATIENCE) == "ready", self._complaint()

    def run(self, code: str, seconds: float = 12.0) -> str:
        """Run code; returns everything it said."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"code": code, "seconds": seconds}) + "\n")
        self.process.stdin.flush()
        return str(json.loads(self._line(seconds + _PATIENCE))["said"])

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.communicate(timeout=20)

    def _line(self, seconds: float) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        assert ready, f"the driver is silent: {self._complaint()}"
        return self.process.stdout.readline().strip()

    def _complaint(self) -> str:
        self.process.kill()
        return self.process.communicate(timeout=20)[1][-3000:]


@dataclass
class Arena:
    """What a test has in its hands."""

    lab: Lab
    stand: Stand
    a: Driver
    b: Driver
    open: Driver

    @property
    def witnessed(self) -> dict[Path, str]:
        """What witnesses on the machine that runs egressd have written down: see `inside.witness`."""
        books = Path(self.lab.directory).glob(f"stand-*/{_BOOK}")
        return {path: path.read_text() for path in books}

    def holds(self, row: Row) -> None:
        """Make the attack everywhere and assert its outcome at every place."""
        self.attack_openly(row)
        self.prepare(row)
        mark = len(self.stand.records()) if row.decisions is None else self.settled()
        self.lab.forget()
        said = self.a.run(row.code, row.seconds)
        ended = time.monotonic()
        records = self.new_records(mark, row.records, row.shows)
        assert re.search(row.sees, said, re.S), f"{row.id}: the client saw {said[-2000:]!r}"
        got = {(r.get("layer"), r.get("verdict"), r.get("reason")) for r in records}
        got |= {(r.get("layer"), "end", r.get("reason")) for r in records if r["event"] == "end"}
        missing = set(row.records) - got
        assert not missing, f"{row.id}: not in the journal: {missing}; there is {sorted(map(str, got))}"
        if row.rule is not None:
            assert row.rule in {r.get("rule") for r in records}, (
                f"{row.id}: rules {[r.get('rule') for r in records]}"
            )
        assert not row.shows or any(_has(record, row.shows) for record in records), (
            f"{row.id}: no record has {row.shows}: {records}"
        )
        looks = row.decisions is not None or row.also is not None
        if not looks:
            self.life_goes_on()  # while what is late still comes
        self.nothing_reached(row.reaches, row.asks, since=ended)
        if looks:
            self.particulars(row, Outcome(self.lab, said, self.stand.records()[mark:]))
            self.life_goes_on()

    def prepare(self, row: Row) -> None:
        """Lay out what the attacker owns; answers that change begin anew."""
        for name, entry in row.zone.items():
            self.lab.set_name(name, **entry)
        for path in self.witnessed:
            path.unlink()

    def particulars(self, row: Row, outcome: Outcome) -> None:
        """Assert what only this row wants, once everything has come."""
        decided = sum(r.get("count", 1) for r in outcome.records if r["event"] == "decision")
        assert row.decisions in (None, decided), f"{row.id}: {decided} decisions: {outcome.records}"
        if row.also is not None:
            row.also(outcome)

    def attack_openly(self, row: Row) -> None:
        """Without egressd the attack must work, or it proves nothing."""
        if row.wins is None:
            assert row.moot, f"{row.id}: why is there nothing to win without egressd?"
            return
        self.prepare(row)
        said = self.open.run(row.code, row.seconds)
        assert re.search(row.wins, said, re.S), f"{row.id}: without egressd it said {said[-2000:]!r}"

    def settled(self) -> int:
        """How many records there are, once no more are on their way from what went before."""
        before, now = -1, len(self.stand.records())
        while now != before:
            time.sleep(0.06)
            before, now = now, len(self.stand.records())
        return now

    def new_records(
        self, mark: int, wanted: Sequence[tuple[str, str, str]], shows: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """The records since `mark`, once those wanted and one that `shows` this have come, or the time to come is over."""
        deadline = time.monotonic() + 20.0
        while True:
            records = self.stand.records()[mark:]
            got = {
                (r.get("layer"), "end" if r["event"] == "end" else r.get("verdict"), r.get("reason"))
                for r in records
            }
            shown = not shows or any(_has(record, shows) for record in records)
            if (shown and set(wanted) <= got) or time.monotonic() > deadline:
                return records
            time.sleep(0.02)

    def nothing_reached(
        self, reaches: Sequence[str] = (), asks: Sequence[str] = (), since: float | None = None
    ) -> None:
        """Neither the attacker, nor metadata, nor any host but those named saw anything; nor did DNS, of other names.

        `since` is when the attack ended (monotonic seconds), now if not given.
        """
        now = time.monotonic()
        time.sleep(max(0.0, (since or now) + _SETTLE - now))
        assert self.lab.packets_lost() == 0
        assert self.lab.attacker_hits() == [], self.lab.attacker_hits()
        assert self.lab.metadata_hits() == []
        assert self.witnessed == {}
        never = (*topology.ATTACKERS, *topology.METADATAS)
        assert [flow for flow in self.lab.packets("host") if flow.address in never] == []
        hosts = {request.host for request in self.lab.requests() if request.target != _ALIVE}
        assert hosts <= set(reaches), f"requests reached {hosts - set(reaches)}"
        names = {query.name for query in self.lab.dns_queries()}
        assert names <= {*reaches, *asks, "api.lab-origin.com"}, f"DNS was asked for {names}"

    @contextmanager
    def another(self, *flags: str) -> Iterator[Driver]:
        """A sandbox of its own, for an attack that it may not survive."""
        command = ["/usr/bin/python3", str(self.stand.workspace / "inside.py")]
        driver = Driver(self.stand.start(command, flags=flags, stdin=subprocess.PIPE))
        try:
            yield driver
        finally:
            driver.close()

    def life_goes_on(self) -> None:
        """The next legitimate request of this sandbox and of another one works."""
        code = f"say(shown(tls('api.lab-origin.com', 443, get({_ALIVE!r}), 'api.lab-origin.com')))"
        with ThreadPoolExecutor(2) as both:
            heard = list(both.map(lambda driver: driver.run(code), (self.a, self.b)))
        for who, said in zip("AB", heard, strict=True):
            assert "200 OK" in said, f"sandbox {who} can no longer make an allowed request: {said[-500:]}"


def _has(record: Mapping[str, Any], shows: Mapping[str, object]) -> bool:
    return all(
        wanted.search(str(record.get(name))) if isinstance(wanted, re.Pattern) else record.get(name) == wanted
        for name, wanted in shows.items()
    )


@contextmanager
def arena(
    lab: Lab,
    *,
    dns_more: Mapping[str, str] | None = None,
    rules: str = RULES,
    more: str = "",
    credentials: str = "",
    secrets: Mapping[str, str] | None = None,
) -> Iterator[Arena]:
    """Build an arena in a lab; `credentials` is the text of credentials.yaml, `secrets` are the files that it refers to."""
    with Stand(lab, rules, shipped=SHIPPED, dns_more=dns_more, more=more, credentials=credentials) as stand:
        for name, secret in (secrets or {}).items():
            stand.secret(name, secret)
        for part in INSIDE.parent.glob("inside*.py"):
            shutil.copy(part, stand.workspace)
        command = ["/usr/bin/python3", str(stand.workspace / "inside.py")]
        book = stand.directory / _BOOK
        drivers: list[Driver] = []
        try:
            for _ in range(2):
                drivers.append(Driver(stand.start(command, stdin=subprocess.PIPE)))
            process = lab.popen_open(
                [*command, "--proxy", "--witness", "/dev/null"],
                stdin=subprocess.PIPE,
                cwd=str(stand.workspace),
                env=clean_env(lab, trust=False),
            )
            drivers.append(Driver(process))
            process = lab.popen_host(
                [*command, "--witness", str(book)], stdin=subprocess.PIPE, cwd=str(stand.directory)
            )
            drivers.append(Driver(process))
            yield Arena(lab, stand, drivers[0], drivers[1], drivers[2])
        finally:
            for driver in drivers:
                driver.close()
