"""What `egressd run` and a daemon say to each other: one fixed schema a message, over SOCK_SEQPACKET.

`enter` → `entered`, then the namespace is made and `made` → `served`, then it is proved from inside: `proved`. When the command
is over: `ended` → `gone`. The daemon may say `refused` instead of an answer and `revoked` at any time. A connection that
closes is a sandbox that ends.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from egressd.gate.messages import ListenerSpec

VERSION: Final = 1


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Enter(_Message):
    """run → daemon, first: a sandbox is to be made."""

    type: Literal["enter"] = "enter"
    version: int = VERSION
    profile: str = Field(max_length=128)
    labels: dict[str, str] = Field(default_factory=dict)
    traceparent: str | None = None


class Entered(_Message):
    """Daemon → run: who it is, and what it is made of. Descriptors: policy, credentials file, placeholders, each JSON.

    `configuration` is what the daemon goes by, key by key; `trust` the directory of certificates and how many of the system's
    are in it.
    """

    type: Literal["entered"] = "entered"
    sandbox: str
    trust: tuple[str, int]
    configuration: dict[str, Any]


class Made(_Message):
    """run → daemon: the namespace is there. Descriptors: what it was made of (JSON, without values), then one per listener."""

    type: Literal["made"] = "made"
    listeners: tuple[ListenerSpec, ...] = Field(max_length=16)


class Served(_Message):
    """Daemon → run: a worker carries it."""

    type: Literal["served"] = "served"


class Proved(_Message):
    """run → daemon: the boundary holds, as seen from inside; the command starts."""

    type: Literal["proved"] = "proved"


class Tally(_Message):
    """What the kernel counted, as in `wiring.ruleset.Counted`."""

    connections: int = Field(ge=0)
    dns_connections: int = Field(ge=0)
    dns_datagrams: int = Field(ge=0)
    packets: int = Field(ge=0)


class Ended(_Message):
    """run → daemon: everything in the sandbox is dead; what the kernel counted, None where that cannot be told."""

    type: Literal["ended"] = "ended"
    counted: Tally | None = None


class Refused(_Message):
    """Daemon → run: it is not made, or not any more, and why."""

    type: Literal["refused"] = "refused"
    detail: str
    hint: str = ""


class Revoked(_Message):
    """Daemon → run: it is over, and nothing leaves it any more. `ended` answers it."""

    type: Literal["revoked"] = "revoked"
    why: str


class Gone(_Message):
    """Daemon → run: nothing is left of it here."""

    type: Literal["gone"] = "gone"


type ToDaemon = Enter | Made | Proved | Ended
type ToRun = Entered | Served | Refused | Revoked | Gone

TO_DAEMON: TypeAdapter[ToDaemon] = TypeAdapter(Annotated[ToDaemon, Field(discriminator="type")])
TO_RUN: TypeAdapter[ToRun] = TypeAdapter(Annotated[ToRun, Field(discriminator="type")])
