"""The gatekeeper's judgement: query bytes → what is answered and what is written down. Pure.

| asked | allowed name | denied name |
|---|---|---|
| A | its synthetic address, TTL 60 | `explain`: 198.18.0.2, TTL 1; `nxdomain`: NXDOMAIN |
| AAAA | NODATA: no synthetic IPv6 | `explain`: NODATA; `nxdomain`: NXDOMAIN |
| A, AAAA, `dns.answers: self` | egressd's own address, TTL 60 | `explain`: the same, TTL 1; `nxdomain`: NXDOMAIN |
| ANY and other meta types | NOTIMP; zone transfers REFUSED | the same |
| any other type | NODATA, `dns_type` | as AAAA; PTR is NXDOMAIN |

Names that are never answered (floor, single labels, reverse, unparsable) get NXDOMAIN in both modes. egressd's own name is
answered like an allowed one, with an address that is always the same. A name that needs an approval is answered like an
allowed one too: what is asked of it has to arrive, so that a person can be asked for it.
egressd's own address is answered in the families that it has; the other is NODATA.
Nothing here leads to a query upstream: an answer needs no more than the policy and the map of names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Address
from typing import Literal

from egressd.gate import internal
from egressd.gate.dns import message as wire
from egressd.gate.dns.message import Answer, Malformed, Query
from egressd.gate.dns.synthetic import SyntheticNames
from egressd.policy.addresses import is_floor_name
from egressd.policy.attempt import DENIED, Address, Decision, Name
from egressd.policy.names import BadHost, format_name, parse_name
from egressd.policy.reasons import WORDS, Reason

EXPLAIN = IPv4Address("198.18.0.2")
"""Where every denied name leads in `explain` mode; the door says there why."""

ALLOWED_TTL = 60
"""Seconds an address may be remembered. Any time would be safe: an address never changes its name, and each
connection is judged anew. Short enough that a connection's `root_id` names a recent query, long enough to
spare one query per connection."""

DENIED_TTL = 1
"""Seconds a denial may be remembered: a rule that comes to allow the name works at once."""

_EXPLAINING: tuple[Address, ...] = (EXPLAIN,)
_VERSIONS = {wire.A: 4, wire.AAAA: 6}
_TRANSFERS = frozenset({251, 252})  # IXFR, AXFR
_META = range(128, 256)  # RFC 6895 §3.1: QTYPEs and meta-TYPEs; ANY is 255
_FLOOR = frozenset(reason for reason in Reason if reason.value.startswith("floor_"))

type Judge = Callable[[Name], Decision]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with one message, and what its record says.

    `kind`: `answer` sends `answer` to `query` (or `raw` where there is no query to answer), `reserve` first
    needs a stored synthetic address for `name` (`with_address`), `drop` sends nothing. `host_raw` is the
    name as sent where that differs from `name`, escaped; `outcome` is what the client sees, in one word, or
    what is wrong with the message.
    """

    kind: Literal["answer", "reserve", "drop"]
    outcome: str
    decision: Decision = DENIED
    query: Query | None = None
    answer: Answer | None = None
    raw: bytes | None = None
    name: Name | None = None
    host_raw: str | None = None
    qtype: str | None = None

    def pack(self, *, udp: bool) -> bytes | None:
        """Return the reply's bytes, None where none is sent; over UDP at most what the client can take."""
        if self.query is None or self.answer is None:
            return self.raw
        return wire.pack(self.query, self.answer, self.query.udp_limit if udp else wire.TCP_LIMIT)

    def with_address(self, address: Address) -> Plan:
        """Return the plan of a name whose synthetic address is now stored, or that leads to our own."""
        return replace(self, kind="answer", answer=Answer(address=address, ttl=ALLOWED_TTL))

    def refused(self, rcode: int, reason: Reason) -> Plan:
        """Return the plan of the same query denied for another reason, with an error instead of an answer."""
        return replace(_error(self, Decision("deny", reason), rcode), kind="answer")


_WORDS = {
    wire.NOERROR: "nodata",
    wire.SERVFAIL: "servfail",
    wire.NXDOMAIN: "nxdomain",
    wire.NOTIMP: "notimp",
    wire.REFUSED: "refused",
    wire.BADVERS: "badvers",
}


type Mode = Literal["explain", "nxdomain"]


