"""What surrounds a sandboxed command: what its caller asked for, and the files and the environment that it gets of that."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from egressd.control.config import Config
from egressd.control.keyring import Exposed, Keyring
from egressd.control.trust import Trust, java_store_paths, system_bundle_paths, trust_environment
from egressd.journal.admission import LABEL_COUNT, LABEL_KEY_LIMIT, LABEL_VALUE_LIMIT
from egressd.wiring.launch import covering, writable
from egressd.wiring.spec import Bind, SandboxSpec

_PASSED = ("PATH", "USER", "SHELL", "TERM", "LANG", "TZ")
"""What the command gets of the caller's environment, besides LC_* and what `--env` names."""
TRUST_INSIDE = "/run/egressd-trust"
_CERTS = "/etc/ssl/certs"
"""Where OpenSSL and GnuTLS of Debian and its kin look by themselves; elsewhere the bundle files and variables must do."""


class BadInput(Exception):
    """Rules, profile or options that cannot be used; exit status 2.

    `passing` says that a file could not be read, which may be otherwise a moment later without any change of the file.
    """

    def __init__(self, text: str, *, passing: bool = False) -> None:
        super().__init__(text)
        self.passing = passing


@dataclass(frozen=True, slots=True)
class Request:
    """What the caller of `egressd run` asks for. `pid` or `netns` name a container that runs already, instead of a command."""

    command: tuple[str, ...]
    profile: str
    labels: dict[str, str] = field(default_factory=dict)
    traceparent: str | None = None
    env: tuple[str, ...] = ()
    binds: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()
    ready_timeout: float = 10.0
    uid: int | None = None
    pid: int | None = None
    netns: str | None = None
    workspace: Path = field(default_factory=Path.cwd)

    def __post_init__(self) -> None:
        """Raise BadInput for labels that no record takes."""
        check_labels(self.labels)

    @property
    def attaches(self) -> bool:
        """Whether it is about a container that runs already."""
        return self.pid is not None or self.netns is not None


def check_labels(labels: Mapping[str, str]) -> None:
    """Raise BadInput for labels that no record takes: every record of the sandbox would be refused."""
    if len(labels) > LABEL_COUNT:
        raise BadInput(f"{len(labels)} labels: there can be {LABEL_COUNT}")
    for name, value in labels.items():
        if not 0 < len(name) <= LABEL_KEY_LIMIT or len(value) > LABEL_VALUE_LIMIT:
            raise BadInput(
                f"label {name[:LABEL_KEY_LIMIT]!r}: a name has 1 to {LABEL_KEY_LIMIT} characters, "
                f"a value at most {LABEL_VALUE_LIMIT}"
            )


def spec_of(
    request: Request,
    config: Config,
    environ: Mapping[str, str],
    sandbox_id: str,
    trust: Trust,
    keyring: Keyring,
) -> tuple[SandboxSpec | None, list[str]]:
    """Return what is to be made, None where all is there already, and what the operator is told of it; raises BadInput.

    `environ` is the caller's environment.
    """
    if request.attaches:
        return None, []
    try:
        binds = tuple(Bind.parse(text) for text in request.binds)
    except ValueError as error:
        raise BadInput(str(error)) from None
    home = environ.get("HOME") or "/"
    try:
        env = keyring.environment(_environment(request, environ, sandbox_id, home), request.env, environ)
    except Exposed as exposed:
        raise BadInput(str(exposed)) from None
    bare = SandboxSpec(
        workspace=str(request.workspace),
        env=env,
        home=home,
        uid=request.uid,
        binds=binds,
        sockets=request.sockets,
        masks=tuple(str(path) for path in config.private_paths()),
        trust=_trusted(trust),
        seeds={name: str(path) for name, path in trust.nss.items()},
        hostname="sandbox",
    )
    # With its folder: an editor replaces a file by renaming, which takes the mask away; and so does a rotation.
    renamed = [config.credentials, *([config.journal] if isinstance(config.journal, Path) else [])]
    more = (*(place for path in renamed for place in covering(bare, str(path))), *keyring.masks(bare))
    spec = dataclasses.replace(bare, masks=tuple(dict.fromkeys((*bare.masks, *more))))
    try:
        keyring.check(spec)
    except Exposed as exposed:
        raise BadInput(
            f"{exposed}\nhint: keep it outside the workspace and everything that --bind names"
        ) from None
    _check_addons(spec, config.inspect.addons)
    return spec, keyring.notes(bare)


def _environment(request: Request, environ: Mapping[str, str], sandbox_id: str, home: str) -> dict[str, str]:
    env = {name: environ[name] for name in environ if name in _PASSED or name.startswith("LC_")}
    env.setdefault("PATH", "/usr/local/bin:/usr/bin:/bin")
    env |= {"HOME": home, "EGRESSD_SANDBOX": sandbox_id}
    env |= trust_environment(TRUST_INSIDE)
    if os.path.isdir(_CERTS):
        env["SSL_CERT_DIR"] = _CERTS
    else:
        del env["SSL_CERT_DIR"]
    for text in request.env:
        name, equals, value = text.partition("=")
        if not name:
            raise BadInput(f"--env {text!r}: no name")
        if equals:
            env[name] = value
        elif name in environ:
            env[name] = environ[name]
    return env


def _trusted(trust: Trust) -> dict[str, str]:
    """Return what of the host's trust stores is covered by ours, by path inside."""
    covered = {_CERTS: trust.certs} if os.path.isdir(_CERTS) else {}
    covered |= {f"{TRUST_INSIDE}/{path.name}": path for path in (trust.certificate, trust.bundle, trust.java)}
    covered |= {str(path): trust.bundle for path in system_bundle_paths()}
    covered |= {str(path): trust.java_default for path in java_store_paths()}
    return {inside: str(path) for inside, path in covered.items()}


def _check_addons(spec: SandboxSpec, paths: Sequence[str]) -> None:
    """Addons run in the worker: what a sandbox can write never becomes code there. Raises BadInput."""
    for path in paths:
        if not os.path.isfile(path):
            raise BadInput(f"inspect.addons: {path} is no file")
        if writable(spec, path):
            raise BadInput(
                f"inspect.addons: the sandbox can write {path} or a folder above it\n"
                "hint: keep addons outside the workspace and everything that --bind names"
            )
