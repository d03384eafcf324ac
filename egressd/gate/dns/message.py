"""The wire form of what a sandbox asks and what it is answered (RFC 1035 §4.1, RFC 6891, RFC 8914). Pure.

The reader is our own and total: it answers a value for any bytes, in time linear in their length. It can be
small because a query needs no more than a header, one question and at most one OPT record. A compression
pointer has nothing to point to there, so that every pointer is an error and no loop can be built. Replies
echo the question byte for byte (the client's spelling may carry its 0x20 nonce); their records are packed
by dnslib.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass

import dnslib
from dnslib.label import DNSBuffer

from egressd.policy.attempt import Address
from egressd.policy.reasons import Reason

NOERROR, FORMERR, SERVFAIL, NXDOMAIN, NOTIMP, REFUSED, BADVERS = 0, 1, 2, 3, 4, 5, 16
A, SOA, PTR, AAAA, OPT = 1, 6, 12, 28, 41
IN = 1

BLOCKED = 15
"""Extended DNS Error for a refusal by policy (RFC 8914 §4.16)."""
FORGED = 4
"""Extended DNS Error for an answer that is not the name's own (RFC 8914 §4.5)."""

PAYLOAD = 1232
"""Largest UDP reply, and what we advertise: fits the smallest IPv6 MTU (DNS flag day 2020)."""
CLASSIC = 512
TCP_LIMIT = 0xFFFF

_HEADER = struct.Struct("!HHHHHH")
_QR, _TC, _RD, _RA, _CD = 0x8000, 0x0200, 0x0100, 0x0080, 0x0010
_OPCODE = 0x7800
_DO = 0x8000
_EXTENDED_ERROR = 15
_ERROR_TEXT = 128
_ROOT = dnslib.DNSLabel(())
_TYPES: dict[int, str] = dict(dnslib.QTYPE.forward)
_ESCAPED = re.compile(rb"[^!-\-/-\[\]-~]")


@dataclass(frozen=True, slots=True)
class Query:
    """One well-formed question.

    `flags` holds RD and CD as sent, `question` the question section as sent, `labels` its name without the
    root. `payload` is the UDP size of the client's OPT record, None when it sent none.
    """

    id: int
    flags: int
    question: bytes
    labels: tuple[bytes, ...]
    qtype: int
    qclass: int
    payload: int | None = None
    version: int = 0
    dnssec_ok: bool = False

    @property
    def udp_limit(self) -> int:
        """The largest UDP reply that this client takes from us, in bytes."""
        return CLASSIC if self.payload is None else min(max(self.payload, CLASSIC), PAYLOAD)


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message that is no question: why, and the reply, None where there must be none."""

    reason: Reason
    detail: str
    reply: bytes | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a reply says beside the question.

    `ttl` is that of `address`; `negative` adds an SOA record, which bounds by `ttl` how long the absence
    may be remembered (RFC 2308 §5). `error` is an Extended DNS Error (code, ASCII text), sent only to a
    client that speaks EDNS.
    """

    rcode: int = NOERROR
    address: Address | None = None
    ttl: int = 0
    negative: bool = False
    error: tuple[int, str] | None = None


def read(message: bytes) -> Query | Malformed:
    """Read one message of a client."""
    if len(message) < _HEADER.size:
        return Malformed(Reason.BAD_DNS, "shorter than a header")
    _, flags, questions, answers, authorities, additionals = _HEADER.unpack_from(message)
    if flags & _QR:  # dropped without a reply: two servers must not answer each other for ever
        return Malformed(Reason.BAD_DNS, "a response, not a query")
    if flags & _OPCODE:
        opcode = (flags & _OPCODE) >> 11
        return Malformed(Reason.DNS_OPCODE, f"opcode {opcode}", bare(message, NOTIMP))
    problem = ""
    if flags & (_TC | 0x000F):
        problem = "a query that claims to be truncated or to carry a result"
    elif (questions, answers, authorities) != (1, 0, 0) or additionals > 1:
        problem = f"sections of {questions}, {answers}, {authorities} and {additionals} records"
    found = problem or _read_question(message, bool(additionals))
    if isinstance(found, str):
        return Malformed(Reason.BAD_DNS, found, bare(message, FORMERR))
    return found


def _read_question(message: bytes, edns: bool) -> Query | str:
    """Read what follows a good header, to the last byte; a string says what is wrong."""
    name = _read_labels(message, _HEADER.size)
    if isinstance(name, str):
        return name
    labels, end = name
    if len(message) < end + 4:
        return "cut off in the question"
    qtype, qclass = struct.unpack_from("!HH", message, end)
    end += 4
    ident, flags = struct.unpack_from("!HH", message)
    query = Query(ident, flags & (_RD | _CD), message[_HEADER.size : end], labels, qtype, qclass)
    if qtype == OPT:
        return "OPT is no question"
    if edns:
        return _read_edns(message, end, query)
    return query if len(message) == end else "bytes behind the question"


