"""The daemon's Unix sockets, and who may speak there: egressd's own uid or root, and nobody who is in a sandbox.

A socket is a file of mode 0600 before anybody can connect to it. The kernel says who connected (SO_PEERCRED in unix(7)): a peer
of another uid is refused even where the file was opened up. A rootless sandbox has its caller's uid, though; what tells it apart
is that it lives in a pid namespace of its own, below or beside ours. So a peer from any other pid namespace is refused, whatever
was mounted where.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from egressd.control.estate import StateError

BACKLOG: Final = 512
_PATIENCE: Final = struct.pack("ll", 10, 0)
"""A struct timeval."""
_NOBODY: Final = (errno.ENOENT, errno.ECONNREFUSED, errno.ENOTDIR, None)
"""None: the path is longer than any socket's."""
_UCRED: Final = struct.Struct("iII")
_NSPID: Final = re.compile(r"^NSpid:((?:\t\d+)+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end, as the kernel saw it at connect(2)."""

    pid: int
    uid: int


def listen(path: Path, kind: socket.SocketKind) -> socket.socket:
    """Return a listening, non-blocking socket at `path`; one that a killed predecessor left there is replaced.

    Raises StateError: somebody listens there, or it cannot be made.
    """
    sock = socket.socket(socket.AF_UNIX, kind)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _clear(path, kind)
        sock.bind(str(path))
        path.chmod(0o600)  # before listen(2): until then every connection is refused
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise StateError(
            f"{path}: {error.strerror or error}", "control_socket says where it is made"
        ) from None
    except BaseException:
        sock.close()
        raise
    return sock


def connect(path: Path, kind: socket.SocketKind) -> socket.socket | None:
    """Return a socket that is connected to a daemon, None where none listens; raises OSError where that cannot be told."""
    sock = socket.socket(socket.AF_UNIX, kind)
    try:
        # Where many connect at once the backlog may be full: only a blocking connect(2) waits for its turn, this long.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _PATIENCE)
        sock.connect(str(path))
    except OSError as error:
        sock.close()
        if error.errno in _NOBODY:
            return None
        raise
    return sock


def peer_of(sock: socket.socket) -> Peer:
    """Return who is at the other end of a connected Unix socket; raises OSError."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid, uid)


def refusal(peer: Peer, *, proc: Path = Path("/proc")) -> str | None:
    """Return why this peer may not speak, None where it may."""
    if peer.uid not in (0, os.geteuid()):
        return f"uid {peer.uid} is neither root nor egressd's"
    if peer.pid <= 0:
        return "it is in a pid namespace that egressd cannot see into"
    ours, theirs = _depth(proc / "self/status"), _depth(proc / str(peer.pid) / "status")
    if ours is None or theirs is None:
        return "its pid namespace cannot be told"
    if ours != theirs:
        return "it is in a pid namespace of its own, as sandboxes are"
    return None


def _depth(status: Path) -> int | None:
    """Return how many pid namespaces a process is in, as far as /proc can see (`NSpid`, proc_pid_status(5))."""
    try:
        found = _NSPID.search(status.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return len(found[1].split()) if found is not None else None


def _clear(path: Path, kind: socket.SocketKind) -> None:
    """Take away the socket of a daemon that was killed; raises StateError for anything else that is there."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(there.st_mode):
        raise StateError(f"{path} is there and is no socket", "control_socket says where it is made")
    other = connect(path, kind)
    if other is not None:
        other.close()
        raise StateError(f"somebody listens at {path}", "another daemon runs here; end it first")
    path.unlink()
