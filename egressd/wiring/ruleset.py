"""The packet rules of a sandbox's own network namespace, as text. Pure: nothing is run here.

The namespace has `lo` and nothing else, and a local default route makes every address deliverable on it. These rules
only choose which socket a packet meets. Were they flushed, the sandbox would be cut off, not let out.

iptables-restore is atomic per table, so `filter` comes first: between the two commits nothing is redirected and
everything is dropped.

No dataclasses: they import the compiler's tools, a third of the time that a sandbox's maker takes to start.
"""

import functools
import shlex
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

Family = Literal[4, 6]
Kind = Literal["connections", "dns_connections", "dns_datagrams", "packets"]
"""What a rule's own packet counter counts: see Counted."""

TRANSPARENT_PORT: Final = 15001
DNS_PORT: Final = 15053
EXPLICIT_PORT: Final = 3128
NFLOG_GROUP: Final = 1
NFLOG_PREFIX: Final = "egressd"

RESOLVER: Final = "198.18.0.1"
EXPLAIN: Final = "198.18.0.2"
OWN_ADDRESSES: Final[dict[Family, str]] = {4: "198.18.0.254", 6: "2001:2::fe"}
"""One fixed address per family on `lo`: without one, AI_ADDRCONFIG (RFC 3493 section 6.1) finds no network and libc
asks for no address at all. Both lie in the benchmarking blocks (RFC 2544, RFC 5180), which no rule may name."""

_LOOPBACK: Final[dict[Family, str]] = {4: "127.0.0.0/8", 6: "::1"}
_LISTENERS: Final[dict[Family, str]] = {4: "127.0.0.1", 6: "::1"}
"""Where egressd listens in the sandbox: not all of 127/8, of which the rest is the sandbox's own."""
_ICMP: Final[dict[Family, str]] = {4: "icmp", 6: "ipv6-icmp"}
_PROHIBITED: Final[dict[Family, str]] = {4: "icmp-admin-prohibited", 6: "icmp6-adm-prohibited"}


class Counted(NamedTuple):
    """What the kernel counted at the rules since they were made, both families: the attempts that no process can forget.

    `connections` are TCP connections to the transparent and the explicit listener, `dns_connections` those to the resolver's;
    each counts once, however often its first packet was sent, since NAT is decided once for a connection. `dns_datagrams` were
    sent to the resolver (one that the sender has the kernel cut into several, UDP_SEGMENT in udp(7), is counted once).
    `packets` were refused.
    """

    connections: int = 0
    dns_connections: int = 0
    dns_datagrams: int = 0
    packets: int = 0


class _Rule(NamedTuple):
    """A rule of the chain OUTPUT, and what its packet counter counts, if anything that matters."""

    text: str
    counts: Kind | None = None


def _filter_rules(family: Family, dns_port: int, nflog_group: int) -> list[_Rule]:
    return [
        # Here, not where it was redirected: NAT sees the first datagram of a socket only.
        _Rule(f"-d {_LISTENERS[family]} -o lo -p udp -m udp --dport {dns_port} -j ACCEPT", "dns_datagrams"),
        _Rule(f"-d {_LOOPBACK[family]} -o lo -j ACCEPT"),
        # Replies of redirected flows still carry the listener's own address here. REPLY, not ESTABLISHED: a flow
        # that was never redirected earns nothing by having been seen once.
        _Rule("-m conntrack --ctstate DNAT --ctdir REPLY -j ACCEPT"),
        _Rule(f"-p {_ICMP[family]} -m conntrack --ctstate RELATED -j ACCEPT"),
        _Rule(f"-j NFLOG --nflog-prefix {NFLOG_PREFIX} --nflog-group {nflog_group}", "packets"),
        _Rule("-p tcp -j REJECT --reject-with tcp-reset"),
        _Rule(f"-j REJECT --reject-with {_PROHIBITED[family]}"),
    ]


