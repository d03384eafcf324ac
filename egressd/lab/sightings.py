"""What the world saw: the records that the lab's servers keep and its owner asks for.

Each is a flat value that survives JSON; `time` is the wall clock in seconds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class SeenRequest:
    """One HTTP request as an origin received it; the last fields are filled in while it is answered."""

    method: str
    host: str
    """The Host header in lower case, without a port."""
    target: str
    """As on the request line."""
    headers: list[list[str]]
    """Names in lower case, in order of arrival, duplicates kept; bytes as latin-1."""
    peer: str
    address: str
    """The address of the world that was dialled."""
    port: int
    tls: bool
    sni: str | None = None
    body_bytes: int = 0
    body_sha256: str = ""
    """Of the body received so far; empty where there was none."""
    trailers: list[list[str]] = field(default_factory=list)
    status: int = 0
    """0 until an answer began."""
    sent: int = 0
    """Body bytes of the answer handed to the socket."""
    aborted: bool = False
    """The client went away before the exchange was over."""
    time: float = field(default_factory=time.time)

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]

    def header(self, name: str) -> str | None:
        """The first header of that name (lower case), or None."""
        return next((value for key, value in self.headers if key == name), None)


@dataclass
class SeenQuery:
    """One DNS query as the authoritative server received it."""

    name: str
    """Lower case, without the final dot."""
    type: str
    transport: str
    """udp, tcp, tls or https."""
    peer: str
    spelling: str
    """The name as it was spelled (0x20)."""
    time: float = field(default_factory=time.time)


@dataclass
class Hit:
    """One thing that reached the attacker: a TCP connection, a UDP datagram, an ICMP echo."""

    protocol: str
    """tcp, udp, icmp or icmp6."""
    address: str
    port: int
    """The port; for ICMP the type."""
    peer: str
    data: str = ""
    """The first 4 KiB received, as latin-1, after TLS where the client spoke it."""
    sni: str | None = None
    time: float = field(default_factory=time.time)


@dataclass
class Flow:
    """The packets of one kind that left a namespace, as captured at the world's end of its wire."""

    origin: str
    """host or open."""
    protocol: str
    """tcp, udp, icmp, icmp6, or the number."""
    source: str
    address: str
    port: int
    """Destination port; for ICMP the type; 0 where there is none."""
    packets: int = 0
    bytes: int = 0
    """From the IP header on."""
    openings: int = 0
    """TCP: segments with SYN and without ACK."""
