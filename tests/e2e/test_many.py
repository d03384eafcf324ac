"""Many sandboxes at once on one machine: made fast, used, ended together, and nothing left. Fifty here, 500 by `make soak`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from egressd.lab import Lab
from egressd.lab.lab import clean_env
from tests.e2e.conftest import build, until
from tests.e2e.daemon import RULES, Daemon, daemon, load_allowance, open_sockets, workers_of
from tests.e2e.test_drills import line_of

pytestmark = [pytest.mark.e2e, pytest.mark.root]

PROGRAMS = Path(__file__).parent / "programs"
PLAIN = """  - id: plain
    hosts: [www.lab-origin.com]
    schemes: [http]
"""
MANY = [50, pytest.param(500, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
RATE = 20.0
"""Sandboxes a second that are made, on a machine that does nothing else."""
AT_ONCE = 12
"""How many `egressd run` make their namespaces at a time; each waits for the kernel more than it works."""
GONE_WITHIN = 5.0
SLACK = 4
"""Descriptors that have nothing to do with sandboxes: the watch of the rule files begins late."""
IDLE_KIB = 200
"""Memory of an idle sandbox in its worker, which is aimed at."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("root only")
    with build(False) as made:
        yield made


@pytest.fixture
def served(lab: Lab) -> Iterator[Daemon]:
    with daemon(lab, RULES + PLAIN) as made:
        yield made


@pytest.mark.parametrize("count", MANY)
def test_many_explicit_sandboxes(served: Daemon, count: int, record_property: Any) -> None:
    workers = serving(served)
    warm(served)
    before = memory_kib(*workers), memory_kib(served.process.pid), open_sockets(served.process.pid)
    began = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: served.create(), range(count)))
    rate = count / (time.monotonic() - began)
    each = (memory_kib(*workers) - before[0]) / count
    assert len({one["sandbox"]["id"] for one in made}) == count
    statuses = used(served, made)
    assert statuses == [[200, 403]] * count
    began = time.monotonic()
    assert served.ask("DELETE", "/v1/sandboxes") == (200, {"ended": count})
    took = time.monotonic() - began
    told(
        record_property,
        count=count,
        rate=rate,
        worker_kib=each,
        control_kib=(memory_kib(served.process.pid) - before[1]) / count,
        gone=took,
    )
    assert served.living == []
    assert served.files() == []
    until(lambda: open_sockets(served.process.pid) <= before[2] + SLACK, what="the descriptors' return")
    gone = served.stand.records(event="sandbox", detail="gone")
    assert {one["sandbox"]["id"] for one in made} <= {record["sandbox"] for record in gone}
    assert took < GONE_WITHIN + load_allowance()
    assert rate > RATE / (1 + load_allowance())
    assert each < 2 * IDLE_KIB
    assert all("200" not in str(status) for status in used(served, made[:5]))


