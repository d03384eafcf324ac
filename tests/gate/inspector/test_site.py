"""A site's own addons: asked after the policy, before anything is sent; they can refuse, and nothing else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mitmproxy import http

from egressd.gate.inspector.site import BadAddon, load_addons
from tests.gate.inspector.lab import Lab, laboratory, run

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
EXAMPLE = Path(__file__).parents[3] / "addons" / "example_inspection.py"


class Origin:
    """Answers every request, and keeps the heads that it was sent."""

    def __init__(self, answer: bytes = OK) -> None:
        self.heads: list[str] = []
        self._answer = answer

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
                writer.write(self._answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


def addon(**hooks: Any) -> Any:
    return SimpleNamespace(name="house", **hooks)


def under(lab: Lab, *addons: Any) -> Lab:
    lab.services.inspection = addons
    return lab


def refuse(flow: http.HTTPFlow) -> None:
    flow.response = http.Response.make(418, b"the addon's own words", {"x-leak": "1"})


def error(flow: http.HTTPFlow) -> None:
    from mitmproxy.flow import Error

    flow.error = Error("no")


def test_an_addon_sees_what_the_policy_allowed_and_may_add_fields() -> None:
    seen: list[tuple[str, str, str]] = []

    def look(flow: http.HTTPFlow) -> None:
        seen.append((flow.request.method, flow.request.path, flow.request.headers["host"]))
        flow.request.headers["x-house"] = "looked"
        del flow.request.headers["x-private"]

    async def test() -> None:
        origin = Origin()
        async with laboratory(origin) as lab:
            client = await under(lab, addon(requestheaders=look)).dial(lab.connection())
            assert (await client.ask("GET /a?b=c\nX-Private: 1")).status == 200
            assert seen == [("GET", "/a?b=c", "origin.test.example")]
            assert "x-house: looked" in origin.heads[0]
            assert "Private" not in origin.heads[0]
            assert lab.records.decisions() == [("allow", "rule")]
            await client.over()

    run(test())


def test_cred_16_an_addon_does_not_see_the_token_for_the_proxy() -> None:
    seen: list[str] = []

    def look(flow: http.HTTPFlow) -> None:
        seen.extend(name.lower() for name in flow.request.headers)

    async def test() -> None:
        origin = Origin()
        async with laboratory(origin) as lab:
            client = await under(lab, addon(requestheaders=look)).dial(lab.connection())
            asked = "GET /\nProxy-Authorization: Basic c2J4OnQ=\nProxy-Connection: keep-alive\nX-Kept: 1"
            assert (await client.ask(asked)).status == 200
            assert "x-kept" in seen
            assert not [name for name in seen if name.startswith("proxy-")]
            assert "roxy-" not in origin.heads[0]
            await client.over()

    run(test())


def test_what_the_policy_denies_is_not_shown() -> None:
    seen: list[http.HTTPFlow] = []

    async def test() -> None:
        async with laboratory(Origin()) as lab:
            client = await under(lab, addon(requestheaders=seen.append)).dial(lab.connection())
            assert (await client.ask("GET /", host="evil.test")).status == 403
            assert seen == []
            await client.over()

    run(test())


@pytest.mark.parametrize("hook", [refuse, error], ids=["a response", "an error"])
def test_an_addon_refuses_and_egressd_says_so(hook: Any) -> None:
    async def test() -> None:
        async with laboratory(Origin()) as lab:
            later: list[http.HTTPFlow] = []
            client = await under(lab, addon(requestheaders=hook), addon(requestheaders=later.append)).dial(
                lab.connection()
            )
            told = await client.ask("POST /\nContent-Length: 0")
            assert (told.status, told.headers["x-egressd-reason"]) == (403, "denied_by_inspection")
            assert b"the addon's own words" not in told.body
            assert "x-leak" not in told.headers
            [decision] = lab.records.of("decision")
            assert (decision.verdict, decision.rule, decision.detail) == ("deny", "origin", "by house")
            assert lab.dialer.dials == []
            assert later == []
            await client.over()

    run(test())


def raising(flow: http.HTTPFlow) -> None:
    raise ZeroDivisionError


def other_path(flow: http.HTTPFlow) -> None:
    flow.request.path = "/admin"


def other_method(flow: http.HTTPFlow) -> None:
    flow.request.method = "DELETE"


def other_host(flow: http.HTTPFlow) -> None:
    flow.request.headers["Host"] = "evil.test"


def second_host(flow: http.HTTPFlow) -> None:
    flow.request.headers.add("host", "evil.test")


def other_destination(flow: http.HTTPFlow) -> None:
    flow.request.host = "evil.test"


def other_framing(flow: http.HTTPFlow) -> None:
    flow.request.headers["Transfer-Encoding"] = "chunked"


def content(flow: http.HTTPFlow) -> None:
    flow.request.content = b"smuggled"


@pytest.mark.parametrize(
    "hook",
    [raising, other_path, other_method, other_host, second_host, other_destination, other_framing, content],
)
def test_an_addon_that_raises_or_changes_what_was_judged_denies(
    hook: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async with laboratory(Origin()) as lab:
            client = await under(lab, addon(requestheaders=hook)).dial(lab.connection())
            told = await client.ask("GET /")
            assert (told.status, told.headers["x-egressd-reason"]) == (502, "internal_error")
            assert lab.records.decisions() == [("deny", "internal_error")]
            assert lab.dialer.dials == []
            await client.over()

    run(test())
    assert "Error" in capfd.readouterr().err


def test_an_addon_that_breaks_a_line_ends_the_exchange(capfd: pytest.CaptureFixture[str]) -> None:
    def split(flow: http.HTTPFlow) -> None:
        flow.request.headers["x-house"] = "a\r\nHost: evil.test"

    async def test() -> None:
        origin = Origin()
        async with laboratory(origin) as lab:
            client = await under(lab, addon(requestheaders=split)).dial(lab.connection())
            assert (await client.ask("GET /")).status == 502
            assert origin.heads == []
            await client.over()

    run(test())


def test_a_response_is_shown_before_it_goes_on() -> None:
    def mark(flow: http.HTTPFlow) -> None:
        assert flow.response is not None
        flow.response.headers["x-house"] = str(flow.response.status_code)

    async def test() -> None:
        async with laboratory(Origin()) as lab:
            client = await under(lab, addon(responseheaders=mark)).dial(lab.connection())
            told = await client.ask("GET /")
            assert (told.status, told.headers["x-house"], told.body) == (200, "200", b"ok")
            await client.over()

    run(test())


def longer(flow: http.HTTPFlow) -> None:
    assert flow.response is not None
    flow.response.headers["content-length"] = "1000"


def other_status(flow: http.HTTPFlow) -> None:
    assert flow.response is not None
    flow.response.status_code = 204


def other_response(flow: http.HTTPFlow) -> None:
    flow.response = http.Response.make(200, b"other")


@pytest.mark.parametrize("hook", [raising, longer, other_status, other_response])
def test_a_response_that_an_addon_breaks_never_arrives(hook: Any, capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        async with laboratory(Origin()) as lab:
            client = await under(lab, addon(responseheaders=hook)).dial(lab.connection())
            told = await client.ask("GET /")
            assert (told.status, told.headers["x-egressd-reason"]) == (502, "internal_error")
            assert lab.records.ends() == ["internal_error"]
            await client.over()

    run(test())


# files


def test_the_example_is_an_addon_and_finds_keys() -> None:
    async def test() -> None:
        async with laboratory(Origin()) as lab:
            lab.services.inspection = load_addons([str(EXAMPLE)])
            key = "AKIA" + "A" * 16
            client = await lab.dial(lab.connection())
            told = await client.ask("GET /?note=nothing\nAuthorization: " + key)
            assert told.headers["x-inspected-by"] == "no-keys"
            await client.over()
            for head in (f"GET /?k={key}", f"GET /\nX-Note: {key}"):
                client = await lab.dial(lab.connection())
                assert (await client.ask(head)).headers["x-egressd-reason"] == "denied_by_inspection"
                await client.over()

    run(test())


def test_a_module_without_a_list_is_the_addon_itself(tmp_path: Path) -> None:
    file = tmp_path / "house.py"
    file.write_text("def requestheaders(flow):\n    pass\n")
    [module] = load_addons([str(file)])
    assert module.requestheaders(None) is None
    assert load_addons([]) == ()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        pytest.param("x = 1\n", "neither requestheaders nor responseheaders", id="no hook"),
        pytest.param(
            "addons = [object()]\n", "neither requestheaders nor responseheaders", id="an addon without one"
        ),
        pytest.param("async def requestheaders(flow): pass\n", "not coroutines", id="a coroutine"),
        pytest.param("1/0\n", "ZeroDivisionError", id="it raises"),
        pytest.param("def (\n", "SyntaxError", id="it is no Python"),
        pytest.param("import no_such_module\n", "ModuleNotFoundError", id="it wants what is not there"),
    ],
)
def test_a_file_that_is_no_addon(tmp_path: Path, source: str, says: str) -> None:
    file = tmp_path / "house.py"
    file.write_text(source)
    with pytest.raises(BadAddon, match=says):
        load_addons([str(file)])


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(BadAddon, match="FileNotFoundError"):
        load_addons(["/nonexistent.py"])
