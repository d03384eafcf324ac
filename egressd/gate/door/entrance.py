"""How a connection came in, and the reading of whole messages from it before anything is judged."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final, Literal

from egressd.gate.connection import Channel
from egressd.gate.door import socks
from egressd.gate.door.connect import Absolute, BadHead, NeedMore, Tunnel, parse_proxy_head
from egressd.gate.door.hops import PREFIX, BadHop, Forwarded, Networks, bare, is_listed, read_hop
from egressd.gate.door.hops import NeedMore as NeedMoreOfHop
from egressd.gate.door.socks import BadSocks, Login
from egressd.policy.attempt import Address, Name
from egressd.policy.names import BadHost, parse_authority
from egressd.policy.reasons import Reason

_PIECE = 16 * 1024
_HOST_FIELD = re.compile(rb"\r?\n[Hh][Oo][Ss][Tt]:[ \t]*([^\r\n]*?)[ \t]*\r?\n")

type Way = Literal["transparent", "explicit", "socks", "direct"]

CHANNELS: Final[dict[Way, Channel]] = {
    "transparent": "transparent",
    "explicit": "connect",
    "socks": "socks",
    "direct": "direct",
}
"""What a connection's records say of its way in; a request in absolute form makes `connect` into `absolute`."""


@dataclass(frozen=True, slots=True)
class Entrance:
    """The listener that a connection came by, and what was learned of it before its sandbox was known.

    `port` is what a `direct` listener stands for. `source` is set where sandboxes are told apart by it. `data` was read from
    the socket already; `greeted` says that a SOCKS client has been through its authentication. A connection of one of the
    `hops` still begins with its PROXY protocol header.
    """

    way: Way = "transparent"
    port: int = 0
    source: Address | None = None
    data: bytes = b""
    greeted: bool = False
    hops: Networks = ()


TRANSPARENT: Final = Entrance()


@dataclass(frozen=True, slots=True)
class Unheard:
    """A message that did not come whole."""

    reason: Reason
    detail: str


class Listening:
    """Reads messages from a non-blocking socket, all of them under one deadline of `seconds` from now.

    `data` is what has come and no message has taken yet; it never grows beyond `most` bytes and one piece.
    """

    def __init__(self, sock: socket.socket, data: bytes, seconds: float, most: int) -> None:
        """Nothing is read before the first `until`."""
        self.sock = sock
        self.data = data
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + seconds
        self._most = most

    async def until[T](self, parse: Callable[[bytes], T | NeedMore]) -> T | Unheard:
        """Return what `parse` makes of the bytes so far, once it needs no more."""
        try:
            async with asyncio.timeout_at(self._deadline):
                while isinstance(found := parse(self.data), NeedMore):
                    if len(self.data) > self._most:
                        return Unheard(Reason.HEAD_TOO_LARGE, f"{len(self.data)} bytes")
                    more = await self._loop.sock_recv(self.sock, _PIECE)
                    if not more:
                        return Unheard(Reason.CLIENT_CLOSED, f"{len(self.data)} bytes")
                    self.data += more
        except TimeoutError:
            return Unheard(Reason.HEAD_TIMEOUT, f"{len(self.data)} bytes")
        except OSError:
            return Unheard(Reason.CLIENT_CLOSED, "reset early")
        return found

    async def say(self, data: bytes) -> None:
        """Send an answer to a message; a peer that has gone is found out by the next reading."""
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._loop.sock_sendall(self.sock, data)
        except (OSError, TimeoutError):
            return


async def source_of(sock: socket.socket, hops: Networks, seconds: float) -> Address | BadHop:
    """Return where a connection comes from: a listed hop must say it first, and no byte behind its header is read."""
    try:
        peer = bare(ip_address(sock.getpeername()[0]))
        if not is_listed(peer, hops):
            return peer
        loop, data, wanted = asyncio.get_running_loop(), b"", NeedMoreOfHop(PREFIX)
        async with asyncio.timeout(seconds):
            while True:
                more = await loop.sock_recv(sock, wanted.size - len(data))
                if not more:
                    return BadHop("a PROXY protocol header that was cut off")
                data += more
                found = read_hop(data)
                if isinstance(found, Forwarded):
                    return found.source or peer
                if isinstance(found, BadHop):
                    return found
                wanted = found
    except TimeoutError:
        return BadHop("no PROXY protocol header in time")
    except OSError:
        return BadHop("the connection was gone before its PROXY protocol header")


async def proxy_head(listening: Listening) -> Tunnel | Absolute | BadHead:
    """Read the head of an explicit proxy request, as much of it as its kind needs."""
    head: Tunnel | Absolute | BadHead | Unheard = await listening.until(parse_proxy_head)
    return BadHead(head.reason, head.detail) if isinstance(head, Unheard) else head


async def greet(listening: Listening, choose: Callable[[frozenset[int]], int]) -> Login | BadSocks | None:
    """Carry a SOCKS client through its greeting, and hear its login if `choose` wants one (None: none was chosen).

    Whether the login is good the caller answers (`socks.judge_login`).
    """
    greeting: socks.Greeting | BadSocks | Unheard = await listening.until(socks.read_greeting)
    if isinstance(greeting, Unheard):
        return BadSocks(greeting.reason, greeting.detail, b"")
    if isinstance(greeting, BadSocks):
        return greeting
    listening.data = listening.data[greeting.size :]
    method = choose(greeting.methods)
    if method == socks.NO_METHOD:
        return BadSocks(Reason.UNKNOWN_SANDBOX, "no way of authentication that helps", socks.choose(method))
    await listening.say(socks.choose(method))
    if method == socks.NO_AUTHENTICATION:
        return None
    login: Login | BadSocks | Unheard = await listening.until(socks.read_login)
    if isinstance(login, Unheard):
        return BadSocks(login.reason, login.detail, b"")
    if isinstance(login, Login):
        listening.data = listening.data[login.size :]
    return login


async def socks_request(listening: Listening) -> socks.Request | BadSocks:
    """Read where a SOCKS client wants to go; `listening.data` is then what came behind it."""
    request: socks.Request | BadSocks | Unheard = await listening.until(socks.read_request)
    if isinstance(request, Unheard):
        return BadSocks(request.reason, request.detail, b"")
    if isinstance(request, socks.Request):
        listening.data = listening.data[request.size :]
    return request


async def claimed_host(listening: Listening) -> Name | Address | BadHost:
    """Read a request head to its end and return the host that it names; its first Host field, which the inspector judges."""
    heard = await listening.until(lambda data: True if b"\r\n\r\n" in data else NeedMore())
    if isinstance(heard, Unheard):
        return BadHost(heard.reason, heard.detail)
    field = _HOST_FIELD.search(listening.data)
    if field is None:
        return BadHost(Reason.BAD_HOST, "no Host field")
    authority = parse_authority(field.group(1), 80)
    return authority if isinstance(authority, BadHost) else authority.host


def any_method(methods: frozenset[int]) -> int:
    """Choose for a listener that says by itself which sandbox it is: what a client says of itself beyond that is not asked."""
    for method in (socks.NO_AUTHENTICATION, socks.USERNAME_PASSWORD):
        if method in methods:
            return method
    return socks.NO_METHOD
