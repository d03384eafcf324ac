"""Sockets in writable trees: found, unless there is too much to look through."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from egressd.wiring import mounts
from egressd.wiring.errors import WiringError
from egressd.wiring.mounts import View, refuse_sockets


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "a" / "b").mkdir(parents=True)
    server = socket.socket(socket.AF_UNIX)
    with server:
        server.bind(str(tmp_path / "a" / "b" / "s"))
        yield tmp_path


def seen(tree: Path, *, sockets: tuple[str, ...] = (), masks: tuple[str, ...] = ()) -> View:
    return View((str(tree),), (), sockets, masks, (), (), ())


def test_a_socket_is_found_at_any_depth(tree: Path) -> None:
    with pytest.raises(WiringError, match="a/b/s is a Unix socket"):
        refuse_sockets(seen(tree), [])


def test_a_socket_let_in_by_name_is_no_problem(tree: Path) -> None:
    assert refuse_sockets(seen(tree, sockets=(str(tree / "a" / "b" / "s"),)), []) == []


def test_a_socket_behind_a_mask_is_no_problem(tree: Path) -> None:
    assert refuse_sockets(seen(tree, masks=(str(tree / "a"),)), []) == []


def test_links_are_not_followed(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    (other / "link").symlink_to(tree)
    assert refuse_sockets(seen(other), []) == []


def test_a_search_that_is_cut_short_says_so(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "WALK_LIMIT", 1)
    (tree / "a" / "b" / "s").rename(tree / "a" / "t")
    (tree / "x").mkdir()
    for number in range(3):
        (tree / "x" / str(number)).touch()
    (tree / "a" / "t").rename(tree / "a" / "b" / "s")
    (note,) = refuse_sockets(seen(tree), [])
    assert "looked for Unix sockets in the first" in note


def test_what_the_kernel_lists_is_found_beyond_the_search(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mounts, "WALK_LIMIT", 0)
    with pytest.raises(WiringError, match="is a Unix socket"):
        refuse_sockets(seen(tree), [str(tree / "a" / "b" / "s")])


def test_a_listed_socket_elsewhere_is_not_the_workspaces_business(tree: Path) -> None:
    assert refuse_sockets(seen(tree / "a" / "b" / "none"), [str(tree / "a" / "b" / "s")]) == []
