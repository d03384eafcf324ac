"""One verification from its scene to its document."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import ssl
import stat
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import egressd
from egressd.cli import verify_outside as outside
from egressd.cli.verify_ground import Ground, Options, Stranger, descendants
from egressd.cli.verify_inside import BrokeOff, Inside
from egressd.cli.verify_scene import allowed_request, edges, is_allowed, wildcard_suffix
from egressd.cli.verify_table import VerifyTable
from egressd.cli.verify_wired import WiredGround
from egressd.cli.verify_wirings import layers_of, outside_of, probes_of
from egressd.cli.verify_world import (
    EVIL,
    RESOLVERS,
    SERVED,
    SPECIAL,
    TARGETS,
    World,
    metadata_addresses,
    metadata_names,
)
from egressd.control.config import Config
from egressd.lab import topology
from egressd.policy.compile import CompiledPolicy
from egressd.rulefiles.load import Rules, load_rules
from egressd.verify import inside
from egressd.verify.probe import (
    BROKE_OFF,
    HELD,
    OPEN,
    UNTRIED,
    Outcome,
    Probe,
    broke_off,
    opened,
    safe,
)
from egressd.verify.processes import started
from egressd.verify.scene import Process
from egressd.wiring.errors import WiringError
from egressd.wiring.identity import SANDBOX_UID, SOCKET_UID, WORKER_UID
from egressd.wiring.launch import view
from egressd.wiring.namespace import SandboxSpec
from egressd.wiring.ruleset import OWN_ADDRESSES, RESOLVER

SECONDS = 55.0
"""The longest that a verification may take; it takes about ten."""
_SETTLE = 0.3
"""Seconds over which a packet or a record may still be on its way."""
_NO_ROOM = inside.SECONDS + 5.0
_NAMES = ("user", "pid", "mnt", "ipc", "uts", "cgroup")


class Unreadable(Exception):
    """The rules or the profile cannot be used; the text has every problem."""


def read_policy(config: Config, profile: str) -> CompiledPolicy:
    """Return the compiled policy of a profile; raises Unreadable."""
    rules = load_rules(config.rules)
    if not isinstance(rules, Rules):
        raise Unreadable(str(rules))
    if profile not in rules.profiles:
        known = ", ".join(sorted(rules.profiles)) or "none"
        raise Unreadable(f"there is no profile {profile!r}\nhint: profiles here: {known}")
    return rules.compiled(profile)


class Verification:
    """Makes every probe and tells the table; `run` returns the document that `--json` prints.

    Raises Unreadable when it is made of rules that cannot be used; `run` raises BrokeOff and LabError.
    """

    def __init__(self, config: Config, options: Options, table: VerifyTable) -> None:
        self._config = config
        self._options = options
        self._table = table
        self._policy = read_policy(config, options.profile)
        self._began = time.monotonic()
        self._nonce = secrets.token_hex(6)
        now = time.time()
        lab = not options.targets
        self._allowed = allowed_request(self._policy, now, SERVED) if lab else None
        self._edges = edges(self._policy, EVIL, now) if lab else []
        self._wild = wildcard_suffix(self._policy, now) if lab else ""
        self._evil_is_allowed = is_allowed(self._policy, f"www.{EVIL}", now)
        self._rows: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._left: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        """Build everything, make every probe, take everything down."""
        with tempfile.TemporaryDirectory(prefix="egressd-verify-") as spare:
            workspace = self._workspace(Path(spare))
            self._table.say(
                "building a small internet" if not self._options.targets else "starting a sandbox"
            )
            kind = Ground if self._options.wiring == "namespace" else WiredGround
            with kind(self._config, self._options, self._nonce, workspace) as ground:
                self._verify(ground)
        return self._document()

    def _workspace(self, spare: Path) -> Path:
        """The current directory, as for `run`; a spare one where that cannot be a workspace."""
        here = Path.cwd()
        home = os.environ.get("HOME") or "/"
        masks = tuple(str(path) for path in self._config.private_paths())
        try:
            view(SandboxSpec(workspace=str(here), env={}, home=home, masks=masks))
        except WiringError as error:
            spare.chmod(0o755)
            self._notes.append(safe(f"{here} is no workspace ({error.stderr}), so an empty one was used"))
            return spare
        return here

    def _verify(self, ground: Ground) -> None:
        world = World(ground.lab, self._allowed, self._wild, self._edges) if ground.lab else None
        self._table.say("starting a sandbox, and another beside it")
        made = ground.sandbox()
        beside = ground.neighbour() if not self._options.only else None
        host = ground.witness()
        ready = made.hear(_NO_ROOM)
        neighbour, witness = ground.stranger(beside), ground.stranger(host)
        if self._options.without:
            ground.naive_proxy()
        scene = self._scene(ground, made, witness, neighbour)
        made.tell(scene)
        self._make_probes(made, world)
        command = outside.command_of(made.process.pid, int(ready.get("ready", 0)))
        self._outside(ground, made, command)
        if world is not None:
            self._add_left(world)

    # the scene

    def _scene(self, ground: Ground, made: Inside, witness: Stranger, neighbour: Stranger) -> dict[str, Any]:
        targets = self._options.targets
        told: dict[str, Any] = {
            "nonce": self._nonce,
            "targets": targets or TARGETS,
            "only_targets": bool(targets),
            "resolvers": targets or RESOLVERS,
            "metadata": [] if targets else metadata_addresses(),
            "special": [] if targets else SPECIAL,
            "metadata_names": [] if targets else metadata_names(),
            "evil": "" if targets else EVIL,
            "evil_is_allowed": self._evil_is_allowed,
            "host_addresses": _host_addresses(self._options),
            "own_ends": [*OWN_ADDRESSES.values(), "127.0.0.1", "::1"],
            "resolver": topology.DNS if self._options.without else RESOLVER,
            "allowed": self._allowed,
            "edges": self._edges,
            "wild": self._wild,
            "host_ports": witness.ports,
            "neighbour_ports": neighbour.ports,
            "neighbour_token": ground.token,
            "neighbour_files": [*neighbour.files, *witness.files],
            "neighbour_memory": neighbour.memory,
            "abstract": [*neighbour.abstract, *witness.abstract],
            "sockets": [
                *(each for each in witness.sockets if each != str(ground.control_socket)),
                *callers_sockets(os.environ),
            ],
            "secret": ground.secret,
            "uids": sorted({0, WORKER_UID, SOCKET_UID, os.geteuid(), SANDBOX_UID + 1000}),
            "processes": list(_processes(made.process.pid)),
            "spaces": _spaces(ground),
            "authority": _fingerprint(self._config, ground),
        }
        paths = self._paths(ground)
        return told | {"paths": paths, "folders": _identities(paths)} | ground.told()

    def _paths(self, ground: Ground) -> dict[str, list[str]]:
        config = self._config
        own = ground.directory / "sandbox"
        rules = [config.rules, *sorted(config.rules.rglob("*.yaml"))[:20]]
        journal = [config.journal] if isinstance(config.journal, Path) else []
        code = {
            str(Path(egressd.__file__).parent),
            *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib")),
        }
        found: dict[str, list[Any]] = {
            "authority key": [config.ca.ca, config.ca.key, own / "ca", own / "ca/ca.key"],
            "credentials": [config.credentials],
            "rules": rules,
            "journal": [*journal, own / "journal.jsonl"],
            "configuration": [
                *([config.file] if config.file else []),
                config.state_dir,
                own / "standing.json",
            ],
            "control socket": [config.control_socket, ground.control_socket],
            "code": sorted(code),
            "home": [os.environ.get("HOME") or "/"],
        }
        return {what: [os.path.normpath(path) for path in paths] for what, paths in found.items()}

    # the probes

    def _make_probes(self, made: Inside, world: World | None) -> None:
        only = self._options.only
        probes = [probe for probe in probes_of(self._options.wiring) if not only or probe.name in only]
        if world is not None:
            world.seen()  # what left while everything started is nobody's but the last row's
        gone = ""
        for number, probe in enumerate(probes, 1):
            self._table.say(f"{number}/{len(probes)} {probe.name}")
            left = SECONDS - (time.monotonic() - self._began)
            took = 0.0
            if gone or left <= 0:
                outcome = broke_off(gone or "there is no time left")
            else:
                try:
                    outcome, took = made.make(probe, min(_NO_ROOM, max(left, 1.0)))
                except BrokeOff as error:
                    gone = f"the probes' program is gone: {error}"
                    outcome = broke_off(gone)
            if world is not None and not self._options.without:
                outcome = _held_against(outcome, world)
            self._add(probe, outcome, took)

    def _outside(self, ground: Ground, made: Inside, command: int | None) -> None:
        time.sleep(_SETTLE)
        uid = outside.host_uid(command) if command is not None else None
        view_ = outside.View(
            config=self._config,
            stand=ground.stands(made),
            command=command,
            euid=os.geteuid(),
            sandbox_uid=uid,
            journal=ground.journal,
            nonce=self._nonce,
            allowed=self._allowed,
            policy=self._policy,
            now=time.time(),
            evil_is_allowed=self._evil_is_allowed,
            without=self._options.without,
            sandbox=ground.identity(),
            layers=layers_of(self._options.wiring, names=self._config.dns.answers == "self"),
            differences=ground.differences(),
        )
        for probe in outside_of(self._options.wiring):
            if not self._options.only or probe.name in self._options.only:
                self._add(probe, outside.MADE[probe](view_), 0.0)

    def _add_left(self, world: World) -> None:
        """What left altogether, with what came after the last probe."""
        if self._options.without:
            return
        world.seen()
        total, lost = world.total(), world.lost()
        self._left = {
            "packets": list(total.packets),
            "questions": list(total.questions),
            "requests": list(total.requests),
            "lost": lost,
        }
        outcome = Outcome(HELD, "no packet, no question and no request but the rules' own")
        if total:
            outcome = opened(str(total))
        elif lost:
            outcome = broke_off(f"the capture missed {lost} packets")
        self._add(outside.NOTHING_LEFT, outcome, 0.0)

    def _add(self, probe: Probe | outside.OutsideProbe, outcome: Outcome, took: float) -> None:
        row = {
            "name": probe.name,
            "part": probe.part,
            "tries": probe.tries,
            "why": probe.why,
            "held_means": probe.proves,
            "verdict": outcome.verdict,
            "detail": outcome.detail,
            "seconds": took,
        }
        self._rows.append(row)
        self._table.add(row)

    def _document(self) -> dict[str, Any]:
        counts = {
            verdict: sum(row["verdict"] == verdict for row in self._rows) for verdict in (HELD, OPEN, UNTRIED)
        }
        broken = [
            row for row in self._rows if row["verdict"] == UNTRIED and row["detail"].startswith(BROKE_OFF)
        ]
        status = 1 if counts[OPEN] else 3 if broken else 0
        took = round(time.monotonic() - self._began, 1)
        words = f"verify: {counts[HELD]} held, {counts[OPEN]} open, {counts[UNTRIED]} not tried, in {took} s"
        if status == 3:
            words += f"; nothing is proved: {broken[0]['name']}: {broken[0]['detail']}"
        return {
            "schema": 1,
            "profile": self._options.profile,
            "wiring": self._options.wiring,
            "policy": self._policy.digest,
            "targets": list(self._options.targets) or "lab",
            "probes": self._rows,
            "left": self._left,
            "notes": self._notes,
            "seconds": took,
            "status": status,
            "summary": words,
        }


def _held_against(outcome: Outcome, world: World) -> Outcome:
    """What a probe found, corrected by what the lab saw meanwhile."""
    seen = world.seen()
    if not seen:
        return outcome
    also = f"; {outcome.detail}" if outcome.verdict == OPEN else ""
    return opened(f"{seen}{also}")


def _host_addresses(options: Options) -> tuple[str, ...]:
    """Where the witness can be met besides the loopback."""
    if options.targets:
        return ()
    return topology.OPEN if options.without else topology.HOST


def callers_sockets(environ: Mapping[str, str]) -> list[str]:
    """The Unix sockets that the caller's variables name: agents, buses, engines, displays, as paths or addresses of them."""
    found = []
    for value in environ.values():
        for path in re.findall(r"(?:^|=|unix://|unix:path=)(/[^,;=\s]+)", value):
            with contextlib.suppress(OSError, ValueError):
                if stat.S_ISSOCK(os.stat(path).st_mode):
                    found.append(path)
    if match := re.match(r":(\d+)", environ.get("DISPLAY", "")):
        found.append(f"/tmp/.X11-unix/X{match[1]}")  # noqa: S108 - where X servers listen
    return found


