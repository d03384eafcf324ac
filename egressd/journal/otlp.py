"""OpenTelemetry: records as log records, and attempts as spans that join the agent's own trace, over OTLP/HTTP.

Where to, with which headers and how long is said by the standard variables (OTEL_EXPORTER_OTLP_ENDPOINT and its kin); names of
attributes are those of the stable HTTP semantic conventions, and `egressd.*` for what they do not know. An attempt's span has for
its parent the attempt that began the story, which has for its own the `traceparent` that the sandbox was started with.

Needs the extra `otel`.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from egressd.journal.feed import Fields, Unsent
from egressd.journal.ocsf import milliseconds, own_version, url_of

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk._logs import ReadableLogRecord
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext

type Signals = Literal["logs", "spans", "both"]

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})\Z", re.ASCII)
_METHODS: Final = frozenset(
    ["CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"]
)
_OPEN_LIMIT: Final = 20_000
"""Decisions that are kept for the spans of their ends."""
_LASTING = ("connection", "request")
_WELL = (None, "completed", "client_closed")
_OF_DECISIONS = ("verdict", "rule", "place", "would_deny", "path", "query", "grant", "credential", "alpn")


class NoTelemetry(Exception):
    """The SDK is not installed; the text says what to install."""


class Ids(NamedTuple):
    """Where an attempt stands in a trace: its trace, its span, its parent's span (0: none), and whether the trace is sampled."""

    trace: int
    span: int
    parent: int
    sampled: bool


class OtlpOutlet:
    """An OTLP receiver."""

    name = "OTLP"

    def __init__(self, signals: Signals) -> None:
        """Make the exporters by the environment; raises NoTelemetry."""
        try:
            from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            raise NoTelemetry(f"{error}; install egressd[otel]") from None
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # the feed tells the operator, once
        self._logs = OTLPLogExporter() if signals != "spans" else None
        self._spans = OTLPSpanExporter() if signals != "logs" else None
        self._open: OrderedDict[str, Fields] = OrderedDict()
        self._logs_done = 0

    def send(self, records: Sequence[Fields], seconds: float) -> None:  # noqa: ARG002 -- OTEL_EXPORTER_OTLP_TIMEOUT says how long
        """Export what the records say."""
        from opentelemetry.sdk._logs.export import LogRecordExportResult
        from opentelemetry.sdk.trace.export import SpanExportResult

        if self._logs is not None and not self._logs_done:
            if (
                self._logs.export([self._log(fields) for fields in records])
                is not LogRecordExportResult.SUCCESS
            ):
                raise Unsent("the receiver did not take the logs")
            self._logs_done = 1
        if self._spans is not None:
            spans = [span for fields in records if (span := self._span(fields)) is not None]
            if spans and self._spans.export(spans) is not SpanExportResult.SUCCESS:
                raise Unsent("the receiver did not take the spans")
            self._remember(records)
        self._logs_done = 0

    def close(self) -> None:
        """End the exporters."""
        if self._logs is not None:
            self._logs.shutdown()  # type: ignore[no-untyped-call]  # the SDK leaves it without annotations
        if self._spans is not None:
            self._spans.shutdown()  # type: ignore[no-untyped-call]  # the same

    # logs

    def _log(self, fields: Fields) -> ReadableLogRecord:
        from opentelemetry._logs import LogRecord, SeverityNumber
        from opentelemetry.sdk._logs import ReadableLogRecord

        level = _severity(fields)
        log = LogRecord(
            timestamp=milliseconds(fields) * 1_000_000,
            observed_timestamp=milliseconds(fields) * 1_000_000,
            context=_context(ids_of(fields)),
            severity_text=level,
            severity_number=SeverityNumber[level],
            body=_words(fields),
            attributes=attributes_of(fields),
            event_name=f"egressd.{fields.get('event')}",
        )
        return ReadableLogRecord(log, self._resource, self._scope)

    # spans

    def _span(self, fields: Fields) -> ReadableSpan | None:
        """Return the span that is over with this record, if one is."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.status import Status, StatusCode

        event = fields.get("event")
        if event not in ("decision", "end") or (event == "decision" and _will_end(fields)):
            return None
        ids = ids_of(fields)
        if not ids.sampled:
            return None
        told = fields
        if event == "end" and (decided := self._decided(fields)) is not None:
            told = {**{name: decided[name] for name in _OF_DECISIONS if name in decided}, **fields}
        end = milliseconds(fields) * 1_000_000
        duration = fields.get("duration_ms")
        lasted = int(duration * 1_000_000) if isinstance(duration, int | float) and event == "end" else 0
        wrong = error_of(told)
        return ReadableSpan(
            name=_span_name(told),
            context=_span_context(ids, ids.span),
            parent=_span_context(ids, ids.parent) if ids.parent else None,
            resource=self._resource,
            attributes=attributes_of(told) | ({"error.type": wrong} if wrong else {}),
            kind=SpanKind.CLIENT,
            status=Status(StatusCode.ERROR, wrong) if wrong else Status(StatusCode.UNSET),
            start_time=max(0, end - lasted),
            end_time=end,
            instrumentation_scope=self._scope,
        )

    def _decided(self, fields: Fields) -> Fields | None:
        return self._open.get(str(fields.get("attempt_id")))

    def _remember(self, records: Sequence[Fields]) -> None:
        """Keep what ends will need; only once the batch is through, so that a second try finds the same."""
        for fields in records:
            attempt = str(fields.get("attempt_id"))
            if fields.get("event") == "end":
                self._open.pop(attempt, None)
            elif fields.get("event") == "decision" and _will_end(fields):
                self._open[attempt] = fields
                if len(self._open) > _OPEN_LIMIT:
                    self._open.popitem(last=False)

    @cached_property
    def _resource(self) -> Resource:
        from opentelemetry.sdk.resources import Resource

        return Resource.create({"service.name": "egressd", "service.version": own_version()})

    @cached_property
    def _scope(self) -> InstrumentationScope:
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        return InstrumentationScope("egressd", own_version())


def ids_of(fields: Mapping[str, Any]) -> Ids:
    """Return where a record's attempt stands in its trace; total."""
    attempt, root = str(fields.get("attempt_id")), str(fields.get("root_id"))
    match = _TRACEPARENT.match(str(fields.get("traceparent")))
    trace, outer, sampled = _number(root, 32), 0, True
    if match is not None and int(match[1], 16) and int(match[2], 16):
        trace, outer, sampled = int(match[1], 16), int(match[2], 16), bool(int(match[3], 16) & 1)
    return Ids(trace, _span_id(attempt), outer if attempt == root else _span_id(root), sampled)


