"""Arenas: one for each module and way of denying names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from egressd.lab import Lab
from tests.bypass.arena import RULES, Arena, Row, arena
from tests.bypass.reload import adopt, in_force
from tests.e2e.conftest import WAYS, build, until


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what would be tried as root only to see the same again: any user can try it rootless."""
    needless = [item for item in items if _needless(item)]
    if needless:
        config.hook.pytest_deselected(items=needless)
        items[:] = [item for item in items if not _needless(item)]


def _needless(item: pytest.Item) -> bool:
    given = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    row = given.get("row")
    return isinstance(row, Row) and not row.wired and given.get("shared_lab") is False


@pytest.fixture(scope="module", params=WAYS)
def shared_lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A lab for the module, as root and rootless."""
    with build(request.param) as lab:
        yield lab


@pytest.fixture(scope="module")
def explaining(shared_lab: Lab) -> Iterator[Arena]:
    """Denied names lead to an explanation (the default)."""
    with arena(shared_lab) as made:
        yield made


@pytest.fixture(scope="module")
def nxdomain(shared_lab: Lab) -> Iterator[Arena]:
    """Denied names do not exist."""
    with arena(shared_lab, dns_more={"denied": "nxdomain"}) as made:
        yield made


@pytest.fixture(scope="module")
def once(request: pytest.FixtureRequest) -> Iterator[Arena]:
    """One arena, as root where this user is root, with what the module may have: `RULES`, `CREDENTIALS`, `SECRETS`, `prepare`.

    For attacks on what is above the wiring, which is the same code whoever started it.
    """
    module = request.module
    with build(os.geteuid() != 0) as lab:
        if hasattr(module, "prepare"):
            module.prepare(lab)
        with arena(
            lab,
            rules=getattr(module, "RULES", RULES),
            credentials=getattr(module, "CREDENTIALS", ""),
            secrets=getattr(module, "SECRETS", {}),
        ) as made:
            yield made


@pytest.fixture
def live(once: Arena) -> Iterator[Arena]:
    """Two sandboxes that live by the arena's rules; afterwards they do again, in files as they were."""
    stand = once.stand
    kept = stand.directory / "kept"
    shutil.copytree(stand.rules, kept)
    before = stand.records(event="policy")[-1:] or stand.records(event="sandbox")[-1:]
    digest = before[0]["policy"]
    yield once
    if stand.rules.is_symlink():
        stand.rules.unlink()
    shutil.rmtree(stand.rules, ignore_errors=True)
    kept.rename(stand.rules)
    until(lambda: in_force(stand) == {digest}, 8, "the rules as they were")


@pytest.fixture
def drilled(once: Arena) -> Iterator[Arena]:
    """Two sandboxes at work before a drill, and by the module's rules again after it."""
    rules = once.stand.profile.read_text()
    once.life_goes_on()
    once.lab.forget()
    yield once
    if once.stand.profile.read_text() != rules:
        adopt(once, rules)
