"""The way out through the operator's own proxy: an HTTP CONNECT (RFC 9110 §9.3.6) to what the dialer has judged.

The proxy is dialled as configured (law 5): no floor binds it, and nothing that a sandbox sends chooses it. It is told where to,
and its own credentials; what it answers besides a status is nobody's business, and its connection is never used for a second
destination.
"""

from __future__ import annotations

import asyncio
import base64
import re
import socket
from dataclasses import dataclass
from typing import Final, Literal

from egressd.gate.dialer import DialFailed, Failure, Resolves, describe, interleave, race
from egressd.gate.dns.upstream import ResolveFailed
from egressd.gate.settings import UpstreamProxy
from egressd.policy.attempt import Address, Name
from egressd.policy.names import BadHost, format_host, parse_authority, parse_host
from egressd.policy.reasons import Reason

REPLY_LIMIT: Final = 16 * 1024
"""Longest head of a reply that is read, in bytes."""

_STATUS = re.compile(rb"HTTP/1\.[01] ([1-9][0-9]{2})(?: [^\r\n]*)?\r\n")
_BARE = re.compile(rb"(?<!\r)\n")
_CREDENTIALS = re.compile(r"[^\x00-\x1f\x7f:]+:[^\x00-\x1f\x7f]*")
_RETRIED = frozenset({502, 503, 504})
"""What a proxy answers that could not reach the address: another one may do (RFC 9110 §15.6)."""
_MOST_ADDRESSES = 4


@dataclass(frozen=True, slots=True)
class NeedMore:
    """The reply has not ended."""


@dataclass(frozen=True, slots=True)
class Established:
    """The tunnel begins behind the first `size` bytes."""

    size: int


@dataclass(frozen=True, slots=True)
class Declined:
    """There is no tunnel; `status` is 0 where the reply was no HTTP."""

    status: int


def read_reply(data: bytes) -> Established | Declined | NeedMore:
    """Return what a proxy answered to a CONNECT; total, and never waits beyond REPLY_LIMIT."""
    line_end = data.find(b"\n")
    if line_end < 0:
        begun = b"HTTP/1."
        plausible = data[: len(begun)] == begun[: len(data)] and len(data) < REPLY_LIMIT
        return NeedMore() if plausible else Declined(0)
    line = _STATUS.match(data)
    if line is None or line.end() != line_end + 1:
        return Declined(0)
    end = data.find(b"\r\n\r\n", line.end() - 2)
    if _BARE.search(data, 0, end if end >= 0 else len(data)):
        return Declined(0)  # the reply would end elsewhere for whoever takes that for a line's end
    if end < 0:
        return NeedMore() if len(data) < REPLY_LIMIT else Declined(0)
    status = int(line[1])
    return Established(end + 4) if 200 <= status < 300 else Declined(status)


