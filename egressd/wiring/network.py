"""The inside of a sandbox's network namespace: addresses, routes, rules, and the sockets that egressd listens on.

Runs inside the new namespace, with power over it and over nothing else.
"""

import os
import socket
import struct
from collections.abc import Iterator
from typing import Final

from egressd.wiring import ruleset
from egressd.wiring.errors import WiringError
from egressd.wiring.programs import Program
from egressd.wiring.ruleset import Family

FAMILIES: Final[tuple[Family, ...]] = (4, 6)
BACKLOG: Final = 1024
PACKET_COPY: Final = 128
"""Bytes of a dropped packet that are looked at: an IPv6 header, some extension headers, and the ports."""
_NFLOG_BUFFER: Final = 4 * 1024 * 1024

_TOOLS: Final[dict[Family, str]] = {4: "iptables", 6: "ip6tables"}
_LOOPBACK: Final[dict[Family, str]] = {4: "127.0.0.1", 6: "::1"}
_ANY: Final[dict[Family, str]] = {4: "0.0.0.0", 6: "::"}  # noqa: S104 - of one interface alone
_INET: Final = {4: socket.AF_INET, 6: socket.AF_INET6}

# nodad: until duplicate detection has run, the kernel refuses the address as a route's source (a race).
ADDRESSES: Final = f"""\
addr replace {ruleset.OWN_ADDRESSES[4]}/32 dev lo
addr replace {ruleset.OWN_ADDRESSES[6]}/128 dev lo nodad
route replace local default dev lo src {ruleset.OWN_ADDRESSES[4]}
route replace local ::/0 dev lo src {ruleset.OWN_ADDRESSES[6]}
"""

IP_HINT: Final = "egressd needs iproute2 and a kernel with IPv6 (not booted with ipv6.disable=1)"
RULES_HINT: Final = (
    "install iptables (Debian: apt-get install iptables), or load on the host what the kernel lacks: "
    "modprobe -a nf_tables nft_compat nf_nat nf_conntrack xt_conntrack xt_REDIRECT xt_NFLOG "
    "ipt_REJECT ip6t_REJECT nfnetlink_log"
)


def wire(nflog_group: int) -> list[str]:
    """Bring up loopback, routes and rules in this namespace, and read the rules back; notes for the operator.

    Raises WiringError when anything is not exactly as wanted: no sandbox starts with half its rules.
    """
    _set(_BEFORE)
    Program(["ip", "-batch", "-"], f"link set lo up\n{ADDRESSES}", hint=IP_HINT).output()
    started = [
        Program(
            [f"{_TOOLS[f]}-restore"], ruleset.namespace_ruleset(f, nflog_group=nflog_group), hint=RULES_HINT
        )
        for f in FAMILIES
    ]
    for program in started:
        program.output()
    track()
    problems = missing_rules(nflog_group)
    if problems:
        raise WiringError("iptables-save", "; ".join(problems), RULES_HINT)
    return _ping_note()


def track() -> None:
    """Say how connections are tracked here, once the rules have asked for that: before, there are no such settings."""
    _set(_AFTER)


def missing_rules(nflog_group: int) -> list[str]:
    """What the four tables, read back, lack or have too much."""
    reading = {f: Program([f"{_TOOLS[f]}-save"], hint=RULES_HINT) for f in FAMILIES}
    return [
        f"IPv{family}: {problem}"
        for family, program in reading.items()
        for problem in ruleset.missing_rules(
            ruleset.namespace_ruleset(family, nflog_group=nflog_group), program.output()
        )
    ]


_PING: Final = "/proc/sys/net/ipv4/ping_group_range"
_CONNTRACK: Final = "/proc/sys/net/netfilter/nf_conntrack_tcp_"
_HALF_CLOSED_SECONDS: Final = "86400"
_BEFORE: Final = {
    # Our gid is 0 here. A ping that may be sent is a packet, and a packet is recorded; a refused socket is neither.
    _PING: "0 0",
    # Set by some hosts for every new namespace.
    "/proc/sys/net/ipv6/conf/lo/disable_ipv6": "0",
    "/proc/sys/net/ipv6/conf/all/disable_ipv6": "0",
}
_AFTER: Final = {
    # The kernel forgets a half-closed connection after a minute of silence, and a forgotten one is reset here: its
    # packets no longer count as a reply. Both ends are on this machine, so none is ever left behind for long.
    _CONNTRACK + "timeout_close_wait": _HALF_CLOSED_SECONDS,
    _CONNTRACK + "timeout_fin_wait": _HALF_CLOSED_SECONDS,
    # Windows are judged to spot forged packets; on a loopback device the sequence numbers are the sender's own.
    _CONNTRACK + "be_liberal": "1",
}


def _set(settings: dict[str, str]) -> None:
    for path, value in settings.items():
        try:
            with open(path, "w", encoding="utf-8") as setting:
                setting.write(value)
        except OSError:
            # /proc/sys is read-only in some containers. What matters of it shows in the next steps.
            continue


