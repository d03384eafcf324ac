"""The namespace wiring as control uses it: make a sandbox without an uplink, prove it, run one command in it."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import egressd
from egressd.wiring import identity, messages, ruleset
from egressd.wiring import launch as launching
from egressd.wiring.command import FORWARDED, Command, readable
from egressd.wiring.errors import WiringError
from egressd.wiring.mounts import View
from egressd.wiring.programs import PATH
from egressd.wiring.readings import Readings
from egressd.wiring.spec import Bind, SandboxSpec
from egressd.wiring.terminal import Streams

__all__ = ["Bind", "DnsProbe", "Listener", "Namespace", "SandboxSpec", "TcpProbe", "WiringError"]

Kind = Literal["transparent", "explicit", "dns-udp", "dns-tcp", "nflog"]

# -S as well as -I: neither the caller's environment nor site-packages has a say in what the maker imports.
_START: Final = (
    "import gc, sys; gc.disable(); sys.path.append(sys.argv[2]); "
    "from egressd.wiring.maker import main; main(int(sys.argv[1]))"
)


@dataclass(frozen=True, slots=True)
class Listener:
    """One of egressd's sockets in the sandbox's network; `family` is 0 for the packet log."""

    kind: Kind
    family: int
    socket: socket.socket


@dataclass(frozen=True, slots=True)
class DnsProbe:
    """What a look-up inside the sandbox got: a response code, or an error where there was no answer."""

    rcode: int | None
    addresses: tuple[str, ...]
    error: str | None


@dataclass(frozen=True, slots=True)
class TcpProbe:
    """What a connection inside the sandbox got."""

    connected: bool
    received: bytes
    error: str | None


class Namespace:
    """A sandbox: its namespaces, egressd's sockets in them, and the one command it is made for.

    `listeners` stay open until destroy(): control owns them, workers get duplicates. `host_uid` is the command's uid as
    the host sees it. `notes` are for the operator.
    """

    def __init__(self, spec: SandboxSpec, paths: View, host_uid: int, *, changes_uid: bool) -> None:
        self._spec = spec
        self._paths = paths
        self.host_uid = host_uid
        self._changes_uid = changes_uid
        self.listeners: tuple[Listener, ...] = ()
        self.notes: tuple[str, ...] = ()
        self._spaces: list[int] = []
        self._maker: asyncio.subprocess.Process | None = None
        self._channel: socket.socket | None = None
        self._asking = asyncio.Lock()
        self._said = -1
        self._command: Command | None = None

    @classmethod
    async def make(cls, spec: SandboxSpec, *, timeout: float = 10.0) -> "Namespace":  # noqa: ASYNC109 - its end is a WiringError
        """Make and wire the namespaces; the rules have been read back. Raises WiringError, leaving nothing behind."""
        paths = await asyncio.to_thread(launching.view, spec)
        uid = identity.sandbox_uid(spec.uid)
        made = cls(spec, paths, os.getuid() if uid is None else uid, changes_uid=uid is not None)
        request = {
            "view": paths._asdict(),
            "uid": uid,
            "gid": uid,
            "nflog_group": spec.nflog_group,
        }
        try:
            async with asyncio.timeout(timeout):
                await made._start_maker()
                await made._receive_parts(request)
        except TimeoutError as error:
            await made.destroy()
            raise WiringError("maker", f"not ready after {timeout:g} s") from error
        except BaseException:
            await made.destroy()
            raise
        return made

    async def probe_dns(
        self,
        name: str,
        *,
        server: str = ruleset.RESOLVER,
        port: int = 53,
        tcp: bool = False,
        timeout: float = 3.0,  # noqa: ASYNC109 - a limit for the look-up in another process, not for this coroutine
    ) -> DnsProbe:
        """Ask for a name's A records from inside, before the command is launched."""
        request = {"op": "dns", "name": name, "server": server, "port": port, "tcp": tcp, "timeout": timeout}
        answer = await self._ask(request)
        return DnsProbe(answer["rcode"], tuple(answer["addresses"]), answer["error"])

    async def probe_tcp(
        self,
        host: str,
        port: int,
        *,
        send: bytes = b"",
        timeout: float = 3.0,  # noqa: ASYNC109 - as above
    ) -> TcpProbe:
        """Connect to a literal address from inside, before the command is launched, and read once."""
        text = send.decode("latin-1")
        answer = await self._ask({"op": "tcp", "host": host, "port": port, "send": text, "timeout": timeout})
        return TcpProbe(answer["connected"], answer["received"].encode("latin-1"), answer["error"])

    async def missing_rules(self) -> tuple[str, ...]:
        """How the packet rules in force differ from those wanted, read back now; empty means not at all."""
        return await self._readings().missing_rules()

    async def counted(self) -> ruleset.Counted | None:
        """What the kernel counted at the packet rules so far; None where a rule that counts is gone."""
        return await self._readings().counted()

    async def launch(
        self, command: Sequence[str], *, forward_signals: bool = True, stdio: tuple[int, int, int] = (0, 1, 2)
    ) -> int:
        """Run the command to its end; its exit status, 126 and 127 as env(1), 128 + N when signal N ended it.

        Once per namespace. Raises WiringError when it could not be started. When cancelled, everything inside is killed.
        """
        streams = await asyncio.to_thread(Streams, stdio)
        try:
            plan = await asyncio.to_thread(
                launching.plan, self._spec, self._paths, command, terminal=streams.controlling
            )
            self._command = await self._execute(plan, streams)
            streams.start()
            with _signals(self._command, streams, forward=forward_signals):
                return await self._command.wait()
        except WiringError as error:
            await self._kill()
            said = os.pread(self._said, 8000, 0).decode(errors="replace")
            raise (WiringError("maker", said) if said else error) from error
        except BaseException:
            await self._kill()
            raise
        finally:
            await asyncio.shield(asyncio.to_thread(streams.close))

    def signal(self, number: int) -> None:
        """Send a signal to the command; one that comes before the command has started waits for it."""
        if self._command is not None:
            self._command.signal(number)

    async def end(self) -> None:
        """End everything in the sandbox; what the kernel has counted by then is all that was ever sent."""
        await self._kill()

    async def destroy(self) -> None:
        """End everything in the sandbox and close every descriptor. May be called again."""
        await self._kill()
        for listener in self.listeners:
            listener.socket.close()
        self._close_channel()
        for descriptor in self._spaces:
            os.close(descriptor)
        self._spaces.clear()
        if self._said >= 0:
            os.close(self._said)
            self._said = -1

    async def _start_maker(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = ours
        ours.setblocking(False)
        self._said = os.memfd_create("maker", os.MFD_CLOEXEC)
        with theirs:
            self._maker = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", "-c", _START, str(theirs.fileno()),
                str(Path(egressd.__file__).parent.parent),
                pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                stderr=self._said, cwd="/", env={"PATH": PATH, "LC_ALL": "C.UTF-8"}, start_new_session=True,
            )  # fmt: skip

    async def _receive_parts(self, request: dict[str, Any]) -> None:
        self._send(request)
        message, descriptors = await self._receive()
        sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        self.listeners = tuple(
            Listener(cast(Kind, entry["kind"]), entry["family"], made)
            for entry, made in zip(message["listeners"], sockets, strict=True)
        )
        for made in sockets:
            made.setblocking(False)
        message, self._spaces = await self._receive()
        self.notes = tuple(message["notes"])

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _open_channel(self) -> socket.socket:
        if self._channel is None:
            raise WiringError("maker", "has ended or has become the command")
        return self._channel

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        async with self._asking:
            self._send(request)
            try:
                return (await self._receive())[0]
            except asyncio.CancelledError:
                self._close_channel()  # the answer that will come belongs to no later question
                raise

    def _send(self, request: messages.Message, descriptors: Sequence[int] = ()) -> None:
        # A maker that has ended may have said why: that is for the reader to find.
        with contextlib.suppress(ConnectionError):
            messages.send(self._open_channel(), request, descriptors)

    async def _receive(self) -> tuple[messages.Message, list[int]]:
        """The maker's next message. Raises WiringError if it is a failure, or if the maker has ended."""
        channel = self._open_channel()
        await readable(channel.fileno())
        try:
            message, descriptors = messages.receive(channel)
        except (EOFError, ConnectionError) as error:
            said = os.pread(self._said, 8000, 0).decode(errors="replace")
            raise WiringError("maker", said or "ended without a word") from error
        if "error" in message and isinstance(message["error"], dict):
            raise WiringError(**message["error"])
        return message, descriptors

    async def _execute(self, plan: launching.Plan, streams: Streams) -> Command:
        """Turn the maker into the command."""
        if self._maker is None:
            raise WiringError("maker", "was not started")
        report, reported = os.pipe()
        command = b"\0".join(os.fsencode(word) for word in plan.command)
        parts = [
            messages.sealed(content, "egressd")
            for content in (command, plan.arguments, plan.filter, *plan.files)
        ]
        descriptors = [*streams.child, parts[0], parts[1], reported, *parts[2:]]
        ignored = [int(getattr(signal, f"SIG{name}")) for name in launching.INTERACTIVE_SIGNALS]
        request = {
            "op": "exec",
            "controlling": streams.controlling,
            "ignored": ignored if streams.controlling else [],
        }
        try:
            async with self._asking:
                self._send(request, descriptors)
                await self._until_executed()
        except BaseException:
            os.close(report)
            raise
        finally:
            for descriptor in (reported, *parts):
                os.close(descriptor)
        return Command(self._maker, report)

    async def _until_executed(self) -> None:
        """The maker's end of the socket closes on exec: silence is success, a message is a failure."""
        channel = self._open_channel()
        await readable(channel.fileno())
        try:
            message, _ = messages.receive(channel)
        except (EOFError, ConnectionError):
            self._close_channel()
            return
        raise WiringError(**message["error"])

    def _readings(self) -> Readings:
        if not self._spaces:
            raise WiringError("iptables-save", "the sandbox is gone")
        user, net = self._spaces
        return Readings(net, None if self._changes_uid else user, self._spec.nflog_group)

    async def _kill(self) -> None:
        if self._maker is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._maker.kill()
        await self._maker.wait()
        if self._command is not None:
            await self._command.gone()


@contextlib.contextmanager
def _signals(command: Command, streams: Streams, *, forward: bool) -> Iterator[None]:
    """While the command runs, signals sent to us are meant for it. Afterwards they have no handler at all."""
    loop = asyncio.get_running_loop()
    if not forward:
        yield
        return
    for number in FORWARDED:
        loop.add_signal_handler(number, command.signal, number)
    loop.add_signal_handler(signal.SIGWINCH, streams.resize)
    try:
        yield
    finally:
        for number in (*FORWARDED, signal.SIGWINCH):
            loop.remove_signal_handler(number)
