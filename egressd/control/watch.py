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
QUIET = 0.2
"""Seconds for which the files must stay as they are before they are read: half a save may be a whole file that lacks its
denials."""
START = 0.25
"""Seconds before the first look: a command that is over by then was worth no watch."""
_PATIENCE = 25
"""Looks at files that keep changing before they are read all the same: somebody who saves for ever must not hold a reload up."""

type Marks = tuple[tuple[str, int, int, int, int], ...]


def marks(directory: Path, *beside: Path) -> Marks:
    """Return the marks of every file below a directory and of the files `beside` it, links followed; of what can be read."""
    below = (
        os.path.join(folder, name)
        for folder, _, names in os.walk(directory, followlinks=True)
        for name in names
    )
    found = []
    for path in (*below, *map(str, beside)):
        try:
            stat = os.stat(path)
        except OSError:  # a link to nowhere, or gone since
            continue
        found.append((path, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return tuple(sorted(found))


async def changes(directory: Path, known: Marks, *beside: Path) -> AsyncGenerator[Marks]:
    """Yield the new marks each time they differ from the ones before; `known` are those of what was read last. Never ends.

    What lies `beside` the directory is not watched, and looked at every `LOOK` seconds.
    """
    await asyncio.sleep(START)
    while True:
        watched = _identity(directory)
        try:
            import watchfiles  # 40 ms of everybody's time

            async for _ in watchfiles.awatch(
                directory, debounce=50, step=10, rust_timeout=int(LOOK * 1000), yield_on_timeout=True
            ):
                now = await _settled(directory, known, beside)
                if now != known:
                    known = now
                    yield now
                if (
                    _identity(directory) != watched
                ):  # exchanged whole: what is watched is no longer what is read
                    break
        except Exception:  # noqa: BLE001 -- out of watches, descriptors, threads: each has its own class; look by ourselves
            await asyncio.sleep(LOOK)
        if watched is None:
            await asyncio.sleep(LOOK)
        now = await _settled(directory, known, beside)
        if now != known:
            known = now
            yield now


def _identity(directory: Path) -> tuple[int, int] | None:
    """Return what a watch of the directory would hold on to; None while there is no such directory."""
    try:
        stat = os.stat(directory)
    except OSError:
        return None
    return stat.st_dev, stat.st_ino


async def _settled(directory: Path, known: Marks, beside: tuple[Path, ...]) -> Marks:
    """Return the marks once two looks agree; at once when nothing differs from what is known."""
    now = marks(directory, *beside)
    for _ in range(_PATIENCE):
        if now == known:
            break
        before = now
        await asyncio.sleep(QUIET)
        now = marks(directory, *beside)
        if now == before:
            break
    return now
