"""The packet rules of a sandbox's own network namespace, as text. Pure: nothing is run here.

The namespace has `lo` and nothing else, and a local default route makes every address deliverable on it. These rules
only choose which socket a packet meets. Were they flushed, the sandbox would be cut off, not let out.

iptables-restore is atomic per table, so `filter` comes first: between the two commits nothing is redirected and
everything is dropped.
"""

import shlex
from typing import Final, Literal

Family = Literal[4, 6]

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
_ICMP: Final[dict[Family, str]] = {4: "icmp", 6: "ipv6-icmp"}
_PROHIBITED: Final[dict[Family, str]] = {4: "icmp-admin-prohibited", 6: "icmp6-adm-prohibited"}


def namespace_ruleset(
    family: Family,
    *,
    transparent_port: int = TRANSPARENT_PORT,
    dns_port: int = DNS_PORT,
    nflog_group: int = NFLOG_GROUP,
) -> str:
    """iptables-restore (4) or ip6tables-restore (6) text for the tables filter and nat, in that order.

    The explicit proxy needs no rule: it listens on loopback, which the sandbox may reach.
    """
    loopback = _LOOPBACK[family]
    return "\n".join(
        [
            "*filter",
            ":INPUT DROP [0:0]",
            ":FORWARD DROP [0:0]",
            ":OUTPUT DROP [0:0]",
            "-A INPUT -i lo -j ACCEPT",
            f"-A OUTPUT -d {loopback} -o lo -j ACCEPT",
            # Replies of redirected flows still carry the listener's own address here. REPLY, not ESTABLISHED: a flow
            # that was never redirected earns nothing by having been seen once.
            "-A OUTPUT -m conntrack --ctstate DNAT --ctdir REPLY -j ACCEPT",
            f"-A OUTPUT -p {_ICMP[family]} -m conntrack --ctstate RELATED -j ACCEPT",
            f"-A OUTPUT -j NFLOG --nflog-prefix {NFLOG_PREFIX} --nflog-group {nflog_group}",
            "-A OUTPUT -p tcp -j REJECT --reject-with tcp-reset",
            f"-A OUTPUT -j REJECT --reject-with {_PROHIBITED[family]}",
            "COMMIT",
            "*nat",
            ":PREROUTING ACCEPT [0:0]",
            ":INPUT ACCEPT [0:0]",
            ":OUTPUT ACCEPT [0:0]",
            ":POSTROUTING ACCEPT [0:0]",
            # Before loopback returns: a query to 127.0.0.53 or to a resolver on ::1 is a query all the same.
            f"-A OUTPUT -p udp -m udp --dport 53 -j REDIRECT --to-ports {dns_port}",
            f"-A OUTPUT -p tcp -m tcp --dport 53 -j REDIRECT --to-ports {dns_port}",
            f"-A OUTPUT -d {loopback} -j RETURN",
            f"-A OUTPUT -p tcp -j REDIRECT --to-ports {transparent_port}",
            "COMMIT",
            "",
        ]
    )


def missing_rules(expected: str, saved: str) -> list[str]:
    """How the rules in force differ from the rules wanted; an empty list means that they mean the same.

    `saved` is what iptables-save printed. Tolerant of option order, counters, quoting, comments and implied matches;
    strict on tables, policies, the order of rules, and anything that is there but should not be.
    """
    want, have = _parse(expected), _parse(saved)
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


def drop_counters(saved: dict[Family, str]) -> dict[Family, int]:
    """Packets that reached the NFLOG rule, per family, from `iptables-save -c` texts; -1 where the rule is gone."""
    return {family: _nflog_packets(text) for family, text in saved.items()}


def _nflog_packets(saved: str) -> int:
    for line in saved.splitlines():
        counter, _, rule = line.partition("] ")
        if " -j NFLOG " in f" {rule} " and counter.startswith("["):
            packets = counter[1:].partition(":")[0]
            if packets.isascii() and packets.isdigit():
                return int(packets)
    return -1


class _Table:
    def __init__(self) -> None:
        self.policies: dict[str, str] = {}
        self.rules: dict[str, list[str]] = {}


def _parse(text: str) -> dict[str, _Table]:
    tables: dict[str, _Table] = {}
    table = _Table()
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith("*"):
            table = tables.setdefault(line[1:].strip(), _Table())
        elif line.startswith(":"):
            chain, _, rest = line[1:].partition(" ")
            table.policies[chain] = rest.split(" ")[0]
            table.rules.setdefault(chain, [])
        elif line.startswith(("-A ", "[")):
            rule = line.partition("] ")[2] if line.startswith("[") else line
            words = shlex.split(rule)
            if words[:1] == ["-A"] and len(words) > 1:
                table.rules.setdefault(words[1], []).append(_normal(words[2:]))
    return tables


def _compare(table: str, want: _Table, have: _Table) -> list[str]:
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
