"""A container registry in three hosts, as docker.io is: the registry, who hands out its tokens, and who has the
blobs.

The registry sends every client away twice: for a token (401 with a Bearer challenge) and, for each blob, to the
other host (307). See the OCI distribution specification and Docker's token specification.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile

from egressd.lab.folders import reply_with_ranges
from egressd.lab.http1 import Exchange

REGISTRY, TOKENS, BLOBS = "registry-1.docker.io", "auth.docker.io", "production.cloudflare.docker.com"
IMAGE = "library/lab-hello"

_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
_CONFIG = "application/vnd.docker.container.image.v1+json"
_LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"
_JSON = {"Content-Type": "application/json"}
_BEARER = "lab-registry-token"


class ContainerRegistry:
    """One image with one layer, `docker.io/library/lab-hello:latest`."""

    def __init__(self) -> None:
        self._blobs: dict[str, bytes] = {}
        layer = _layer()
        rootfs = {"type": "layers", "diff_ids": [_digest(layer)]}
        config = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs, "history": []}
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": self._keep(json.dumps(config).encode(), _CONFIG),
            "layers": [self._keep(gzip.compress(layer, mtime=0), _LAYER)],
        }
        self._manifest = json.dumps(manifest).encode()

    async def registry(self, exchange: Exchange) -> None:
        """Answers `/v2/…`: nothing without a token, blobs by redirect."""
        if exchange.seen.header("authorization") != f"Bearer {_BEARER}":
            challenge = f'Bearer realm="https://{TOKENS}/token",service="registry.docker.io",scope="repository:{IMAGE}:pull"'
            await exchange.reply(
                401, b'{"errors": [{"code": "UNAUTHORIZED"}]}', {**_JSON, "WWW-Authenticate": challenge}
            )
            return
        rest = exchange.seen.path.removeprefix(f"/v2/{IMAGE}/")
        if exchange.seen.path == "/v2/":
            await exchange.reply(200, b"{}", _JSON)
        elif rest == "tags/list":
            await exchange.reply(200, json.dumps({"name": IMAGE, "tags": ["latest"]}).encode(), _JSON)
        elif rest in {"manifests/latest", f"manifests/{_digest(self._manifest)}"}:
            headers = {"Content-Type": _MANIFEST, "Docker-Content-Digest": _digest(self._manifest)}
            await exchange.reply(200, self._manifest, headers)
        elif rest.removeprefix("blobs/") in self._blobs:
            await exchange.reply(
                307, b"", {"Location": f"https://{BLOBS}/{rest.removeprefix('blobs/')}?signed=lab"}
            )
        else:
            await exchange.reply(404, b'{"errors": [{"code": "NAME_UNKNOWN"}]}', _JSON)

    async def tokens(self, exchange: Exchange) -> None:
        """Answers `/token`: a token for whoever asks, as for public images."""
        await exchange.reply(200, json.dumps({"token": _BEARER, "expires_in": 300}).encode(), _JSON)

    async def blobs(self, exchange: Exchange) -> None:
        """Answers `/DIGEST`."""
        content = self._blobs.get(exchange.seen.path[1:])
        if content is None:
            await exchange.reply(404, b"no such blob\n")
        else:
            await reply_with_ranges(exchange, content, {"Content-Type": "application/octet-stream"})

    def _keep(self, content: bytes, kind: str) -> dict[str, object]:
        """Keeps a blob; returns its descriptor."""
        self._blobs[_digest(content)] = content
        return {"mediaType": kind, "size": len(content), "digest": _digest(content)}


def _layer() -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        member = tarfile.TarInfo("hello.txt")
        member.size = len(b"hello from a layer\n")
        archive.addfile(member, io.BytesIO(b"hello from a layer\n"))
    return target.getvalue()


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()
