"""Ten thousand mixed attempts with aborts, reloads and killed workers: attempts sent = records found (law 8).

Three counts are held against each other: what the sender says, what a packet capture on the sandbox's loopback saw, and the
journal. What TLS hides from a capture, the requests, each carry a number of their own.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from egressd.lab import Lab
from egressd.lab.demo.tally import Sent, Tally
from egressd.lab.stand import Stand
from tests.e2e.conftest import RULES as COMMON
from tests.e2e.conftest import SHIPPED, until
from tests.e2e.test_drills import line_of, running, worker_of

type Step = tuple[float, Callable[["Under"], None]]
"""Seconds to wait first, and what to do then."""

LOAD = Path(__file__).with_name("load")
PARALLEL = 24
SETTLING, QUIET = 40.0, 2.0
"""Seconds for everything to end, and seconds without any end after which what is left is there to stay."""
MORE = 12
"""MiB that a load of any length may leave behind: mostly cycles that Python has not looked for yet, in part what malloc keeps."""
LASTING = ("connection", "request")
RULES = COMMON.replace(
    "deny:\n",
    """  - id: read-only
    hosts: [read-only.wild.lab-origin.com]
    requests: ["GET /open/**"]
deny:
""",
)
OTHER_RULES = RULES.replace("    hosts: [deb.debian.org]\n", "    hosts: [other.debian.org]\n").replace(
    "    hosts: [api.anthropic.com]\n", "    hosts: [other.anthropic.com]\n"
)
"""Without the relay and the tunnel: what of them is open is cut when these are adopted."""


@pytest.fixture
def stand(shared_lab: Lab) -> Iterator[Stand]:
    """An installation with rules of every kind."""
    shared_lab.forget()
    with Stand(shared_lab, RULES, shipped=SHIPPED) as stand:
        yield stand


@dataclass(frozen=True, slots=True)
class Size:
    """What a process takes of the machine: descriptors, threads, resident MiB."""

    descriptors: int
    threads: int
    resident: int


def size_of(pid: int) -> Size:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    resident = int(fields["VmRSS"].split()[0]) // 1024
    return Size(len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]), resident)


class Under:
    """The load program in a sandbox, and the books of everybody."""

    def __init__(self, stand: Stand, process: subprocess.Popen[str]) -> None:
        self.stand = stand
        self._process = process
        self.books: dict[str, Any] = {}
        self.seconds = 0.0
        self.kills = 0

    def make(self, attempts: int, seed: int, patience: float = 300.0) -> None:
        """Have attempts made, until all of them have ended."""
        assert self._process.stdin is not None
        began = time.monotonic()
        self._process.stdin.write(
            json.dumps({"attempts": attempts, "parallel": PARALLEL, "seed": seed}) + "\n"
        )
        self._process.stdin.flush()
        line = line_of(self._process, patience)
        assert line, self._process.communicate(timeout=20)
        self.books = json.loads(line)
        self.seconds += time.monotonic() - began

    @property
    def worker(self) -> int:
        """The process that carries the connections: the worker's child."""
        outer = worker_of(self._process.pid)
        return int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])

    def kill(self, *, inner: bool) -> None:
        """Kill the worker, or what waits for it."""
        os.kill(self.worker if inner else worker_of(self._process.pid), signal.SIGKILL)
        self.kills += 1

    def settled(self, before: Size | None = None) -> Size:
        """Return what the worker is like when it has as many descriptors as before, or else as few as it will ever have."""
        deadline, size = time.monotonic() + SETTLING, size_of(self.worker)
        quiet = time.monotonic()
        while time.monotonic() < deadline and size.descriptors != (before and before.descriptors):
            now = size_of(self.worker)
            if now.descriptors != size.descriptors:
                quiet = time.monotonic()
            elif before is None and time.monotonic() - quiet > QUIET:
                break
            size = now
            time.sleep(0.05)
        return size_of(self.worker)


@contextmanager
def meanwhile(under: Under, *steps: Step) -> Iterator[None]:
    """Do things while something runs, each so many seconds after the one before; what there is no time for is left out."""
    failures: list[BaseException] = []
    over = threading.Event()

    def work() -> None:
        try:
            for pause, step in steps:
                if over.wait(pause):
                    return
                step(under)
        except BaseException as failure:  # noqa: BLE001 - raised in the test's own thread
            failures.append(failure)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failures, failures


