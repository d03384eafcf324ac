"""The lab's authoritative DNS: one server that is every zone, the hostile ones included, and logs each
query.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from egressd.lab import topology
from egressd.lab.sightings import SeenQuery

BEHAVIOURS = (
    "plain",
    "rebind",  # `then` from the second answer on
    "foreign",  # the answer section also holds addresses of other names, the additional section glue for them
    "truncated",  # nothing but TC by UDP, the answer by TCP
    "spoofed",  # a stranger's answers come first: with another id, and to another question
    "silent",
    "wrong-id",
    "servfail",
    "refused",
    "nxdomain",
    "empty",  # NODATA
    "garbage",  # the header and then bytes that are no message
    "loop",  # a CNAME to itself
)


@dataclass(frozen=True)
class Name:
    """What the server says for one name."""

    a: tuple[str, ...] = ()
    aaaa: tuple[str, ...] = ()
    cname: str | None = None
    txt: tuple[str, ...] = ()
    records: tuple[tuple[str, str], ...] = ()
    """Records of further types, each its type and its data as in a zone file."""
    ttl: int = 60
    behaviour: str = "plain"
    then: tuple[str, ...] = ()
    """For `rebind`: the addresses of both families from the second answer of a type on."""
    wait: float = 0.0
    """Seconds before the answer."""


_ANYWHERE = Name(a=(topology.API,), aaaa=(topology.API_V6,))
_EVIL = Name(a=(topology.ATTACKER,), aaaa=(topology.ATTACKER_V6,), txt=("orders for the sandbox",))

ZONE: dict[str, Name] = {
    "pypi.org": Name(a=(topology.PYPI,)),
    "pypi.mallory-lab.com": Name(a=(topology.PYPI,)),
    "files.pythonhosted.org": Name(a=(topology.PYTHONHOSTED,)),
    "upload.pypi.org": Name(a=(topology.PYPI_UPLOAD,)),
    "github.com": Name(a=(topology.GITHUB,)),
    "api.anthropic.com": Name(a=(topology.ANTHROPIC,)),
    "api.openai.com": _ANYWHERE,
    "api.github.com": _ANYWHERE,
    "deb.debian.org": Name(a=(topology.DEBIAN,)),
    "security.debian.org": Name(a=(topology.DEBIAN,)),
    "registry.npmjs.org": Name(a=(topology.NPM,)),
    "pastebin.com": Name(a=(topology.PASTEBIN,)),
    "example.com": _ANYWHERE,
    "www.example.com": _ANYWHERE,
    "evil-lab.com": _EVIL,
    "*.evil-lab.com": _EVIL,
    "lab-origin.com": _ANYWHERE,
    topology.DNS_NAME: Name(a=(topology.DNS,), aaaa=(topology.DNS_V6,)),
    "api.lab-origin.com": _ANYWHERE,
    "www.lab-origin.com": Name(cname="api.lab-origin.com"),
    "*.wild.lab-origin.com": _ANYWHERE,
    "h2.lab-origin.com": _ANYWHERE,
    "grpc.lab-origin.com": _ANYWHERE,
    **{
        f"{name}.lab-origin.com": _ANYWHERE
        for name in ("pypi", "npm", "login", "google", "entra", "kube", "queue")
    },
    "wild-lab.com": _ANYWHERE,
    "*.wild-lab.com": _ANYWHERE,
    "expired.lab-origin.com": _ANYWHERE,
    "self-signed.lab-origin.com": _ANYWHERE,
    "wrong-name.lab-origin.com": _ANYWHERE,
    "not-yet-valid.lab-origin.com": _ANYWHERE,
    "v6only.lab-origin.com": Name(aaaa=(topology.API_V6,)),
    "refused.lab-origin.com": Name(a=(topology.REFUSED,)),
    "blackhole.lab-origin.com": Name(a=(topology.BLACKHOLE,)),
    "half-dead.lab-origin.com": Name(a=(topology.BLACKHOLE, topology.REFUSED, topology.API)),
    "rebind.lab-origin.com": Name(a=(topology.API,), behaviour="rebind", then=("127.0.0.1", "::1"), ttl=0),
    "rebind-private.lab-origin.com": Name(
        a=(topology.API,), behaviour="rebind", then=(topology.PRIVATE,), ttl=0
    ),
    "private.lab-origin.com": Name(a=(topology.PRIVATE,)),
    "mixed.lab-origin.com": Name(a=(topology.API, topology.PRIVATE)),
    "loopback.lab-origin.com": Name(a=("127.0.0.1",), aaaa=("::1",)),
    "unspecified.lab-origin.com": Name(a=("0.0.0.0",), aaaa=("::",)),  # noqa: S104 (an answer, not a bind)
    "metadata.lab-origin.com": Name(a=(topology.METADATA,), aaaa=(topology.METADATA_V6,)),
    "azure.lab-origin.com": Name(a=(topology.METADATA_AZURE,)),
    "linklocal.lab-origin.com": Name(a=("169.254.1.1",), aaaa=("fe80::1",)),
    "mapped.lab-origin.com": Name(aaaa=("::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe")),
    "synthetic.lab-origin.com": Name(a=("198.18.1.7",)),
    "multicast.lab-origin.com": Name(a=("224.0.0.1",)),
    "cname-out.lab-origin.com": Name(cname="www.evil-lab.com"),
    "cname-loop.lab-origin.com": Name(cname="cname-loop.lab-origin.com", behaviour="loop"),
    "foreign.lab-origin.com": Name(a=(topology.API,), behaviour="foreign"),
    "huge.lab-origin.com": Name(a=topology.CROWD),
    "truncated.lab-origin.com": Name(a=(topology.API,), behaviour="truncated"),
    "slow.lab-origin.com": Name(a=(topology.API,), wait=3.0),
    "silent.lab-origin.com": Name(behaviour="silent"),
    "wrong-id.lab-origin.com": Name(a=(topology.API,), behaviour="wrong-id"),
    "servfail.lab-origin.com": Name(behaviour="servfail"),
    "dns-refused.lab-origin.com": Name(behaviour="refused"),
    "empty.lab-origin.com": Name(behaviour="empty"),
    "garbage.lab-origin.com": Name(behaviour="garbage"),
}


@dataclass(frozen=True)
class Reply:
    """What to send: None for nothing, after `wait` seconds."""

    wire: bytes | None
    wait: float = 0.0
    before: tuple[bytes, ...] = ()
    """What comes before it, by UDP."""


class Zone:
    """Names, what is said for them, and what was asked: some names change their answer."""

    def __init__(self, names: dict[str, Name]) -> None:
        self.names = dict(names)
        self.seen: list[SeenQuery] = []
        self._answered: dict[tuple[str, str], int] = {}

    def set_name(self, name: str, entry: Name) -> None:
        """Adds or replaces a name; its count of answers starts anew."""
        self.names[name] = entry
        for key in [key for key in self._answered if key[0] == name]:
            del self._answered[key]

    def answer(self, wire: bytes, transport: str, peer: str) -> Reply:
        """Answers one query in wire form. Total: what does not parse gets FORMERR, under 12 bytes nothing."""
        try:
            query = dns.message.from_wire(wire)
            question = query.question[0]
        except (dns.exception.DNSException, IndexError, ValueError):
            return Reply(wire[:2] + struct.pack("!HHHHH", 0x8001, 0, 0, 0, 0) if len(wire) >= 12 else None)
        spelling = question.name.to_text(omit_final_dot=True)
        kind = dns.rdatatype.to_text(question.rdtype)
        self.seen.append(SeenQuery(spelling.lower(), kind, transport, peer, spelling))
        entry = self.find(spelling.lower())
        response = dns.message.make_response(query)
        response.flags |= dns.flags.AA
        if entry is None or entry.behaviour == "nxdomain":
            response.set_rcode(dns.rcode.NXDOMAIN)
            return Reply(self._pack(response, query, transport))
        self._fill(response, entry, spelling.lower(), kind)
        return self._misbehave(entry, self._pack(response, query, transport), transport, query.id)

    def find(self, name: str) -> Name | None:
        """The entry for a name in lower case: itself, or the nearest wildcard above it."""
        if name in self.names:
            return self.names[name]
        labels = name.split(".")
        for cut in range(1, len(labels)):
            if entry := self.names.get("*." + ".".join(labels[cut:])):
                return entry
        return None

    def _fill(self, response: dns.message.Message, entry: Name, name: str, kind: str) -> None:
        """Puts the records of `entry` in the answer section, along its CNAME where it has one."""
        if entry.behaviour in {"servfail", "refused"}:
            response.set_rcode(dns.rcode.SERVFAIL if entry.behaviour == "servfail" else dns.rcode.REFUSED)
            return
        if entry.behaviour == "empty":
            return
        owner = response.question[0].name
        seen = {name}
        while entry.cname is not None:
            response.answer.append(dns.rrset.from_text(owner, entry.ttl, "IN", "CNAME", entry.cname + "."))
            if kind == "CNAME" or entry.cname in seen:
                return
            seen.add(entry.cname)
            owner = dns.name.from_text(entry.cname)
            following = self.find(entry.cname)
            if following is None:
                response.set_rcode(dns.rcode.NXDOMAIN)
                return
            entry = following
        if values := self._values(entry, name, kind):
            response.answer.append(dns.rrset.from_text(owner, entry.ttl, "IN", kind, *values))
        if entry.behaviour == "foreign":
            for victim in ("pypi.org.", "github.com."):
                record = dns.rrset.from_text(victim, 600, "IN", "A", topology.ATTACKER)
                response.answer.append(record)
                response.additional.append(record)

    def _values(self, entry: Name, name: str, kind: str) -> tuple[str, ...]:
        if kind == "TXT":
            return tuple(f'"{text}"' for text in entry.txt)
        if kind not in {"A", "AAAA"}:
            return tuple(data for type_, data in entry.records if type_ == kind)
        count = self._answered[name, kind] = self._answered.get((name, kind), 0) + 1
        if entry.behaviour == "rebind" and count > 1:
            return tuple(address for address in entry.then if (":" in address) == (kind == "AAAA"))
        return entry.a if kind == "A" else entry.aaaa

    def _pack(self, response: dns.message.Message, query: dns.message.Message, transport: str) -> bytes:
        size = max(512, query.payload if query.edns >= 0 else 512) if transport == "udp" else 65535
        try:
            return response.to_wire(max_size=size)
        except dns.exception.TooBig:
            response.answer, response.additional = [], []
            response.flags |= dns.flags.TC
            return response.to_wire(max_size=size)

    def _misbehave(self, entry: Name, wire: bytes, transport: str, identifier: int) -> Reply:
        if entry.behaviour == "silent":
            return Reply(None)
        if entry.behaviour == "wrong-id":
            wire = struct.pack("!H", identifier ^ 0x5555) + wire[2:]
        elif entry.behaviour == "garbage":
            wire = wire[:12] + b"\xff\xc0\xff\x3f" * 8
        elif entry.behaviour == "truncated" and transport == "udp":
            # The header with TC, QDCOUNT 0 and no record: the least that a truncating server may send.
            wire = wire[:2] + struct.pack("!HHHHH", 0x8600, 0, 0, 0, 0)
        elif entry.behaviour == "spoofed" and transport == "udp":
            return Reply(wire, entry.wait, _spoofs(wire))
        return Reply(wire, entry.wait)


def _spoofs(wire: bytes) -> tuple[bytes, ...]:
    """What one who guesses would send before the answer `wire`: the attacker's address, by another id, and for another name."""
    forged = dns.message.from_wire(wire)
    if forged.question[0].rdtype == dns.rdatatype.A:
        owner = forged.question[0].name
        forged.answer = [dns.rrset.from_text(owner, 600, "IN", "A", topology.ATTACKER)]
    right = forged.id
    forged.id ^= 0x5555
    other_id = forged.to_wire()
    forged.id = right
    forged.question = [dns.rrset.RRset(dns.name.from_text("pypi.org."), dns.rdataclass.IN, dns.rdatatype.A)]
    return other_id, forged.to_wire()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, answer: Callable[[bytes, str, str], Reply]) -> None:
        self._answer = answer
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.DatagramTransport)
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        reply = self._answer(data, "udp", f"{addr[0]}:{addr[1]}")
        transport = self._transport
        if reply.wire is None or transport is None:
            return
        for forged in reply.before:
            transport.sendto(forged, addr)
        if reply.wait:
            asyncio.get_running_loop().call_later(reply.wait, transport.sendto, reply.wire, addr)
        else:
            transport.sendto(reply.wire, addr)


