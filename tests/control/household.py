"""A roster over a supervisor that carries nothing: what the daemon does around its workers, without any."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from egressd.control.approvals.office import Office
from egressd.control.archive import Archive
from egressd.control.estate import Estate
from egressd.control.lending import Lending
from egressd.control.rollback import RolledBack, go_back
from egressd.control.roster import Roster
from egressd.control.sandboxes import SandboxState
from egressd.control.sources import Sources
from egressd.control.supervisor import Supervisor, WorkerFailed
from egressd.control.surroundings import BadInput
from egressd.control.wirings import Order, Plain, Wired, Wiring, WiringName
from egressd.credentials.broker import Broker
from egressd.policy.credential import CredentialsFile
from egressd.policy.effective import EffectivePolicy
from egressd.rulefiles.load import Rules, load_rules, load_source
from egressd.wiring.ruleset import Counted

NO_CREDENTIALS = CredentialsFile.model_construct(schema_version=1, credentials={})
ORGANISATION = "schema: 1\nowner: tests\n"
PROFILE = "schema: 1\nprofile: {name}\nowner: tests\nmode: enforce\nallow:\n  - hosts: [{host}]\n"


def write_rules(folder: Path, **profiles: str) -> Path:
    """Make a rules folder in which each profile allows one host."""
    (folder / "profiles").mkdir(parents=True, exist_ok=True)
    (folder / "organisation.yaml").write_text(ORGANISATION)
    for name, host in profiles.items():
        (folder / "profiles" / f"{name}.yaml").write_text(PROFILE.format(name=name, host=host))
    return folder


def read(folder: Path) -> Rules:
    rules = load_rules(folder)
    assert isinstance(rules, Rules), rules
    return rules


class Carrier:
    """Stands for the supervisor. `fails` makes the next sandbox fail, `slow` holds every one up until it is set."""

    def __init__(self) -> None:
        self.carried: dict[str, SandboxState] = {}
        self.sources = Sources()
        self.records: list[dict[str, Any]] = []
        self.removed: list[tuple[str, bool]] = []
        self.adopted: list[set[str]] = []
        self.fails = False
        self.full = False
        """Set where the journal cannot be written."""
        self.stood: list[str] = []
        self.slow: asyncio.Event | None = None
        self.deaths = 0

    async def add(self, sandbox: SandboxState) -> None:
        if sandbox.source is not None and not self.sources.claim(sandbox.id, sandbox.source):
            raise ValueError(f"{sandbox.source} is the source of another sandbox")
        self.carried[sandbox.id] = sandbox
        if self.slow is not None:
            await self.slow.wait()
        await asyncio.sleep(0)
        if self.fails:
            raise WorkerFailed("the worker did not serve the sandbox")

    async def remove(self, sandbox: str, *, shutdown: bool = False) -> None:
        await asyncio.sleep(0)
        self.carried.pop(sandbox, None)
        self.sources.release(sandbox)
        self.removed.append((sandbox, shutdown))

    async def adopt(self, policies: Mapping[str, EffectivePolicy]) -> None:
        self.adopted.append(set(policies))

    def recall(self, leases: Sequence[str]) -> None:
        pass

    def recorded(self, sandbox: str) -> Mapping[str, int]:
        return {}

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        self.records.extend(records)

    def recorded_all(self, records: Sequence[dict[str, Any]]) -> bool:
        if not self.full:
            self.write(records)
        return not self.full

    def find(self, sandbox: str) -> SandboxState | None:
        return self.carried.get(sandbox)

    def stand(self, sandbox: str) -> None:
        self.stood.append(sandbox)

    def details(self, sandbox: str) -> list[str]:
        """What was recorded of a sandbox."""
        return [record["detail"] for record in self.records if record["sandbox"] == sandbox]


class Thing:
    """A wiring that notes what is done with it."""

    def __init__(self, name: WiringName = "explicit", traces: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._traces = traces or {}
        self.made: dict[str, Made] = {}
        self.swept: list[Mapping[str, str]] = []
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None

    async def begin(self) -> None:
        pass

    def traces(self, order: Order) -> Mapping[str, str]:
        return self._traces

    async def make(self, order: Order) -> Wired:
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.made[order.id] = Made(
            environment={"HTTPS_PROXY": f"http://{order.id}:s3cret@proxy"},
            token="ab" * 32,
            source=order.source,
        )
        return self.made[order.id]

    async def sweep(self, traces: Mapping[str, str]) -> None:
        if self.error is not None:
            raise self.error
        self.swept.append(traces)

    async def look(self) -> Sequence[str]:
        return ()

    async def end(self) -> None:
        pass


class Made(Plain):
    """What that wiring made."""

    closed = 0
    halted: str | None = None
    counts: Counted | None = None

    async def halt(self, why: str) -> None:
        self.halted = why

    async def close(self) -> Counted | None:
        self.closed += 1
        return self.counts


class House:
    """A roster, and what it stands on."""

    def __init__(self, folder: Path, *, most: int = 10, wirings: Collection[Wiring] | None = None) -> None:
        self.folder = folder
        self.rules = write_rules(folder / "rules", lab="api.example.com", other="www.example.org")
        self.carrier = Carrier()
        self.thing = Thing()
        self.estate = Estate(folder / "state")
        self.lending = Lending(Broker(NO_CREDENTIALS), NO_CREDENTIALS)
        self.roster = Roster(
            cast(Supervisor, self.carrier), self.estate, read(self.rules), NO_CREDENTIALS, self.lending,
            most=most, wirings=[self.thing] if wirings is None else wirings,
        )  # fmt: skip
        self.approvals = Office(source=lambda: self.roster.rules.source)
        self.approvals.attach_still(self.carrier)
        self.reloads: list[str] = []
        self.refuses: Exception | None = None

    async def reload(self) -> list[str]:
        """As the daemon's."""
        if self.refuses is not None:
            raise self.refuses
        return self.reloads

    @property
    def archive(self) -> Archive:
        """As the daemon's."""
        return Archive(self.folder / "state", self.rules)

    def kept(self, digest: str) -> Rules:
        """Rules that were kept, read."""
        rules = load_source(self.archive.read(digest))
        if isinstance(rules, Rules):
            return rules
        raise BadInput(str(rules))

    async def adopt(self, now: float, **profiles: str) -> str:
        """Put other rules in the folder and in force, and keep them; returns their digest."""
        rules = read(write_rules(self.rules, **profiles))
        await self.roster.adopt(rules, NO_CREDENTIALS)
        self.archive.keep(rules.source, lambda: map(rules.effective, rules.profiles), now)
        return rules.digest

    async def roll_back(self, wanted: str | None, by: str) -> RolledBack:
        """As the daemon's."""
        return await go_back(self.archive, self.roster, self.kept, wanted, by)

    def files(self) -> list[str]:
        """What of sandboxes lies in the state directory."""
        return sorted(path.name for path in (self.folder / "state/sandboxes").iterdir())


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0.005)
