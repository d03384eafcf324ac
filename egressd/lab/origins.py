"""The web sites of the lab: which host is served by what, and the API origin that can misbehave in every
known way.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from egressd.lab import containers, mirrors, models, objects, streams, topology
from egressd.lab.folders import FolderSite
from egressd.lab.guards import DENIED, Guards
from egressd.lab.http1 import Exchange, Handler, plain_address, serve_connection
from egressd.lab.issuers import GITHUB, Issuers
from egressd.lab.packages import NpmRegistry, PythonIndex
from egressd.lab.pki import Authority
from egressd.lab.relay import Relay
from egressd.lab.repositories import GitHost
from egressd.lab.sightings import SeenRequest

HTTP2 = {"h2.lab-origin.com": ("h2", "http/1.1"), "grpc.lab-origin.com": ("h2",)}
"""Names that agree to HTTP/2 (answered by `streams`), beside HTTP/1.1 or alone."""

PRIVATE_PYPI, PRIVATE_NPM = "pypi.lab-origin.com", "npm.lab-origin.com"
"""Indexes of a company's own, their files on the same host."""

_TEXT = {"Content-Type": "text/plain"}
_JSON = {"Content-Type": "application/json"}
_MOST_REMEMBERED = 100_000
_BLOCK = bytes(range(256)) * 256  # 64 KiB whose sha256 a client can work out
_WEBSOCKET_KEY = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455 section 1.3
_RELEASE = b"Origin: Debian\nSuite: stable\nCodename: bookworm\n"


class Web:
    """Every site of the world behind one handler; `seen` has each request in order of arrival."""

    def __init__(self, authority: Authority, git: GitHost) -> None:
        self.seen: list[SeenRequest] = []
        self.guards = Guards()
        self.issuers = Issuers(self.guards)
        self._authority = authority
        authority.protocols.update(HTTP2)
        python, npm = PythonIndex(), NpmRegistry()
        private = PythonIndex(PRIVATE_PYPI)
        self._sites: dict[str, Handler] = {
            "pypi.org": python.index,
            "pypi.mallory-lab.com": python.index,
            "files.pythonhosted.org": python.file,
            "registry.npmjs.org": npm.answer,
            "github.com": git.answer,
            "deb.debian.org": debian,
            "security.debian.org": debian,
            objects.BUCKET_HOST: objects.ObjectStore().answer,
            PRIVATE_PYPI: private.answer,
            PRIVATE_NPM: NpmRegistry(PRIVATE_NPM).answer,
            "api.openai.com": models.completions,
            **self.issuers.sites,
            GITHUB: self._github,
        }
        registry = containers.ContainerRegistry()
        self._sites[containers.REGISTRY] = registry.registry
        self._sites[containers.TOKENS] = registry.tokens
        self._sites[containers.BLOBS] = registry.blobs
        self._api = Api(self.seen)

    async def handle(self, exchange: Exchange) -> None:
        """Answers one request: by the address for a metadata endpoint, otherwise by the Host it names."""
        if exchange.seen.address in topology.METADATAS:
            await metadata(exchange)
        elif (refusal := self.guards.refuses(exchange.seen)) is not None:
            await exchange.reply(401, DENIED, refusal)
        else:
            await self._sites.get(exchange.seen.host, self._api.answer)(exchange)

    async def _github(self, exchange: Exchange) -> None:
        """An app's tokens by the issuer; what else there is of GitHub's API by the site that answers anything."""
        of_an_app = exchange.seen.path.startswith(("/app/", "/installation/"))
        await (self.issuers.github if of_an_app else self._api.answer)(exchange)

    def serve_folder(self, name: str, folder: Path) -> None:
        """Answers for a host from now on with the files below a folder."""
        self._sites[name] = FolderSite(folder).answer

    def relay(self, name: str, port: int) -> None:
        """Answers for a host from now on with what a port of the world's loopback says."""
        self._sites[name] = Relay(port).answer

    def speak(self, name: str, protocols: list[str]) -> None:
        """Agrees to these protocols (ALPN) for a name from now on."""
        self._authority.protocols[name] = tuple(protocols)

    async def serve(self) -> None:
        """Listens on every address of the world until the loop ends."""
        context = self._authority.listening_context()
        for bind in ("0.0.0.0", "::"):  # noqa: S104 (every address of the lab's own namespace is meant)
            for port in topology.TLS_PORTS:
                await asyncio.start_server(self._accept, bind, port, ssl=context, limit=1 << 18, backlog=512)
            for port in topology.PLAIN_PORTS:
                await asyncio.start_server(self._accept, bind, port, limit=1 << 18, backlog=512)
            await asyncio.start_server(_banner, bind, topology.BANNER_PORT)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tls = writer.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() == "h2":
            sni, refuses = self._authority.sni, self.guards.refuses
            await streams.Connection(reader, writer, self._remember, sni, refuses).serve()
        else:
            await serve_connection(reader, writer, self.handle, self._remember, self._authority.sni)

    def _remember(self, seen: SeenRequest) -> None:
        if len(self.seen) < _MOST_REMEMBERED:
            self.seen.append(seen)


