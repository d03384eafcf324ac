"""What 100,000 hosts in 2,000 rules cost: to check, to put in force while others are carried, and each decision.

    python -m bench.rules [ROUNDS]

The pause is what clients of a running worker see: one asks for a page and for new names without end, each answer a record in the
journal, while the large rules are read and put in force, taken out, put in again. Beside it stands what the same clients see
while nothing happens; on a busy machine that is much, and the CPU of the longest step between two looks at anybody else tells
more. Decisions are taken in turns with a folder of 10 rules, so that a busy moment meets both.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from egressd.control.config import Config, load_config
from egressd.control.rulebook import reread_rules
from egressd.policy.attempt import Attempt, ConnectionAttempt, DnsQuestion, RequestAttempt
from egressd.policy.compile import CompiledPolicy, compile_policy, compile_steps
from egressd.policy.decide import decide
from egressd.policy.effective import EffectivePolicy, from_lines
from tests.control.fleet import PATIENCE, Box, fleet

ROOT = Path(__file__).resolve().parent.parent
HOSTS = 50
"""Of each rule; every tenth is a wildcard."""
NOW = 1_800_000_000.0


def write(folder: Path, rules: int) -> Path:
    """Write a folder whose one profile has so many rules."""
    (folder / "profiles").mkdir(parents=True)
    (folder / "organisation.yaml").write_text("schema: 1\nowner: bench\n", encoding="utf-8")
    lines = ["schema: 1", "profile: bench", "owner: bench", "allow:"]
    for rule in range(rules):
        lines += [f"  - id: rule-{rule}", "    hosts:"]
        for host in range(HOSTS):
            wild = '"*.w' if host % 10 == 0 else "h"
            end = '"' if host % 10 == 0 else ""
            lines.append(f"      - {wild}{host}.team-{rule}.example.com{end}")
        if rule % 3 == 0:
            lines.append('    requests: ["GET /v1/**", "POST /v1/items/*"]')
    (folder / "profiles" / "bench.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def configured(folder: Path) -> Config:
    """A configuration with these rules."""
    file = folder / "egressd.yaml"
    file.write_text("schema: 1\nrules: .\n", encoding="utf-8")
    return load_config({}, os.environ, file=file)


def check(folder: Path) -> tuple[float, float]:
    """Seconds of `egressd check`: by the wall, of CPU."""
    began = time.perf_counter()
    argv = [sys.executable, "-m", "egressd", "check", str(folder)]
    process = subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise ChildProcessError(f"egressd check ended with {process.returncode}")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime


def attempts(rules: int) -> list[Attempt]:
    """Attempts of every kind, spread over all rules: allowed, denied, unknown."""
    made: list[Attempt] = []
    for number in range(0, 2000, 7):
        team = f"team-{number % rules}"
        known, below = ("h3", team, "example", "com"), ("a", "w10", team, "example", "com")
        made += [
            RequestAttempt(known, 443, "https", "GET", "/v1/things/9"),
            RequestAttempt(known, 443, "https", "DELETE", "/v1/things/9"),
            RequestAttempt(below, 443, "https", "GET", "/v1/things/9"),
            ConnectionAttempt(known, 443, "https"),
            DnsQuestion(known),
            DnsQuestion(("nobody", team, "example", "com")),
        ]
    return made


def decisions(policy: CompiledPolicy, tried: Sequence[Attempt]) -> float:
    """Microseconds of CPU of one decision."""
    began = time.process_time()
    for attempt in tried:
        decide(policy, attempt, NOW)
    return (time.process_time() - began) / len(tried) * 1e6


class Client:
    """Asks without end, and notes how long each answer took."""

    def __init__(self, box: Box) -> None:
        """It begins at once."""
        self.took: list[float] = []
        self.over = False
        self._tasks = [asyncio.create_task(self._pages(box)), asyncio.create_task(self._names(box))]

    async def _pages(self, box: Box) -> None:
        while not self.over:
            began = time.perf_counter()
            await box.get(seconds=PATIENCE)
            self.took.append(time.perf_counter() - began)
            await asyncio.sleep(0.008)  # not more connections than a sandbox may begin

    async def _names(self, box: Box) -> None:
        count = 0
        while not self.over:
            began = time.perf_counter()
            await box.name(f"n{count}.w0.team-0.example.com", seconds=PATIENCE)
            self.took.append(time.perf_counter() - began)
            count += 1
            await asyncio.sleep(0.005)

    async def end(self) -> list[float]:
        """Stop; returns what the answers took, in seconds, in order of their ends."""
        self.over = True
        await asyncio.gather(*self._tasks)
        return self.took


def steps(policy: EffectivePolicy) -> list[tuple[str, float, float]]:
    """What putting a policy in force asks of each process: what, the CPU of all of it and of its longest step, in ms."""
    found = []
    began = time.process_time()
    payload = policy.lines()
    written = time.process_time() - began
    found.append(("control writes it for its workers", written, written))
    read, total, longest = walk(from_lines(payload))
    found.append(("a worker reads it", total, longest))
    _, total, longest = walk(compile_steps(read))
    found.append(("a worker compiles it", total, longest))
    return [(what, total * 1000, longest * 1000) for what, total, longest in found]


def walk[T](going: Generator[None, None, T]) -> tuple[T, float, float]:
    """Do steps to their end: what they return, the CPU of all and of the longest, in seconds."""
    longest = total = 0.0
    while True:
        began = time.process_time()
        try:
            next(going)
        except StopIteration as done:
            last = time.process_time() - began
            return done.value, total + last, max(longest, last)
        spent = time.process_time() - began
        longest, total = max(longest, spent), total + spent


async def swaps(
    large: EffectivePolicy, small: EffectivePolicy, folder: Path, rounds: int
) -> list[list[float]]:
    """What answers took while nothing happened, while the large rules were read, and while they came and went."""
    found: list[list[float]] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        config = configured(folder)
        async with fleet(Path(name)) as made:
            box = await made.box(small)
            await box.get()
            for step in ("nothing", "read", "swap"):
                client = Client(box)
                await asyncio.sleep(0.5)
                for _ in range(rounds):
                    if step == "nothing":
                        await asyncio.sleep(1)
                    elif step == "read":
                        await reread_rules(config, os.environ)
                    else:
                        await made.supervisor.adopt({box.id: large.model_copy()})
                        await made.supervisor.adopt({box.id: small.model_copy()})
                found.append(await client.end())
    return found


def main(arguments: Sequence[str]) -> int:
    """Measure and say what came of it."""
    rounds = int(arguments[0]) if arguments else 5
    say = sys.stdout.write
    say(f"{2000 * HOSTS:,} hosts in 2,000 rules; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n\n")
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folders = {rules: write(Path(name) / str(rules), rules) for rules in (10, 2000)}
        for rules, folder in folders.items():
            taken = [check(folder) for _ in range(rounds)]
            wall, cpu = (statistics.median(column) for column in zip(*taken, strict=True))
            say(f"egressd check, {rules:5} rules{wall:10.2f} s{cpu:10.2f} s of CPU\n")
        policies = {
            rules: asyncio.run(reread_rules(configured(folder), os.environ)).effective("bench")
            for rules, folder in folders.items()
        }
        compiled = {rules: compile_policy(policy) for rules, policy in policies.items()}
        tried = {rules: attempts(rules) for rules in policies}
        cost: dict[int, list[float]] = {10: [], 2000: []}
        for _ in range(8 * rounds):
            for rules, policy in compiled.items():
                cost[rules].append(decisions(policy, tried[rules]))
        for rules, samples in cost.items():
            say(
                f"a decision, {rules:7} rules{statistics.median(samples):10.1f} µs"
                f"   ({min(samples):.1f} to {max(samples):.1f})\n"
            )
        say("\nputting them in force, ms of CPU              all   longest step\n")
        for what, total, longest in steps(policies[2000]):
            say(f"{what:38}{total:10.1f}{longest:12.1f}\n")
        found = asyncio.run(swaps(policies[2000], policies[10], folders[2000], rounds))
    say("\nwhat a client waits for an answer, ms        median    99 of 100   longest\n")
    for what, took in zip(
        ("while nothing happens", "while they are read", "while they come and go"), found, strict=True
    ):
        rank = sorted(took)
        middle, high = statistics.median(rank), rank[int(len(rank) * 0.99)]
        say(
            f"{what:42}{middle * 1000:9.1f}{high * 1000:12.1f}{rank[-1] * 1000:10.1f}   ({len(rank)} answers)\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
