"""The stage: a lab, one installation of egressd in it, and a performer on either side of it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from egressd.lab import topology
from egressd.lab.demo import daemon, driver, moves
from egressd.lab.demo.performer import BrokeOff, Performer
from egressd.lab.demo.tally import Tally
from egressd.lab.guards import Guard
from egressd.lab.lab import Lab, LabError, clean_env
from egressd.lab.names import ZONE, Zone, entry_from
from egressd.lab.stand import Stand

PYTHON = "/usr/bin/python3"
"""The system's: it has pip, and a sandbox sees nothing of our own."""
_DRIVER = Path(driver.__file__)
_CHATTER = range(130, 144)  # ICMPv6 types of neighbour discovery and multicast reports: the kernel's own


@dataclass(frozen=True, slots=True)
class Left:
    """What left the place where egressd lives, as the world saw it.

    `attacker` and `metadata` count packets to them, `queries` are the names that were asked of DNS, `strangers` the
    destinations that no allowed connection needed, `lost` the packets that the capture missed.
    """

    attacker: int
    metadata: int
    queries: tuple[str, ...]
    strangers: tuple[str, ...]
    lost: int


class Stage:
    """Builds everything; `close` (or `with`) takes it down. Raises LabError when it cannot be built.

    From now on everything together may take `seconds`; then the performers are ended.
    """

    def __init__(self, shipped: Path, *, rootless: bool | None, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds
        with contextlib.ExitStack() as stack:
            self.lab = stack.enter_context(Lab.build(rootless=rootless))
            for name, entry in moves.NAMES.items():
                self.lab.set_name(name, **entry)
            stand = Stand(self.lab, moves.RULES, shipped=shipped, credentials=moves.CREDENTIALS)
            self.stand = stack.enter_context(stand)
            key = secrets.token_urlsafe(24)
            self.stand.secret("keyed-api", key)
            self.lab.guard(moves.KEYED, Guard("header", "x-api-key", keys=(key,)))
            self._docker = self._start_docker()
            self._parts = stack.pop_all()

    def close(self) -> None:
        """Ends everything that was started, and removes it."""
        self._parts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def outside(self) -> Performer:
        """Returns a performer where there is no egressd: an unprivileged process with a network like any other.

        Raises LabError when it cannot be started, as `inside` does.
        """
        home = Path(self.lab.home)
        with open(self.stand.directory / "outside.log", "wb") as said:
            process = self.lab.popen_open(
                [PYTHON, self._lay_driver(home)],
                privileged=False,
                stdin=subprocess.PIPE,
                stderr=said,
                start_new_session=True,
            )
        return self._ready(process, "outside.log")

    def inside(self) -> tuple[Performer, Tally]:
        """Returns a performer in a sandbox of `egressd run`, and the count of what that sandbox sends from now on."""
        with open(self.stand.directory / "inside.log", "wb") as said:
            process = self.stand.start(
                [PYTHON, self._lay_driver(self.stand.workspace)],
                stdin=subprocess.PIPE,
                stderr=said,
                start_new_session=True,  # a terminal's Ctrl-C is for the demo, which takes everything down in order
            )
        performer = self._ready(process, "inside.log")
        try:
            return performer, Tally.start(self.lab, process.pid)
        except BaseException:
            performer.close()
            raise

    def left(self, needed: Iterable[str]) -> Left:
        """Returns what the world saw of egressd's side; `needed` are the names that allowed connections are for."""
        zone = Zone({**ZONE, **{name: entry_from(entry) for name, entry in moves.NAMES.items()}})
        wanted = {topology.DNS} | {address for name in needed for address in _addresses(zone, name)}
        flows = [
            flow for flow in self.lab.packets("host") if not _chatter(flow.protocol, flow.port, flow.address)
        ]
        return Left(
            attacker=sum(flow.packets for flow in flows if flow.address in topology.ATTACKERS),
            metadata=sum(flow.packets for flow in flows if flow.address in topology.METADATAS),
            queries=tuple(sorted({query.name for query in self.lab.dns_queries()})),
            strangers=tuple(sorted({flow.address for flow in flows} - (wanted - {*topology.METADATAS}))),
            lost=self.lab.packets_lost(),
        )

    def keep(self, folder: Path) -> None:
        """Copies rules, configuration and journal to `folder`, where they are of use without the lab; no secret."""
        shutil.copytree(self.stand.rules, folder / "rules")
        shutil.copy(self.stand.credentials, folder / "credentials.yaml")
        if self.stand.journal.exists():
            shutil.copy(self.stand.journal, folder / "journal.jsonl")
        shutil.copy(self.lab.ca_file, folder / "lab-ca.pem")
        text = self.stand.config.read_text(encoding="utf-8").replace(self.lab.ca_file, "lab-ca.pem")
        (folder / "egressd.yaml").write_text(text, encoding="utf-8")

    def _ready(self, process: subprocess.Popen[Any], said: str) -> Performer:
        left = self._deadline - time.monotonic()
        performer = Performer(process, self.stand.directory / said, self._docker, left)
        try:
            performer.await_ready()
        except BrokeOff as error:
            performer.close()
            raise LabError(f"{said.partition('.')[0]}, nothing can be run: {error}") from error
        except BaseException:
            performer.close()
            raise
        return performer

    def _lay_driver(self, folder: Path) -> str:
        """The driver is copied to where it is needed: the checkout may lie in a home that nobody else may enter."""
        laid = folder / "driver.py"
        shutil.copy(_DRIVER, laid)
        laid.chmod(0o644)
        return str(laid)

    def _start_docker(self) -> str:
        path = os.path.join(self.lab.directory, "docker.sock")
        package = str(_DRIVER.parents[3])
        process = self.lab.popen_host(
            [sys.executable, "-P", "-m", daemon.__name__, path],
            env=clean_env(self.lab) | {"PYTHONPATH": package},
            stderr=subprocess.DEVNULL,
        )
        if not process.stdout or process.stdout.readline() != "listening\n":
            raise LabError("the stand-in for a container engine did not start")
        return path


def _addresses(zone: Zone, name: str) -> Iterable[str]:
    entry = zone.find(name)
    while entry is not None and entry.cname is not None:
        entry = zone.find(entry.cname)
    return () if entry is None else (*entry.a, *entry.aaaa)


def _chatter(protocol: str, kind: int, address: str) -> bool:
    return (protocol == "icmp6" and kind in _CHATTER) or ipaddress.ip_address(address).is_multicast