@contextmanager
def loaded(stand: Stand) -> Iterator[tuple[Under, Tally]]:
    """A sandbox with the load program in it, and the count of what it sends."""
    shutil.copytree(LOAD, stand.workspace / "load", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(stand.lab.ca_file, stand.workspace)
    ca = Path(stand.lab.ca_file).name
    with running(stand, f"exec /usr/bin/python3 -m load {ca}") as process:
        until(lambda: stand.records(event="sandbox", detail="ready"), 30, "the sandbox to be ready")
        yield Under(stand, process), Tally.start(stand.lab, process.pid)
        assert process.stdin is not None
        process.stdin.write("\n")  # so that everything ends as it does when a command is done
        process.stdin.flush()
        assert process.wait(60) == 0


def write(stand: Stand, rules: str) -> None:
    stand.profile.write_text(rules)


# what the journal must hold


def recorded(records: list[dict[str, Any]], **wanted: Any) -> int:
    """How many attempts these records stand for."""
    return sum(
        record.get("count", 1)
        for record in records
        if all(record.get(name) == value for name, value in wanted.items())
    )


def check_each_attempt_has_one_decision_and_one_end(records: list[dict[str, Any]]) -> None:
    decisions = [record for record in records if record["event"] == "decision"]
    ids = Counter(record["attempt_id"] for record in decisions)
    assert [n for n in ids.values() if n > 1] == [], "an attempt was judged twice"
    ends = Counter(record["attempt_id"] for record in records if record["event"] == "end")
    assert [n for n in ends.values() if n > 1] == [], "an attempt ended twice"
    assert ends.keys() <= ids.keys(), "an attempt ended that never began"
    let_out = {r["attempt_id"] for r in decisions if r["verdict"] == "allow" and r["layer"] in LASTING}
    assert let_out <= ends.keys(), "an attempt was let out and never ended"


def check_each_request_has_its_record(requests: dict[str, list[Any]], records: list[dict[str, Any]]) -> None:
    """An answered request has exactly one record, which says what the client saw; one without an answer has one at most."""
    found: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        if record["event"] == "decision" and record["layer"] == "request":
            said = f"{record.get('path')} {record.get('query')}"
            if (numbered := re.search(r"\bid(\d+)", said)) is not None:
                found.setdefault(numbered[1], []).append(record)
            else:
                assert record["verdict"] == "deny", "what has no number was garbage"
    assert found.keys() <= requests.keys(), "a request was recorded that nobody made"
    for number, (kind, status) in requests.items():
        mine = found.get(number, [])
        assert len(mine) <= 1, mine
        if status is None:
            continue
        assert len(mine) == 1, f"request {number} ({kind}) was answered {status} and not recorded"
        (record,) = mine
        if status in {200, 403}:  # else the origin could not be reached in time, or had no time for it
            assert record["verdict"] == {200: "allow", 403: "deny"}[status], (kind, record)
        if record["verdict"] == "deny":
            assert record["status"] == status, record


def check_the_counts(
    under: Under, sent: Sent, records: list[dict[str, Any]], lost: list[dict[str, Any]]
) -> None:
    """The sender's own count, the capture's and the journal's are the same."""
    made = under.books["sent"]
    assert sent.missed == 0, "the capture missed packets, so it proves nothing"
    assert (made["connections"], made["dns_udp"], made["dns_tcp"]) == (
        sent.connections,
        sent.dns_udp,
        sent.dns_tcp,
    )
    decisions = [record for record in records if record["event"] == "decision"]
    first = [record for record in decisions if not record.get("further")]
    assert {
        "connections": recorded(decisions, layer="connection") + recorded(lost, layer="connection"),
        "dns_udp": recorded(decisions, channel="dns-udp") + recorded(lost, channel="dns-udp"),
        "dns_tcp": recorded(first, channel="dns-tcp") + recorded(lost, channel="dns-tcp"),
    } == {name: made[name] for name in ("connections", "dns_udp", "dns_tcp")}
    # Segments of connections that the kernel has forgotten are refused too, and the sender knows nothing of them.
    packets = recorded(decisions, layer="packet") - recorded(decisions, layer="packet", protocol="tcp")
    assert packets <= made["packets"] <= packets + recorded(lost, layer="packet")


def since_ready(stand: Stand) -> list[dict[str, Any]]:
    records = stand.records()
    ready = max(n for n, record in enumerate(records) if record.get("detail") == "ready")
    return records[ready + 1 :]


# the load itself


def rewriting(stand: Stand) -> list[Step]:
    """Steps in which the rules change under the load: some go, some cannot be read, all come back."""
    broken = "schema: 1\nprofile: lab\nallow: [nonsense\n"
    return [
        (0.7, lambda _: write(stand, OTHER_RULES)),
        (1.0, lambda _: write(stand, broken)),
        (1.0, lambda _: write(stand, RULES)),
    ]


def check_everything(under: Under, sent: Sent, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Hold all books against each other; returns the `lost` records."""
    stand, records = under.stand, since_ready(under.stand)
    lost = [record for record in records if record["event"] == "lost"]
    with capsys.disabled():
        report(under, records, lost)
    check_each_attempt_has_one_decision_and_one_end(records)
    check_each_request_has_its_record(under.books["requests"], records)
    check_the_counts(under, sent, records, lost)
    assert stand.lab.attacker_hits() == []
    assert stand.lab.metadata_hits() == []
    assert stand.lab.packets_lost() == 0
    assert recorded(records, event="policy", detail="adopted") >= 2
    return lost


def stormy(
    stand: Stand, capsys: pytest.CaptureFixture[str], attempts: int, kills: int, every: float = 1.0
) -> None:
    """Make attempts while rules are rewritten and, `every` seconds after that, a worker is killed or what waits for it."""
    kill = [partial(Under.kill, inner=bool(number % 2)) for number in range(kills)]
    storms: list[list[Step]] = [[*rewriting(stand), (every, each)] for each in kill]
    with loaded(stand) as (under, tally):
        with meanwhile(under, *itertools.chain(*storms), *rewriting(stand)):
            under.make(attempts, seed=attempts)
        sent = tally.stop()
    assert under.kills == kills, "the load was over too soon"
    lost = check_everything(under, sent, capsys)
    assert {record["reason"] for record in lost if record["layer"] != "packet"} <= {"worker_died"}
    # What a worker may take with it: what it has under way, and what it counts for a while before it writes the sum.
    assert sum(record["count"] for record in lost) < 150 * kills


# With kills it runs for over a minute. The load without kills, below, is exact and runs always.
@pytest.mark.soak
@pytest.mark.timeout(300)
def test_attempts_sent_are_records_found(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten thousand; rootless fewer where the same has been done as root."""
    if stand.lab.rootless and os.geteuid() == 0:
        stormy(stand, capsys, attempts=2_500, kills=1)
    else:
        stormy(stand, capsys, attempts=10_000, kills=2)


@pytest.mark.soak
def test_attempts_sent_are_records_found_over_and_over(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    stormy(stand, capsys, attempts=100_000, kills=15, every=10.0)


def flat(stand: Stand, capsys: pytest.CaptureFixture[str], attempts: int) -> None:
    """Make attempts and reload rules, and hold the worker's size against the one before."""
    if os.geteuid() != 0 or stand.lab.rootless:
        pytest.skip("only root may count the descriptors of a worker")
    with loaded(stand) as (under, tally):
        under.make(1_500, seed=1)  # until what is kept for later is there
        before = under.settled()
        with meanwhile(under, *rewriting(stand)):
            under.make(attempts, seed=2)
        after = under.settled(before)
        sent = tally.stop()
    lost = check_everything(under, sent, capsys)
    with capsys.disabled():
        sys.stdout.write(f"before {before}, after {after}\n")
    assert lost == []
    assert (after.descriptors, after.threads) == (before.descriptors, before.threads)
    assert after.resident < before.resident + MORE


@pytest.mark.timeout(300)
def test_a_load_loses_nothing_and_leaves_the_worker_as_it_was(
    stand: Stand, capsys: pytest.CaptureFixture[str]
) -> None:
    flat(stand, capsys, attempts=3_000)


@pytest.mark.soak
def test_ten_times_the_load_leaves_no_more(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    flat(stand, capsys, attempts=30_000)


def report(under: Under, records: list[dict[str, Any]], lost: list[dict[str, Any]]) -> None:
    """Say what was measured."""
    books = under.books
    statuses = Counter(status for _, status in books["requests"].values())
    ends = Counter(record["reason"] for record in records if record["event"] == "end")
    unwritten = [(record["layer"], record.get("channel"), record["count"]) for record in lost]
    sys.stdout.write(
        f"\n{books['total']} attempts in {under.seconds:.1f} s: {books['sent']}; "
        f"{len(books['requests'])} requests by status {dict(statuses)}\n"
        f"{len(records)} records; ends {dict(ends)}; lost {unwritten}\n"
    )


pytestmark = pytest.mark.e2e
