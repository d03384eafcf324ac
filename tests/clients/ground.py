"""Where the clients are tried: the lab with its repositories and servers, egressd with one profile, and the measuring."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from egressd.lab import Lab, topology
from egressd.lab.containers import BLOBS, REGISTRY, TOKENS
from egressd.lab.objects import BUCKET_HOST
from egressd.lab.stand import Stand
from tests.clients import repositories
from tests.clients.cache import Cache
from tests.clients.catalogue import Client, Use

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"
RULES = f"""schema: 1
profile: lab
owner: clients
allow:
  - service: pypi
  - service: npm
  - service: debian
  - service: github-clone
    with: {{repos: ["acme/*"]}}
  - id: api
    hosts: [api.lab-origin.com]
    requests: ["GET,HEAD /**", "POST /echo", "POST /closeafter", "WEBSOCKET /ws"]
  - id: both-versions
    hosts: [h2.lab-origin.com]
    requests: ["GET,HEAD /**", "POST /upload"]
  - id: pinned
    hosts: [pinned.lab-origin.com]
    treatment: tunnel
  - id: crates
    hosts: [index.crates.io, static.crates.io]
  - id: go
    hosts: [proxy.golang.org]
  - id: rubygems
    hosts: [rubygems.org, index.rubygems.org]
  - id: maven
    hosts: [repo.maven.apache.org]
  - id: docker-hub
    hosts: [{REGISTRY}, {TOKENS}, {BLOBS}]
  - id: bucket
    hosts: [{BUCKET_HOST}]
    requests: ["GET,HEAD,PUT /**"]
  - id: grpc
    hosts: [grpc.lab-origin.com]
    ports: [50051]
    requests: ["POST /lab.Greeter/*"]
"""
_SECONDS = 100.0
_GRPC_PORT = 50051
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r(?!\n)")
_STATUS = re.compile(r"(?<![\w.:])403\b|PERMISSION_DENIED")
_ATTEMPT = re.compile(r"\b(attempt:? )[0-9a-z-]{8,}")
_CLOCK = re.compile(
    r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\dZ?"
)  # the page should differ only where a client does
_LINES, _WIDTH = 8, 700
# Nothing of this machine's configuration may decide how a client does.
_NEUTRAL = {
    "PIP_CONFIG_FILE": "/dev/null",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
    "NPM_CONFIG_USERCONFIG": "/dev/null",
    "NPM_CONFIG_GLOBALCONFIG": "/nonexistent/npmrc",
    "NPM_CONFIG_UPDATE_NOTIFIER": "false",
}


@dataclass(frozen=True, slots=True)
class Ran:
    """One use as it went: what the user saw, the exit status, seconds, and how often it knocked."""

    script: str
    status: int
    output: str
    seconds: float
    denied: tuple[str, ...]
    """The reasons of the requests (or, where none was sent, connections and names) that were refused, in order."""

    @property
    def last_lines(self) -> list[str]:
        """The end of what the user saw, without escapes and empty lines."""
        lines = [line.rstrip() for line in self.output.splitlines() if line.strip()]
        return [line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…" for line in lines[-_LINES:]]

    @property
    def readable(self) -> str:
        """yes: it says which reason; status: only that it was a 403; no."""
        flowing = " ".join(self.output.split())  # some fold long lines
        if any(f"(reason {reason}" in flowing for reason in self.denied):
            return "yes"
        return "status" if _STATUS.search(self.output) else "no"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A client's two uses."""

    client: Client
    version: str
    allowed: Ran
    denied: Ran

    @property
    def works(self) -> bool:
        """Did the allowed use do what it should?"""
        return self.allowed.status == 0 and self.client.allowed.expects in self.allowed.output

    @property
    def refused(self) -> bool:
        """Was the denied use refused, and did the client take it for a failure or show it?"""
        return bool(self.denied.denied)