def attributes_of(fields: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Return the attributes of a record: semantic conventions where they have a name, `egressd.*` otherwise."""
    found: dict[str, Any] = {f"egressd.{name}": fields.get(name) for name in _OWN}
    found["egressd.sandbox.id"] = fields.get("sandbox")
    found["server.address"] = fields.get("host") or fields.get("host_raw") or fields.get("address")
    found["server.port"] = fields.get("port")
    found["network.peer.address"] = fields.get("upstream")
    found["network.transport"] = "udp" if fields.get("channel") == "dns-udp" else fields.get("protocol")
    labels = fields.get("labels")
    if isinstance(labels, dict):
        found |= {f"egressd.label.{name}": text for name, text in labels.items()}
    if fields.get("layer") == "dns":
        found["dns.question.name"] = fields.get("host") or fields.get("host_raw")
    if fields.get("layer") == "request":
        method = str(fields.get("method"))
        known = method in _METHODS
        found["http.request.method"] = method if known else "_OTHER"
        found["http.request.method_original"] = None if known else method
        if "path" in fields:
            found["url.full"] = url_of(fields)
        found["url.scheme"] = fields.get("scheme")
        found["http.response.status_code"] = fields.get("status")
        found["http.request.size"], found["http.response.size"] = (
            fields.get("bytes_up"),
            fields.get("bytes_down"),
        )
        alpn = fields.get("alpn")
        found["network.protocol.version"] = (
            {"h2": "2", "http/1.1": "1.1"}.get(alpn) if isinstance(alpn, str) else None
        )
    return {name: value for name, value in found.items() if isinstance(value, str | int | float | bool)}


_OWN: Final = (
    *(
        "event",
        "layer",
        "channel",
        "verdict",
        "reason",
        "rule",
        "place",
        "treatment",
        "would_deny",
        "profile",
    ),
    *("policy", "source", "sni", "qtype", "count", "credential", "lease", "grant", "alert", "detail", "seq"),
    *("attempt_id", "root_id", "bytes_up", "bytes_down", "duration_ms"),
)


def error_of(fields: Mapping[str, Any]) -> str:
    """Return what `error.type` says: the reason of a denial or of a bad end, or the status of a bad answer; empty: nothing."""
    reason, status = fields.get("reason"), fields.get("status")
    if fields.get("event") == "decision" and fields.get("verdict") in ("deny", "ask"):
        return str(reason)
    if fields.get("event") == "end" and reason not in _WELL:
        return str(reason)
    return str(status) if type(status) is int and status >= 400 else ""


def _will_end(fields: Mapping[str, Any]) -> bool:
    return fields.get("verdict") == "allow" and fields.get("layer") in _LASTING


def _severity(fields: Mapping[str, Any]) -> str:
    if fields.get("event") == "alert":
        return "ERROR"
    bad = fields.get("event") in ("lost", "journal") or fields.get("verdict") in ("deny", "ask")
    return "WARN" if bad else "INFO"


def _words(fields: Mapping[str, Any]) -> str:
    what = url_of(fields) if fields.get("layer") == "request" else fields.get("host") or fields.get("address")
    parts = (
        fields.get("event"),
        fields.get("verdict"),
        fields.get("method"),
        what,
        fields.get("reason"),
        fields.get("detail"),
    )
    return " ".join(part for part in parts if isinstance(part, str))


def _span_name(fields: Mapping[str, Any]) -> str:
    match fields.get("layer"):
        case "request":
            method = str(fields.get("method"))
            return method if method in _METHODS else "HTTP"
        case "dns":
            return "DNS"
        case layer:
            return "connect" if layer == "connection" else str(layer)


def _context(ids: Ids) -> Context:
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    return set_span_in_context(NonRecordingSpan(_span_context(ids, ids.span)))


def _span_context(ids: Ids, span: int) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(ids.trace, span, is_remote=False, trace_flags=TraceFlags(int(ids.sampled)))


def _span_id(attempt: str) -> int:
    """Return the random half of an attempt's id."""
    try:
        return int(attempt[-16:], 16) or 1
    except ValueError:
        return _number(attempt, 16)


def _number(text: str, digits: int) -> int:
    return int(hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:digits], 16) or 1
