"""Two sandboxes and egressd on one internal network, as `internal: true` makes it: a bridge, a wire each, and no route beyond."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from egressd.lab import Lab
from egressd.lab.lab import clean_env
from egressd.lab.stand import Stand

OWN = "172.30.0.2"
ADDRESSES = {"a": "172.30.0.3", "b": "172.30.0.4"}
DAEMON = Path(__file__).parent / "programs" / "explicit_daemon.py"
LOWEST = "/proc/sys/net/ipv4/ip_unprivileged_port_start"


class Inner:
    """A sandbox: a process that holds its network and its resolv.conf."""

    def __init__(self, lab: Lab, stand: Stand, name: str) -> None:
        self.lab, self.stand, self.name = lab, stand, name
        self.address = ADDRESSES[name]
        self.bundle = ""
        resolv = stand.directory / f"resolv-{name}.conf"
        resolv.write_text(f"nameserver {OWN}\noptions timeout:2 attempts:1\n")
        hold = f"mount --bind {resolv} $(readlink -f /etc/resolv.conf) && echo held && exec sleep 600"
        self.holder = lab.popen("host", ["unshare", "-n", "-m", "sh", "-c", hold], stdin=subprocess.DEVNULL)
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline() == "held\n"
        wire = f"to-{name}"
        lab_command(
            lab,
            "ip",
            "link",
            "add",
            wire,
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            str(self.holder.pid),
        )
        lab_command(lab, "ip", "link", "set", wire, "master", "internal", "up")
        for command in (
            "ip link set lo up",
            f"ip addr add {self.address}/24 dev eth0",
            "ip link set eth0 up",
        ):
            assert self.run(command, user=False).returncode == 0

    def argv(self, script: str, *, user: bool = True) -> list[str]:
        pid = self.holder.pid
        inside = ["nsenter", f"--net=/proc/{pid}/ns/net", f"--mount=/proc/{pid}/ns/mnt", "--"]
        drop = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "--"] if user else []
        return [*inside, *drop, "sh", "-ec", script]

    def run(
        self, script: str, *, env: Mapping[str, str] | None = None, user: bool = True, timeout: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a script inside, by default as an ordinary user."""
        return self.lab.run(
            "host", self.argv(script, user=user), env=self.environment(env), cwd="/", timeout=timeout
        )

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """The variables of what runs inside."""
        workspace = self.stand.workspace / self.name
        workspace.mkdir(exist_ok=True)
        workspace.chmod(0o777)
        trust = dict.fromkeys(
            ("SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS"),
            self.bundle,
        )  # fmt: skip
        return clean_env(self.lab, home=str(workspace), trust=False) | trust | dict(more or {})


class Network:
    """The internal network and egressd on it; `spec` is what the daemon is asked for."""

    def __init__(self, lab: Lab, stand: Stand, spec: Mapping[str, Any]) -> None:
        self.lab, self.stand = lab, stand
        lab_command(lab, "ip", "link", "add", "internal", "type", "bridge")
        lab_command(lab, "ip", "addr", "add", f"{OWN}/24", "dev", "internal")
        lab_command(lab, "ip", "link", "set", "internal", "up")
        lab_command(lab, "sh", "-c", f"echo 53 > {LOWEST}")
        self.sandboxes = {name: Inner(lab, stand, name) for name in ADDRESSES}
        self.log = stand.directory / "daemon.log"
        argv = [sys.executable, "-P", str(DAEMON), str(stand.config), json.dumps(spec)]
        with self.log.open("w") as log:
            self.daemon = lab.popen(
                "host",
                argv,
                env=clean_env(lab, trust=False) | {"PYTHONPATH": str(Path(__file__).parents[2])},
                cwd=str(stand.directory),
                privileged=False,
                stdin=subprocess.PIPE,
                stderr=log,
            )
        assert self.daemon.stdout is not None
        line = self.daemon.stdout.readline()
        assert line, self.log.read_text()
        told = json.loads(line)
        self.made: dict[str, dict[str, str]] = told["sandboxes"]
        for sandbox in self.sandboxes.values():
            sandbox.bundle = told["bundle"]

    def ask(self, line: str) -> None:
        """Have the daemon do something, and wait until it is done."""
        assert self.daemon.stdin is not None
        assert self.daemon.stdout is not None
        self.daemon.stdin.write(f"{line}\n")
        self.daemon.stdin.flush()
        assert self.daemon.stdout.readline() == "done\n", self.log.read_text()

    def url(self, of: str, *, scheme: str = "http", port: int = 3128) -> str:
        """The proxy URL of a sandbox."""
        return f"{scheme}://{self.made[of]['id']}:{self.made[of]['token']}@{OWN}:{port}"

    def environment(self, of: str) -> dict[str, str]:
        """The variables that lead a sandbox's clients to its proxy."""
        url = self.url(of)
        return dict.fromkeys(("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"), url)

    def end(self) -> None:
        """End the daemon as an operator does, then the sandboxes and their network."""
        with contextlib.suppress(OSError):
            assert self.daemon.stdin is not None
            self.daemon.stdin.close()
        self.daemon.wait(20)
        for sandbox in self.sandboxes.values():
            sandbox.holder.kill()
            sandbox.holder.wait()
        lab_command(self.lab, "ip", "link", "del", "internal")


def lab_command(lab: Lab, *argv: str) -> None:
    done = lab.run("host", list(argv))
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def network(lab: Lab, stand: Stand, spec: Mapping[str, Any]) -> Iterator[Network]:
    """A network for the length of a test."""
    made = Network(lab, stand, spec)
    try:
        yield made
    finally:
        made.end()


def reasons(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the reasons of records, each once, in order."""
    return list(dict.fromkeys(record["reason"] for record in records))
