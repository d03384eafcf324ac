"""What a caller says about one sandbox."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from egressd.wiring import ruleset


@dataclass(frozen=True, slots=True)
class Bind:
    """A host path let into the sandbox at the same place (`--bind PATH[:ro]`)."""

    path: str
    writable: bool = True

    @classmethod
    def parse(cls, text: str) -> "Bind":
        """From the flag's value."""
        path = text.removesuffix(":ro")
        return cls(path, writable=path == text)


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """One sandbox: its place in the file system, its identity and its environment. All paths are absolute.

    `workspace` is writable and the command's working directory. `home` is the caller's home directory: it becomes an
    empty writable one, because it holds ssh keys, cloud credentials and shell start-up files. `uid` matters to root
    only: the host uid (and gid) of the sandbox, SANDBOX_UID if None. `masks` are hidden wherever they lie. `trust` maps
    a path inside to the host's file or directory whose content appears there, read-only. `seeds` maps a path below the
    home to the host's file of which the command finds a copy there that it may change; where something of the host's is
    let in at that place, it is left alone.
    """

    workspace: str
    env: Mapping[str, str]
    home: str
    uid: int | None = None
    binds: tuple[Bind, ...] = ()
    sockets: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    trust: Mapping[str, str] = field(default_factory=dict)
    seeds: Mapping[str, str] = field(default_factory=dict)
    hostname: str = "sandbox"
    user: str = "sandbox"
    nflog_group: int = ruleset.NFLOG_GROUP
