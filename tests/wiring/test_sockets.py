"""Finding the sockets of services, whichever network namespace they live in and however their files came here."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from egressd.wiring import sockets

_SERVE = (
    "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); "
    "print('up', flush=True); sys.stdin.read()"
)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A socket whose service lives in a network namespace of its own."""
    path = tmp_path / "other.sock"
    wrap = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--user", "--net"]
    with subprocess.Popen(
        [*wrap, sys.executable, "-c", _SERVE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"up\n":
            pytest.skip("no network namespace can be made here")
        yield path


def test_a_service_in_another_network_namespace_is_found(elsewhere: Path) -> None:
    assert str(elsewhere) in sockets.live_sockets()


def test_one_in_our_own_is_found_and_named_without_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "link" / "a.sock"))
        assert str(tmp_path / "real" / "a.sock") in sockets.live_sockets()


def test_it_is_found_where_looking_at_its_process_is_not_allowed(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_namespace", lambda _: None)
    assert str(elsewhere) in sockets.live_sockets()


def test_what_is_mounted_from_elsewhere_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, where the service's process is out of sight."""
    alone, folder, own = tmp_path / "docker sock", tmp_path / "run", tmp_path / "root"
    for path in (alone, folder / "deep" / "b.sock", own / "c.sock"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    lines = [
        f"1 0 0:1 /run/docker.sock {str(alone).replace(' ', chr(92) + '040')} rw - ext4 /dev/vda rw",
        f"2 0 0:1 /run {folder} rw shared:1 - ext4 /dev/vda rw",
        f"3 0 0:2 / {own} rw - ext4 /dev/vdb rw",
    ]
    (proc / "self" / "mountinfo").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(sockets, "_PROC", str(proc))
    assert sockets.live_sockets() == sorted([str(alone), str(folder / "deep" / "b.sock")])
    assert sockets.live_sockets(skip=[str(folder)]) == [str(alone)]
    monkeypatch.setattr(sockets, "MOUNTED_LIMIT", 1)
    assert sockets.live_sockets() == [str(alone)], "the search is bounded"


def test_a_link_to_a_socket_is_none(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("a.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "a.sock"))
        assert sockets.is_socket(str(tmp_path / "a.sock"))
        assert not sockets.is_socket(str(tmp_path / "link"))
        assert not sockets.is_socket(str(tmp_path / "none"))
