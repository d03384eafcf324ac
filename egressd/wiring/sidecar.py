"""The `sidecar` wiring: egressd and its sandbox share a network namespace, and only egressd's uid may send anything out of it.

It is made by a step that has CAP_NET_ADMIN for a moment (an init container, or egressd's own entry before it becomes its uid),
before anything of the sandbox runs. It holds against whoever cannot become that uid, change the rules or send frames: a sandbox
without CAP_SETUID, CAP_NET_ADMIN and CAP_NET_RAW, not root, under `no_new_privs`.
"""

import ctypes
import errno
import os
import select
import socket
from collections.abc import Iterator, Sequence
from typing import Final, NoReturn

from egressd.wiring import inherited, network, tables
from egressd.wiring.errors import WiringError
from egressd.wiring.overlay import Overlay
from egressd.wiring.ruleset import NFLOG_GROUP, Family
from egressd.wiring.sidecar_rules import REFUSED, sidecar_overlay

MOST_UID: Final = 2**32 - 2
_DISCARD: Final = 9
_PROOF_SECONDS: Final = 1.0
_INET: Final = {4: socket.AF_INET, 6: socket.AF_INET6}
_PR_SET_NO_NEW_PRIVS: Final = 38
_FORBIDDEN: Final = frozenset({errno.EHOSTUNREACH, errno.EACCES, errno.EPERM})
"""ICMP 3/13 (RFC 1812 section 5.2.7.1) and ICMPv6 1/1 (RFC 4443) as icmp_err_convert and icmpv6_err_convert give them."""


def overlays(uid: int, nflog_group: int = NFLOG_GROUP) -> dict[Family, Overlay]:
    """The rules of both families; ValueError for a uid that cannot be told from a sandbox's."""
    if not 0 < uid < MOST_UID:
        raise ValueError("egressd's uid is a number above 0: root is whoever asks, in a container")
    return {family: sidecar_overlay(family, uid, nflog_group=nflog_group) for family in tables.FAMILIES}


def wire(uid: int, nflog_group: int = NFLOG_GROUP) -> None:
    """Put the rules in place and read them back; again is no change. Raises WiringError, ValueError."""
    tables.put(overlays(uid, nflog_group))


def undo(uid: int, nflog_group: int = NFLOG_GROUP) -> None:
    """Take the rules away, those of others untouched; raises WiringError."""
    tables.take_away(overlays(uid, nflog_group))


def check(uid: int, nflog_group: int = NFLOG_GROUP) -> list[str]:
    """What is missing or altered, read back now; raises WiringError where it cannot be read."""
    return tables.differences(overlays(uid, nflog_group))


def listeners(uid: int, nflog_group: int = NFLOG_GROUP) -> Iterator[tuple[str, int, socket.socket]]:
    """egressd's sockets, owned by its uid, and the packet log: (kind, family, socket). Raises WiringError."""
    return network.listeners(nflog_group, uid, again=True)


def become(uid: int, command: Sequence[str], nflog_group: int = NFLOG_GROUP) -> NoReturn:
    """Turn into egressd: its sockets made and handed on (`inherited`), its uid taken for good, no capability left, `command` run.

    Raises WiringError where it cannot be run.
    """
    made = list(listeners(uid, nflog_group))
    environment = {**os.environ, **inherited.hand_on(made)}
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        hint = "needs CAP_SETUID and CAP_SETGID, which are given up with it"
        raise WiringError.from_os(f"become uid {uid}", error, hint) from error
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise WiringError.from_os("prctl PR_SET_NO_NEW_PRIVS", OSError(ctypes.get_errno(), "refused"))
    try:
        os.execvpe(command[0], list(command), environment)  # noqa: S606 - no shell is wanted
    except OSError as error:
        raise WiringError.from_os(command[0], error) from error


def unproved(family: Family) -> str | None:
    """Why egressd's own uid cannot see the filter at work in this family; None where it does. Needs no capability.

    A datagram to an address that the rules refuse even to egressd is sent: the filter answers at once, nobody else would. A
    network that has no route there in IPv6 has none out either. For readiness; that names are answered proves the redirection.
    """
    with socket.socket(_INET[family], socket.SOCK_DGRAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect((REFUSED[family], _DISCARD))
        except OSError as error:
            return None if family == 6 else f"no route: {error.strerror}"
        try:
            probe.send(b"")
        except OSError as error:
            return _refusal(error)
        waiting = select.poll()
        waiting.register(probe, select.POLLERR)
        if not waiting.poll(_PROOF_SECONDS * 1000):
            return f"IPv{family}: a datagram that the rules refuse was not refused"
        number = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        return _refusal(OSError(number, os.strerror(number)))


def _refusal(error: OSError) -> str | None:
    """Only a firewall says that it is forbidden; a router or a host says something else."""
    return None if error.errno in _FORBIDDEN else f"an unexpected answer: {error.strerror}"
