"""The control API held against its own description: whatever fits it, and whatever does not, is answered as it says."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from aiohttp import web
from hypothesis import HealthCheck, settings

from egressd.control.api import application
from egressd.control.api_schema import openapi
from tests.control.household import House

SCHEMA = schemathesis.openapi.from_dict(openapi())


class _Served:
    """A house over plain TCP on the loopback, in a thread with a loop of its own."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._ready.wait(10)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self.house = House(Path(self._folder.name), most=100_000)
        self._end = asyncio.Event()
        runner = web.AppRunner(application(self.house, lambda _: "the test"), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]  # asyncio's server has them
        self._ready.set()
        await self._end.wait()
        await runner.cleanup()
        await self.house.roster.end_all("drained")
        self.house.estate.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(20)
        self._folder.cleanup()


@pytest.fixture(scope="module")
def served() -> Iterator[_Served]:
    made = _Served()
    yield made
    made.stop()


@SCHEMA.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_answer_is_one_that_the_description_knows(
    case: schemathesis.Case[Any], served: _Served
) -> None:
    # what fits the schema may still name a profile that is not there
    without = [schemathesis.checks.CHECKS.get_one("positive_data_acceptance")]
    case.call_and_validate(base_url=f"http://127.0.0.1:{served.port}", excluded_checks=without)  # type: ignore[arg-type]  # takes what its registry holds
    # what was asked for and refused is not half there
    assert all(life.stage in ("ready", "ending") for life in served.house.roster.living)
