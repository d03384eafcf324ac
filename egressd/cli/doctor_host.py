"""The machine as `egressd doctor` sees it: everything it reads, runs and tries, in one place that a test can fake.

Nothing is changed: what a trial makes, it takes down.
"""

from __future__ import annotations

import asyncio
import os
import platform
import pwd
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MOST: Final = 1 << 20
_SECONDS: Final = 15.0
_WORKER: Final = (
    "import sys\nfrom egressd.gate import isolation, seccomp\nisolation.protect_process()\n"
    "isolation.isolate((1337, 1337) if sys.argv[1] == '1' else None, keep=())\nseccomp.confine()\n"
)

type Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Line:
    """One finding: what was looked at, whether it will do, what was found, and what to do where it will not."""

    name: str
    verdict: Verdict
    found: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """What stands at a path: who owns it, its permission bits, whether it is a folder, and whether we can write there."""

    uid: int
    mode: int
    folder: bool
    writable: bool


class Host(Protocol):
    """What the checks ask. Nothing here raises."""

    @property
    def euid(self) -> int:
        """Whose process this is."""

    @property
    def release(self) -> str:
        """The kernel's release, as `uname -r` says it."""

    @property
    def machine(self) -> str:
        """The processor, as `uname -m` says it."""

    @property
    def environ(self) -> Mapping[str, str]:
        """The environment."""

    def read(self, path: str) -> str | None:
        """Return a file's text, None where there is none that can be read."""

    def program(self, name: str) -> str | None:
        """Return where a program is, None where it is not."""

    def run(self, *argv: str) -> tuple[int, str] | None:
        """Return a program's exit status and what it printed, None where it could not be run."""

    def entry(self, path: str) -> Entry | None:
        """Return what stands at a path, None where nothing does."""

    def account(self, uid: int) -> str | None:
        """Return the name of a uid's account, None where it has none."""

    def descriptors(self) -> int:
        """Return the most descriptors that a process here may have."""

    def lockable(self) -> int:
        """Return how many bytes may be kept from swap, -1 for any number."""

    def free(self, path: str) -> int | None:
        """Return the bytes that are free where a path is, or would be."""

    def try_sandbox(self) -> str | None:
        """Make a sandbox, run a command in it and take it down; return why that failed, None where it did not."""

    def try_worker(self) -> str | None:
        """Isolate and confine a process as a worker is; return why that failed, None where it did not."""


class ThisHost:
    """The machine that this runs on."""

    def __init__(self) -> None:
        """Nothing is looked at yet."""
        self.euid = os.geteuid()
        self.release = platform.release()
        self.machine = platform.machine()
        self.environ: Mapping[str, str] = os.environ

    def read(self, path: str) -> str | None:
        """See `Host.read`."""
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read(_MOST)
        except (OSError, ValueError):
            return None

    def program(self, name: str) -> str | None:
        """See `Host.program`."""
        return shutil.which(name, path=PATH)

    def run(self, *argv: str) -> tuple[int, str] | None:
        """See `Host.run`."""
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_SECONDS,
                env={"PATH": PATH, "LC_ALL": "C"},
                check=False,
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.returncode, done.stdout[:_MOST].decode("utf-8", "replace")

    def entry(self, path: str) -> Entry | None:
        """See `Host.entry`."""
        try:
            status = os.stat(path)
        except OSError:
            return None
        folder = bool(status.st_mode & 0o040000)
        return Entry(
            status.st_uid, status.st_mode & 0o7777, folder, os.access(path, os.W_OK | (os.X_OK * folder))
        )

    def account(self, uid: int) -> str | None:
        """See `Host.account`."""
        try:
            return pwd.getpwuid(uid).pw_name
        except KeyError:
            return None

    def descriptors(self) -> int:
        """See `Host.descriptors`."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def lockable(self) -> int:
        """See `Host.lockable`."""
        return resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]

    def free(self, path: str) -> int | None:
        """See `Host.free`."""
        for place in (Path(path), *Path(path).parents):
            try:
                status = os.statvfs(place)
            except OSError:
                continue
            return status.f_bavail * status.f_frsize
        return None

    def try_sandbox(self) -> str | None:
        """See `Host.try_sandbox`."""
        with tempfile.TemporaryDirectory(prefix="egressd-doctor-") as folder:
            os.chmod(folder, 0o711)  # noqa: S103 -- the sandbox's uid goes through it
            return _said(
                subprocess_of("from egressd.cli.doctor_host import sandbox; sandbox(sys.argv[1])", folder)
            )

    def try_worker(self) -> str | None:
        """See `Host.try_worker`."""
        from egressd.control.host import may_become
        from egressd.control.worker import WORKER_UID

        return _said(subprocess_of(_WORKER, "1" if may_become(WORKER_UID) else "0"))


def subprocess_of(code: str, *arguments: str) -> Sequence[str]:
    """Return the argument list of a Python process of ours: what it does to itself is not done to this one."""
    return (sys.executable, "-I", "-c", f"import sys; {code}" if "\n" not in code else code, *arguments)


def sandbox(folder: str) -> None:
    """Make a sandbox in `folder`, run `true` in it, take it down; a failure is told on stderr, status 1."""
    from egressd.wiring.errors import WiringError
    from egressd.wiring.namespace import Namespace
    from egressd.wiring.spec import SandboxSpec

    async def life() -> None:
        places = Path(folder, "work"), Path(folder, "home")
        for place in places:
            place.mkdir()
        spec = SandboxSpec(workspace=str(places[0]), env={"PATH": PATH}, home=str(places[1]))
        namespace = await Namespace.make(spec)
        try:
            nothing = os.open(os.devnull, os.O_RDWR)
            status = await namespace.launch(
                ["true"], forward_signals=False, stdio=(nothing, nothing, nothing)
            )
            if status != 0:
                raise WiringError("true", f"exit status {status} in the sandbox")
        finally:
            await namespace.destroy()

    try:
        asyncio.run(life())
    except (WiringError, OSError, TimeoutError) as error:
        sys.exit(str(error) or type(error).__name__)


def _said(argv: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, text=True, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    told = lines[-2:] if len(lines) > 1 and lines[-1].startswith("hint:") else lines[-1:]
    return "\n".join(told) or f"exit status {done.returncode}"
