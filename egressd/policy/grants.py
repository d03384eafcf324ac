"""Grants: what a person has let through for a while, in the form in which attempts are judged. Pure.

A grant belongs to one sandbox and to the rules (by digest) that it was reviewed under: beside any other policy it is nothing,
so new rules end it. It speaks of one host, scheme and port, and there of one request, of the requests that differ from it in the
marked segments only, of all, or of a connection that nobody reads. It counts from `begins` until `ends`, both Unix seconds: a
clock that was set back before its beginning ends it as well, and a clock that tells no number knows no grant.

It satisfies an ask or a default deny and nothing else (law 6); where it stands in the order of things `decide` says. Only a
target with one reading is ever covered, whatever the rules of the host look at: what was reviewed is what passes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from egressd.policy.attempt import Name, RequestAttempt
from egressd.policy.effective import EffectiveEntry
from egressd.policy.names import parse_name
from egressd.policy.paths import BadPattern, PathPattern, Target, parse_path_pattern
from egressd.policy.requests import is_carried

if TYPE_CHECKING:
    from egressd.policy.compile import CompiledPolicy

PREFIX = "gnt-"
ID = rf"^{PREFIX}[0-9a-f]{{16}}$"
PLACE = "approval"
"""Stands for the place of a rule that no file holds."""
WEBSOCKET = "WEBSOCKET"
"""The method of a WebSocket's handshake, as rules call it."""
MOST_PATH = 1024

type Scope = Literal["request", "template", "host", "connection"]
"""What a grant covers: one method and path, one method and a path with `*`, every request on the host, or a connection."""


class Grant(BaseModel):
    """One grant. `method` and `path` are empty where the scope has none; `once` lets one request through, and `spent` says that
    one has come: from then on it stands for that request alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=ID)
    sandbox: str = Field(min_length=1, max_length=128)
    policy: str = Field(pattern=r"^[0-9a-f]{16}$")
    host: str = Field(min_length=1, max_length=253)
    scheme: Literal["https", "http", "tcp"]
    port: int = Field(ge=1, le=65_535)
    scope: Scope
    method: str = Field(default="", max_length=64)
    path: str = Field(default="", max_length=MOST_PATH)
    once: bool = False
    spent: bool = False
    begins: FiniteFloat
    ends: FiniteFloat


@dataclass(frozen=True)
class Held:
    """A grant ready to judge; `entry` is the rule that it stands for where no rule of the profile covers the request."""

    grant: Grant
    entry: EffectiveEntry
    pattern: PathPattern | None

    @cached_property
    def lane(self) -> tuple[str, int]:
        """Scheme and port."""
        return self.grant.scheme, self.grant.port

    def lives(self, now: float, redeemed: str | None = None) -> bool:
        """Say whether it counts at `now`; `redeemed` is the grant that a request holds, whose own it stays when it is spent."""
        grant = self.grant
        if not grant.begins <= now < grant.ends:
            return False
        return not (grant.once and grant.spent) or redeemed == grant.id

    def covers(self, attempt: RequestAttempt, target: Target) -> bool:
        """Say whether the request is one that was reviewed; time aside."""
        grant = self.grant
        if grant.scope == "connection" or self.lane != (attempt.scheme, attempt.port):
            return False
        if not (target.is_origin_form and target.is_canonical):
            return False
        if grant.scope == "host":
            return attempt.upgrade is None and is_carried(attempt.method)
        if not _is_method(grant.method, attempt):
            return False
        return self.pattern.allows(target) if self.pattern is not None else target.path == grant.path


def granted(policy: CompiledPolicy, grants: Iterable[Grant], sandbox: str) -> CompiledPolicy:
    """Return the policy with those of the grants that are this sandbox's and were reviewed under this very policy. Total."""
    shelves: dict[str, tuple[Held, ...]] = {}
    for grant in grants:
        if grant.sandbox != sandbox or grant.policy != policy.digest:
            continue
        held = _hold(grant)
        if held is not None:
            shelves[grant.host] = (*shelves.get(grant.host, ()), held)
    return policy if shelves == policy.grants else dataclasses.replace(policy, grants=shelves)


def find(shelves: Mapping[str, tuple[Held, ...]], host: Name) -> tuple[Held, ...]:
    """Return the grants that speak of a host; those that do not count at the time are among them."""
    return shelves.get(".".join(host), ()) if shelves else ()


def _is_method(method: str, attempt: RequestAttempt) -> bool:
    if not is_carried(attempt.method):
        return False
    if attempt.upgrade is not None:
        return method == WEBSOCKET and attempt.upgrade == "websocket" and attempt.method == "GET"
    return method == attempt.method != WEBSOCKET


def _hold(grant: Grant) -> Held | None:
    """Return a grant ready to judge, None for one that makes no sense: it is not there then."""
    if not isinstance(parse_name(grant.host), tuple) or grant.ends <= grant.begins:
        return None
    spelled = grant.scope in ("request", "template")
    if spelled != bool(grant.path) or spelled != bool(grant.method):
        return None
    if grant.scope == "connection":
        if grant.once:  # nobody could tell one from many where nothing is read
            return None
    elif grant.scheme == "tcp":
        return None
    pattern: PathPattern | None = None
    if grant.scope == "template":
        found = parse_path_pattern(grant.path)
        if isinstance(found, BadPattern) or "**" in grant.path:
            return None
        pattern = found
    return Held(grant, _entry(grant), pattern)


def _entry(grant: Grant) -> EffectiveEntry:
    """The rule that a grant stands for: public addresses only, without a credential, read."""
    requests = {
        "request": (f"{grant.method} {grant.path}",),
        "template": (f"{grant.method} {grant.path}",),
        "host": ("ANY /**",),
        "connection": (),
    }[grant.scope]
    return EffectiveEntry(
        id=grant.id,
        place=PLACE,
        effect="allow",
        hosts=(grant.host,),
        schemes=("http",) if grant.scheme == "http" else ("https",),
        ports=(grant.port,),
        requests=requests,
    )
