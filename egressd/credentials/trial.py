"""Trying a source: does it give a credential that can be attached, and until when? What it gives is given back at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from egressd.credentials.providers.base import For, Minted, Provider, SourceFailed, provider_of
from egressd.credentials.terms import check
from egressd.policy.credential import Credential

PATIENCE: Final = 65.0
"""Seconds that a source may take: a command may have 60."""
GIVE_BACK: Final = 5.0
NOBODY: Final = "credentials-check"
"""Stands for the sandbox, in the name of a session at a source for one."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of it. `expires` is in Unix seconds, None where the source does not say; `trouble` is None where it gave one."""

    name: str
    kind: str
    expires: float | None = None
    trouble: str | None = None
    left: str | None = None
    """Why what it gave could not be given back."""


async def try_source(
    name: str,
    said: Credential,
    labels: Mapping[str, str],
    ca_bundle: str | None = None,
    *,
    provide: Callable[[str, Credential], Provider] | None = None,
) -> Tried:
    """Ask one source for a credential as a sandbox with these labels would; never raises but for cancellation."""
    kind = said.source.kind
    provider: Provider | None = None
    try:
        provider = provide(name, said) if provide else provider_of(name, said.source, ca_bundle)
        async with asyncio.timeout(PATIENCE):
            minted = await provider.mint(For(NOBODY, labels))
        left = await _give_back(minted)
        check(minted, said, time.time())
        return Tried(name, kind, minted.expires, left=left)
    except TimeoutError:
        return Tried(name, kind, trouble=f"no answer within {PATIENCE:.0f} s")
    except Exception as error:  # noqa: BLE001 -- whatever a library raises, its text may hold what was read
        return Tried(name, kind, trouble=_text(error))
    finally:
        if provider is not None:
            await provider.close()


async def _give_back(minted: Minted) -> str | None:
    if minted.revoke is None:
        return None
    try:
        async with asyncio.timeout(GIVE_BACK):
            await minted.revoke()
    except Exception as error:  # noqa: BLE001 -- as above
        return _text(error)
    return None


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, SourceFailed) else type(error).__name__
