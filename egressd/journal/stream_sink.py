"""The journal as a stream: standard output, a pipe, a FIFO, a terminal, a socket or a device, whose reader may stop reading."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from egressd.journal.chain import BEGINNING, NOTHING, Line, Rest, digest
from egressd.journal.sinks import OPEN_FLAGS, Busy, JournalUnavailable, Standing, unavailable

STREAM_LINE_LIMIT = 4096 - 1
"""PIPE_BUF, pipe(7), less a newline to end a torn line: a write of up to PIPE_BUF to a pipe is whole or
does not happen, other writers or not."""

_REST_LIMIT = 64 * 1024


class StreamSink:
    """A pipe, FIFO, terminal, socket or device: written without waiting, line by line."""

    line_limit = STREAM_LINE_LIMIT

    def __init__(self, fd: int, name: str) -> None:
        self.problem = JournalUnavailable(f"{name}: nothing was tried yet")
        self._fd = fd
        self._name = name
        self._last = BEGINNING
        self._rest = b""
        mode = os.fstat(fd).st_mode
        self._socket = socket.socket(fileno=os.dup(fd)) if stat.S_ISSOCK(mode) else None
        # a pipe that could not be opened anew may still be in blocking mode, which others share with us
        self._polled = stat.S_ISFIFO(mode) and os.get_blocking(fd)

    @contextmanager
    def turn(self) -> Iterator[Standing]:
        """Nothing to hold; what half a line says is remembered."""
        rest = Rest(len(self._rest), digest(self._rest), ended=False) if self._rest else NOTHING
        yield Standing(self._last, BEGINNING, rest)

    def write(self, lines: Sequence[Line]) -> int:
        """Write each line whole or not at all where the kernel promises that, else as far as it goes."""
        for done, line in enumerate(lines):
            data = memoryview(b"\n" + line.text if self._rest else line.text)
            out = 0
            try:
                while out < len(data):
                    out += self._send(data[out:])
            except BlockingIOError:
                self.problem = Busy(f"{self._name}: its reader does not keep up")
            except OSError as error:
                self.problem = unavailable(self._name, error)
            if out < len(data):
                self._rest = (self._rest + bytes(data[:out]))[-_REST_LIMIT:]
                return done
            self._last, self._rest = line.link, b""
        return len(lines)

    def is_due(self, now: float) -> bool:  # noqa: ARG002 -- the protocol's
        """Never: a stream is its reader's to divide."""
        return False

    def rotate(self, now: float) -> None:
        """Nothing: a stream is its reader's to divide."""

    def sync(self) -> None:
        """Nothing: what a stream becomes is its reader's."""

    def fileno(self) -> int | None:
        """Return the descriptor, for a wait until it can be written."""
        return self._fd

    def close(self) -> None:
        """Close our own copy of the descriptor."""
        if self._socket is not None:
            self._socket.close()
        os.close(self._fd)

    def _send(self, data: memoryview) -> int:
        if self._socket is not None:
            return self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        if self._polled and not _takes_a_line(self._fd):
            raise BlockingIOError
        return os.write(self._fd, data)


def _takes_a_line(fd: int) -> bool:
    # POLLOUT on a pipe means room for PIPE_BUF bytes, which is the longest line we write
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))


def own_stdout() -> int:
    """Return a descriptor for standard output whose non-blocking mode is ours alone.

    A regular file is only duplicated: whoever else writes to it shares the offset, and two offsets would
    overwrite.
    """
    try:
        if stat.S_ISREG(os.fstat(1).st_mode) or stat.S_ISSOCK(os.fstat(1).st_mode):
            return fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
        try:
            return os.open("/proc/self/fd/1", (OPEN_FLAGS & ~os.O_NOFOLLOW) | os.O_WRONLY)
        except OSError:  # a pipe made by another uid
            return fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError as error:
        raise unavailable("standard output", error) from error
