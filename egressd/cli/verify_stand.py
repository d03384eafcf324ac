"""The process that holds a sandbox for `egressd verify`: this installation's session, standing in the lab.

`python -m egressd.cli.verify_stand FILE` runs what FILE, a JSON `Standing`, says, as `egressd run` would, and exits as it would.
A process of its own because it lives in the lab's network; standard streams are the command's.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import BaseModel

from egressd.control.ca import CaPaths
from egressd.control.config import STDOUT, Config
from egressd.control.config_file import ApiSection, ExplicitSection, GatewaySection
from egressd.control.daemon import Daemon
from egressd.control.notify import Notifier
from egressd.control.session import Session
from egressd.control.surroundings import Request

_OWN_FAILURE = 125
CANARY = "VERIFY_CALLERS_SECRET"
"""A variable of the caller's, which no sandbox may see."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How to stand: this installation's configuration (see `described`), a session's request, and what is replaced.

    `dns` and `ca_bundle` are the lab's, None outside of it. `directory` takes what a run leaves behind: the journal, and a
    certificate authority where the installation has none yet. With a `wiring` it is a daemon that stands, which offers that one,
    `at` an interface (gateway) or an address (explicit).
    """

    config: dict[str, Any]
    request: dict[str, Any]
    directory: str
    dns: str | None = None
    ca_bundle: str | None = None
    wiring: str = ""
    at: str = ""

    def as_json(self) -> str:
        """Return what `main` reads."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Stood(Config):
    """This installation's configuration as it stands in the lab. What is private of the installation stays private."""

    installed: Config

    def private_paths(self) -> tuple[Path, ...]:
        """Return what no sandbox may see: the installation's own, and what stands in for it."""
        paths = {*Config.private_paths(self), *self.installed.private_paths()}
        return tuple(sorted(path for path in paths if paths.isdisjoint(path.parents)))


def described(config: Config) -> dict[str, Any]:
    """Return a configuration as JSON values: paths that were relative to somewhere are absolute by now."""
    return {each.name: _plain(getattr(config, each.name)) for each in fields(Config)}


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump()
    if isinstance(value, CaPaths):
        return [str(value.ca), str(value.trust)]
    return str(value) if isinstance(value, Path) else value


def installed(told: Mapping[str, Any]) -> Config:
    """Return the configuration that was described."""
    kinds = get_type_hints(Config)
    return Config(**{name: _read(kinds[name], value) for name, value in told.items()})


def _read(kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind.model_validate(value)
    if kind is CaPaths:
        return CaPaths(*map(Path, value))
    # What else there is are paths, where None and STDOUT are none.
    return Path(value) if isinstance(value, str) and value != STDOUT else value


def stood(config: Config, standing: Standing) -> Stood:
    """Return the same with the lab's DNS and authorities, and with a journal and a control socket of its own."""
    own = Path(standing.directory)
    made = Stood(**{each.name: getattr(config, each.name) for each in fields(Config)}, installed=config)
    if standing.dns is not None:
        made = replace(
            made,
            dns=config.dns.model_copy(update={"upstream": standing.dns}),
            upstream=config.upstream.model_copy(update={"ca_bundle": standing.ca_bundle}),
        )
    made = replace(
        made,
        journal=own / "journal.jsonl",
        control_socket=own / "control.sock",
        state_dir=own / "state",
        ca=_authority(config, standing, own),
    )
    return _served(made, standing, own) if standing.wiring else made


def _authority(config: Config, standing: Standing, own: Path) -> CaPaths:
    """The installation's own where it has one, and where who stands may read it."""
    if standing.wiring != "sidecar" and config.ca.key.exists():
        return config.ca
    return CaPaths.at(own / "ca")


def _served(config: Stood, standing: Standing, own: Path) -> Stood:
    """Return the same for a daemon of its own beside the installation's, if there is one."""
    explicit = config.explicit.model_copy(update={"addresses": [standing.at], "host": None, "hops": []})
    if config.dns.answers == "self":  # so that names are tried, too
        explicit = explicit.model_copy(update={"dns": 53, "direct_80": 80, "direct_443": 443})
    gateway = config.gateway.model_copy(update={"interfaces": [standing.at]})
    made = replace(
        config,
        serve=config.serve.model_copy(update={"health": "", "workers": 1, "api": ApiSection()}),
        explicit=explicit if standing.wiring == "explicit" else ExplicitSection(),
        gateway=gateway if standing.wiring == "gateway" else GatewaySection(),
    )
    if standing.wiring == "sidecar":  # whose uid reads copies: the installation's own are root's
        made = replace(made, rules=own / "rules", credentials=own / "credentials.yaml")
    return made


def main(path: str) -> int:
    """Run the sandbox to its end and return the command's exit status, 125 when egressd failed itself."""
    standing = Standing(**json.loads(Path(path).read_text(encoding="utf-8")))
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        config = stood(installed(standing.config), standing)
        if standing.wiring:
            return asyncio.run(Daemon(config, environ, Notifier({})).run())
        request = Request(**standing.request | {"workspace": Path(standing.request["workspace"])})
        return asyncio.run(Session(request, config, environ).run())
    except Exception as error:  # noqa: BLE001 - the top of a call: what it was is said in one line, as `egressd run` says it
        cause = error
        while isinstance(cause, ExceptionGroup):
            cause = cause.exceptions[0]
        print(str(cause) or type(cause).__name__, file=sys.stderr)
        hint = getattr(cause, "hint", None)
        if hint and hint not in str(cause):
            print(f"hint: {hint}", file=sys.stderr)
        return _OWN_FAILURE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