def _nat_rules(family: Family, transparent_port: int, dns_port: int) -> list[_Rule]:
    direct: list[tuple[int, Kind]] = [(dns_port, "dns_connections"), (transparent_port, "connections")]
    if family == 4:
        direct.append((EXPLICIT_PORT, "connections"))
    return [
        # Before loopback returns: a query to 127.0.0.53 or to a resolver on ::1 is a query all the same.
        _Rule(f"-p udp -m udp --dport 53 -j REDIRECT --to-ports {dns_port}"),
        _Rule(f"-p tcp -m tcp --dport 53 -j REDIRECT --to-ports {dns_port}", "dns_connections"),
        # As the next rule, but counted by themselves: connections straight to a listener.
        *(
            _Rule(f"-d {_LISTENERS[family]} -p tcp -m tcp --dport {port} -j RETURN", counts)
            for port, counts in direct
        ),
        _Rule(f"-d {_LOOPBACK[family]} -j RETURN"),
        _Rule(f"-p tcp -j REDIRECT --to-ports {transparent_port}", "connections"),
    ]


def namespace_ruleset(
    family: Family,
    *,
    transparent_port: int = TRANSPARENT_PORT,
    dns_port: int = DNS_PORT,
    nflog_group: int = NFLOG_GROUP,
) -> str:
    """iptables-restore (4) or ip6tables-restore (6) text for the tables filter and nat, in that order.

    The explicit proxy needs no rule to be reached: it listens on loopback.
    """
    return "\n".join(
        [
            "*filter",
            ":INPUT DROP [0:0]",
            ":FORWARD DROP [0:0]",
            ":OUTPUT DROP [0:0]",
            "-A INPUT -i lo -j ACCEPT",
            *(f"-A OUTPUT {rule.text}" for rule in _filter_rules(family, dns_port, nflog_group)),
            "COMMIT",
            "*nat",
            ":PREROUTING ACCEPT [0:0]",
            ":INPUT ACCEPT [0:0]",
            ":OUTPUT ACCEPT [0:0]",
            ":POSTROUTING ACCEPT [0:0]",
            *(f"-A OUTPUT {rule.text}" for rule in _nat_rules(family, transparent_port, dns_port)),
            "COMMIT",
            "",
        ]
    )


def missing_rules(expected: str, saved: str) -> list[str]:
    """How the rules in force differ from the rules wanted; an empty list means that they mean the same.

    `saved` is what iptables-save printed. Tolerant of option order, counters, quoting, comments and implied matches;
    strict on tables, policies, the order of rules, and anything that is there but should not be.
    """
    want, have = parse_tables(expected), parse_tables(saved)
    problems: list[str] = []
    for table in want:
        if table not in have:
            problems.append(f"*{table}: table missing")
            continue
        problems += _compare(table, want[table], have[table])
    for table in have.keys() - want.keys():
        # raw, mangle or security rules act before ours and could exempt traffic from them.
        problems += [
            f"*{table} {chain}: unexpected rules" for chain, rules in have[table].rules.items() if rules
        ]
    return problems


def counted(
    saved: Mapping[Family, str],
    *,
    transparent_port: int = TRANSPARENT_PORT,
    dns_port: int = DNS_PORT,
    nflog_group: int = NFLOG_GROUP,
) -> Counted | None:
    """What the rules counted, from `iptables-save -c` texts by family; None where a rule that counts is gone."""
    totals: dict[Kind, int] = {}
    for family, text in saved.items():
        counters = packets(text, "OUTPUT")
        rules = {
            "filter": _filter_rules(family, dns_port, nflog_group),
            "nat": _nat_rules(family, transparent_port, dns_port),
        }
        for table in rules:
            for rule in rules[table]:
                if rule.counts is None:
                    continue
                found = counters.get((table, meaning(rule.text)))
                if found is None:
                    return None
                totals[rule.counts] = totals.get(rule.counts, 0) + found
    return Counted(**totals)


