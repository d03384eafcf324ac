"""What control knows of the host it runs on and tells its workers."""

from __future__ import annotations

import os
from ipaddress import IPv6Address
from pathlib import Path


def local_addresses(proc: Path = Path("/proc/self/net")) -> tuple[str, ...]:
    """Return this network namespace's own addresses of both families, sorted; a table that is missing counts as empty.

    IPv4 from the routing table's `host LOCAL` leaves (fib_trie), IPv6 from if_inet6, whose first field is the address in hex.
    """
    found: set[str] = set()
    leaf = ""
    for line in _lines(proc / "fib_trie"):
        words = line.split()
        if words[:1] == ["|--"]:
            leaf = words[1]
        elif words[:3] == ["/32", "host", "LOCAL"]:
            found.add(leaf)
    for line in _lines(proc / "if_inet6"):
        found.add(str(IPv6Address(bytes.fromhex(line.split()[0]))))
    return tuple(sorted(found))


def may_become(uid: int) -> bool:
    """Whether this process can take another uid: it is root and its user namespace maps that uid."""
    if os.geteuid() != 0:
        return False
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    return any(inside <= uid < inside + count for inside, _, count in ranges)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
