"""What the control API says and hears, and its description in OpenAPI, made of the same models that judge what comes in.

A token stands in the answer to the request that made its sandbox and in no other; no other secret is in any.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.json_schema import models_json_schema

from egressd.control import approvals_schema
from egressd.control.lives import Life
from egressd.journal.record import timestamp

ID_PATTERN: Final = r"^sbx-[0-9a-f]{20}$"
MOST_BODY: Final = 64 * 1024
"""Bytes of a request's body."""
_TRACEPARENT = r"^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$"
_TEXT = r"^[^\x00-\x1f\x7f]*$"

type Key = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=_TEXT)]
type Value = Annotated[str, StringConstraints(max_length=256, pattern=_TEXT)]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class SandboxWanted(_Schema):
    """A sandbox to be made."""

    profile: str = Field(
        min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$", description="There is no default."
    )
    wiring: Literal["explicit", "gateway", "sidecar", "namespace"] = "explicit"
    labels: dict[Key, Value] = Field(default_factory=dict, max_length=32, description="For its records.")
    traceparent: str | None = Field(
        default=None, pattern=_TRACEPARENT, description="W3C trace context of the agent."
    )
    ttl: int | None = Field(default=None, ge=1, le=31_536_000, description="Seconds after which it is ended.")
    source: str | None = Field(
        default=None,
        max_length=64,
        pattern=r"^[0-9A-Fa-f.:]+$",
        description="The address that it comes from.",
    )
    mac: str | None = Field(default=None, pattern=r"^[0-9A-Fa-f]{2}(:[0-9A-Fa-f]{2}){5}$")
    port: str | None = Field(
        default=None,
        min_length=1,
        max_length=15,
        pattern=r"^[^/\s\x00-\x1f\x7f]+$",
        description="Its port of the bridge.",
    )
    pid: int | None = Field(
        default=None, ge=1, le=4_194_304, description="A process in its network namespace."
    )
    netns: str | None = Field(default=None, min_length=1, max_length=4096, pattern=r"^/[^\x00]*$")


class Sandbox(_Schema):
    """A sandbox as it is."""

    id: str = Field(pattern=ID_PATTERN)
    generation: int = Field(ge=0, description="Greater than that of every sandbox before it.")
    stage: Literal["creating", "ready", "ending", "gone"]
    ending: Literal["revoked", "expired", "ended", "failed", "drained"] | None = None
    profile: str
    canary: str | None = Field(
        default=None, description="The profile that it lives under in place of that one, for its labels."
    )
    policy: str = Field(description="The digest of the rules that it lives under.")
    wiring: Literal["explicit", "gateway", "sidecar", "namespace"]
    labels: dict[str, str]
    traceparent: str | None = None
    source: str | None = Field(
        default=None, description="The address that it comes from, once that is known."
    )
    created: str = Field(description="RFC 3339.")
    expires: str | None = None
    ended: str | None = None


class SandboxMade(_Schema):
    """A sandbox that was just made, and what its clients need: told this once."""

    sandbox: Sandbox
    environment: dict[str, str] = Field(description="Variables for its clients. The proxy's hold its token.")


class SandboxList(_Schema):
    """Those that are not gone, oldest first."""

    sandboxes: list[Sandbox]


class Ended(_Schema):
    """How many were ended."""

    ended: int = Field(ge=0)


class Status(_Schema):
    """The daemon."""

    version: str
    pid: int
    draining: bool
    sandboxes: int = Field(ge=0)
    rules: str = Field(description="The digest of the rule files in force.")


class Reloaded(_Schema):
    """What was read anew."""

    rules: str
    notes: list[str]


class KeptRules(_Schema):
    """A copy of rules that were in force."""

    digest: str = Field(description="Of the rule files.")
    adopted: str = Field(description="RFC 3339.")
    policies: dict[str, str] = Field(description="The digest of each profile's policy, as records have it.")


class RulesList(_Schema):
    """The rules in force, and those that one can go back to, the newest first."""

    rules: str = Field(description="The digest of those in force.")
    passed_over: str | None = Field(
        default=None,
        description="The digest of the rules folder while it is passed over, since somebody went back.",
    )
    kept: list[KeptRules]


class BackWanted(_Schema):
    """Where to go back to."""

    digest: str | None = Field(
        default=None,
        pattern=r"^[0-9a-f]{4,16}$",
        description="Of kept rules, or of a policy of theirs; its first digits do. The rules before those of now if left out.",
    )


class WentBack(_Schema):
    """What was put in force again."""

    rules: str
    before: str
    notes: list[str]


class Problem(_Schema):
    """Why not: a word of a closed set, and a sentence."""

    error: Literal[
        "forbidden", "unauthorized", "not_found", "method_not_allowed", "bad_request", "too_large", "bad_input",
        "conflict", "full", "could_not_run", "internal_error", "timeout",
    ]  # fmt: skip
    detail: str
    hint: str = ""


