"""Probes of the network: addresses, protocols and resolvers that lead past egressd."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from egressd.verify import wire
from egressd.verify.probe import Outcome, held, judged, listed, opened, probe, untried
from egressd.verify.scene import Scene

_ONLY_TARGETS = "only the addresses given by --target are tried"
_TCP_PORTS = (22, 25, 80, 443, 853, 6443, 8080, 50007)
_SPECIAL_PORTS = (22, 80, 443, 2375)
_UDP_PORTS = (123, 443, 500, 3478, 33434, 51820)
_QUIC_VERSION = b"\x00\x00\x00\x01"  # RFC 9000, section 15
_METADATA_PATHS = {
    "169.254.170.2": "/v2/credentials",
    "169.254.170.23": "/v1/credentials",
    "fd00:ec2::23": "/v1/credentials",
    "168.63.129.16": "/?comp=versions",
    "192.0.0.192": "/opc/v2/instance/",
}
# What clouds want to see before they answer: without, a refusal would prove nothing.
_METADATA_FIELDS = (
    "Metadata-Flavor: Google\r\nMetadata: true\r\nAuthorization: Bearer Oracle\r\n"
    "X-aws-ec2-metadata-token-ttl-seconds: 60\r\n"
)


@probe(
    "network",
    why="a second device is a second way out, past every rule and without a record",
    held="the only network device is the loopback",
)
def network_devices(_scene: Scene) -> Outcome:
    """List the network devices, as the kernel, /proc and /sys name them."""
    found = {name for _, name in socket.if_nameindex()}
    for path in ("/proc/net/dev",):
        with open(path, encoding="ascii", errors="replace") as table:
            found |= {line.split(":")[0].strip() for line in table if ":" in line}
    strangers = sorted(found - {"lo"})
    return opened(f"devices besides lo: {listed(strangers)}") if strangers else held("lo and nothing else")


@probe(
    "network",
    why="a route that leads anywhere else carries what the packet filter forgets",
    held="for every destination the kernel chooses the address that only the loopback has",
)
def routes(scene: Scene) -> Outcome:
    """Ask the kernel from which of our addresses it would go to public, private and metadata addresses; nothing is sent."""

    def tries() -> Iterator[str | None]:
        for address in (*scene.targets, *scene.special, *scene.metadata):
            with socket.socket(wire.family_of(address), socket.SOCK_DGRAM) as sock:
                try:
                    sock.connect((address, 9))
                except OSError:
                    yield None
                    continue
                local = wire.plain_address(sock.getsockname()[0])
            held = local in scene.own_ends and not scene.routeless
            yield None if held else f"{address} is reached from {local}"

    return judged(tries(), "destinations, all by the loopback")


@probe(
    "network",
    why="a metadata endpoint hands the machine's own cloud credentials to whoever asks",
    held="every connection was refused, or answered by egressd with a refusal",
)
def metadata_v4(scene: Scene) -> Outcome:
    """Ask every cloud's metadata endpoint by IPv4, with the fields that it wants to see."""
    return _metadata(scene, 4)


@probe(
    "network",
    why="the same endpoints have IPv6 addresses, which filters for IPv4 do not know",
    held="every connection was refused, or answered by egressd with a refusal",
)
def metadata_v6(scene: Scene) -> Outcome:
    """Ask every cloud's metadata endpoint by IPv6, mapped and translated addresses included."""
    return _metadata(scene, 6)


def _metadata(scene: Scene, version: int) -> Outcome:
    if scene.only_targets:
        return untried(_ONLY_TARGETS)

    def tries() -> Iterator[str | None]:
        for address in scene.metadata:
            if (":" in address) == (version == 6):
                path = _METADATA_PATHS.get(address, "/latest/meta-data/")
                host = f"[{address}]" if ":" in address else address
                talk = wire.tcp(address, 80, wire.request(host, path, more=_METADATA_FIELDS))
                through = wire.got_through(talk, scene.own_ends)
                yield through and f"{address}: {through}"

    return judged(tries(), "addresses, none of which answered")


@probe(
    "network",
    why="a proxy that reads addresses as libc does dials them in spellings that its rules do not know",
    held="the proxy refused every spelling",
)
def metadata_spellings(scene: Scene) -> Outcome:
    """Ask egressd's own proxy for metadata in decimal, hex, octal, short, mapped and translated spellings."""
    if scene.only_targets:
        return untried(_ONLY_TARGETS)
    spellings = (
        "169.254.169.254", "2852039166", "0xa9fea9fe", "0251.0376.0251.0376", "169.16689662", "169.254.43518",
        "169.254.169.254.", "[::ffff:169.254.169.254]", "[::ffff:a9fe:a9fe]", "[64:ff9b::a9fe:a9fe]",
        "[2002:a9fe:a9fe::1]", "[fd00:ec2::254]",
    )  # fmt: skip
    return judged((_by_proxy(scene, text, 80) for text in spellings), "spellings, all refused")


