"""What is done inside a running container's network namespace, by a process that enters it for one request and ends.

Started by control with a message socket and the namespace's descriptor. It shares nothing with the container but the network: not
its processes, files or users; nothing of the container's is run or read.

The container runs meanwhile. So everything is made in an order in which nothing is open in between: egressd's sockets first (a
port that a program of the container holds stops everything), the packet rules, and last the route that lets packets come up to
them. It is taken away the other way round.
"""

import contextlib
import json
import os
import socket
from typing import Any, Final, NoReturn

from egressd.wiring import identity, kernel, messages, network, probe, ruleset
from egressd.wiring.errors import WiringError
from egressd.wiring.network import FAMILIES
from egressd.wiring.programs import Program
from egressd.wiring.ruleset import Family

_SAVE: Final[dict[Family, str]] = {4: "iptables-save", 6: "ip6tables-save"}
_RESTORE: Final[dict[Family, str]] = {4: "iptables-restore", 6: "ip6tables-restore"}
_SETTINGS: Final = {
    # As container engines set it. A ping that may be sent is a packet, and a packet is recorded.
    "/proc/sys/net/ipv4/ping_group_range": "0\t2147483647",
    "/proc/sys/net/ipv6/conf/all/disable_ipv6": "0",
    "/proc/sys/net/ipv6/conf/lo/disable_ipv6": "0",
}
_HALTED: Final = """\
*raw
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
-A OUTPUT -p tcp -m tcp ! --tcp-flags FIN,SYN,RST,ACK SYN -j ACCEPT
-A OUTPUT -j DROP
COMMIT
"""
"""Nothing new is sent any more, before any rule counts it; what stands may still be told of its end."""
_EMPTY: Final = """\
*raw
:PREROUTING ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
COMMIT
*nat
:PREROUTING ACCEPT [0:0]
:INPUT ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
COMMIT
*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:OUTPUT ACCEPT [0:0]
COMMIT
"""


def main(channel_number: int) -> NoReturn:
    """Do what is asked, once."""
    channel = socket.socket(fileno=channel_number)
    channel.set_inheritable(False)
    try:
        kernel.die_with_parent()
        kernel.forbid_inspection()
        request, descriptors = messages.receive(channel)
        os.setns(descriptors[0], os.CLONE_NEWNET)
        answer, sockets = _answer(request)
        messages.send(channel, answer, [each.fileno() for each in sockets])
    except EOFError:
        pass
    except WiringError as error:
        failure = {"command": error.command, "stderr": error.stderr[:8000], "hint": error.hint}
        messages.send(channel, {"error": failure})
    except OSError as error:
        failure = {"command": "setns", "stderr": error.strerror or str(error), "hint": "needs CAP_SYS_ADMIN"}
        messages.send(channel, {"error": failure})
    os._exit(0)


def _answer(request: dict[str, Any]) -> tuple[dict[str, Any], list[socket.socket]]:
    match request["op"]:
        case "wire":
            return _wire(request["nflog_group"])
        case "halt":
            _restore(_HALTED)
            return {}, []
        case "undo":
            return _undo(request["before"]), []
        case "sweep":
            if (foreign := _foreign_rules(request["nflog_group"])) is not None:
                return {"left": foreign}, []
            return _undo({}), []
        case "dns":
            name, server, port = request["name"], request["server"], request["port"]
            return probe.dns(name, server, port, request["timeout"], tcp=request["tcp"]), []
    raise WiringError("entrant", f"no such operation: {request['op']}")


# wiring


def _wire(group: int) -> tuple[dict[str, Any], list[socket.socket]]:
    """Make all of it, or nothing: {"before": what to put back, "listeners": …} or {"unfit": why nothing was changed}."""
    why = _another_way() or _foreign_rules(group)
    if why is not None:
        return {"unfit": why}, []
    before: dict[str, Any] = {"up": _is_up("lo"), "settings": {}}
    _ip("link set lo up")
    for path, value in _SETTINGS.items():
        before["settings"][path] = _set(path, value)
    try:
        made = list(network.listeners(group, _socket_uid(), again=True))
    except WiringError:  # another egressd may have this place: its rules are not touched
        _put_back(before)
        raise
    try:
        _close_in(group)
    except BaseException:
        with contextlib.suppress(WiringError):  # what stays is closed
            _undo(before)
        raise
    manifest = [{"kind": kind, "family": family} for kind, family, _ in made]
    return {"before": before, "listeners": manifest}, [sock for _, _, sock in made]


