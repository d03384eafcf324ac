"""Sinks: where lines go. A file, shared politely with other runs, or a stream whose reader may stop reading.

Neither waits for a reader: `write` gives back how many whole lines got out, and the rest is the caller's to
try again. A sink never removes a byte; where half a line got out, the next one begins on a new line.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

LINE_LIMIT = 16 * 1024
STREAM_LINE_LIMIT = 4096 - 1
"""PIPE_BUF, pipe(7), less a newline to end a torn line: a write of up to PIPE_BUF to a pipe is whole or
does not happen, other writers or not."""

STDOUT = "-"

_TAIL = 2 * LINE_LIMIT
_LOCK_TRIES = 20
_LOCK_PAUSE = 0.0005  # another run holds the lock for one write
_FLAGS = os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


class JournalUnavailable(Exception):
    """The journal cannot be written now, so what needed the record is denied; the text is for an operator."""


class Busy(JournalUnavailable):
    """The journal would have to be waited for: its reader is slow, or another run holds the file."""


class Sink(Protocol):
    """Takes whole lines, one turn at a time."""

    line_limit: int
    problem: JournalUnavailable

    @contextmanager
    def turn(self) -> Iterator[int]:
        """Hold the sink for one write; gives the last `seq` in it, 0 if none; raises JournalUnavailable."""

    def write(self, lines: Sequence[bytes]) -> int:
        """Within a turn, return how many whole lines got out; if not all, `problem` says why."""

    def fileno(self) -> int | None:
        """Return a descriptor that turns writable when a Busy sink is worth another try, None without one."""

    def close(self) -> None:
        """Let go of the descriptor."""


def open_sink(target: Path | str) -> Sink:
    """Return the sink for a path, or for standard output where `target` is `-`.

    A new file is 0600, in directories that are 0700 where they are new. Refused, with JournalUnavailable: a
    symbolic link, anything but a file, FIFO or character device, and a file that anybody may write.
    """
    if str(target) == STDOUT:
        return StreamSink(_own_stdout(), "standard output")
    path = Path(target)
    try:
        if _is_stream(path):
            return StreamSink(_open(path, os.O_WRONLY), str(path))
        return FileSink(path)
    except OSError as error:
        raise _unavailable(path, error) from error


class FileSink:
    """A regular file, locked for each write so that several runs can share it and its numbering."""

    line_limit = LINE_LIMIT

    def __init__(self, path: Path) -> None:
        self.problem = JournalUnavailable(f"{path}: nothing was tried yet")
        self._path = path
        self._size = -1  # what the last look left behind; another size means another writer
        self._last = 0
        self._torn = False
        self._fd = _open(path, os.O_RDWR)

    @contextmanager
    def turn(self) -> Iterator[int]:
        """Hold the file's lock for one write and yield the last number used in it."""
        try:
            self._lock()
        except OSError as error:
            raise _unavailable(self._path, error) from error
        try:
            self._look()
            yield self._last
        except OSError as error:
            raise _unavailable(self._path, error) from error
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def write(self, lines: Sequence[bytes]) -> int:
        """Append the lines in one write where the disk lets us."""
        lead = b"\n" if self._torn else b""
        data = memoryview(lead + b"".join(lines))
        out = 0
        try:
            while out < len(data):
                out += os.write(self._fd, data[out:])
        except OSError as error:
            self.problem = _unavailable(self._path, error)
        whole, torn = _whole_lines(lines, out - len(lead))
        if out:
            self._torn = torn
        self._size += out
        return whole

    def fileno(self) -> int | None:
        """None: a lock cannot be polled for."""
        return None

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _lock(self) -> None:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOCK_PAUSE)
                continue
            if os.fstat(self._fd).st_nlink:
                return
            # removed under us: what we wrote on would vanish with the descriptor
            fresh = _open(self._path, os.O_RDWR)
            os.close(self._fd)
            self._fd, self._size = fresh, -1
        raise Busy(f"{self._path}: another process holds its lock")

    def _look(self) -> None:
        size = os.fstat(self._fd).st_size
        if size == self._size:
            return
        tail = os.pread(self._fd, _TAIL, max(0, size - _TAIL))
        self._size, self._last = size, _last_number(tail)
        self._torn = bool(tail) and not tail.endswith(b"\n")