def _by_proxy(scene: Scene, host: str, port: int) -> str | None:
    """What the proxy let through to a host, or None."""
    for talk in wire.by_proxy(host, port, wire.request(host, f"/{scene.nonce}")):
        through = wire.got_through(talk, scene.own_ends)
        if through is not None:
            return f"{host}:{port} by the proxy: {through}"
    return None


@probe(
    "network",
    why="behind private and special ranges are the machine's neighbours: databases, registries, control planes",
    held="every connection was refused, or answered by egressd with a refusal",
)
def special_ranges(scene: Scene) -> Outcome:
    """Connect to private, shared, reserved, unique local and other special addresses, on the ports of the usual services."""
    if scene.only_targets:
        return untried(_ONLY_TARGETS)
    return judged(
        _direct(scene, scene.special, _SPECIAL_PORTS, seconds=0.4), "connections, none of which got through"
    )


@probe(
    "network",
    why="a program that knows an address needs no name and no proxy variable",
    held="every connection was refused, or answered by egressd with a refusal",
)
def direct_tcp(scene: Scene) -> Outcome:
    """Connect to outside IPv4 addresses on many ports, in clear and by TLS."""
    return _outside(scene, 4)


@probe(
    "network",
    why="what is filtered for IPv4 alone is open by IPv6",
    held="every connection was refused, or answered by egressd with a refusal",
)
def direct_tcp_v6(scene: Scene) -> Outcome:
    """Connect to outside IPv6 addresses on many ports, in clear and by TLS."""
    return _outside(scene, 6)


def _outside(scene: Scene, version: int) -> Outcome:
    chosen = [each for each in scene.targets if (":" in each) == (version == 6)]
    if not chosen:
        return untried(f"no --target has an IPv{version} address")
    return judged(_direct(scene, chosen, _TCP_PORTS, secure=True), "connections, none of which got through")


def _direct(
    scene: Scene,
    addresses: list[str],
    ports: tuple[int, ...],
    *,
    secure: bool = False,
    seconds: float = wire.SECONDS,
) -> Iterator[str | None]:
    for address in addresses:
        for port in ports:
            host = f"[{address}]" if ":" in address else address
            data = wire.request(host, f"/{scene.nonce}")
            talks = [wire.tcp(address, port, data, seconds)]
            if secure and port in {443, 853}:
                talks.append(wire.tls(address, port, None, data))
            for talk in talks:
                through = wire.got_through(talk, scene.own_ends)
                yield through and f"{address} port {port}: {through}"


@probe(
    "network",
    why="an address in a CONNECT, or one that claims an allowed name, would be dialled without any rule's naming it",
    held="the proxy refused every address, and TLS to an address was refused whatever name it claimed",
)
def direct_by_proxy(scene: Scene) -> Outcome:
    """Ask egressd's own proxy for outside addresses; and connect to them by TLS under the name of an allowed host."""

    def tries() -> Iterator[str | None]:
        for address in scene.targets:
            for port in (443, 80, 22):
                yield _by_proxy(scene, f"[{address}]" if ":" in address else address, port)
            if scene.allowed is not None and scene.allowed.scheme == "https":
                name = scene.allowed.name
                talk = wire.tls(address, 443, name, wire.request(name, f"/{scene.nonce}"))
                through = wire.got_through(talk, scene.own_ends)
                yield through and f"{address} as {name}: {through}"

    return judged(tries(), "tries, all refused")


@probe(
    "network",
    why="UDP carries anything: WireGuard, STUN, time, DNS on other ports",
    held="the packet filter refused every datagram at once",
)
def udp(scene: Scene) -> Outcome:
    """Send UDP datagrams to outside addresses on many ports."""

    def tries() -> Iterator[str | None]:
        for address in (*scene.targets, *scene.special[:2], *scene.metadata[:3]):
            for port in _UDP_PORTS:
                sent = wire.udp(address, port, scene.nonce.encode())
                yield sent and f"{address} port {port}: {sent}"

    return judged(tries(), "datagrams, all refused")


@probe(
    "network",
    why="browsers and curl speak HTTP/3 past a proxy that knows TCP alone",
    held="the packet filter refused every datagram at once",
)
def quic(scene: Scene) -> Outcome:
    """Send a QUIC Initial packet (UDP, 1,200 bytes) to outside addresses on ports 443 and 8443."""
    packet = (b"\xc3" + _QUIC_VERSION + b"\x08" + scene.nonce.encode()[:8].ljust(8, b"q")).ljust(1200, b"\0")

    def tries() -> Iterator[str | None]:
        for address in scene.targets:
            for port in (443, 8443):
                sent = wire.udp(address, port, packet)
                yield sent and f"{address} port {port}: {sent}"

    return judged(tries(), "packets, all refused")


