"""META rows: metadata endpoints and control planes."""

from __future__ import annotations

import pytest

from tests.bypass.arena import Arena, Row

pytestmark = pytest.mark.e2e

_403 = r"403 egressd: denied: metadata"
_METADATA = (("connection", "deny", "floor_metadata"), ("request", "deny", "floor_metadata"))
ROWS = [
    Row(
        "META-01",
        "say(shown(tcp('169.254.169.254', 80, get('/latest/meta-data/', '169.254.169.254'))))",
        wins="200 OK",
        sees=_403,
        records=_METADATA,
    ),
    Row(
        "META-02",
        "say(shown(tcp('fd00:ec2::254', 80, get('/latest/meta-data/', '[fd00:ec2::254]'))))",
        wins="200 OK",
        sees=_403,
        records=_METADATA,
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_metadata_stays_out_of_reach(explaining: Arena, row: Row) -> None:
    explaining.holds(row)
