"""The ground of `egressd verify` for sandboxes that egressd does not make: a daemon of this installation, and containers.

The daemon stands in the lab as one would on a host. The containers are made here by util-linux alone, as a manifest for agents
should ask for: an unprivileged uid, no capability and no way to gain one, mounts and processes of their own. Their network is the
wiring's.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import http.client
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from egressd.cli.client import OverUnix
from egressd.cli.verify_ground import Ground
from egressd.cli.verify_inside import BrokeOff, Inside, argv
from egressd.cli.verify_stand import Standing, described, installed, stood
from egressd.lab import LabError, topology
from egressd.verify.probe import safe
from egressd.wiring import ruleset
from egressd.wiring.identity import SANDBOX_UID, WORKER_UID
from egressd.wiring.ruleset import OWN_ADDRESSES, RESOLVER
from egressd.wiring.tables import FAMILIES

_BRIDGE: Final = "vfy0"
_NETWORK: Final = "10.90.77"
_AT: Final = f"{_NETWORK}.1"
_READY: Final = 40.0
_PING: Final = "net.ipv4.ping_group_range=0 2147483647"
"""As container engines set it, so that a ping is a packet."""
_BARE: Final = (
    "setpriv",
    "--clear-groups",
    "--inh-caps=-all",
    "--ambient-caps=-all",
    "--bounding-set=-all",
    "--no-new-privs",
)
_UID: Final = (f"--reuid={SANDBOX_UID}", f"--regid={SANDBOX_UID}")
_SETUP: Final = f"""\
mount --make-rprivate /
mount --bind "$0" "$(readlink -f /etc/resolv.conf)"
exec nsenter --net=/proc/self/fd/9 -- {" ".join((*_BARE, *_UID))} -- sh -c 'exec 9<&-; exec "$@"' sh "$@"
"""
"""The network is entered last, on the way to having no power: it is looked at who has power there."""
_SPACES: Final = ("--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc")
_REACHED: Final = """\
places=$0; top=$1; shift
mount --make-rprivate /
for place in $places; do mkdir -p "$TMPDIR$place"; mount --bind "$place" "$TMPDIR$place"; done
mount -t tmpfs -o mode=755 none "$top"
for place in $places; do mkdir -p "$place"; mount --bind "$TMPDIR$place" "$place"; done
exec "$@"
"""
"""Shows folders at their places to who may not pass through the folder above them."""


class WiredGround(Ground):
    """A lab with a daemon in it, and containers of one wiring. Raises LabError and BrokeOff when it cannot be built."""

    def sandbox(self) -> Inside:
        """Start the daemon, and a container with the probes in it."""
        if self.lab is None or self.lab.rootless:
            raise LabError(
                "containers and their networks are made by root alone\nhint: run it as root, without --target"
            )
        self.directory.chmod(0o711)
        self._wiring = self.options.wiring
        self._made: dict[str, dict[str, Any]] = {}
        self._holders: dict[str, int] = {}
        if self._wiring in ("gateway", "explicit"):
            self._network()
        elif self._wiring == "sidecar":
            self._run("sysctl", "-qw", _PING)
        self._daemon = self._serve()
        made = self._container("sandbox", f"{_NETWORK}.5", "inside")
        for words in self.options.harm:
            holder = str(self._holders.get("sandbox", ""))
            self._run(*(word.replace("{holder}", holder) for word in words))
        return made

    def neighbour(self) -> Inside | None:
        """Start another, where there can be one."""
        if self._wiring == "sidecar":
            return None
        return self._ask(self._container("neighbour", f"{_NETWORK}.6", "neighbour"))

    def told(self) -> dict[str, Any]:
        """Return what of the scene is otherwise here."""
        own = [f"{_NETWORK}.5"]
        if self._wiring == "attached":
            own = [*OWN_ADDRESSES.values()]
        elif self._wiring == "sidecar":
            own = [*topology.HOST]
        return {
            "wiring": self._wiring,
            "own_ends": [*own, "127.0.0.1", "::1"],
            "proxy": self._proxy(),
            "resolver": self._resolver,
            "own_answers": ["198.18.", "198.19.", *([_AT] if self._wiring == "explicit" else [])],
            "quiet": self._wiring == "gateway",
            "routeless": self._wiring == "explicit",
            "neighbour_addresses": [f"{_NETWORK}.6"] if self._wiring == "gateway" else [],
            "host_addresses": [*topology.HOST, *([_AT] if self._wiring == "gateway" else [])],
            "processes": [],
            "spaces": {},
        }

    def stands(self, made: Inside) -> int:  # noqa: ARG002 -- the container is not below it
        """Return the daemon."""
        return self._daemon.pid

    def identity(self) -> str:
        """Return the id of the sandbox with the probes in it."""
        return str(self._made["sandbox"]["sandbox"]["id"])

    def differences(self) -> list[str] | None:
        """Return how the packet rules in force differ from those wanted. Raises BrokeOff."""
        match self._wiring:
            case "explicit":
                return None
            case "attached":
                net = f"--net=/proc/{self._holders['sandbox']}/ns/net"
                found = []
                for family, tool in zip(FAMILIES, ("iptables-save", "ip6tables-save"), strict=True):
                    saved = self._run("nsenter", net, "--", tool)
                    found += ruleset.missing_rules(ruleset.namespace_ruleset(family), saved)
                return found
            case "gateway":
                words = ("gateway", "--interface", _BRIDGE)
            case _:
                words = ("sidecar", "--uid", str(WORKER_UID))
        assert self.lab is not None
        checked = self.lab.run(
            "host",
            [sys.executable, "-P", "-m", "egressd", "wire", *words, "--check"],
            env=dict(os.environ) | {"PYTHONPATH": self.packages},
            cwd="/",
        )
        if checked.returncode not in (0, 1):
            raise BrokeOff(safe(checked.stderr))
        return checked.stdout.splitlines()

    # the daemon

    @property
    def _own(self) -> Path:
        return self.directory / "sandbox"

    @property
    def _resolver(self) -> str:
        if self._wiring == "explicit":
            return _AT if self.config.dns.answers == "self" else ""
        return RESOLVER

    def _serve(self) -> subprocess.Popen[bytes]:
        assert self.lab is not None
        self._own.mkdir()
        at = {"gateway": _BRIDGE, "explicit": _AT}.get(self._wiring, "")
        standing = Standing(
            described(self.config),
            {},
            str(self._own),
            f"udp://{self.lab.dns}",
            self.lab.ca_file,
            self._wiring,
            at,
        )
        file = self._own / "standing.json"
        file.write_text(standing.as_json(), encoding="utf-8")
        self._own.chmod(0o700)
        command = [*self.options.stand, str(file)]
        if self._wiring == "sidecar":
            command = self._beside(command)
        process = self._start(command, "daemon", privileged=True, cwd="/")
        self._parts.callback(_ended, process)
        self._wait(process)
        self._bundle(stood(installed(standing.config), standing).ca.trust / "bundle.crt")
        return process

    def _beside(self, command: list[str]) -> list[str]:
        """A daemon that becomes egressd's uid in a sidecar: with copies that it may read, and a Python that it reaches."""
        shutil.copytree(self.config.rules, self._own / "rules")
        if self.config.credentials.exists():
            shutil.copy(self.config.credentials, self._own / "credentials.yaml")
        for path in (self._own, *self._own.rglob("*")):
            os.chown(path, WORKER_UID, WORKER_UID)
        wire = [
            sys.executable,
            "-P",
            "-m",
            "egressd",
            "wire",
            "sidecar",
            "--uid",
            str(WORKER_UID),
            "--",
            *command,
        ]
        places = {os.path.abspath(each) for each in (sys.prefix, sys.base_prefix, self.packages)}
        closed = {top for place in places for top in _closed_above(Path(place))}
        if not closed:
            return wire
        if len(closed) > 1:
            raise LabError(f"uid {WORKER_UID} may not pass through {', '.join(sorted(map(str, closed)))}")
        (top,) = closed
        keep = self.directory / "reached"
        keep.mkdir()
        behind = sorted(place for place in places if top in Path(place).parents)
        shown = [
            "env",
            f"TMPDIR={keep}",
            "unshare",
            "--mount",
            "--",
            "sh",
            "-ec",
            _REACHED,
            " ".join(behind),
            str(top),
        ]
        return [*shown, "env", "-u", "TMPDIR", *wire]

    def _bundle(self, bundle: Path) -> None:
        """Show the containers what they are to trust, and whom they ask for names."""
        self.public = self.directory / "public"
        self.public.mkdir()
        shutil.copy(bundle, self.public / "bundle.crt")
        (self.public / "resolv.conf").write_text(
            f"nameserver {self._resolver}\n" if self._resolver else "# nobody\n"
        )
        for path in (self.public, *self.public.iterdir()):
            path.chmod(0o755)

    def _wait(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _READY
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                if self._request("GET", "/v1/status")[0] == 200:
                    return
            if process.poll() is not None or time.monotonic() > deadline:
                said = (self.directory / "daemon.log").read_text(encoding="utf-8", errors="replace")
                raise BrokeOff(
                    safe(f"the daemon does not stand: {'; '.join(said.strip().splitlines()[-4:])}")
                )
            time.sleep(0.05)

    def _request(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        connection = OverUnix(str(self.control_socket))
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    # containers

    def _network(self) -> None:
        for line in (
            f"ip link add {_BRIDGE} type bridge",
            f"ip addr add {_AT}/24 dev {_BRIDGE}",
            f"ip link set {_BRIDGE} up",
        ):
            self._run(*line.split())
        if self._wiring == "gateway":
            self._run(
                "sysctl",
                "-qw",
                "net.bridge.bridge-nf-call-iptables=1",
                "net.bridge.bridge-nf-call-ip6tables=1",
            )

    def _container(self, name: str, address: str, entry: str) -> Inside:
        place: dict[str, object] = {}
        network = "none"
        if self._wiring != "sidecar":
            holder = self._holders[name] = self._hold(name)
            network = f"/proc/{holder}/ns/net"
            attached = self._wiring == "attached"
            place = {"netns": network} if attached else self._plug(name, holder, address)
        wiring = "namespace" if self._wiring == "attached" else self._wiring
        wanted = {
            "profile": self.options.profile,
            "wiring": wiring,
            "labels": {"verify": self.nonce},
            **place,
        }
        status, made = self._request("POST", "/v1/sandboxes", wanted)
        if status != 201:
            raise BrokeOff(safe(f"{made.get('detail')} {made.get('hint') or ''}"))
        self._made[name] = made
        given = {"SSL_CERT_FILE": str(self.public / "bundle.crt"), "LANG": "C.UTF-8"} | made["environment"]
        command = ["env", "-i", *(f"{key}={value}" for key, value in given.items()), *argv()]
        process = self._start([*self._runner(name, network), *command], name, privileged=True, cwd="/")
        return self._inside(process, name, entry)

    def _runner(self, name: str, network: str) -> list[str]:
        """What runs a command in a container of a network; that of a sidecar is egressd's own."""
        if self.options.container:
            here = {"{network}": network, "{public}": str(self.public), "{name}": f"{self.nonce}-{name}"}
            return [
                functools.reduce(lambda text, key: text.replace(key, here[key]), here, word)
                for word in self.options.container
            ]
        network = "/proc/self/ns/net" if network == "none" else network
        held = ["sh", "-ec", 'exec 9<"$0"; exec "$@"', network]
        return [*held, "unshare", *_SPACES, "--", "sh", "-ec", _SETUP, str(self.public / "resolv.conf")]

    def _hold(self, name: str) -> int:
        """Start what holds a container's network; returns its pid."""
        hold = ["unshare", "--net", "--", *_BARE, "sh", "-c", "echo held; exec sleep 600"]
        process = self._start(hold, f"{name}-network", privileged=True, cwd="/")
        self._parts.callback(_ended, process)
        assert process.stdout is not None
        if process.stdout.readline() != b"held\n":
            said = (self.directory / f"{name}-network.log").read_text(encoding="utf-8", errors="replace")
            raise BrokeOff(safe(f"a network could not be made: {said}"))
        return process.pid

    def _plug(self, name: str, holder: int, address: str) -> dict[str, object]:
        """Plug a network into the bridge; returns what an order says of it."""
        port = f"vfy-{name[:5]}"
        enter = ("nsenter", f"--net=/proc/{holder}/ns/net", "--")
        self._run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(holder))
        self._run("ip", "link", "set", port, "master", _BRIDGE, "up")
        self._run(*enter, "ip", "link", "set", "lo", "up")
        self._run(*enter, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
        self._run(*enter, "ip", "link", "set", "eth0", "up")
        self._run(*enter, "sysctl", "-qw", _PING)
        if self._wiring == "explicit":
            return {"source": address}
        self._run(*enter, "ip", "route", "add", "default", "via", _AT)
        links = json.loads(self._run(*enter, "ip", "-json", "link", "show", "dev", "eth0"))
        return {"source": address, "mac": links[0]["address"], "port": port}

    def _proxy(self) -> list[object] | None:
        """egressd's own proxy for the sandbox, and what it wants to hear; None where there is none."""
        if self._wiring == "gateway":
            return None
        given = urlsplit(self._made["sandbox"]["environment"].get("HTTPS_PROXY", ""))
        if self._wiring != "explicit" or given.hostname is None:
            return ["127.0.0.1", 3128, ""]
        who = base64.b64encode(f"{given.username}:{given.password}".encode()).decode()
        return [given.hostname, given.port, f"Basic {who}"]

    def _run(self, *command: str) -> str:
        assert self.lab is not None
        done = self.lab.run("host", list(command), cwd="/")
        if done.returncode != 0:
            raise BrokeOff(safe(f"{' '.join(command)}: {done.stderr}"))
        return done.stdout


def _closed_above(place: Path) -> list[Path]:
    """The outermost folder above a place that others may not pass through, if there is one."""
    for folder in reversed(place.parents):
        with contextlib.suppress(OSError):
            if not folder.stat().st_mode & 0o001:
                return [folder]
    return []


def _ended(process: subprocess.Popen[bytes]) -> None:
    for end in (process.terminate, process.kill):
        end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=15)
            return
