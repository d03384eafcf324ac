"""Real services in the lab's world: moto as AWS, OpenBao, Debian's container registry; each behind a name that the lab serves."""

from __future__ import annotations

import datetime as dt
import gzip
import hashlib
import importlib.util
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from egressd.lab import Lab, clean_env
from egressd.lab.issuers import QUEUE
from tests.e2e.conftest import until

PROGRAMS = Path(__file__).parent / "programs"
REGION = "eu-central-1"
BUCKET = "acme-bucket"
BUCKET_HOST = f"{BUCKET}.s3.{REGION}.amazonaws.com"
STS_HOST = f"sts.{REGION}.amazonaws.com"
VAULT_HOST = "vault.lab-origin.com"
REGISTRY_HOST, TOKENS_HOST = "registry.lab-origin.com", "tokens.lab-origin.com"

_MOTO, _BAO, _REGISTRY, _TOKENS = 5001, 8200, 5000, 5002


def _start(lab: Lab, argv: list[str], port: int, **environment: str) -> None:
    """Starts a server in the world; returns when its port listens."""
    log = open(Path(lab.directory) / f"port-{port}.log", "w+", encoding="utf-8")  # noqa: SIM115 (the server's)
    with log:
        process = lab.popen("world", argv, env=clean_env(lab) | environment, stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        probe = [
            "/usr/bin/python3",
            "-Ic",
            f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
        ]
        while lab.run("world", probe).returncode != 0:
            log.seek(0)
            assert process.poll() is None, log.read()
            assert time.monotonic() < deadline, log.read()
            time.sleep(0.05)


class Cloud:
    """S3, IAM and STS by moto, which checks every signature; `id`, `secret` and `role` are what `prepare_cloud` made."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(_MOTO)]
        _start(lab, command, _MOTO, INITIAL_NO_AUTH_ACTION_COUNT="3")
        prepare = [sys.executable, "-I", str(PROGRAMS / "prepare_cloud.py"), str(_MOTO), REGION, BUCKET]
        made = lab.run("world", prepare)
        assert made.returncode == 0, made.stderr
        self.id, self.secret, self.role = json.loads(made.stdout).values()
        for host in (BUCKET_HOST, STS_HOST):
            lab.relay(host, _MOTO)


class Bao:
    """OpenBao in development mode: kv v2 at `secret/`, and passwords of the lab's queue by `rabbitmq/creds/agent`."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.token = secrets.token_hex(16)
        flags = ["-dev", "-dev-no-store-token", f"-dev-root-token-id={self.token}"]
        program = Path(sys.executable).parent / "bao"
        _start(lab, [str(program), "server", *flags, f"-dev-listen-address=127.0.0.1:{_BAO}"], _BAO)
        until(lambda: self.ask("sys/health").get("sealed") is False, 20, "OpenBao is unsealed")
        lab.relay(VAULT_HOST, _BAO)
        password = secrets.token_hex(8)
        lab.expect("queue", f"bao:{password}")
        self.set("sys/mounts/rabbitmq", {"type": "rabbitmq"})
        connection = {"connection_uri": f"https://{QUEUE}", "username": "bao", "password": password}
        self.set("rabbitmq/config/connection", {**connection, "verify_connection": False})
        self.set("rabbitmq/config/lease", {"ttl": 300, "max_ttl": 3600})
        self.set("rabbitmq/roles/agent", {"tags": "management"})

    def ask(self, path: str, body: Mapping[str, Any] | None = None, method: str = "") -> dict[str, Any]:
        """One request with the root token; its answer, which has `errors` where it went wrong."""
        argv = ["curl", "-sS", "-H", f"X-Vault-Token: {self.token}", f"http://127.0.0.1:{_BAO}/v1/{path}"]
        argv += ["-d", json.dumps(body)] if body is not None else []
        argv += ["-X", method] if method else []
        ran = self.lab.run("world", argv)
        assert ran.returncode == 0, ran.stderr
        return dict(json.loads(ran.stdout or "{}"))

    def set(self, path: str, body: Mapping[str, Any]) -> None:
        """Writes something; fails when it is not taken."""
        answer = self.ask(path, body)
        assert "errors" not in answer, answer

    def leases(self) -> list[str]:
        """The leases of the queue's passwords that are alive now."""
        answer = self.ask("sys/leases/lookup/rabbitmq/creds/agent", method="LIST")
        return list(answer.get("data", {}).get("keys", []))


class Registry:
    """Debian's docker-registry with a token service, and one private image, `acme/app:1`; skips where it is not installed."""

    def __init__(self, lab: Lab) -> None:
        program = shutil.which("docker-registry") or shutil.which("docker-registry", path=_unpacked())
        missing = [
            tool
            for tool, path in (("docker-registry", program), ("skopeo", shutil.which("skopeo")))
            if not path
        ]
        if missing or program is None:
            pytest.skip(f"not installed: {' '.join(missing)}")
        self.account = f"lab:{secrets.token_hex(16)}"
        folder = Path(lab.directory) / "registry"
        folder.mkdir()
        _make_signer(folder)
        (folder / "config.yml").write_text(
            f"version: 0.1\nlog: {{level: error}}\nstorage: {{inmemory: {{}}}}\nhttp: {{addr: '127.0.0.1:{_REGISTRY}'}}\n"
            f"auth: {{token: {{realm: 'https://{TOKENS_HOST}/token', service: lab-registry, issuer: lab-tokens,"
            f" rootcertbundle: {folder}/signer.crt}}}}\n"
        )
        signer = [str(folder / "signer.key"), str(folder / "signer.crt")]
        program_ = [
            sys.executable,
            "-I",
            str(PROGRAMS / "registry_tokens.py"),
            str(_TOKENS),
            *signer,
            self.account,
        ]
        _start(lab, program_, _TOKENS)
        _start(lab, [program, "serve", str(folder / "config.yml")], _REGISTRY)
        lab.relay(REGISTRY_HOST, _REGISTRY)
        lab.relay(TOKENS_HOST, _TOKENS)
        self._push(lab, folder)

    def _push(self, lab: Lab, folder: Path) -> None:
        source = folder / "image"
        make_image(source)
        to = f"docker://{REGISTRY_HOST}/acme/app:1"
        ran = lab.open_exec(skopeo("copy", "--dest-creds", self.account, f"dir:{source}", to))
        assert ran.returncode == 0, ran.stderr


def skopeo(*arguments: str) -> list[str]:
    """A skopeo that reads no configuration of the machine's own."""
    return ["skopeo", "--insecure-policy", "--registries.d", "/nonexistent", *arguments]


def make_image(folder: Path) -> None:
    """An image of one layer in skopeo's `dir:` form."""
    folder.mkdir()
    layer = bytes(1024)  # an empty tar archive
    config = {"architecture": "amd64", "os": "linux", "config": {}, "history": []}
    rootfs = {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]}
    kind = "application/vnd.docker.distribution.manifest.v2+json"
    parts = []
    for content, media in (
        (json.dumps({**config, "rootfs": rootfs}).encode(), "application/vnd.docker.container.image.v1+json"),
        (gzip.compress(layer, mtime=0), "application/vnd.docker.image.rootfs.diff.tar.gzip"),
    ):
        digest = hashlib.sha256(content).hexdigest()
        (folder / digest).write_bytes(content)
        parts.append({"mediaType": media, "size": len(content), "digest": f"sha256:{digest}"})
    manifest = {"schemaVersion": 2, "mediaType": kind, "config": parts[0], "layers": parts[1:]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "version").write_text("Directory Transport Version: 1.1\n")


def _unpacked() -> str:
    """Where tools/peers unpacks what must not be installed."""
    return str(Path(sys.prefix) / "peers/usr/bin")


def _make_signer(folder: Path) -> None:
    """A key and its own certificate: who signs the registry's tokens."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "lab-tokens")])
    now = dt.datetime.now(dt.UTC)
    day = dt.timedelta(days=1)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(now - day).not_valid_after(now + day)
    certificate = made.sign(key, hashes.SHA256())
    (folder / "signer.crt").write_bytes(certificate.public_bytes(Encoding.PEM))
    private = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    (folder / "signer.key").write_bytes(private)


def site_packages(*needed: str) -> str:
    """The folder of this Python's packages, for a program of the sandbox that is pure Python; skips where one is missing."""
    for name in needed:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"not installed: {name}")
    found = importlib.util.find_spec(needed[0])
    assert found is not None
    assert found.origin is not None
    return os.path.dirname(os.path.dirname(found.origin))
