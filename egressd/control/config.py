"""The configuration: flag, else `EGRESSD_*`, else egressd.yaml, else default; every key in one model.

The variable of the key `a.b_c` is `EGRESSD_A_B_C`. Paths in the file are relative to the file, in flags and
variables to the current directory.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from egressd.control.ca import CaPaths
from egressd.control.config_check import check
from egressd.control.config_file import (
    ApprovalsSection,
    ConfigFile,
    DnsSection,
    ExplicitSection,
    GatewaySection,
    InspectSection,
    LimitsSection,
    RecordSection,
    Section,
    ServeSection,
    SinksSection,
    UpstreamSection,
)
from egressd.control.paths import Paths, default_paths
from egressd.gate.settings import Settings
from egressd.gate.via import parse_proxy_url
from egressd.journal.rotation import Terms, folder_of
from egressd.rulefiles.document import Document, Node
from egressd.rulefiles.problems import Code, Findings, Place, Problems
from egressd.rulefiles.shape import fit
from egressd.rulefiles.yaml import parse_model, read_bytes

__all__ = [
    "STDOUT",
    "Config",
    "ConfigError",
    "LimitsSection",
    "Origins",
    "comparable",
    "keys",
    "load_config",
    "read_config",
    "values",
]

PREFIX = "EGRESSD_"
STDOUT = "-"

_OTHERS = frozenset({"EGRESSD_CONFIG", "EGRESSD_PROFILE", "EGRESSD_SANDBOX"})
"""Variables that are no keys: which file, which profile, and what a sandbox is told of itself."""

# Kubernetes puts such variables into every pod that has a Service named egressd beside it
_SERVICE_LINK = re.compile(r"EGRESSD_(SERVICE_(HOST|PORT)\w*|PORT(_\d+_\w+)?)\Z")


class ConfigError(Exception):
    """The configuration cannot be used; `problems` says why, each with its place."""

    def __init__(self, problems: Problems) -> None:
        super().__init__(str(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Config:
    """What is in force: every path absolute, none of it made or opened; `file` is the one that was read."""

    file: Path | None
    rules: Path
    credentials: Path
    ca: CaPaths
    journal: Path | Literal["-"]
    state_dir: Path
    control_socket: Path
    dns: DnsSection
    upstream: UpstreamSection
    inspect: InspectSection
    limits: LimitsSection
    record: RecordSection
    sinks: SinksSection
    explicit: ExplicitSection
    gateway: GatewaySection
    serve: ServeSection
    approvals: ApprovalsSection

    @property
    def attach_socket(self) -> Path:
        """Where `egressd run` hands a daemon its sockets: beside the control socket."""
        return self.control_socket.with_name(f"{self.control_socket.stem}-attach{self.control_socket.suffix}")

    def settings(self) -> Settings:
        """Return what a worker is told."""
        proxy = self.upstream.proxy
        return Settings(
            dns_denied=self.dns.denied,
            dns_upstream=self.dns.upstream,
            upstream_ca=self.upstream.ca_bundle,
            upstream_proxy=parse_proxy_url(proxy.url, proxy.connect) if proxy.url is not None else None,
            inspect_addons=tuple(self.inspect.addons),
            approval_hold=self.approvals.hold,
            **self.limits.model_dump(exclude_none=True),
        )

    def terms(self) -> Terms:
        """Return how the journal is kept."""
        return Terms(**self.record.model_dump())

    @property
    def proxy_credentials(self) -> Path | None:
        """The file with `user:password` for the operator's own proxy."""
        file = self.upstream.proxy.credentials.file
        return Path(file) if file is not None else None

    def private_paths(self) -> tuple[Path, ...]:
        """Return what no sandbox may see, the outermost only, whether or not it exists."""
        paths = {self.rules, self.credentials, self.ca.ca, self.state_dir, self.control_socket}
        paths.add(self.attach_socket)
        api = self.serve.api
        paths.update(Path(path) for path in (api.key, api.token.file) if path is not None)
        if isinstance(self.journal, Path):
            paths.update((self.journal, folder_of(self.journal)))
        if self.file is not None:
            paths.add(self.file)
        paths.update(map(Path, self.inspect.addons))
        if self.proxy_credentials is not None:
            paths.add(self.proxy_credentials)
        approvals = self.approvals
        theirs = (approvals.people, approvals.webhook.url_file, approvals.webhook.secret.file)
        paths.update(Path(path) for path in theirs if path is not None)
        return tuple(sorted(path for path in paths if paths.isdisjoint(path.parents)))


