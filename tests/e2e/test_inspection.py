"""A site's own addon in `egressd run`: it refuses, it is out of sight, and nothing that a sandbox can write is ever one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from egressd.lab.lab import Lab
from egressd.lab.stand import Stand
from tests.e2e.conftest import RULES, SHIPPED

pytestmark = pytest.mark.e2e

EXAMPLE = SHIPPED.parent / "addons" / "example_inspection.py"
KEY = "AKIA" + "A" * 16


@pytest.fixture
def inspected(shared_lab: Lab) -> Iterator[Stand]:
    """An installation whose configuration names an addon beside it."""
    shared_lab.forget()
    with Stand(shared_lab, RULES, shipped=SHIPPED, more="inspect: {addons: [inspection.py]}\n") as stand:
        shutil.copy(EXAMPLE, stand.directory / "inspection.py")
        yield stand


def test_the_addon_is_asked_and_refuses(inspected: Stand) -> None:
    ran = inspected.run(
        [
            "sh",
            "-c",
            f"curl -sS -D - https://api.lab-origin.com/n; curl -sS 'https://api.lab-origin.com/n?k={KEY}'",
        ]
    )
    assert "x-inspected-by: no-keys" in ran.stdout
    assert "(reason denied_by_inspection)" in ran.stdout
    assert [request.target for request in inspected.lab.requests()] == ["/n"]
    assert KEY not in inspected.journal.read_text()
    [denied] = inspected.records(event="decision", reason="denied_by_inspection")
    assert (denied["rule"], denied["detail"]) == ("api", "by no-keys")


def test_the_addon_cannot_be_read_inside(inspected: Stand) -> None:
    ran = inspected.run(["sh", "-c", f"cat {inspected.directory}/inspection.py; echo done"])
    assert "LOOKS_LIKE_A_KEY" not in ran.stdout


@pytest.mark.parametrize(
    ("addon", "says"),
    [
        pytest.param("workspace/inspection.py", "the sandbox can write", id="in the workspace"),
        pytest.param("missing.py", "is no file", id="missing"),
        pytest.param("broken.py", "ZeroDivisionError", id="one that raises"),
    ],
)
def test_an_addon_that_cannot_be_trusted_or_loaded_starts_nothing(
    shared_lab: Lab, addon: str, says: str
) -> None:
    with Stand(shared_lab, RULES, shipped=SHIPPED, more=f"inspect: {{addons: [{addon}]}}\n") as stand:
        Path(stand.directory / "workspace" / "inspection.py").write_text(EXAMPLE.read_text())
        Path(stand.directory / "broken.py").write_text("1/0\n")
        ran = stand.run(["sh", "-c", "touch started"])
        assert ran.returncode == 125
        assert says in ran.stderr
        assert not (stand.workspace / "started").exists()
