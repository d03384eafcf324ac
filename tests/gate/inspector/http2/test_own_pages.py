"""egressd.internal and a site's own addons over HTTP/2: the same judgement as over HTTP/1, stream by stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
from mitmproxy import http

from egressd.gate import internal
from egressd.gate.connection import Destination
from egressd.gate.inspector.http2.engine import Http2Engine
from egressd.gate.tls.stream import ByteStream
from egressd.policy.attempt import Decision
from egressd.policy.reasons import Reason
from tests.gate.inspector.http2.scene import Scene
from tests.gate.inspector.lab import HOST, run

OWN = "egressd.internal"


def own_scene() -> Scene:
    """A connection to egressd's own name, which has no upstream."""
    scene = Scene()
    connection = scene.connection
    connection.destination = Destination(443, internal.ADDRESS, internal.NAME)
    connection.host, connection.sni = internal.NAME, OWN
    connection.decision = Decision("allow", Reason.INTERNAL_PAGE)
    scene.engine = Http2Engine(connection, cast(ByteStream, scene.client_stream), None)
    return scene


def test_the_pages_are_answered_and_other_names_are_not() -> None:
    async def test() -> None:
        async with own_scene() as scene:
            told = await scene.ask("GET", "/whoami", host=OWN)
            assert (told.status, told.fields[b"x-egressd-reason"]) == (200, b"internal_page")
            assert told.body.startswith(b"sandbox: sb-1\n")
            assert told.ended
            refused = await scene.ask("POST", "/", host=OWN)
            assert (refused.status, refused.fields[b"allow"]) == (405, b"GET, HEAD")
            other = await scene.ask("GET", "/", host="evil.example.com")
            assert other.status == 403
            head = await scene.ask("HEAD", "/policy", host=OWN)
            assert (head.status, head.body, head.ended) == (200, b"", True)
            assert scene.origin_stream.written == b""
            assert scene.records.decisions() == [
                ("allow", "internal_page"),
                ("deny", "method_not_allowed"),
                ("deny", "authority_mismatch"),
                ("allow", "internal_page"),
            ]
            assert scene.records.ends() == ["completed"] * 4

    run(test())


def refuse(flow: http.HTTPFlow) -> None:
    if flow.request.path == "/no":
        flow.response = http.Response.make(403)


def move(flow: http.HTTPFlow) -> None:
    if flow.request.path == "/no":
        flow.request.path = "/yes"


@pytest.mark.parametrize(
    ("hook", "status", "reason"), [(refuse, 403, b"denied_by_inspection"), (move, 502, b"internal_error")]
)
def test_an_addon_of_the_site_is_asked_stream_by_stream(
    hook: object, status: int, reason: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        scene = Scene()
        scene.connection.services.inspection = (SimpleNamespace(requestheaders=hook),)
        async with scene:
            refused = await scene.ask("GET", "/no")
            assert (refused.status, refused.fields[b"x-egressd-reason"]) == (status, reason)
            await scene.ask("GET", "/fine")
            assert [asked.fields[b":path"] for asked in scene.origin.heard.values()] == [b"/fine"]
            assert scene.origin.heard[1].fields[b":authority"] == HOST.encode()

    run(test())
