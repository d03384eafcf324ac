"""From the effective policy to the form in which attempts are judged: hosts in dictionaries, patterns parsed,
days as seconds.

The theory. Entries become *rules*. A rule is filed under each of its hosts (the name itself, or the suffix
below which it holds), or under its networks. To find the rules of a name takes one look-up for the name and
one for each of its suffixes, however many rules there are; what comes back is a list of *levels*, the most
specific first: exact name, then wildcards from the longest to the shortest, then `public_web`. For a literal
address the levels are networks from the longest prefix to the shortest. Inside a level, rules stand in file
order, the organisation's first.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network

from egressd.policy.addresses import Network, classify
from egressd.policy.attempt import Address, Name
from egressd.policy.effective import EffectiveEntry, EffectivePolicy
from egressd.policy.grants import Held
from egressd.policy.names import BadHost, parse_pattern
from egressd.policy.paths import BadPattern
from egressd.policy.requests import DEFAULT_REQUESTS, RequestPattern, parse_request_pattern

type Level = tuple[Rule, ...]

STEP = 256
"""Hosts that are filed in one step."""
DEFAULT_PORTS = {"https": 443, "http": 80}
_EVERY_SCHEME = frozenset({"https", "http", "tcp"})
_EPOCH = dt.date(1970, 1, 1).toordinal()
_READING = frozenset({"GET", "HEAD"})

# Special-use names (RFC 6761 and its kin) and the suffixes that private networks took for themselves: never
# on the public web.
_PRIVATE_SUFFIXES = frozenset(
    {"alt", "arpa", "example", "i2p", "internal", "invalid", "local", "localhost", "onion", "test"}
) | frozenset(
    {"corp", "domain", "home", "host", "intranet", "lan", "localdomain", "mail", "private", "workgroup"}
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry, compiled.

    `order` is its place in the file. `schemes` and `ports` are what it covers, None being every port.
    `patterns` is empty for a deny of everything and for what is not inspected. `end` is the Unix second from
    which it is absent, `observe_end` that until which it only observes, 0 where it is enforced.
    """

    entry: EffectiveEntry
    order: int
    schemes: frozenset[str]
    ports: frozenset[int] | None
    patterns: tuple[RequestPattern, ...]
    end: float
    observe_end: float = 0.0

    @property
    def is_deny(self) -> bool:
        """Whether the rule denies."""
        return self.entry.effect == "deny"

    @property
    def is_opaque(self) -> bool:
        """Whether what the rule allows is carried without being read: a tunnel or a relay."""
        return self.entry.treatment != "inspect"

    @property
    def denies_everything(self) -> bool:
        """Whether the rule denies its hosts as a whole, on every scheme and port."""
        return self.is_deny and not self.patterns and self.ports is None and self.schemes == _EVERY_SCHEME

    @property
    def looks_at_paths(self) -> bool:
        """Whether the rule has any path but `/**`, so that targets on its host must be canonical."""
        return any(not pattern.path.is_everything for pattern in self.patterns)

    @property
    def is_trial(self) -> bool:
        """Whether the rule permits while it observes, and nothing otherwise."""
        return self.entry.mode == "observe" and not self.is_deny

    def observes(self, now: float) -> bool:
        """Say whether the rule only observes at this time."""
        return now < self.observe_end

    def is_live(self, now: float) -> bool:
        """Say whether the rule is there; were `now` no number, denials would be and nothing else."""
        if self.is_trial and not self.observes(now):
            return False
        return not now >= self.end if self.is_deny else now < self.end

    def covers(self, scheme: str, port: int) -> bool:
        """Say whether the rule speaks of this scheme on this port.

        Where a rule has both schemes, their own ports stay with them: no cleartext on 443, no TLS on 80.
        """
        if scheme not in self.schemes or (self.ports is not None and port not in self.ports):
            return False
        if self.is_deny or len(self.schemes) == 1 or self.is_opaque:
            return True
        return not any(port == own and scheme != other for other, own in DEFAULT_PORTS.items())

    def lanes(self) -> Iterator[tuple[str, int]]:
        """Give each scheme and port that an allow or ask covers."""
        for port in sorted(self.ports or ()):
            yield from ((scheme, port) for scheme in sorted(self.schemes) if self.covers(scheme, port))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class CompiledPolicy:
    """A policy ready to judge; made by `compile_policy` only, swapped whole, never changed.

    `has_observers` says whether any rule observes by itself. `grants` are a sandbox's own approvals by host
    (`grants.granted`); they are no part of the policy and not in its digest.
    """

    effective: EffectivePolicy
    digest: str
    observe_end: float
    registrable: Callable[[Name], bool]
    exact: dict[str, Level]
    below: dict[str, Level]
    web: Level
    networks: tuple[tuple[int, int, dict[int, Level]], ...]
    has_observers: bool = False
    grants: Mapping[str, tuple[Held, ...]] = field(default_factory=dict)

    @property
    def profile(self) -> str:
        """The profile's name."""
        return self.effective.profile

    @property
    def mode(self) -> str:
        """`enforce` or `observe`."""
        return self.effective.mode

    def observes(self, now: float) -> bool:
        """Say whether a default deny is only noted at this time."""
        return self.effective.mode == "observe" and now < self.observe_end

    def next_change(self, now: float) -> float:
        """Return the Unix second at which something of the policy next expires, infinity when nothing will."""
        ends = [
            self.observe_end,
            *(end_of(entry.expires) for entry in self.effective.entries if entry.expires),
            *(end_of(entry.observe_until) for entry in self.effective.entries if entry.observe_until),
            *(held.grant.ends for shelf in self.grants.values() for held in shelf),
        ]
        return min((end for end in ends if end > now), default=math.inf)

    def levels_of_name(self, name: Name) -> list[Level]:
        """Return the rules that speak of `name`, by level; expired ones are still among them."""
        text = ".".join(name)
        levels = [level] if (level := self.exact.get(text)) else []
        if self.below:
            dot = text.find(".")
            while dot >= 0:
                if found := self.below.get(text[dot + 1 :]):
                    levels.append(found)
                dot = text.find(".", dot + 1)
        if self.web and self.registrable(name):
            levels.append(self.web)
        return levels

    def levels_of_address(self, address: Address) -> list[Level]:
        """Return the rules whose networks, standing alone, hold `address`, by level."""
        value, bits = int(address), address.max_prefixlen
        return [
            level
            for version, length, found in self.networks
            if version == address.version and (level := found.get(value >> (bits - length)))
        ]


