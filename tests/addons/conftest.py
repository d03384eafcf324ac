"""A real mitmdump with the addon in the lab's `host`, and clients beside it."""

from __future__ import annotations

import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from egressd.lab import Lab, LabError
from egressd.lab.lab import clean_env

ROOT = Path(__file__).parents[2]
MITMDUMP = Path(sys.executable).with_name("mitmdump")
_PORTS = itertools.count(8100)
RULES = """schema: 1
profile: lab
owner: tests
allow:
  - id: api
    hosts: [api.lab-origin.com]
    requests: ["GET,HEAD /**", "POST /upload", "POST /echo", "WEBSOCKET /ws"]
  - id: plain
    hosts: [www.lab-origin.com]
    schemes: [http]
    requests: ["GET,HEAD /**", "POST /upload"]
  - id: pinned
    hosts: [api.anthropic.com]
    treatment: tunnel
  - id: names
    hosts: ["*.lab-origin.com"]
"""


class Proxy:
    """One mitmdump; its output is read on, so that it never waits for us."""

    def __init__(
        self, lab: Lab, *flags: str, script: Path | None = None, rules: str | None = RULES, **options: str
    ) -> None:
        self.lab = lab
        self.port = next(_PORTS)
        self.directory = Path(tempfile.mkdtemp(prefix="mitm-", dir=lab.directory))
        self.journal = self.directory / "journal.jsonl"
        folder = self.directory / "rules"
        (folder / "profiles").mkdir(parents=True)
        (folder / "organisation.yaml").write_text("schema: 1\n", encoding="utf-8")
        (folder / "profiles" / "lab.yaml").write_text(rules or RULES, encoding="utf-8")
        chosen = {
            "confdir": f"{self.directory}/conf",
            "ssl_verify_upstream_trusted_ca": lab.ca_file,
            "egress_journal": str(self.journal),
        }
        if rules is not None:
            chosen |= {"egress_rules": str(folder), "egress_profile": "lab"}
        argv = [
            str(MITMDUMP),
            "-s",
            str(script or ROOT / "addons" / "egress.py"),
            "--listen-port",
            str(self.port),
        ]
        argv += [part for name, value in (chosen | options).items() for part in ("--set", f"{name}={value}")]
        env = clean_env(lab, home=str(self.directory)) | {"PYTHONUNBUFFERED": "1"}
        self.process = lab.popen_host([*argv, *flags], env=env, stderr=subprocess.STDOUT)
        self.lines: list[str] = []
        self._came: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._came.put(line)
        self._came.put(None)

    @property
    def said(self) -> str:
        return "".join(self.lines)

    def wait_for(self, text: str, seconds: float = 30.0) -> None:
        """Wait until a line with `text` is printed."""
        deadline = time.monotonic() + seconds
        while True:
            line = self._came.get(timeout=max(0.01, deadline - time.monotonic()))
            if line is None:
                pytest.fail(f"mitmdump ended without {text!r}:\n{self.said}")
            if text in line:
                return

    def ends(self, seconds: float = 30.0) -> int:
        """Wait for it to end by itself."""
        status = self.process.wait(seconds)
        self._reader.join(seconds)
        assert isinstance(status, int)
        return status

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def curl(self, *arguments: str, proxy: str = "http") -> subprocess.CompletedProcess[str]:
        """Ask through the proxy; stdout ends in the status."""
        argv = [
            "curl",
            "-sS",
            "-m",
            "15",
            "-x",
            f"{proxy}://127.0.0.1:{self.port}",
            "--cacert",
            f"{self.directory}/conf/mitmproxy-ca-cert.pem",
        ]
        return self.lab.host_exec([*argv, "-w", "[%{http_code}]", *arguments])

    def sh(self, text: str) -> str:
        """Run a shell command beside the proxy."""
        return self.lab.host_exec(["bash", "-c", text]).stdout

    def record(self, **wanted: object) -> dict[str, Any]:
        """Wait for the one record that has all the given fields: an end is written after the client has its answer."""
        deadline = time.monotonic() + 10
        while not (found := self.records(**wanted)):
            if time.monotonic() > deadline:
                pytest.fail(f"no record {wanted}")
            time.sleep(0.02)
        [record] = found
        return record

    def records(self, **wanted: object) -> list[dict[str, Any]]:
        """Return the journal's records that have all the given fields."""
        lines = self.journal.read_text(encoding="utf-8").splitlines() if self.journal.exists() else []
        found = [json.loads(line) for line in lines]
        return [each for each in found if all(each.get(name) == value for name, value in wanted.items())]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """One lab for the module."""
    try:
        built = Lab.build()
    except LabError as error:
        if os.geteuid() != 0 and "CLONE_NEWUSER" in str(error):
            pytest.skip(f"this kernel lets no unprivileged user make a user namespace: {error}")
        raise
    with built:
        yield built


@pytest.fixture(scope="module")
def shared(lab: Lab) -> Iterator[Proxy]:
    """One proxy under the rules, for what changes nothing about it."""
    with Proxy(lab) as proxy:
        proxy.wait_for("listening")
        proxy.wait_for("egressd: profile lab")
        yield proxy


@pytest.fixture
def proxy(shared: Proxy) -> Proxy:
    """The shared proxy in a world that has seen nothing yet."""
    shared.lab.forget()
    return shared


def start(lab: Lab, flags: Sequence[str] = (), **options: Any) -> Proxy:
    """A proxy of its own, ready."""
    lab.forget()
    proxy = Proxy(lab, *flags, **options)
    proxy.wait_for("listening")
    return proxy