def _close_in(group: int) -> None:
    for family in FAMILIES:
        text = ruleset.namespace_ruleset(family, nflog_group=group)
        Program([_RESTORE[family]], text, hint=network.RULES_HINT).output()
    network.track()
    if problems := network.missing_rules(group):
        raise WiringError("iptables-save", "; ".join(problems), network.RULES_HINT)
    _ip(network.ADDRESSES)


def _socket_uid() -> int | None:
    """The uid that owns the sockets: nobody's in any container, where it exists."""
    tables = ("/proc/self/uid_map", "/proc/self/gid_map")
    return (
        identity.SOCKET_UID if all(identity.is_mapped(identity.SOCKET_UID, each) for each in tables) else None
    )


def _another_way() -> str | None:
    """Say what else could carry packets out of here: a device that is up, or a route by one."""
    up = [
        link["ifname"] for link in _json("link", "show") if link["ifname"] != "lo" and "UP" in link["flags"]
    ]
    if up:
        return f"it has a network of its own: {', '.join(sorted(up)[:4])} is up"
    for family in ("-4", "-6"):
        for route in _json(family, "route", "show", "table", "all"):
            hops = route.get("nexthops", [])
            found = {route.get("dev"), *(hop.get("dev") for hop in hops)} - {"lo", None}
            if found or "via" in route or "gateway" in route:
                return (
                    f"it has a route of its own: {route.get('dst', '?')} by {', '.join(sorted(found)) or '?'}"
                )
    return None


def _foreign_rules(group: int) -> str | None:
    """Say whether somebody else's packet rules are here; ours may be, left by a daemon that was killed."""
    for family in FAMILIES:
        saved = Program([_SAVE[family]], hint=network.RULES_HINT).output()
        tables = ruleset.parse_tables(saved)
        bare = all(
            not any(table.rules.values()) and set(table.policies.values()) <= {"ACCEPT"}
            for table in tables.values()
        )
        halted = saved.replace(_RAW_HALTED[0], "").replace(_RAW_HALTED[1], "")
        ours = ruleset.namespace_ruleset(family, nflog_group=group)
        if not bare and ruleset.missing_rules(ours, halted):
            return "it has packet rules of its own"
    return None


_RAW_HALTED: Final = tuple(line for line in _HALTED.splitlines() if line.startswith("-A"))


# undoing


def _undo(before: dict[str, Any]) -> dict[str, Any]:
    """Take everything away: {"left": why the rules stay} where the container has got another way out meanwhile.

    Then they are what keeps it closed, and nobody listens behind them.
    """
    if (why := _another_way()) is not None:
        return {"left": why}
    for line in network.ADDRESSES.splitlines():
        gone = " ".join(word for word in line.replace(" replace ", " del ").split() if word != "nodad")
        try:
            _ip(gone)
        except WiringError:  # it was never made
            continue
    _restore(_EMPTY)
    _put_back(before)
    return {"left": None}


def _put_back(before: dict[str, Any]) -> None:
    for path, value in before.get("settings", {}).items():
        if value is not None:
            _set(path, value)
    if before.get("up") is False:
        _ip("link set lo down")


def _restore(text: str) -> None:
    started = [Program([_RESTORE[family]], text, hint=network.RULES_HINT) for family in FAMILIES]
    for program in started:
        program.output()


# the kernel


def _ip(batch: str) -> None:
    Program(["ip", "-batch", "-"], batch + "\n", hint=network.IP_HINT).output()


def _json(*words: str) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = json.loads(
        Program(["ip", "-json", *words], hint=network.IP_HINT).output() or "[]"
    )
    return told


def _is_up(device: str) -> bool:
    return "UP" in _json("link", "show", "dev", device)[0]["flags"]


def _set(path: str, value: str) -> str | None:
    """Set a setting of this network; what it was, None where it cannot be set."""
    try:
        with open(path, "r+", encoding="ascii") as setting:
            before = setting.read().strip()
            if before != value:
                setting.seek(0)
                setting.write(value)
    except OSError:
        return None
    return before