def _read_labels(message: bytes, start: int) -> tuple[tuple[bytes, ...], int] | str:
    """Return the labels at `start` and the offset behind the root, or what is wrong (RFC 1035 §3.1)."""
    labels: list[bytes] = []
    at = start
    while at < len(message):
        length = message[at]
        if length > 63:
            return "a compression pointer in a question" if length >= 0xC0 else "a label of unknown kind"
        label = message[at + 1 : at + 1 + length]
        at += 1 + length
        if at - start > 255:
            return "a name longer than 255 bytes"
        if length == 0:
            return tuple(labels), at
        labels.append(label)
    return "cut off in the name"


def _read_edns(message: bytes, start: int, query: Query) -> Query | str:
    """Read the one additional record, which must be OPT and end the message (RFC 6891 §6.1)."""
    if len(message) < start + 11:
        return "cut off in the additional record"
    root, kind, payload, _extended, version, flags, length = struct.unpack_from("!BHHBBHH", message, start)
    if root != 0 or kind != OPT:
        return "an additional record that is not OPT"
    at = start + 11
    if len(message) != at + length:
        return "an OPT record that does not end the message"
    while at < len(message):
        if len(message) < at + 4:
            return "cut off in an EDNS option"
        at += 4 + int.from_bytes(message[at + 2 : at + 4])
        if at > len(message):
            return "an EDNS option longer than its record"
    return Query(
        query.id,
        query.flags,
        query.question,
        query.labels,
        query.qtype,
        query.qclass,
        payload,
        version,
        bool(flags & _DO),
    )


def pack(query: Query, answer: Answer, limit: int) -> bytes:
    """Return the reply in at most `limit` bytes; what does not fit is left out and TC set (RFC 2181 §9)."""
    reply = _pack(query, answer, 0)
    if len(reply) <= limit:
        return reply
    return _pack(query, Answer(answer.rcode), _TC)


def bare(message: bytes, rcode: int) -> bytes | None:
    """Return an error of nothing but a header; None where no reply is due."""
    if len(message) < _HEADER.size:
        return None
    ident, flags = struct.unpack_from("!HH", message)
    if flags & _QR:
        return None
    echoed = flags & (_OPCODE | _RD | _CD)
    return _HEADER.pack(ident, _QR | _RA | echoed | (rcode & 0xF), 0, 0, 0, 0)


def brief(message: bytes, rcode: int) -> bytes | None:
    """Return an error for a message, whatever it is, with its question if it has one; None where no reply is due.

    The cheap reply of floods and the safe one of failures: it cannot raise.
    """
    query = read(message)
    if isinstance(query, Malformed):
        return bare(message, rcode)
    return _HEADER.pack(query.id, _QR | _RA | query.flags | rcode & 0xF, 1, 0, 0, 0) + query.question


def _pack(query: Query, answer: Answer, extra: int) -> bytes:
    edns = query.payload is not None
    flags = _QR | _RA | query.flags | extra | (answer.rcode & 0xF)
    header = _HEADER.pack(query.id, flags, 1, answer.address is not None, answer.negative, edns)
    buffer = DNSBuffer(header + query.question)
    buffer.offset = len(buffer.data)
    if answer.address is not None:
        owner = dnslib.DNSLabel(query.labels)
        buffer.names[owner.label] = (
            _HEADER.size
        )  # the owner is a pointer to the question, in its own spelling
        text = str(answer.address)
        kind, data = (A, dnslib.A(text)) if answer.address.version == 4 else (AAAA, dnslib.AAAA(text))
        dnslib.RR(owner, kind, ttl=answer.ttl, rdata=data).pack(buffer)
    if answer.negative:
        dnslib.RR(_ROOT, SOA, ttl=answer.ttl, rdata=_soa(answer.ttl)).pack(buffer)
    if edns:
        options = []
        if answer.error is not None:
            code, words = answer.error
            because = struct.pack("!H", code) + words.encode("ascii", "replace")[:_ERROR_TEXT]
            options.append(dnslib.EDNSOption(_EXTENDED_ERROR, because))
        dnslib.EDNS0(
            _ROOT,
            flags="do" if query.dnssec_ok else "",  # RFC 3225 §3: the bit is copied
            ext_rcode=answer.rcode >> 4,
            udp_len=PAYLOAD,
            opts=options,
        ).pack(buffer)
    return bytes(buffer.data)


def _soa(minimum: int) -> dnslib.SOA:
    """Return the SOA of a zone that holds everything: every name lies below the root, so one serves all."""
    return dnslib.SOA("egressd.internal", "hostmaster.egressd.internal", (1, 3600, 600, 86_400, minimum))


def type_name(qtype: int) -> str:
    """Return the mnemonic of a query type, `TYPE65400` for an unknown one (RFC 3597 §5)."""
    return _TYPES.get(qtype) or f"TYPE{qtype}"


def spell(labels: tuple[bytes, ...]) -> str:
    """Return a name in the presentation form of RFC 1035 §5.1: what is not plain printable ASCII escaped."""
    return ".".join(_ESCAPED.sub(_escape, label).decode("ascii") for label in labels) or "."


def _escape(match: re.Match[bytes]) -> bytes:
    byte = match[0]
    return b"\\" + byte if byte in b".\\" else b"\\%03d" % byte[0]
