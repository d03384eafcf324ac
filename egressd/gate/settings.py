"""What control tells a worker about itself: limits, deadlines and how names are answered."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

KiB = 1024


class UpstreamProxy(BaseModel):
    """The operator's own proxy, through which everything goes out: CONNECT to the checked address, or to the name.

    `host` is a name or an address (IPv6 without brackets); it is dialled as configured, whatever it resolves to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    port: int = Field(gt=0, lt=65_536)
    connect: Literal["address", "name"] = "address"


class Settings(BaseModel):
    """The worker's settings; times in seconds, sizes in bytes, counts per sandbox."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dns_denied: Literal["explain", "nxdomain"] = "explain"
    dns_upstream: str = "system"
    dns_timeout: float = Field(default=5.0, gt=0)
    dns_names: int = Field(default=16_384, gt=0, le=16_384)
    dns_queries_per_minute: int = Field(default=6_000, gt=0)
    first_bytes_timeout: float = Field(default=10.0, gt=0)
    head_timeout: float = Field(default=15.0, gt=0)
    head_bytes: int = Field(default=64 * KiB, gt=0)
    handshake_timeout: float = Field(default=10.0, gt=0)
    connect_timeout: float = Field(default=10.0, gt=0)
    idle_timeout: float = Field(default=900.0, gt=0)
    connections: int = Field(default=512, gt=0)
    new_connections_per_second: int = Field(default=250, gt=0)
    approval_hold: float = Field(default=0.0, ge=0, le=15)
    """How long a request that needs an approval is held for it before it is refused."""
    upstream_ca: str | None = None
    upstream_proxy: UpstreamProxy | None = None
    inspect_addons: tuple[str, ...] = ()
