"""A refusal in SSH's own words: well formed, and printed by the real client."""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.door.ssh import refuse_ssh, speaks_ssh


@given(st.text(max_size=3000))
def test_whatever_the_sentence_the_packet_is_well_formed(sentence: str) -> None:
    version, _, packet = refuse_ssh(sentence).partition(b"\r\n")
    assert version == b"SSH-2.0-egressd"
    length, padding = struct.unpack_from("!IB", packet)
    assert len(packet) == 4 + length
    assert len(packet) % 8 == 0
    assert 4 <= padding <= 255
    kind, code, size = struct.unpack_from("!BII", packet, 5)
    assert (kind, code) == (1, 1)
    assert packet[14 : 14 + size] == sentence.encode("ascii", "replace")[:1024]
    assert len(packet) == 14 + size + 4 + padding


@pytest.mark.parametrize(
    ("data", "ssh"),
    [
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", True, id="a version"),
        pytest.param(b"SSH-1.99-x\r\n", True, id="an old one"),
        pytest.param(b"GET / HTTP/1.1\r\n", False, id="HTTP"),
        pytest.param(b"", False, id="nothing"),
    ],
)
def test_ssh_is_known_by_its_version(data: bytes, ssh: bool) -> None:
    assert speaks_ssh(data) == ssh


@pytest.mark.skipif(shutil.which("ssh") is None, reason="ssh is not installed")
def test_the_real_client_prints_the_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as client:
                client.recv(1000)
                client.sendall(refuse_ssh("egressd: denied: because (reason not_allowed)"))
                client.shutdown(socket.SHUT_WR)
                while client.recv(1000):
                    pass

        thread = threading.Thread(target=answer)
        thread.start()
        options = ["-F", "/dev/null", "-o", "BatchMode=yes", "-o", f"UserKnownHostsFile={tmp_path}/known"]
        command = ["ssh", *options, "-p", str(server.getsockname()[1]), "127.0.0.1"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)
        thread.join(10)
    assert "egressd: denied: because (reason not_allowed)" in done.stderr
    assert done.returncode == 255
