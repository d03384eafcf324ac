"""What is open when rules change or the sandbox goes: judged again, cut if it may no longer live; others do not notice."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from egressd.lab.stand import Stand
from tests.e2e.conftest import until
from tests.e2e.test_drills import line_of, running

pytestmark = pytest.mark.e2e

OPEN = r"""
import socket, ssl, sys, threading
def tell(*words): print(*words, flush=True)
def follow(name, sock):
    try:
        while part := sock.recv(65536): pass
        tell(name, "ended")
    except OSError as error: tell(name, "cut")
kept = []
def relay():
    sock = socket.create_connection(("deb.debian.org", 22)); tell("relay", sock.recv(100).decode().strip()); return sock
ASK = "GET /sse?events=600&gap=0.1 HTTP/1.1\r\nHost: %s\r\n\r\n"
def stream(name, host, context):
    sock = context.wrap_socket(socket.create_connection((host, 443)), server_hostname=host)
    sock.sendall((ASK % host).encode())
    tell(name, sock.recv(12))
    return sock
trusting, opaque = ssl.create_default_context(), ssl._create_unverified_context()
for name, make in (
    ("relay", relay),
    ("tunnel", lambda: stream("tunnel", "api.anthropic.com", opaque)),
    ("sse", lambda: stream("sse", "api.lab-origin.com", trusting)),
    ("other", lambda: stream("other", "www.lab-origin.com", trusting)),
):
    kept.append(make())
    threading.Thread(target=follow, args=(name, kept[-1]), daemon=True).start()
tell("open")
sys.stdin.readline()
tell("still", threading.active_count() - 1)
"""


@contextmanager
def four_open(stand: Stand) -> Iterator[subprocess.Popen[str]]:
    """A relay, a tunnel and two event streams, all open in one sandbox."""
    (stand.workspace / "four.py").write_text(OPEN)
    with running(stand, "exec /usr/bin/python3 four.py") as process:
        assert line_of(process).startswith("relay SSH-")
        assert line_of(process) == "tunnel b'HTTP/1.1 200'"
        assert line_of(process) == "sse b'HTTP/1.1 200'"
        assert line_of(process) == "other b'HTTP/1.1 200'"
        assert line_of(process) == "open"
        yield process


RULES_WITHOUT = {
    "relay": ("hosts: [deb.debian.org]", "hosts: [nowhere.debian.org]"),
    "tunnel": ("hosts: [api.anthropic.com]", "hosts: [nowhere.anthropic.com]"),
    "sse": (
        "deny:\n",
        'deny:\n  - id: no-events\n    hosts: [api.lab-origin.com]\n    requests: ["GET /sse"]\n',
    ),
}


@pytest.mark.parametrize("which", list(RULES_WITHOUT))
def test_a_reload_cuts_what_it_no_longer_allows_and_nothing_else(stand: Stand, which: str) -> None:
    before, after = RULES_WITHOUT[which]
    text = stand.profile.read_text()
    assert before in text
    with four_open(stand) as process:
        stand.profile.write_text(text.replace(before, after))
        assert line_of(process) in (f"{which} cut", f"{which} ended")
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert line_of(process) == "still 3"
        until(lambda: stand.records(event="end", reason="policy_changed"), what="the end record")
    cut = stand.records(event="end", reason="policy_changed")
    assert {record["layer"] for record in cut} == {"request" if which == "sse" else "connection"}
    assert len(cut) == 1


def test_an_entry_that_expires_cuts_what_lives_by_it(stand: Stand) -> None:
    text = stand.profile.read_text()
    with four_open(stand) as process:
        stand.profile.write_text(text.replace("  - id: raw\n", "  - id: raw\n    expires: 2020-01-01\n"))
        assert line_of(process) in ("relay cut", "relay ended")


def test_the_end_of_the_command_ends_everything_with_a_record(stand: Stand) -> None:
    with four_open(stand) as process:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert line_of(process) == "still 4"
        process.wait(20)
    opened = [r for r in stand.attempts() if r["verdict"] == "allow" and r["layer"] != "dns"]
    ended = {record["attempt_id"] for record in stand.records(event="end")}
    assert [record for record in opened if record["attempt_id"] not in ended] == []


def test_a_relay_is_half_closed_right_both_ways(stand: Stand) -> None:
    ran = stand.run(
        [
            "sh",
            "-c",
            "printf 'SSH-2.0-me\\r\\n' | timeout 10 nc -N -w 5 deb.debian.org 22 | head -c 8; echo \" $?\"",
        ]
    )
    assert ran.stdout.startswith("SSH-2.0-"), ran
    end = stand.records(event="end", layer="connection")[-1]
    assert end["bytes_up"] == len("SSH-2.0-me\r\n")
    assert end["bytes_down"] > 8