class StreamSink:
    """A pipe, FIFO, terminal, socket or device: written without waiting, line by line."""

    line_limit = STREAM_LINE_LIMIT

    def __init__(self, fd: int, name: str) -> None:
        self.problem = JournalUnavailable(f"{name}: nothing was tried yet")
        self._fd = fd
        self._name = name
        self._torn = False
        mode = os.fstat(fd).st_mode
        self._socket = socket.socket(fileno=os.dup(fd)) if stat.S_ISSOCK(mode) else None
        # a pipe that could not be opened anew may still be in blocking mode, which others share with us
        self._polled = stat.S_ISFIFO(mode) and os.get_blocking(fd)

    @contextmanager
    def turn(self) -> Iterator[int]:
        """Nothing to hold, nothing to read back."""
        yield 0

    def write(self, lines: Sequence[bytes]) -> int:
        """Write each line whole or not at all where the kernel promises that, else as far as it goes."""
        for done, line in enumerate(lines):
            data = memoryview(b"\n" + line if self._torn else line)
            out = 0
            try:
                while out < len(data):
                    out += self._send(data[out:])
            except BlockingIOError:
                self.problem = Busy(f"{self._name}: its reader does not keep up")
            except OSError as error:
                self.problem = _unavailable(self._name, error)
            if out:
                self._torn = out < len(data)
            if out < len(data):
                return done
        return len(lines)

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


def _own_stdout() -> int:
    """Return a descriptor for standard output whose non-blocking mode is ours alone.

    A regular file is only duplicated: whoever else writes to it shares the offset, and two offsets would
    overwrite.
    """
    try:
        if stat.S_ISREG(os.fstat(1).st_mode) or stat.S_ISSOCK(os.fstat(1).st_mode):
            return fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
        try:
            return os.open("/proc/self/fd/1", (_FLAGS & ~os.O_NOFOLLOW) | os.O_WRONLY)
        except OSError:  # a pipe made by another uid
            return fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError as error:
        raise _unavailable("standard output", error) from error


def _is_stream(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISLNK(mode):
        raise JournalUnavailable(
            f"{path}: is a symbolic link; name the file itself, or `-` for standard output"
        )
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def _open(path: Path, access: int) -> int:
    create = os.O_CREAT if access == os.O_RDWR else 0
    if create:
        _make_parents(path.parent)
    fd = os.open(path, _FLAGS | access | create, 0o600)
    mode = os.fstat(fd).st_mode
    # asked again of the open file: the path may have been exchanged since it was looked at
    fits = stat.S_ISREG(mode) if create else stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)
    if not fits or (create and mode & stat.S_IWOTH):
        os.close(fd)
        what = "anybody may write to it" if fits else "is no regular file, FIFO or character device"
        raise JournalUnavailable(f"{path}: {what}")
    return fd


def _make_parents(directory: Path) -> None:
    if not directory.is_dir():
        _make_parents(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


def _last_number(tail: bytes) -> int:
    for line in reversed(tail.split(b"\n")):
        number = _number_of(line)
        if number:
            return number
    return 0


def _number_of(line: bytes) -> int:
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError):
        return 0
    number = fields.get("seq") if isinstance(fields, dict) else None
    return number if type(number) is int and 0 < number < 2**53 else 0


def _whole_lines(lines: Sequence[bytes], out: int) -> tuple[int, bool]:
    """Return how many of the lines the first `out` bytes cover, and whether they end inside one."""
    for index, line in enumerate(lines):
        if out < len(line):
            return index, out > 0
        out -= len(line)
    return len(lines), False


def _unavailable(where: Path | str, error: OSError) -> JournalUnavailable:
    return JournalUnavailable(f"{where}: {os.strerror(error.errno) if error.errno else error}")
