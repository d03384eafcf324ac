"""The probes of `egressd verify` that are made outside the sandbox: on the host's files, processes and records.

They are probes like those inside, with a scene of their own.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from egressd.cli.verify_ground import descendants
from egressd.cli.verify_scene import is_allowed
from egressd.control.config import Config
from egressd.policy.compile import CompiledPolicy
from egressd.verify.probe import Outcome, held, judged, listed, opened, untried
from egressd.verify.scene import Allowed

_OTHERS_WRITE, _OTHERS_READ = 0o022, 0o044


class OutsideProbe(NamedTuple):
    """What a probe outside is: the same words as of one inside."""

    name: str
    part: str
    tries: str
    why: str
    proves: str


@dataclass(frozen=True, slots=True)
class View:
    """What the outside half knows when the probes inside are done. `command` is the sandboxed program's pid, or None.

    `sandbox` is its id where others are in the same journal, `layers` of which attempts must be there; `differences` are those of
    the packet rules in force from those wanted.
    """

    config: Config
    stand: int
    command: int | None
    euid: int
    sandbox_uid: int | None
    journal: Path
    nonce: str
    allowed: Allowed | None
    policy: CompiledPolicy
    now: float
    evil_is_allowed: bool
    without: bool
    sandbox: str = ""
    layers: frozenset[str] = frozenset({"dns", "connection", "packet"})
    differences: list[str] | None = None


HOST_FILES = OutsideProbe(
    "host-files",
    "outside",
    "Look at owners and modes of rules, configuration, credentials, key and journal, and of every folder above them.",
    "who can write a folder above a rule writes the rule; every other user of the machine counts",
    "nobody but root and egressd's own user can change them, and nobody else can read key, credentials and journal",
)
HOST_IDENTITY = OutsideProbe(
    "host-identity",
    "outside",
    "Look at the sandboxed program as the host sees it: its uid, and which processes share its namespaces.",
    "uid 0 of the host writes core_pattern without any capability; egressd's own uid owns its files",
    "it is one unprivileged uid of the host's, as root not egressd's own, and shares no namespace with egressd",
)
RECORDS = OutsideProbe(
    "records",
    "outside",
    "Read the journal of this verification: what was allowed, and whether each kind of attempt is there.",
    "an attempt without a record was not judged; a record that allows what no rule allows was judged wrongly",
    "names, connections and packets that were tried are recorded as refused, and nothing but the rules' own request as allowed",
)
NOTHING_LEFT = OutsideProbe(
    "nothing-left",
    "outside",
    "Count, with a capture on the wire, every packet, DNS question and request that left egressd's place during all probes.",
    "what a client sees can be wrong; a packet on the wire cannot",
    "nothing left but the question and the connection of the rules' own allowed request",
)
WIRING_RULES = OutsideProbe(
    "wiring-rules",
    "outside",
    "Read the packet rules that hold the boundary back once the probes are done, and hold them against what they should be.",
    "a rule that is missing may matter to nobody today, and to everybody tomorrow",
    "every rule is in force, and none of anybody else's stands before them",
)
PROBES = (HOST_FILES, HOST_IDENTITY, RECORDS, WIRING_RULES, NOTHING_LEFT)


def host_files(view: View) -> Outcome:
    """Judge owners and modes; files that do not exist are judged by the folders above them."""
    config = view.config
    secret = [config.ca.ca, config.ca.key, config.credentials]
    secret += [config.journal] if isinstance(config.journal, Path) else []
    public = [config.rules, *_below(config.rules), config.state_dir, config.ca.trust]
    public += [Path(os.path.normpath(config.file))] if config.file else []
    trusted = {0, view.euid} - {view.sandbox_uid if view.euid == 0 else None}

    def tries() -> Iterator[str | None]:
        for path in secret:
            yield _exposed(path, trusted, _OTHERS_READ | _OTHERS_WRITE)
        for path in public:
            yield _exposed(path, trusted, _OTHERS_WRITE)
        for folder in sorted({above for path in (*secret, *public) for above in path.parents} - set(public)):
            yield _exposed(folder, trusted, _OTHERS_WRITE)

    return judged(tries(), "files and folders, all closed to others")


def _below(folder: Path) -> list[Path]:
    try:
        return sorted(folder.rglob("*"))
    except OSError:
        return []


def _exposed(path: Path, trusted: Iterable[int | None], bits: int) -> str | None:
    try:
        found = path.stat()
    except OSError:
        return None
    if found.st_uid not in trusted:
        return f"{path} belongs to uid {found.st_uid}"
    # In a sticky folder others make files of their own and can rename nobody else's (chmod(2), S_ISVTX).
    open_bits = found.st_mode & bits
    if found.st_mode & stat.S_ISVTX and stat.S_ISDIR(found.st_mode):
        open_bits &= ~_OTHERS_WRITE
    if not open_bits:
        return None
    return f"{path} can be {'written' if open_bits & _OTHERS_WRITE else 'read'} by others (mode {found.st_mode & 0o7777:04o})"


def command_of(stand: int, inside: int) -> int | None:
    """Return the host's pid of the program that calls itself `inside`, among what the stand started."""
    for pid in descendants(stand):
        numbers = _status(pid).get("NSpid", "").split()
        if len(numbers) > 1 and numbers[-1] == str(inside):
            return pid
    return None