def told(life: Life) -> Sandbox:
    """Return a life as the API tells it."""
    return Sandbox(
        id=life.id,
        generation=life.generation,
        stage=life.stage,
        ending=life.ending,
        profile=life.profile,
        canary=life.canary,
        policy=life.policy,
        wiring=life.wiring,
        labels=life.labels,
        traceparent=life.traceparent,
        source=life.source,
        created=timestamp(life.created),
        expires=timestamp(life.expires) if life.expires is not None else None,
        ended=timestamp(life.ended) if life.ended is not None else None,
    )


_SAID: Final = {
    400: "The body is not what the schema says.",
    401: "Over TCP: no token, or a wrong one.",
    403: "Who asks may not, or is in a sandbox.",
    404: "There is no such sandbox, approval or grant, or no such rules are kept.",
    405: "The path knows no such method.",
    408: "The body did not come in time.",
    409: "Rules, what others have, or what was said before do not allow it.",
    413: "The body is too large.",
    422: "The profile, the wiring or the place cannot be used.",
    429: "There are as many sandboxes as there may be, or the daemon is ending.",
    500: "Something failed; nothing is half there.",
    503: "It could not be made here and now; nothing is left of it.",
}
_ALWAYS: Final = (401, 403, 500)
_HEARD: Final = (SandboxWanted, BackWanted, *approvals_schema.HEARD)
_ID: Final = {
    "name": "id",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": ID_PATTERN, "minLength": 24, "maxLength": 24},
}


def openapi() -> dict[str, Any]:
    """Return the description of the API."""
    models: list[type[BaseModel]] = [
        SandboxWanted, Sandbox, SandboxMade, SandboxList, Ended, Status, Reloaded, Problem,
        RulesList, BackWanted, WentBack, *approvals_schema.HEARD, *approvals_schema.TOLD,
    ]  # fmt: skip
    _, definitions = models_json_schema(
        [(model, "validation" if model in _HEARD else "serialization") for model in models],
        ref_template="#/components/schemas/{model}",
    )
    body = {"required": True, "content": {"application/json": {"schema": _ref("SandboxWanted")}}}
    back = {"required": True, "content": {"application/json": {"schema": _ref("BackWanted")}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "egressd control API",
            "version": "1",
            "description": "Spoken on the control socket by egressd's own uid and root, and over TCP where that is configured.",
        },
        "paths": {
            "/v1/sandboxes": {
                "get": _operation("list", "Every sandbox that is not gone.", {200: "SandboxList"}),
                "post": _operation(
                    "create", "Make a sandbox; what comes back once is its token.",
                    {201: "SandboxMade"}, 400, 408, 409, 413, 422, 429, 503,
                ) | {"requestBody": body},
                "delete": _operation("kill", "End every sandbox.", {200: "Ended"}),
            },
            "/v1/sandboxes/{id}": {
                "parameters": [_ID],
                "get": _operation("show", "A sandbox, also one of the last that are gone.", {200: "Sandbox"}, 404),
                "delete": _operation("revoke", "End a sandbox; answered when it is gone.", {200: "Sandbox"}, 404),
            },
            "/v1/status": {"get": _operation("status", "How the daemon is.", {200: "Status"})},
            "/v1/reload": {
                "post": _operation("reload", "Read rules and credentials anew.", {200: "Reloaded"}, 409, 503),
            },
            "/v1/rules": {"get": _operation("rules", "Rules that are kept.", {200: "RulesList"})},
            "/v1/rules/rollback": {
                "post": _operation(
                    "rollback", "Put kept rules in force, and pass the folder over until it changes.",
                    {200: "WentBack"}, 400, 404, 408, 409, 413, 503,
                ) | {"requestBody": back},
            },
            **approvals_schema.paths(_operation, _ref),
            "/openapi.json": {"get": _operation("describe", "This description.", {200: None})},
        },
        "components": {
            "schemas": dict(sorted(definitions["$defs"].items())),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}, "certificate": {"type": "mutualTLS"}},
        },
    }  # fmt: skip


def _operation(name: str, summary: str, good: dict[int, str | None], *bad: int) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, model in good.items():
        content = {"application/json": {"schema": _ref(model) if model is not None else {"type": "object"}}}
        responses[str(status)] = {"description": "Done.", "content": content}
    for status in sorted({*bad, *_ALWAYS}):
        content = {"application/json": {"schema": _ref("Problem")}}
        responses[str(status)] = {"description": _SAID[status], "content": content}
    return {"operationId": name, "summary": summary, "responses": responses}


def _ref(model: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model}"}
