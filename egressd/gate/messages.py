"""What control and a worker say to each other: one fixed schema a message, every field bounded by the message it is in.

How messages travel, and the descriptors beside them, is `gate.channel`'s.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter

from egressd.gate.account import Kind
from egressd.gate.settings import Settings

TARGET_LIMIT = 16 * 1024
"""Longest request target, in characters, that a credential can be asked for; the rules allow 8 KiB."""

PLEA_LIMIT = 2048
WHY_LIMIT = 500
"""Longest request that a sandbox asks for, and its longest words about it, in characters."""

ARRIVAL_LIMIT = 45_000
"""Bytes that may have been read of a connection that is handed to another worker: in base64 they fit into a message."""

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

    `root` names the authority that the issuer goes back to (a fingerprint), `certificate` is what its sandboxes trust: its
    public certificate, PEM, for those that ask for it.
    """

    type: Literal["configure"] = "configure"
    worker: str
    settings: Settings
    identity: Identity | None = None
    own_addresses: tuple[str, ...] = ()
    root: str = ""
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
    listeners, at those of the same `interface`. `answers` says what an allowed name leads to: an address of its own, or
    egressd's. The latter is `own`, or where that is empty the address that the query was sent to. `placeholders` are its
    dummies by credential. `root` is the authority that it trusts.
    """

    type: Literal["serve"] = "serve"
    sandbox: str
    labels: dict[str, str] = Field(default_factory=dict)
    traceparent: str | None = None
    listeners: tuple[ListenerSpec, ...]
    token: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    source: str | None = None
    interface: str = ""
    answers: Literal["synthetic", "self"] = "synthetic"
    own: tuple[str, ...] = ()
    placeholders: dict[str, str] = Field(default_factory=dict)
    root: str = ""


class Share(_Message):
    """Control → worker: serve these listeners for every sandbox that proves itself there. Descriptors: one per listener.

    They hear `interface` alone, if it is not empty: the same address means another sandbox at each interface.
    """

    type: Literal["share"] = "share"
    share: str
    interface: str = ""
    listeners: tuple[ListenerSpec, ...]


class Unshare(_Message):
    """Control → worker: close the listeners of this share; what came by them goes on."""

    type: Literal["unshare"] = "unshare"
    share: str


class Neighbour(_Message):
    """Control → worker: a sandbox that another worker carries, and that comes by shared listeners of this one.

    Answered by `Serving`. `token`, `source` and `interface` as in `Serve`.
    """

    type: Literal["neighbour"] = "neighbour"
    sandbox: str
    token: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    source: str | None = None
    interface: str = ""


class Departed(_Message):
    """Control → worker: there is no such neighbour any more. Answered by `Gone`."""

    type: Literal["departed"] = "departed"
    sandbox: str


class _Arrival(_Message):
    """A connection that has proved to be a sandbox's; the fields as in `door.entrance.Entrance`, `data` in base64."""

    sandbox: str = Field(max_length=128)
    way: Literal["explicit", "socks"]
    source: str = Field(max_length=64)
    data: str = Field(default="", max_length=-(-ARRIVAL_LIMIT // 3) * 4)
    greeted: bool = False


class Introduce(_Arrival):
    """Worker → control: a neighbour's connection, for the worker that carries it. Descriptor 0: the connection."""

    type: Literal["introduce"] = "introduce"
    introduction: int


class Introduced(_Message):
    """Control → worker: the neighbour's worker has the connection; or nobody has it, for this reason."""

    type: Literal["introduced"] = "introduced"
    introduction: int
    reason: Literal["revoked", "client_closed", "too_many_connections"] | None = None


class Welcome(_Arrival):
    """Control → worker: a connection of a sandbox of this worker, which another one accepted. Descriptor 0: the connection."""

    type: Literal["welcome"] = "welcome"


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
    """Control → worker: sign leaves of this root with this issuer from now on. Descriptor 0: the issuer.

    A root that is new here is that of sandboxes to come; `root` and `certificate` as in `Configure`.
    """

    type: Literal["renew"] = "renew"
    root: str = ""
    certificate: str = ""


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


class Lent(_Message):
    """Control → worker: the lease that a ticket asked for, descriptor 0 its JSON; or there is none (`ok` false)."""

    type: Literal["lent"] = "lent"
    ticket: int
    ok: bool


class Recall(_Message):
    """Control → worker: these leases and all of their series are taken back, for what is under way too."""

    type: Literal["recall"] = "recall"
    leases: tuple[str, ...]


class Drain(_Message):
    """Control → worker: leave the listeners to a successor, end what is open within `seconds`, then end."""

    type: Literal["drain"] = "drain"
    seconds: FiniteFloat = Field(ge=0)


class Stand(_Message):
    """Control → worker: how this sandbox's requests for access stand from now on. Descriptor 0: the `standing.Standing`."""

    type: Literal["stand"] = "stand"
    sandbox: str


class Petitioned(_Message):
    """Control → worker: what came of a `Petition` or a `Plea`: it waits as `approval`, was answered already, or why it is not put
    to people (`refused`, with `detail` of words that name nothing of other sandboxes)."""

    type: Literal["petitioned"] = "petitioned"
    ticket: int
    state: Literal["waiting", "approved", "denied", "refused"]
    approval: str = Field(default="", max_length=64)
    detail: str = Field(default="", max_length=200, pattern=r"^[\x20-\x7e]*$")


class Redeemed(_Message):
    """Control → worker: the grant is that request's, or (`ok` false) it is not."""

    type: Literal["redeemed"] = "redeemed"
    ticket: int
    ok: bool


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


class Drained(_Message):
    """Worker → control: nothing is accepted or read here any more, and all that a successor has to know was told."""

    type: Literal["drained"] = "drained"


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


class Ask(_Message):
    """Worker → control: lend this credential to this sandbox, for this request; `host` is its name in normal form."""

    type: Literal["ask"] = "ask"
    ticket: int
    sandbox: str = Field(max_length=128)
    credential: str = Field(max_length=128)
    method: str = Field(max_length=64)
    scheme: Literal["https", "http"]
    host: str = Field(max_length=256)
    port: int = Field(ge=1, le=65_535)
    target: str = Field(max_length=TARGET_LIMIT)
    upgrade: str | None = Field(default=None, max_length=64)


class Petition(_Message):
    """Worker → control: an attempt of this sandbox needs a person's approval; with ticket 0 nobody waits for the answer.

    `path` is without the query. Where the attempt is a connection that nobody reads (`opaque`), there is no method and no path.
    """

    type: Literal["petition"] = "petition"
    ticket: int = Field(ge=0)
    sandbox: str = Field(max_length=128)
    scheme: Literal["https", "http", "tcp"]
    host: str = Field(max_length=256)
    port: int = Field(ge=1, le=65_535)
    opaque: bool = False
    method: str = Field(default="", max_length=64)
    path: str = Field(default="", max_length=TARGET_LIMIT)


class Plea(_Message):
    """Worker → control: the sandbox asks for a request (`METHOD URL`, or `tcp://host:port`), and says why."""

    type: Literal["plea"] = "plea"
    ticket: int
    sandbox: str = Field(max_length=128)
    request: str = Field(max_length=PLEA_LIMIT)
    why: str = Field(max_length=WHY_LIMIT)


class Redeem(_Message):
    """Worker → control: the request of this attempt id wants to be the one that this grant is for."""

    type: Literal["redeem"] = "redeem"
    ticket: int
    sandbox: str = Field(max_length=128)
    grant: str = Field(max_length=64)
    attempt: str = Field(max_length=64)


class Spent(_Message):
    """Worker → control: keep this level of a limit's bucket; what lies above it is spent after this was sent.

    `owner` is the entry's id, empty for the profile; `host` the destination, where the limit is for each by itself.
    """

    type: Literal["spent"] = "spent"
    sandbox: str
    owner: str
    kind: Kind
    tokens: FiniteFloat
    host: str = Field(default="", max_length=256)


type ToWorker = (
    Configure
    | Serve
    | Share
    | Unshare
    | Neighbour
    | Departed
    | Welcome
    | Introduced
    | Adopt
    | Renew
    | Revoke
    | Drain
    | Written
    | Stored
    | Claimed
    | Lent
    | Recall
    | Stand
    | Petitioned
    | Redeemed
)
type ToControl = (
    Ready
    | Serving
    | Sharing
    | Adopted
    | Drained
    | Gone
    | Records
    | Pair
    | Claim
    | Introduce
    | Spent
    | Ask
    | Petition
    | Plea
    | Redeem
)

TO_WORKER: TypeAdapter[ToWorker] = TypeAdapter(Annotated[ToWorker, Field(discriminator="type")])
TO_CONTROL: TypeAdapter[ToControl] = TypeAdapter(Annotated[ToControl, Field(discriminator="type")])
