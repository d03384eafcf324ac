"""Which servers names are asked of, as an operator writes them.

An address stands where a URL has its host, always: a server is dialled as written, so that no name has to be
looked up before names can be looked up. For the encrypted transports the name that the server's certificate
must hold stands behind `#`; without one the certificate must hold the address itself (RFC 8310 §8.1, strict).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Final, Literal

from egressd.policy.attempt import Address
from egressd.policy.names import BadHost, format_name, parse_name

RESOLV_CONF = Path("/etc/resolv.conf")
MAX_SERVERS = 3

type Transport = Literal["udp", "tcp", "tls", "https"]

PORTS: Final[dict[Transport, int]] = {"udp": 53, "tcp": 53, "tls": 853, "https": 443}
"""RFC 1035 §4.2, RFC 7858 §3.1, RFC 8484 §3."""
DOH_PATH = "/dns-query"
"""The path where none is written; what RFC 8484's examples and nearly all servers use."""

FORMS = (
    "system, udp://ADDRESS[:PORT], tcp://ADDRESS[:PORT], tls://ADDRESS[:PORT][#NAME] "
    "or https://ADDRESS[:PORT][/PATH][#NAME]"
)

_PROVEN: Final = ("tls", "https")
_SERVER = re.compile(
    r"(?P<host>\[[^\s\[\]/?#@]+\]|[^\s\[\]:/?#@]+)(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>/[^\s?#{}]*)?(?:#(?P<name>[^\s#]*))?",
    re.ASCII,
)
_PATH = re.compile(r"/(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})*")
"""RFC 3986 §3.3, absolute and in ASCII."""
_MAX_PATH = 1024


@dataclass(frozen=True, slots=True)
class Upstream:
    """One server that names are asked of; `name` and `path` mean something for encrypted transports only."""

    address: Address
    port: int = 53
    transport: Transport = "udp"
    name: str | None = None
    """Who the server must prove to be; None: its address."""
    path: str = ""

    @property
    def host(self) -> str:
        """The address as a URL has it, IPv6 in brackets."""
        return f"[{self.address}]" if isinstance(self.address, IPv6Address) else str(self.address)

    @property
    def identity(self) -> str:
        """What the server's certificate must hold: a DNS name, or an address (never a zone of it)."""
        return self.name if self.name is not None else str(self.address).partition("%")[0]

    def __str__(self) -> str:
        proven = f"#{self.name}" if self.name is not None else ""
        return f"{self.transport}://{self.host}:{self.port}{self.path}{proven}"


def parse_upstream(text: str, resolv_conf: Path = RESOLV_CONF) -> tuple[Upstream, ...]:
    """Return the servers that a `dns.upstream` names (see FORMS), first asked first.

    `system` reads the nameserver lines of resolv.conf and nothing else of it; none there is an empty tuple.
    Raises ValueError, with what to write instead, for anything else.
    """
    if text == "system":
        return _system_servers(resolv_conf)
    try:
        return (_parse_server(text),)
    except ValueError as error:
        raise ValueError(f"{error}; use {FORMS}") from None


def _parse_server(text: str) -> Upstream:
    transport, rest = _transport(text)
    # no urlsplit: it drops tabs, newlines and outer spaces without a word, and what stands behind a bracket
    parts = _SERVER.fullmatch(rest)
    if parts is None:
        raise ValueError(_unreadable(rest))
    address = _address(parts["host"], transport)
    port = PORTS[transport] if parts["port"] is None else int(parts["port"])
    if not 0 < port < 65_536:
        raise ValueError("the port is none")
    if transport in ("udp", "tcp"):
        if parts["path"] is not None or parts["name"] is not None:
            raise ValueError(f"{transport}:// takes nothing but an address and a port")
        return Upstream(address, port, transport)
    if transport == "tls" and parts["path"] is not None:
        raise ValueError("tls:// takes no path")
    path = _path(parts["path"]) if transport == "https" else ""
    return Upstream(address, port, transport, _name(parts["name"]), path)


def _transport(text: str) -> tuple[Transport, str]:
    scheme, separator, rest = text.partition("://")
    for transport in PORTS:
        if separator and scheme == transport:
            return transport, rest
    raise ValueError("no DNS upstream")


def _unreadable(rest: str) -> str:
    """Say what is wrong with what stands behind the scheme, for the mistakes that people make."""
    if "?" in rest or "{" in rest:
        return "no query and no template may stand here: questions are sent by POST"
    if "@" in rest:
        return "the name of a server stands behind #, and no user before the address"
    return "no address, port and name that can be read (IPv6 stands in brackets)"


def _address(host: str, transport: Transport) -> Address:
    bracketed = host.startswith("[")
    try:
        address = ip_address(host.strip("[]"))
        if isinstance(address, IPv6Address) is bracketed:
            return address
    except ValueError:
        pass
    named = f"; its name stands behind #, as in {transport}://ADDRESS#NAME" if transport in _PROVEN else ""
    raise ValueError(f"an IP address must stand here, IPv6 in brackets{named}")


def _name(text: str | None) -> str | None:
    if text is None:
        return None
    name = parse_name(text)
    if isinstance(name, BadHost):
        raise ValueError("behind # stands a DNS name, the one in the server's certificate")
    return format_name(name)


def _path(text: str | None) -> str:
    path = DOH_PATH if text is None else text
    if len(path) > _MAX_PATH or not _PATH.fullmatch(path):
        raise ValueError("the path is none that a URL may have")
    return path


def _system_servers(path: Path) -> tuple[Upstream, ...]:
    try:
        lines = path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return ()
    servers: list[Upstream] = []
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            try:
                servers.append(Upstream(ip_address(words[1])))
            except ValueError:  # as resolv.conf(5)'s other readers: a line that says nothing is passed over
                continue
    return tuple(servers[:MAX_SERVERS])
