"""The journal as control keeps it: opened by the configuration, tended each second, closed with a signature."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any, Final

from egressd.control.config import Config
from egressd.control.config_file import SinksSection
from egressd.control.sinks import open_feeds
from egressd.control.voice import say
from egressd.journal.heads import KeyUnusable, Signer
from egressd.journal.writer import Journal

_LOOK: Final = 1.0
_COMPLAIN_AGAIN: Final = 60.0


class Keeper:
    """Holds the journal open; `close` is the last thing that is done with it."""

    def __init__(self, config: Config, *, has_stdout: bool) -> None:
        """Open the journal and its sinks and begin to tend them, in the running loop; raises JournalUnavailable.

        `has_stdout`: standard output is ours and not a command's.
        """
        self.journal = Journal(config.journal, state=_state_of(config), terms=config.terms())
        self.feeds = open_feeds(config.sinks, has_stdout=has_stdout) if config.sinks != SinksSection() else []
        for feed in self.feeds:
            self.journal.hear(feed.hear)
        self._dropped = 0
        self._complained = -_COMPLAIN_AGAIN
        self._tending = asyncio.get_running_loop().create_task(self._tend())

    async def close(self) -> None:
        """Sign the last line, let go of the file, and let the sinks have what they still lack, for a few seconds."""
        self._tending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._tending
        self.journal.close()
        await asyncio.gather(*(asyncio.to_thread(feed.close) for feed in self.feeds))

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            self.journal.tend()
            self._complain()

    def _complain(self) -> None:
        """Say once in a while what is worse than it should be and stops nothing."""
        journal, now = self.journal, time.monotonic()
        if now - self._complained < _COMPLAIN_AGAIN:
            return
        if journal.dropped > self._dropped:
            say(
                f"the journal's disk is full: {journal.dropped - self._dropped} records were dropped and counted"
            )
            self._dropped, self._complained = journal.dropped, now
        if journal.unsynced is not None:
            say(f"the journal's disk does not keep what is written: {journal.unsynced}")
            self._complained = now


def write_once(config: Config, fields: dict[str, Any]) -> None:
    """Write one record of control's own beside whoever else has the journal open; raises JournalUnavailable, KeyUnusable."""
    journal = Journal(config.journal, state=_state_of(config), terms=config.terms())
    try:
        journal.append([fields])
    finally:
        journal.close()


def _state_of(config: Config) -> Path | None:
    """Return the directory of the key and the tip; None, said to the operator, where it cannot be used."""
    try:
        Signer(config.state_dir)
        (config.state_dir / "journals").mkdir(mode=0o700, exist_ok=True)
    except (KeyUnusable, OSError) as error:
        say(f"the journal is not signed: {error}")
        return None
    return config.state_dir
