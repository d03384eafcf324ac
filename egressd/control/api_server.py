"""Where the control API is listened on: the Unix socket, and TCP where that is configured; bounded in every way that costs.

A connection beyond `MOST` is closed at once, and so is one that does not bring a whole request in `FIRST_SECONDS`: whoever floods
one listener takes nothing from the other. Who a Unix peer is is judged when it connects, not when it asks: by then its pid
may be another's.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import ssl
import stat
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary, WeakSet

from aiohttp import web

from egressd.control.api import Household, application, approvals_alone
from egressd.control.approvals.office import Office
from egressd.control.config_check import parse_listen
from egressd.control.config_file import ApiSection
from egressd.control.estate import StateError
from egressd.control.peers import peer_of, refusal
from egressd.control.sources import normal_source
from egressd.credentials.providers.base import SourceFailed, read_file

MOST: Final = 64
FIRST_SECONDS: Final = 10.0
_KEEP_SECONDS: Final = 30.0
_STOP_SECONDS: Final = 2.0
_LEAST_TOKEN: Final = 32


class ApiServer:
    """One application on one listener."""

    def __init__(self) -> None:
        """Nobody is let in before `start`."""
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._gate: _TcpGate | None = None
        self._seen: WeakSet[asyncio.BaseTransport] = WeakSet()
        self._verdicts: WeakKeyDictionary[asyncio.BaseTransport, tuple[int, str] | str] = WeakKeyDictionary()

    async def start_unix(self, household: Household, sock: socket.socket) -> None:
        """Serve a listening Unix socket, which is closed with the server."""
        server = await self._prepare(application(household, self._judge_unix))
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_unix_server(lambda: _Turnstile(self, server, unix=True), sock=sock)

    async def start_alone(self, office: Office, sock: socket.socket) -> None:
        """Serve approvals alone on a listening Unix socket, which is closed with the server."""
        server = await self._prepare(approvals_alone(office, self._judge_unix))
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_unix_server(lambda: _Turnstile(self, server, unix=True), sock=sock)

    async def start_tcp(self, household: Household, section: ApiSection) -> None:
        """Serve TCP as configured; raises StateError."""
        address, port = parse_listen(section.listen)
        gate = self._gate = _TcpGate(household, section)
        server = await self._prepare(application(household, lambda request: self._judge_tcp(gate, request)))
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(
                lambda: _Turnstile(self, server, unix=False), str(address), port,
                ssl=gate.context, ssl_handshake_timeout=FIRST_SECONDS, ssl_shutdown_timeout=1.0, backlog=MOST,
            )  # fmt: skip
        except OSError as error:
            raise StateError(f"serve.api.listen {section.listen}: {error.strerror}") from None

    def reload(self) -> None:
        """Read certificates and token anew, for whoever connects and asks from now on; raises StateError and changes nothing."""
        if self._gate is not None:
            self._gate.reload()

    async def stop(self) -> None:
        """Let nobody in any more, and end what is under way."""
        if self._listener is not None:
            self._listener.close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _prepare(self, app: web.Application) -> web.Server:
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=_KEEP_SECONDS,
            shutdown_timeout=_STOP_SECONDS,
        )
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        return server

    # who asks

    def judge_connection(self, transport: asyncio.BaseTransport) -> None:
        """Note what a Unix peer may do, now that it connects."""
        sock = transport.get_extra_info("socket")
        try:
            peer = peer_of(sock)
            why = refusal(peer)
        except OSError:
            self._verdicts[transport] = (403, "who asks cannot be told")
            return
        self._verdicts[transport] = (403, why) if why is not None else f"uid {peer.uid} pid {peer.pid}"

    def _judge_unix(self, request: web.Request) -> tuple[int, str] | str:
        self._note(request)
        nobody = 403, "who asks cannot be told"
        return self._verdicts.get(request.transport, nobody) if request.transport is not None else nobody

    def _judge_tcp(self, gate: _TcpGate, request: web.Request) -> tuple[int, str] | str:
        self._note(request)
        return gate.judge(request)

    def _note(self, request: web.Request) -> None:
        if request.transport is not None:
            self._seen.add(request.transport)

    def has_asked(self, transport: asyncio.BaseTransport) -> bool:
        """Whether a whole request head has come on a connection."""
        return transport in self._seen


class _Turnstile(asyncio.Protocol):
    """Lets a connection in as aiohttp's own, or closes it."""

    def __init__(self, owner: ApiServer, server: web.Server, *, unix: bool) -> None:
        self._owner, self._server, self._unix = owner, server, unix

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if len(self._server.connections) >= MOST:
            transport.abort()
            return
        if self._unix:
            self._owner.judge_connection(transport)
        inner = self._server()
        transport.set_protocol(inner)
        inner.connection_made(transport)
        asyncio.get_running_loop().call_later(FIRST_SECONDS, self._look, transport)

    def _look(self, transport: asyncio.Transport) -> None:
        if not self._owner.has_asked(transport):
            transport.abort()


class _TcpGate:
    """Who may ask over TCP: by certificate, by token, by both where both are configured; never from a sandbox's address."""

    def __init__(self, household: Household, section: ApiSection) -> None:
        self._household, self._section = household, section
        self.context = _context(section)
        self._token = _token_digest(section)

    def reload(self) -> None:
        """Read the files anew: whole, or nothing is changed. `client_ca` stays: OpenSSL takes no authority back."""
        token = _token_digest(self._section)
        _context(self._section)  # whether it can be read
        self.context.load_cert_chain(str(self._section.certificate), str(self._section.key))
        self._token = token

    def judge(self, request: web.Request) -> tuple[int, str] | str:
        source = _source(request)
        if source is None or self._household.roster.comes_from(source):
            return 403, "a sandbox has no business here"
        if self._token is not None and not hmac.compare_digest(self._token, _given(request)):
            return 401, "a token is needed"
        return f"{source}{_subject(request)}"


def _context(section: ApiSection) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(str(section.certificate), str(section.key))
        if section.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(section.client_ca)
    except OSError as error:  # ssl.SSLError too
        raise StateError(f"serve.api: certificates cannot be read: {error.strerror or error}") from None
    return context


def _token_digest(section: ApiSection) -> bytes | None:
    path = section.token.file
    if path is None:
        return None
    try:
        if stat.S_IMODE(Path(path).stat().st_mode) & 0o077:
            raise StateError(f"serve.api.token.file: {path} can be read by others", f"chmod 600 {path}")
        token = read_file(path).encode()
    except (OSError, SourceFailed) as error:
        raise StateError(
            f"serve.api.token.file: {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
    if len(token) < _LEAST_TOKEN:
        raise StateError(f"serve.api.token.file: a token has at least {_LEAST_TOKEN} characters")
    return hashlib.sha256(token).digest()


def _given(request: web.Request) -> bytes:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    text = token.strip() if scheme.lower() == "bearer" else ""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _source(request: web.Request) -> str | None:
    peer = request.transport.get_extra_info("peername") if request.transport is not None else None
    if not isinstance(peer, tuple) or not isinstance(peer[0], str):
        return None
    try:
        return normal_source(peer[0])
    except ValueError:  # of one link alone: no sandbox is known by such an address
        return peer[0]


def _subject(request: web.Request) -> str:
    certificate = request.transport.get_extra_info("peercert") if request.transport is not None else None
    if not certificate:
        return ""
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return f" as {names[0][:128]!a}" if names else ""
