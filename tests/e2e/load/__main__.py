"""A load of mixed attempts, made inside a sandbox: whatever an agent's tools might send, whole, wrong and broken off.

It needs nothing but a Python and counts for itself what it sends. For each line of its input, {"attempts", "parallel", "seed"},
it makes that many attempts and answers with one line: what was sent so far, and every HTTP request with what became of it.
An attempt is a connection, a DNS datagram, another packet, or an HTTP request on a connection.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from contextlib import suppress

from .books import Load
from .kinds import KINDS, WEIGHTS
from .wire import UNANSWERED


def run(load: Load, *, attempts: int, parallel: int, seed: int) -> None:
    """Make at least so many attempts, at most so many at once."""
    until = load.total() + attempts
    chance = random.Random(seed)
    picks = iter(lambda: (chance.choices(KINDS, WEIGHTS)[0], chance.random()), None)

    def work() -> None:
        while True:
            with load.lock:
                if load.total() >= until:
                    return
                kind, own = next(picks)
                load.kinds[kind.__name__] += 1
            with suppress(*UNANSWERED):
                kind(load, random.Random(own))

    threads = [threading.Thread(target=work) for _ in range(parallel)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    """Serve the input to its end, or to an empty line."""
    load = Load(sys.argv[1])
    for line in sys.stdin:
        if not line.strip():
            return
        run(load, **json.loads(line))
        books = {"sent": load.sent, "total": load.total(), "kinds": load.kinds, "requests": load.requests}
        sys.stdout.write(json.dumps(books) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
