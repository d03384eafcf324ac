"""The comparison: what the rules say must come of a move, what came of it, and whether the books balance. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from egressd.lab.demo.performer import Outcome
from egressd.lab.demo.stage import Left
from egressd.lab.demo.tally import Sent

type Fields = Mapping[str, Any]
"""Fields of a record; as a wish, a field that is None must be absent."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """What must come of a move: whether it succeeds, and the fields of each record that must be found."""

    allowed: bool
    records: tuple[Fields, ...]


@dataclass(frozen=True, slots=True)
class Account:
    """One kind of attempt: how many were sent, by whose count, and how many records there are."""

    kind: str
    sent: int
    recorded: int
    by: str


def fits(wanted: Fields, record: Fields) -> bool:
    """Whether a record has every wanted field."""
    return all(record.get(name) == value for name, value in wanted.items())


def missing(expectation: Expectation, records: Sequence[Fields]) -> list[Fields]:
    """Returns the wanted records that are not there."""
    return [wanted for wanted in expectation.records if not any(fits(wanted, record) for record in records)]


def surprises(
    expectation: Expectation, inside: Outcome, outside: Outcome | None, records: Sequence[Fields]
) -> list[str]:
    """Returns what is not as the rules say, in words; `records` are those that the move left, `outside` is the same move
    without egressd where it was made there.
    """
    found = []
    if inside.ok != expectation.allowed:
        found.append("it succeeded" if inside.ok else f"it failed: {inside.saw}")
    found += [f"there is no record of {in_words(wanted)}" for wanted in missing(expectation, records)]
    if expectation.allowed:
        denied = [
            record for record in records if record["event"] == "decision" and record["verdict"] != "allow"
        ]
        found += [f"there is a record of {in_words(record)}" for record in denied]
    elif outside is None or not outside.ok:
        found.append(f"without egressd it fails too: {outside.saw if outside else 'it was not made'}")
    return found


def in_words(record: Fields) -> str:
    """Returns a record, or a wish for one, in one line."""
    names = ("layer", "verdict", "reason", "rule", "place", "method", "host", "path", "qtype", "protocol")
    return " ".join(str(record[name]) for name in names if record.get(name) is not None)


def accounts(sent: Sent, outcomes: Iterable[Outcome], attempts: Sequence[Fields]) -> list[Account]:
    """Returns the accounts of all kinds of attempts; `attempts` are the decision records of the sandbox's whole life."""
    made = list(outcomes)
    captured = "packet capture on the sandbox's loopback"
    return [
        Account("DNS queries over UDP", sent.dns_udp, _recorded(attempts, "dns", "dns-udp"), captured),
        Account("DNS queries over TCP", sent.dns_tcp, _recorded(attempts, "dns", "dns-tcp"), captured),
        Account("TCP connections", sent.connections, _recorded(attempts, "connection"), captured),
        Account(
            "HTTP requests",
            # What TLS hides from a capture only the clients can tell; each of them is asked for its own trace.
            sum(outcome.requests for outcome in made),
            _recorded(attempts, "request"),
            "the clients' own traces",
        ),
        Account(
            "other packets",
            sum(outcome.packets for outcome in made),
            _recorded(attempts, "packet"),
            "the senders",
        ),
        Account(
            "refusals of packets",
            sent.refused_packets,
            _recorded(attempts, "packet"),
            "ICMP errors on the sandbox's loopback",
        ),
    ]


def imbalances(accounts: Iterable[Account], sent: Sent, lost: Sequence[Fields]) -> list[str]:
    """Returns where the books do not balance, in words; `lost` are the journal's `lost` records."""
    found = [
        f"{account.sent} {account.kind} were sent and {account.recorded} recorded"
        for account in accounts
        if account.sent != account.recorded
    ]
    if sent.missed:
        found.append(f"the capture in the sandbox missed {sent.missed} packets, so its counts prove nothing")
    return found + [f"the journal says that {record.get('count')} records were lost" for record in lost]


def leaks(left: Left, needed: Iterable[str]) -> list[str]:
    """Returns what left though no allowed connection needed it, in words."""
    found = []
    if left.attacker:
        found.append(f"{left.attacker} packets reached the attacker")
    if left.metadata:
        found.append(f"{left.metadata} packets reached a metadata endpoint")
    found += [f"DNS was asked for {name}" for name in sorted(set(left.queries) - set(needed))]
    found += [f"packets went to {address}" for address in left.strangers]
    if left.lost:
        found.append(f"the capture outside missed {left.lost} packets, so it proves nothing")
    return found


def _recorded(attempts: Sequence[Fields], layer: str, channel: str | None = None) -> int:
    return sum(
        record.get("count", 1)
        for record in attempts
        if record.get("layer") == layer and channel in {None, record.get("channel")}
    )
