"""Registered domains: the part of a name that somebody bought, by which people think of where things go."""

from __future__ import annotations

from functools import cache, lru_cache
from ipaddress import ip_address
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from publicsuffixlist import PublicSuffixList


@lru_cache(maxsize=65_536)
def registered_domain(host: str) -> str:
    """Return the registered domain of a host: `a.b.example.co.uk` → `example.co.uk`; what has none is its own."""
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or "." not in bare or _is_address(bare):
        return host
    found = _suffixes().privatesuffix(bare)
    return str(found) if found else host


@cache
def _suffixes() -> PublicSuffixList:
    from publicsuffixlist import PublicSuffixList  # half a second, for those who ask

    return PublicSuffixList()


def _is_address(text: str) -> bool:
    if ":" not in text and not text[-1:].isdigit():  # no top-level domain ends in a digit
        return False
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