def _ping_note() -> list[str]:
    try:
        with open(_PING, encoding="utf-8") as setting:
            if setting.read().split() == ["0", "0"]:
                return []
    except OSError:
        pass
    return [
        "/proc/sys is read-only here: a ping fails in the sandbox before it is a packet that could be recorded"
    ]


def listeners(
    nflog_group: int, socket_uid: int | None, *, again: bool = False
) -> Iterator[tuple[str, int, socket.socket]]:
    """Make egressd's sockets: (kind, family, socket), family 0 for the packet log.

    `socket_uid` is the uid, in this user namespace, that is to own them; `again` as in `tcp`. No SO_REUSEPORT anywhere and no
    SO_REUSEADDR on UDP: with either the sandbox could bind the same port and receive in our place.
    """
    if socket_uid is not None:
        os.seteuid(socket_uid)  # a socket belongs to the effective (file system) uid of its maker
    try:
        for family in FAMILIES:
            yield "transparent", family, tcp(family, ruleset.TRANSPARENT_PORT, again=again)
        yield "explicit", 4, tcp(4, ruleset.EXPLICIT_PORT, again=again)
        for family in FAMILIES:
            yield "dns-udp", family, udp(family, ruleset.DNS_PORT)
            yield "dns-tcp", family, tcp(family, ruleset.DNS_PORT, again=again)
    finally:
        if socket_uid is not None:
            os.seteuid(0)
    yield "nflog", 0, packet_log(nflog_group)


def tcp(family: Family, port: int, *, interface: str = "", again: bool = False) -> socket.socket:
    """A listening socket on loopback, or on every address but for what comes by one interface alone.

    `again` says that another may have listened here before, whose last connections (TIME_WAIT) hold nobody up then.
    """
    # IPPROTO_TCP by name: with MPTCP enabled system-wide the default could become another protocol.
    listener = _bound(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, port, interface, again=again)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited by what is accepted
    listener.listen(BACKLOG)
    return listener


def udp(family: Family, port: int, *, interface: str = "") -> socket.socket:
    """The same for datagrams."""
    return _bound(family, socket.SOCK_DGRAM, socket.IPPROTO_UDP, port, interface)


def _bound(
    family: Family,
    kind: socket.SocketKind,
    protocol: int,
    port: int,
    interface: str,
    *,
    again: bool = False,
) -> socket.socket:
    address = _ANY[family] if interface else _LOOPBACK[family]
    made = socket.socket(_INET[family], kind, protocol)
    try:
        if family == 6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if again:  # of listening sockets there is still but one (tcp(7), socket(7)): never of datagrams
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if interface:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        made.bind((address, port))
    except OSError as error:
        made.close()
        at = f"{address} of {interface}" if interface else address
        raise WiringError.from_os(f"bind {at} port {port}", error) from error
    return made


# linux/netfilter/nfnetlink_log.h, linux/netfilter/nfnetlink.h
_NETLINK_NETFILTER: Final = 12
_NFULNL_MSG_CONFIG: Final = (4 << 8) | 1
_NLM_F_REQUEST_ACK: Final = 1 | 4
_NLMSG_ERROR: Final = 2
_CFG_CMD, _CFG_MODE, _CFG_TIMEOUT, _CFG_QTHRESH = 1, 2, 4, 5
_CMD_BIND: Final = 1
_COPY_PACKET: Final = 2
_SO_RCVBUFFORCE: Final = 33


def packet_log(group: int) -> socket.socket:
    """A netlink socket that the kernel sends dropped packets to, one message per packet and at once."""
    log = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
    try:
        log.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _NFLOG_BUFFER)
    except (
        PermissionError
    ):  # needs power in the first user namespace; the plain option obeys net.core.rmem_max
        log.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _NFLOG_BUFFER)
    try:
        log.bind((0, 0))
        _configure(log, group, _CFG_CMD, struct.pack("=B", _CMD_BIND))
        _configure(log, group, _CFG_MODE, struct.pack("!IBx", PACKET_COPY, _COPY_PACKET))
        _configure(log, group, _CFG_QTHRESH, struct.pack("!I", 1))
        _configure(log, group, _CFG_TIMEOUT, struct.pack("!I", 1))  # hundredths of a second
    except OSError as error:
        raise WiringError.from_os("NFLOG bind", error, "modprobe nfnetlink_log on the host") from error
    return log


def _configure(log: socket.socket, group: int, kind: int, value: bytes) -> None:
    attribute = struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)
    body = struct.pack("!BBH", 0, 0, group) + attribute
    log.send(struct.pack("=IHHII", 16 + len(body), _NFULNL_MSG_CONFIG, _NLM_F_REQUEST_ACK, 1, 0) + body)
    answer = log.recv(4096)
    kind_of_answer, result = struct.unpack_from("=H", answer, 4)[0], struct.unpack_from("=i", answer, 16)[0]
    if kind_of_answer != _NLMSG_ERROR or result != 0:
        raise OSError(-result, os.strerror(-result))
