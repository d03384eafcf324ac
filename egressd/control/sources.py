"""What makes a sandbox known at a shared listener, as control keeps it: its proxy token, and whose each source address is.

A token is shown once, to who made the sandbox; what is kept, and what a worker gets, is its SHA-256. A source belongs to one
living sandbox, over all workers and their deaths; who has the address next inherits nothing.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address

from egressd.control.sandboxes import SandboxListener


@dataclass(frozen=True, slots=True)
class ProxyToken:
    """A sandbox's token: `text` for its clients, never to be kept; `digest` for everybody else."""

    text: str = field(repr=False)
    digest: str

    @classmethod
    def new(cls) -> ProxyToken:
        """Make one of 256 random bits, in characters that a URL holds as they are."""
        text = secrets.token_urlsafe(32)
        return cls(text, hashlib.sha256(text.encode("ascii")).hexdigest())


def proxy_url(sandbox: str, token: str, host: str, port: int, *, scheme: str = "http") -> str:
    """Return what a sandbox's clients are given (HTTPS_PROXY, HTTP_PROXY; `scheme` socks5h for SOCKS)."""
    return f"{scheme}://{sandbox}:{token}@{f'[{host}]' if ':' in host else host}:{port}"


@dataclass(slots=True)
class SharedListeners:
    """Listeners that a worker's sandboxes share; control keeps the sockets, so that the next worker gets them.

    `interface` as in `messages.Share`.
    """

    id: str
    listeners: Sequence[SandboxListener]
    interface: str = ""


class Sources:
    """Which sandbox each source address belongs to, at each interface."""

    def __init__(self) -> None:
        """No source is anybody's."""
        self._owners: dict[tuple[str, str], str] = {}

    def claim(self, sandbox: str, source: str, interface: str = "") -> bool:
        """Give a source to a sandbox; False where another has it. Raises ValueError for what is no address in normal form."""
        if normal_source(source) != source:
            raise ValueError("a source in another spelling")
        return self._owners.setdefault((interface, source), sandbox) == sandbox

    def release(self, sandbox: str) -> None:
        """Take every source back from a sandbox that is gone."""
        self._owners = {source: owner for source, owner in self._owners.items() if owner != sandbox}


def normal_source(text: str) -> str:
    """Return a source address as it is compared: IPv4 never inside IPv6.

    Raises ValueError, also for one that means another host on each link.
    """
    address = ip_address(text)
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.is_link_local or address.scope_id is not None:
        raise ValueError(f"{text} is another host on each link")
    return str(address.ipv4_mapped or address)
