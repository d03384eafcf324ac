"""Fuzz one target: `python -m tests.fuzz NAME [SECONDS]`; exit 1 when an input broke a law, which is then in `found/NAME/`.

By atheris (libFuzzer) where it is installed, else by `evolution`. What reaches new code is kept in `.fuzz/NAME` and
is where the next run begins. Ends with one JSON line: what was shown.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOUND = HERE / "found"
CORPUS = ROOT / ".fuzz"
DRIVEN = "--driven"
_PULSE = re.compile(r"#(\d+)\s+(\w+)\s+cov: (\d+) ft: \d+ corp: (\d+)/")


def main(arguments: list[str]) -> int:
    """Fuzz, and say every half minute how far it is."""
    if arguments and arguments[0] == DRIVEN:
        return _driven(arguments[1], arguments[2:])
    name, seconds = arguments[0], float(arguments[1]) if len(arguments) > 1 else 600.0
    corpus, found = CORPUS / name, FOUND / name
    corpus.mkdir(parents=True, exist_ok=True)
    found.mkdir(parents=True, exist_ok=True)
    before = set(found.iterdir())
    run = _by_atheris if importlib.util.find_spec("atheris") else _by_evolution
    began = time.monotonic()
    shown = run(name, seconds, corpus, found)
    crashes = sorted(str(path.relative_to(ROOT)) for path in set(found.iterdir()) - before)
    if not any(found.iterdir()):
        found.rmdir()
    shown |= {"target": name, "seconds": round(time.monotonic() - began), "found": crashes}
    sys.stdout.write(json.dumps(shown) + "\n")
    return 1 if crashes or shown.get("failed") else 0


def _say(name: str, began: float, inputs: int, covered: int, kept: int) -> None:
    spent = time.monotonic() - began
    sys.stderr.write(f"fuzz {name}: {spent:4.0f} s, {inputs:,} inputs, {covered:,} covered, {kept} kept\n")
    sys.stderr.flush()


def _by_atheris(name: str, seconds: float, corpus: Path, found: Path) -> dict[str, Any]:
    """Run libFuzzer in a process of its own, for it ends the one that it runs in."""
    began = told = time.monotonic()
    options = [
        f"-max_total_time={seconds:.0f}",
        "-timeout=10",
        "-rss_limit_mb=2048",
        f"-artifact_prefix={found}/",
    ]
    command = [sys.executable, "-m", "tests.fuzz", DRIVEN, name, *options, str(corpus)]
    first, last, tail = 0, (0, 0, 0), list[str]()
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, errors="replace", cwd=ROOT
    ) as child:
        assert child.stderr is not None
        for line in child.stderr:
            pulse = _PULSE.search(line)
            if pulse is None:
                tail = [*tail, line][-40:]
                continue
            last = int(pulse[1]), int(pulse[3]), int(pulse[4])
            first = first or (last[1] if pulse[2] == "INITED" else 0)
            if time.monotonic() - told >= 30:
                told = time.monotonic()
                _say(name, began, *last)
    _say(name, began, *last)
    if child.returncode < 0:
        tail.append(f"fuzz {name}: ended by signal {-child.returncode} from outside: nothing was shown\n")
    if child.returncode:
        sys.stderr.write("".join(tail))
    return {
        "driver": "atheris",
        "inputs": last[0],
        "covered": [first, last[1]],
        "kept": last[2],
        "failed": bool(child.returncode),
    }


def _driven(name: str, options: list[str]) -> int:
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["egressd"]):
        target = importlib.import_module("tests.fuzz.catalogue").TARGETS[name]
    corpus = Path(options[-1])
    for seed in target.seeds:
        (corpus / hashlib.sha1(seed, usedforsecurity=False).hexdigest()).write_bytes(seed)
    words = corpus.parent / f"{name}.words"
    words.write_text(
        "".join('"' + "".join(f"\\x{byte:02x}" for byte in word) + '"\n' for word in target.words)
    )
    limits = [f"-max_len={target.most}", f"-dict={words}", "-len_control=0", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *limits, *options], target.check)
    atheris.Fuzz()
    return 0


def _by_evolution(name: str, seconds: float, corpus: Path, found: Path) -> dict[str, Any]:
    from tests.fuzz.catalogue import TARGETS
    from tests.fuzz.evolution import evolve

    target, began, steps = TARGETS[name], time.monotonic(), list[tuple[int, int, int]]()

    def progress(*step: int) -> None:
        steps.append((step[0], step[1], step[2]))
        _say(name, began, *step)

    inputs = [*target.seeds, *(path.read_bytes() for path in sorted(corpus.iterdir()))]
    tried, broke, error = evolve(target, seconds, inputs, progress)
    for data in inputs:
        (corpus / hashlib.sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)
    if broke is not None:
        traceback.print_exception(error)
        (found / f"crash-{hashlib.sha1(broke, usedforsecurity=False).hexdigest()}").write_bytes(broke)
    _, covered, kept = steps[-1] if steps else (0, 0, len(inputs))
    return {
        "driver": "evolution",
        "inputs": tried,
        "covered": [steps[0][1] if steps else 0, covered],
        "kept": kept,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
