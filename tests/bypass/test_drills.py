"""Drills: each part, socket, file, lock, resource is made to fail while traffic runs.

At any time: no byte leaves without a record, what is denied stays denied, other sandboxes are served; afterwards everything works
again without a restart. More of them, and what is killed, are in tests/e2e/test_drills.py.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from egressd.lab.stand import Stand
from tests.bypass import broken
from tests.bypass.arena import INSIDE, SHIPPED, Arena, Driver
from tests.bypass.drill import ALONE, OK, RULES, TRIES, accounted, works
from tests.bypass.processes import limited, memory, open_files, worker_of, workers_of
from tests.bypass.reload import adopt, in_force, policies
from tests.e2e.conftest import until

pytestmark = pytest.mark.e2e

# parts of a worker and of control


class Broken:
    """A sandbox of an egressd whose parts can be broken, in a stand of its own."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.errors, self._switch = stand.directory / "errors", stand.directory / "switch"
        self._switch.write_text("")
        for part in INSIDE.parent.glob("inside*.py"):
            shutil.copy(part, stand.workspace)
        argv = stand.argv(["/usr/bin/python3", str(stand.workspace / "inside.py")])
        argv = [argv[0], broken.__file__, str(self._switch), *argv[argv.index("egressd") + 1 :]]
        with self.errors.open("w") as errors:
            process = stand.lab.popen_host(
                argv,
                cwd=str(stand.workspace),
                privileged=not stand.lab.rootless,
                stdin=subprocess.PIPE,
                stderr=errors,
            )
        self.driver = Driver(process)

    def break_worker(self, part: str | None) -> None:
        """Let a part of the worker fail from now on; None: none."""
        number = broken.WORKER.index(part) if part is not None else 99
        self.driver.run(f"udp(RESOLVER, 53, question('drill-{number:02}.evil-lab.com'))")

    def break_control(self, part: str | None) -> None:
        """Let a part of control fail from now on; None: none."""
        self._switch.write_text(part or "")

    def said(self, part: str) -> bool:
        """Whether the part has failed by now."""
        return f"drill: {part} failed" in self.errors.read_text()


@pytest.fixture(scope="module")
def ruined(once: Arena) -> Iterator[Broken]:
    """A sandbox of an egressd of breakable parts, for the whole module."""
    with Stand(once.lab, RULES, shipped=SHIPPED) as stand:
        made = Broken(stand)
        try:
            yield made
        finally:
            made.driver.close()


@pytest.mark.parametrize("part", [*broken.WORKER, *broken.CONTROL])
def test_a_part_is_where_the_drills_look_for_it(part: str) -> None:
    assert callable(broken.find(part)[2])


@pytest.mark.parametrize("part", broken.WORKER)
def test_a_part_of_a_worker_fails(once: Arena, ruined: Broken, part: str) -> None:
    works(ruined.driver)
    mark = len(ruined.stand.records())
    once.lab.forget()
    ruined.break_worker(part)
    began = time.monotonic()
    said = ruined.driver.run(TRIES, 30)
    took = time.monotonic() - began
    accounted(once.lab, ruined.stand, mark)
    assert "200 OK" in once.b.run(OK.format(3))
    ruined.break_worker(None)
    assert ruined.said(part), f"{part} was never used: {said}"
    assert took < 15
    assert "owned" not in said
    works(ruined.driver)
    denials = [r for r in ruined.stand.records()[mark:] if r.get("verdict") == "deny"]
    assert denials or part.endswith((".put", ".flush", ".as_dict")), said  # those are what records go through
    assert ruined.driver.process.poll() is None


@pytest.mark.parametrize("part", broken.CONTROL)
def test_a_part_of_control_fails(once: Arena, ruined: Broken, part: str) -> None:
    works(ruined.driver)
    mark = len(ruined.stand.records())
    once.lab.forget()
    control = ruined.driver.process.pid
    ruined.break_control(part)
    tries = TRIES
    if part.endswith(("issue_worker_intermediate", "local_addresses", "sealed", "policy_payload")):
        tries = ALONE
        os.kill(worker_of(control), signal.SIGKILL)  # they are used for the next one
        until(lambda: ruined.said(part), 10, "the part's use")
    elif part.endswith("load_source"):
        ruined.stand.profile.write_text(RULES + "\n")
        until(lambda: ruined.said(part), 10, "the part's use")
    said = ruined.driver.run(tries, 30)
    accounted(once.lab, ruined.stand, mark)
    assert ruined.said(part), f"{part} was never used: {said}"
    assert "owned" not in said
    assert "200 OK" not in said or tries is TRIES
    assert "200 OK" in once.b.run(OK.format(3))
    ruined.break_control(None)
    works(ruined.driver, 15)
    assert ruined.driver.process.poll() is None
    assert len(workers_of(control)) == 1, "one worker, whatever happened"


# resources


