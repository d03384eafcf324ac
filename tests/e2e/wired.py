"""egressd and its sandboxes in runc containers: in one network namespace (sidecar), or behind a bridge (gateway)."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from egressd.lab import Lab
from egressd.lab.lab import clean_env
from egressd.lab.stand import Stand
from tests.e2e.conftest import until

TOP = Path(__file__).parents[2]
CONTAINER = TOP / "deploy" / "runc" / "container.py"
BEHIND = TOP / "deploy" / "runc" / "behind.sh"
DAEMON = Path(__file__).parent / "programs" / "wired_daemon.py"
INSIDE = Path(__file__).parent / "programs" / "wired_inside.py"
UID = 1337
POWERS = ("CAP_NET_ADMIN", "CAP_SETUID", "CAP_SETGID")
BRIDGE, GATEWAY = "sandboxes", "10.90.0.1"
SANDBOXES = {"a": "10.90.0.5", "b": "10.90.0.6"}
API = "https://api.lab-origin.com/n"


def interpreter() -> list[str]:
    """The folders that this Python, and egressd's own code, need in a container."""
    places = {sys.prefix, sys.base_prefix, str(TOP)}
    return sorted(place for place in places if not place.startswith("/usr"))


class Daemon:
    """egressd, as a process that is told things by lines."""

    def __init__(self, lab: Lab, stand: Stand, argv: Sequence[str]) -> None:
        self.log = stand.directory / "daemon.log"
        with self.log.open("w") as log:
            self.process = lab.popen(
                "host", list(argv), env=environment(lab), cwd="/", stdin=subprocess.PIPE, stderr=log
            )
        self.bundle: str = self._answer()["bundle"]

    def ask(self, line: str) -> Any:
        """Have it do something; what it answers."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        return json.loads(line)

    def end(self) -> None:
        """End it as its service manager would."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)