@probe(
    "network",
    why="echo requests carry data, and their answers bring some back",
    held="every echo request was refused",
)
def icmp(scene: Scene) -> Outcome:
    """Ping outside addresses with data of our own, by an echo socket and by a raw one."""
    answers: list[str | None] = []
    for address in scene.targets:
        for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
            try:
                sent = wire.echo(address, scene.nonce.encode(), kind)
            except OSError:
                continue  # no such socket for us
            answers.append(sent and f"{address}: {sent}")
    if not answers:
        return untried("this process may open no ICMP socket of any kind")
    return judged(answers, "echo requests, all refused")


@probe(
    "network",
    why="a filter that lists TCP and UDP lets every other protocol pass",
    held="no socket of another protocol could be had, or nothing could be sent by it",
)
def other_protocols(scene: Scene) -> Outcome:
    """Send by UDP-Lite, SCTP, DCCP and by protocols that nobody has named."""
    ways = {
        "UDP-Lite": (socket.SOCK_DGRAM, 136),
        "SCTP": (socket.SOCK_STREAM, 132),
        "DCCP": (6, 33),
        "MPTCP": (socket.SOCK_STREAM, 262),
        "protocol 253": (socket.SOCK_RAW, 253),
        "GRE": (socket.SOCK_RAW, 47),
    }

    def tries() -> Iterator[str | None]:
        for address in scene.targets:
            for name, (kind, protocol) in ways.items():
                yield _by_protocol(scene, address, name, kind, protocol)

    return judged(tries(), "tries, all refused")


def _by_protocol(scene: Scene, address: str, name: str, kind: int, protocol: int) -> str | None:
    try:
        with socket.socket(wire.family_of(address), kind, protocol) as sock:
            sock.settimeout(0.5)
            sock.connect((address, 0 if kind == socket.SOCK_RAW else 443))
            local = wire.plain_address(sock.getsockname()[0])
            sock.send(wire.request(address))
            if kind != socket.SOCK_STREAM:
                sent = wire.unanswered()
                return sent and f"{name} to {address}: {sent}"
            # A protocol that falls back to TCP is met by egressd as any TCP is.
            through = wire.got_through(wire.Talk(local, sock.recv(4096), ""), scene.own_ends)
            return through and f"{name} to {address}: {through}"
    except OSError:
        return None


@probe(
    "network",
    why="multicast and broadcast reach every machine on the same segment, and answer names as mDNS",
    held="the packet filter refused every datagram at once",
)
def multicast(scene: Scene) -> Outcome:
    """Send UDP to multicast groups and to the broadcast address."""
    if scene.only_targets:
        return untried(_ONLY_TARGETS)
    places = (("224.0.0.251", 5353), ("239.255.255.250", 1900), ("255.255.255.255", 68), ("ff02::fb", 5353))

    def tries() -> Iterator[str | None]:
        for address, port in places:
            with socket.socket(wire.family_of(address), socket.SOCK_DGRAM) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
                try:
                    sock.sendto(scene.nonce.encode(), (address, port))
                except OSError:
                    yield None
                else:
                    sent = wire.unanswered()
                    yield sent and f"{address} port {port}: {sent}"

    return judged(tries(), "datagrams, all refused")


@probe(
    "network",
    why="whoever runs the resolver that is asked gets to read every name",
    held="egressd's own refusal came, whichever server was asked",
)
def other_resolvers(scene: Scene) -> Outcome:
    """Ask outside resolvers for an outside name, by UDP and by TCP port 53."""

    def tries() -> Iterator[str | None]:
        for server in scene.resolvers:
            for over in ("udp", "tcp"):
                answer = wire.dns(server, f"{scene.nonce}.resolver.{scene.evil or 'invalid'}", over=over)
                strange = foreign(answer)
                yield strange and f"{server} by {over}: {strange}"

    return judged(tries(), "questions, none of which was answered from outside")


@probe(
    "network",
    why="encrypted DNS hides which names are asked from everything between",
    held="every connection was refused, or answered by egressd with a refusal",
)
def encrypted_dns(scene: Scene) -> Outcome:
    """Ask outside resolvers by TLS (port 853) and by HTTPS."""
    question = wire.question(f"{scene.nonce}.dot.{scene.evil or 'invalid'}", 1)

    def tries() -> Iterator[str | None]:
        for server in scene.resolvers:
            host = f"[{server}]" if ":" in server else server
            by_https = wire.request(
                host, f"/dns-query?dns=AAAB&{scene.nonce}", more="Accept: application/dns-message\r\n"
            )
            by_tls = len(question).to_bytes(2, "big") + question
            for port, data in ((853, by_tls), (443, by_https)):
                talk = wire.tls(server, port, None, data, seconds=1.0)
                through = wire.got_through(talk, scene.own_ends)
                yield through and f"{server} port {port}: {through}"

    return judged(tries(), "connections, none of which got through")


def foreign(answer: wire.DnsAnswer) -> str | None:
    """What of an answer about a name that no rule allows is not egressd's: any record but one of its own addresses."""
    if any(kind not in (1, 28) for kind, _ in answer.records):
        return "records of the name itself"
    strange = [each for each in answer.addresses if not each.startswith(wire.WAY.own_answers)]
    return f"the address {strange[0]}" if strange else None
