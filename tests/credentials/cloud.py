"""A moto server that asks for signatures: IAM, STS and S3 on loopback, a user who may do everything, and a role for it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

from pydantic import SecretStr

from egressd.credentials.lease import AwsKeys

PREPARE = Path(__file__).parents[1] / "e2e" / "programs" / "prepare_cloud.py"
REGION = "eu-central-1"
BUCKET = "acme-bucket"


@dataclass(frozen=True)
class Cloud:
    """Where it listens, the user's keys and the role's ARN."""

    port: int
    keys: AwsKeys
    role: str

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def ask(
        self, method: str, target: str, fields: tuple[tuple[bytes, bytes], ...], body: bytes = b""
    ) -> tuple[int, bytes]:
        """The answer to a request, which is sent as it is given."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.putrequest(method, target, skip_accept_encoding=True)
            for name, value in fields:
                connection.putheader(name.decode(), value)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


@contextmanager
def cloud() -> Iterator[Cloud]:
    # Another process could take the port in between; then this one ends, and another port is tried.
    process, port = next(found for _ in range(5) if (found := _start()) is not None)
    try:
        argv = [sys.executable, "-I", str(PREPARE), str(port), REGION, BUCKET]
        made = subprocess.run(argv, capture_output=True, text=True, timeout=60, env=_clean(), check=False)
        assert made.returncode == 0, made.stderr
        key_id, secret, role = json.loads(made.stdout).values()
        yield Cloud(port, AwsKeys(access_key_id=key_id, secret_access_key=SecretStr(secret)), role)
    finally:
        process.kill()
        process.wait()


def _start() -> tuple[subprocess.Popen[bytes], int] | None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = _clean() | {"INITIAL_NO_AUTH_ACTION_COUNT": "3"}
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return process, port
        if time.monotonic() > deadline:
            process.kill()
            process.wait()
        time.sleep(0.05)
    return None


def _clean() -> dict[str, str]:
    """Nothing of this machine's own accounts or proxies."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