async def serve_zone(zone: Zone, address: str) -> None:
    """Answers on UDP and TCP port 53 of `address` until the loop ends."""
    loop = asyncio.get_running_loop()
    await loop.create_datagram_endpoint(lambda: _Datagrams(zone.answer), local_addr=(address, 53))

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await carry_messages(zone, "tcp", reader, writer)

    await asyncio.start_server(stream, address, 53)


async def carry_messages(
    zone: Zone, transport: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answers the queries of one connection, each behind its length, in the order in which they came."""
    peer = writer.get_extra_info("peername")
    try:
        while True:
            (length,) = struct.unpack("!H", await reader.readexactly(2))
            wire = await reader.readexactly(length)
            reply = zone.answer(wire, transport, f"{peer[0]}:{peer[1]}")
            await asyncio.sleep(reply.wait)
            if reply.wire is not None:
                writer.write(struct.pack("!H", len(reply.wire)) + reply.wire)
                await writer.drain()
    except (asyncio.IncompleteReadError, OSError):
        pass  # the client is done
    finally:
        writer.close()


def entry_from(values: dict[str, object]) -> Name:
    """A `Name` from JSON values; raises ValueError for a behaviour that does not exist, TypeError for an
    unknown key.
    """
    listed = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    entry = replace(Name(), **listed)  # type: ignore[arg-type]  # checked by the caller's own signature
    if entry.behaviour not in BEHAVIOURS:
        raise ValueError(f"no such behaviour: {entry.behaviour} (one of {', '.join(BEHAVIOURS)})")
    return entry
