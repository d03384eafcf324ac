"""Sockets that are handed to a program without privileges, and taken over there once."""

import json
import os
import subprocess
import sys

import pytest

from egressd.wiring.inherited import taken

HAND_ON = """
import os, socket, sys
from egressd.wiring.inherited import hand_on
datagrams = socket.socket(type=socket.SOCK_DGRAM)
made = [("transparent", 6, socket.socket(socket.AF_INET6)), ("dns-udp", 4, datagrams), ("nflog", 0, socket.socket())]
os.environ.update(hand_on(made))
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""
TAKE = """
import json, os, subprocess, sys
from egressd.wiring.inherited import taken
got = taken(os.environ)
again = taken(os.environ)
left = sorted(name for name in os.environ if name.startswith("LISTEN"))
look = [sys.executable, "-c", "import os; print(sorted(os.listdir('/proc/self/fd')))"]
child = subprocess.run(look, capture_output=True, text=True, close_fds=False)
sockets = [(g.kind, g.family, g.socket.family.name, g.socket.type.name, g.socket.getblocking()) for g in got]
print(json.dumps([sockets, len(again), left, child.stdout]))
"""


def test_they_arrive_in_order_and_go_no_further() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HAND_ON, TAKE], capture_output=True, text=True, check=False, timeout=30,
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    got, again, left, child = json.loads(done.stdout)
    assert got == [
        ["transparent", 6, "AF_INET6", "SOCK_STREAM", False],
        ["dns-udp", 4, "AF_INET", "SOCK_DGRAM", False],
        ["nflog", 0, "AF_INET", "SOCK_STREAM", False],
    ]
    assert (again, left) == (0, [])
    assert "'4'" not in child
    assert "'5'" not in child


def test_what_was_meant_for_another_process_is_not_taken() -> None:
    assert taken({"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "nflog"}) == ()
    assert taken({}) == ()


@pytest.mark.parametrize(
    ("number", "names"),
    [
        ("2", "nflog"), ("0", ""), ("-1", ""), ("x", "nflog"), ("65", "nflog"), ("1", "nflog-4"), ("1", "transparent"),
        ("1", "transparent-5"), ("1", "varlink-4"), ("1", ""), ("¹", "nflog"),
    ],
)  # fmt: skip
def test_what_is_not_ours_is_refused(number: str, names: str) -> None:
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": number, "LISTEN_FDNAMES": names}
    with pytest.raises(ValueError):  # noqa: PT011 -- the words differ
        taken(environ)
