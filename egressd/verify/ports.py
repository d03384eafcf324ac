"""Probes of ports: whether egressd's own can be taken from under it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from egressd.verify import wire
from egressd.verify.probe import Outcome, judged, probe
from egressd.verify.scene import Scene


@probe(
    "network",
    why="who listens where egressd listens gets the connections and questions that were meant for it",
    held="none of egressd's ports could be bound, with any option",
)
def port_theft(_scene: Scene) -> Outcome:
    """Bind egressd's ports 15001, 15053 and 3128, on its addresses and on all, with SO_REUSEADDR and SO_REUSEPORT."""
    stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
    places = [(kind, address, 15053) for kind in (stream, datagram) for address in ("127.0.0.1", "::1")]
    places += [(kind, address, 15053) for kind in (stream, datagram) for address in ("0.0.0.0", "::")]  # noqa: S104 - a thief's
    places += [(stream, address, 15001) for address in ("127.0.0.1", "::1", "0.0.0.0", "::")]  # noqa: S104
    places += [(stream, "127.0.0.1", 3128), (datagram, "::ffff:127.0.0.1", 15053)]
    options = {"": 0, " with SO_REUSEADDR": socket.SO_REUSEADDR, " with SO_REUSEPORT": socket.SO_REUSEPORT}

    def tries() -> Iterator[str | None]:
        for kind, address, port in places:
            for how, option in options.items():
                with socket.socket(wire.family_of(address), kind) as thief:
                    try:
                        if option:
                            thief.setsockopt(socket.SOL_SOCKET, option, 1)
                        thief.bind((address, port))
                    except OSError:
                        yield None
                    else:
                        yield f"bound {address} port {port}{how}"

    return judged(tries(), "tries, none of which got a port")