def looks_registrable(name: Name) -> bool:
    """Say whether a name could be registered by anybody: two labels or more under a top-level domain that is
    no special-use one.

    What `compile_policy` takes when no list of public suffixes is handed in; `rulefiles` has one.
    """
    top = name[-1] if name else ""
    return len(name) >= 2 and top not in _PRIVATE_SUFFIXES and (top.isalpha() or top.startswith("xn--"))


def compile_policy(
    effective: EffectivePolicy, registrable: Callable[[Name], bool] = looks_registrable
) -> CompiledPolicy:
    """Return the policy in the form that `decide` takes; ValueError, with the entry's place, on what
    `rulefiles` should have refused.

    `registrable` says which names `public_web` may cover; it must be pure and total.
    """
    steps = compile_steps(effective, registrable)
    while True:
        try:
            next(steps)
        except StopIteration as done:
            compiled: CompiledPolicy = done.value
            return compiled


def compile_steps(
    effective: EffectivePolicy, registrable: Callable[[Name], bool] = looks_registrable
) -> Generator[None, None, CompiledPolicy]:
    """Do the same a little at a time, at most `STEP` hosts: for who has others waiting meanwhile."""
    if effective.mode == "observe" and effective.observe_until is None:
        raise ValueError("a profile that only observes needs the day on which it ends")
    exact: dict[str, Level] = {}
    below: dict[str, Level] = {}
    web: Level = ()
    networks: dict[tuple[int, int], dict[int, Level]] = {}
    parsed: dict[str, RequestPattern] = {}
    ordered = sorted(effective.entries, key=lambda entry: entry.origin != "organisation")
    for order, entry in enumerate(ordered):
        rule = _rule(entry, order, parsed)
        alone = (rule,)
        for start in range(0, max(len(entry.hosts), 1), STEP):
            for host in entry.hosts[start : start + STEP]:
                _file(host, rule, alone, exact, below)
            yield
        if entry.public_web:
            web += alone
        if not entry.hosts and not entry.public_web:
            for network in networks_of(entry.addresses):
                shelf = networks.setdefault((network.version, network.prefixlen), {})
                shift = network.max_prefixlen - network.prefixlen
                value = int(network.network_address) >> shift
                shelf[value] = shelf.get(value, ()) + alone
    by_length = sorted(networks.items(), key=lambda item: -item[0][1])
    return CompiledPolicy(
        effective=effective,
        digest=effective.digest(),
        observe_end=end_of(effective.observe_until),
        registrable=registrable,
        exact=exact,
        below=below,
        web=web,
        networks=tuple((version, length, found) for (version, length), found in by_length),
        has_observers=any(entry.mode == "observe" for entry in ordered),
    )


def _file(host: str, rule: Rule, alone: Level, exact: dict[str, Level], below: dict[str, Level]) -> None:
    """File a rule under one of its hosts, once."""
    pattern = parse_pattern(host)
    if isinstance(pattern, BadHost):
        raise ValueError(f"{rule.entry.place}: rule {rule.entry.id}: host '{host}': {pattern.detail}")
    filed, key = (below, host[2:]) if pattern.wildcard else (exact, host)
    found = filed.get(key)
    if found is None:
        filed[key] = alone
    elif found[-1] is not rule:
        filed[key] = found + alone


def end_of(day: dt.date | None) -> float:
    """Return the Unix second at which `day` is over in UTC; None is never over."""
    return math.inf if day is None else float((day.toordinal() - _EPOCH + 1) * 86400)


