"""One lab and one egressd installation for each module, as root and rootless."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from egressd.lab import Lab, LabError
from egressd.lab.stand import Stand

HERE = Path(__file__).parent
SHIPPED = HERE.parents[1] / "rules"
WAYS = [pytest.param(False, id="as root", marks=pytest.mark.root), pytest.param(True, id="rootless")]
RULES = """schema: 1
profile: lab
owner: e2e
allow:
  - service: pypi
  - service: github-clone
    with: {repos: ["acme/*"]}
  - id: api
    hosts: [api.lab-origin.com]
    requests: ["GET,HEAD /**", "POST /upload", "POST /echo", "POST /early"]
  - id: api-plain
    hosts: [www.lab-origin.com]
    schemes: [http]
  - id: pinned
    hosts: [api.anthropic.com]
    treatment: tunnel
  - id: raw
    hosts: [deb.debian.org]
    treatment: relay
    ports: [22]
  - id: hostile-names
    hosts: ["*.lab-origin.com"]
  - id: registry
    hosts: [registry.npmjs.org]
    requests: ["GET /open/**"]
deny:
  - id: no-paste
    hosts: [pastebin.com]
    because: known sink
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what would be tried rootless only to see the same again.

    Modules that are of what root and others do differently say `BOTH_WAYS`; `EVERY_WAY=1 make test` tries all twice.
    """
    needless = [item for item in items if _needless(item)]
    if needless:
        config.hook.pytest_deselected(items=needless)
        items[:] = [item for item in items if not _needless(item)]


def _needless(item: pytest.Item) -> bool:
    if item.path.parent != HERE or os.geteuid() != 0 or os.environ.get("EVERY_WAY"):
        return False
    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    wanted = item.get_closest_marker("soak") or getattr(getattr(item, "module", None), "BOTH_WAYS", False)
    return given.get("shared_lab") is True and not wanted


def build(rootless: bool) -> Lab:
    """A lab; skips where this user may not make user namespaces."""
    try:
        return Lab.build(rootless=rootless)
    except LabError as error:
        if os.geteuid() != 0 and "CLONE_NEWUSER" in str(error):
            pytest.skip(f"this kernel lets no unprivileged user make a user namespace: {error}")
        raise


@pytest.fixture(scope="module", params=WAYS)
def shared_lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A lab for the whole module."""
    with build(request.param) as lab:
        yield lab


@pytest.fixture
def stand(shared_lab: Lab) -> Iterator[Stand]:
    """A fresh installation in the module's lab, whose records are empty."""
    shared_lab.forget()
    with Stand(shared_lab, RULES, shipped=SHIPPED) as stand:
        yield stand


def until(condition: Callable[[], object], seconds: float = 30.0, what: str = "the condition") -> None:
    """Wait for a condition; fails when it does not hold in time, which is no promise and never short: machines are busy."""
    seconds = max(seconds, 30.0)
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"{what} did not hold within {seconds:g} s")
        time.sleep(0.02)