def plan(
    message: bytes, judge: Judge, names: SyntheticNames, mode: Mode, own: Sequence[Address] | None = None
) -> Plan:
    """Return what to do with one message; total but for what `judge` raises; `names` is only read.

    `own` are egressd's addresses, where every name leads (`dns.answers: self`); None gives each name one of its own.
    """
    query = wire.read(message)
    if isinstance(query, Malformed):
        kind: Literal["answer", "drop"] = "drop" if query.reply is None else "answer"
        return Plan(kind, query.detail, Decision("deny", query.reason), raw=query.reply)
    spelling = wire.spell(query.labels)
    base = Plan("answer", "", query=query, host_raw=spelling, qtype=wire.type_name(query.qtype))
    if query.version != 0:
        return _error(base, Decision("deny", Reason.BAD_DNS), wire.BADVERS)
    if query.qclass != wire.IN:
        return _error(base, Decision("deny", Reason.DNS_CLASS), wire.REFUSED)
    name = _name(query.labels)
    if isinstance(name, BadHost):
        return _error(base, Decision("deny", name.reason), wire.NXDOMAIN)
    base = replace(base, name=name, host_raw=None if format_name(name) == spelling else spelling)
    # A name that a person may yet allow leads where it can be asked for: every connection there is judged anew.
    # The floor comes before anything a rule says; our own name lies on it for rules, and is for the judge to know.
    floor = is_floor_name(name) if name != internal.NAME else None
    decision = judge(name) if floor is None else Decision("deny", floor)
    if decision.verdict == "deny":
        return _denied(base, query.qtype, decision, mode, _EXPLAINING if own is None else own)
    if own is not None and query.qtype in _VERSIONS:
        return _led_here(replace(base, decision=decision), _of_type(query.qtype, own))
    return _allowed(base, name, query.qtype, decision, names)


def _of_type(qtype: int, addresses: Sequence[Address]) -> Address | None:
    """Return the first address that a query of this type can be answered with."""
    return next((address for address in addresses if address.version == _VERSIONS.get(qtype)), None)


def _led_here(base: Plan, address: Address | None) -> Plan:
    """Return the plan of an allowed name that leads to our own address, or has none of this family."""
    if address is None:
        return replace(base, outcome="nodata", answer=Answer(ttl=ALLOWED_TTL, negative=True))
    return replace(base, outcome="own address").with_address(address)


def _name(labels: tuple[bytes, ...]) -> Name | BadHost:
    """Return the labels as a name. A dot inside a label must not become a border between two (law 2)."""
    if any(b"." in label for label in labels):
        return BadHost(Reason.BAD_HOST, "a label holds a dot")
    return parse_name(b".".join(labels))


def _allowed(base: Plan, name: Name, qtype: int, decision: Decision, names: SyntheticNames) -> Plan:
    if qtype == wire.A:
        address = names.address_of(name) if name != internal.NAME else internal.ADDRESS
        pending = replace(base, kind="reserve", outcome="address", decision=decision)
        return pending if address is None else pending.with_address(address)
    if qtype == wire.AAAA:
        return replace(
            base, outcome="nodata", decision=decision, answer=Answer(ttl=ALLOWED_TTL, negative=True)
        )
    unanswered = Decision("deny", Reason.DNS_TYPE)
    if qtype in _META:
        return _error(base, unanswered, wire.REFUSED if qtype in _TRANSFERS else wire.NOTIMP)
    return replace(base, outcome="nodata", decision=unanswered, answer=Answer(ttl=ALLOWED_TTL, negative=True))


def _denied(base: Plan, qtype: int, decision: Decision, mode: Mode, where: Sequence[Address]) -> Plan:
    if qtype in _META:
        return _error(base, decision, wire.REFUSED if qtype in _TRANSFERS else wire.NOTIMP)
    if decision.reason in _FLOOR or qtype == wire.PTR or mode == "nxdomain":
        return _error(base, decision, wire.NXDOMAIN)
    address = _of_type(qtype, where)
    if address is None:
        return _error(base, decision, wire.NOERROR)
    answer = Answer(address=address, ttl=DENIED_TTL, error=_explained(decision, wire.FORGED))
    return replace(base, outcome=Reason.EXPLAINED.value, decision=decision, answer=answer)


def _error(base: Plan, decision: Decision, rcode: int) -> Plan:
    negative = rcode in (wire.NOERROR, wire.NXDOMAIN)
    answer = Answer(rcode, ttl=DENIED_TTL, negative=negative, error=_explained(decision, wire.BLOCKED))
    return replace(base, outcome=_WORDS[rcode], decision=decision, answer=answer)


def _explained(decision: Decision, code: int) -> tuple[int, str]:
    """The Extended DNS Error of a decision: the reason code and its words (law 10: no address, no secret)."""
    return code, f"egressd {decision.reason.value}: {WORDS[decision.reason].says}"
