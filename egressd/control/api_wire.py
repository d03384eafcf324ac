"""How the control API reads what is asked and writes what is answered; every way of failing is a `Problem` of the schema's."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web
from pydantic import BaseModel, ValidationError

from egressd.control.api_schema import Problem

_BODY_SECONDS: Final = 10.0
_MOST_PROBLEMS: Final = 8

WHO: Final = web.RequestKey("who", str)
"""Who asks, in words for a record."""


class Bad(Exception):
    """Ends a handler with a problem."""

    def __init__(self, status: int, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.status, self.problem = status, problem


async def read[M: BaseModel](request: web.Request, model: type[M]) -> M:
    """Return a request's body as a model; raises Bad where it does not come in time or does not fit."""
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            content = await request.read()
    except TimeoutError:
        raise Bad(
            408, Problem(error="timeout", detail=f"the body did not come within {_BODY_SECONDS:.0f} s")
        ) from None
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise Bad(400, Problem(error="bad_request", detail=_said(error))) from None


def _said(error: ValidationError) -> str:
    """Say what does not fit by its place alone: a value may be a secret in the wrong field."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    places = (".".join(str(step)[:64] for step in each["loc"]) or "body" for each in found[:_MOST_PROBLEMS])
    return "; ".join(f"{place}: {each['msg']}" for place, each in zip(places, found, strict=False))[:1024]


def answer(model: BaseModel, status: int = 200) -> web.Response:
    """Return a model as an answer."""
    return web.Response(status=status, body=model.model_dump_json().encode(), content_type="application/json")


def problem_answer(status: int, problem: Problem) -> web.Response:
    """Return a problem as an answer."""
    return answer(problem, status)
