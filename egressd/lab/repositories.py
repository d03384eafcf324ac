"""A git host: smart HTTP by git's own `http-backend`, for clones and, where nothing forbids it, pushes."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

from egressd.lab.http1 import Exchange

_MAX_PUSH = 64 << 20

# In the stream format of git-fast-import(1), with delimited data so that nothing has to be counted.
_HISTORY = b"""\
blob
mark :1
data <<END
# tools of acme
END
blob
mark :2
data <<END
#!/bin/sh
echo "the tool runs in $PWD"
END
commit refs/heads/main
mark :3
committer Lab <lab@lab-origin.com> 1700000000 +0000
data <<END
first commit
END
M 100644 :1 README.md
M 100755 :2 tool.sh
done
"""


REPOSITORIES = ("acme/tools", "mallory/loot")
"""Whoever asks may clone and push: the one that a rule names, and one that an attacker owns."""


class GitHost:
    """github.com with public repositories; every other path asks for a login, as GitHub does."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(root),
            "LC_ALL": "C",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
        }

    def make(self) -> None:
        """Makes the repositories; raises CalledProcessError or OSError when git cannot."""
        for name in REPOSITORIES:
            path = self._root / f"{name}.git"
            path.parent.mkdir(parents=True)
            self._git("init", "-q", "--bare", "-b", "main", str(path))
            self._git("-C", str(path), "fast-import", "--quiet", "--done", stdin=_HISTORY)
            self._git("-C", str(path), "config", "http.receivepack", "true")

    async def answer(self, exchange: Exchange) -> None:
        """Hands one request to `git http-backend` and its answer back."""
        parts = exchange.seen.path.strip("/").split("/")
        repository = "/".join(parts[:2]).removesuffix(".git")
        if len(parts) < 3 or repository not in REPOSITORIES:
            await exchange.reply(401, b"login required\n", {"WWW-Authenticate": 'Basic realm="GitHub"'})
            return
        body = b""
        async for block in exchange.chunks():
            body += block
            if len(body) > _MAX_PUSH:
                await exchange.reply(413, b"too large for the lab\n")
                exchange.keep = False
                return
        environment = self._cgi(exchange, f"/{repository}.git/" + "/".join(parts[2:]), len(body))
        process = await asyncio.create_subprocess_exec(
            "git",
            "http-backend",
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        output, _ = await process.communicate(body)
        head, _, content = output.partition(b"\r\n\r\n")
        headers = {}
        for line in head.decode("latin-1").split("\r\n"):
            name, _, value = line.partition(":")
            headers[name] = value.strip()
        status = int(headers.pop("Status", "200").partition(" ")[0])
        await exchange.reply(status if output else 500, content, headers if output else None)

    def _cgi(self, exchange: Exchange, path: str, length: int) -> dict[str, str]:
        """The request as RFC 3875 has it."""
        seen = exchange.seen
        return {
            **self._environment,
            "GIT_PROJECT_ROOT": str(self._root),
            "GIT_HTTP_EXPORT_ALL": "1",
            "REQUEST_METHOD": seen.method,
            "PATH_INFO": path,
            "QUERY_STRING": seen.target.partition("?")[2],
            "CONTENT_TYPE": seen.header("content-type") or "",
            "CONTENT_LENGTH": str(length),
            "HTTP_CONTENT_ENCODING": seen.header("content-encoding") or "",
            "HTTP_GIT_PROTOCOL": seen.header("git-protocol") or "",
            "GIT_PROTOCOL": seen.header("git-protocol") or "",
            "REMOTE_ADDR": seen.peer.rpartition(":")[0],
        }

    def _git(self, *arguments: str, stdin: bytes = b"") -> None:
        subprocess.run(
            ["git", *arguments],
            env=self._environment,
            input=stdin,
            capture_output=True,
            check=True,
            timeout=20,
        )
