"""Questions asked from inside a sandbox's network before its command runs: what would the command see?"""

import os
import socket
import struct
import time
from typing import Any, Final

_PACKET_LIMIT: Final = 65535
_TYPE_A: Final = 1
_CLASS_IN: Final = 1


def dns(name: str, server: str, port: int, timeout: float, *, tcp: bool = False) -> dict[str, Any]:
    """Ask for the A records of `name`: {"rcode": int | None, "addresses": [...], "error": str | None}."""
    number = os.urandom(2)
    labels = b"".join(bytes([len(label)]) + label.encode("ascii") for label in name.strip(".").split("."))
    query = (
        number
        + struct.pack("!HHHHH", 0x0100, 1, 0, 0, 0)
        + labels
        + struct.pack("!BHH", 0, _TYPE_A, _CLASS_IN)
    )
    try:
        answer = (_ask_tcp if tcp else _ask_udp)(query, server, port, timeout)
        rcode, addresses = _read(answer, number)
    except OSError as error:
        return {"rcode": None, "addresses": [], "error": _said(error)}
    except (struct.error, IndexError, ValueError):
        return {"rcode": None, "addresses": [], "error": "an answer that is no DNS message"}
    return {"rcode": rcode, "addresses": addresses, "error": None}


def tcp(host: str, port: int, send: bytes, timeout: float) -> dict[str, Any]:
    """Connect to a literal address, say something, read once: {"connected": bool, "received": latin-1, "error": ...}."""
    connected = False
    try:
        with socket.socket(_family(host), socket.SOCK_STREAM, socket.IPPROTO_TCP) as connection:
            connection.settimeout(timeout)
            connection.connect((host, port))
            connected = True
            if send:
                connection.sendall(send)
            received = connection.recv(_PACKET_LIMIT // 4)
    except OSError as error:
        return {"connected": connected, "received": "", "error": _said(error)}
    return {"connected": True, "received": received.decode("latin-1"), "error": None}


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _said(error: OSError) -> str:
    return error.strerror or str(error)


def _ask_udp(query: bytes, server: str, port: int, timeout: float) -> bytes:
    with socket.socket(_family(server), socket.SOCK_DGRAM, socket.IPPROTO_UDP) as asker:
        asker.connect((server, port))
        asker.settimeout(timeout)
        asker.send(query)
        return asker.recv(_PACKET_LIMIT)


def _ask_tcp(query: bytes, server: str, port: int, timeout: float) -> bytes:
    deadline = time.monotonic() + timeout
    with socket.socket(_family(server), socket.SOCK_STREAM, socket.IPPROTO_TCP) as asker:
        asker.settimeout(timeout)
        asker.connect((server, port))
        asker.sendall(struct.pack("!H", len(query)) + query)
        held = b""
        while len(held) < 2 or len(held) < 2 + struct.unpack_from("!H", held)[0]:
            asker.settimeout(max(0.001, deadline - time.monotonic()))
            more = asker.recv(_PACKET_LIMIT)
            if not more:
                raise ConnectionError("the connection ended before the answer")
            held += more
        return held[2:]


def _read(answer: bytes, number: bytes) -> tuple[int, list[str]]:
    """The response code and the A records of an answer (RFC 1035 section 4.1)."""
    flags, questions, answers = struct.unpack_from("!HHH", answer, 2)
    if answer[:2] != number or not flags & 0x8000:
        raise ValueError
    place = 12
    for _ in range(questions):
        place = _after_name(answer, place) + 4
    addresses = []
    for _ in range(answers):
        place = _after_name(answer, place)
        kind, _class, _ttl, length = struct.unpack_from("!HHIH", answer, place)
        place += 10
        if kind == _TYPE_A and length == 4:
            addresses.append(socket.inet_ntoa(answer[place : place + 4]))
        place += length
    return flags & 0xF, addresses


def _after_name(answer: bytes, place: int) -> int:
    while answer[place]:
        if answer[place] & 0xC0:  # a pointer ends the name
            return place + 2
        place += 1 + answer[place]
    return place + 1