def networks_of(texts: Iterable[str]) -> tuple[Network, ...]:
    """Return the networks of an entry; ValueError for host bits, zones, odd spellings, and IPv4 in IPv6 clothes."""
    networks = tuple(ip_network(text) for text in texts)
    for text, network in zip(texts, networks, strict=True):
        if "%" in text:
            raise ValueError("a network has no zone")
        if str(network) != text:
            raise ValueError(f"the network is not in normal form; write '{network}'")
        if network.version == 6 and int(network.network_address) >> 32 == 0xFFFF:
            raise ValueError("an IPv4 network is written as IPv4")
    return networks


def _rule(entry: EffectiveEntry, order: int, parsed: dict[str, RequestPattern]) -> Rule:
    problem = _bad_destination(entry) or _bad_lane(entry) or _bad_terms(entry) or _bad_mode(entry)
    if problem is not None:
        raise ValueError(f"{entry.place}: rule {entry.id}: {problem}")
    texts = entry.requests
    if not texts and entry.effect != "deny" and entry.treatment == "inspect":
        texts = DEFAULT_REQUESTS
    patterns = tuple(_pattern(entry, text, parsed) for text in texts)
    if entry.public_web and any(
        pattern.websocket or pattern.methods is None or not pattern.methods <= _READING
        for pattern in patterns
    ):
        raise ValueError(f"{entry.place}: rule {entry.id}: public_web only reads: GET and HEAD")
    schemes, ports = _lanes(entry)
    observe_end = end_of(entry.observe_until) if entry.mode == "observe" else 0.0
    return Rule(entry, order, schemes, ports, patterns, end_of(entry.expires), observe_end)


def _pattern(entry: EffectiveEntry, text: str, parsed: dict[str, RequestPattern]) -> RequestPattern:
    pattern = parsed.get(text)
    if pattern is None:
        found = parse_request_pattern(text)
        if isinstance(found, BadPattern):
            raise ValueError(f"{entry.place}: rule {entry.id}: {found.detail}")
        pattern = parsed[text] = found
    return pattern


def _lanes(entry: EffectiveEntry) -> tuple[frozenset[str], frozenset[int] | None]:
    """Return schemes and ports of a rule; a relay carries bytes, whatever scheme they are.

    A deny is read wide: both schemes stand for every scheme, relays included, and no ports for every port. One that has exactly
    the defaults of an entry (https on 443) cannot be told from one that says nothing, and covers the whole host.
    """
    schemes, ports = frozenset[str](entry.schemes), frozenset(entry.ports)
    if entry.effect != "deny":
        return (_EVERY_SCHEME if entry.treatment == "relay" else schemes), ports
    if entry.schemes == ("https",) and entry.ports == (443,):
        return _EVERY_SCHEME, None
    return (_EVERY_SCHEME if len(schemes) > 1 else schemes), ports or None


def _bad_destination(entry: EffectiveEntry) -> str | None:
    if entry.public_web:
        if entry.hosts or entry.addresses:
            return "public_web stands alone, without hosts or addresses"
    elif not entry.hosts and not entry.addresses:
        return "it names no destination"
    try:
        networks = networks_of(entry.addresses)
    except ValueError as error:
        return f"addresses: {error}"
    if entry.effect == "deny":
        return "a deny names hosts or addresses, not both" if entry.hosts and entry.addresses else None
    for network in networks:
        ends = classify(network.network_address), classify(network.broadcast_address)
        if ends[0].kind == "floor" and ends[0] == ends[1]:
            return f"addresses: {network} lies in a range that no rule can allow ({ends[0].range})"
    return None


def _bad_lane(entry: EffectiveEntry) -> str | None:
    if not entry.schemes:
        return "it names no scheme"
    if not entry.ports and entry.effect != "deny":
        return "it names no port"
    if any(not 1 <= port <= 65535 for port in entry.ports):
        return "a port is a number from 1 to 65535"
    if entry.treatment == "tunnel" and "http" in entry.schemes and entry.effect != "deny":
        return "a tunnel is judged by its TLS hello, which http does not have"
    if entry.public_web and (entry.schemes != ("https",) or entry.treatment != "inspect"):
        return "public_web is inspected https only"
    return None


def _bad_terms(entry: EffectiveEntry) -> str | None:
    if entry.treatment != "inspect" and (entry.requests or entry.credential):
        return f"a {entry.treatment} is not read, so it has no requests and no credential"
    if entry.body and (entry.effect == "deny" or entry.treatment != "inspect" or not entry.requests):
        return "only an inspected allow or ask that names its requests looks at bodies"
    if entry.public_web and (entry.effect != "allow" or entry.credential):
        return "public_web is an allow without a credential"
    if entry.credential is not None:
        if entry.effect == "deny":
            return "a deny attaches no credential"
        if not entry.requests:
            return "a rule with a credential names its requests"
        if entry.schemes != ("https",):
            return "a credential travels over https only"
    return None


def _bad_mode(entry: EffectiveEntry) -> str | None:
    if entry.mode == "enforce":
        return None
    if entry.observe_until is None:
        return "a rule that only observes needs the day on which that ends"
    if entry.effect == "ask":
        return "an ask does not observe"
    if entry.effect == "deny" and not entry.hosts:
        return "a deny of addresses holds where names resolve to, too late to only observe"
    if entry.credential is not None:
        return "a rule that only observes attaches no credential"
    return None
