"""What the service manager hears, and what it is never asked."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from egressd.control.notify import Notifier


@pytest.mark.parametrize("abstract", [False, True])
def test_what_is_told_arrives_as_one_datagram(tmp_path: Path, abstract: bool) -> None:
    name = f"@egressd-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name[1:] if abstract else name)
        manager.settimeout(5)
        environ = {
            "NOTIFY_SOCKET": name,
            "WATCHDOG_USEC": "3000000",
            "WATCHDOG_PID": str(os.getpid()),
            "PATH": "/",
        }
        notifier = Notifier(environ)
        assert environ == {"PATH": "/"}  # no child speaks in our name
        assert notifier.watchdog == 3.0
        notifier.tell("READY=1", "STATUS=2 profiles")
        assert manager.recv(100) == b"READY=1\nSTATUS=2 profiles"
        notifier.reloading()
        assert manager.recv(100).startswith(b"RELOADING=1\nMONOTONIC_USEC=")


@pytest.mark.parametrize("address", ["", "/nowhere/at/all", "x" * 200, "relative", "\0"])
def test_a_manager_that_is_not_there_is_no_problem(address: str) -> None:
    Notifier({"NOTIFY_SOCKET": address}).tell("READY=1")


@pytest.mark.parametrize(
    ("usec", "pid"), [("", ""), ("x", ""), ("0", ""), ("-5", ""), ("٣", ""), ("1000", "1")]
)
def test_a_watchdog_that_is_not_meant_for_us_is_not_fed(usec: str, pid: str) -> None:
    assert Notifier({"NOTIFY_SOCKET": "/n", "WATCHDOG_USEC": usec, "WATCHDOG_PID": pid}).watchdog is None
