"""Watching the rule files: when has something changed?

The kernel's notices only wake us up; what counts is the files' own marks (path, inode, size, times), looked at after every
notice and every `LOOK` seconds. So a change that came before the watch was set, on a file system that gives no notice (NFS), or
by a link that was swapped (a mounted ConfigMap) is seen too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from pathlib import Path

LOOK = 2.0
"""Seconds between two looks when nothing is told."""
_SETTLE_MS = 200
"""How long the files must be quiet, so that half a save is not read."""

type Marks = tuple[tuple[str, int, int, int, int], ...]


def marks(directory: Path) -> Marks:
    """Return the marks of every file below a directory, links followed; empty when it cannot be read."""
    found = []
    for folder, _, names in os.walk(directory, followlinks=True):
        for name in names:
            path = os.path.join(folder, name)
            try:
                stat = os.stat(path)
            except OSError:  # a link to nowhere, or gone since
                continue
            found.append((path, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return tuple(sorted(found))


async def changes(directory: Path, known: Marks) -> AsyncGenerator[Marks]:
    """Yield the new marks each time they differ from the ones before; `known` are those of what was read last. Never ends."""
    import watchfiles  # 40 ms that no start should wait for

    while True:
        try:
            async for _ in watchfiles.awatch(
                directory, debounce=_SETTLE_MS, step=50, rust_timeout=int(LOOK * 1000), yield_on_timeout=True
            ):
                now = marks(directory)
                if now != known:
                    known = now
                    yield now
        except OSError:  # the directory is gone, or the host is out of watches: look by ourselves
            pass
        await asyncio.sleep(LOOK)
        now = marks(directory)
        if now != known:
            known = now
            yield now
