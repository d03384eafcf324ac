"""What an HTTP connection tells the engine besides mitmproxy's own commands: how requests and exchanges turn out."""

from __future__ import annotations

from dataclasses import dataclass

from mitmproxy.proxy import commands

from egressd.gate.inspector.head import BadHead, Field, ResponseHead
from egressd.policy.reasons import Reason


@dataclass(eq=False)
class Rejected(commands.Command):
    """The client sent a head that is no request."""

    head: BadHead


@dataclass(eq=False)
class ClientLeft(commands.Command):
    """The client closed between requests, or in the middle of a head (`partial`)."""

    partial: bool


@dataclass(eq=False)
class Failed(commands.Command):
    """The current exchange cannot go on."""

    reason: Reason
    detail: str


@dataclass(eq=False)
class Interim(commands.Command):
    """An interim response for the client."""

    status: int
    phrase: bytes
    fields: tuple[Field, ...]


@dataclass(eq=False)
class Upgraded(commands.Command):
    """The upstream has answered 101 to an upgrade; `rest` is what it has said since in the other protocol."""

    head: ResponseHead
    rest: bytes


@dataclass(eq=False)
class Ended(commands.Command):
    """What followed an upgrade is over."""

    reason: Reason
    detail: str


@dataclass(eq=False)
class HalfClosed(commands.Command):
    """The client has sent its last request and waits for the answer (`nc -N`), or has gone."""


@dataclass(eq=False)
class Answered(commands.Command):
    """Request and response are both complete; `early` when the response was complete before its request was."""

    early: bool = False
