"""egressd with the gateway or the sidecar wiring, for the tests alone: the daemon's wirings, control and a worker.

`wired_daemon.py CONFIG SPEC`: SPEC is JSON, `{"gateway": IF}` or `{"sidecar": true}`. Prints one line of JSON with the bundle to
trust once all is served, then does what each line of its input says and answers with a line of JSON: `create NAME [source mac
port]`, `revoke NAME`, `problems`, `kill` for the worker. Ends with its input.
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
from egressd.control.config import load_config
from egressd.control.gateway import GatewayWiring
from egressd.control.sandboxes import SandboxState, new_sandbox_id
from egressd.control.sidecar import SidecarWiring
from egressd.control.supervisor import Supervisor
from egressd.control.trust import build_trust
from egressd.control.wirings import NotWired, Order, Wired
from egressd.journal.writer import Journal
from egressd.rulefiles.load import Rules, load_rules
from egressd.wiring.errors import WiringError
from egressd.wiring.inherited import taken


def say(said: Any) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


class Daemon:
    def __init__(self, config_file: Path, spec: dict[str, Any]) -> None:
        self.config = load_config({}, {}, file=config_file)
        rules = load_rules(self.config.rules)
        assert isinstance(rules, Rules), rules
        self.policy = rules.effective("lab")
        self.spec = spec
        self.made: dict[str, tuple[str, Wired]] = {}

    async def run(self) -> None:
        authority = load_or_create(self.config.ca, time.time())
        trust = build_trust(self.config.ca.trust, authority.pem)
        journal = Journal(self.config.journal)
        self.supervisor = Supervisor(self.config.settings(), authority, journal)
        await self.supervisor.start()
        self.wiring: GatewayWiring | SidecarWiring
        if "gateway" in self.spec:
            share, unshare = self.supervisor.share, self.supervisor.unshare
            self.wiring = GatewayWiring([self.spec["gateway"]], share, unshare)
        else:
            self.wiring = SidecarWiring(taken(os.environ))
        await self.wiring.begin()
        say({"bundle": str(trust.bundle)})
        try:
            await self.follow()
        finally:
            for name in tuple(self.made):
                await self.revoke(name)
            await self.supervisor.stop()
            await self.wiring.end()
            journal.close()

    async def follow(self) -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        while line := (await reader.readline()).decode().split():
            try:
                say(await self.act(line[0], line[1:]))
            except (NotWired, WiringError) as error:
                say({"error": str(error)})

    async def act(self, verb: str, words: list[str]) -> Any:
        match verb:
            case "create":
                return await self.create(*words)
            case "revoke":
                await self.revoke(words[0])
            case "problems":
                return list(await self.wiring.look())
            case "kill":
                before = self.supervisor.worker_pid
                assert before is not None
                os.kill(before, signal.SIGKILL)
                async with asyncio.timeout(20):
                    while self.supervisor.worker_pid in (None, before):  # noqa: ASYNC110 -- it tells nobody
                        await asyncio.sleep(0.02)
        return "done"

    async def create(
        self, name: str, source: str | None = None, mac: str | None = None, port: str | None = None
    ) -> str:
        order = Order(new_sandbox_id(), 1, "lab", source=source, mac=mac, port=port)
        wired = await self.wiring.make(order)
        state = SandboxState(
            order.id, self.policy, wired.listeners, source=wired.source, interface=wired.interface
        )
        await self.supervisor.add(state)
        self.made[name] = state.id, wired
        return state.id

    async def revoke(self, name: str) -> None:
        sandbox, wired = self.made.pop(name)
        await self.supervisor.remove(sandbox)
        await wired.close()


if __name__ == "__main__":
    asyncio.run(Daemon(Path(sys.argv[1]), json.loads(sys.argv[2])).run())
