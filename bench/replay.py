"""How fast recorded traffic is judged again, and in how much memory: `egressd replay` and `egressd diff --journal`.

    python -m bench.replay [RECORDS]

A journal of 1,000,000 decisions, nearly every one for another path, and one of a tenth of it; the same rules as shipped, against
a copy that allows less. Memory is the most that the process had at once (ru_maxrss): equal for both journals, it does not grow.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = (
    ("files.pythonhosted.org", "GET", "/packages/{}/x.whl", "allow", "rule", "pypi"),
    ("registry.npmjs.org", "GET", "/package-{}", "allow", "rule", "npm"),
    ("registry.npmjs.org", "PUT", "/package-{}", "deny", "method_not_allowed", None),
    ("docs.python.org", "GET", "/3/{}.html", "allow", "rule", "documentation"),
    ("nobody-{}.example.com", "GET", "/", "deny", "not_allowed", None),
)


def write(path: Path, records: int) -> None:
    """Write a journal of so many decisions."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(records):
            host, method, target, verdict, reason, rule = KINDS[number % len(KINDS)]
            fields = {
                "ts": "2026-11-30T12:00:00.000Z",
                "event": "decision",
                "sandbox": f"sbx-{number % 50:020x}",
                "attempt_id": f"{number:028x}",
                "root_id": f"{number:028x}",
                "profile": "coding-agent",
                "policy": "0123456789abcdef",
                "layer": "request",
                "verdict": verdict,
                "reason": reason,
                "host": host.format(number),
                "port": 443,
                "scheme": "https",
                "method": method,
                "path": target.format(number),
            }
            file.write(json.dumps(fields | ({"rule": rule} if rule else {})) + "\n")


def timed(arguments: Sequence[str]) -> tuple[float, float, float]:
    """Run egressd: seconds by the wall, of CPU, and MiB."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "egressd", *arguments],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):
        raise ChildProcessError(f"egressd {arguments[0]} ended with {process.returncode}")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main(arguments: Sequence[str]) -> int:
    """Measure and say what came of it."""
    records = int(arguments[0]) if arguments else 1_000_000
    say = sys.stdout.write
    rules = str(ROOT / "rules")
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        less = Path(name) / "rules"
        shutil.copytree(rules, less)
        profile = less / "profiles" / "coding-agent.yaml"
        text = profile.read_text(encoding="utf-8").replace("  - service: npm\n", "")
        profile.write_text(
            "".join(line for line in text.splitlines(True) if "npmjs" not in line), encoding="utf-8"
        )
        verbs = {
            "replay": ["replay", "--rules", rules],
            "diff --journal": ["diff", rules, str(less), "--journal"],
        }
        say(
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n\n{'':32}wall     CPU  records/min of CPU    MiB\n"
        )
        for count in (records // 10, records):
            journal = Path(name) / f"{count}.jsonl"
            write(journal, count)
            for verb, line in verbs.items():
                wall, cpu, room = timed([*line, str(journal)])
                say(f"{verb:16}{count:10,}{wall:8.1f} s{cpu:6.1f} s{count / cpu * 60:20,.0f}{room:7.0f}\n")
            journal.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
