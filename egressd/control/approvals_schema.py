"""What the control API says and hears of approvals: the models, and what its description says of their paths."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from egressd.control.approvals.book import Given, Item
from egressd.control.approvals.office import Office
from egressd.journal.record import timestamp
from egressd.rulefiles.problems import printable

APPROVAL: Final = r"^apr-[0-9a-f]{16}$"
GRANT: Final = r"^gnt-[0-9a-f]{16}$"
_SANDBOX = r"^sbx-[0-9a-f]{20}$"
_DIGEST = r"^[0-9a-f]{16}$"
_TEXT = r"^[^\x00-\x1f\x7f]*$"

type Scope = Literal["request", "template", "host", "connection"]
type Length = Literal["once", "15m", "life"]
type Because = Annotated[str, StringConstraints(max_length=300, pattern=_TEXT)]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class AskWanted(_Schema):
    """A request of a sandbox that somebody may approve: asked for by an operator, on its behalf."""

    sandbox: str = Field(pattern=_SANDBOX)
    request: str = Field(
        min_length=1, max_length=2048, pattern=_TEXT, description="METHOD URL, or tcp://host:port."
    )


class ApproveWanted(_Schema):
    """An approval: of which scope, for how long, and under which rules it was reviewed."""

    scope: Scope
    length: Length
    policy: str = Field(pattern=_DIGEST, description="The `policy` of the approval as it was shown.")
    because: Because = ""


class DenyWanted(_Schema):
    """A refusal."""

    because: Because = ""


class Option(_Schema):
    """What can be granted; the narrowest comes first."""

    scope: Scope
    covers: str
    opens: list[str] = Field(description="What else that opens, beyond the request that was asked for.")
    lengths: list[Length]


class Approval(_Schema):
    """A question that a sandbox's request has put, and what people said."""

    id: str = Field(pattern=APPROVAL)
    state: Literal["waiting", "approved", "denied", "lapsed"]
    sandbox: str
    labels: dict[str, str]
    profile: str
    policy: str = Field(
        pattern=_DIGEST, description="The digest of the rules that it was judged by; others end it."
    )
    request: str = Field(description="METHOD URL without its query, tcp://host:port, or TLS to host:port.")
    verdict: Literal["ask", "deny"] = Field(
        description="What holds without an approval: a rule asks, or no rule speaks of it."
    )
    reason: str
    rule: str | None = None
    place: str | None = None
    approvers: list[str] = Field(
        description="Whom the rule wants, by name or group; empty: anybody who may ask here."
    )
    credentials: list[str] = Field(description="Those that rules attach on this host.")
    needed: int = Field(ge=1, le=2, description="How many people must approve it.")
    approved_by: list[str] = Field(description="Who has, while more are needed.")
    asked_by: Literal["traffic", "sandbox", "operator"]
    untrusted_words: str | None = Field(
        default=None,
        description="Why, in the words of the program in the sandbox: no fact, escaped to one line of printable text.",
    )
    asked: str = Field(description="RFC 3339.")
    last: str
    count: int = Field(ge=1)
    options: list[Option]
    scope: Scope | None = None
    length: Length | None = None
    by: str | None = None
    because: str | None = None
    decided: str | None = None
    grant: str | None = None


class ApprovalList(_Schema):
    """The latest last; `serial` grows with every change."""

    serial: int = Field(ge=0)
    waiting: int = Field(ge=0)
    approvals: list[Approval]


class GrantTold(_Schema):
    """A grant: what a person has let through for a while."""

    id: str = Field(pattern=GRANT)
    approval: str
    state: Literal["live", "spent", "expired", "revoked", "lapsed"]
    sandbox: str
    policy: str
    covers: str
    scope: Scope
    length: Length
    begins: str
    ends: str
    by: str
    because: str
    over: str | None = None
    over_by: str | None = None
    attempt: str | None = Field(
        default=None, description="The attempt that a grant for one request was spent on."
    )


class GrantList(_Schema):
    """Those that are not over, and the last that are, the latest last."""

    grants: list[GrantTold]


class Patch(_Schema):
    """A change of the rules for `patch -p1` in their folder; it has passed what `egressd check` looks at."""

    file: str
    rule: str
    patch: str


HEARD: Final[tuple[type[BaseModel], ...]] = (AskWanted, ApproveWanted, DenyWanted)
TOLD: Final[tuple[type[BaseModel], ...]] = (Option, Approval, ApprovalList, GrantTold, GrantList, Patch)


