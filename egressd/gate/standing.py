"""How a sandbox's requests for access stand: what its worker is told by control, and shows the sandbox itself.

What control tells is whole: it takes the place of all that was told before. Nothing of it names a person or says what people
wrote for each other (law 10).
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from egressd.policy.grants import Grant

type State = Literal["waiting", "approved", "denied", "used", "ended"]
"""Of a request for access: nobody has answered yet; it may be done; it may not; its one request has come; its time is over."""

MOST_ROWS = 50
MOST_GRANTS = 200


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Row(_Frozen):
    """One request for access; times are Unix seconds, `until` is the end of what was granted."""

    id: str = Field(max_length=64)
    what: str = Field(max_length=2048)
    state: State
    asked: FiniteFloat
    until: FiniteFloat | None = None
    covers: str = Field(default="", max_length=2048)


class Standing(_Frozen):
    """All grants of a sandbox and its latest requests, the latest first."""

    grants: tuple[Grant, ...] = Field(default=(), max_length=MOST_GRANTS)
    rows: tuple[Row, ...] = Field(default=(), max_length=MOST_ROWS)


NOTHING = Standing()


def read_standing(payload: bytes) -> Standing:
    """Return it from its JSON; raises ValueError."""
    return Standing.model_validate_json(payload)