async def metadata(exchange: Exchange) -> None:
    """A cloud's metadata endpoint that hands out credentials to whoever gets here."""
    role = {"AccessKeyId": "AKIALABLABLABLABLAB0", "SecretAccessKey": "lab-secret", "Token": "lab-token"}
    if exchange.seen.method == "PUT":
        await exchange.reply(200, b"lab-imds-token", _TEXT)
    elif exchange.seen.path.rstrip("/").endswith("security-credentials"):
        await exchange.reply(200, b"lab-role", _TEXT)
    elif exchange.seen.path in {"/", "/latest/meta-data/"}:
        await exchange.reply(200, b"iam/\nhostname\n", _TEXT)
    else:
        await exchange.reply(200, json.dumps({"access_token": "lab-token", **role}).encode(), _JSON)


async def debian(exchange: Exchange) -> None:
    """A Debian mirror's release file and one file of its pool."""
    if exchange.seen.path.endswith(("/InRelease", "/Release")):
        await exchange.reply(200, _RELEASE, _TEXT)
    elif "/pool/" in exchange.seen.path:
        await exchange.reply(200, b"!<arch>\n", {"Content-Type": "application/vnd.debian.binary-package"})
    else:
        await exchange.reply(404, b"not found\n", _TEXT)


async def _banner(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A service that is neither TLS nor HTTP and speaks first."""
    try:
        local = writer.get_extra_info("sockname")
        writer.write(f"SSH-2.0-lab {plain_address(local[0])}\r\n".encode())
        await writer.drain()
        await reader.read(4096)
    except OSError:
        pass  # the client is gone
    finally:
        writer.close()


class Api:
    """The origin for every other name. `answer` finds the path's handler; a path of none gets an echo."""

    def __init__(self, seen: list[SeenRequest]) -> None:
        self._seen = seen
        self._paths: dict[str, Callable[[Exchange], Awaitable[None]]] = {
            "/v1/messages": models.messages,
            "/mirror": mirrors.mirror,
            "/v1/models": self._models,
            "/headers": self._echo,
            "/echo": self._echo,
            "/upload": self._upload,
            "/n": self._count,
            "/big": self._big,
            "/slow": self._slow,
            "/sse": self._events,
            "/chunked": self._chunked,
            "/nolen": self._unframed,
            "/cl": self._counted,
            "/103": self._early_hints,
            "/trailers": self._trailers,
            "/closeafter": self._close_after,
            "/cut": self._cut,
            "/early": self._early,
            "/both": self._both,
            "/ws": self._websocket,
            "/aborted": self._aborted,
            "/redirect": self._redirect,
            "/raw": self._raw,
        }

    async def answer(self, exchange: Exchange) -> None:
        """Answers one request."""
        path = exchange.seen.path
        first, _, rest = path[1:].partition("/")
        if path in self._paths:
            await self._paths[path](exchange)
        elif first == "status" and rest.isdigit() and 200 <= int(rest) <= 599:
            await exchange.reply(int(rest), f"status {rest}\n".encode(), _TEXT)
        elif path in {"/204", "/304"}:
            await exchange.reply(int(path[1:]))
        elif first.startswith("id"):
            await exchange.reply(200, path.encode(), _TEXT)
        else:
            await self._echo(exchange)

    async def _models(self, exchange: Exchange) -> None:
        await exchange.reply(200, b'{"data": [{"id": "lab-model"}]}', _JSON)

    async def _echo(self, exchange: Exchange) -> None:
        """What arrived: method, host, target, headers in order, body size and sha256, trailers."""
        async for _ in exchange.chunks():
            pass
        seen = exchange.seen
        answer = {
            "method": seen.method,
            "host": seen.host,
            "target": seen.target,
            "sni": seen.sni,
            "headers": seen.headers,
            "trailers": seen.trailers,
            "n": seen.body_bytes,
            "sha256": seen.body_sha256 or hashlib.sha256().hexdigest(),
        }
        await exchange.reply(200, json.dumps(answer).encode(), _JSON)

    async def _upload(self, exchange: Exchange) -> None:
        async for _ in exchange.chunks():
            pass
        answer = {"n": exchange.seen.body_bytes, "sha256": exchange.seen.body_sha256}
        await exchange.reply(200, json.dumps(answer).encode(), _JSON)

    async def _count(self, exchange: Exchange) -> None:
        await exchange.reply(200, str(exchange.connection.requests).encode(), _TEXT)

    async def _big(self, exchange: Exchange) -> None:
        """`?bytes=N` (200 MB): a download of known bytes, 0 to 255 over and over."""
        left = int(exchange.query.get("bytes", "200000000"))
        await exchange.start(
            200, {"Content-Type": "application/octet-stream"}, framing=f"Content-Length: {left}"
        )
        while left and exchange.seen.method != "HEAD":
            block = _BLOCK[:left]
            await exchange.send(block)
            left -= len(block)

    async def _slow(self, exchange: Exchange) -> None:
        await asyncio.sleep(float(exchange.query.get("seconds", "1")))
        await exchange.reply(200, b"at last\n", _TEXT)

    async def _events(self, exchange: Exchange) -> None:
        """`?events=N&gap=S`: server-sent events without a length, each when it is due."""
        exchange.keep = False
        await exchange.start(200, {"Content-Type": "text/event-stream", "Connection": "close"})
        for number in range(int(exchange.query.get("events", "5"))):
            if number:
                await asyncio.sleep(float(exchange.query.get("gap", "0.1")))
            await exchange.send(f"data: {number}\n\n".encode())

    async def _chunked(self, exchange: Exchange) -> None:
        await exchange.start(200, _TEXT, framing="Transfer-Encoding: chunked")
        await exchange.send(b"6\r\nhello \r\n5;x=y\r\nworld\r\n0\r\n\r\n")

    async def _unframed(self, exchange: Exchange) -> None:
        exchange.keep = False
        await exchange.start(200, {**_TEXT, "Connection": "close"})
        await exchange.send(b"abc")
        await exchange.send(b"def")

    async def _counted(self, exchange: Exchange) -> None:
        await exchange.reply(200, b"x" * 100, _TEXT)

    async def _early_hints(self, exchange: Exchange) -> None:
        await exchange.start(103, {"Link": "</style.css>; rel=preload"})
        await exchange.reply(200, b"final", _TEXT)

    async def _trailers(self, exchange: Exchange) -> None:
        await exchange.start(200, {"Trailer": "X-Sum"}, framing="Transfer-Encoding: chunked")
        await exchange.send(b"5\r\nhello\r\n0\r\nX-Sum: 1234\r\n\r\n")

    async def _close_after(self, exchange: Exchange) -> None:
        """Closes after the answer without having said so."""
        exchange.keep = False
        await exchange.reply(200, b"bye", _TEXT)

    async def _cut(self, exchange: Exchange) -> None:
        """Promises 1000 bytes, sends 500, and resets."""
        await exchange.start(200, _TEXT, framing="Content-Length: 1000")
        await exchange.send(b"y" * 500)
        await asyncio.sleep(0.05)  # so that the reset does not overtake the bytes
        exchange.connection.cut()
        raise ConnectionResetError("cut on purpose")

    async def _early(self, exchange: Exchange) -> None:
        """Refuses with 413 before it has read the body, then closes."""
        exchange.keep = False
        await exchange.reply(413, b"too large", {**_TEXT, "Connection": "close"})

    async def _both(self, exchange: Exchange) -> None:
        """An answer with both Content-Length and Transfer-Encoding: a smuggler's."""
        exchange.keep = False
        framing = "Content-Length: 3\r\nTransfer-Encoding: chunked"
        await exchange.start(200, _TEXT, framing=framing)
        await exchange.send(b"3\r\nabc\r\n0\r\n\r\n")

    async def _redirect(self, exchange: Exchange) -> None:
        target = exchange.query.get("to", "http://169.254.169.254/latest/meta-data/")
        await exchange.reply(302, b"", {"Location": target})

    async def _aborted(self, exchange: Exchange) -> None:
        """How many body bytes the last aborted exchange had sent; null when there is none."""
        sent = next((seen.sent for seen in reversed(self._seen) if seen.aborted), None)
        await exchange.reply(200, json.dumps(sent).encode(), _JSON)

    async def _raw(self, exchange: Exchange) -> None:
        """`?hex=BYTES`: these very bytes for an answer, then the end. The client says what a hostile origin would."""
        exchange.keep = False
        await exchange.send(bytes.fromhex(exchange.query.get("hex", "")))

    async def _websocket(self, exchange: Exchange) -> None:
        """Echoes each frame (up to 125 bytes) unmasked, and a close with its code (RFC 6455).

        `?as=frames` says the request's head first, `?as=protocol` chooses its Authorization for a subprotocol, `?as=deflate`
        chooses compression.
        """
        key = exchange.seen.header("sec-websocket-key")
        if key is None or (exchange.seen.header("upgrade") or "").lower() != "websocket":
            await exchange.reply(426, b"websocket only\n", {"Upgrade": "websocket"})
            return
        exchange.keep = False
        accept = base64.b64encode(hashlib.sha1(key.encode() + _WEBSOCKET_KEY).digest()).decode()  # noqa: S324 (the RFC's)
        headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Accept": accept}
        shape = exchange.query.get("as")
        if shape == "protocol":
            headers["Sec-WebSocket-Protocol"] = (exchange.seen.header("authorization") or "").rpartition(" ")[
                2
            ]
        elif shape == "deflate":
            headers["Sec-WebSocket-Extensions"] = "permessage-deflate"
        await exchange.start(101, headers)
        if shape == "frames":
            await exchange.send(b"".join(mirrors.fragments(exchange.seen)))
        reader = exchange.connection.reader
        while True:
            opcode, length = await reader.readexactly(2)
            mask = await reader.readexactly(4)
            data = await reader.readexactly(length & 0x7F)
            plain = bytes(byte ^ mask[index % 4] for index, byte in enumerate(data))
            await exchange.send(bytes([opcode, len(plain)]) + plain)
            if opcode & 15 == 8:
                return


def make_git(folder: Path) -> GitHost:
    """The git host with its repository made under `folder`."""
    host = GitHost(folder)
    host.make()
    return host
