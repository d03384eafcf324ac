"""Run small programs to their end from a single-threaded process, several at a time if wanted.

Not subprocess: importing it costs a third of the maker's start-up time. Input and output are memfds, so nothing can
block on a full pipe.
"""

import os
from collections.abc import Sequence
from typing import Final

from egressd.wiring.errors import WiringError

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENVIRONMENT: Final = {"PATH": PATH, "LC_ALL": "C"}


class Program:
    """A program that has been started; `output` waits for it."""

    def __init__(self, argv: Sequence[str], text: str = "", *, hint: str = "") -> None:
        self.command = " ".join(argv)
        self._hint = hint
        self._out = os.memfd_create("out", os.MFD_CLOEXEC)
        self._err = os.memfd_create("err", os.MFD_CLOEXEC)
        stdin = os.memfd_create("in", os.MFD_CLOEXEC)
        try:
            os.write(stdin, text.encode())
            os.lseek(stdin, 0, os.SEEK_SET)
            actions = [(os.POSIX_SPAWN_DUP2, fd, to) for to, fd in enumerate((stdin, self._out, self._err))]
            self._pid = os.posix_spawnp(argv[0], list(argv), _ENVIRONMENT, file_actions=actions)
        except OSError as error:
            os.close(self._out)
            os.close(self._err)
            raise WiringError.from_os(self.command, error, hint) from error
        finally:
            os.close(stdin)

    def output(self) -> str:
        """What it printed; WiringError with its complaint if it failed."""
        _, status = os.waitpid(self._pid, 0)
        out, err = _all(self._out), _all(self._err)
        if status != 0:
            raise WiringError(self.command, err or f"wait status {status}", self._hint)
        return out


def _all(descriptor: int) -> str:
    try:
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
    finally:
        os.close(descriptor)
