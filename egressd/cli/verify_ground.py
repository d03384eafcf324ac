"""The ground of `egressd verify`: a lab, a sandbox of this installation in it, another beside it, and strangers on the host."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import egressd
from egressd.cli.verify_inside import BrokeOff, Inside, argv
from egressd.cli.verify_stand import CANARY, Standing, described
from egressd.control.config import Config
from egressd.lab import Lab
from egressd.verify.bundle import LAUNCHER

_READY = 25.0
_PACKAGES = str(Path(egressd.__file__).resolve().parents[1])


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller asks for. `without` puts the probes where there is no egressd.

    For tests: `stand`; `container`, what runs a command in a container {name} whose network is at {network}; `harm`, what is run
    where egressd stands when all is up, {holder} being a process in the container's network; and `only`, the probes to be made.
    """

    profile: str
    env: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()
    uid: int | None = None
    targets: tuple[str, ...] = ()
    without: bool = False
    ready_timeout: float = 10.0
    wiring: str = "namespace"
    container: tuple[str, ...] = ()
    harm: tuple[tuple[str, ...], ...] = ()
    only: frozenset[str] = frozenset()
    stand: tuple[str, ...] = field(default=(sys.executable, "-P", "-m", "egressd.cli.verify_stand"))


@dataclass(frozen=True, slots=True)
class Stranger:
    """What a neighbour told of itself."""

    ports: list[int]
    abstract: list[str]
    files: list[str]
    memory: int
    sockets: list[str]

    @classmethod
    def of(cls, told: dict[str, Any]) -> Self:
        """Read it, each value by its kind."""
        return cls(
            [int(each) for each in told["ports"]],
            [str(each) for each in told["abstract"]],
            [str(each) for each in told["files"]],
            int(told["memory"]),
            [str(each) for each in told["sockets"]],
        )


