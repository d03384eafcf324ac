"""The class of an address, whatever carries it and however it is spelled; beside ipaddress."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address

from egressd.policy.addresses import classify, embedded
from egressd.policy.attempt import Address
from egressd.policy.names import parse_host
from tests.fuzz.target import Target


def check(data: bytes) -> None:
    """Hold every law of addresses."""
    for number, address in enumerate(_addresses(data)):
        found = classify(address)
        assert (found.kind == "public") is (found.reason is None)
        if found.kind == "public":
            assert address.is_global, "the standard library knows that this is not public"
            assert not address.is_multicast
        for text in _spellings(address) if number < 3 else ():
            read = parse_host(text, bracketed=text.startswith("["))
            assert read == address, text
        if isinstance(address, IPv6Address):
            _check_inside(address)


def _check_inside(address: IPv6Address) -> None:
    """What carries an address is never better than what it carries."""
    found = classify(address)
    inner = set(embedded(address))
    for carried in (address.ipv4_mapped, address.sixtofour, *(address.teredo or ())):
        assert carried is None or carried in inner, "ipaddress sees an address inside that we do not"
    assert not inner or found.kind != "public"
    if any(classify(one).kind == "floor" for one in inner):
        assert found.kind == "floor"


def _addresses(data: bytes) -> Iterator[Address]:
    four = IPv4Address(data[:4].ljust(4, b"\0"))
    yield four
    yield IPv6Address(data[:16].ljust(16, b"\0"))
    for prefix in (
        "::",
        "::ffff:0:0",
        "::ffff:0:0:0",
        "64:ff9b::",
        "64:ff9b:1::",
        "2001:db8::5efe:0:0",
        "2a00::200:5efe:0:0",
    ):
        yield IPv6Address(int(IPv6Address(prefix)) | int(four))
    yield IPv6Address(0x2002 << 112 | int(four) << 80 | int.from_bytes(data[4:10]))
    yield IPv6Address(0x2001_0000 << 96 | int(four) ^ 0xFFFF_FFFF | int.from_bytes(data[4:8]) << 64)


def _spellings(address: Address) -> Iterator[str]:
    value = int(address)
    if isinstance(address, IPv6Address):
        low = IPv4Address(value & 0xFFFF_FFFF)
        head = ":".join(f"{value >> shift & 0xFFFF:04x}" for shift in range(112, 16, -16))
        for text in (address.compressed, address.exploded, address.exploded.upper(), f"{head}:{low}"):
            yield text
            yield f"[{text}]"
        return
    a, b, c, d = address.packed
    yield str(address)
    yield f"{value}"
    yield f"{value:#x}"
    yield f"0{value:o}"
    yield f"{a}.{value & 0xFFFFFF}"
    yield f"0{a:o}.{b:#X}.{value & 0xFFFF:#x}"
    yield f"{a:#06x}.0{b:05o}.{c}.{d:#x}"


TARGET = Target(
    "addresses",
    check,
    lambda data: [classify(address) for address in _addresses(data)],
    seeds=tuple(
        address.packed
        for address in map(
            IPv4Address,
            (
                "169.254.169.254",
                "168.63.129.16",
                "127.0.0.1",
                "93.184.216.34",
                "10.0.0.1",
                "198.18.0.1",
                "224.0.0.1",
            ),
        )
    )
    + tuple(
        IPv6Address(text).packed
        for text in (
            "::1",
            "2606:4700::1111",
            "fd00:ec2::254",
            "2001:2::fe",
            "2002:a9fe:a9fe::1",
            "fe80::5efe:a9fe:a9fe",
        )
    ),
    words=(
        b"\xa9\xfe",
        b"\x7f\0\0\x01",
        b"\x20\x02",
        b"\x20\x01\0\0",
        b"\0\x64\xff\x9b",
        b"\xff\xff",
        b"\x5e\xfe",
        b"\xc6\x12",
    ),
    most=16,
    quick=1000,
)
