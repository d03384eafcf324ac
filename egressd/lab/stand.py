"""egressd standing in the lab: a folder with rules and configuration, and commands run under it in the lab's `host`.

What runs is the real command line in a process of its own; nothing of egressd is imported here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from egressd.lab.lab import Lab, clean_env

PROFILE = "lab"
HERE = "/STAND"
"""Stands in the text of credentials.yaml for the stand's folder, whose secrets are in HERE/secrets."""
_CONFIG = """schema: 1
rules: rules
ca_dir: ca
journal: journal.jsonl
state_dir: state
control_socket: control.sock
dns:
  upstream: "udp://{dns}"
{dns_more}upstream: {{ca_bundle: "{ca}"}}
{more}"""


_APART = ("head", "journal", "alert")


class Stand:
    """One installation of egressd in a lab, in a private folder that is removed by `close`.

    `rules` are the text of the profile `lab`; the shipped services come from `shipped`, a rules folder. `workspace` is
    where commands run; with root it belongs to nobody in particular, so that every sandbox uid may write it.
    `credentials` is the text of credentials.yaml; `secret` makes the files that it refers to.
    """

    def __init__(
        self,
        lab: Lab,
        rules: str,
        *,
        shipped: Path,
        dns_more: Mapping[str, str] | None = None,
        more: str = "",
        credentials: str = "",
    ) -> None:
        self.lab = lab
        self.directory = Path(tempfile.mkdtemp(prefix="stand-", dir=lab.directory))
        self.directory.chmod(0o755)
        self.workspace = self.directory / "workspace"
        self.workspace.mkdir()
        self.workspace.chmod(0o777)
        self.rules = self.directory / "rules"
        shutil.copytree(shipped, self.rules)
        self.profile = self.rules / "profiles" / f"{PROFILE}.yaml"
        self.profile.write_text(rules, encoding="utf-8")
        self.journal = self.directory / "journal.jsonl"
        self.config = self.directory / "egressd.yaml"
        extra = "".join(f"  {key}: {value}\n" for key, value in (dns_more or {}).items())
        text = _CONFIG.format(dns=lab.dns, dns_more=extra, ca=lab.ca_file, more=more)
        self.credentials = self.directory / "credentials.yaml"
        if credentials:
            write_private(self.credentials, credentials.replace(HERE, str(self.directory)))
            text += "credentials: credentials.yaml\n"
        self.config.write_text(text, encoding="utf-8")

    def secret(self, name: str, value: str) -> Path:
        """Write a secret to a file that only its owner may read, whole at any moment; credentials call its folder HERE."""
        path = self.directory / "secrets" / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fresh = path.with_suffix(".new")
        write_private(fresh, value)
        return fresh.replace(path)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def egressd(self, *arguments: str) -> list[str]:
        """Return the argument list of an egressd command with this stand's configuration."""
        return [sys.executable, "-m", "egressd", "--config", str(self.config), *arguments]

    def argv(self, command: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
        """Return the argument list of `egressd run` for a command."""
        return self.egressd("run", "--profile", PROFILE, *flags, "--", *command)

    def run(
        self,
        command: Sequence[str],
        *,
        flags: Sequence[str] = (),
        timeout: float = 60.0,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a sandbox to its end."""
        return self.lab.host_exec(
            self.argv(command, flags),
            cwd=str(self.workspace),
            env=clean_env(self.lab, trust=False) | dict(env or {}),
            timeout=timeout,
            privileged=not self.lab.rootless,
        )

    def start(
        self,
        command: Sequence[str],
        *,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Start a command in a sandbox; the caller ends it. The process is `egressd run` itself."""
        return self.lab.popen_host(
            self.argv(command, flags),
            cwd=str(self.workspace),
            env=clean_env(self.lab, trust=False) | dict(env or {}),
            privileged=not self.lab.rootless,
            **options,
        )

    def records(self, **wanted: object) -> list[dict[str, Any]]:
        """Return the journal's records in order, those that have all the given fields.

        What a journal says of itself, at moments of its own, and alerts are left out where no `event` is wanted.
        """
        return [
            record
            for record in self._lines()
            if ("event" in wanted or record["event"] not in _APART)
            and all(record.get(name) == value for name, value in wanted.items())
        ]

    def attempts(self) -> list[dict[str, Any]]:
        """Return the decision records of what the command itself tried: those after the last sandbox was ready."""
        records = list(self._lines())
        ready = [
            n
            for n, record in enumerate(records)
            if record["event"] == "sandbox" and record.get("detail") == "ready"
        ]
        start = ready[-1] if ready else len(records)
        return [record for record in records[start:] if record["event"] == "decision"]

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self.journal.exists():
            return
        with open(self.journal, encoding="utf-8") as file:
            for line in file:
                if line.endswith("\n"):  # a line that is being written has no end yet
                    yield json.loads(line)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner may read, from its first moment on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
