"""What a cloud's own library is run in: a thread with an end, and a line to the network that is egressd's.

Such libraries block, look into the environment for proxies and authorities, follow redirects, read answers of any length, try
again for minutes and write what they see to their logs. So each runs in a thread that nobody waits for longer than `TOTAL`; what
it asks of the network goes over a `Line`, by the same door as the other sources (`endpoint`), to https or this host alone; and
its logger says nothing. What it raises is never shown: a library's error holds what a server sent.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, Final

from egressd.credentials.providers.base import SourceFailed
from egressd.credentials.providers.endpoint import TOTAL, Answer, Endpoint, deadline

THREADS_MOST: Final = 16
"""Threads of libraries at a time; one that hangs keeps its place until it ends."""

_URLS_MOST: Final = 16
_ALLOWED: Final = re.compile(r"https://[^\s?#@]+(?:\?[^\s#]*)?")
_LOOPBACK: Final = re.compile(r"http://(?:127\.0\.0\.1|localhost|\[::1\])(?::\d{1,5})?(?:[/?][^\s#]*)?")
_OWN: Final = frozenset({"host", "content-length", "connection", "transfer-encoding", "accept-encoding"})
"""Header fields that frame a request, or ask for what the door does not read: they are the door's."""

_places: Final = threading.BoundedSemaphore(THREADS_MOST)


def hush(name: str) -> None:
    """Have a library's logger, and all below it, say nothing: at its most talkative it logs the keys it gets."""
    logger = logging.getLogger(name)
    logger.setLevel(logging.CRITICAL + 1)
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


async def run[T](work: Callable[[], T], explain: Callable[[Exception], str]) -> T:
    """Return what `work` returns, in a thread of its own; raises SourceFailed, with what `explain` says of its exception.

    After `TOTAL` seconds nobody waits any longer; the thread never holds up the end of the process.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    places = _places

    def deliver(result: list[T], trouble: str) -> None:
        if not done.done():
            if result:
                done.set_result(result[0])
            else:
                done.set_exception(SourceFailed(trouble))

    def body() -> None:
        result: list[T] = []
        trouble = ""
        try:
            result.append(work())
        except Exception as error:  # noqa: BLE001 -- whatever a library raises, its text goes no further
            trouble = str(error) if isinstance(error, SourceFailed) else explain(error)
        finally:
            places.release()
        with suppress(RuntimeError):  # the loop has been closed: nobody is left to be told
            loop.call_soon_threadsafe(deliver, result, trouble)

    if not places.acquire(blocking=False):
        raise SourceFailed(f"{THREADS_MOST} threads of sources hang already")
    try:
        threading.Thread(target=body, name="egressd source", daemon=True).start()
    except RuntimeError:
        places.release()
        raise SourceFailed("no thread can be started") from None
    async with deadline():
        return await done


class Lines:
    """One source's doors to the servers it asks, which are kept for what it takes to trust them."""

    def __init__(self, ca_bundle: str | None) -> None:
        self._ca_bundle = ca_bundle
        self._endpoints: dict[str, Endpoint] = {}

    def line(self, plain: frozenset[str] = frozenset()) -> Line:
        """Return a line for one mint, to be called on the event loop; `plain` are URLs' beginnings that may do without TLS."""
        return Line(self, plain)

    def endpoint(self, url: str) -> Endpoint:
        """Return the door to one URL."""
        if url not in self._endpoints:
            if len(self._endpoints) >= _URLS_MOST:
                self._endpoints.clear()
            self._endpoints[url] = Endpoint(url, self._ca_bundle)
        return self._endpoints[url]


class Line:
    """The network as one mint of a library sees it. `trouble` says what went wrong last, `answer` is the last answer."""

    def __init__(self, lines: Lines, plain: frozenset[str]) -> None:
        self._lines = lines
        self._plain = tuple(plain)
        self._loop = asyncio.get_running_loop()
        self.trouble = ""
        self.answer: Answer | None = None

    async def ask(self, method: str, url: str, fields: Mapping[str, Any], body: bytes | None) -> Answer:
        """Return what a server answered; raises SourceFailed when nothing came, or the URL is none to go to."""
        try:
            if not (_ALLOWED.fullmatch(url) or _LOOPBACK.fullmatch(url) or url.startswith(self._plain)):
                raise SourceFailed("the library asks for a URL that is neither https nor on this host")
            sent = {name: _text(value) for name, value in fields.items() if name.lower() not in _OWN}
            self.answer = await self._lines.endpoint(url).ask(method, fields=sent, body=body)
        except SourceFailed as error:
            self.trouble = str(error)
            raise
        return self.answer

    def ask_blocking(self, method: str, url: str, fields: Mapping[str, Any], body: bytes | None) -> Answer:
        """Do as `ask`, in a thread; it returns when the answer is there, or nobody can wait for it any more."""
        asked = self.ask(method, url, fields, body)
        try:
            future = asyncio.run_coroutine_threadsafe(asked, self._loop)
        except RuntimeError:  # the loop has been closed
            asked.close()
            raise SourceFailed("nobody waits for the answer any more") from None
        try:
            return future.result(TOTAL)
        except (CancelledError, TimeoutError):
            future.cancel()
            raise SourceFailed("nobody waits for the answer any more") from None


def _text(value: object) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
