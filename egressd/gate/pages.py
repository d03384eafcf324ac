"""What a sandbox asks of egressd's own pages, and what it gets: the words between the pages and who carries them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from egressd.policy.reasons import Reason

type Facts = dict[str, Any]
"""What a page says, as JSON has it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for one of the pages; `target` in origin form, `json` if the client would rather have that."""

    method: str
    target: str
    json: bool = False
    body: bool = False
    upgrade: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """What is answered."""

    content_type: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Unanswered:
    """What is not answered, why, with which status, and what to do instead."""

    reason: Reason
    status: int
    hint: str
    allow: str | None = None


@dataclass(frozen=True, slots=True)
class Plea:
    """A sandbox's request for access in its own words, to be put to people; bounded, and otherwise whatever it sent."""

    request: str
    why: str
