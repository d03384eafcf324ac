"""What a verification takes from its caller."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from egressd.cli.verify_run import Unreadable, callers_sockets, read_policy
from egressd.control.config import load_config


def test_the_callers_sockets_are_those_that_his_variables_name(tmp_path: Path) -> None:
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(path))
        found = callers_sockets({
            "SSH_AUTH_SOCK": str(path),
            "DBUS_SESSION_BUS_ADDRESS": f"unix:path={path},guid=0",
            "DOCKER_HOST": f"unix://{path}",
            "DISPLAY": ":7.0",
            "HOME": str(tmp_path),
            "GONE": "/nonexistent/x.sock",
            "ODD": "=/\0",
        })  # fmt: skip
    assert found == [str(path)] * 3 + ["/tmp/.X11-unix/X7"]


def test_rules_that_cannot_be_read_and_profiles_that_are_not_there_are_told(tmp_path: Path) -> None:
    config = load_config({"rules": tmp_path / "none"}, {"HOME": "/home/a"})
    with pytest.raises(Unreadable, match="none"):
        read_policy(config, "a")
    shipped = load_config({"rules": Path(__file__).parents[2] / "rules"}, {"HOME": "/home/a"})
    with pytest.raises(Unreadable, match="there is no profile 'a'\nhint: profiles here: coding-agent, "):
        read_policy(shipped, "a")
    assert read_policy(shipped, "locked-down").profile == "locked-down"
