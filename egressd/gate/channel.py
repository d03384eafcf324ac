"""The channel between control and one worker: fixed-schema, length-capped JSON datagrams, with descriptors beside them.

A worker parses hostile bytes and may fall to them, so control believes nothing here that the schema does not say: every
message is
one of the models below, at most `MESSAGE_LIMIT` bytes, on a SOCK_SEQPACKET pair (unix(7)) where a datagram is whole or not
there.
What is larger than a message travels as a sealed memfd (memfd_create(2), F_ADD_SEALS) whose descriptor comes with it.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import fcntl
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from egressd.gate.limits import Kind
from egressd.gate.settings import Settings

MESSAGE_LIMIT = 64 * 1024
"""Largest message in bytes, in both directions."""
DESCRIPTOR_LIMIT = 32
"""Most descriptors beside one message (the kernel's own limit is SCM_MAX_FD, 253)."""
PAYLOAD_LIMIT = 64 * 1024 * 1024
"""Largest sealed payload in bytes: a policy of 100,000 hosts takes about 12 MiB."""

_PEER_GONE = frozenset({errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN})

type ListenerKind = Literal["transparent", "explicit", "socks", "direct", "dns-udp", "dns-tcp", "nflog"]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Identity(_Message):
    """Under whom a worker runs once it has imported everything; None keeps the caller's uid in a user namespace of its own."""

    uid: int
    gid: int


class Configure(_Message):
    """Control → worker, first and once. Descriptor 0: the issuer (PEM certificate, key and chain).

    Descriptor 1, where there is one: the authorization (`user:password`) for the proxy in the settings.

    `certificate` is the authority's public certificate, PEM, for sandboxes that ask for it.
    """

    type: Literal["configure"] = "configure"
    worker: str
    settings: Settings
    identity: Identity | None = None
    own_addresses: tuple[str, ...] = ()
    certificate: str = ""


class ListenerSpec(_Message):
    """One listening socket: of a sandbox, or shared by many.

    `port` is what a `direct` one stands for, whatever it is bound to. `hops` are the networks (CIDR) whose connections
    begin with a PROXY protocol header, which says where they come from.
    """

    kind: ListenerKind
    family: Literal[4, 6, 0]
    port: int = Field(default=0, ge=0, le=65_535)
    hops: tuple[str, ...] = ()


class Serve(_Message):
    """Control → worker: carry this sandbox. Descriptors: policy, synthetic pairs, levels, then one per listener in order.

    `token` is the SHA-256 of its proxy token in hex, `source` the address that it is bound to: by these it is known at shared
    listeners. `answers` says what an allowed name leads to: an address of its own, or egressd's. The latter is `own`, or where
    that is empty the address that the query was sent to.
    """

    type: Literal["serve"] = "serve"
    sandbox: str
    labels: dict[str, str] = Field(default_factory=dict)
    traceparent: str | None = None
    listeners: tuple[ListenerSpec, ...]
    token: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    source: str | None = None
    answers: Literal["synthetic", "self"] = "synthetic"
    own: tuple[str, ...] = ()


class Share(_Message):
    """Control → worker: serve these listeners for every sandbox that proves itself there. Descriptors: one per listener."""

    type: Literal["share"] = "share"
    share: str
    listeners: tuple[ListenerSpec, ...]


class Unshare(_Message):
    """Control → worker: close the listeners of this share; what came by them goes on."""

    type: Literal["unshare"] = "unshare"
    share: str


class Claimed(_Message):
    """Control → worker: the source address is kept as the sandbox's, or it is not (`ok` false): another has it."""

    type: Literal["claimed"] = "claimed"
    claim: int
    ok: bool


class Adopt(_Message):
    """Control → worker: these sandboxes live under a new policy from now on. Descriptor 0: the policy."""

    type: Literal["adopt"] = "adopt"
    sandboxes: tuple[str, ...]


class Renew(_Message):
    """Control → worker: sign leaves with this issuer from now on. Descriptor 0: the issuer."""

    type: Literal["renew"] = "renew"


class Revoke(_Message):
    """Control → worker: end this sandbox: every flow, every listener."""

    type: Literal["revoke"] = "revoke"
    sandbox: str
    reason: Literal["revoked", "shutdown"] = "revoked"


class Written(_Message):
    """Control → worker: the batch is in the journal, or it is not (`ok` false) and nothing that waited for it may go on."""

    type: Literal["written"] = "written"
    batch: int
    ok: bool


class Stored(_Message):
    """Control → worker: the synthetic pair is kept."""

    type: Literal["stored"] = "stored"
    pair: int


class Ready(_Message):
    """Worker → control: imported, isolated, waiting for sandboxes."""

    type: Literal["ready"] = "ready"


class Serving(_Message):
    """Worker → control: the sandbox's listeners are being served."""

    type: Literal["serving"] = "serving"
    sandbox: str


class Adopted(_Message):
    """Worker → control: new attempts of these sandboxes are judged by the policy of this digest."""

    type: Literal["adopted"] = "adopted"
    sandboxes: tuple[str, ...]
    policy: str


class Gone(_Message):
    """Worker → control: nothing of the sandbox is left here."""

    type: Literal["gone"] = "gone"
    sandbox: str


class Records(_Message):
    """Worker → control: journal records, to be acknowledged by `Written`."""

    type: Literal["records"] = "records"
    batch: int
    records: tuple[dict[str, Any], ...]


class Pair(_Message):
    """Worker → control: keep this name's synthetic address before it is answered."""

    type: Literal["pair"] = "pair"
    pair: int
    sandbox: str
    name: str
    address: str


class Sharing(_Message):
    """Worker → control: the listeners of this share are being served, or no longer are."""

    type: Literal["sharing"] = "sharing"
    share: str


class Claim(_Message):
    """Worker → control: keep this source address as the sandbox's before anything that came from there is let out."""

    type: Literal["claim"] = "claim"
    claim: int
    sandbox: str
    source: str


class Spent(_Message):
    """Worker → control: keep this level of a limit's bucket; what lies above it is spent after this was sent.

    `owner` is the entry's id, empty for the profile.
    """

    type: Literal["spent"] = "spent"
    sandbox: str
    owner: str
    kind: Kind
    tokens: FiniteFloat


type ToWorker = Configure | Serve | Share | Unshare | Adopt | Renew | Revoke | Written | Stored | Claimed
type ToControl = Ready | Serving | Sharing | Adopted | Gone | Records | Pair | Claim | Spent

TO_WORKER: TypeAdapter[ToWorker] = TypeAdapter(Annotated[ToWorker, Field(discriminator="type")])
TO_CONTROL: TypeAdapter[ToControl] = TypeAdapter(Annotated[ToControl, Field(discriminator="type")])


class ChannelBroken(Exception):
    """The other side is gone or sent what no message is."""


def sealed(payload: bytes) -> int:
    """Return a descriptor of a memfd that holds `payload` and can neither grow, shrink nor be written again."""
    fd = os.memfd_create("egressd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(payload)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


def unsealed(fd: int) -> bytes:
    """Return the payload of a sealed memfd and close it; raises ChannelBroken when it is larger than PAYLOAD_LIMIT."""
    try:
        size = os.fstat(fd).st_size
        if size > PAYLOAD_LIMIT:
            raise ChannelBroken(f"payload of {size} bytes")
        return os.pread(fd, size, 0)
    finally:
        os.close(fd)


def receive[M](sock: socket.socket, adapter: TypeAdapter[M]) -> tuple[M, list[int]]:
    """Return the next message and its descriptors (close-on-exec).

    Raises ChannelBroken, or BlockingIOError when there is none.
    """
    data, ancillary, flags, _ = sock.recvmsg(
        MESSAGE_LIMIT, socket.CMSG_SPACE(DESCRIPTOR_LIMIT * 4), socket.MSG_CMSG_CLOEXEC
    )
    fds: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            got = array.array("i")
            got.frombytes(payload[: len(payload) - len(payload) % got.itemsize])
            fds.extend(got)
    try:
        if not data:
            raise ChannelBroken("closed")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ChannelBroken("message too large")
        return adapter.validate_json(data), fds
    except (ChannelBroken, ValidationError) as broken:
        for fd in fds:
            os.close(fd)
        if isinstance(broken, ValidationError):  # its text would repeat what the other side sent
            raise ChannelBroken(f"{broken.error_count()} schema errors") from None
        raise


class Channel[In: BaseModel]:
    """One end of the pair on an event loop: messages out in order, messages in by callback.

    `on_message(message, descriptors)` owns the descriptors. `on_closed(reason)` is called once, when the other side is gone,
    sent something malformed, or `on_message` raised; the socket is closed before it is called.
    """

    def __init__(
        self,
        sock: socket.socket,
        adapter: TypeAdapter[Any],
        on_message: Callable[[In, list[int]], None],
        on_closed: Callable[[str], None],
    ) -> None:
        """Take over `sock`, a SOCK_SEQPACKET socket, and start reading."""
        self._sock = sock
        self._adapter = adapter
        self._on_message = on_message
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[bytes, list[int]]] = deque()
        self._open = True
        self._deaf = False  # the other side is gone and takes nothing more
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._readable)

    def send(self, message: BaseModel, descriptors: Sequence[int] = ()) -> None:
        """Queue a message; the descriptors are duplicated at once, so the caller keeps its own.

        Raises ChannelBroken, or OSError when they cannot be duplicated.
        """
        data = message.model_dump_json().encode()
        if not self._open or self._deaf:
            raise ChannelBroken("closed")
        if len(data) > MESSAGE_LIMIT:
            raise ChannelBroken(f"message of {len(data)} bytes")
        copies: list[int] = []
        try:
            copies.extend(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in descriptors)
        except OSError:  # out of descriptors: nothing is queued, and none of ours stays open
            for fd in copies:
                os.close(fd)
            raise
        self._queue.append((data, copies))
        if len(self._queue) == 1:
            self._flush()

    def close(self) -> None:
        """Close this end without calling `on_closed`."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        self._lose_queue()

    def finish(self) -> None:
        """Read what the other side said before its end, and close this one, without calling `on_closed`."""
        self._on_closed = _nothing
        while self._open and self._readable():
            pass
        self.close()

    def _lose_queue(self) -> None:
        for _, fds in self._queue:
            for fd in fds:
                os.close(fd)
        self._queue.clear()

    def _fail(self, reason: str) -> None:
        if self._open:
            self.close()
            self._on_closed(reason)

    def _flush(self) -> None:
        while self._queue and self._open:
            data, fds = self._queue[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                self._sock.sendmsg([data], rights)
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._sock.fileno(), self._flush)
                return
            except OSError as error:
                if error.errno == errno.ENOBUFS:
                    self._loop.call_later(0.01, self._flush)
                    return
                if error.errno in _PEER_GONE:
                    self._lose_queue()
                    self._loop.remove_writer(self._sock.fileno())
                    self._deaf = True  # what the other side said before its end is still read
                    return
                self._fail(os.strerror(error.errno or 0))
                return
            self._queue.popleft()
            for fd in fds:
                os.close(fd)
        if self._open:
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> bool:
        """Take what has come; returns whether there may be more."""
        for _ in range(64):
            if not self._open:
                return False
            try:
                message, fds = receive(self._sock, self._adapter)
            except (BlockingIOError, InterruptedError):
                return False
            except ConnectionResetError:  # told once, before what the other side sent and we have not read
                continue
            except (ChannelBroken, OSError) as error:
                self._fail(str(error) or type(error).__name__)
                return False
            try:
                self._on_message(message, fds)
            except Exception as error:  # noqa: BLE001 -- the two sides disagree: end the pair
                for fd in fds:
                    with contextlib.suppress(OSError):
                        os.close(fd)
                self._fail(f"{type(error).__name__}: {error}")
                return False
        return True


def _nothing(_reason: str) -> None:
    """Hear of nothing."""
