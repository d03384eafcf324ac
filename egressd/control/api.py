"""The control API: who may speak, what is asked, and what is answered. Every way of failing is an answer of the schema's.

An id is looked up and never becomes a path or a command. Answers hold what `api_schema` says: no secret but a new token, once.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Protocol

from aiohttp import web
from aiohttp.typedefs import Middleware
from pydantic import BaseModel, ValidationError

from egressd.control import api_schema
from egressd.control.api_schema import BackWanted, Problem, SandboxWanted, told
from egressd.control.archive import Archive, Unkept
from egressd.control.keyring import dummies
from egressd.control.lives import Life
from egressd.control.rollback import RolledBack
from egressd.control.roster import Full, Roster, Wanted
from egressd.control.supervisor import WorkerFailed
from egressd.control.surroundings import BadInput
from egressd.control.voice import say
from egressd.control.wirings import NotWired
from egressd.journal.record import timestamp
from egressd.wiring.errors import WiringError

_BODY_SECONDS: Final = 10.0
_MOST_PROBLEMS: Final = 8

type _Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Household(Protocol):
    """The daemon, as its API knows it."""

    @property
    def roster(self) -> Roster:
        """Its sandboxes."""

    @property
    def archive(self) -> Archive:
        """The copies of its rules."""

    async def reload(self) -> list[str]:
        """Read rules and credentials anew; returns what the operator is told. Raises BadInput, WorkerFailed."""

    async def roll_back(self, wanted: str | None, by: str) -> RolledBack:
        """Put a kept copy in force. Raises Unkept, BadInput, WorkerFailed."""


type Judge = Callable[[web.Request], tuple[int, str] | str]
"""Who asks, in words for a record; or the status and the sentence with which it is sent away."""

WHO: Final = web.RequestKey("who", str)


def application(household: Household, judge: Judge) -> web.Application:
    """Return the API for listeners whose peers `judge` tells apart."""
    api = _Api(household)
    app = web.Application(middlewares=[_answering(judge)], client_max_size=api_schema.MOST_BODY)
    app.add_routes(
        [
            web.get("/v1/sandboxes", api.list_all),
            web.post("/v1/sandboxes", api.create),
            web.delete("/v1/sandboxes", api.kill),
            web.get("/v1/sandboxes/{id}", api.show),
            web.delete("/v1/sandboxes/{id}", api.revoke),
            web.get("/v1/status", api.status),
            web.post("/v1/reload", api.reload),
            web.get("/v1/rules", api.rules),
            web.post("/v1/rules/rollback", api.roll_back),
            web.get("/openapi.json", api.describe),
        ]
    )
    return app


def _answering(judge: Judge) -> Middleware:
    """Judge who asks before anything else is looked at, and turn whatever happens into an answer."""

    @web.middleware
    async def answer(request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            who = judge(request)
            if not isinstance(who, str):
                return _refused(*who)
            request[WHO] = who
            return await handler(request)
        except web.HTTPException as error:
            return _of_http(error)
        except _Bad as bad:
            return _problem(bad.status, bad.problem)
        except Exception as error:  # noqa: BLE001 -- an answer in any case, and never the error's own words
            say(f"control API: {request.method} failed: {type(error).__name__}")
            return _problem(
                500, Problem(error="internal_error", detail="it failed; egressd's own output says more")
            )

    return answer


class _Bad(Exception):
    """Ends a handler with a problem."""

    def __init__(self, status: int, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.status, self.problem = status, problem


class _Api:
    def __init__(self, household: Household) -> None:
        self._household = household

    async def list_all(self, _: web.Request) -> web.Response:
        return _answer(
            api_schema.SandboxList(sandboxes=[told(life) for life in self._household.roster.living])
        )

    async def create(self, request: web.Request) -> web.Response:
        wanted = await _read(request, SandboxWanted)
        roster = self._household.roster
        try:
            life = await roster.create(Wanted(**wanted.model_dump()))
        except Full as full:
            raise _Bad(429, Problem(error="full", detail=str(full))) from None
        except BadInput as bad:
            detail, _, hint = str(bad).partition("\nhint: ")
            raise _Bad(422, Problem(error="bad_input", detail=detail, hint=hint)) from None
        except NotWired as error:
            status, word = (422, "bad_input") if error.asked else (503, "could_not_run")
            raise _Bad(
                status, Problem.model_validate({"error": word, "detail": str(error), "hint": error.hint})
            ) from None
        except (WorkerFailed, WiringError, OSError) as error:
            say(f"a sandbox could not be made: {error}")
            hint = getattr(error, "hint", "") or ""
            raise _Bad(503, Problem(error="could_not_run", detail=_line(error), hint=hint)) from None
        return _answer(api_schema.SandboxMade(sandbox=told(life), environment=_environment(life)), 201)

    async def show(self, request: web.Request) -> web.Response:
        return _answer(told(self._find(request)))

    async def revoke(self, request: web.Request) -> web.Response:
        life = await self._household.roster.end(self._find(request), "revoked", request[WHO])
        return _answer(told(life))

    async def kill(self, request: web.Request) -> web.Response:
        return _answer(api_schema.Ended(ended=await self._household.roster.end_all("revoked", request[WHO])))

    async def status(self, _: web.Request) -> web.Response:
        roster = self._household.roster
        return _answer(
            api_schema.Status(
                version=_version(),
                pid=os.getpid(),
                draining=roster.closed,
                sandboxes=len(roster.living),
                rules=roster.rules.digest,
            )
        )

    async def reload(self, _: web.Request) -> web.Response:
        try:
            notes = await self._household.reload()
        except BadInput as bad:
            raise _Bad(
                409, Problem(error="conflict", detail=str(bad), hint="the old rules stay in force")
            ) from None
        except WorkerFailed as error:
            raise _Bad(503, Problem(error="could_not_run", detail=str(error))) from None
        return _answer(api_schema.Reloaded(rules=self._household.roster.rules.digest, notes=notes))

    async def rules(self, _: web.Request) -> web.Response:
        archive = self._household.archive
        kept = await asyncio.to_thread(archive.kept)
        passed = archive.passed()
        return _answer(
            api_schema.RulesList(
                rules=self._household.roster.rules.digest,
                passed_over=passed.folder if passed is not None else None,
                kept=[
                    api_schema.KeptRules(
                        digest=one.digest, adopted=timestamp(one.adopted), policies=dict(one.policies)
                    )
                    for one in kept
                ],
            )
        )

    async def roll_back(self, request: web.Request) -> web.Response:
        wanted = await _read(request, BackWanted)
        try:
            back = await self._household.roll_back(wanted.digest, request[WHO])
        except Unkept as error:
            raise _Bad(404, Problem(error="not_found", detail=str(error))) from None
        except BadInput as bad:
            raise _Bad(
                409, Problem(error="conflict", detail=str(bad), hint="the rules of now stay in force")
            ) from None
        except WorkerFailed as error:
            raise _Bad(503, Problem(error="could_not_run", detail=str(error))) from None
        return _answer(api_schema.WentBack(rules=back.digest, before=back.before, notes=back.notes))

    async def describe(self, _: web.Request) -> web.Response:
        return web.json_response(api_schema.openapi())

    def _find(self, request: web.Request) -> Life:
        life = self._household.roster.find(request.match_info["id"])
        if life is None:
            raise _Bad(404, Problem(error="not_found", detail="there is no such sandbox"))
        return life


def _environment(life: Life) -> dict[str, str]:
    made = dict(life.wired.environment) if life.wired is not None else {}
    made |= dummies(life.keyring.file, life.keyring.policy, life.keyring.placeholders)
    return made | {"EGRESSD_SANDBOX": life.id}


async def _read[M: BaseModel](request: web.Request, model: type[M]) -> M:
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            content = await request.read()
    except TimeoutError:
        raise _Bad(
            408, Problem(error="timeout", detail=f"the body did not come within {_BODY_SECONDS:.0f} s")
        ) from None
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise _Bad(400, Problem(error="bad_request", detail=_said(error))) from None


def _said(error: ValidationError) -> str:
    """Say what does not fit by its place alone: a value may be a secret in the wrong field."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    places = (".".join(str(step)[:64] for step in each["loc"]) or "body" for each in found[:_MOST_PROBLEMS])
    return "; ".join(f"{place}: {each['msg']}" for place, each in zip(places, found, strict=False))[:1024]


def _version() -> str:
    try:
        return version("egressd")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:1024]


def _answer(model: BaseModel, status: int = 200) -> web.Response:
    return web.Response(status=status, body=model.model_dump_json().encode(), content_type="application/json")


def _problem(status: int, problem: Problem) -> web.Response:
    return _answer(problem, status)


def _refused(status: int, detail: str) -> web.Response:
    response = _problem(
        status, Problem(error="unauthorized" if status == 401 else "forbidden", detail=detail)
    )
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    response.force_close()
    return response


def _of_http(error: web.HTTPException) -> web.Response:
    """Return what aiohttp found wrong in the schema's words."""
    words = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}
    word = words.get(error.status, "bad_request")
    detail = "there is nothing here" if error.status == 404 else error.reason
    response = _problem(error.status, Problem.model_validate({"error": word, "detail": detail}))
    if isinstance(error, web.HTTPMethodNotAllowed):
        response.headers["Allow"] = ",".join(sorted(error.allowed_methods))
    return response


def description() -> str:
    """Return the API's description as it is kept in docs/openapi.json."""
    return json.dumps(api_schema.openapi(), indent=2, sort_keys=False) + "\n"
