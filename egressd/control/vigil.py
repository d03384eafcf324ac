"""The vigil over the wirings: what every sandbox of one relies on is looked at again and again, and told while it is not there.

Rules that somebody flushes (a firewall that is reloaded, a container engine that is restarted) are put back by the wiring itself
where that is in its power. Either way the daemon is not ready until all is in place, the operator hears of it once, and the
journal holds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final

from egressd.control.voice import say
from egressd.control.wirings import Wiring

EVERY: Final = 2.0
"""Seconds between two looks."""


class Vigil:
    """Looks at wirings; `note` writes a record of the daemon's own."""

    def __init__(self, wirings: Collection[Wiring], note: Callable[[str], None]) -> None:
        """All was in place when the wirings began."""
        self._wirings = wirings
        self._note = note
        self._troubled: dict[str, tuple[str, ...]] = {}

    @property
    def sound(self) -> bool:
        """Whether everything was in place at the last look."""
        return not self._troubled

    async def keep(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(EVERY)
            for wiring in self._wirings:
                await self._look(wiring)

    async def _look(self, wiring: Wiring) -> None:
        try:
            found = tuple(await wiring.look())
        except Exception as error:  # noqa: BLE001 -- what cannot be looked at is not known to be in place
            found = (f"{type(error).__name__}: {error}",)
        if found == self._troubled.get(wiring.name, ()):
            return
        if found:
            self._troubled[wiring.name] = found
            self._tell(f"wiring {wiring.name}: not in place: {'; '.join(found)}")
        else:
            del self._troubled[wiring.name]
            self._tell(f"wiring {wiring.name}: in place again")

    def _tell(self, text: str) -> None:
        say(text)
        self._note(text)
