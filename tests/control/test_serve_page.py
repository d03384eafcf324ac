"""docs/serve.md is true: every operation of the API and every key of the daemon is there, and the unit starts what it says."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

from egressd.control.api_schema import openapi
from egressd.control.config_file import ServeSection

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/serve.md").read_text(encoding="utf-8")


def test_the_table_of_the_api_is_the_api() -> None:
    shown = set(re.findall(r"^\| `(GET|POST|DELETE) (\S+)` \|", PAGE, re.MULTILINE))
    there = {
        (method.upper(), path)
        for path, operations in openapi()["paths"].items()
        for method in operations
        if method != "parameters"
    }
    assert shown == there


def test_every_key_of_the_daemon_is_shown() -> None:
    for key in ServeSection.model_fields:
        assert re.search(rf"^  {key}:", PAGE, re.MULTILINE), key


def test_the_unit_starts_the_daemon_and_gives_a_drain_its_time() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # systemd's keys have capitals
    unit.read(ROOT / "deploy/systemd/egressd.service", encoding="utf-8")
    service = unit["Service"]
    assert service["ExecStart"].split()[1:] == ["serve"]
    assert service["Type"] == "notify-reload"  # SIGHUP, RELOADING and READY
    assert service["RestartPreventExitStatus"] == "2"
    assert float(service["TimeoutStopSec"]) > ServeSection().drain_timeout + 10
