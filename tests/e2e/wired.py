"""egressd and its sandboxes in runc containers: in one network namespace (sidecar), or behind a bridge (gateway)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from egressd.lab import Lab
from egressd.lab.lab import clean_env
from egressd.lab.stand import Stand

TOP = Path(__file__).parents[2]
CONTAINER = TOP / "deploy" / "runc" / "container.py"
DAEMON = Path(__file__).parent / "programs" / "wired_daemon.py"
INSIDE = Path(__file__).parent / "programs" / "wired_inside.py"
UID = 1337
POWERS = ("CAP_NET_ADMIN", "CAP_SETUID", "CAP_SETGID")
API = "https://api.lab-origin.com/n"


def interpreter() -> list[str]:
    """The folders that this Python, and egressd's own code, need in a container."""
    places = {sys.prefix, sys.base_prefix, str(TOP)}
    return sorted(place for place in places if not place.startswith("/usr"))


class Daemon:
    """egressd, as a process that is told things by lines."""

    def __init__(self, lab: Lab, stand: Stand, argv: Sequence[str]) -> None:
        self.log = stand.directory / "daemon.log"
        with self.log.open("w") as log:
            self.process = lab.popen(
                "host", list(argv), env=environment(lab), cwd="/", stdin=subprocess.PIPE, stderr=log
            )
        self.bundle: str = self._answer()["bundle"]

    def ask(self, line: str) -> Any:
        """Have it do something; what it answers."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        return json.loads(line)

    def end(self) -> None:
        """End it as its service manager would."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)


def environment(lab: Lab) -> dict[str, str]:
    return clean_env(lab, trust=False) | {"PYTHONPATH": str(TOP), "PYTHONDONTWRITEBYTECODE": "1"}


class Containers:
    """Makes containers in a lab."""

    def __init__(self, lab: Lab, stand: Stand) -> None:
        self.lab, self.stand = lab, stand
        self._count = 0

    def argv(self, options: Sequence[str], command: Sequence[str]) -> list[str]:
        self._count += 1
        state = f"--state={self.stand.directory / 'runc'}"
        name = f"t{os.getpid()}-{self._count}"
        return ["/usr/bin/python3", str(CONTAINER), state, *options, name, "--", *command]

    def run(
        self, command: Sequence[str], *options: str, bundle: str, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a container as an agent's is made, to its end."""
        trust = f"--env=CURL_CA_BUNDLE={bundle}"
        binds = [f"--bind={Path(bundle).parent}:ro", f"--bind={INSIDE.parent}:ro"]
        argv = self.argv([trust, *binds, "--resolver=198.18.0.1", *options], command)
        return self.lab.run("host", argv, env=environment(self.lab), cwd="/", timeout=timeout)

    def inside(self, case: str, *options: str, bundle: str, timeout: float = 60) -> dict[str, Any]:
        """Try a case of `wired_inside.py` in a container; what it found."""
        command = ["/usr/bin/python3", str(INSIDE), *case.split()]
        done = self.run(command, *options, bundle=bundle, timeout=timeout)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


class Pod:
    """The sidecar: the lab's `host` is the network namespace that egressd and its sandbox share."""

    def __init__(self, lab: Lab, stand: Stand) -> None:
        self.lab, self.stand = lab, stand
        self.containers = Containers(lab, stand)
        # As container engines set it, so that a ping is a packet.
        lab.run("host", ["sysctl", "-qw", "net.ipv4.ping_group_range=0 2147483647"])
        for path in (stand.directory, *stand.directory.rglob("*")):
            os.chown(path, UID, UID, follow_symlinks=False)
        binds = [f"--bind={place}:ro" for place in interpreter()]
        options = ["--uid=0", *(f"--capability={power}" for power in POWERS), *binds]
        options += [f"--bind={stand.directory}", f"--bind={lab.ca_file}:ro", f"--env=PYTHONPATH={TOP}"]
        python = [sys.executable, "-P"]
        wire = [*python, "-m", "egressd", "wire", "sidecar", "--uid", str(UID), "--"]
        serve = [*python, str(DAEMON), str(stand.config), json.dumps({"sidecar": True})]
        self.daemon = Daemon(lab, stand, self.containers.argv(options, [*wire, *serve]))
        self.sandbox: str = self.daemon.ask("create a")

    def run(self, script: str, *options: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a script in the sandbox's container."""
        return self.containers.run(
            ["sh", "-ec", script], *options, bundle=self.daemon.bundle, timeout=timeout
        )

    def inside(self, case: str, *options: str) -> dict[str, Any]:
        """Try a case of `wired_inside.py` there."""
        return self.containers.inside(case, *options, bundle=self.daemon.bundle)

    def wire(self, *flags: str) -> subprocess.CompletedProcess[str]:
        """`egressd wire sidecar` with the rights of an operator."""
        argv = [sys.executable, "-m", "egressd", "wire", "sidecar", *flags]
        return self.lab.run("host", argv, env=environment(self.lab), cwd="/")

    def end(self) -> None:
        """End the daemon."""
        self.daemon.end()


@contextmanager
def pod(lab: Lab, stand: Stand) -> Iterator[Pod]:
    """A sidecar for the length of a test."""
    made = Pod(lab, stand)
    try:
        yield made
    finally:
        made.end()


def counted(records: Sequence[Mapping[str, Any]], **wanted: object) -> int:
    """How many attempts records account for: each of them, or what it counts."""
    return sum(
        record.get("count") or 1
        for record in records
        if record["event"] in ("decision", "lost") and all(record.get(k) == v for k, v in wanted.items())
    )
