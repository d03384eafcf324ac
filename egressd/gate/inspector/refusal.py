"""How a denial looks: one sentence that says what was refused, why and what to do, in the form the client can read. Pure.

The sentence stands in the reason phrase (which many tools print and nothing else), and as the first line of
the body; JSON where `Accept` asks for it. It names the host as it was judged, the reason and the attempt;
never an address, a secret or anything of another sandbox (law 10). No `Server` field: a site's own answer and
egressd's are told apart by the `x-egressd-` fields alone, which are taken out of what sites send.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from egressd.gate import internal
from egressd.policy.attempt import Address, Name
from egressd.policy.names import format_name
from egressd.policy.reasons import WORDS, Reason

_UNSAFE = re.compile(r"[^\x20-\x7e]")
_MAX_ACCEPT = 1024
_MORE = f"http://{format_name(internal.NAME)}/"
"""Where a sandbox can read what it may do, and what it was refused."""
_UPSTREAM = frozenset(reason for reason in Reason if reason.value.startswith("upstream_"))
_JSON_TYPES = ("application/json", "application/problem+json")


@dataclass(frozen=True, slots=True)
class Refused:
    """What is refused, as far as it is known."""

    attempt_id: str
    sandbox: str
    host: Name | Address | None = None
    port: int | None = None
    method: str | None = None
    accept: str | None = None
    retry_after: int | None = None
    """Seconds until it is worth asking again."""
    status: int | None = None
    hint: str | None = None
    allow: str | None = None
    """What the words of a reason cannot know: another status and hint, and for a 405 the methods that there are."""
    approval: str | None = None
    """As what it waits for a person."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A response of egressd's own: `fields` are complete, the connection closes after it."""

    reason: Reason
    status: int
    phrase: str
    fields: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def to_http1(self, *, head_only: bool = False) -> bytes:
        """Return the response as HTTP/1.1 writes it; `head_only` for the answer to HEAD."""
        lines = [f"HTTP/1.1 {self.status} {self.phrase}".encode("ascii")]
        lines += [name + b": " + value for name, value in self.fields]
        return b"\r\n".join(lines) + b"\r\n\r\n" + (b"" if head_only else self.body)


def refuse_http(reason: Reason, refused: Refused) -> Refusal:
    """Return the response that tells a client of a refusal, in JSON or in plain text as its `accept` prefers."""
    words = WORDS[reason]
    hint = words.hint if refused.hint is None else refused.hint
    status = refused.status or (words.status if words.status >= 400 else 403)
    where = _where(refused)
    kind = "upstream error" if reason in _UPSTREAM else "denied"
    sentence = f"egressd: {kind}: {words.says}{': ' + where if where else ''} (reason {reason.value})"
    if prefers_json(refused.accept):
        content_type, body = b"application/json", _json(reason, sentence, hint, refused)
    else:
        lines = [
            sentence,
            f"hint: {hint}" if hint else "",
            f"attempt: {refused.attempt_id}",
            f"more: {_MORE}",
        ]
        content_type, body = (
            b"text/plain; charset=utf-8",
            "".join(f"{line}\n" for line in lines if line).encode("ascii"),
        )
    allow = ((b"allow", refused.allow.encode("ascii")),) if refused.allow is not None else ()
    later = ((b"retry-after", b"%d" % refused.retry_after),) if refused.retry_after is not None else ()
    fields = _fields(reason, content_type, body, refused.attempt_id)
    return Refusal(reason, status, sentence, (*allow, *later, *fields), body)


def answer_http(content_type: str, body: bytes, attempt_id: str) -> Refusal:
    """Return the response that carries one of egressd's own pages."""
    reason = Reason.INTERNAL_PAGE
    return Refusal(reason, 200, "OK", _fields(reason, content_type.encode("ascii"), body, attempt_id), body)


def _fields(
    reason: Reason, content_type: bytes, body: bytes, attempt_id: str
) -> tuple[tuple[bytes, bytes], ...]:
    return (
        (b"content-type", content_type),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
        (b"x-egressd-reason", reason.value.encode()),
        (b"x-egressd-attempt", attempt_id.encode()),
        (b"connection", b"close"),
    )


def prefers_json(accept: str | None) -> bool:
    """Say whether an Accept value names JSON, and no plain text above it; total, and linear in its first kilobyte."""
    if not accept:
        return False
    best = {"json": 0.0, "text": 0.0}
    for part in accept[:_MAX_ACCEPT].lower().split(","):
        media, *parameters = (piece.strip() for piece in part.split(";"))
        kind = (
            "json"
            if media in _JSON_TYPES or media.endswith("+json")
            else "text"
            if media.startswith("text/")
            else None
        )
        if kind is not None:
            best[kind] = max(best[kind], _quality(parameters))
    return best["json"] > 0 and best["json"] >= best["text"]


def _quality(parameters: list[str]) -> float:
    for parameter in parameters:
        if re.fullmatch(r"q=(0(\.[0-9]{0,3})?|1(\.0{0,3})?)", parameter):
            return float(parameter[2:])
    return 1.0


def _host(refused: Refused) -> str | None:
    if refused.host is None:
        return None
    # A name in normal form needs no escape; the filter is for the day that something else gets here.
    return (
        _UNSAFE.sub("?", format_name(refused.host)) if isinstance(refused.host, tuple) else "a bare address"
    )


def _where(refused: Refused) -> str:
    host = _host(refused)
    if host is None:
        return ""
    return f"{host}:{refused.port}" if refused.port and isinstance(refused.host, tuple) else host


def _json(reason: Reason, sentence: str, hint: str, refused: Refused) -> bytes:
    content = {
        "error": "upstream_error" if reason in _UPSTREAM else "denied",
        "reason": reason.value,
        "message": sentence,
        "host": _host(refused),
        "port": refused.port,
        "method": refused.method,
        "sandbox": refused.sandbox,
        "attempt": refused.attempt_id,
        "hint": hint,
        "approval": refused.approval,
        "more": _MORE,
        "retry_after": refused.retry_after,
    }
    return (
        json.dumps(
            {key: value for key, value in content.items() if value not in (None, "")}, ensure_ascii=True
        ).encode()
        + b"\n"
    )
