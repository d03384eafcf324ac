"""Performers make the moves: the same driver, in a sandbox of egressd and where there is none."""

from __future__ import annotations

import json
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from egressd.lab.demo import driver
from egressd.lab.demo.moves import DOCKER, Move

_PATIENCE = 5.0


class BrokeOff(Exception):
    """A performer ended before its time; the text is what it said."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the client saw, as the driver tells it."""

    ok: bool
    saw: str
    requests: int
    packets: int


class Performer:
    """One driver process with an end to its time; `make` has it make a move. `said` holds what it complained of."""

    def __init__(self, process: subprocess.Popen[Any], said: Path, docker: str, seconds: float) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self._moves: IO[str] = process.stdin
        self._outcomes: IO[str] = process.stdout
        self._said = said
        self._docker = docker
        self._late = False
        self._clock = threading.Timer(max(0.1, seconds), self._end_late)
        self._clock.daemon = True
        self._clock.start()

    def await_ready(self) -> None:
        """Waits for the driver's first word. Raises BrokeOff."""
        if self._outcomes.readline() != f"{driver.READY}\n":
            raise BrokeOff(self._why())

    def make(self, move: Move) -> Outcome:
        """Makes one move and waits for its outcome. Raises BrokeOff."""
        argv = [word.replace(DOCKER, self._docker) for word in move.argv]
        asked = {"tool": move.tool, "argv": argv, "wants": move.wants}
        try:
            self._moves.write(json.dumps(asked) + "\n")
            self._moves.flush()
            line = self._outcomes.readline()
        except (OSError, ValueError) as error:
            raise BrokeOff(self._why()) from error
        if not line.endswith("\n"):
            raise BrokeOff(self._why())
        told = json.loads(line)
        # Text from inside a sandbox goes to a terminal: nothing in it may steer one.
        told["saw"] = "".join(letter if letter.isprintable() else "?" for letter in told["saw"])
        return Outcome(**told)

    def finish(self) -> None:
        """Ends the driver and waits for what runs it. Raises BrokeOff when that did not end well."""
        self._moves.close()
        if self._ended() != 0:
            raise BrokeOff(self._why())

    def close(self) -> None:
        """Ends everything, whatever state it is in."""
        self._clock.cancel()
        if self.process.poll() is None:
            self.process.terminate()
            if self._ended() is None:
                self.process.kill()
                self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_late(self) -> None:
        self._late = True
        self.process.kill()

    def _ended(self) -> int | None:
        try:
            return self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            return None

    def _why(self) -> str:
        status = self._ended()
        if self._late:
            return "it took too long"
        said = self._said.read_text(errors="backslashreplace").strip()[-2000:]
        ended = "it does not end" if status is None else f"exit status {status}"
        return f"{ended}: {said or 'it said nothing'}"
