"""One lab for each module of these tests, as root and inside a user namespace."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from egressd.lab import Lab, LabError

ways = [pytest.param(False, id="as root", marks=pytest.mark.root), pytest.param(True, id="rootless")]


def build(rootless: bool) -> Lab:
    """A lab; skips where this user may not make user namespaces, which root always may here."""
    try:
        return Lab.build(rootless=rootless)
    except LabError as error:
        if os.geteuid() != 0 and "CLONE_NEWUSER" in str(error):
            pytest.skip(f"this kernel lets no unprivileged user make a user namespace: {error}")
        raise


@pytest.fixture(scope="module", params=ways)
def shared(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A lab for the whole module."""
    with build(request.param) as lab:
        yield lab


@pytest.fixture
def lab(shared: Lab) -> Lab:
    """The module's lab with empty records."""
    shared.forget()
    return shared
