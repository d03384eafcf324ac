"""What the kernel threw away at a socket, as it tells whoever has no capability."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from egressd.wiring.drops import Dropped, dropped
from egressd.wiring.namespace import Listener


@pytest.fixture
def resolver() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the least that the kernel gives
        made.bind(("127.0.0.1", 0))
        yield made


def test_what_a_full_queue_cannot_take_is_counted_to_the_last_datagram(resolver: socket.socket) -> None:
    listeners = [Listener("dns-udp", 4, resolver)]
    before = dropped(listeners)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        for _ in range(50):
            client.sendto(b"x" * 1000, resolver.getsockname())
    resolver.setblocking(False)
    taken = 0
    with contextlib.suppress(BlockingIOError):
        while resolver.recv(2000):
            taken += 1
    assert 0 < taken < 50
    assert dropped(listeners).since(before) == Dropped(dns_datagrams=50 - taken)


def test_a_packet_log_is_found_by_its_inode(tmp_path: Path) -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as log:
        inode = os.fstat(log.fileno()).st_ino
        head = "sk               Eth Pid        Groups   Rmem     Wmem     Dump  Locks    Drops    Inode\n"
        rows = "".join(
            f"0000000000000000 12  {pid}       00000000 0        0        0     2        {drops}        {each}\n"
            for pid, drops, each in ((1, 9, inode + 1), (2, 4, inode), (3, 7, 1))
        )
        (tmp_path / "netlink").write_text(head + rows)
        assert dropped([Listener("nflog", 0, log)], tmp_path) == Dropped(packets=4)
        (tmp_path / "netlink").write_text(head + "nothing of use\n\n")
        assert dropped([Listener("nflog", 0, log)], tmp_path) == Dropped()


def test_other_listeners_have_nothing_to_drop(resolver: socket.socket) -> None:
    assert dropped([Listener("transparent", 4, resolver)], Path("/nonexistent")) == Dropped()
    with pytest.raises(FileNotFoundError):
        dropped([Listener("dns-udp", 4, resolver)], Path("/nonexistent"))
