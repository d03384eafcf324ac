"""egressd with the explicit wiring, for the tests alone: control, a worker, listeners and sandboxes as a line of JSON asks for.

`explicit_daemon.py CONFIG SPEC`: prints one line of JSON with the bundle to trust and each sandbox's id and token once all is
served, then does what each line of its input says (`revoke NAME`, `kill` and `roll` for the worker) and answers `done`, and
ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from egressd.control.ca import load_or_create
from egressd.control.config import Config, load_config
from egressd.control.sandboxes import SandboxListener, SandboxState, new_sandbox_id
from egressd.control.sources import ProxyToken, SharedListeners
from egressd.control.supervisor import Supervisor
from egressd.control.trust import build_trust
from egressd.journal.writer import Journal
from egressd.rulefiles.load import Rules, load_rules
from egressd.wiring.explicit import ExplicitSpec, listen


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def listeners(wanted: dict[str, Any]) -> tuple[SandboxListener, ...]:
    spec = ExplicitSpec(
        tuple(wanted["addresses"]),
        http=wanted.get("http"),
        socks=wanted.get("socks"),
        dns=wanted.get("dns"),
        direct={int(meant): port for meant, port in wanted.get("direct", {}).items()},
        hops=tuple(wanted.get("hops", ())),
    )
    return tuple(
        SandboxListener(each.kind, each.family, each.socket, each.port, each.hops) for each in listen(spec)
    )


async def serve(config: Config, spec: dict[str, Any]) -> None:
    rules = load_rules(config.rules)
    assert isinstance(rules, Rules), rules
    authority = load_or_create(config.ca, time.time())
    trust = build_trust(config.ca.trust, authority.pem)
    journal = Journal(config.journal)
    supervisor = Supervisor(config.settings(), authority, journal)
    await supervisor.start()
    if "shared" in spec:
        await supervisor.share(SharedListeners("shared", listeners(spec["shared"])))
    made: dict[str, dict[str, str]] = {}
    for name, wanted in spec["sandboxes"].items():
        token = ProxyToken.new()
        state = SandboxState(
            new_sandbox_id(),
            rules.effective("lab"),
            listeners(wanted["listeners"]) if "listeners" in wanted else (),
            token=token.digest,
            source=wanted.get("source"),
            answers="self",
        )
        await supervisor.add(state)
        made[name] = {"id": state.id, "token": token.text}
    say(json.dumps({"bundle": str(trust.bundle), "sandboxes": made}))
    try:
        await follow(supervisor, made)
    finally:
        await supervisor.stop()
        journal.close()


async def follow(supervisor: Supervisor, made: dict[str, dict[str, str]]) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := (await reader.readline()).decode().split():
        if line[0] == "revoke":
            await supervisor.remove(made[line[1]]["id"])
        elif line[0] == "roll":
            await supervisor.roll(10.0)
        else:
            before = supervisor.worker_pid
            assert before is not None
            os.kill(before, signal.SIGKILL)
            async with asyncio.timeout(20):
                while supervisor.worker_pid in (None, before):  # noqa: ASYNC110 -- it tells nobody
                    await asyncio.sleep(0.02)
        say("done")


if __name__ == "__main__":
    asyncio.run(serve(load_config({}, {}, file=Path(sys.argv[1])), json.loads(sys.argv[2])))
