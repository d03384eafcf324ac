"""How long an investigator waits: a journal of many records is written, indexed, and asked with and without the index.

    python -m bench.log [RECORDS]

10,000,000 records are 7 GB in the folder for temporary files. Half of them are decisions on requests of fifty sandboxes to two
thousand hosts, one in ten denied, the other half their ends. What is asked is what an incident asks; every query runs as its own
process, as it does for a person, and its output is thrown away.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from egressd.journal.index import index_path
from egressd.journal.record import timestamp

BEGAN = 1_800_000_000.0
PAIR = (
    '{"time":"%s","schema":1,"seq":%d,"event":"decision","sandbox":"sbx-%020x","attempt_id":"%028x","root_id":"%028x",'
    '"layer":"request","channel":"transparent","verdict":"%s","reason":"%s","rule":"pypi","place":"profiles/coding-agent.yaml:10",'
    '"treatment":"inspect","profile":"coding-agent","policy":"a81d5c0b7e42f96d","labels":{"task":"%d"},"host":"%s","address":"198.18.1.0",'
    '"port":443,"scheme":"https","sni":"%s","method":"%s","path":"/simple/%d/","prev":"%064x"}\n'
    '{"time":"%s","schema":1,"seq":%d,"event":"end","sandbox":"sbx-%020x","attempt_id":"%028x","root_id":"%028x",'
    '"layer":"request","channel":"transparent","reason":"completed","treatment":"inspect","profile":"coding-agent",'
    '"policy":"a81d5c0b7e42f96d","labels":{"task":"%d"},"host":"%s","address":"198.18.1.0","port":443,"scheme":"https","method":"%s",'
    '"status":200,"upstream":"151.101.0.223","bytes_up":1874,"bytes_down":48211,"duration_ms":846.484,"prev":"%064x"}\n'
)
QUERIES = (
    ("sandbox:sbx-00000000000000000007", "verdict:deny", "method:POST"),
    ("host:*.zone7.example", "since:2027-01-15T08:00:00Z", "verdict:deny"),
    ("host:h1999.zone59.example", "--json"),
    ("--summary",),
    ("--summary", "verdict:deny"),
)


def write(path: Path, records: int) -> None:
    """Write the journal."""
    with path.open("w", encoding="ascii", buffering=1 << 20) as file:
        for number in range(records // 2):
            at = timestamp(BEGAN + number / 1000)
            box, host = number % 50, f"h{number * 7919 % 2000}.zone{number * 7919 % 2000 % 97}.example"
            verdict, why = ("deny", "not_allowed") if number % 10 == 0 else ("allow", "rule")
            method = "POST" if number % 3 == 0 else "GET"
            both = (
                at,
                2 * number + 1,
                box,
                number,
                number,
                verdict,
                why,
                box,
                host,
                host,
                method,
                number,
                number,
            )
            ends = (at, 2 * number + 2, box, number, number, box, host, method, number)
            file.write(PAIR % (*both, *ends))


def ask(path: Path, *words: str) -> str:
    """Return the seconds that one query takes, by the clock and of processor."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    argv = [sys.executable, "-m", "egressd", "log", str(path), *words]
    subprocess.run(argv, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"{time.perf_counter() - began:6.1f} s ({used:5.1f} s of processor)"


def main(records: int) -> None:
    """Print a line for each step."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "journal.jsonl"
        write(path, records)
        print(f"{records:,} records, {path.stat().st_size / 1e9:.2f} GB")
        made = ask(path, "--index", "verdict:ask")
        print(f"index made: {made}, {index_path(path).stat().st_size / 1e9:.2f} GB", flush=True)
        for words in QUERIES:
            by_index, by_reading = ask(path, "--index", *words), ask(path, "--no-index", *words)
            print(f"{by_index} by the index, {by_reading} without: {' '.join(words)}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)
