"""`python -m tests.clients`: tries every client behind egressd and writes docs/clients.md."""

from __future__ import annotations

import argparse
import sys
import time

from tests.clients import page
from tests.clients.cache import Cache
from tests.clients.catalogue import CLIENTS
from tests.clients.ground import ROOT, Ground, Outcome


def main() -> int:
    """Returns 0 when every allowed use worked and every denied use was refused, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="clients", description=__doc__)
    parser.add_argument("--only", action="append", help="a client's name; the page is then not written")
    parser.add_argument("--no-install", action="store_true", help="with what is here")
    given = parser.parse_args()
    cache = Cache()
    begun = time.monotonic()
    if not given.no_install:
        for problem in cache.install():
            say(f"not installed: {problem}")
        cache = Cache()
    say(f"installed ({time.monotonic() - begun:.0f} s)")
    outcomes: list[Outcome] = []
    skipped: dict[str, str] = {}
    with Ground(cache) as ground:
        for client in CLIENTS:
            if given.only and client.name not in given.only:
                continue
            lacks = ground.lacks(client)
            if lacks:
                skipped[client.name] = lacks
                say(f"{client.name:16} skipped: {lacks}")
                continue
            outcome = ground.measure(client)
            outcomes.append(outcome)
            say(page.line(outcome))
            if given.only:
                say(page.details(outcome))
    say(f"{len(outcomes)} clients in {time.monotonic() - begun:.0f} s")
    if not given.only:
        (ROOT / "docs/clients.md").write_text(page.render(outcomes, skipped), encoding="utf-8")
    return 0 if all(outcome.works and outcome.refused for outcome in outcomes) else 1


def say(text: str) -> None:
    """One line of progress."""
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