class Served:
    """The real daemon, `egressd serve`, that is told things by the command line; `within` leads to where it may be asked."""

    def __init__(self, lab: Lab, stand: Stand, argv: Sequence[str], within: Sequence[str] = ()) -> None:
        self.lab, self.stand, self.within = lab, stand, within
        self.log = stand.directory / "daemon.log"
        with self.log.open("w") as log:
            self.process = lab.popen(
                "host",
                list(argv),
                env=environment(lab),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.bundle = str(stand.directory / "ca-trust" / "bundle.crt")
        self.ids: dict[str, str] = {}
        until(self.ready, 30.0, "readiness")

    def ready(self) -> bool:
        """Whether it says so."""
        assert self.process.poll() is None, self.log.read_text()
        asked = ["curl", "-sS", "-m", "2", "http://127.0.0.1:15021/readyz"]
        return self.lab.run("host", asked).stdout == "ok\n"

    def ask(self, line: str) -> Any:
        """Create or revoke a sandbox; its id, or what was said."""
        verb, name, *place = line.split()
        if verb == "revoke":
            return self._line("revoke", self.ids.pop(name))
        options = [
            word for pair in zip(("--source", "--mac", "--port"), place, strict=False) for word in pair
        ]
        wiring = "gateway" if place else "sidecar"
        said = self._line("create", "--profile", "lab", "--wiring", wiring, "--format", "json", *options)
        made = json.loads(said)
        if "error" in made:
            return made["error"]
        self.ids[name] = made["sandbox"]["id"]
        return self.ids[name]

    def _line(self, *words: str) -> str:
        argv = [
            *self.within,
            sys.executable,
            "-P",
            "-m",
            "egressd",
            "--config",
            str(self.stand.config),
            "sandbox",
            *words,
        ]
        done = self.lab.run("host", argv, env=environment(self.lab), cwd="/")
        return done.stdout if done.returncode == 0 else json.dumps({"error": done.stderr})

    def end(self) -> None:
        """End it as its service manager would."""
        self.process.terminate()
        self.process.wait(30)


def environment(lab: Lab) -> dict[str, str]:
    return clean_env(lab, trust=False) | {"PYTHONPATH": str(TOP), "PYTHONDONTWRITEBYTECODE": "1"}


class Containers:
    """Makes containers in a lab."""

    def __init__(self, lab: Lab, stand: Stand) -> None:
        self.lab, self.stand = lab, stand
        self.environment = environment(lab)
        self.state = stand.directory / "runc"
        self.name = ""
        self._count = 0

    def argv(self, options: Sequence[str], command: Sequence[str]) -> list[str]:
        self._count += 1
        self.name = f"t{os.getpid()}-{self._count}"
        return [
            "/usr/bin/python3",
            str(CONTAINER),
            f"--state={self.state}",
            *options,
            self.name,
            "--",
            *command,
        ]

    def run(
        self, command: Sequence[str], *options: str, bundle: str, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a container as an agent's is made, to its end."""
        trust = f"--env=CURL_CA_BUNDLE={bundle}"
        binds = [f"--bind={Path(bundle).parent}:ro", f"--bind={INSIDE.parent}:ro"]
        argv = self.argv([trust, *binds, "--resolver=198.18.0.1", *options], command)
        return self.lab.run("host", argv, env=environment(self.lab), cwd="/", timeout=timeout)

    def inside(self, case: str, *options: str, bundle: str, timeout: float = 60) -> dict[str, Any]:
        """Try a case of `wired_inside.py` in a container; what it found."""
        command = ["/usr/bin/python3", str(INSIDE), *case.split()]
        done = self.run(command, *options, bundle=bundle, timeout=timeout)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


class Pod:
    """The sidecar: the lab's `host` is the network namespace that egressd and its sandbox share."""

    def __init__(self, lab: Lab, stand: Stand, *, real: bool = False) -> None:
        self.lab, self.stand, self.real = lab, stand, real
        self.containers = Containers(lab, stand)
        # As container engines set it, so that a ping is a packet.
        lab.run("host", ["sysctl", "-qw", "net.ipv4.ping_group_range=0 2147483647"])
        for path in (stand.directory, *stand.directory.rglob("*")):
            os.chown(path, UID, UID, follow_symlinks=False)
        self.start()

    def start(self) -> None:
        """Wire the namespace and start a daemon in it, and a sandbox beside it."""
        lab, stand = self.lab, self.stand
        binds = [f"--bind={place}:ro" for place in interpreter()]
        options = ["--uid=0", *(f"--capability={power}" for power in POWERS), *binds]
        options += [f"--bind={stand.directory}", f"--bind={lab.ca_file}:ro", f"--env=PYTHONPATH={TOP}"]
        python = [sys.executable, "-P"]
        wire = [*python, "-m", "egressd", "wire", "sidecar", "--uid", str(UID), "--"]
        serve = [*python, str(DAEMON), str(stand.config), json.dumps({"sidecar": True})]
        self.daemon: Daemon | Served
        if self.real:
            serve = [*python, "-m", "egressd", "--config", str(stand.config), "serve"]
            argv = self.containers.argv(options, [*wire, *serve])
            within = [
                "runc",
                f"--root={self.containers.state}",
                "exec",
                f"--user={UID}",
                self.containers.name,
            ]
            self.daemon = Served(lab, stand, argv, within)
        else:
            self.daemon = Daemon(lab, stand, self.containers.argv(options, [*wire, *serve]))
        self.container = self.containers.name
        self.sandbox: str = self.daemon.ask("create a")

    def kill(self) -> None:
        """Kill everything in the daemon's container."""
        ok(self.lab, f"runc --root {self.containers.state} kill {self.container} KILL")
        self.daemon.process.wait(20)

    def run(self, script: str, *options: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a script in the sandbox's container."""
        return self.containers.run(
            ["sh", "-ec", script], *options, bundle=self.daemon.bundle, timeout=timeout
        )

    def inside(self, case: str, *options: str) -> dict[str, Any]:
        """Try a case of `wired_inside.py` there."""
        return self.containers.inside(case, *options, bundle=self.daemon.bundle)

    def wire(self, *flags: str) -> subprocess.CompletedProcess[str]:
        """`egressd wire sidecar` with the rights of an operator."""
        argv = [sys.executable, "-m", "egressd", "wire", "sidecar", *flags]
        return self.lab.run("host", argv, env=environment(self.lab), cwd="/")

    def end(self) -> None:
        """End the daemon."""
        self.daemon.end()


@contextmanager
def pod(lab: Lab, stand: Stand, *, real: bool = False) -> Iterator[Pod]:
    """A sidecar for the length of a test."""
    made = Pod(lab, stand, real=real)
    try:
        yield made
    finally:
        made.end()


class Behind:
    """A network of a container's behind the bridge, held by a process; containers of it come and go."""

    def __init__(self, gateway: Bridge, name: str, address: str) -> None:
        self.gateway, self.name, self.address, self.port = gateway, name, address, f"to-{name}"
        lab = gateway.lab
        hold = ["unshare", "-n", "sh", "-c", "echo held && exec sleep 600"]
        self.holder = lab.popen("host", hold, stdin=subprocess.DEVNULL)
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline() == "held\n"
        self.network = f"/proc/{self.holder.pid}/ns/net"
        ok(lab, f"ip link add {self.port} type veth peer name eth0 netns {self.holder.pid}")
        ok(lab, f"ip link set {self.port} master {BRIDGE} up")
        for command in (
            "ip link set lo up",
            f"ip addr add {address}/24 dev eth0",
            f"ip addr add fd00:90::{address.rpartition('.')[2]}/64 dev eth0 nodad",
            "ip link set eth0 up",
            f"ip route add default via {GATEWAY}",
            "ip -6 route add default via fd00:90::1",
            "sysctl -qw net.ipv4.ping_group_range=0\\ 2147483647",
        ):
            self.do(command)
        self.mac = self.do("cat /sys/class/net/eth0/address").strip()

    def do(self, command: str) -> str:
        """Run a command in the network with power over it."""
        inside = ["nsenter", f"--net={self.network}", "--mount=/proc/self/ns/mnt"]
        script = f"mount -t sysfs none /sys; {command}"
        argv = [*inside, "unshare", "-m", "sh", "-ec", script]
        done = self.gateway.lab.run("host", argv)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def create(self) -> str:
        """Have the daemon know it; its id."""
        made = self.gateway.daemon.ask(f"create {self.name} {self.address} {self.mac} {self.port}")
        assert isinstance(made, str), made
        return made

    def run(self, script: str, *options: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a script in a container of this network."""
        gateway = self.gateway
        network = f"--network={self.network}"
        return gateway.containers.run(
            ["sh", "-ec", script], network, *options, bundle=gateway.daemon.bundle, timeout=timeout
        )

    def inside(self, case: str, *options: str) -> dict[str, Any]:
        """Try a case of `wired_inside.py` there."""
        gateway = self.gateway
        return gateway.containers.inside(
            case, f"--network={self.network}", *options, bundle=gateway.daemon.bundle
        )

    def end(self) -> None:
        """End the network."""
        self.holder.kill()
        self.holder.wait()


class Bridge:
    """The gateway: a bridge in the lab's `host`, which forwards and masquerades as a container engine's does."""

    def __init__(self, lab: Lab, stand: Stand, *, real: bool = False) -> None:
        self.lab, self.stand, self.real = lab, stand, real
        self.containers = Containers(lab, stand)
        for command in (
            f"ip link add {BRIDGE} type bridge",
            f"ip addr add {GATEWAY}/24 dev {BRIDGE}",
            f"ip addr add fd00:90::1/64 dev {BRIDGE} nodad",
            f"ip link set {BRIDGE} up",
            "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1",
            "sysctl -qw net.bridge.bridge-nf-call-iptables=1 net.bridge.bridge-nf-call-ip6tables=1",
            f"iptables -t nat -A POSTROUTING -s 10.90.0.0/24 ! -o {BRIDGE} -j MASQUERADE",
            f"iptables -A FORWARD -i {BRIDGE} -j ACCEPT",
            "ip6tables -t nat -A POSTROUTING -s fd00:90::/64 -j MASQUERADE",
        ):
            ok(lab, command)
        self.start()
        self.sandboxes = {name: Behind(self, name, address) for name, address in SANDBOXES.items()}
        self.ids = {name: sandbox.create() for name, sandbox in self.sandboxes.items()}

    def start(self) -> None:
        """Start a daemon."""
        python, config = [sys.executable, "-P"], str(self.stand.config)
        self.daemon: Daemon | Served
        if self.real:
            self.daemon = Served(
                self.lab, self.stand, [*python, "-m", "egressd", "--config", config, "serve"]
            )
        else:
            argv = [*python, str(DAEMON), config, json.dumps({"gateway": BRIDGE})]
            self.daemon = Daemon(self.lab, self.stand, argv)

    def wire(self, *flags: str) -> subprocess.CompletedProcess[str]:
        """`egressd wire gateway` for the bridge."""
        argv = [sys.executable, "-m", "egressd", "wire", "gateway", "--interface", BRIDGE, *flags]
        return self.lab.run("host", argv, env=environment(self.lab), cwd="/")

    def rules(self) -> list[str]:
        """Every packet rule of the host."""
        tools = ("iptables-save", "ip6tables-save")
        text = "".join(self.lab.run("host", [tool]).stdout for tool in tools)
        return [line for line in text.splitlines() if line.startswith(("-", "*"))]

    def end(self) -> None:
        """End daemon, sandboxes and bridge."""
        self.daemon.end()
        for sandbox in self.sandboxes.values():
            sandbox.end()
        ok(self.lab, f"ip link del {BRIDGE}")


@contextmanager
def bridge(lab: Lab, stand: Stand, *, real: bool = False) -> Iterator[Bridge]:
    """A gateway with sandboxes for the length of a test."""
    made = Bridge(lab, stand, real=real)
    try:
        yield made
    finally:
        made.end()


def ok(lab: Lab, command: str) -> None:
    """Run a command in the lab's host; it must work."""
    done = lab.run("host", shlex.split(command))
    assert done.returncode == 0, (command, done.stderr)


def left(lab: Lab, *addresses: str) -> list[Any]:
    """What left the host for these addresses."""
    assert lab.packets_lost() == 0
    return [flow for address in addresses for flow in lab.packets("host", address=address)]


def counted(records: Sequence[Mapping[str, Any]], **wanted: object) -> int:
    """How many attempts records account for: each of them, or what it counts."""
    return sum(
        record.get("count") or 1
        for record in records
        if record["event"] in ("decision", "lost") and all(record.get(k) == v for k, v in wanted.items())
    )
