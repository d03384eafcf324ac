"""Sockets that were made with a privilege and are handed to a program that has none: systemd's way, sd_listen_fds(3).

`LISTEN_FDS` says how many, from descriptor 3 on, `LISTEN_PID` whose they are, `LISTEN_FDNAMES` what each is: `KIND-FAMILY`, or
`KIND` where it has no family.
"""

import fcntl
import os
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Final

from egressd.wiring.namespace import Kind, Listener

FIRST: Final = 3
MOST: Final = 64
_VARIABLES: Final = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
_KINDS: Final[dict[str, Kind]] = {
    "transparent": "transparent",
    "explicit": "explicit",
    "dns-udp": "dns-udp",
    "dns-tcp": "dns-tcp",
    "nflog": "nflog",
}


def hand_on(listeners: Sequence[tuple[str, int, socket.socket]]) -> dict[str, str]:
    """Place sockets where the program that this process becomes finds them; returns the variables that tell it."""
    away = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, FIRST + len(listeners)) for _, _, each in listeners]
    for place, descriptor in enumerate(away, FIRST):
        os.dup2(descriptor, place, inheritable=True)
    names = (f"{kind}-{family}" if family else kind for kind, family, _ in listeners)
    return dict(zip(_VARIABLES, (str(len(away)), str(os.getpid()), ":".join(names)), strict=True))


def taken(environ: MutableMapping[str, str]) -> tuple[Listener, ...]:
    """The sockets that this process was given, taken over once: nothing it starts inherits them. ValueError for others."""
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return ()
    number, names = _counted(environ)
    for variable in _VARIABLES:
        environ.pop(variable, None)
    made = []
    for descriptor, name in zip(range(FIRST, FIRST + number), names, strict=True):
        kind, family = _named(name)
        os.set_inheritable(descriptor, False)
        listener = socket.socket(fileno=descriptor)
        listener.setblocking(False)
        made.append(Listener(kind, family, listener))
    return tuple(made)


def _counted(environ: Mapping[str, str]) -> tuple[int, list[str]]:
    text, names = environ.get("LISTEN_FDS", ""), environ.get("LISTEN_FDNAMES", "").split(":")
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= MOST and len(names) == int(text)):
        raise ValueError("LISTEN_FDS and LISTEN_FDNAMES do not agree")
    return int(text), names


def _named(name: str) -> tuple[Kind, int]:
    kind, _, family = name.rpartition("-")
    if name == "nflog":
        return "nflog", 0
    if kind not in _KINDS or kind == "nflog" or family not in ("4", "6"):
        raise ValueError(f"a socket of an unknown kind: {name!r}")
    return _KINDS[kind], int(family)
