"""Which descriptors a command gets for the caller's."""

import os
import pty
import socket
from pathlib import Path

import pytest

from egressd.wiring.terminal import Streams


def kinds(streams: Streams) -> list[str]:
    return [os.readlink(f"/proc/self/fd/{number}").split(":")[0] for number in streams.child]


def test_files_and_pipes_are_given_as_they_are(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with (tmp_path / "out").open("w") as out, Streams((reading, out.fileno(), writing)) as streams:
        assert streams.child == (reading, out.fileno(), writing)
        assert not streams.controlling
    os.close(reading)
    os.close(writing)


def test_a_directory_becomes_null() -> None:
    """From an open directory of the host, openat(2) leads to the rest of its files."""
    directory = os.open("/", os.O_RDONLY)
    with Streams((directory, directory, directory)) as streams:
        assert kinds(streams) == ["/dev/null"] * 3
    os.close(directory)


def test_a_closed_descriptor_becomes_null() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    os.close(writing)
    with Streams((reading, writing, writing)) as streams:
        assert kinds(streams) == ["/dev/null"] * 3


def test_a_socket_becomes_a_pipe() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, Streams((theirs.fileno(),) * 3) as streams:
        assert kinds(streams) == ["pipe"] * 3


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1, 2), (2,)])
def test_a_terminal_becomes_another_terminal(which: tuple[int, ...]) -> None:
    outer, inner = pty.openpty()
    null = os.open(os.devnull, os.O_RDWR)
    stdio = tuple(inner if number in which else null for number in range(3))
    with Streams((stdio[0], stdio[1], stdio[2])) as streams:
        for number in range(3):
            if number in which:
                assert os.isatty(streams.child[number])
                assert os.ttyname(streams.child[number]) != os.ttyname(inner)
            else:
                assert streams.child[number] == null
        # A terminal to which nobody could type must not be the controlling one: a password prompt would hang.
        assert streams.controlling == (0 in which)
    for descriptor in (outer, inner, null):
        os.close(descriptor)


def test_nothing_is_left_open_or_running() -> None:
    before = set(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair()
    outer, inner = pty.openpty()
    with ours, theirs:
        with Streams((inner, theirs.fileno(), inner)) as streams:
            streams.start()
        with Streams((theirs.fileno(), inner, theirs.fileno())):
            pass
    os.close(outer)
    os.close(inner)
    assert set(os.listdir("/proc/self/fd")) == before
