"""The sandboxes that control knows: what a worker needs to carry one, kept so that a new worker can."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Literal

from egressd.gate.account import Kind
from egressd.gate.dns.synthetic import FIRST, LAST
from egressd.gate.limits import HOSTS, Key, kept, limited
from egressd.gate.messages import ListenerKind, ListenerSpec
from egressd.gate.standing import NOTHING, Standing
from egressd.policy.effective import EffectivePolicy
from egressd.policy.names import parse_name

HOST_LEVELS = 4 * HOSTS
"""Levels of single destinations that are kept of a sandbox: more than a sound worker has."""


def new_sandbox_id() -> str:
    """Return an id that was never used: `sbx-` and 80 random bits in hex."""
    return f"sbx-{secrets.token_hex(10)}"


_written: tuple[EffectivePolicy, bytes] | None = None
"""The policy that was written last, and how: many sandboxes that are handed over at once live under the same one."""


def _lines(policy: EffectivePolicy) -> bytes:
    global _written
    if _written is None or _written[0] is not policy:
        _written = (policy, policy.lines())
    return _written[1]


@dataclass(frozen=True, slots=True)
class SandboxListener:
    """A listening socket of a sandbox, or shared; control keeps it for as long as it is served.

    `port` and `hops` as in `ListenerSpec`.
    """

    kind: ListenerKind
    family: int
    socket: socket.socket
    port: int = 0
    hops: tuple[str, ...] = ()

    @property
    def spec(self) -> ListenerSpec:
        """What the worker is told of it."""
        fields = {"kind": self.kind, "family": self.family, "port": self.port, "hops": self.hops}
        return ListenerSpec.model_validate(fields)


@dataclass(slots=True)
class SandboxState:
    """One sandbox as control keeps it.

    `pairs` are the synthetic names in the order they were given; `levels` what its worker told of its limits' buckets: what is
    left, and when (monotonic seconds) it was told, `host_levels` the same for each destination; `placeholders` what it holds in
    the place of keys, by credential. `root` is the fingerprint of the authority that it trusts; where nobody says which, the one
    that signs when it is added.
    `standing` is how its requests for access stand, its grants among them; `expires` (Unix seconds) when it ends by itself.
    `token` (the SHA-256 of its proxy token, hex), `source`, `interface`, `answers` and `own` as in `messages.Serve`.
    """

    id: str
    policy: EffectivePolicy
    listeners: Sequence[SandboxListener]
    labels: dict[str, str] = field(default_factory=dict)
    traceparent: str | None = None
    token: str | None = None
    source: str | None = None
    interface: str = ""
    answers: Literal["synthetic", "self"] = "synthetic"
    own: tuple[str, ...] = ()
    pairs: dict[str, str] = field(default_factory=dict)
    levels: dict[Key, tuple[float, float]] = field(default_factory=dict)
    host_levels: dict[tuple[Key, str], tuple[float, float]] = field(default_factory=dict)
    placeholders: dict[str, str] = field(default_factory=dict)
    root: str = ""
    standing: Standing = NOTHING
    expires: float | None = None
    _addresses: set[str] = field(default_factory=set)
    _kept: tuple[EffectivePolicy, frozenset[Key]] | None = None

    @property
    def profile(self) -> str:
        """The name of the policy it lives under."""
        return self.policy.profile

    def policy_payload(self) -> bytes:
        """The policy as the worker reads it."""
        return _lines(self.policy)

    def standing_payload(self) -> bytes:
        """How its requests for access stand, as the worker reads it."""
        return self.standing.model_dump_json().encode()

    def pairs_payload(self) -> bytes:
        """The synthetic pairs as the worker reads them."""
        return json.dumps(list(self.pairs.items())).encode()

    def levels_payload(self, now: float) -> bytes:
        """What is left of the sandbox's limits as the worker reads it: ages, as clocks are each process's own."""
        rows: list[list[object]] = [
            [*key, tokens, max(0.0, now - told)] for key, (tokens, told) in self.levels.items()
        ]
        for (key, host), (tokens, told) in self.host_levels.items():
            rows.append([*key, tokens, max(0.0, now - told), host])
        return json.dumps(rows).encode()

    def keep_level(self, owner: str, kind: Kind, tokens: float, now: float, host: str = "") -> None:
        """Keep what is left of a limit, if it is one of the policy's: there are never more of them than it has.

        Of the limits of each destination there are at most HOST_LEVELS; those that are full again are forgotten for new ones.
        """
        if self._kept is None or self._kept[0] is not self.policy:
            self._kept = (self.policy, kept(self.policy))
            self.levels = {key: level for key, level in self.levels.items() if key in self._kept[1]}
            self.host_levels = {at: level for at, level in self.host_levels.items() if at[0] in self._kept[1]}
        key: Key = (owner, kind)
        if key not in self._kept[1] or bool(host) is not kind.endswith("_per_host"):
            return
        if not host:
            self.levels[key] = (tokens, now)
            return
        if (key, host) not in self.host_levels and len(self.host_levels) >= HOST_LEVELS:
            self._forget_full(now)
        if (key, host) in self.host_levels or len(self.host_levels) < HOST_LEVELS:
            self.host_levels[key, host] = (tokens, now)

    def _forget_full(self, now: float) -> None:
        rates = limited(self.policy)
        self.host_levels = {
            (key, host): (tokens, told)
            for (key, host), (tokens, told) in self.host_levels.items()
            if (rate := rates.get(key)) is not None
            and tokens + (now - told) * rate.amount / rate.seconds < rate.amount
        }

    def keep_pair(self, name: str, address: str) -> None:
        """Keep a pair; raises ValueError if the name or the address already stands for another, or is none.

        A worker that has fallen may send anything here; what it cannot do is have its successor given what that cannot read.
        """
        if self.pairs.get(name) == address:
            return
        if name in self.pairs or address in self._addresses:
            raise ValueError("a synthetic pair cannot change")
        if not isinstance(parse_name(name), tuple) or not FIRST <= IPv4Address(address) <= LAST:
            raise ValueError("no synthetic pair")
        self.pairs[name] = address
        self._addresses.add(address)