class Ground:
    """Builds everything and takes it down. Raises LabError and BrokeOff when it cannot be built."""

    def __init__(self, config: Config, options: Options, nonce: str, workspace: Path) -> None:
        self.config = config
        self.options = options
        self.nonce = nonce
        self.workspace = workspace
        self.token = os.urandom(8).hex()
        self.secret = os.urandom(16).hex()
        self._parts = contextlib.ExitStack()
        self.directory = Path(tempfile.mkdtemp(prefix="egressd-verify-"))
        self._parts.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self.lab: Lab | None = None

    def __enter__(self) -> Self:
        try:
            if not self.options.targets:
                self.lab = self._parts.enter_context(Lab.build())
        except BaseException:
            self._parts.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    @property
    def packages(self) -> str:
        """Where egressd's code is imported from."""
        return _PACKAGES

    @property
    def journal(self) -> Path:
        """Where the sandbox's records are."""
        return self.directory / "sandbox/journal.jsonl"

    @property
    def control_socket(self) -> Path:
        """Where its control socket would be."""
        return self.directory / "sandbox/control.sock"

    def sandbox(self) -> Inside:
        """Start the sandbox with the probes in it; where there is to be no egressd, start the probes without."""
        if self.options.without:
            return self._without("inside", self.workspace)
        return self._sandbox("sandbox", self.workspace, "inside")

    def told(self) -> dict[str, Any]:
        """Return what of the scene is otherwise here."""
        return {}

    def stands(self, made: Inside) -> int:
        """Return the process that egressd's own are below."""
        return made.process.pid

    def identity(self) -> str:
        """Return the id of the sandbox with the probes in it, where others are in the same journal."""
        return ""

    def differences(self) -> list[str] | None:
        """Return how the packet rules in force differ from those wanted; None where nobody can read them from here."""
        return None

    def neighbour(self) -> Inside | None:
        """Start another sandbox in which somebody listens, where there can be one."""
        workspace = Path(tempfile.mkdtemp(prefix="egressd-verify-"))
        self._parts.callback(shutil.rmtree, workspace, ignore_errors=True)
        workspace.chmod(0o755)
        if self.options.without:
            return self._ask(self._without("neighbour", workspace))
        return self._ask(self._sandbox("neighbour", workspace, "neighbour"))

    def witness(self) -> Inside:
        """Start somebody who listens on the host, on Unix sockets too."""
        sockets = [str(self.control_socket), f"/tmp/verify-{self.token}.sock"]  # noqa: S108 - where everybody's are
        command = [sys.executable, "-I", "-S", "-u", "-c", LAUNCHER]
        place = "open" if self.options.without else "host"
        process = self._start(command, "witness", place=place, privileged=True, cwd="/")
        return self._ask(self._inside(process, "witness", "neighbour"), sockets)

    def stranger(self, made: Inside | None) -> Stranger:
        """Return what a neighbour or a witness says of itself, once it is there; nobody says nothing. Raises BrokeOff."""
        if made is None:
            return Stranger([], [], [], 0, [])
        return Stranger.of(made.hear(_READY))

    def naive_proxy(self) -> None:
        """Where there is no egressd, start the proxy that the probes of egressd's get through."""
        self._without("naive", Path("/")).hear(_READY)

    def _sandbox(self, name: str, workspace: Path, entry: str) -> Inside:
        own = self.directory / name
        own.mkdir(exist_ok=True)
        options, lab = self.options, self.lab
        main = entry == "inside"
        request = {
            "command": argv(),
            "profile": options.profile,
            "labels": {"verify": self.nonce},
            "env": options.env if main else (),
            "binds": options.binds if main else (),
            "sockets": options.sockets if main else (),
            "uid": options.uid,
            "ready_timeout": options.ready_timeout,
            "workspace": str(workspace),
        }
        dns = f"udp://{lab.dns}" if lab else None
        standing = Standing(
            described(self.config), request, str(own), dns, ca_bundle=lab.ca_file if lab else None
        )
        file = own / "standing.json"
        file.write_text(standing.as_json(), encoding="utf-8")
        privileged = lab is None or not lab.rootless
        process = self._start([*options.stand, str(file)], name, privileged=privileged, cwd=str(workspace))
        return self._inside(process, name, entry)

    def _without(self, entry: str, workspace: Path) -> Inside:
        (self.directory / "sandbox").mkdir(exist_ok=True)
        process = self._start(argv(), entry, place="open", privileged=True, cwd=str(workspace), trusting=True)
        return self._inside(process, entry, entry)

    def _start(
        self,
        given: Sequence[str],
        name: str,
        *,
        place: str = "host",
        privileged: bool,
        cwd: str,
        trusting: bool = False,
    ) -> subprocess.Popen[bytes]:
        env = dict(os.environ) | {CANARY: self.secret, "PYTHONPATH": _PACKAGES}
        command = list(given)
        if self.lab is not None:
            if trusting:
                env["SSL_CERT_FILE"] = self.lab.ca_file
            there: Any = place
            command = self.lab.join_argv(there, command, cwd=cwd, privileged=privileged)
        with open(self.directory / f"{name}.log", "wb") as said:
            # A session of its own: a terminal's Ctrl-C is for us, who take everything down in order.
            return subprocess.Popen(
                command,
                env=env,
                cwd=cwd if self.lab is None else "/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,
            )

    def _inside(self, process: subprocess.Popen[bytes], name: str, entry: str) -> Inside:
        try:
            made = Inside(process, self.directory / f"{name}.log", entry)
        except BrokeOff:
            process.kill()
            process.communicate()
            raise
        self._parts.callback(made.close)
        return made

    def _ask(self, made: Inside, sockets: Sequence[str] = ()) -> Inside:
        made.tell({"token": self.token, "sockets": list(sockets)})
        return made


def descendants(pid: int) -> Iterator[int]:
    """A process and everything that it has started, as long as it lives."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                line = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8", errors="replace")
                parents.setdefault(int(line.rpartition(")")[2].split()[1]), []).append(int(entry))
    queue = [pid]
    for each in queue:
        yield each
        queue += parents.get(each, [])
