"""Tells an operator's endpoint of approvals: signed, timestamped, tried again, and never waited for.

Each delivery is a POST with a JSON body and three fields: `x-egressd-delivery` (an id, the same at every try),
`x-egressd-timestamp` (Unix seconds of this try) and `x-egressd-signature`: `v1=` and the hex HMAC-SHA256, under the shared
secret, of `v1:` TIMESTAMP `:` BODY. Who hears it checks the signature in constant time, refuses old timestamps, and drops ids
it has seen.

What is told is bounded: past `MOST` that wait, further ones are dropped and counted. A slow or dead endpoint costs nobody
anything. Redirects are not followed; of an answer only its status is read. The URL may be a secret (Slack's are), so it stands in
no message of ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import aiohttp

from egressd.control.approvals.slack import blocks
from egressd.control.voice import say
from egressd.journal.record import new_id

MOST: Final = 256
"""Deliveries that wait."""
TRIES: Final = 6
FIRST_PAUSE: Final = 1.0
"""Seconds before the second try, doubled before each further one."""
_SECONDS: Final = 10.0
_COMPLAIN_AGAIN: Final = 60.0

type Format = Literal["json", "slack"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where to, signed with what, in which form; printed it says nothing."""

    url: str
    secret: bytes
    form: Format = "json"
    ca_bundle: str | None = None

    def __repr__(self) -> str:
        """Tell nothing of it."""
        return "Endpoint(…)"


def signature(secret: bytes, timestamp: int, body: bytes) -> str:
    """Return the value of `x-egressd-signature`."""
    return "v1=" + hmac.new(secret, b"v1:%d:" % timestamp + body, hashlib.sha256).hexdigest()


class Webhook:
    """Delivers to one endpoint, one after the other."""

    def __init__(
        self, endpoint: Endpoint, *, wall: Callable[[], float] = time.time, first_pause: float = FIRST_PAUSE
    ) -> None:
        """Nothing is sent before `start`."""
        self._endpoint = endpoint
        self._wall = wall
        self._first_pause = first_pause
        self._queue: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(MOST)
        self._task: asyncio.Task[None] | None = None
        self._told = float("-inf")
        self.dropped = 0
        """Deliveries that never arrived: there was no room, or every try failed."""

    def start(self) -> None:
        """Begin, in the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._deliver_all())

    async def close(self) -> None:
        """Stop; what waits is not sent any more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def tell(self, event: str, approval: Mapping[str, Any]) -> None:
        """Have something told; returns at once, whatever becomes of it."""
        told = {"event": event, "time": self._wall(), "approval": dict(approval)}
        message = told if self._endpoint.form == "json" else blocks(event, approval)
        body = json.dumps(message, ensure_ascii=True).encode()
        try:
            self._queue.put_nowait((new_id(), body))
        except asyncio.QueueFull:
            self._drop("too many wait")

    async def _deliver_all(self) -> None:
        context = ssl.create_default_context(cafile=self._endpoint.ca_bundle)
        connector = aiohttp.TCPConnector(ssl=context, limit=1)
        timeout = aiohttp.ClientTimeout(total=_SECONDS)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            while True:
                delivery, body = await self._queue.get()
                await self._deliver(session, delivery, body)

    async def _deliver(self, session: aiohttp.ClientSession, delivery: str, body: bytes) -> None:
        pause, why = self._first_pause, ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(pause)
                pause *= 2
            try:
                why = await self._post(session, delivery, body)
            except (
                aiohttp.ClientError,
                OSError,
                TimeoutError,
                ValueError,
            ) as error:  # whose text may hold the URL
                why = type(error).__name__
            if not why:
                return
            if why.startswith("status 4") and why not in ("status 408", "status 429"):
                break  # it would not be taken a second time either
        self._drop(why)

    async def _post(self, session: aiohttp.ClientSession, delivery: str, body: bytes) -> str:
        """Try once; returns what is wrong, nothing where it was taken."""
        now = int(self._wall())
        fields = {
            "content-type": "application/json",
            "x-egressd-delivery": delivery,
            "x-egressd-timestamp": str(now),
            "x-egressd-signature": signature(self._endpoint.secret, now, body),
        }
        async with session.post(
            self._endpoint.url, data=body, headers=fields, allow_redirects=False
        ) as response:
            status = response.status
            with contextlib.suppress(aiohttp.ClientError):
                response.close()  # nothing of it is read
        return "" if 200 <= status < 300 else f"status {status}"

    def _drop(self, why: str) -> None:
        self.dropped += 1
        if time.monotonic() - self._told > _COMPLAIN_AGAIN:
            self._told = time.monotonic()
            say(f"approvals.webhook: {self.dropped} messages were not delivered so far, the last for: {why}")
