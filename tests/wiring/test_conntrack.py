"""Flows of an address are forgotten in both directions, and nobody else's."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.wiring.conntrack import attributes_of

PROGRAM = """
import json, os, socket, subprocess
from egressd.wiring.conntrack import forget
os.unshare(os.CLONE_NEWNET)
run = lambda *words: subprocess.run(words, check=True, capture_output=True, text=True).stdout
run("ip", "link", "set", "lo", "up")
run("iptables", "-A", "OUTPUT", "-m", "conntrack", "--ctstate", "NEW", "-j", "ACCEPT")
run("ip6tables", "-A", "OUTPUT", "-m", "conntrack", "--ctstate", "NEW", "-j", "ACCEPT")
def send(source, destination, port=0):
    with socket.socket(socket.AF_INET6 if ":" in source else socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind((source, port))
        sock.sendto(b"x", (destination, 9))
def there(*words):
    listed = run("conntrack", "-L", *words).split()
    return sorted({word for word in listed if word.startswith("src=")})
for number in range(1500):
    send("127.0.0.9", "127.0.0.1", 2000 + number)
for pair in (("127.0.0.2", "127.0.0.1"), ("127.0.0.2", "127.0.0.3"), ("127.0.0.3", "127.0.0.2"), ("::1", "::1")):
    send(*pair)
found = [forget("127.0.0.2"), there("-f", "ipv4"), forget("127.0.0.9"), there("-f", "ipv4"), forget("127.0.0.9")]
print(json.dumps([*found, forget("::1"), there("-f", "ipv6")]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_forgetting_an_address() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=60,
        env={"PYTHONPATH": os.pathsep.join(sys.path), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, left, many, none, again, six, nothing = json.loads(done.stdout)
    assert first == 3
    assert left == ["src=127.0.0.1", "src=127.0.0.9"]  # of each entry both directions are shown
    assert many == 1500
    assert none == []
    assert (again, six, nothing) == (0, 1, [])


@given(st.binary(max_size=200))
def test_attributes_are_read_from_any_bytes(data: bytes) -> None:
    for kind, value in attributes_of(data):
        assert 0 <= kind < 0x4000
        assert len(value) < len(data)
