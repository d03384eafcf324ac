"""egressd.yaml as it is written: every key, what it may hold, and what holds where it is left out."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

type PathText = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]+$")]


class Section(BaseModel):
    """A mapping of egressd.yaml: no unknown key, nothing converted."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class DnsSection(Section):
    """How names are answered and asked."""

    upstream: str = Field(default="system", min_length=1)
    denied: Literal["explain", "nxdomain"] = "explain"
    answers: Literal["synthetic", "self"] = "synthetic"


class ProxyCredentialsSection(Section):
    """Where `user:password` for the operator's own proxy lies: in a file, and nowhere else."""

    file: PathText | None = None


class ProxySection(Section):
    """The operator's own proxy, through which everything leaves, if there is one."""

    url: str | None = Field(default=None, min_length=1)
    connect: Literal["address", "name"] = "address"
    credentials: ProxyCredentialsSection = ProxyCredentialsSection()


class UpstreamSection(Section):
    """How egressd itself meets the outside."""

    ca_bundle: PathText | None = None
    proxy: ProxySection = ProxySection()


class InspectSection(Section):
    """What looks at requests besides the rules: files of the site's own addons, in order (addons/README.md)."""

    addons: list[PathText] = Field(default_factory=list)


class LimitsSection(Section):
    """Limits and deadlines of a worker: seconds, bytes, counts per sandbox.

    What is not given is as `gate.settings` has it.
    """

    dns_timeout: float | None = Field(default=None, gt=0)
    dns_names: int | None = Field(default=None, gt=0, le=16_384)
    dns_queries_per_minute: int | None = Field(default=None, gt=0)
    first_bytes_timeout: float | None = Field(default=None, gt=0)
    head_timeout: float | None = Field(default=None, gt=0)
    head_bytes: int | None = Field(default=None, gt=0)
    handshake_timeout: float | None = Field(default=None, gt=0)
    connect_timeout: float | None = Field(default=None, gt=0)
    idle_timeout: float | None = Field(default=None, gt=0)
    connections: int | None = Field(default=None, gt=0)
    new_connections_per_second: int | None = Field(default=None, gt=0)


class ApiTokenSection(Section):
    """Where the token of the control API's TCP clients lies: in a file that only egressd's uid may read."""

    file: PathText | None = None


class ApiSection(Section):
    """The control API over TCP besides the Unix socket: TLS always; who asks shows a certificate, the token, or both.

    `listen` is ADDRESS:PORT; empty: not over TCP.
    """

    listen: str = ""
    certificate: PathText | None = None
    key: PathText | None = None
    client_ca: PathText | None = None
    token: ApiTokenSection = ApiTokenSection()


class ServeSection(Section):
    """The daemon: most sandboxes at a time, seconds that a drain waits for them to end, and where its health is told.

    `health` is ADDRESS:PORT; empty: nowhere. `workers` are the processes that carry the sandboxes; 0: one a core, at most four.
    """

    sandboxes: int = Field(default=1_000, gt=0, le=100_000)
    workers: int = Field(default=0, ge=0, le=256)
    drain_timeout: float = Field(default=10.0, ge=0, le=86_400)
    health: str = "127.0.0.1:15021"
    api: ApiSection = ApiSection()


class WebhookSecretSection(Section):
    """Where the secret lies that deliveries are signed with: in a file that only egressd's uid may read."""

    file: PathText | None = None


class WebhookSection(Section):
    """Who is told of approvals: a URL, or the file that holds one, which is a secret with some; `format` is json or slack."""

    url: str | None = Field(default=None, min_length=1, max_length=2048)
    url_file: PathText | None = None
    format: Literal["json", "slack"] = "json"
    secret: WebhookSecretSection = WebhookSecretSection()


class ApprovalsSection(Section):
    """What sandboxes ask people for (rules that `ask`, and requests for access).

    `people` is the file of those who may approve, `four_eyes` wants two of them wherever a credential could go along. `hold` is
    how many seconds a request is held for its approval before it is refused; 0: not at all.
    """

    people: PathText | None = None
    four_eyes: bool = True
    hold: float = Field(default=0.0, ge=0, le=15)
    webhook: WebhookSection = WebhookSection()


class ExplicitSection(Section):
    """What sandboxes of the explicit wiring share: egressd's addresses in their network, and its ports there; 0 is none.

    `host` is what they call egressd in their proxy variables, by default the first of the addresses.
    `direct_80` and `direct_443` are listened on for what clients send to those ports; they and `dns` go with `dns.answers: self`.
    """

    addresses: list[str] = Field(default_factory=list, max_length=64)
    host: str = Field(default="", max_length=253, pattern=r"^[A-Za-z0-9._:-]*$")
    http: int = Field(default=3128, ge=0, le=65_535)
    socks: int = Field(default=1080, ge=0, le=65_535)
    dns: int = Field(default=0, ge=0, le=65_535)
    direct_80: int = Field(default=0, ge=0, le=65_535)
    direct_443: int = Field(default=0, ge=0, le=65_535)
    hops: list[str] = Field(default_factory=list, max_length=64)


class RecordSection(Section):
    """How the journal is kept. Sizes are bytes, ages seconds; 0 sets no limit.

    A file is closed over `max_size`, or once its first line is `max_age` old; of the closed files `max_files` are kept, none
    longer than `retain`. `fsync` says whether a record outlives a power failure: never waited for, within a second, or
    before anything goes by it; `on_full` what becomes of attempts whose record finds no room on the disk.
    """

    max_size: int = Field(default=1 << 30, ge=0)
    max_age: float = Field(default=0.0, ge=0)
    max_files: int = Field(default=0, ge=0)
    retain: float = Field(default=0.0, ge=0)
    fsync: Literal["never", "interval", "each"] = "interval"
    on_full: Literal["deny", "drop-and-count"] = "deny"


class SyslogSection(Section):
    """A syslog daemon (RFC 5424): `unix:/dev/log`, `udp://HOST:PORT` or `tcp://HOST:PORT`; empty: none."""

    address: str = Field(default="", max_length=300)
    format: Literal["record", "ocsf"] = "record"


class SinksSection(Section):
    """Where records go besides the journal. A sink that is slow or away costs neither traffic nor the journal anything.

    `otlp` goes where the standard OTEL_* variables say.
    """

    stdout: Literal["off", "record", "ocsf"] = "off"
    syslog: SyslogSection = SyslogSection()
    otlp: Literal["off", "logs", "spans", "both"] = "off"


class GatewaySection(Section):
    """Interfaces of this host, bridges mostly, with nothing but sandboxes behind them."""

    interfaces: list[str] = Field(default_factory=list, max_length=64)


class ConfigFile(Section):
    """egressd.yaml as it is written; every key may be left out."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    rules: PathText | None = None
    credentials: PathText | None = None
    ca_dir: PathText | None = None
    journal: PathText | None = None
    state_dir: PathText | None = None
    control_socket: PathText | None = None
    dns: DnsSection = DnsSection()
    upstream: UpstreamSection = UpstreamSection()
    inspect: InspectSection = InspectSection()
    limits: LimitsSection = LimitsSection()
    record: RecordSection = RecordSection()
    sinks: SinksSection = SinksSection()
    explicit: ExplicitSection = ExplicitSection()
    gateway: GatewaySection = GatewaySection()
    serve: ServeSection = ServeSection()
    approvals: ApprovalsSection = ApprovalsSection()
