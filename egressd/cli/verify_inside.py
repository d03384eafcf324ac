"""A program of the inside half at work: sent to where it runs, asked one line at a time, never believed in more than that."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import IO, Any, Self

from egressd.verify.bundle import LAUNCHER, bundle
from egressd.verify.probe import LONGEST, VERDICTS, Outcome, Probe, broke_off, safe

_LINE = 64 * 1024
_CHUNK = 16_384
_PATIENCE = 3.0
_NO_PYTHON = "no Python 3 with ssl can be run there"
_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3", "/bin/python3", "python3", "python")
"""The system's first: one that the workspace brings along might say what its owner likes."""
_START = f"""\
for python in {" ".join(_PYTHONS)}; do
    "$python" -I -S -c 'import ssl, sys; sys.exit(sys.version_info < (3, 8))' >/dev/null 2>&1 &&
        exec "$python" -I -S -u -c "$0"
done
echo '{_NO_PYTHON}' >&2
exit 127
"""


class BrokeOff(Exception):
    """The program ended or fell silent before its time; the text is what it said."""


def argv() -> list[str]:
    """Return the command that finds a Python and starts a program of ours in it."""
    return ["/bin/sh", "-c", _START, LAUNCHER]


class Inside:
    """One program; made from the process that `argv` is, with pipes for its input and output, and the file of its complaints."""

    def __init__(self, process: subprocess.Popen[Any], said: Path, entry: str = "inside") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._in: IO[bytes] = process.stdin
        self._out: IO[bytes] = process.stdout
        self._said = said
        self._held = b""
        self._send_program(bundle(entry))

    def _send_program(self, program: bytes) -> None:
        self._write(b"%d\n" % len(program) + program)

    def _write(self, data: bytes) -> None:
        try:
            self._in.write(data)
            self._in.flush()
        except (OSError, ValueError) as error:
            raise BrokeOff(self.why()) from error

    def tell(self, told: object) -> None:
        """Send one JSON line. Raises BrokeOff."""
        self._write(json.dumps(told).encode() + b"\n")

    def hear(self, seconds: float) -> dict[str, Any]:
        """Return the next JSON object of its output, read within a limit of size and time. Raises BrokeOff."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._held:
            left = max(0.0, deadline - time.monotonic())
            if len(self._held) > _LINE or not select.select([self._out], [], [], left)[0]:
                raise BrokeOff(
                    f"nothing came in {seconds:g} s" if len(self._held) <= _LINE else "it says too much"
                )
            part = os.read(self._out.fileno(), _CHUNK)
            if not part:
                raise BrokeOff(self.why())
            self._held += part
        line, _, self._held = self._held.partition(b"\n")
        try:
            told = json.loads(line)
        except ValueError:
            raise BrokeOff(f"it said {safe(line[:80].decode('latin-1'))!r}") from None
        if not isinstance(told, dict):
            raise BrokeOff("it said something else")
        return told

    def make(self, probe: Probe, seconds: float) -> tuple[Outcome, float]:
        """Have it make a probe: (what it found, the seconds it took). Raises BrokeOff."""
        self._write(probe.name.encode() + b"\n")
        told = self.hear(seconds)
        verdict, detail, took = told.get("verdict"), told.get("detail"), told.get("seconds")
        if told.get("name") != probe.name or verdict not in VERDICTS or not isinstance(detail, str):
            return broke_off("what it said is no outcome of this probe"), 0.0
        return Outcome(str(verdict), safe(detail)), float(took) if isinstance(took, int | float) else 0.0

    def finish(self) -> int:
        """End it and return its exit status. Raises BrokeOff when it does not end."""
        with contextlib.suppress(OSError):
            self._in.close()
        try:
            return int(self.process.wait(_PATIENCE))
        except subprocess.TimeoutExpired:
            raise BrokeOff("it does not end") from None

    def close(self) -> None:
        """End everything, whatever state it is in."""
        with contextlib.suppress(OSError):
            self._in.close()
        for end in (None, self.process.terminate, self.process.kill):
            if end is not None:
                end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_PATIENCE)
                break
        self._out.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def why(self) -> str:
        """Say how it ended, in its own words."""
        try:
            status: int | None = self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            status = None
        try:
            said = self._said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            said = []
        ended = "it does not end" if status is None else f"exit status {status}"
        words = "; ".join(line for line in said[-4:] if line)
        return safe(f"{words or 'it said nothing'} ({ended})"[-LONGEST:])
