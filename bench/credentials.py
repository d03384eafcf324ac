"""What it costs to attach a credential: the same small request with and without one, in pairs, on connections that stay open.

    python -m bench.credentials [PAIRS]

One sandbox asks an origin of the lab by two names: a rule attaches a credential, whose lease is warm, to the one and nothing to
the other; all else is equal. Each pair asks both, in an order that alternates, so that a busy moment of the machine meets both.
The last line has nothing attached to either: what it differs by is chance.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from egressd.lab import Lab, topology
from egressd.lab.stand import HERE, Stand

ROOT = Path(__file__).resolve().parent.parent
WITH, WITHOUT, NEITHER = (f"{name}.lab-origin.com" for name in ("with", "without", "neither"))
RULES = f"""schema: 1
profile: lab
owner: bench
allow:
  - id: with
    hosts: [{WITH}]
    requests: ["GET /**"]
    credential: key
  - id: without
    hosts: [{WITHOUT}, {NEITHER}]
    requests: ["GET /**"]
"""
CREDENTIALS = f"""schema: 1
credentials:
  key:
    for: [{{hosts: [{WITH}], requests: ["GET /**"]}}]
    source: {{file: {HERE}/secrets/key}}
    attach: {{header: x-api-key}}
"""
BLOCKS = 10

CLIENT = """
import http.client, json, ssl, sys, time
pairs, path, names = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
links = [http.client.HTTPSConnection(name, timeout=20, context=ssl.create_default_context()) for name in names]
def ask(link):
    began = time.perf_counter()
    link.request("GET", path)
    answer = link.getresponse()
    answer.read()
    assert answer.status == 200, answer.status
    return time.perf_counter() - began
for link in links * 20:
    ask(link)
taken = []
for turn in range(pairs):
    order = (0, 1) if turn % 2 else (1, 0)
    both = [0.0, 0.0]
    for which in order:
        both[which] = ask(links[which])
    taken.append(both)
print(json.dumps(taken))
"""


def measure(stand: Stand, pairs: int, path: str, first: str = WITH) -> list[tuple[float, float]]:
    """Seconds with and without, pair by pair; raises RuntimeError with what the client said."""
    argv = ["/usr/bin/python3", "-Ic", CLIENT, str(pairs), path, first, WITHOUT]
    ran = stand.run(argv, timeout=300)
    if ran.returncode != 0:
        raise RuntimeError(ran.stderr)
    return [(one, other) for one, other in json.loads(ran.stdout)]


def report(title: str, pairs: list[tuple[float, float]]) -> str:
    """One line: both medians, their ratio, and the least and the greatest ratio of ten parts of the run."""

    def ratio(part: list[tuple[float, float]]) -> float:
        with_, without = (statistics.median(column) for column in zip(*part, strict=True))
        return float(with_ / without)

    size = max(1, len(pairs) // BLOCKS)
    parts = [ratio(pairs[start : start + size]) for start in range(0, len(pairs) - size + 1, size)]
    with_, without = (statistics.median(column) * 1e6 for column in zip(*pairs, strict=True))
    return (
        f"{title:24}{with_:9.0f}{without:9.0f}{(ratio(pairs) - 1) * 100:+9.1f} %"
        f"  ({(min(parts) - 1) * 100:+.1f} to {(max(parts) - 1) * 100:+.1f} %)\n"
    )


def main(arguments: Sequence[str]) -> int:
    """Measure and say what came of it; returns the exit status."""
    pairs = int(arguments[0]) if arguments else 2000
    with Lab.build() as lab:
        for name in (WITH, WITHOUT, NEITHER):
            lab.set_name(name, a=[topology.API])
        with Stand(lab, RULES, shipped=ROOT / "rules", credentials=CREDENTIALS) as stand:
            stand.secret("key", "sk-bench-0123456789abcdefghijklmnopqrstuvwxyz")
            lines = [
                report("GET of 1 byte", measure(stand, pairs, "/n")),
                report("GET of 1 MB", measure(stand, max(BLOCKS, pairs // 20), "/big?bytes=1000000")),
                report("neither (chance)", measure(stand, pairs, "/n", NEITHER)),
            ]
    say = sys.stdout.write
    say(
        f"a credential with a warm lease: microseconds at the median, {pairs} pairs in turn (1 MB: a twentieth), "
    )
    say(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n\n")
    say(f"{'':24}{'with':>9}{'without':>9}{'median':>11}  (tenths of the run)\n{''.join(lines)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
