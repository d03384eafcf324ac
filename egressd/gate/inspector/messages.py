"""From our heads to mitmproxy's messages, and from its messages to HTTP/1 bytes."""

from __future__ import annotations

import time

from mitmproxy import http

from egressd.gate.inspector.head import Field, RequestHead, ResponseHead


def is_chunked(message: http.Message) -> bool:
    """Say whether the body of a message is written in chunks."""
    return "chunked" in message.headers.get("transfer-encoding", "").lower()


def head_of(response: http.Response) -> bytes:
    """Write the head of a response. An addon may have changed it: what would break out of its line ends the exchange instead."""
    return section(b"HTTP/1.1 %d %s" % (response.status_code, response.data.reason), response.headers.fields)


def request_head_of(request: http.Request, target: bytes, fields: tuple[Field, ...]) -> bytes:
    """Write the head of a request with this target and these fields, as `head_of` does."""
    return section(b"%s %s %s" % (request.data.method, target, request.data.http_version), fields)


def section(line: bytes, fields: tuple[Field, ...]) -> bytes:
    """Write a line and the fields behind it, to the empty line; ValueError for what would break out of its own."""
    lines = [line, *(b"%s: %s" % field for field in fields)]
    if any(b"\r" in part or b"\n" in part or b"\0" in part for part in lines):
        raise ValueError("a line break inside a head")
    return b"\r\n".join(lines) + b"\r\n\r\n"


def framed_body(message: http.Message, data: bytes) -> bytes:
    """Write a piece of a body."""
    return b"%x\r\n%s\r\n" % (len(data), data) if is_chunked(message) else data


def request_of(head: RequestHead) -> http.Request:
    """Return mitmproxy's request of a head; where it goes is filled in by the layer and the addon."""
    return http.Request(
        host="",
        port=0,
        method=head.method,
        scheme=b"",
        authority=head.authority,
        path=head.path,
        http_version=head.version,
        headers=http.Headers(head.fields),
        content=None,
        trailers=None,
        timestamp_start=time.time(),
        timestamp_end=None,
    )


def response_of(head: ResponseHead) -> http.Response:
    """Return mitmproxy's response of a head."""
    return http.Response(
        http_version=head.version,
        status_code=head.status,
        reason=head.phrase,
        headers=http.Headers(head.fields),
        content=None,
        trailers=None,
        timestamp_start=time.time(),
        timestamp_end=None,
    )
