"""How long a command takes that does nothing: egressd, bubblewrap alone, and another sandbox for agents, in turn.

    python -m bench.startup [RUNS]

Every round runs each contender once, so that a busy moment of the machine meets all of them. Wall is what somebody waits; CPU,
user and system of all processes, is what the machine works, and hardly depends on what else runs. Then: where egressd's own
time goes, by its steps in one process and by what its three processes import.
"""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEER = "@anthropic-ai/sandbox-runtime"
CONFIG = "schema: 1\nrules: rules\nca_dir: ca\njournal: journal.jsonl\nstate_dir: state\ncontrol_socket: control.sock\n"
PROFILE = "schema: 1\nprofile: bench\nowner: bench\nallow:\n  - service: pypi\n"
PROCESSES = {
    "control": "egressd.cli.main, egressd.cli.run, egressd.control.session",
    "worker": "egressd.gate.worker",
    "maker": "egressd.wiring.maker",
}


@dataclass
class Contender:
    """A command and what its runs took: seconds by the wall, seconds of CPU."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def run(self, directory: Path) -> None:
        """Run once; raises ChildProcessError with what it said when it fails."""
        with tempfile.TemporaryFile() as said:
            began = time.perf_counter()
            process = subprocess.Popen(
                self.argv,
                cwd=directory / "work",
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
            _, status, usage = os.wait4(process.pid, 0)
            wall = time.perf_counter() - began
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode != 0:
                said.seek(0)
                words = said.read(2000).decode(errors="replace").strip()
                raise ChildProcessError(f"exit status {process.returncode}: {words}")
        self.wall.append(wall)
        self.cpu.append(usage.ru_utime + usage.ru_stime)


def egressd(directory: Path) -> Contender:
    """An installation of egressd of its own, with the shipped rules."""
    shutil.copytree(ROOT / "rules", directory / "rules")
    (directory / "rules/profiles/bench.yaml").write_text(PROFILE, encoding="utf-8")
    (directory / "egressd.yaml").write_text(CONFIG, encoding="utf-8")
    (directory / "work").mkdir()
    (directory / "work").chmod(0o777)  # as root a sandbox has a uid of its own
    command = [sys.executable, "-m", "egressd", "--config", str(directory / "egressd.yaml")]
    path = {"PYTHONPATH": str(ROOT)}
    return Contender("egressd run -- true", [*command, "run", "--profile", "bench", "--", "true"], path)


def bubblewrap() -> Contender:
    """Namespaces and nothing else: no rule, no record, no way out."""
    argv = ["bwrap", "--unshare-net", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "true"]
    return Contender("bwrap --unshare-net true", argv)


def peer() -> Contender | str:
    """The peer from the npm registry, installed once into the cache folder; or why it is not here."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "egressd-bench"
    program = cache / "node_modules/.bin/srt"
    if not program.exists():
        cache.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(
                ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(cache), PEER],
                check=True,
                capture_output=True,
                text=True,
                timeout=300,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return f"{PEER} cannot be installed: {getattr(error, 'stderr', '') or error}".strip()
    return Contender("srt true", [str(program), "true"])


def race(contenders: list[Contender], directory: Path, runs: int) -> list[str]:
    """Run all contenders in turn; those that cannot run are left out. Returns why."""
    notes = []
    for contender in tuple(contenders):
        try:
            contender.run(directory)  # what is made or cached once is no part of the figures
        except (OSError, ChildProcessError) as error:
            contenders.remove(contender)
            notes.append(f"{contender.name}: cannot run here: {error}")
        contender.wall.clear()
        contender.cpu.clear()
    for _ in range(runs):
        for contender in contenders:
            contender.run(directory)
    return notes


def figures(samples: list[float]) -> str:
    """Median and spread in milliseconds."""
    low, high = min(samples) * 1000, max(samples) * 1000
    return f"{statistics.median(samples) * 1000:7.0f}  ({low:.0f} to {high:.0f})"


def steps(directory: Path) -> list[str]:
    """The lines of one timed run inside of this package's `timeline`."""
    argv = [sys.executable, "-m", "bench.timeline", "--config", str(directory / "egressd.yaml")]
    ran = subprocess.run(
        [*argv, "run", "--profile", "bench", "--", "true"],
        cwd=directory / "work",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return ran.stderr.splitlines()


def imports(modules: str) -> tuple[float, Counter[str]]:
    """The milliseconds that importing takes, and those of each package's own modules (python -X importtime)."""
    ran = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", f"import {modules}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    own: Counter[str] = Counter()
    for line in ran.stderr.splitlines():
        match = re.match(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", line)
        if match is not None:
            package = match[2].partition(".")[0]
            own["the standard library" if package in sys.stdlib_module_names else package] += int(match[1])
    return sum(own.values()) / 1000, own


def main(arguments: Sequence[str]) -> int:
    """Measure and say what came of it; returns the exit status."""
    runs = int(arguments[0]) if arguments else 15
    say = sys.stdout.write
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        contenders, notes = [egressd(directory), bubblewrap()], []
        other = peer()
        if isinstance(other, str):
            notes.append(other)
        else:
            contenders.append(other)
        notes += race(contenders, directory, runs)
        say(f"start-up, milliseconds, median and spread of {runs} runs in turn on {os.cpu_count()} cores, ")
        say(f"load {os.getloadavg()[0]:.1f}\n\n{'':26}{'wall':>7}{'CPU':>27}\n")
        for each in contenders:
            say(f"{each.name:26}{figures(each.wall):27}{figures(each.cpu)}\n")
        say("".join(f"{note}\n" for note in notes))
        say(
            "\nwhere egressd's time goes: milliseconds since its start, CPU of control, and what was over then\n\n"
        )
        say("".join(f"{line}\n" for line in steps(directory)))
    say("\nwhat is imported, milliseconds, alone and traced\n\n")
    for process, modules in PROCESSES.items():
        with suppress(subprocess.SubprocessError):
            total, own = imports(modules)
            parts = ", ".join(f"{package} {spent / 1000:.0f}" for package, spent in own.most_common(7))
            say(f"{process:10}{total:6.0f}: {parts}\n")
    return 0 if contenders and contenders[0].name.startswith("egressd") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