class Ground:
    """A lab and a stand for any number of clients; `close` ends both."""

    def __init__(self, cache: Cache, *, rootless: bool | None = None) -> None:
        self.cache = cache
        self.lab = Lab.build(rootless=rootless)
        try:
            self._furnish()
            self.stand = Stand(self.lab, RULES, shipped=ROOT / "rules")
            shutil.copytree(PROGRAMS, self.stand.workspace / "programs")
        except BaseException:
            self.lab.close()
            raise

    def __enter__(self) -> Ground:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove everything."""
        self.stand.close()
        self.lab.close()

    def lacks(self, client: Client) -> str | None:
        """Why a client cannot be tried, or None."""
        reasons = (self.cache.lacks(need) for need in client.needs)
        return next((reason for reason in reasons if reason), None)

    def measure(self, client: Client) -> Outcome:
        """Try both uses; the version is asked for in the sandbox as well."""
        allowed = self.run(client, client.allowed, f"({client.version}) > $VERSION 2>&1")
        version = (self.stand.workspace / "version").read_text().split() or ["unknown"]
        return Outcome(client, version[-1], allowed, self.run(client, client.denied))

    def run(self, client: Client, use: Use, before: str = "true") -> Ran:
        """Run one use in a sandbox of its own."""
        script = (
            f'{before}; use=$(mktemp -d); cd "$use"; TIMEFORMAT=%R; exec 3>&1; '
            '{ time sh -ec "$SCRIPT" 1>&3 2>&3; } 2> "$SECONDS_FILE"'
        )
        workspace = self.stand.workspace
        given = {
            **_NEUTRAL,
            **client.env,
            "SCRIPT": use.script,
            "PROGRAMS": str(workspace / "programs"),
            "VERSION": str(workspace / "version"),
            "SECONDS_FILE": str(workspace / "seconds"),
        }
        flags = [word for path in self.cache.binds for word in ("--bind", f"{path}:ro")]
        flags += [word for name, value in given.items() for word in ("--env", f"{name}={value}")]
        flags += ["--label", f"use={time.monotonic_ns()}"]
        done = self.stand.run(
            ["bash", "-c", script], flags=flags, timeout=_SECONDS + 20, env={"PATH": self.cache.path}
        )
        output = _CLOCK.sub("…", _ATTEMPT.sub(r"\1…", _ESCAPES.sub("", done.stdout + done.stderr)))
        for path, name in self._places.items():
            output = output.replace(path, name)
        return Ran(
            use.script, done.returncode, output, self._seconds(), self._denied(flags[-1], client.refuses)
        )

    @property
    def _places(self) -> dict[str, str]:
        """Paths of this machine, and what a reader should see in their place."""
        workspace, home = str(self.stand.workspace), str(self.lab.home)
        return {workspace: "/workspace", home: "/home/sandbox", str(self.cache.root): "/clients"}

    def _seconds(self) -> float:
        try:
            return float((self.stand.workspace / "seconds").read_text().split()[-1])
        except (OSError, ValueError, IndexError):
            return 0.0

    def _denied(self, label: str, host: str) -> tuple[str, ...]:
        """The refusals that a sandbox met at a host or below it: of requests, else of connections, else of names."""
        name, _, value = label.partition("=")
        records = self.stand.records(event="sandbox")
        mine = {record["sandbox"] for record in records if record.get("labels") == {name: value}}
        refused: dict[str, list[str]] = {}
        for record in self.stand.records(event="decision", verdict="deny"):
            if record["sandbox"] in mine and (record.get("host") or "").endswith(host):
                refused.setdefault(record["layer"], []).append(record["reason"])
        found = (refused[layer] for layer in ("request", "connection", "dns") if layer in refused)
        return tuple(next(found, ()))

    def _furnish(self) -> None:
        """Repositories made of files, and a gRPC server where grpcio is here."""
        lab = self.lab
        made = repositories.build(Path(lab.directory) / "repositories")
        for host, folder in made.folders.items():
            lab.serve_folder(host, folder)
        for host in (REGISTRY, TOKENS, BLOBS, BUCKET_HOST, "grpc.lab-origin.com", "pinned.lab-origin.com"):
            lab.set_name(host, a=[topology.API])
        if self.cache.lacks("python:grpc") is None:
            pem = Path(lab.directory) / "grpc.pem"
            pem.write_text(lab.issue("grpc.lab-origin.com"))
            python = str(self.cache.root / "python/bin/python")
            server = lab.popen(
                "world", [python, str(PROGRAMS / "serve_grpc.py"), f"{topology.API}:{_GRPC_PORT}", str(pem)]
            )
            assert server.stdout is not None
            said = server.stdout.readline()
            if said != "listening\n":
                raise RuntimeError(f"the gRPC server did not start: {json.dumps(said)}")
