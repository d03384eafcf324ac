"""The real clients of docs/clients.md that are on this machine: each still does what the page says of it.

Nothing is installed here; `make clients` installs the others and writes the page.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clients import page
from tests.clients.cache import Cache
from tests.clients.catalogue import CLIENTS, Client
from tests.clients.ground import ROOT, Ground

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

ROWS = page.read((ROOT / "docs/clients.md").read_text(encoding="utf-8"))
QUICK = (
    "curl", "curl -f", "wget", "git", "git push", "pip (Debian's)", "npm", "Node fetch", "Java HttpClient", "apt (http)",
    "apt (https)", "Python urllib",
)  # fmt: skip
"""What machines with developers' tools have; together under half a minute."""


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    """A lab for all of them, as root where we are root."""
    with Ground(Cache()) as ground:
        yield ground


@pytest.mark.parametrize("client", [c for c in CLIENTS if c.name in QUICK], ids=lambda client: client.name)
def test_a_client_does_what_the_page_says(ground: Ground, client: Client) -> None:
    lacks = ground.lacks(client)
    if lacks:
        pytest.skip(lacks)
    row = ROWS[client.name]
    ground.lab.forget()
    outcome = ground.measure(client)
    told = (outcome.allowed.output, outcome.denied.output)
    assert outcome.works == row.works, told
    assert outcome.refused, told
    assert (outcome.denied.status, outcome.denied.readable) == (row.status, row.readable), told
    assert ground.lab.attacker_hits() == []
    assert outcome.denied.seconds < 10, "a refusal made it wait"


def test_every_allowed_use_works() -> None:
    assert {name for name, row in ROWS.items() if not row.works} == set()
