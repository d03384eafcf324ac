"""The lab as its owner sees it: build it, run commands in it, ask what the world saw.

with Lab.build() as lab:
    lab.open_exec(["curl", "-sS", "https://pypi.org/simple/"])
    assert lab.requests(host="pypi.org")
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from egressd.lab import topology
from egressd.lab.guards import Guard
from egressd.lab.sightings import Flow, Hit, SeenQuery, SeenRequest

Place = Literal["host", "open", "world"]

_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin"
_PACKAGES = str(Path(__file__).resolve().parents[2])
_BUILD_SECONDS = 30.0


class LabError(Exception):
    """The lab could not be built or does not answer; the text says which command failed and how."""


def clean_env(lab: Lab | None = None, *, home: str | None = None, trust: bool = True) -> dict[str, str]:
    """An environment that inherits nothing: no proxy, no tool configuration of the machine.

    With a lab, HOME is its home folder and, where `trust`, the tools' CA variables name its root.
    """
    environment = {
        "PATH": _PATH,
        "HOME": home or (lab.home if lab else "/nonexistent"),
        "LANG": "C.UTF-8",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_CACHE_DIR": "1",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_TERMINAL_PROMPT": "0",
        "NPM_CONFIG_USERCONFIG": "/dev/null",
        "NPM_CONFIG_GLOBALCONFIG": "/nonexistent/npmrc",  # npm refuses one file for two levels
    }
    if lab is not None and trust:
        variables = (
            "SSL_CERT_FILE",
            "CURL_CA_BUNDLE",
            "REQUESTS_CA_BUNDLE",
            "PIP_CERT",
            "GIT_SSL_CAINFO",
            "NODE_EXTRA_CA_CERTS",
        )
        environment.update(dict.fromkeys(variables, lab.ca_file))
    return environment


class Lab:
    """A built lab; make one with `Lab.build()` and end it with `close()` or `with`.

    Safe to use from several threads. The world lives in a child process; when this process dies, so
    does all of it.
    """

    dns = topology.DNS

    def __init__(
        self, world: subprocess.Popen[bytes], channel: socket.socket, directory: str, rootless: bool
    ) -> None:
        self.rootless = rootless
        self.directory = directory
        self.home = f"{directory}/home"
        self.ca_file = f"{directory}/ca.pem"
        self._world = world
        self._channel = channel
        self._lines = channel.makefile("rb")
        self._lock = threading.Lock()
        self._started: list[subprocess.Popen[Any]] = []
        self._places: dict[str, dict[str, int]] = {}

    @classmethod
    def build(cls, *, rootless: bool | None = None) -> Self:
        """Builds a lab, inside a user namespace where `rootless` (default: unless uid 0). Raises LabError."""
        rootless = os.geteuid() != 0 if rootless is None else rootless
        directory = tempfile.mkdtemp(prefix="egressd-lab-")
        os.chmod(directory, 0o755)  # noqa: S103 (the sandbox's uid reads the root certificate there)
        os.mkdir(f"{directory}/home")
        os.chmod(f"{directory}/home", 0o1777)  # noqa: S103 (a home for whichever uid a command runs as)
        ours, theirs = socket.socketpair()
        arguments = [str(theirs.fileno()), directory, "user" if rootless else "root"]
        environment = {"PATH": _PATH, "PYTHONPATH": _PACKAGES, "LANG": "C.UTF-8"}
        with theirs, open(f"{directory}/world.log", "wb") as log:
            world = subprocess.Popen(
                [sys.executable, "-P", "-m", "egressd.lab.world", *arguments],
                pass_fds=[theirs.fileno()],
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        lab = cls(world, ours, directory, rootless)
        try:
            ours.settimeout(_BUILD_SECONDS)
            lab._places = lab._read()
        except BaseException:
            lab.close()
            raise
        return lab

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends every command started in the lab, then the world and its folder. May be called twice."""
        for process in self._started:
            _end(process)
        self._started.clear()
        self._lines.close()
        self._channel.close()
        try:
            self._world.wait(10)
        except subprocess.TimeoutExpired:
            self._world.kill()
            self._world.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    # commands

    def host_exec(self, argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command where egressd lives; the options are those of `run`."""
        return self.run("host", argv, **options)

    def open_exec(self, argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a command where a sandbox without egressd lives; the options are those of `run`."""
        return self.run("open", argv, **options)

    def popen_host(self, argv: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command where egressd lives; the options are those of `popen`."""
        return self.popen("host", argv, **options)

    def popen_open(self, argv: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command where a sandbox without egressd lives; the options are those of `popen`."""
        return self.popen("open", argv, **options)

    def run(
        self,
        place: Place,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        timeout: float = 30.0,
        input: str | None = None,  # noqa: A002 (subprocess.run's word)
        privileged: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end and returns what it said. Raises TimeoutExpired after killing it.

        Undecodable output bytes come as backslash escapes.
        """
        process = self.popen(
            place,
            argv,
            env=env,
            cwd=cwd,
            privileged=privileged,
            stdin=subprocess.PIPE,
            errors="backslashreplace",
        )
        try:
            output, errors = process.communicate(input, timeout)
        finally:
            self._started.remove(process)
            _end(process)
        return subprocess.CompletedProcess(argv, process.returncode, output, errors)

    def popen(
        self,
        place: Place,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        privileged: bool = True,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] = subprocess.PIPE,
        stderr: int | IO[Any] = subprocess.PIPE,
        pass_fds: tuple[int, ...] = (),
        text: bool = True,
        errors: str | None = None,
        start_new_session: bool = False,
    ) -> subprocess.Popen[Any]:
        """Starts a command; the Popen's pid is the command's own. It is killed at close().

        `env` None is `clean_env(lab)`; `cwd` None the lab's home. `privileged` False: uid 1000 without
        capabilities.
        """
        process = subprocess.Popen(
            self.join_argv(place, argv, cwd=cwd, privileged=privileged),
            env=clean_env(self) if env is None else env,
            cwd="/",
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=pass_fds,
            text=text,
            errors=errors,
            start_new_session=start_new_session,
        )
        self._started.append(process)
        return process

    def join_argv(
        self, place: Place, argv: list[str], *, cwd: str | None = None, privileged: bool = True
    ) -> list[str]:
        """The argument list that runs `argv` in a place, for a caller with a Popen or a terminal of its own.

        Each wrapper becomes the next by exec. Namespaces are named by the world's own descriptors, so
        nothing is inherited by the command.
        """
        world = f"/proc/{self._world.pid}"
        joined = [_tool("nsenter")]
        if self.rootless:
            joined += [f"--user={world}/ns/user", "--preserve-credentials"]
        joined += [f"--mount={world}/ns/mnt", f"--net={world}/fd/{self._places[place]['fd']}", "--"]
        if not privileged:
            joined += [_tool("unshare"), "--user", "--map-user=1000", "--map-group=1000", "--"]
        return [*joined, _tool("env"), "-C", cwd or self.home, "--", *argv]

    def netns_inode(self, place: Place) -> int:
        """The inode of a place's network namespace, as in `os.stat("/proc/PID/ns/net").st_ino`."""
        return self._places[place]["inode"]

    # what the world saw

    def requests(self, host: str | None = None, path: str | None = None) -> list[SeenRequest]:
        """The HTTP requests that origins received, in order; metadata endpoints are in `metadata_hits`."""
        return [
            seen
            for seen in self._requests()
            if seen.address not in topology.METADATAS
            and (host is None or seen.host == host)
            and (path is None or seen.path == path)
        ]

    def metadata_hits(self) -> list[SeenRequest]:
        """The HTTP requests that a metadata endpoint received and answered."""
        return [seen for seen in self._requests() if seen.address in topology.METADATAS]

    def dns_queries(self, name: str | None = None) -> list[SeenQuery]:
        """The DNS queries that reached the authoritative server."""
        seen = [SeenQuery(**values) for values in self.ask("queries")]
        return [query for query in seen if name is None or query.name == name]

    def attacker_hits(self, protocol: str | None = None, port: int | None = None) -> list[Hit]:
        """What reached the attacker: TCP connections, UDP datagrams, ICMP echo requests."""
        hits = [Hit(**values) for values in self.ask("hits")]
        return [hit for hit in hits if protocol in {None, hit.protocol} and port in {None, hit.port}]

    def packets(
        self,
        origin: str | None = "host",
        address: str | None = None,
        protocol: str | None = None,
        port: int | None = None,
    ) -> list[Flow]:
        """The packets captured as they left `origin` (None: both), by destination.

        Proves nothing if any were lost. The kernel's own neighbour discovery and multicast reports (icmp6
        135, 136, 143) are in it as well.
        """
        flows = [Flow(**values) for values in self.ask("flows")]
        return [
            flow
            for flow in flows
            if origin in {None, flow.origin}
            and address in {None, flow.address}
            and protocol in {None, flow.protocol}
            and port in {None, flow.port}
        ]

    def packets_lost(self) -> int:
        """The packets that the capture could not read."""
        return int(self.ask("lost"))

    def forget(self) -> None:
        """Empties all records, for the next part of a test."""
        self.ask("forget")

    # shaping the world

    def set_name(self, name: str, **entry: Any) -> None:
        """Says from now on something else for a DNS name; the fields are those of `names.Name`."""
        self.ask("set_name", name=name, entry=entry)

    def set_certificate(self, name: str, kind: str) -> None:
        """Gives a TLS name a certificate of another kind (see `pki.KINDS`)."""
        self.ask("set_certificate", name=name, kind=kind)

    def serve_folder(self, name: str, folder: Path, **entry: Any) -> None:
        """Makes a host a site of the files below a folder; the fields are those of `names.Name` (default: the API's address)."""
        self.set_name(name, **(entry or {"a": [topology.API]}))
        self.ask("serve_folder", name=name, folder=str(folder))

    def guard(self, name: str, guard: Guard | None) -> None:
        """Makes a host ask for a key, and answer 401 to who has none; None: it asks nobody."""
        self.ask("guard", name=name, guard=None if guard is None else asdict(guard))

    def relay(self, name: str, port: int, **entry: Any) -> None:
        """Makes a host that of a plain HTTP server which the owner runs in `world` on 127.0.0.1; the lab ends its TLS."""
        self.set_name(name, **(entry or {"a": [topology.API]}))
        self.ask("relay", name=name, port=port)

    def speak(self, name: str, *protocols: str) -> None:
        """Says which protocols (ALPN) a name agrees to: `h2` is answered by `streams`, the others by HTTP/1.1."""
        self.ask("speak", name=name, protocols=protocols)

    def expect(self, issuer: str, value: str) -> None:
        """Says what an issuer of `issuers` must be shown; empty: it fails."""
        self.ask("expect", issuer=issuer, value=value)

    def issued(self) -> list[str]:
        """Every credential that an issuer has issued, those taken back too."""
        return list(self.ask("issued"))

    def asked_of_issuers(self) -> list[dict[str, Any]]:
        """What issuers were asked for, in order: `issuer`, and the members of the request."""
        return list(self.ask("asked"))

    def issue(self, name: str) -> str:
        """Return a certificate for a name and its key, PEM, for a server run in `world`."""
        return str(self.ask("issue", name=name))

    def ask(self, what: str, **arguments: Any) -> Any:
        """One question to the world's process. Raises LabError when it is gone or does not understand."""
        with self._lock:
            try:
                self._channel.sendall(json.dumps({"ask": what, **arguments}).encode() + b"\n")
            except OSError as error:
                raise LabError(f"the lab's world is gone: {self._log()}") from error
            return self._read()

    def _requests(self) -> list[SeenRequest]:
        return [SeenRequest(**values) for values in self.ask("requests")]

    def _read(self) -> Any:
        try:
            line = self._lines.readline()
        except OSError as error:
            raise LabError(f"the lab's world does not answer: {error}") from error
        if not line:
            raise LabError(f"the lab's world is gone: {self._log()}")
        answer = json.loads(line)
        if "error" in answer:
            raise LabError(answer["error"])
        return answer["value"]

    def _log(self) -> str:
        try:
            return Path(self.directory, "world.log").read_text(errors="replace")[-2000:] or "it said nothing"
        except OSError:
            return "its log is gone too"


def _end(process: subprocess.Popen[Any]) -> None:
    """Kills a process that still runs, reaps it and closes our ends, whoever else holds the others."""
    if process.poll() is None:
        process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):  # unsent input of a process that is gone
                stream.close()


def _tool(name: str) -> str:
    found = shutil.which(name, path=_PATH)
    if found is None:
        raise LabError(f"{name} is not installed")
    return found
