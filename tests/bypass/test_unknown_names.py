"""The rows of other files that begin with a denied name, once more where denied names do not exist (`dns.denied: nxdomain`).

There the way ends at the name: nobody is told why by the protocol that was meant, only by DNS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.bypass import test_allowed_destinations, test_credentials, test_engine, test_http, test_tls
from tests.bypass.arena import Arena, Row, arena
from tests.e2e.conftest import build

pytestmark = pytest.mark.e2e

RULES = test_credentials.RULES
_SEES = "Name or service not known|Could not resolve host"
_FILES = (
    (test_tls, ("TLS-03", "TLS-16")),
    (test_http, ("HTTP-14",)),
    (test_engine, ("ENG-03", "ENG-07", "ENG-09")),
    (test_credentials, ("CRED-06",)),
    (test_allowed_destinations, ("POL-01", "POL-02", "POL-03", "POL-04", "POL-06")),
)
_DENIED = (
    "'www.evil-lab.com'",
    "'mitm.it', 80",
    "//www.evil-lab.com",
    *(f"'{name}'" for name in test_allowed_destinations.LOOSE),
)


def unknown() -> Iterator[Row]:
    """The rows that look up a name that their rules deny, with what they come to here."""
    for module, ids in _FILES:
        for value in vars(module).values():
            rows = [row for row in value if isinstance(row, Row)] if isinstance(value, list) else []
            for row in rows:
                if row.id in ids and any(name in row.code for name in _DENIED) and "proxy(" not in row.code:
                    allowed = tuple(record for record in row.records if record[1] == "allow")
                    records = (*allowed, ("dns", "deny", "not_allowed"))
                    yield replace(row, sees=_SEES, records=records, shows={}, rule=None, decisions=None)


@pytest.fixture(scope="module")
def nowhere() -> Iterator[Arena]:
    """An arena in which denied names do not exist."""
    with build(os.geteuid() != 0) as lab:
        test_credentials.prepare(lab)
        test_allowed_destinations.prepare(lab)
        keys, secrets = test_credentials.CREDENTIALS, test_credentials.SECRETS
        with arena(
            lab, rules=RULES, dns_more={"denied": "nxdomain"}, credentials=keys, secrets=secrets
        ) as made:
            yield made


@pytest.mark.parametrize("row", list(unknown()), ids=str)
def test_a_denied_name_leads_nowhere(nowhere: Arena, row: Row) -> None:
    nowhere.holds(row)


def test_the_rows_are_found() -> None:
    found = [row.id for row in unknown()]
    assert len(found) >= 30
    assert {id_ for _, ids in _FILES for id_ in ids} == set(found)
