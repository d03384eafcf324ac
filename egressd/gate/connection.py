"""One accepted connection: what the door has learned of it, and how its records are made.

The fields fill up in one direction: socket → destination → first bytes → decision. Nothing here is taken from the peer's
address:
the listener says which sandbox it is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from egressd.gate.asking import Asking
from egressd.gate.leases import Leases
from egressd.gate.recorder import Recorder
from egressd.gate.sandbox import Sandbox
from egressd.gate.settings import Settings
from egressd.journal.record import Event, Layer, Record, new_id
from egressd.policy.attempt import DENIED, Address, Decision, Name
from egressd.policy.names import format_host

if (
    TYPE_CHECKING
):  # the two are handed in by the worker; importing them here would make a cycle through the door
    from egressd.gate.dialer import Dialer
    from egressd.gate.tls.leaves import Leaves

type Channel = Literal["transparent", "connect", "absolute", "socks", "direct"]


@dataclass(slots=True)
class Services:
    """What every connection of a worker uses.

    `certificate` is the authority's public one, PEM; `inspection` are the site's own addons (`inspector.site`); without
    `leases` no credential is attached, and what needs one is refused; `placeholders` are those of all sandboxes of the worker.
    Without `asking` no person is asked for an approval, and no grant for a single request counts.
    """

    settings: Settings
    recorder: Recorder
    dialer: Dialer
    leaves: Leaves
    certificate: bytes = b""
    inspection: tuple[Any, ...] = ()
    leases: Leases | None = None
    placeholders: set[str] = field(default_factory=set)
    asking: Asking | None = None


@dataclass(slots=True)
class Destination:
    """Where the sandbox wants to go.

    `proved` is the name that the destination itself proves (synthetic address, CONNECT, SOCKS, absolute-form target), None for
    a literal address.
    `address` is what was dialled, None when only a name was given. Both are None for egressd's own address, where many names
    lead.
    """

    port: int
    address: Address | None = None
    proved: Name | None = None


@dataclass(slots=True)
class Connection:
    """An accepted connection on its way to a decision; denied until `decision` says otherwise."""

    sandbox: Sandbox
    services: Services
    channel: Channel
    destination: Destination
    attempt_id: str = field(default_factory=new_id)
    root_id: str = ""
    tls: bool = False
    sni: str | None = None
    alpn: str | None = None
    host: Name | Address | None = None
    decision: Decision = DENIED
    source: Address | None = None
    """Where it came from, if sandboxes are told apart by that."""
    retry_after: int | None = None
    """Seconds until a limit that denied the connection has room again, where that is known."""
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        """A connection that no DNS query began is its own root."""
        self.root_id = self.root_id or self.attempt_id

    def record(self, event: Event, layer: Layer, attempt_id: str | None = None) -> Record:
        """Return a record with everything filled in that is known of this connection."""
        destination = self.destination
        return Record(
            event=event,
            sandbox=self.sandbox.id,
            attempt_id=attempt_id or self.attempt_id,
            root_id=self.root_id,
            layer=layer,
            channel=self.channel,
            profile=self.sandbox.policy.profile,
            policy=self.sandbox.policy.digest,
            labels=self.sandbox.labels or None,
            traceparent=self.sandbox.traceparent,
            source=str(self.source) if self.source is not None else None,
            host=format_host(self.host) if self.host is not None else None,
            address=str(destination.address) if destination.address is not None else None,
            port=destination.port or None,
            scheme="https" if self.tls else "http",
            sni=self.sni,
            alpn=self.alpn,
        )
