"""What the kernel threw away at sockets of ours because nobody read fast enough: told without any capability, for each socket.

Source: proc_net(5) (udp, udp6: the last column; netlink: `Drops`), by the inode of the socket. Only what a socket was to be given
and could not take is in it; what was never sent to one, and what its reader took and lost, is not.
"""

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from egressd.wiring.namespace import Listener

_TABLES: Final = {"dns-udp": ("udp", "udp6"), "nflog": ("netlink",)}


class Dropped(NamedTuple):
    """Since the sockets were made: queries that the resolver was not given, refused packets that the packet log was not."""

    dns_datagrams: int = 0
    packets: int = 0

    def since(self, before: "Dropped") -> "Dropped":
        """What came on top."""
        return Dropped(self.dns_datagrams - before.dns_datagrams, self.packets - before.packets)


def dropped(listeners: Iterable[Listener], proc: Path = Path("/proc/self/net")) -> Dropped:
    """Read it for these sockets; raises OSError where there is no such table."""
    totals = {"dns-udp": 0, "nflog": 0}
    for listener in listeners:
        if listener.kind in totals:
            totals[listener.kind] += _of(listener.socket, _TABLES[listener.kind], proc)
    return Dropped(totals["dns-udp"], totals["nflog"])


def _of(sock: socket.socket, tables: Iterable[str], proc: Path) -> int:
    inode = str(os.fstat(sock.fileno()).st_ino)
    for table in tables:
        head, *rows = (proc / table).read_text(encoding="ascii", errors="replace").splitlines()
        # `tr tm->when` and `tx_queue rx_queue` are two names and one word each, so that only the end can be counted from.
        names = head.split()[::-1] if table == "netlink" else ["drops", "pointer", "ref", "inode"]
        for row in rows:
            words = dict(zip(map(str.lower, names), row.split()[::-1], strict=False))
            if words.get("inode") == inode and words.get("drops", "").isdigit():
                return int(words["drops"])
    return 0