type Origins = Mapping[str, str]
"""Where each key that was given was given: `FILE:LINE`, a variable, or a flag; by its dotted name."""


def load_config(
    flags: Mapping[str, str | Path | None],
    environ: Mapping[str, str],
    *,
    file: Path | None = None,
    euid: int | None = None,
) -> Config:
    """Return the configuration in force; raises ConfigError with every problem.

    `flags` holds keys by their dotted names (`dns.upstream`), None where the flag was not given; `file` is
    `--config`. A file that was named must exist, the default one need not.
    """
    return read_config(flags, environ, file=file, euid=euid)[0]


def read_config(
    flags: Mapping[str, str | Path | None],
    environ: Mapping[str, str],
    *,
    file: Path | None = None,
    euid: int | None = None,
) -> tuple[Config, Origins]:
    """Return the same, and where each key comes from; what is in no origin holds by default."""
    findings = Findings()
    paths = default_paths(environ, os.geteuid() if euid is None else euid)
    chosen = file if file is not None else _from_environ(environ)
    source = (chosen or paths.config).absolute()
    data: dict[str, Any] = {}
    origins: dict[str, str] = {}
    read: Path | None = None
    if chosen is not None or source.exists():
        read = source
        data = _read_file(source, origins)
    for key, name, text in _given(flags, environ, findings):
        value = _fitted(key, name, text, findings)
        if value is not None:
            _merge(data, _absolute(value, Path.cwd()))
            origins[key] = name
    if findings.count:
        raise ConfigError(findings.problems())
    model = ConfigFile.model_validate(data)
    check(model, str(read or "configuration"), findings)
    if findings.count:
        raise ConfigError(findings.problems())
    return _resolved(model, read, paths), origins


def _read_file(source: Path, origins: dict[str, str]) -> dict[str, Any]:
    """Return what the file says, its paths absolute, with the place of each key added to `origins`; raises ConfigError."""
    findings = Findings()
    content = read_bytes(source, str(source), findings)
    loaded = parse_model(content, str(source), ConfigFile, findings) if content is not None else None
    if loaded is None:
        raise ConfigError(findings.problems())
    model, document = loaded
    for key in keys().values():
        steps = key.split(".")
        if _said(document.data, steps):
            origins[key] = f"{source}:{document.key_place(*steps).line}"
    return _absolute(model.model_dump(by_alias=True, exclude_unset=True), source.parent)


def _said(data: Any, steps: list[str]) -> bool:
    for step in steps:
        if not isinstance(data, dict) or step not in data:
            return False
        data = data[step]
    return True


def keys() -> dict[str, str]:
    """Return every key by the name of its variable: `EGRESSD_DNS_UPSTREAM` → `dns.upstream`."""
    return {_variable(key): key for key in _keys_of(ConfigFile, "")}


