"""What control and the maker of a namespace say to each other: one JSON object per datagram, descriptors beside it.

The socket is a SOCK_SEQPACKET pair. Anything that may be long (environment, arguments, file contents) travels as a
sealed memfd among the descriptors, so that a datagram stays under MESSAGE_LIMIT.
"""

import array
import fcntl
import json
import os
import socket
from collections.abc import Sequence
from typing import Any, Final

MESSAGE_LIMIT: Final = 64 * 1024
DESCRIPTOR_LIMIT: Final = 250
"""SCM_MAX_FD is 253 (include/net/scm.h)."""

Message = dict[str, Any]


def send(channel: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    """Send one message; the descriptors are duplicated for the receiver, the sender still owns its own."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    channel.sendmsg([json.dumps(message).encode()], ancillary)


def receive(channel: socket.socket) -> tuple[Message, list[int]]:
    """One message and its descriptors (close-on-exec, now the caller's); EOFError when the other side is gone."""
    space = socket.CMSG_SPACE(DESCRIPTOR_LIMIT * array.array("i").itemsize)
    data, ancillary, _flags, _address = channel.recvmsg(MESSAGE_LIMIT, space, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    if not data:
        raise EOFError
    message = json.loads(data)
    if not isinstance(message, dict):
        raise EOFError
    return message, list(descriptors)


def sealed(content: bytes, name: str) -> int:
    """A memfd that holds `content` from its beginning and cannot change any more."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def contents(descriptor: int) -> bytes:
    """All bytes of a memfd, whatever its offset; closes it."""
    try:
        size = os.fstat(descriptor).st_size
        return os.pread(descriptor, size, 0)
    finally:
        os.close(descriptor)