@pytest.mark.skipif(os.geteuid() != 0, reason="the worker is another user's, or shows nothing of itself")
def test_a_worker_runs_out_of_descriptors(drilled: Arena) -> None:
    """Under many connections: each is answered, refused or waits; nothing leaves unrecorded; it recovers by itself."""
    worker = worker_of(drilled.a.process.pid)
    mark = len(drilled.stand.records())
    drilled.lab.forget()
    code = (
        "import threading\n"
        "def ask(n):\n counts.append('200 OK' in shown(tls(address, 443, get(), 'api.lab-origin.com', seconds=6)))\n"
        "counts, address = [], socket.gethostbyname('api.lab-origin.com')\n"
        "idle = [socket.create_connection((address, 443), 5) for _ in range(60)]\n"
        "tasks = [threading.Thread(target=ask, args=(n,)) for n in range(40)]\n"
        "for task in tasks: task.start()\n"
        "for task in tasks: task.join()\n"
        "say(len(counts), sum(counts))"
    )
    with limited(worker, resource.RLIMIT_NOFILE, open_files(worker) + 24):
        count, served = map(int, drilled.a.run(code, 60).split())
        assert count == 40
        assert "200 OK" in drilled.b.run(OK.format(3))
        accounted(drilled.lab, drilled.stand, mark)
    works(drilled.a)
    assert worker_of(drilled.a.process.pid) == worker, "nothing had to be replaced"
    assert served < 40, "the drill was none"


def test_control_runs_out_of_descriptors(drilled: Arena) -> None:
    """The rules change and the worker dies meanwhile: no successor can be made, nothing gets out; then it is made up for."""
    stand = drilled.stand
    control = drilled.a.process.pid
    mark, before = len(stand.records()), in_force(stand)
    with limited(control, resource.RLIMIT_NOFILE, 3):
        assert "200 OK" in drilled.a.run(OK.format(3)), "what is open stays open"
        stand.profile.write_text(RULES.replace("wild-lab.com", "wilder-lab.com"))
        until(lambda: [r for r in stand.records()[mark:] if r["event"] == "policy"], 60, "B's or A's word")
        os.kill(worker_of(control), signal.SIGKILL)
        drilled.lab.forget()
        assert "200 OK" not in drilled.a.run(ALONE)
        assert drilled.lab.requests() == []
        assert "200 OK" in drilled.b.run(OK.format(3))
    works(drilled.a, 20)
    # Not only one: as long as neither has read them, that is the old one.
    until(lambda: len(in_force(stand) - before) == len(in_force(stand)) == 1, 60, "the new rules in both")
    assert "(reason not_allowed)" in drilled.a.run(
        "say(shown(tls('n.wild-lab.com', 443, get('/', 'n.wild-lab.com'), 'n.wild-lab.com')))"
    )
    accounted(drilled.lab, drilled.stand, mark)


@pytest.mark.skipif(os.geteuid() != 0, reason="the worker is another user's")
def test_a_worker_runs_out_of_memory(drilled: Arena) -> None:
    """It may refuse or die; both are recorded, and the next request works."""
    stand = drilled.stand
    control = drilled.a.process.pid
    worker = worker_of(control)
    mark = len(stand.records())
    drilled.lab.forget()
    code = (
        "import threading\n"
        "def ask(n): tls('api.lab-origin.com', 443, get('/big?bytes=3000000'), 'api.lab-origin.com', seconds=3, read=1 << 30)\n"
        "tasks = [threading.Thread(target=ask, args=(n,)) for n in range(20)]\n"
        "for task in tasks: task.start()\n"
        "for task in tasks: task.join()"
    )
    with limited(worker, resource.RLIMIT_AS, memory(worker, "VmSize") + 1_000_000):
        drilled.a.run(code, 40)
        assert "200 OK" in drilled.b.run(OK.format(3))
        accounted(drilled.lab, drilled.stand, mark)
    works(drilled.a, 20)
    accounted(drilled.lab, drilled.stand, mark)


def test_control_is_held_up(drilled: Arena) -> None:
    """Stopped for a while, as by a host without memory: nothing is acknowledged, so nothing leaves; then it goes on."""
    stand = drilled.stand
    control = drilled.a.process.pid
    mark = len(stand.records())
    drilled.lab.forget()
    os.kill(control, signal.SIGSTOP)
    try:
        said = drilled.a.run(OK.format(8), 15)
        assert "200 OK" not in said
        assert drilled.lab.requests() == []
        assert "200 OK" in drilled.b.run(OK.format(3))
    finally:
        os.kill(control, signal.SIGCONT)
    works(drilled.a)
    accounted(drilled.lab, drilled.stand, mark)


