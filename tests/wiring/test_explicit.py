"""The explicit wiring's sockets: made where they were wanted, or not at all."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from egressd.wiring.errors import WiringError
from egressd.wiring.explicit import ExplicitListener, ExplicitSpec, listen


def closing(listeners: tuple[ExplicitListener, ...]) -> None:
    for listener in listeners:
        listener.socket.close()


def test_every_address_gets_every_listener() -> None:
    spec = ExplicitSpec(
        ("127.0.0.1", "::1"), http=0, socks=0, dns=None, direct={443: 0, 80: 0}, hops=("10.0.0.0/8",)
    )
    listeners = listen(spec)
    try:
        kinds = [(each.kind, each.family, each.port) for each in listeners]
        assert kinds == [
            (kind, family, port)
            for family in (4, 6)
            for kind, port in (("explicit", 0), ("socks", 0), ("direct", 443), ("direct", 80))
        ]
        assert {each.hops for each in listeners} == {("10.0.0.0/8",)}
        for each in listeners:
            assert each.socket.getblocking() is False
            assert each.socket.proto == socket.IPPROTO_TCP
            with socket.create_connection(each.socket.getsockname()[:2], 5):
                pass
    finally:
        closing(listeners)


def test_the_resolver_is_asked_by_both_protocols_and_by_no_hop() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    listeners = listen(ExplicitSpec(("127.0.0.1",), http=None, socks=None, dns=port, hops=("10.0.0.0/8",)))
    try:
        assert [(each.kind, each.hops) for each in listeners] == [("dns-udp", ()), ("dns-tcp", ())]
        udp = listeners[0].socket
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            assert udp.getsockopt(socket.SOL_SOCKET, option) == 0
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            with pytest.raises(OSError, match="in use"):
                thief.bind(udp.getsockname())
    finally:
        closing(listeners)


@pytest.mark.parametrize(
    ("wrong", "because"),
    [
        pytest.param({"addresses": ()}, "an address", id="no address"),
        pytest.param({"addresses": ("egressd.test",)}, "does not appear", id="a name"),
        pytest.param({"addresses": ("224.0.0.1",)}, "listened on", id="a multicast address"),
        pytest.param({"addresses": ("::ffff:127.0.0.1",)}, "listened on", id="IPv4 inside IPv6"),
        pytest.param({"addresses": ("127.0.0.1",), "direct": {22: 22}}, "only ports 80 and 443", id="a port that names no host"),
        pytest.param({"addresses": ("127.0.0.1",), "http": 70_000}, "a port", id="no port"),
        pytest.param({"addresses": ("127.0.0.1",), "http": 1080}, "two listeners", id="one port twice"),
        pytest.param({"addresses": ("127.0.0.1",), "hops": ("10.0.0.1/8",)}, "host bits", id="a hop that is no network"),
    ],
)  # fmt: skip
def test_a_spec_that_nobody_can_serve_is_refused(wrong: dict[str, Any], because: str) -> None:
    with pytest.raises(ValueError, match=because):
        ExplicitSpec(**wrong)


def test_an_address_of_nobody_here_is_told_with_what_to_do() -> None:
    with pytest.raises(WiringError, match="hint: the address must be egressd's own"):
        listen(ExplicitSpec(("192.0.2.1",)))


def test_a_port_that_is_taken_leaves_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(WiringError, match="hint: another program listens there"):
            listen(ExplicitSpec(("127.0.0.1",), http=0, socks=port))
    assert len(os.listdir("/proc/self/fd")) == before


_UNPRIVILEGED = """
import os
from egressd.wiring.errors import WiringError
from egressd.wiring.explicit import ExplicitSpec, listen
spec = ExplicitSpec(("127.0.0.1",), http=None, socks=None, direct={443: 443})
if os.geteuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
try:
    listen(spec)
except WiringError as error:
    print(error)
"""


def test_without_privilege_a_low_port_is_told_with_the_sysctl() -> None:
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 443:
        pytest.skip("low ports are anybody's here")
    done = subprocess.run([sys.executable, "-c", _UNPRIVILEGED], capture_output=True, text=True, timeout=30)
    assert "net.ipv4.ip_unprivileged_port_start=443" in done.stdout, done.stderr