def packets(saved: str, chain: str) -> dict[tuple[str, str], int]:
    """The packet counters of a chain, by table and rule (as `meaning` spells it), in what `iptables-save -c` printed."""
    found: dict[tuple[str, str], int] = {}
    table = ""
    for line in saved.splitlines():
        if line.startswith("*"):
            table = line[1:].strip()
        counters, _, rule = line.partition(f"] -A {chain} ")
        number = counters[1:].partition(":")[0]
        if rule and counters.startswith("[") and number.isascii() and number.isdigit():
            found[table, meaning(rule)] = int(number)
    return found


class Table:
    """One table as it was printed: policies ("-" for a chain of somebody's own) and rules, in one spelling, by chain."""

    def __init__(self) -> None:
        self.policies: dict[str, str] = {}
        self.rules: dict[str, list[str]] = {}


def parse_tables(text: str) -> dict[str, Table]:
    """The tables of an iptables-save text, or of a ruleset of ours; lines that are neither chain nor rule are skipped."""
    tables: dict[str, Table] = {}
    table = Table()
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("*"):
            table = tables.setdefault(line[1:].strip(), Table())
        elif line.startswith(":"):
            chain, _, rest = line[1:].partition(" ")
            table.policies[chain] = rest.split(" ")[0]
            table.rules.setdefault(chain, [])
        elif line.startswith(("-A ", "[")):
            rule = line.partition("] ")[2] if line.startswith("[") else line
            if rule.startswith("-A "):
                chain, _, rest = rule[3:].partition(" ")
                table.rules.setdefault(chain, []).append(meaning(rest))
    return tables


@functools.lru_cache(maxsize=8192)  # a host's rules are read again and again, and hardly ever differ
def meaning(rule: str) -> str:
    """A rule without its chain in the spelling that `parse_tables` gives it, for comparison alone."""
    return _normal(_words(rule))


def _words(rule: str) -> list[str]:
    try:
        return shlex.split(rule)
    except ValueError:  # a comment of somebody else's with a single quote
        return rule.split()


def _compare(table: str, want: Table, have: Table) -> list[str]:
    problems = [
        f"*{table} {chain}: policy is {have.policies.get(chain, 'missing')}, not {policy}"
        for chain, policy in want.policies.items()
        if have.policies.get(chain) != policy
    ]
    problems += [
        f"*{table} {chain}: unexpected chain" for chain in have.policies.keys() - want.policies.keys()
    ]
    for chain, rules in want.rules.items():
        present = have.rules.get(chain, [])
        if present == rules:
            continue
        lost = [rule for rule in rules if rule not in present]
        foreign = [rule for rule in present if rule not in rules]
        problems += [f"*{table} {chain}: missing: {rule}" for rule in lost]
        problems += [f"*{table} {chain}: unexpected: {rule}" for rule in foreign]
        if not lost and not foreign:
            problems.append(f"*{table} {chain}: rules in another order or repeated")
    return problems


_ALIASES: Final = {"icmpv6": "ipv6-icmp", "58": "ipv6-icmp", "1": "icmp", "6": "tcp", "17": "udp"}
_ADDRESS_OPTIONS: Final = ("-d", "-s")


def _normal(words: list[str]) -> str:
    """One spelling per meaning: options sorted with their values, matches that a protocol implies left out."""
    options: list[list[str]] = []
    negate = False
    for word in words:
        if word == "!":
            negate = True
        elif word.startswith("-") and len(word) > 1 and not word[1].isdigit():
            options.append(["!" + word if negate else word])
            negate = False
        elif options:
            options[-1].append(word)
        else:
            options.append(["?", word])
    protocol = next((_ALIASES.get(o[1], o[1]) for o in options if o[0] == "-p" and len(o) > 1), "")
    kept = []
    for name, *values in options:
        if name == "-m" and values == [protocol]:
            continue
        if name.lstrip("!") == "-p":
            values = [_ALIASES.get(value, value) for value in values]
        elif name.lstrip("!") in _ADDRESS_OPTIONS:
            values = [
                value.removesuffix("/32") if "." in value else value.removesuffix("/128") for value in values
            ]
        elif name.lstrip("!") == "--ctstate":
            values = [",".join(sorted(value.split(","))) for value in values]
        kept.append(" ".join([name, *values]))
    return " ".join(sorted(kept))
