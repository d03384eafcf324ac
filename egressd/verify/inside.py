"""The probes' runner: names in, one a line; what each found, one JSON object a line.

Every probe runs in a process of its own, which may be killed, may change what it is, and may leave descriptors behind
without the next probe's seeing any of it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any

from egressd.verify import doors, environment, files, names, network, ports, power, processes, strangers, wire
from egressd.verify.probe import PROBES, UNTRIED, VERDICTS, Outcome, broke_off, safe
from egressd.verify.scene import Scene

SECONDS = 20.0
"""The longest that one probe may take."""

MODULES = (network, ports, names, strangers, power, doors, processes, files, environment)
"""Whose import fills PROBES."""

_MOST = 16_384
_DIED = "the probe ended without a word"


def made(name: str, scene: Scene, seconds: float = SECONDS) -> Outcome:
    """Make one probe in a process of its own and return what it found; total."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _attempt(name, scene, writing)
    os.close(writing)
    told, late = _read(reading, time.monotonic() + seconds)
    os.close(reading)
    if late:
        os.kill(child, signal.SIGKILL)
    _, ended = os.waitpid(child, 0)
    if late:
        return broke_off(f"not done after {seconds:g} s")
    try:
        verdict, detail = json.loads(told)
    except ValueError:
        return broke_off(f"{_DIED} (status {ended})")
    return Outcome(verdict if verdict in VERDICTS else UNTRIED, safe(str(detail)))


def _attempt(name: str, scene: Scene, writing: int) -> None:
    try:
        probe = PROBES.get(name)
        outcome = broke_off("there is no such probe") if probe is None else probe.attempt(scene)
    except BaseException as error:  # noqa: BLE001 - whatever it was, it is the outcome
        outcome = broke_off(f"{type(error).__name__}: {error}")
    try:
        os.write(writing, json.dumps(outcome).encode()[:_MOST])
    finally:
        os._exit(0)


def _read(reading: int, deadline: float) -> tuple[bytes, bool]:
    told = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reading], [], [], left)[0]:
            return told, True
        part = os.read(reading, _MOST)
        if not part:
            return told, False
        told += part


def say(told: Any) -> None:
    """Print one JSON line."""
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve standard input: first the scene, then names, to its end."""
    say({"ready": os.getpid(), "python": sys.version.split()[0], "uid": os.getuid()})
    scene = Scene(json.loads(sys.stdin.readline()))
    wire.WAY.lead(scene)
    for line in sys.stdin:
        began = time.monotonic()
        outcome = made(line.strip(), scene)
        say({"name": safe(line.strip()), **outcome._asdict(), "seconds": round(time.monotonic() - began, 3)})
