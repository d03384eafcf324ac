"""Package indexes with a few tiny real packages, built in memory: what pip and npm need to install
something offline.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import tarfile
import zipfile

from egressd.lab.http1 import Exchange

_GREETING = 'def greet(who: str) -> str:\n    return f"hello, {who}"\n'
_HELLO = 'from lab_greeting import greet\n\nMESSAGE = greet("sandbox")\n'
_FAREWELL = 'MESSAGE = "farewell"\n'

# A PEP 517 backend inside the source package: building it needs no other package, and so no index.
_BACKEND = """\
import base64, hashlib, pathlib, zipfile


def build_wheel(folder, config_settings=None, metadata_directory=None):
    name = "lab_farewell-1.0-py3-none-any.whl"
    info = "lab_farewell-1.0.dist-info"
    files = {
        "lab_farewell.py": pathlib.Path("lab_farewell.py").read_text(),
        info + "/METADATA": "Metadata-Version: 2.1\\nName: lab-farewell\\nVersion: 1.0\\n",
        info + "/WHEEL": "Wheel-Version: 1.0\\nGenerator: lab\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
    }
    files[info + "/RECORD"] = "".join(path + ",,\\n" for path in [*files, info + "/RECORD"])
    with zipfile.ZipFile(pathlib.Path(folder) / name, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return name
"""
_BUILD = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def wheel(name: str, module: str, requires: tuple[str, ...] = ()) -> bytes:
    """A wheel of version 1.0 with one module, its source given."""
    package = name.replace("-", "_")
    info = f"{package}-1.0.dist-info"
    needs = "".join(f"Requires-Dist: {other}\n" for other in requires)
    files = {
        f"{package}.py": module,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: lab\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},sha256={_urlsafe(text)},{len(text)}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return target.getvalue()


def tarball(files: dict[str, str]) -> bytes:
    """A gzipped tar archive of text files."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as archive:
        for path, text in files.items():
            member = tarfile.TarInfo(path)
            member.size = len(text.encode())
            member.mode = 0o644
            archive.addfile(member, io.BytesIO(text.encode()))
    return gzip.compress(target.getvalue(), mtime=0)


class PythonIndex:
    """pypi.org's simple index and files.pythonhosted.org's files (the simple repository API, PEP 503).

    `files` is the host that the index sends clients to for the files.
    """

    def __init__(self, files: str = "files.pythonhosted.org") -> None:
        self._host = files
        self.files = {
            "lab_greeting-1.0-py3-none-any.whl": wheel("lab-greeting", _GREETING),
            "lab_hello-1.0-py3-none-any.whl": wheel("lab-hello", _HELLO, ("lab-greeting",)),
            "lab_farewell-1.0.tar.gz": tarball(
                {
                    "lab_farewell-1.0/PKG-INFO": "Metadata-Version: 2.1\nName: lab-farewell\nVersion: 1.0\n",
                    "lab_farewell-1.0/pyproject.toml": _BUILD,
                    "lab_farewell-1.0/backend.py": _BACKEND,
                    "lab_farewell-1.0/lab_farewell.py": _FAREWELL,
                }
            ),
        }

    async def index(self, exchange: Exchange) -> None:
        """Answers `/simple/` and `/simple/NAME/`."""
        html = {"Content-Type": "text/html; charset=utf-8"}
        words = exchange.seen.path.strip("/").split("/")
        projects = {name.partition("-")[0].replace("_", "-"): name for name in self.files}
        if words == ["simple"]:
            links = "".join(f'<a href="/simple/{project}/">{project}</a>\n' for project in projects)
            await exchange.reply(200, links.encode(), html)
        elif len(words) == 2 and words[0] == "simple" and words[1] in projects:
            name = projects[words[1]]
            url = f"https://{self._host}/packages/lab/{name}#sha256={self._digest(name)}"
            await exchange.reply(200, f'<!DOCTYPE html><a href="{url}">{name}</a>\n'.encode(), html)
        else:
            await exchange.reply(404, b"no such project\n")

    async def answer(self, exchange: Exchange) -> None:
        """Answers for index and files, where one host has both."""
        await (self.file if exchange.seen.path.startswith("/packages/") else self.index)(exchange)

    async def file(self, exchange: Exchange) -> None:
        """Answers `/packages/lab/NAME`."""
        content = self.files.get(exchange.seen.path.removeprefix("/packages/lab/"))
        if content is None:
            await exchange.reply(404, b"no such file\n")
        else:
            await exchange.reply(200, content, {"Content-Type": "application/octet-stream"})

    def _digest(self, name: str) -> str:
        return hashlib.sha256(self.files[name]).hexdigest()


class NpmRegistry:
    """registry.npmjs.org, or another host's registry, with one package, `lab-greeting`."""

    def __init__(self, host: str = "registry.npmjs.org") -> None:
        manifest = {"name": "lab-greeting", "version": "1.0.0", "main": "index.js"}
        source = 'module.exports = (who) => "hello, " + who;\n'
        files = {"package/package.json": json.dumps(manifest), "package/index.js": source}
        self._tarball = tarball(files)
        integrity = "sha512-" + base64.b64encode(hashlib.sha512(self._tarball).digest()).decode()
        url = f"https://{host}/lab-greeting/-/lab-greeting-1.0.0.tgz"
        version = {**manifest, "dist": {"tarball": url, "integrity": integrity}}
        self._document = {
            "name": "lab-greeting",
            "dist-tags": {"latest": "1.0.0"},
            "versions": {"1.0.0": version},
        }

    async def answer(self, exchange: Exchange) -> None:
        """Answers the package's document and its tarball."""
        if exchange.seen.path == "/lab-greeting":
            body = json.dumps(self._document).encode()
            await exchange.reply(200, body, {"Content-Type": "application/json"})
        elif exchange.seen.path.endswith("/lab-greeting-1.0.0.tgz"):
            await exchange.reply(200, self._tarball, {"Content-Type": "application/octet-stream"})
        else:
            await exchange.reply(404, b'{"error": "not found"}')


def _urlsafe(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
