"""The record: the schema of one journal line, and how an attempt becomes one.

A record is a flat JSON object on one line, printable ASCII only, so that no byte a sandbox chose can forge,
hide or break a line. Text that was not valid UTF-8 is kept by backslash escapes; long text is cut, with its
length and a hash.

Events: `decision` (one for each attempt, written before the first upstream byte), `end` (at close), `lost`
(records that the kernel or a limit dropped, counted), `sandbox` (created, ready, gone), `policy` (loaded,
refused), `approval` (what was asked of people, and what they said), `alert` (a person should look at this), `head` (the
chain so far, signed), `journal` (what became of the file itself).
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import json
import secrets
import time
from dataclasses import dataclass
from typing import Any, Literal

from egressd.policy.attempt import Decision

SCHEMA = 1
TEXT_LIMIT = 1024
"""Longest text kept in one field, in characters; the rest is replaced by its length and a hash."""

NOBODY = "unknown"
"""Stands for the sandbox in the record of an attempt that belongs to none; no sandbox has this id."""

type Layer = Literal["dns", "connection", "request", "packet"]
type Event = Literal["decision", "end", "lost", "sandbox", "policy", "approval", "alert", "head", "journal"]
type Alert = Literal["metadata", "dns_tunnel", "placeholder", "key"]
"""A metadata endpoint was tried; names that look like data; a placeholder, or a key, where it should not be."""


def new_id() -> str:
    """Return a fresh attempt id: 28 hex digits; 48 bits of milliseconds (ids sort by time), 64 random."""
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(8)}"


def clip(text: str | bytes, limit: int = TEXT_LIMIT) -> str:
    """Return `text` fit for a record: undecodable bytes escaped, cut at `limit` with length and hash."""
    if isinstance(text, str) and len(text) <= limit and text.isascii():
        return text
    if isinstance(text, bytes):
        raw = text
        text = text.decode("utf-8", "backslashreplace")
    else:
        raw = text.encode("utf-8", "surrogatepass")
        text = raw.decode("utf-8", "backslashreplace")
    if len(text) <= limit:
        return text
    return f"{text[:limit]}…[{len(raw)} bytes, sha256 {hashlib.sha256(raw).hexdigest()[:16]}]"


@dataclass(slots=True, kw_only=True)
class Record:
    """One line of the journal; fields that are None are left out.

    `time` is RFC 3339 UTC in microseconds and is set at creation; `seq` is set by control when it writes.
    `place` is `file:line`. `would_deny` says that the attempt passed only because a profile or a rule observes; `would_reason`,
    `would_rule` and `would_place` are those of the deny that it would have been. `host` is the judged name in normal form,
    `host_raw` what was sent when that differs or does not parse. `address` and `port` are what the sandbox dialled; `upstream`
    what egressd dialled. `grant` is the approval that allowed it. `credential` and `lease` name what was attached,
    `lease_expires` (RFC 3339) its end. `source` is the address that the attempt came from, where sandboxes are told apart by it.
    `count` folds repeats. Bytes are payload bytes, `up` from the sandbox. `torn`, `key`, `prev` and `signature` are the chain's
    own (`chain`, `heads`), set as it is written. docs/records.md explains each field.
    """

    event: Event
    sandbox: str
    attempt_id: str
    root_id: str
    layer: Layer | None = None
    channel: str | None = None
    verdict: str | None = None
    reason: str | None = None
    rule: str | None = None
    place: str | None = None
    treatment: str | None = None
    would_deny: bool | None = None
    would_reason: str | None = None
    would_rule: str | None = None
    would_place: str | None = None
    grant: str | None = None
    profile: str | None = None
    policy: str | None = None
    labels: dict[str, str] | None = None
    traceparent: str | None = None
    source: str | None = None
    host: str | None = None
    host_raw: str | None = None
    address: str | None = None
    port: int | None = None
    scheme: str | None = None
    sni: str | None = None
    alpn: str | None = None
    method: str | None = None
    path: str | None = None
    query: str | None = None
    qtype: str | None = None
    further: bool | None = None
    protocol: str | None = None
    count: int | None = None
    credential: str | None = None
    lease: str | None = None
    lease_expires: str | None = None
    status: int | None = None
    upstream: str | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    duration_ms: float | None = None
    alert: str | None = None
    detail: str | None = None
    torn: str | None = None
    key: str | None = None
    prev: str | None = None
    signature: str | None = None
    time: str = dataclasses.field(default_factory=lambda: timestamp(time.time()))
    schema: int = SCHEMA
    seq: int | None = None

    def decided(self, decision: Decision) -> Record:
        """Fill in verdict, reason, rule, place and treatment from a decision; returns self."""
        self.verdict = decision.verdict
        self.reason = decision.reason.value
        self.treatment = decision.treatment
        if decision.would_deny:
            self.would_deny = True
            self.would_reason = decision.would_reason.value if decision.would_reason is not None else None
        if decision.would_entry is not None:
            self.would_rule = decision.would_entry.id
            self.would_place = decision.would_entry.place
        self.grant = decision.grant
        if decision.entry is not None:
            self.rule = decision.entry.id
            self.place = decision.entry.place
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that are set, in order and JSON-ready, with long or undecodable text clipped."""
        result: dict[str, Any] = {}
        for name in FIELDS:
            value = getattr(self, name)
            if value is None:
                continue
            result[name] = clip(value) if isinstance(value, str) else value
        return result


_FIRST = ("time", "schema", "seq", "event")
FIELDS = (*_FIRST, *(field.name for field in dataclasses.fields(Record) if field.name not in _FIRST))
"""Every field of a record in the order it is written."""


def timestamp(seconds: float) -> str:
    """Return RFC 3339 UTC with microseconds for a Unix time."""
    moment = dt.datetime.fromtimestamp(seconds, dt.UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


_JSON = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False)


def to_line(fields: dict[str, Any]) -> bytes:
    """Return the journal line of a record's mapping: printable ASCII JSON and one newline."""
    text = _JSON.encode(fields)
    # JSON leaves DEL alone, terminals do not; inside JSON it can stand in a string only
    return text.replace("\x7f", "\\u007f").encode("ascii") + b"\n"
