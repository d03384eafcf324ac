"""Outlets: standard output and syslog (RFC 5424), each with records as they are or as OCSF events."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

from egressd.journal.feed import Fields, Unsent, line_of
from egressd.journal.ocsf import event_of

type Format = Literal["record", "ocsf"]

FORMS: Final[dict[str, Callable[[Fields], bytes]]] = {
    "record": line_of,
    "ocsf": lambda fields: line_of(event_of(fields)),
}

_FACILITY: Final = 10
"""authpriv, RFC 5424 section 6.2.1: what only those may read who may read who logs in."""
_NOTICE, _INFO, _WARNING, _ALERT = 5, 6, 4, 1
_DATAGRAM_LIMIT: Final = 60_000
_NOT_PRINTABLE = re.compile(r"[^!-~]")


class StdoutOutlet:
    """Standard output, a line for each record."""

    name = "standard output"

    def __init__(self, form: Format) -> None:
        """Write in this form."""
        self._form = FORMS[form]

    def send(self, records: Sequence[Fields], seconds: float) -> None:  # noqa: ARG002 -- a pipe's reader has all the time it wants
        """Write the records' lines; waits for a slow reader, in the feed's own thread."""
        data = memoryview(b"".join(self._form(fields) + b"\n" for fields in records))
        descriptor = sys.stdout.fileno()
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                _wait_writable(descriptor)

    def close(self) -> None:
        """Nothing is held."""


class SyslogAddress(NamedTuple):
    """Where a syslog daemon listens: `unix` with a path, or `udp` or `tcp` with a host and a port."""

    kind: Literal["unix", "udp", "tcp"]
    host: str
    port: int = 0


def parse_address(text: str) -> SyslogAddress:
    """Return the address that `unix:/dev/log`, `udp://HOST[:514]` or `tcp://HOST[:601]` writes; raises ValueError."""
    if text.startswith("unix:/"):
        return SyslogAddress("unix", text.removeprefix("unix:"))
    kind, _, place = text.partition("://")
    host, colon, port = place.rpartition(":") if not place.endswith("]") else (place, "", "")
    if not colon:
        host, port = place, "601" if kind == "tcp" else "514"
    host = host.removeprefix("[").removesuffix("]")
    if kind not in {"udp", "tcp"} or not re.fullmatch(r"[A-Za-z0-9._:-]{1,253}", host):
        raise ValueError("unix:/PATH, udp://HOST:PORT or tcp://HOST:PORT is wanted")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65_536):
        raise ValueError("a port lies between 1 and 65535")
    return SyslogAddress("tcp" if kind == "tcp" else "udp", host, int(port))


class SyslogOutlet:
    """A syslog daemon: one message for each record, framed by octet counts over TCP (RFC 6587), one datagram each otherwise."""

    def __init__(self, address: SyslogAddress, form: Format) -> None:
        """Connect at the first record."""
        self.name = f"syslog {address.host}"
        self._address = address
        self._form = FORMS[form]
        self._socket: socket.socket | None = None
        self._hostname = _NOT_PRINTABLE.sub("-", socket.gethostname())[:255] or "-"
        self._sent = 0

    def send(self, records: Sequence[Fields], seconds: float) -> None:
        """Send the records from where the last try ended."""
        try:
            sock = self._socket = self._socket or self._connected(seconds)
            sock.settimeout(seconds)
            if self._address.kind == "tcp":
                messages = [self._message(fields) for fields in records]
                sock.sendall(b"".join(b"%d %b" % (len(message), message) for message in messages))
                return
            for fields in records[self._sent :]:
                sock.send(self._message(fields)[:_DATAGRAM_LIMIT])
                self._sent += 1
            self._sent = 0
        except OSError as error:
            self._drop()
            raise Unsent(error.strerror or str(error) or type(error).__name__) from error

    def close(self) -> None:
        """Close the connection."""
        self._drop()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self, seconds: float) -> socket.socket:
        address = self._address
        if address.kind == "unix":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            sock.connect(address.host)
            return sock
        if address.kind == "tcp":
            return socket.create_connection((address.host, address.port), seconds)
        family, kind, protocol, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_DGRAM
        )[0]
        sock = socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)
        sock.connect(where)
        return sock

    def _message(self, fields: Fields) -> bytes:
        header = (
            f"<{_FACILITY * 8 + _severity(fields)}>1 {_plain(fields.get('time'))} {self._hostname} egressd"
            f" {os.getpid()} {_plain(fields.get('event'))} - "
        )
        return header.encode("ascii") + self._form(fields)


def _severity(fields: Fields) -> int:
    if fields.get("event") == "alert":
        return _ALERT
    if fields.get("event") in ("lost", "journal") or fields.get("verdict") in ("deny", "ask"):
        return _WARNING
    return _NOTICE if fields.get("event") in ("policy", "approval") else _INFO


def _plain(value: Any) -> str:
    return _NOT_PRINTABLE.sub("-", value)[:32] if isinstance(value, str) and value else "-"


def _wait_writable(descriptor: int) -> None:
    import select

    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll()
