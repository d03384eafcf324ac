"""The command's standard streams: its own terminal instead of ours, and never a socket or a directory of ours.

A terminal of the caller in the sandbox's hands could be typed into (TIOCSTI) and reconfigured, and it outlives the
sandbox. A socket carries its own network, whatever namespace the command is in. An open directory leads back into the
host's files by openat(2).

Relays are threads, not event-loop callbacks: setting O_NONBLOCK on a stream that is shared with the caller's shell would
outlast us.
"""

import contextlib
import fcntl
import os
import select
import stat
import termios
import threading
import tty
from typing import Any, Final, Self

_CHUNK: Final = 65536
_JOIN_SECONDS: Final = 1.0
_PLAIN_DEVICES: Final = {os.makedev(1, minor) for minor in (3, 5, 7, 8, 9)}
"""null, zero, full, random, urandom (Documentation/admin-guide/devices.txt)."""


class Streams:
    """The three descriptors for a command, and the relays behind them. A context manager: entering starts nothing,
    leaving stops the relays and restores the caller's terminal."""

    def __init__(self, stdio: tuple[int, int, int]) -> None:
        self._relays: list[_Relay] = []
        self._ours: list[int] = []
        self._theirs: list[int] = []
        self._outer: int | None = None
        self._saved: list[Any] | None = None
        self._master = -1
        terminals = [number for number in stdio if _is_terminal(number)]
        self.controlling = bool(terminals) and terminals[0] == stdio[0] and _is_terminal(stdio[0])
        if terminals:
            self._open_terminal(stdio, terminals)
        self.child = (
            self._given(stdio[0], reading=True),
            self._given(stdio[1], reading=False),
            self._given(stdio[2], reading=False),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """The command has its copies: close ours of its ends and begin to relay."""
        self._release()
        if self.controlling and self._outer is not None:
            self._saved = termios.tcgetattr(self._outer)
            tty.setraw(
                self._outer, termios.TCSADRAIN
            )  # not FLUSH: what was typed ahead is meant for the command
        for relay in self._relays:
            relay.start()

    def resize(self) -> None:
        """Give the command's terminal the size of the caller's."""
        if self._outer is not None and self._master >= 0:
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(self._outer, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def close(self) -> None:
        """Relay what is still on its way, then stop; the caller's terminal is as it was.

        Blocks until the caller's side has taken the command's last output: not for an event loop's thread.
        """
        self._release()
        for relay in self._relays:
            relay.stop()
        if self._saved is not None and self._outer is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._outer, termios.TCSADRAIN, self._saved)
            self._saved = None
        for descriptor in self._ours:
            os.close(descriptor)
        self._ours.clear()
        self._relays.clear()
        self._master = -1

    def _release(self) -> None:
        for descriptor in self._theirs:
            os.close(descriptor)
        self._theirs.clear()

    def _open_terminal(self, stdio: tuple[int, int, int], terminals: list[int]) -> None:
        self._outer = terminals[0]
        self._master, slave = os.openpty()
        self._ours.append(self._master)
        self._theirs.append(slave)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(slave, termios.TCSANOW, termios.tcgetattr(self._outer))
        self.resize()
        shown = next((number for number in (stdio[1], stdio[2]) if number in terminals), self._outer)
        if self.controlling:
            self._relays.append(_Relay(stdio[0], self._master, last=False))
        self._relays.append(_Relay(self._master, shown, last=True))

    def _given(self, number: int, *, reading: bool) -> int:
        if _is_terminal(number):
            return self._theirs[0]
        try:
            found = os.fstat(number)
        except OSError:  # closed by the caller
            return self._null()
        kind = stat.S_IFMT(found.st_mode)
        if kind in (stat.S_IFREG, stat.S_IFIFO) or (kind == stat.S_IFCHR and found.st_rdev in _PLAIN_DEVICES):
            return number
        if kind == stat.S_IFDIR:
            return self._null()
        read_end, write_end = os.pipe()
        if reading:
            self._theirs.append(read_end)
            self._relays.append(_Relay(number, write_end, last=False, close_sink=True))
            return read_end
        self._theirs.append(write_end)
        self._ours.append(read_end)
        self._relays.append(_Relay(read_end, number, last=True))
        return write_end

    def _null(self) -> int:
        descriptor = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._theirs.append(descriptor)
        return descriptor


def _is_terminal(number: int) -> bool:
    try:
        return os.isatty(number)
    except OSError:
        return False


class _Relay:
    """One direction, in a thread: copies until the source ends, or until it is stopped. `last`: what the command wrote,
    so stopping waits for the end of it."""

    def __init__(self, source: int, sink: int, *, last: bool, close_sink: bool = False) -> None:
        self._source = source
        self._sink = sink
        self._last = last
        self._close_sink = close_sink
        self._wake, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._run, name="egressd-relay", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        if self._thread.ident is not None:
            if self._last:
                self._thread.join()
            os.close(self._stop)
            self._stop = -1
            self._thread.join(_JOIN_SECONDS)
        else:
            os.close(self._stop)
            if self._close_sink:
                os.close(self._sink)
        os.close(self._wake)

    def _run(self) -> None:
        try:
            poller = select.poll()
            poller.register(self._source, select.POLLIN)
            poller.register(self._wake, select.POLLIN)
            while True:
                ready = [descriptor for descriptor, _ in poller.poll()]
                if self._source not in ready:
                    return
                data = os.read(self._source, _CHUNK)
                if not data:
                    return
                view = memoryview(data)
                while view:
                    view = view[os.write(self._sink, view) :]
        except OSError:
            return  # EIO: the last user of the terminal is gone. EPIPE: nobody reads what we relay.
        finally:
            if self._close_sink:
                os.close(self._sink)