@pytest.mark.parametrize(
    "count", [20, pytest.param(500, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])]
)
def test_many_namespaces(served: Daemon, count: int, record_property: Any) -> None:
    stand = served.stand
    warm(served)
    workers = serving(served)
    before = (
        memory_kib(*workers),
        memory_kib(served.process.pid),
        open_sockets(served.process.pid),
        sum(map(open_sockets, workers)),
        kernel_kib(),
        cpu_ms(served.process.pid),
        cpu_ms(*workers),
    )
    gate = stand.workspace / "gate"  # nobody asks for anything before all are there
    os.mkfifo(gate)
    gate.chmod(0o666)
    script = ": < gate; curl -s -w '%{http_code} ' "
    script += "-o /dev/null http://www.lab-origin.com/echo -o /dev/null http://pastebin.com/ >> statuses; sleep 1000"
    program, command = str(PROGRAMS / "many_runs.py"), ["sh", "-c", script]
    argv = [sys.executable, "-P", program, str(stand.config), str(count), str(AT_ONCE), "--", *command]
    process = stand.lab.popen_host(
        argv, cwd=str(stand.workspace), stdin=subprocess.DEVNULL,
        env=clean_env(stand.lab, trust=False) | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    try:
        ready = json.loads(line_of(process, 60 + count))
        assert ready["ready"] == count
        each = (memory_kib(*workers) - before[0]) / count
        kernel = (kernel_kib() - before[4]) / count
        opened = os.open(gate, os.O_RDWR)  # some are yet to come to it
        statuses = stand.workspace / "statuses"
        until(
            lambda: statuses.exists() and len(statuses.read_text().split()) == 2 * count,
            60 + count,
            "every request",
        )
        os.close(opened)
        assert sorted(statuses.read_text().split()) == ["200"] * count + ["403"] * count
        until(lambda: len(served.living) == count, what="all of them")
        used_kib = (memory_kib(*workers) - before[0]) / count
        control_cpu = (cpu_ms(served.process.pid) - before[5]) / count
        worker_cpu = (cpu_ms(*workers) - before[6]) / count
        spaces = {space for pid in below(process.pid) for space in namespace_of(pid)}
        assert len(spaces) >= count
        began = time.monotonic()
        assert served.ask("DELETE", "/v1/sandboxes") == (200, {"ended": count})
        took = time.monotonic() - began
        ended = json.loads(line_of(process, 60 + count))
        assert ended["statuses"] == [125] * count
        process.wait(30)
    finally:
        process.kill()
        process.wait()
    told(
        record_property,
        count=count,
        rate=count / ready["seconds"],
        run_cpu_ms=ready["cpu"] / count,
        maker_cpu_ms=ready["children"] / count,
        control_cpu_ms=control_cpu,
        worker_cpu_ms=worker_cpu,
        worker_kib=each,
        worker_kib_used=used_kib,
        kernel_kib=kernel,
        gone=took,
    )
    assert served.files() == []
    until(lambda: open_sockets(served.process.pid) <= before[2] + SLACK, what="the descriptors' return")
    until(
        lambda: sum(map(open_sockets, workers)) <= before[3] + SLACK,
        what="the descriptors' return in the worker",
    )
    until(
        lambda: spaces.isdisjoint(s for pid in pids() for s in namespace_of(pid)),
        30,
        "the end of the namespaces",
    )
    assert stand.records(event="lost") == []
    assert took < GONE_WITHIN + 3 * load_allowance()


def used(served: Daemon, made: list[dict[str, Any]]) -> list[list[int]]:
    """What an allowed and a denied request of each get."""
    clients = [
        {"url": one["environment"]["HTTP_PROXY"], "source": f"127.1.{number // 200}.{number % 200 + 1}"}
        for number, one in enumerate(made)
    ]
    done = served.stand.lab.host_exec(
        [sys.executable, "-I", str(PROGRAMS / "many_clients.py")], input=json.dumps(clients), timeout=120
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def serving(served: Daemon) -> list[int]:
    """The processes that carry sandboxes: the innermost of each worker's."""
    return [pid for pid in served.workers() if not workers_of(pid)]


def warm(served: Daemon) -> None:
    """Have a sandbox come and go first: what is only made once is no sandbox's."""
    first = served.create()
    assert used(served, [first]) == [[200, 403]]
    served.revoke(first["sandbox"]["id"])


def memory_kib(*pids: int) -> int:
    """What processes have for themselves alone (Private_* in smaps_rollup)."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def kernel_kib() -> int:
    """What the kernel has for itself: namespaces, rules, sockets, and what it keeps of processes (proc_meminfo(5))."""
    wanted = ("Slab:", "KernelStack:", "PageTables:", "Percpu:")
    lines = Path("/proc/meminfo").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(wanted))


def cpu_ms(*pids: int) -> float:
    """The processor time of processes, without that of children (proc_pid_stat(5): utime, stime)."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) * 1000 / os.sysconf("SC_CLK_TCK")


def pids() -> list[int]:
    """Every process there is."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def below(pid: int) -> set[int]:
    """The processes below a process."""
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            found |= {child} | below(child)
    return found


def namespace_of(pid: int) -> tuple[int, ...]:
    """The network namespace of a process, if it is one of its own."""
    with contextlib.suppress(OSError):
        space = Path(f"/proc/{pid}/ns/net").stat().st_ino
        if space != Path("/proc/self/ns/net").stat().st_ino:
            return (space,)
    return ()


def told(record_property: Any, **figures: float) -> None:
    """Keep figures with the report, and show them with -s."""
    for name, value in figures.items():
        record_property(name, round(value, 2))
    print(" ".join(f"{name}={value:.2f}" for name, value in figures.items()))  # noqa: T201 -- read by whoever measures
