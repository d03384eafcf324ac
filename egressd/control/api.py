"""The control API: who may speak, what is asked, and what is answered. Every way of failing is an answer of the schema's.

An id is looked up and never becomes a path or a command. Answers hold what `api_schema` says: no secret but a new token, once.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from aiohttp import web
from aiohttp.typedefs import Middleware

from egressd.control import api_schema
from egressd.control.api_approvals import ApprovalsApi
from egressd.control.api_schema import BackWanted, Problem, SandboxWanted, told
from egressd.control.api_wire import WHO as WHO
from egressd.control.api_wire import Bad, answer, problem_answer, read
from egressd.control.approvals.office import Office
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

type _Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Household(Protocol):
    """The daemon, as its API knows it."""

    @property
    def roster(self) -> Roster:
        """Its sandboxes."""

    @property
    def archive(self) -> Archive:
        """The copies of its rules."""

    @property
    def approvals(self) -> Office:
        """What its sandboxes ask people for."""

    async def reload(self) -> list[str]:
        """Read rules and credentials anew; returns what the operator is told. Raises BadInput, WorkerFailed."""

    async def roll_back(self, wanted: str | None, by: str) -> RolledBack:
        """Put a kept copy in force. Raises Unkept, BadInput, WorkerFailed."""


type Judge = Callable[[web.Request], tuple[int, str] | str]
"""Who asks, in words for a record; or the status and the sentence with which it is sent away."""


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
            *ApprovalsApi(lambda: household.approvals).routes(),
        ]
    )
    return app


def approvals_alone(office: Office, judge: Judge) -> web.Application:
    """Return the part of the API that a run without a daemon has."""
    app = web.Application(middlewares=[_answering(judge)], client_max_size=api_schema.MOST_BODY)
    app.add_routes(ApprovalsApi(lambda: office).routes())
    return app


def _answering(judge: Judge) -> Middleware:
    """Judge who asks before anything else is looked at, and turn whatever happens into an answer."""

    @web.middleware
    async def respond(request: web.Request, handler: _Handler) -> web.StreamResponse:
        try:
            who = judge(request)
            if not isinstance(who, str):
                return _refused(*who)
            request[WHO] = who
            return await handler(request)
        except web.HTTPException as error:
            return _of_http(error)
        except Bad as bad:
            return problem_answer(bad.status, bad.problem)
        except Exception as error:  # noqa: BLE001 -- an answer in any case, and never the error's own words
            say(f"control API: {request.method} failed: {type(error).__name__}")
            return problem_answer(
                500, Problem(error="internal_error", detail="it failed; egressd's own output says more")
            )

    return respond


class _Api:
    def __init__(self, household: Household) -> None:
        self._household = household

    async def list_all(self, _: web.Request) -> web.Response:
        return answer(
            api_schema.SandboxList(sandboxes=[told(life) for life in self._household.roster.living])
        )

    async def create(self, request: web.Request) -> web.Response:
        wanted = await read(request, SandboxWanted)
        roster = self._household.roster
        try:
            life = await roster.create(Wanted(**wanted.model_dump()))
        except Full as full:
            raise Bad(429, Problem(error="full", detail=str(full))) from None
        except BadInput as bad:
            detail, _, hint = str(bad).partition("\nhint: ")
            raise Bad(422, Problem(error="bad_input", detail=detail, hint=hint)) from None
        except NotWired as error:
            status, word = (422, "bad_input") if error.asked else (503, "could_not_run")
            raise Bad(
                status, Problem.model_validate({"error": word, "detail": str(error), "hint": error.hint})
            ) from None
        except (WorkerFailed, WiringError, OSError) as error:
            say(f"a sandbox could not be made: {error}")
            hint = getattr(error, "hint", "") or ""
            raise Bad(503, Problem(error="could_not_run", detail=_line(error), hint=hint)) from None
        return answer(api_schema.SandboxMade(sandbox=told(life), environment=_environment(life)), 201)

    async def show(self, request: web.Request) -> web.Response:
        return answer(told(self._find(request)))

    async def revoke(self, request: web.Request) -> web.Response:
        life = await self._household.roster.end(self._find(request), "revoked", request[WHO])
        return answer(told(life))

    async def kill(self, request: web.Request) -> web.Response:
        return answer(api_schema.Ended(ended=await self._household.roster.end_all("revoked", request[WHO])))

    async def status(self, _: web.Request) -> web.Response:
        roster = self._household.roster
        return answer(
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
            raise Bad(
                409, Problem(error="conflict", detail=str(bad), hint="the old rules stay in force")
            ) from None
        except WorkerFailed as error:
            raise Bad(503, Problem(error="could_not_run", detail=str(error))) from None
        return answer(api_schema.Reloaded(rules=self._household.roster.rules.digest, notes=notes))

    async def rules(self, _: web.Request) -> web.Response:
        archive = self._household.archive
        kept = await asyncio.to_thread(archive.kept)
        passed = archive.passed()
        return answer(
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
        wanted = await read(request, BackWanted)
        try:
            back = await self._household.roll_back(wanted.digest, request[WHO])
        except Unkept as error:
            raise Bad(404, Problem(error="not_found", detail=str(error))) from None
        except BadInput as bad:
            raise Bad(
                409, Problem(error="conflict", detail=str(bad), hint="the rules of now stay in force")
            ) from None
        except WorkerFailed as error:
            raise Bad(503, Problem(error="could_not_run", detail=str(error))) from None
        return answer(api_schema.WentBack(rules=back.digest, before=back.before, notes=back.notes))

    async def describe(self, _: web.Request) -> web.Response:
        return web.json_response(api_schema.openapi())

    def _find(self, request: web.Request) -> Life:
        life = self._household.roster.find(request.match_info["id"])
        if life is None:
            raise Bad(404, Problem(error="not_found", detail="there is no such sandbox"))
        return life


def _environment(life: Life) -> dict[str, str]:
    made = dict(life.wired.environment) if life.wired is not None else {}
    made |= dummies(life.keyring.file, life.keyring.policy, life.keyring.placeholders)
    return made | {"EGRESSD_SANDBOX": life.id}


def _version() -> str:
    try:
        return version("egressd")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"


def _line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:1024]


def _refused(status: int, detail: str) -> web.Response:
    response = problem_answer(
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
    response = problem_answer(error.status, Problem.model_validate({"error": word, "detail": detail}))
    if isinstance(error, web.HTTPMethodNotAllowed):
        response.headers["Allow"] = ",".join(sorted(error.allowed_methods))
    return response


def description() -> str:
    """Return the API's description as it is kept in docs/openapi.json."""
    return json.dumps(api_schema.openapi(), indent=2, sort_keys=False) + "\n"
