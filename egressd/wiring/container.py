"""The namespace wiring in a container that runs already, made without a network: its network namespace is wired from outside.

What the container has is a loopback and nothing else, so there is nothing that rules would have to close: as in a namespace of
egressd's own making it holds by having no uplink. Everything else of it (files, processes, users) is its engine's business.

It must stay so. A process of power in its network, or a second device, ends the sandbox when it is seen; what a second device
could carry stays refused then by the rules, which are left behind in that one case.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, cast

import egressd
from egressd.wiring import messages, occupants, ruleset, target
from egressd.wiring.command import readable
from egressd.wiring.errors import WiringError
from egressd.wiring.namespace import DnsProbe, Kind, Listener
from egressd.wiring.occupants import Place
from egressd.wiring.programs import PATH
from egressd.wiring.readings import Readings
from egressd.wiring.target import Target

# As the maker of a namespace is started; see there.
_START: Final = "import sys; sys.path.append(sys.argv[2]); from egressd.wiring.entrant import main; main(int(sys.argv[1]))"
_UNDO_SECONDS: Final = 10.0
LOOK: Final = 2.0
"""Seconds between two looks at who is in the container's network."""


class Container:
    """A wired container. `listeners` are the caller's until `destroy`; `notes` are for the operator."""

    def __init__(self, found: Target, nflog_group: int = ruleset.NFLOG_GROUP) -> None:
        """`found` is this object's from here on. Nothing is changed yet."""
        self.target = found
        self.listeners: tuple[Listener, ...] = ()
        self.notes: tuple[str, ...] = ()
        self._group = nflog_group
        self._before: dict[str, Any] | None = None
        self._devices: frozenset[str] = frozenset()
        self._suspects: frozenset[int] = frozenset()
        self._halted = False
        self._ending = asyncio.Lock()
        self._ended: asyncio.Future[int] | None = None

    @classmethod
    async def make(
        cls,
        pid: int | None = None,
        netns: str | None = None,
        *,
        timeout: float = 10.0,  # noqa: ASYNC109 - its end is a WiringError
    ) -> Self:
        """Wire a container's network: that of a process, or the one at a path. The rules have been read back.

        Raises ValueError for a container that cannot be a sandbox, WiringError where it cannot be wired; nothing stays behind.
        """
        if os.geteuid() != 0:
            raise WiringError("attach", "only root can enter a container's network", "run egressd as root")
        made = cls(target.find(pid, netns))
        try:
            await made._wire(timeout)
            why = await asyncio.to_thread(target.unfit, made.target)  # once more: nobody came in meanwhile
            if why is None and not made.target.lives():
                why = "it has ended"
            if why is not None:
                raise ValueError(f"{made.target}: {why}")
        except BaseException:
            await asyncio.shield(made.destroy())
            raise
        return made

    @property
    def place(self) -> Place:
        """Which network namespace it is, as in `occupants`."""
        return self.target.place

    async def probe_dns(
        self,
        name: str,
        *,
        server: str = ruleset.RESOLVER,
        port: int = 53,
        tcp: bool = False,
        timeout: float = 3.0,  # noqa: ASYNC109 - a limit for the look-up in another process, not for this coroutine
    ) -> DnsProbe:
        """Ask for a name's A records from inside."""
        request = {"op": "dns", "name": name, "server": server, "port": port, "tcp": tcp, "timeout": timeout}
        answer, _ = await self._inside(request, timeout + 5.0)
        return DnsProbe(answer["rcode"], tuple(answer["addresses"]), answer["error"])

    async def missing_rules(self) -> tuple[str, ...]:
        """How the packet rules in force differ from those wanted, read back now; empty means not at all."""
        return await self._readings().missing_rules()

    async def counted(self) -> ruleset.Counted | None:
        """What the kernel counted at the packet rules so far; None where a rule that counts is gone."""
        return await self._readings().counted()

    def trouble(self, census: Mapping[Place, list[int]]) -> str | None:
        """Say why it is no sandbox any more: it has ended, somebody of power came in, or a device. None while all is well.

        `census` is `occupants.census()` of now.
        """
        if not self.target.lives():
            return "the container has ended"
        members = census.get(self.place, [])
        held = occupants.powerful(self.target.net, members)
        stay = [pid for pid in held if pid in self._suspects]
        if stay:
            return f"somebody came in who may change the network: {held[stay[0]]}"
        self._suspects = frozenset(
            held
        )  # an engine's own process is powerful for a moment, when it starts another command
        for pid in members:
            with contextlib.suppress(OSError):  # it has ended; the next one tells
                more = (occupants.devices(pid) - self._devices) | (occupants.routed(pid) - {"lo"})
                return f"it was given a network of its own: {', '.join(sorted(more))}" if more else None
        return None

    async def launch(self, command: Sequence[str] = ()) -> int:  # noqa: ARG002 -- as of a namespace: the container's runs already
        """Wait until the container ends (0), or a signal ends us (128 + its number).

        Raises WiringError where it is no sandbox any more.
        """
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self.signal, number)
        looking = loop.create_task(self.watched())
        try:
            either: tuple[asyncio.Future[Any], ...] = (self._ended, looking)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                return self._ended.result()
            why = looking.result()
            if self.target.lives():
                raise WiringError(str(self.target), why)
            return 0
        finally:
            looking.cancel()
            for number in numbers:
                loop.remove_signal_handler(number)

    def signal(self, number: int) -> None:
        """End the wait of `launch`."""
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(128 + number)

    async def watched(self) -> str:
        """Return why it is no sandbox any more, when it is not: its end at once, the rest within LOOK seconds."""
        gone = self.gone()
        while not gone.done():
            await asyncio.wait({gone}, timeout=LOOK)
            census = await asyncio.to_thread(occupants.census)
            if (why := self.trouble(census)) is not None:
                gone.cancel()
                return why
        return "the container has ended"

    def gone(self) -> asyncio.Future[None]:
        """Return what is done when the pinned process ends; never, where only a path is known: `trouble` sees that."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if self.target.process is not None:
            process = os.dup(self.target.process)
            loop.add_reader(process, _done, future)

            def close(_: object) -> None:
                loop.remove_reader(process)
                os.close(process)

            future.add_done_callback(close)
        return future

    async def end(self) -> None:
        """Have nothing new sent from now on: what the kernel has counted by then is all. Raises WiringError."""
        async with self._ending:
            if self._before is not None and not self._halted:
                self._halted = True
                await self._inside({"op": "halt"}, _UNDO_SECONDS)

    async def destroy(self) -> None:
        """Take everything away and let go of the container; may be called again. Raises WiringError where something stays."""
        async with self._ending:
            for listener in self.listeners:
                listener.socket.close()
            before, self._before = self._before, None
            try:
                if before is not None:
                    await self._undo(before)
            finally:
                self.target.close()

    async def _undo(self, before: dict[str, Any]) -> None:
        answer, _ = await self._inside({"op": "undo", "before": before}, _UNDO_SECONDS)
        if answer["left"] is not None:
            raise WiringError(
                str(self.target),
                f"{answer['left']}, so that its packet rules are left, and it is closed",
                "take that network away, or end the container",
            )

    async def _wire(self, seconds: float) -> None:
        if (why := await asyncio.to_thread(target.unfit, self.target)) is not None:
            raise ValueError(f"{self.target}: {why}")
        self._before = {}  # from here on something may have been changed
        try:
            answer, descriptors = await self._inside({"op": "wire", "nflog_group": self._group}, seconds)
        except WiringError as error:
            if error.command != "entrant":  # it has said why, and left nothing
                self._before = None
            raise
        if "unfit" in answer:
            self._before = None
            raise ValueError(
                f"{self.target}: {answer['unfit']}; make the container without one (--network none)"
            )
        self._before = answer["before"]
        sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        self.listeners = tuple(
            Listener(cast(Kind, entry["kind"]), entry["family"], each)
            for entry, each in zip(answer["listeners"], sockets, strict=True)
        )
        for each in sockets:
            each.setblocking(False)
        members = (await asyncio.to_thread(occupants.census)).get(self.place, [])
        for pid in members:
            with contextlib.suppress(OSError):
                self._devices |= occupants.devices(pid)

    def _readings(self) -> Readings:
        if self.target.net < 0:
            raise WiringError("iptables-save", "the sandbox is gone")
        return Readings(self.target.net, None, self._group)

    async def _inside(self, request: dict[str, Any], seconds: float) -> tuple[dict[str, Any], list[int]]:
        return await inside(self.target.net, request, seconds)


async def inside(net: int, request: dict[str, Any], seconds: float) -> tuple[dict[str, Any], list[int]]:
    """Have a process enter a network namespace and do one thing there (`entrant`): its answer, and descriptors.

    Raises WiringError.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    said = os.memfd_create("entrant", os.MFD_CLOEXEC)
    process = None
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-c", _START, str(theirs.fileno()),
                str(Path(egressd.__file__).parent.parent),
                pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                stderr=said, cwd="/", env={"PATH": PATH, "LC_ALL": "C.UTF-8"},
            )  # fmt: skip
        messages.send(ours, request, [net])
        async with asyncio.timeout(seconds):
            await readable(ours.fileno())
        answer, descriptors = messages.receive(ours)
    except (EOFError, ConnectionError) as error:
        words = os.pread(said, 8000, 0).decode(errors="replace")
        raise WiringError("entrant", words or "ended without a word") from error
    except TimeoutError as error:
        raise WiringError("entrant", f"not done after {seconds:g} s") from error
    finally:
        os.close(said)
        ours.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if isinstance(answer.get("error"), dict):
        raise WiringError(**answer["error"])
    return answer, descriptors


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def release(found: Target) -> None:
    """Take away what a killed egressd left in a network namespace, and nothing of others; raises WiringError."""
    answer, _ = await inside(found.net, {"op": "sweep", "nflog_group": ruleset.NFLOG_GROUP}, _UNDO_SECONDS)
    if answer["left"] is not None:
        raise WiringError(str(found), f"its packet rules are left, and it is closed: {answer['left']}")