def values(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield each key by its dotted name, with what holds: given or by default, None where there is none."""
    settings = config.settings()
    for key in keys().values():
        section, _, name = key.partition(".")
        value: Any
        if key == "ca_dir":
            value = config.ca.ca
        elif section == "limits":
            value = getattr(settings, name)
        else:
            value = config
            for step in key.split("."):
                value = getattr(value, step)
        yield key, str(value) if isinstance(value, Path) else value


_DAEMONS_OWN = ("serve.", "explicit.", "gateway.", "record.", "sinks.", "approvals.")


def comparable(config: Config) -> dict[str, Any]:
    """Return what must be the same for a sandbox that one process makes and another has served: all but the daemon's own keys."""
    told = {key: value for key, value in values(config) if not key.startswith(_DAEMONS_OWN)}
    return told | {"config": str(config.file) if config.file is not None else None}


def _keys_of(model: type[Section], prefix: str) -> Iterator[str]:
    for name, info in model.model_fields.items():
        section = info.annotation
        if isinstance(section, type) and issubclass(section, Section):
            yield from _keys_of(section, f"{prefix}{name}.")
        elif name != "schema_version":
            yield prefix + name


_PATHS = frozenset(
    {"rules", "credentials", "ca_dir", "journal", "state_dir", "control_socket", "upstream.ca_bundle"}
    | {"upstream.proxy.credentials.file"}
    | {"approvals.people", "approvals.webhook.url_file", "approvals.webhook.secret.file"}
    | {"serve.api.certificate", "serve.api.key", "serve.api.client_ca", "serve.api.token.file"}
)
_PATH_LISTS = frozenset({"inspect.addons"})
_NAME_LISTS = ("explicit.addresses", "explicit.hops", "gateway.interfaces")
_LISTS = {**dict.fromkeys(_PATH_LISTS, os.pathsep), **dict.fromkeys(_NAME_LISTS, ",")}
"""How they are joined in a variable: paths as in PATH."""


def _variable(key: str) -> str:
    return PREFIX + key.replace(".", "_").upper()


def _from_environ(environ: Mapping[str, str]) -> Path | None:
    text = environ.get(f"{PREFIX}CONFIG")
    return Path(text) if text else None


def _given(
    flags: Mapping[str, str | Path | None], environ: Mapping[str, str], findings: Findings
) -> Iterator[tuple[str, str, str]]:
    """Yield (key, where it was said, text), variables before flags so that flags win."""
    known = keys()
    for name in sorted(environ):
        if name in known:
            yield known[name], name, environ[name]
        elif name.startswith(PREFIX) and name not in _OTHERS and not _SERVICE_LINK.match(name):
            _check_unknown(name, known, findings)
    for key, value in flags.items():
        if value is not None:
            yield key, f"--{key.replace('.', '-').replace('_', '-')}", str(value)


def _check_unknown(name: str, known: Mapping[str, str], findings: Findings) -> None:
    # what resembles no key of ours is somebody else's: other programs may use the prefix too
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if near:
        findings.add(name, Place(), Code.UNKNOWN_KEY, f"no such variable (did you mean {near[0]}?)")


def _fitted(key: str, name: str, text: str, findings: Findings) -> dict[str, Any] | None:
    """Return one key's text as the model reads it, nested as in the file, or None with its problem added."""
    steps = key.split(".")
    if key in _LISTS:
        parts = [part.strip() for part in text.split(_LISTS[key]) if part.strip()]
        node = Node(Place(), items=[Node(Place(), scalar=part) for part in parts])
    else:
        node = Node(Place(), scalar=text if key in _PATHS else _scalar(text))
    for step in reversed(steps):
        node = Node(Place(), fields={step: node}, keys={step: Place()})
    fitted = fit(Document(name, node), ConfigFile, findings)
    return fitted.model_dump(by_alias=True, exclude_unset=True) if fitted is not None else None


def _scalar(text: str) -> str | int | float | bool:
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _merge(data: dict[str, Any], over: Mapping[str, Any]) -> None:
    for key, value in over.items():
        if isinstance(value, dict):
            _merge(data.setdefault(key, {}), value)
        else:
            data[key] = value


def _absolute(data: dict[str, Any], base: Path, prefix: str = "") -> dict[str, Any]:
    """Return the data with its paths absolute: `~` is the user's home, anything relative is below `base`."""
    result: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, dict):
            result[key] = _absolute(value, base, f"{prefix}{key}.")
        elif prefix + key in _PATHS and value != STDOUT:
            result[key] = os.path.normpath(base / os.path.expanduser(value))
        elif prefix + key in _PATH_LISTS:
            result[key] = [os.path.normpath(base / os.path.expanduser(each)) for each in value]
        else:
            result[key] = value
    return result


def _resolved(model: ConfigFile, read: Path | None, paths: Paths) -> Config:
    ca = paths.ca
    if model.ca_dir is not None and Path(model.ca_dir) != ca.ca:
        ca = CaPaths.at(Path(model.ca_dir))
    journal: Path | Literal["-"] = paths.journal
    if model.journal is not None:
        journal = "-" if model.journal == STDOUT else Path(model.journal)
    return Config(
        file=read,
        rules=Path(model.rules) if model.rules else paths.rules,
        credentials=Path(model.credentials) if model.credentials else paths.credentials,
        ca=ca,
        journal=journal,
        state_dir=Path(model.state_dir) if model.state_dir else paths.state,
        control_socket=Path(model.control_socket) if model.control_socket else paths.control_socket,
        dns=model.dns,
        upstream=model.upstream,
        inspect=model.inspect,
        limits=model.limits,
        record=model.record,
        sinks=model.sinks,
        explicit=model.explicit,
        gateway=model.gateway,
        serve=model.serve,
        approvals=model.approvals,
    )
