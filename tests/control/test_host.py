"""The host's own addresses, read from the kernel's tables."""

from __future__ import annotations

from pathlib import Path

from egressd.control.host import local_addresses


def test_loopback_is_always_among_them() -> None:
    assert "127.0.0.1" in local_addresses()


def test_both_tables_are_read_and_broadcasts_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / "fib_trie").write_text(
        "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n     |-- 11.0.0.2\n        /32 host LOCAL\n"
        "     |-- 11.0.0.255\n        /32 link BROADCAST\n"
    )
    (tmp_path / "if_inet6").write_text("2600001100000000000000000000000b 02 40 00 80     eth0\n")
    assert local_addresses(tmp_path) == ("11.0.0.2", "2600:11::b")


def test_a_host_without_tables_has_none(tmp_path: Path) -> None:
    assert local_addresses(tmp_path) == ()
