"""An HTTP/2 connection in memory: hyper-h2 plays the client and the origin, and says strictly what it thinks of us."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import TYPE_CHECKING, cast

import h2.events as said
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes

from egressd.gate.connection import Connection, Destination, Services
from egressd.gate.dns.synthetic import SyntheticNames
from egressd.gate.inspector.http2.engine import Http2Engine
from egressd.gate.inspector.upstream import Opened, OpenFailed
from egressd.gate.limits import Budget
from egressd.gate.sandbox import Sandbox
from egressd.gate.settings import Settings
from egressd.gate.tls.stream import ByteStream
from egressd.policy.attempt import Decision
from egressd.policy.compile import compile_policy
from egressd.policy.effective import EffectiveEntry, EffectivePolicy
from egressd.policy.reasons import Reason
from tests.gate.inspector.lab import HOST, NAME, Records, entry
from tests.gate.inspector.scene import VERIFYING, FakeStream

if TYPE_CHECKING:
    from egressd.gate.dialer import Dialer
    from egressd.gate.tls.leaves import Leaves

PUBLIC = IPv4Address("93.184.216.34")
OTHER = "other.test.example"

type Fields = list[tuple[bytes, bytes]]


def tls_entry(**changes: object) -> EffectiveEntry:
    return entry(**({"schemes": ("https",), "ports": (443,)} | changes))


@dataclass
class Answer:
    """What a peer has heard on one stream."""

    fields: dict[bytes, bytes] = field(default_factory=dict)
    interim: list[dict[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    trailers: dict[bytes, bytes] | None = None
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> int:
        return int(self.fields.get(b":status", b"0"))


class Peer:
    """hyper-h2 at the other end of one of the engine's streams; `heard` is by stream."""

    def __init__(
        self, stream: FakeStream, *, client: bool, lax: bool = False, window: int | None = None
    ) -> None:
        self.stream = stream
        self.h2 = H2Connection(
            H2Configuration(
                client_side=client,
                header_encoding=False,
                validate_outbound_headers=not lax,
                normalize_outbound_headers=not lax,
            )
        )
        if window is not None:
            self.h2.local_settings[SettingCodes.INITIAL_WINDOW_SIZE] = window
            self.h2.local_settings.acknowledge()
        self.h2.initiate_connection()
        self.heard: dict[int, Answer] = {}
        self.events: list[said.Event] = []
        self.goaway: said.ConnectionTerminated | None = None
        self.acknowledges = True
        self._read = 0
        self._next = 1

    def listen(self) -> None:
        """Read what the engine has written since."""
        data, self._read = self.stream.written[self._read :], len(self.stream.written)
        if not data:
            return
        for event in self.h2.receive_data(data):
            self._note(event)

    def _note(self, event: said.Event) -> None:
        self.events.append(event)
        if isinstance(event, said.ConnectionTerminated):
            self.goaway = event
        stream = getattr(event, "stream_id", None)
        if not stream:
            return
        answer = self.heard.setdefault(stream, Answer())
        if isinstance(event, said.RequestReceived | said.ResponseReceived):
            answer.fields = dict(event.headers)
        elif isinstance(event, said.InformationalResponseReceived):
            answer.interim.append(dict(event.headers))
        elif isinstance(event, said.TrailersReceived):
            answer.trailers = dict(event.headers)
        elif isinstance(event, said.DataReceived):
            answer.body += event.data
            if self.acknowledges and event.flow_controlled_length:
                self.h2.acknowledge_received_data(event.flow_controlled_length, stream)
        elif isinstance(event, said.StreamEnded):
            answer.ended = True
        elif isinstance(event, said.StreamReset):
            answer.reset = int(event.error_code)

    def told_to_go(self) -> bool:
        return self.goaway is not None

    def sent(self) -> bytes:
        return self.h2.data_to_send()

    # the client's words

    def asks(
        self,
        method: str = "GET",
        path: str = "/",
        more: Iterable[tuple[bytes, bytes]] = (),
        *,
        host: str = HOST,
        end: bool = True,
        fields: Fields | None = None,
    ) -> int:
        """Send the head of a request; returns its stream."""
        stream, self._next = self._next, self._next + 2
        pseudo = [(b":method", method.encode()), (b":scheme", b"https"), (b":authority", host.encode())]
        self.h2.send_headers(stream, fields or [*pseudo, (b":path", path.encode()), *more], end_stream=end)
        return stream


class Scene:
    """One connection that has agreed to HTTP/2, its client, and its origin once there is one."""

    def __init__(
        self,
        *entries: EffectiveEntry,
        opened: OpenFailed | None = None,
        settings: Settings | None = None,
        decision: Decision | None = None,
        client_window: int | None = None,
        lax: bool = False,
        context: ssl.SSLContext | None = VERIFYING,
    ) -> None:
        policy = compile_policy(EffectivePolicy(profile="lab", entries=entries or (tls_entry(),)))
        settings = settings or Settings()
        self.records = Records()
        self.sandbox = Sandbox("sb-1", policy, SyntheticNames(1), Budget(settings))
        services = Services(settings, self.records, cast("Dialer", None), cast("Leaves", None))
        self.connection = Connection(self.sandbox, services, "transparent", Destination(443, proved=NAME))
        self.connection.host, self.connection.tls, self.connection.sni = NAME, True, HOST
        self.connection.decision = decision or Decision("allow", Reason.RULE)
        self.client_stream, self.origin_stream = FakeStream(), FakeStream()
        self.client_stream.alpn = self.origin_stream.alpn = b"h2"
        self.opened = opened or Opened(
            cast(ByteStream, self.origin_stream), PUBLIC, "sb-1", HOST, 443, context
        )
        self.engine = Http2Engine(self.connection, cast(ByteStream, self.client_stream), self.opened)
        self.client = Peer(self.client_stream, client=True, window=client_window, lax=lax)
        self.origin = Peer(self.origin_stream, client=False, lax=lax)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Scene:
        self._task = asyncio.get_running_loop().create_task(self.engine.run())
        await self.settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.engine.cut(Reason.SHUTDOWN)
        assert self._task is not None
        await self._task
        assert not self.sandbox.live

    async def settle(self, turns: int = 50) -> None:
        """Carry what the peers have to say to the engine and back until nobody says anything more."""
        for _ in range(turns):
            before = len(self.client_stream.written), len(self.origin_stream.written)
            for peer in (self.client, self.origin):
                if data := peer.sent() if peer.stream.owner is not None else b"":
                    peer.stream.arrive(data)
            for _ in range(4):
                await asyncio.sleep(0)
            for peer in (self.client, self.origin):
                peer.listen()
            if before == (len(self.client_stream.written), len(self.origin_stream.written)):
                break

    async def ask(self, *args: object, **keywords: object) -> Answer:
        """Send a request, and return what the client has heard of it since."""
        stream = self.client.asks(*args, **keywords)  # type: ignore[arg-type]  # as `asks` has them
        await self.settle()
        return self.client.heard.setdefault(stream, Answer())

    async def answer(
        self, stream: int, status: int = 200, body: bytes = b"", more: Fields | None = None
    ) -> None:
        """The origin answers in full."""
        fields = [(b":status", str(status).encode()), *(more or [])]
        self.origin.h2.send_headers(stream, fields, end_stream=not body)
        if body:
            self.origin.h2.send_data(stream, body, end_stream=True)
        await self.settle()