def told_item(office: Office, item: Item) -> Approval:
    """Return a question as the API tells it."""
    case, subject, entry = item.case, item.subject, item.case.entry
    sandbox = office.sandbox_of(item)
    open_ = item.state == "waiting"
    return Approval(
        id=item.id,
        state=item.state,
        sandbox=subject.sandbox,
        labels=dict(sandbox.labels) if sandbox is not None else {},
        profile=case.profile,
        policy=case.policy,
        request=subject.what,
        verdict="ask" if case.decision.verdict == "ask" else "deny",
        reason=case.decision.reason.value,
        rule=entry.id if entry is not None else None,
        place=entry.place if entry is not None else None,
        approvers=list(case.approvers),
        credentials=list(case.credentials),
        needed=office.needed(item),
        approved_by=[vote.name for vote in item.votes] if open_ else [],
        asked_by=item.asker,
        untrusted_words=printable(item.words) if item.words else None,
        asked=timestamp(item.asked),
        last=timestamp(item.last),
        count=item.count,
        options=[
            Option(scope=one.scope, covers=one.covers, opens=list(one.opens), lengths=list(one.lengths))
            for one in case.options
        ],
        scope=item.scope,
        length=item.length,
        by=item.by or None,
        because=item.because or None,
        decided=timestamp(item.decided) if item.decided is not None else None,
        grant=item.grant,
    )


def told_grant(given: Given) -> GrantTold:
    """Return a grant as the API tells it."""
    grant = given.grant
    return GrantTold(
        id=grant.id,
        approval=given.item,
        state=given.state,
        sandbox=grant.sandbox,
        policy=grant.policy,
        covers=given.what,
        scope=grant.scope,
        length=given.length,
        begins=timestamp(grant.begins),
        ends=timestamp(grant.ends),
        by=given.by,
        because=given.because,
        over=timestamp(given.over) if given.over is not None else None,
        over_by=given.over_by or None,
        attempt=given.attempt or None,
    )


def _id(pattern: str) -> dict[str, Any]:
    schema = {"type": "string", "pattern": pattern, "minLength": 20, "maxLength": 20}
    return {"name": "id", "in": "path", "required": True, "schema": schema}


def paths(operation: Any, ref: Any) -> dict[str, Any]:
    """Return what the description says of the paths; `operation` and `ref` are those of `api_schema`."""

    def body(model: str) -> dict[str, Any]:
        return {"requestBody": {"required": True, "content": {"application/json": {"schema": ref(model)}}}}

    state = {"type": "string", "enum": ["waiting", "all"], "default": "waiting"}
    scope = {"type": "string", "enum": ["request", "template", "host", "connection"]}
    return {
        "/v1/approvals": {
            "get": operation("approvals", "What waits for people, or all that is known.", {200: "ApprovalList"}, 400)
            | {"parameters": [{"name": "state", "in": "query", "required": False, "schema": state}]},
            "post": operation(
                "ask", "Ask for a request on a sandbox's behalf.", {201: "Approval"}, 400, 408, 409, 413
            )
            | body("AskWanted"),
        },
        "/v1/approvals/{id}": {
            "parameters": [_id(APPROVAL)],
            "get": operation("approval", "One of them.", {200: "Approval"}, 404),
        },
        "/v1/approvals/{id}/approve": {
            "parameters": [_id(APPROVAL)],
            "post": operation(
                "approve", "Approve it; where two people are needed, the first one's word is kept.",
                {200: "Approval"}, 400, 404, 408, 409, 413, 503,
            )
            | body("ApproveWanted"),
        },
        "/v1/approvals/{id}/deny": {
            "parameters": [_id(APPROVAL)],
            "post": operation("deny", "Refuse it.", {200: "Approval"}, 400, 404, 408, 409, 413) | body("DenyWanted"),
        },
        "/v1/approvals/{id}/proposal": {
            "parameters": [_id(APPROVAL)],
            "get": operation("propose", "A patch that would allow it for good.", {200: "Patch"}, 400, 404, 409)
            | {"parameters": [{"name": "scope", "in": "query", "required": True, "schema": scope}]},
        },
        "/v1/grants": {"get": operation("grants", "What is granted.", {200: "GrantList"})},
        "/v1/grants/{id}": {
            "parameters": [_id(GRANT)],
            "delete": operation("revoke_grant", "Take a grant back: what went by it is cut.", {200: "GrantTold"}, 404, 409),
        },
    }  # fmt: skip