def test_a_worker_is_held_up(drilled: Arena) -> None:
    """Stopped: its sandbox waits in the backlog, the other does not notice; then what waited is served."""
    worker, mark = worker_of(drilled.a.process.pid), len(drilled.stand.records())
    os.kill(worker, signal.SIGSTOP)
    said: list[str] = []
    waiting = threading.Thread(target=lambda: said.append(drilled.a.run(OK.format(10), 20)))
    try:
        waiting.start()
        for _ in range(5):
            assert "200 OK" in drilled.b.run(OK.format(3))
        assert not said
    finally:
        os.kill(worker, signal.SIGCONT)
    waiting.join()
    assert "200 OK" in said[0]
    accounted(drilled.lab, drilled.stand, mark)


def test_a_worker_that_dies_while_it_starts_has_one_successor(drilled: Arena) -> None:
    """Two at once would serve one sandbox, and one of them by old rules."""
    control = drilled.a.process.pid
    for _ in range(3):
        before = workers_of(control)[0]
        os.kill(before, signal.SIGKILL)
        until(lambda old=before: workers_of(control) not in ([], [old]), 10, "a successor")  # type: ignore[misc]
    works(drilled.a)
    time.sleep(1.0)
    assert len(workers_of(control)) == 1
    adopt(drilled, RULES.replace("wild-lab.com", "wilder-lab.com"))
    drilled.life_goes_on()


# the world outside


@pytest.mark.parametrize(
    "behaviour", ["silent", "servfail", "refused", "garbage", "wrong-id", "truncated", "empty"]
)
def test_a_dns_upstream_that_misbehaves(drilled: Arena, behaviour: str) -> None:
    """Only who needs its answer is refused, at once or after the time-out; when it is well again, so is the name."""
    name = f"{behaviour}-drill.lab-origin.com"
    lab = drilled.lab
    lab.set_name(name, a=["11.0.0.20"], behaviour=behaviour)
    mark = len(drilled.stand.records())
    said: list[str] = []
    asks = f"say(shown(tls('{name}', 443, get('/n', '{name}'), '{name}', seconds=14)))"
    waiting = threading.Thread(target=lambda: said.append(drilled.a.run(asks, 20)))
    waiting.start()
    assert "200 OK" in drilled.b.run(OK.format(3))
    waiting.join()
    if behaviour == "truncated":
        assert "200 OK" in said[0], "by TCP it is whole"
    else:
        assert re.search(r" 50[24] egressd", said[0]), said
    accounted(drilled.lab, drilled.stand, mark)
    lab.set_name(name, a=["11.0.0.20"])
    assert "200 OK" in drilled.a.run(asks, 20)


def test_no_way_to_the_world_and_back(drilled: Arena) -> None:
    """The host loses its route, with the DNS upstream behind it: refused in words, and well again with the route."""
    lab = drilled.lab
    mark = len(drilled.stand.records())
    path = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    rule = ["sh", "-ec", "iptables -{0} OUTPUT -o eth0 -j DROP; ip6tables -{0} OUTPUT -o eth0 -j DROP"]
    lab.host_exec([*rule[:2], rule[2].format("A")], env=path)
    try:
        assert re.search(r" 50[24] egressd", drilled.a.run(OK.format(18), 25))
        assert "(reason not_allowed)" in drilled.a.run(
            "say(shown(tls('evil-lab.com', 443, get('/', 'x'), 'evil-lab.com')))"
        )
    finally:
        lab.host_exec([*rule[:2], rule[2].format("D")], env=path)
    works(drilled.a)
    accounted(drilled.lab, drilled.stand, mark)


def test_files_of_an_installation_are_taken_away(drilled: Arena) -> None:
    """Configuration, authority and trust are read at the start; a running sandbox does not miss them, nor its next worker."""
    stand = drilled.stand
    mark = len(stand.records())
    taken = [
        path for path in (stand.config, stand.directory / "ca", stand.directory / "state") if path.exists()
    ]
    for path in taken:
        path.rename(path.with_name(f"{path.name}.away"))
    try:
        os.kill(worker_of(drilled.a.process.pid), signal.SIGKILL)
        works(drilled.a)
        drilled.life_goes_on()
        accounted(drilled.lab, drilled.stand, mark)
    finally:
        for path in taken:
            path.with_name(f"{path.name}.away").rename(path)


def test_rules_that_cannot_be_read_for_a_while(drilled: Arena) -> None:
    """The old ones stay, one record says so, and the new ones come into force once they can be read, without another change."""
    stand = drilled.stand
    mark = len(stand.records())
    if os.geteuid() == 0 and not drilled.lab.rootless:
        stand.rules.rename(stand.directory / "away")
    else:
        stand.profile.chmod(0)
    assert all(r["detail"].startswith("refused: ") for r in policies(stand, mark))
    time.sleep(2.5)  # looked at again meanwhile
    assert len([r for r in stand.records()[mark:] if r["event"] == "policy"]) <= 2
    drilled.life_goes_on()
    if os.geteuid() == 0 and not drilled.lab.rootless:
        (stand.directory / "away").rename(stand.rules)
    else:
        stand.profile.chmod(0o644)
    adopt(drilled, RULES.replace("wild-lab.com", "wilder-lab.com"))
