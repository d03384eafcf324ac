"""Package repositories made of files, one tiny package in each, for the lab to serve."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path

from egressd.lab.packages import tarball

_CRATE = {
    "lab-greeting-1.0.0/Cargo.toml": '[package]\nname = "lab-greeting"\nversion = "1.0.0"\nedition = "2021"\n',
    "lab-greeting-1.0.0/src/lib.rs": 'pub fn greet() -> &\'static str { "hello" }\n',
}
_GO_MODULE = "lab-origin.com/greeting"
_GEMSPEC = """\
Gem::Specification.new do |s|
  s.name = "lab-greeting"
  s.version = "1.0.0"
  s.summary = "a greeting"
  s.authors = ["lab"]
  s.files = []
end
"""
_POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>com.lab-origin</groupId><artifactId>lab-parent</artifactId><version>1.0</version><packaging>pom</packaging>
</project>
"""
_CONTROL = """\
Package: lab-hello
Version: 1.0
Architecture: all
Maintainer: Lab <lab@lab-origin.com>
Description: a greeting
"""


@dataclass(frozen=True, slots=True)
class Repositories:
    """The folder of each host that was made, and why others were not."""

    folders: dict[str, Path]
    missing: dict[str, str]


def build(root: Path) -> Repositories:
    """Makes every repository below `root`; one whose tools are not here is left out with the reason."""
    made = Repositories({}, {})
    for build_one in (_crates, _go, _gems, _maven, _debian):
        try:
            made.folders.update(build_one(root))
        except (OSError, subprocess.CalledProcessError) as error:
            made.missing[build_one.__name__.strip("_")] = str(error)
    return made


def _crates(root: Path) -> dict[str, Path]:
    """crates.io's sparse index (RFC 2789) and its downloads."""
    content = tarball(_CRATE)
    line = {"name": "lab-greeting", "vers": "1.0.0", "deps": [], "features": {}, "yanked": False}
    index = {"dl": "https://static.crates.io/crates", "api": "https://crates.io"}
    _write(root / "index.crates.io/config.json", json.dumps(index).encode())
    entry = json.dumps({**line, "cksum": hashlib.sha256(content).hexdigest()})
    _write(root / "index.crates.io/la/b-/lab-greeting", entry.encode() + b"\n")
    _write(root / "static.crates.io/crates/lab-greeting/1.0.0/download", content)
    return {host: root / host for host in ("index.crates.io", "static.crates.io")}


def _go(root: Path) -> dict[str, Path]:
    """A Go module proxy, as `go help goproxy` describes it."""
    folder = root / "proxy.golang.org" / _GO_MODULE / "@v"
    module = f"module {_GO_MODULE}\n\ngo 1.20\n"
    files = {"go.mod": module, "greeting.go": "package greeting\n"}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as target:
        for path, text in files.items():
            target.writestr(f"{_GO_MODULE}@v1.0.0/{path}", text)
    _write(folder / "list", b"v1.0.0\n")
    _write(folder / "v1.0.0.info", b'{"Version": "v1.0.0", "Time": "2026-01-01T00:00:00Z"}')
    _write(folder / "v1.0.0.mod", module.encode())
    _write(folder / "v1.0.0.zip", archive.getvalue())
    return {"proxy.golang.org": root / "proxy.golang.org"}


def _gems(root: Path) -> dict[str, Path]:
    """rubygems.org's older, static index, made by gem itself."""
    folder = root / "rubygems.org"
    (folder / "gems").mkdir(parents=True)
    spec = root / "lab-greeting.gemspec"
    spec.write_text(_GEMSPEC)
    gem = folder / "gems/lab-greeting-1.0.0.gem"
    _run("gem", "build", "--silent", "--force", "--output", str(gem), str(spec))
    _run("gem", "generate_index", "--silent", "--directory", str(folder))
    return dict.fromkeys(("rubygems.org", "index.rubygems.org"), folder)


def _maven(root: Path) -> dict[str, Path]:
    """Maven's central repository with a parent POM: what `mvn validate` needs without any plugin."""
    path = root / "repo.maven.apache.org/maven2/com/lab-origin/lab-parent/1.0/lab-parent-1.0.pom"
    _write(path, _POM.encode())
    digest = hashlib.sha1(_POM.encode(), usedforsecurity=False).hexdigest()
    _write(path.with_name(path.name + ".sha1"), digest.encode())
    return {"repo.maven.apache.org": root / "repo.maven.apache.org"}


def _debian(root: Path) -> dict[str, Path]:
    """A Debian mirror with one package, its indexes also by hash."""
    site = root / "deb.debian.org"
    pool = site / "debian/pool/main/l/lab-hello"
    tree = root / "lab-hello"
    _write(tree / "DEBIAN/control", _CONTROL.encode())
    pool.mkdir(parents=True)
    deb = pool / "lab-hello_1.0_all.deb"
    _run("dpkg-deb", "--root-owner-group", "--build", str(tree), str(deb))
    content = deb.read_bytes()
    place = deb.relative_to(site / "debian")
    packages = f"{_CONTROL}Filename: {place}\nSize: {len(content)}\nSHA256: {_sha256(content)}\n\n".encode()
    dist = site / "debian/dists/stable"
    index = "main/binary-amd64/Packages"
    _write(dist / index, packages)
    _write(dist / f"main/binary-amd64/by-hash/SHA256/{_sha256(packages)}", packages)
    release = (
        "Origin: Debian\nSuite: stable\nCodename: stable\nArchitectures: amd64\nComponents: main\n"
        "Acquire-By-Hash: yes\nDate: Mon, 30 Nov 2026 00:00:00 UTC\n"
        f"SHA256:\n {_sha256(packages)} {len(packages)} {index}\n"
    )
    _write(dist / "Release", release.encode())
    return {"deb.debian.org": site}


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
