"""What a record costs control: processor time to admit, encode, chain and write it, in batches as workers send them.

    python -m bench.journal [RECORDS]

The journal is a file in a folder of its own, kept as by default: chained, its end noted, signed every thousand lines.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from egressd.journal.record import Record, new_id
from egressd.journal.rotation import Terms
from egressd.journal.verification import Verification
from egressd.journal.writer import Journal

SANDBOX = "sbx-5d1f0c9ab2e47a36c8d0"
BATCHES = (1, 5, 20)


def a_record(number: int) -> dict[str, Any]:
    """Return a denied request, with everything that one usually has."""
    attempt = new_id()
    return Record(
        event="decision",
        sandbox=SANDBOX,
        attempt_id=attempt,
        root_id=attempt,
        layer="request",
        channel="transparent",
        verdict="deny",
        reason="method_not_allowed",
        rule="pypi",
        place="profiles/coding-agent.yaml:10",
        treatment="inspect",
        profile="coding-agent",
        policy="a81d5c0b7e42f96d",
        labels={"task": "4711"},
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        host="pypi.org",
        address="198.18.1.0",
        port=443,
        scheme="https",
        sni="pypi.org",
        alpn="http/1.1",
        method="POST",
        path=f"/simple/{number}/",
        query="page=<2>",
        status=403,
    ).as_dict()


def main(records: int) -> None:
    """Print a line for each size of a batch, and one for the verification of what was written."""
    all_of_them = [a_record(number) for number in range(records)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for size in BATCHES:
            path = folder / f"{size}.jsonl"
            journal = Journal(path, state=folder / "state", terms=Terms(max_size=1 << 30))
            began = time.process_time()
            for at in range(0, records, size):
                journal.append(all_of_them[at : at + size], allowed_sandboxes={SANDBOX})
            taken = time.process_time() - began
            journal.close()
            each, long = taken / records * 1e6, path.stat().st_size / records
            print(
                f"batches of {size:2}: {each:5.1f} µs a record, {records / taken:7,.0f}/s, {long:.0f} bytes"
            )
        began = time.process_time()
        walk = Verification({})
        with path.open("rb") as file:
            for line in file:
                walk.feed(line[:-1], "-")
        print(f"verify: {walk.outcome.lines / (time.process_time() - began):,.0f} lines/s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20_000)
