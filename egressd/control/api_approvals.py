"""The part of the control API that speaks of approvals; the same for a daemon and for a run that stands alone.

Who approves is whom the kernel, a certificate or a token of his own says he is; `x-egressd-approver-token` carries the last.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Final, cast, get_args

from aiohttp import web

from egressd.control.api_schema import Problem
from egressd.control.api_wire import WHO, Bad, answer, read
from egressd.control.approvals.book import Given, Item, Refused
from egressd.control.approvals.office import Office
from egressd.control.approvals.people import Caller
from egressd.control.approvals.proposal import NoProposal
from egressd.control.approvals_schema import (
    ApprovalList,
    ApproveWanted,
    AskWanted,
    DenyWanted,
    GrantList,
    Patch,
    Scope,
    told_grant,
    told_item,
)
from egressd.control.peers import peer_of

TOKEN: Final = "x-egressd-approver-token"  # noqa: S105 -- the name of a field
_SCOPES: Final = get_args(Scope.__value__)


class ApprovalsApi:
    """The handlers, for an office that may be known only later."""

    def __init__(self, office: Callable[[], Office]) -> None:
        """`office` is asked at every request."""
        self._office_now = office

    def routes(self) -> list[web.RouteDef]:
        """Return what is served."""
        return [
            web.get("/v1/approvals", self.list_all),
            web.post("/v1/approvals", self.ask),
            web.get("/v1/approvals/{id}", self.show),
            web.post("/v1/approvals/{id}/approve", self.approve),
            web.post("/v1/approvals/{id}/deny", self.deny),
            web.get("/v1/approvals/{id}/proposal", self.propose),
            web.get("/v1/grants", self.grants),
            web.delete("/v1/grants/{id}", self.revoke),
        ]

    @property
    def _office(self) -> Office:
        return self._office_now()

    async def list_all(self, request: web.Request) -> web.Response:
        """What waits, or all that is known."""
        state = request.query.get("state", "waiting")
        if state not in ("waiting", "all"):
            raise Bad(400, Problem(error="bad_request", detail="state is waiting or all"))
        office = self._office
        waiting = list(office.book.waiting())
        items = waiting if state == "waiting" else list(office.book.items.values())
        told = [told_item(office, item) for item in items]
        return answer(ApprovalList(serial=office.serial, waiting=len(waiting), approvals=told))

    async def show(self, request: web.Request) -> web.Response:
        """One of them."""
        return answer(told_item(self._office, self._item(request)))

    async def ask(self, request: web.Request) -> web.Response:
        """Ask on a sandbox's behalf."""
        wanted = await read(request, AskWanted)
        office = self._office
        try:
            item = await office.ask(wanted.sandbox, wanted.request, caller_of(request))
        except Refused as refused:
            raise _conflict(refused) from None
        return answer(told_item(office, item), 201)

    async def approve(self, request: web.Request) -> web.Response:
        """Approve a question."""
        wanted = await read(request, ApproveWanted)
        office, item = self._office, self._item(request)
        caller = caller_of(request)
        try:
            await office.approve(item, wanted.scope, wanted.length, wanted.policy, caller, wanted.because)
        except Refused as refused:
            raise _conflict(refused) from None
        return answer(told_item(office, item))

    async def deny(self, request: web.Request) -> web.Response:
        """Refuse a question."""
        wanted = await read(request, DenyWanted)
        office, item = self._office, self._item(request)
        try:
            office.deny(item, caller_of(request), wanted.because)
        except Refused as refused:
            raise _conflict(refused) from None
        return answer(told_item(office, item))

    async def propose(self, request: web.Request) -> web.Response:
        """A patch of the rules."""
        scope = request.query.get("scope")
        if scope not in _SCOPES:
            raise Bad(400, Problem(error="bad_request", detail=f"scope is one of {', '.join(_SCOPES)}"))
        try:
            made = await self._office.propose(self._item(request), cast(Scope, scope))
        except NoProposal as problem:
            raise Bad(409, Problem(error="conflict", detail=str(problem)[:1024])) from None
        return answer(Patch(file=made.file, rule=made.rule, patch=made.patch))

    async def grants(self, _: web.Request) -> web.Response:
        """What is granted."""
        return answer(GrantList(grants=[told_grant(given) for given in self._office.book.grants.values()]))

    async def revoke(self, request: web.Request) -> web.Response:
        """Take a grant back."""
        given: Given | None = self._office.book.grants.get(request.match_info["id"])
        if given is None:
            raise Bad(404, Problem(error="not_found", detail="there is no such grant"))
        try:
            return answer(told_grant(self._office.revoke(given, caller_of(request))))
        except Refused as refused:
            raise _conflict(refused) from None

    def _item(self, request: web.Request) -> Item:
        item = self._office.book.items.get(request.match_info["id"])
        if item is None:
            raise Bad(404, Problem(error="not_found", detail="there is no such approval"))
        return item


def caller_of(request: web.Request) -> Caller:
    """Return who asks, as the kernel and TLS say; a token only as far as it was shown."""
    transport, uid, name = request.transport, None, None
    if transport is not None:
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            uid = _uid(sock)
        certificate = transport.get_extra_info("peercert") or {}
        found = [
            value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"
        ]
        name = found[0] if len(found) == 1 else None
    return Caller(request[WHO], uid, name, request.headers.get(TOKEN))


def _uid(sock: socket.socket) -> int | None:
    try:
        return peer_of(sock).uid
    except OSError:  # it has gone: then by nothing that it could be known by
        return None


def _conflict(refused: Refused) -> Bad:
    if refused.status == 503:
        return Bad(503, Problem(error="could_not_run", detail=refused.detail[:1024], hint=refused.hint))
    word = "forbidden" if refused.status == 403 else "conflict"
    problem = Problem.model_validate({"error": word, "detail": refused.detail[:1024], "hint": refused.hint})
    return Bad(refused.status, problem)