def parse_proxy_url(text: str, connect: Literal["address", "name"] = "address") -> UpstreamProxy:
    """Return the proxy that `http://HOST:PORT` names; raises ValueError with what is wrong, which never repeats the text."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme.lower() != "http":
        raise ValueError("a proxy is written http://HOST:PORT; TLS to the proxy itself is not spoken")
    authority = parse_authority(rest.removesuffix("/"), None)
    if isinstance(authority, BadHost):
        if authority.reason is Reason.USERINFO_IN_AUTHORITY:
            raise ValueError("user and password go into a file, which upstream.proxy.credentials.file names")
        raise ValueError(f"http://HOST:PORT: {authority.detail}")
    host = authority.host
    return UpstreamProxy(host=format_host(host).strip("[]"), port=authority.port, connect=connect)


def read_credentials(payload: bytes) -> bytes:
    """Return the Proxy-Authorization value of `user:password` (RFC 7617); raises ValueError, which never repeats it."""
    try:
        text = payload.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        text = ""
    if not _CREDENTIALS.fullmatch(text) or len(text) > 4096:
        raise ValueError("a proxy's credentials are user:password on one line")
    return b"Basic " + base64.b64encode(text.encode("utf-8"))


class Via:
    """Opens tunnels through one proxy. `authorization` is what `read_credentials` returns."""

    def __init__(self, proxy: UpstreamProxy, resolver: Resolves, authorization: bytes | None = None) -> None:
        """Nothing is dialled yet; raises ValueError where the proxy's host is none."""
        host = parse_host(proxy.host, bracketed=False)
        if isinstance(host, BadHost):
            raise ValueError(f"upstream.proxy: {host.detail}")
        self.by_name = proxy.connect == "name"
        self._host: Name | Address = host
        self._port = proxy.port
        self._resolver = resolver
        self._authorization = authorization

    async def by_address(
        self, addresses: list[Address], port: int
    ) -> tuple[socket.socket, Address] | DialFailed:
        """Return a tunnel to one of these addresses, which are tried in turn while the proxy says that it cannot reach one."""
        failed = DialFailed(Reason.UPSTREAM_PROXY, "no address")
        for address in interleave(addresses)[:_MOST_ADDRESSES]:
            opened = await self.tunnel(format_host(address), port)
            if isinstance(opened, socket.socket):
                return opened, address
            failed, status = opened
            if status not in _RETRIED:
                break
        return failed

    async def tunnel(self, host: str, port: int) -> socket.socket | tuple[DialFailed, int]:
        """Return a connection through the proxy to `host`, or why there is none and with which status the proxy said so."""
        sock = await self._reach()
        if isinstance(sock, DialFailed):
            return sock, 0
        try:
            reply = await self._ask(sock, f"{host}:{port}".encode("ascii"))
        except BaseException as error:
            sock.close()
            if isinstance(error, OSError):
                return DialFailed(Reason.UPSTREAM_PROXY, f"the proxy: {describe(error)}"), 0
            raise
        if isinstance(reply, Established):
            return sock
        sock.close()
        detail = f"the proxy answered {reply.status}" if reply.status else "the proxy does not speak HTTP"
        if reply.status == 407:
            detail += " (its credentials)"
        return DialFailed(Reason.UPSTREAM_PROXY, detail), reply.status

    async def _reach(self) -> socket.socket | DialFailed:
        addresses: tuple[Address, ...]
        if isinstance(self._host, tuple):
            found = await self._resolver.resolve(self._host)
            if isinstance(found, ResolveFailed):
                return DialFailed(found.reason, f"the proxy: {found.detail}")
            addresses = found
        else:
            addresses = (self._host,)
        failures: list[Failure] = []
        dialed = await race(interleave(addresses), self._port, failures)
        if dialed is not None:
            return dialed.sock
        told = ", ".join(f"{failure.address} {describe(failure.error)}" for failure in failures)
        return DialFailed(Reason.UPSTREAM_PROXY, f"the proxy: port {self._port}: {told or 'no address'}")

    async def _ask(self, sock: socket.socket, authority: bytes) -> Established | Declined:
        loop = asyncio.get_running_loop()
        request = b"CONNECT %s HTTP/1.1\r\nHost: %s\r\n" % (authority, authority)
        if self._authorization is not None:
            request += b"Proxy-Authorization: " + self._authorization + b"\r\n"
        await loop.sock_sendall(sock, request + b"\r\n")
        seen = b""
        while True:
            await _readable(sock)
            # Only looked at: what comes behind the reply is the server's, which may speak first.
            piece = sock.recv(REPLY_LIMIT, socket.MSG_PEEK)
            if not piece:
                return Declined(0)
            reply = read_reply(seen + piece)
            if isinstance(reply, Declined):
                return reply
            took = reply.size - len(seen) if isinstance(reply, Established) else len(piece)
            seen += sock.recv(took)
            if isinstance(reply, Established):
                return reply


async def _readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, lambda: None if ready.done() else ready.set_result(None))
    try:
        await ready
    finally:
        loop.remove_reader(sock)
