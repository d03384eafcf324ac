"""One server of the operator's, asked in a bounded way: the only door by which the HTTP sources talk.

Everything that a server could do to the control process has a bound: time, size, headers. Nothing it says leads elsewhere: no
redirect is followed, no proxy of the environment used, no cookie kept. Nothing it says is repeated either: what is raised holds a
status and, of OAuth, a registered error code.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import math
import os
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import quote, urlsplit

import aiohttp

from egressd.credentials.providers.base import SourceFailed, checked

TOTAL: Final = 10.0
"""Seconds for all that one mint, renewal or revocation asks together."""
ANSWER_MOST: Final = 64 * 1024
"""Bytes of an answer."""
SKEW_TOLD: Final = 30
"""Seconds that two clocks may differ before a refusal mentions it: signed statements fail by it, and nobody thinks of that."""
LIFE_MOST: Final = 10 * 365 * 86400
"""Seconds; a longer life is read as this one."""

_OAUTH_ERRORS: Final = frozenset(
    {
        "invalid_request",
        "invalid_client",
        "invalid_grant",
        "unauthorized_client",
        "unsupported_grant_type",
        "invalid_scope",
        "invalid_target",
        "access_denied",
        "unsupported_token_type",
        "server_error",
        "temporarily_unavailable",
    }
)
"""RFC 6749 §5.2 and what its registry adds for token endpoints. A closed list: any other word may be an echo of what we sent."""


@asynccontextmanager
async def deadline(seconds: float | None = None) -> AsyncIterator[None]:
    """Bound what stands inside, by TOTAL if `seconds` are not given; raises SourceFailed when the time is over."""
    seconds = TOTAL if seconds is None else seconds
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise SourceFailed(f"no answer within {seconds:g} s") from None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered. `sent` is when we asked, in Unix seconds; `date` what its own clock said, None if it did not."""

    origin: str
    status: int
    body: bytes = field(repr=False)
    sent: float
    date: float | None
    fields: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Its header fields, for a library that reads the answer itself."""

    def document(self) -> dict[str, Any]:
        """Return the body, a JSON object; raises SourceFailed."""
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):  # UnicodeDecodeError, and a number too long, are ValueErrors
            value = None
        if not isinstance(value, dict):
            raise SourceFailed(f"{self.origin}: the answer is no JSON object")
        return value

    def refused(self) -> SourceFailed:
        """Return what to raise for an answer that is no success; of its words only a registered code is repeated."""
        said = ""
        try:
            code = self.document().get("error")
        except SourceFailed:
            code = None
        if isinstance(code, str) and code in _OAUTH_ERRORS:
            said = f" ({code})"
        if 300 <= self.status < 400:
            said = ", a redirect, and none is followed"
        ahead = 0.0 if self.date is None else self.date - self.sent
        if 400 <= self.status < 500 and abs(ahead) > SKEW_TOLD:
            way = "behind" if ahead > 0 else "ahead of"
            said += f"; this host's clock is {abs(ahead):.0f} s {way} the server's"
        return SourceFailed(f"{self.origin}: answered {self.status}{said}")

    def until(self, seconds: object) -> float | None:
        """Return when a life of `seconds`, as the answer says it, ends by our clock; None where it says none.

        It is counted from when we asked, so that it is never longer than the server's. Raises SourceFailed for what is no number
        and for a life that is over.
        """
        if seconds is None:
            return None
        if isinstance(seconds, str) and seconds.isascii() and seconds.isdecimal() and len(seconds) < 16:
            seconds = int(seconds)  # some servers write numbers as text
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not _is_finite(seconds):
            raise SourceFailed(f"{self.origin}: the answer's lifetime is no number")
        return self._living(self.sent + min(seconds, LIFE_MOST))

    def at(self, moment: object) -> float | None:
        """Return a moment (RFC 3339) of the server's clock by ours; None where there is none. Raises SourceFailed as `until`.

        Clocks differ: what counts is how far it was from the server's own `Date`, whose fraction of a second is cut.
        """
        if moment is None:
            return None
        try:
            value = dt.datetime.fromisoformat(moment) if isinstance(moment, str) else None
        except ValueError:
            value = None
        if value is None or value.tzinfo is None:
            raise SourceFailed(f"{self.origin}: the answer's expiry is no time")
        end = value.timestamp()
        if self.date is not None:
            end = self.sent + (end - self.date) - 1
        return self._living(min(end, self.sent + LIFE_MOST))

    def secret(self, value: object) -> str:
        """Return a secret of the answer; raises SourceFailed where it is none that a request could carry."""
        if not isinstance(value, str):
            raise SourceFailed(f"{self.origin}: the answer holds no credential")
        if value != value.rstrip("\r\n"):  # a file may end in a newline, an answer's member may not
            raise SourceFailed(f"{self.origin}: a line break is inside the credential")
        return checked(value, f"{self.origin}: the credential")

    def _living(self, end: float) -> float:
        if end <= time.time():
            raise SourceFailed(f"{self.origin}: what it gave has expired already")
        return end


def _is_finite(number: float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer beyond every float
        return False


class Endpoint:
    """A server's base URL. `ca_bundle` is the PEM file that vouches for it, None the system's certificates; it may be replaced
    while egressd runs."""

    def __init__(self, url: str, ca_bundle: str | None = None) -> None:
        self._base = url.rstrip("/")
        self._ca_bundle = ca_bundle
        self._context: tuple[tuple[int, ...], ssl.SSLContext] | None = None
        self.origin = urlsplit(url).netloc
        """Host and port, which is what an error names."""

    async def ask(
        self,
        method: str,
        path: str = "",
        *,
        fields: Mapping[str, str] | None = None,
        form: Mapping[str, str] | None = None,
        document: Mapping[str, object] | None = None,
        body: bytes | None = None,
        most: int = ANSWER_MOST,
    ) -> Answer:
        """Return the answer to one request, whatever its status; raises SourceFailed when there is none.

        `path` is appended to the URL, its segments quoted, its dot segments refused. `form`, `document` or `body` is the body. An
        answer of more than `most` bytes is refused.
        """
        url = self._base + self._path(path)
        context = await self._tls() if url.startswith("https:") else None
        sent = time.time()
        trouble = ""
        try:
            async with self._session(context) as session:
                data = body if form is None else aiohttp.FormData(form)
                async with session.request(
                    method,
                    url,
                    headers=fields,
                    data=data,
                    json=document,
                    allow_redirects=False,
                ) as response:
                    told = response.headers
                    content = await _read(response, most)
                    return Answer(self.origin, response.status, content, sent, _date(told.get("Date")), told)
        except SourceFailed as error:
            trouble = str(error)
        except TimeoutError:
            trouble = f"no answer within {TOTAL:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            trouble = _trouble(error)
        # Raised out here, or the context of the exception would hold the request with its Authorization.
        raise SourceFailed(f"{self.origin}: {trouble}")

    def _path(self, path: str) -> str:
        if not path:
            return ""
        segments = path.strip("/").split("/")
        if any(segment in {"", ".", ".."} for segment in segments):
            raise SourceFailed(f"{self.origin}: the path to ask for has an empty or a dot segment")
        return "".join(f"/{quote(segment, safe='')}" for segment in segments)

    def _session(self, context: ssl.SSLContext | None) -> aiohttp.ClientSession:
        """A session for one request: nothing of it, no connection and no cookie, is left for another."""
        # Not force_close: that would close a TLS connection politely, which waits for the server; at the session's end it is cut.
        connector = aiohttp.TCPConnector(ssl=context if context is not None else True)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=TOTAL),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={
                "User-Agent": "egressd",
                "Accept": "application/json",
                "Accept-Encoding": "identity",  # what is not packed cannot unpack to more than it seems
            },
            trust_env=False,
            auto_decompress=False,
        )

    async def _tls(self) -> ssl.SSLContext:
        try:
            stamp = _stamp(self._ca_bundle)
            if self._context is None or self._context[0] != stamp:
                self._context = (stamp, await asyncio.to_thread(_context, self._ca_bundle))
        except OSError:  # ssl.SSLError is one
            raise SourceFailed(f"{self._ca_bundle or 'the system'}: no certificates to trust by") from None
        return self._context[1]


def _stamp(ca_bundle: str | None) -> tuple[int, ...]:
    if ca_bundle is None:
        return ()
    status = os.stat(ca_bundle)
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def _context(ca_bundle: str | None) -> ssl.SSLContext:
    """Not `create_default_context`: that one writes keys to where SSLKEYLOGFILE says, and asks of an internal authority what no
    other client does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.hostname_checks_common_name = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_TRUSTED_FIRST
    if ca_bundle is None:
        context.load_default_certs()
    else:
        context.load_verify_locations(ca_bundle)
    return context


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise SourceFailed("the answer is packed, which nobody asked for")
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > most:
            raise SourceFailed(f"the answer is longer than {most // 1024} KiB")
    return bytes(body)


def _date(value: str | None) -> float | None:
    """When an answer was made by its server's clock (RFC 9110 §6.6.1)."""
    try:
        moment = parsedate_to_datetime(value) if value is not None else None
    except (ValueError, OverflowError):
        return None
    return moment.timestamp() if moment is not None and moment.tzinfo is not None else None


def _trouble(error: Exception) -> str:
    """What went wrong, in our words: an exception's own text may hold what a server sent."""
    if isinstance(error, aiohttp.InvalidURL):
        return "its URL cannot be asked"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return "its certificate is not trusted"
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return "no TLS with it"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "not to be reached"
    if isinstance(error, aiohttp.ClientConnectionError | OSError):
        return "it closed the connection"
    return "its answer is no HTTP"
