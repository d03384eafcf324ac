"""What a probe knows of where it runs: told by the outside half, in one JSON object."""

from __future__ import annotations

from typing import Any, NamedTuple


class Allowed(NamedTuple):
    """A request that the rules in force allow, for the probes that begin with one."""

    name: str
    port: int
    scheme: str
    method: str
    path: str


class Edge(NamedTuple):
    """A name just beside a rule, which the rules do not allow; `what` says beside which."""

    name: str
    what: str


class Process(NamedTuple):
    """One of egressd's processes, as the host numbers it; `started` is its start time in clock ticks (proc(5), stat 22)."""

    pid: int
    started: int
    what: str


class Scene:
    """The addresses, names, paths and strangers that the probes are about. What is empty is not tried."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.nonce = str(told.get("nonce", ""))
        # addresses
        self.targets = _texts(told, "targets")
        self.metadata = _texts(told, "metadata")
        self.special = _texts(told, "special")
        self.resolvers = _texts(told, "resolvers")
        self.host_addresses = _texts(told, "host_addresses")
        self.own_ends = _texts(told, "own_ends")
        self.only_targets = bool(told.get("only_targets"))
        # the wiring: what this network can be expected to be
        self.wiring = str(told.get("wiring", "namespace"))
        proxy = told.get("proxy", ["127.0.0.1", 3128, ""])
        self.proxy = (str(proxy[0]), int(proxy[1]), str(proxy[2])) if proxy else None
        self.own_answers = tuple(_texts(told, "own_answers")) or ("198.18.", "198.19.")
        self.quiet = bool(told.get("quiet"))
        self.routeless = bool(told.get("routeless"))
        self.neighbour_addresses = _texts(told, "neighbour_addresses") or self.own_ends
        # names
        self.resolver = str(told.get("resolver", ""))
        self.evil = str(told.get("evil", ""))
        self.evil_is_allowed = bool(told.get("evil_is_allowed"))
        self.metadata_names = _texts(told, "metadata_names")
        self.wild = str(told.get("wild", ""))
        self.edges = [Edge(*each) for each in told.get("edges", [])]
        allowed = told.get("allowed")
        self.allowed = Allowed(*allowed) if allowed else None
        # strangers
        # IPv4's and IPv6's; 0 where nobody listens
        self.host_ports = [int(each) for each in told.get("host_ports", [])]
        self.neighbour_ports = [int(each) for each in told.get("neighbour_ports", [])]
        self.neighbour_token = str(told.get("neighbour_token", ""))
        self.neighbour_files = _texts(told, "neighbour_files")
        self.neighbour_memory = int(told.get("neighbour_memory", 0))
        self.abstract = _texts(told, "abstract")
        self.sockets = _texts(told, "sockets")
        self.processes = [Process(*each) for each in told.get("processes", [])]
        self.spaces: dict[str, str] = {str(k): str(v) for k, v in told.get("spaces", {}).items()}
        self.uids = [int(each) for each in told.get("uids", [])]
        # files
        self.paths: dict[str, list[str]] = {
            str(what): [str(path) for path in paths] for what, paths in told.get("paths", {}).items()
        }
        # the host's own folders, to be told from others in their place: (device, inode)
        self.folders = {
            str(path): (int(each[0]), int(each[1])) for path, each in told.get("folders", {}).items()
        }
        self.secret = str(told.get("secret", ""))
        self.authority = str(told.get("authority", ""))


def _texts(told: dict[str, Any], key: str) -> list[str]:
    return [str(each) for each in told.get(key, [])]