def _processes(stand: int) -> Iterator[Process]:
    for pid in descendants(stand):
        at = started(pid)
        if at:
            yield Process(pid, at, "egressd" if pid == stand else "a process of egressd's")


def _spaces(ground: Ground) -> dict[str, str]:
    found = {kind: os.readlink(f"/proc/self/ns/{kind}") for kind in _NAMES}
    own = os.readlink("/proc/self/ns/net")
    return found | {"net": f"net:[{ground.lab.netns_inode('host')}]" if ground.lab else own}


def _identities(paths: dict[str, list[str]]) -> dict[str, tuple[int, int]]:
    """Every path that exists and every folder above it, by device and inode."""
    found = {}
    for path in {Path(each) for several in paths.values() for each in several}:
        for place in (path, *path.parents):
            try:
                status = place.stat()
            except OSError:
                continue
            found[str(place)] = (status.st_dev, status.st_ino)
    return found


def _fingerprint(config: Config, ground: Ground) -> str:
    """The SHA-256 of the authority's certificate that the sandbox must trust, in hex; "" where there is none."""
    for path in (config.ca.certificate, ground.directory / "sandbox/ca/ca.crt"):
        try:
            der = ssl.PEM_cert_to_DER_cert(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
        return hashlib.sha256(der).hexdigest()
    return ""
