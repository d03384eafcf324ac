"""Where things live: the table of the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from egressd.control.paths import Paths, default_paths

XDG = {
    "HOME": "/home/ann",
    "XDG_CONFIG_HOME": "/x/config",
    "XDG_DATA_HOME": "/x/data",
    "XDG_STATE_HOME": "/x/state",
    "XDG_RUNTIME_DIR": "/run/user/1000",
}


def texts(paths: Paths) -> list[str]:
    places = (paths.config, paths.rules, paths.credentials, paths.ca.ca, paths.ca.trust, paths.journal)
    return [str(path) for path in (*places, paths.state, paths.control_socket)]


@pytest.mark.parametrize(
    ("environ", "euid", "expected"),
    [
        pytest.param(
            XDG,
            0,
            [
                "/etc/egressd/egressd.yaml",
                "/etc/egressd/rules",
                "/etc/egressd/credentials.yaml",
                "/var/lib/egressd/ca",
                "/var/lib/egressd/trust",
                "/var/log/egressd/journal.jsonl",
                "/var/lib/egressd/state",
                "/run/egressd/control.sock",
            ],
            id="root has the system's places, whatever the environment says",
        ),
        pytest.param(
            XDG,
            1000,
            [
                "/x/config/egressd/egressd.yaml",
                "/x/config/egressd/rules",
                "/x/config/egressd/credentials.yaml",
                "/x/data/egressd/ca",
                "/x/data/egressd/trust",
                "/x/state/egressd/journal.jsonl",
                "/x/state/egressd",
                "/run/user/1000/egressd/control.sock",
            ],
            id="a user with every XDG variable",
        ),
        pytest.param(
            {"HOME": "/home/ann", "XDG_CONFIG_HOME": "relative", "XDG_STATE_HOME": ""},
            1000,
            [
                "/home/ann/.config/egressd/egressd.yaml",
                "/home/ann/.config/egressd/rules",
                "/home/ann/.config/egressd/credentials.yaml",
                "/home/ann/.local/share/egressd/ca",
                "/home/ann/.local/share/egressd/trust",
                "/home/ann/.local/state/egressd/journal.jsonl",
                "/home/ann/.local/state/egressd",
                "/home/ann/.local/state/egressd/control.sock",
            ],
            id="a user without them; a relative one does not count",
        ),
    ],
)
def test_the_table_of_the_contract(environ: dict[str, str], euid: int, expected: list[str]) -> None:
    assert texts(default_paths(environ, euid)) == expected


def test_a_uid_without_home_and_account_has_its_places_under_the_root() -> None:
    assert default_paths({}, 4_000_000_000).config == Path("/.config/egressd/egressd.yaml")