def _status(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def host_uid(pid: int) -> int | None:
    """Return a process's uid as the host sees it."""
    words = _status(pid).get("Uid", "").split()
    return int(words[0]) if words else None


def host_identity(view: View) -> Outcome:
    """Judge the sandboxed program's uids, and whether any process of egressd's shares its user or pid namespace."""
    if view.without:
        return untried("there is no sandbox")
    if view.command is None:
        return untried("the sandboxed program cannot be found among the host's processes")
    uids = {int(word) for word in _status(view.command).get("Uid", "").split()}
    found = ["it is uid 0 of the host"] if 0 in uids and _is_host_root() else []
    if view.euid == 0 and _is_host_root():
        found += [f"it is uid {uid}, which egressd uses" for uid in sorted(uids & _egressd_uids(view))]
    found += list(_namespace_guests(view))
    if found:
        return opened(listed(found))
    return held(f"uid {', '.join(map(str, sorted(uids)))}, alone in its namespaces")


def _is_host_root() -> bool:
    """Whether uid 0 here is uid 0 of the host, and not of a user namespace."""
    with open("/proc/self/uid_map", encoding="ascii") as table:
        return any(line.split()[:2] == ["0", "0"] for line in table)


def _own_processes(view: View) -> Iterator[int]:
    """The processes of egressd's: everything that the stand started, up to the sandbox."""
    for pid in descendants(view.stand):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(b"egressd." in word for word in line) and b"bwrap" not in line[0]:
            yield pid


def _egressd_uids(view: View) -> set[int]:
    found = {host_uid(pid) for pid in _own_processes(view)}
    return {uid for uid in found if uid is not None}


def _namespace_guests(view: View) -> Iterator[str]:
    # A container may share the host's user namespace; egressd's own sandboxes never do.
    for kind in ("pid",) if view.sandbox else ("user", "pid"):
        try:
            theirs = os.readlink(f"/proc/{view.command}/ns/{kind}")
        except OSError:
            continue  # closed to us, as to everybody else who is not root
        for pid in _own_processes(view):
            try:
                ours = os.readlink(f"/proc/{pid}/ns/{kind}")
            except OSError:
                continue
            if ours == theirs and pid != view.command:
                yield f"process {pid} of egressd's is in its {kind} namespace"


def records(view: View) -> Outcome:
    """Judge the journal: nothing allowed but the rules' own, and something of every kind of attempt."""
    if view.without:
        return untried("there is no journal")
    decisions = [record for record in _read(view.journal, view.sandbox) if record.get("event") == "decision"]
    if not decisions:
        return opened("there is no record of any attempt")
    allowed = sorted({
        f"{record.get('layer')} {record.get('host')}"
        for record in decisions
        if record.get("verdict") == "allow" and not _is_expected(record, view)
    })  # fmt: skip
    layers = {record.get("layer") for record in decisions if record.get("verdict") != "allow"}
    missing = sorted(view.layers - layers) if not allowed else []
    found = [f"allowed: {each}" for each in allowed] + [
        f"nothing recorded of the layer {each}" for each in missing
    ]
    return opened(listed(found)) if found else held(f"{len(decisions)} decisions, all as they should be")


def _is_expected(record: dict[str, Any], view: View) -> bool:
    """Whether a record may allow: the rules' own request, egressd's own pages, and asking for names that a rule allows.

    Nobody connects to any of those but the first; where the rules let the whole web be read, to strangers' too.
    """
    host = str(record.get("host", ""))
    if record.get("reason") == "internal_page" or (view.allowed is not None and host == view.allowed.name):
        return True
    asked = record.get("layer") == "dns" or view.evil_is_allowed
    return asked and is_allowed(view.policy, host, view.now)


def _read(journal: Path, sandbox: str) -> Iterator[dict[str, Any]]:
    try:
        lines = journal.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    ready = False
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if sandbox and record.get("sandbox") != sandbox:
            continue
        # What was tried before, control tried itself to prove the start.
        ready = ready or (record.get("event") == "sandbox" and record.get("detail") == "ready")
        if ready:
            yield record


def wiring_rules(view: View) -> Outcome:
    """Judge the packet rules in force."""
    if view.differences is None:
        return untried("this wiring has none")
    found = view.differences
    return opened(f"{len(found)} differences: {listed(found)}") if found else held("all as they should be")


MADE = {HOST_FILES: host_files, HOST_IDENTITY: host_identity, RECORDS: records, WIRING_RULES: wiring_rules}
