"""Credentials for the lab: fresh secrets, the two files that speak of them, the hosts that ask for them, and a search for them.

Every secret is new in each run and holds characters that each way of writing it down changes.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import secrets
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, quote_plus

from egressd.lab import Lab, topology
from egressd.lab.guards import Guard
from egressd.lab.stand import HERE, Stand

BEARER = Guard("header", "authorization", "Bearer ")


def fresh(prefix: str = "sk+lab/", tail: str = "&=") -> str:
    """A secret of a key's usual size."""
    return f"{prefix}{secrets.token_hex(18)}{tail}"


@dataclass(frozen=True)
class Holding:
    """One credential: its definition, the host that asks for it, and how a client calls that host.

    `source` is None for one that reads the file `secrets/NAME`; `options` are the lines of the definition that come after.
    `ask` is what curl is told besides the URL; `path` the path.
    """

    name: str
    attach: str
    guard: Guard | None
    source: str | None = None
    options: tuple[str, ...] = ()
    ask: str = ""
    path: str = "/echo"
    host: str = ""
    requests: tuple[str, ...] = ("GET,HEAD,POST /**",)
    secret: str = field(default_factory=fresh)

    @property
    def at(self) -> str:
        """The host that it is for."""
        return self.host or f"{self.name}.lab-origin.com"

    @property
    def url(self) -> str:
        """What a client asks for."""
        return f"https://{self.at}{self.path}"

    def definition(self) -> str:
        """Its entry in credentials.yaml."""
        lines = [
            f"{self.name}:",
            f"  for: [{{hosts: [{self.at}], requests: {json.dumps(self.requests)}}}]",
            f"  source: {self.source or f'{{file: {HERE}/secrets/{self.name}}}'}",
            f"  attach: {self.attach}",
            *(f"  {option}" for option in self.options),
        ]
        return "".join(f"  {line}\n" for line in lines)

    def rule(self) -> str:
        """Its entry in the profile."""
        return (
            f"  - id: {self.name}\n    hosts: [{self.at}]\n    requests: {json.dumps(self.requests)}\n"
            f"    credential: {self.name}\n"
        )


def profile(holdings: Iterable[Holding], more: str = "") -> str:
    """A profile that allows each holding's host with its credential; `more` are further allow entries."""
    rules = "".join(holding.rule() for holding in holdings)
    return f"schema: 1\nprofile: lab\nowner: e2e\nallow:\n{rules}{more}"


def credentials(holdings: Iterable[Holding]) -> str:
    """The text of credentials.yaml."""
    return "schema: 1\ncredentials:\n" + "".join(holding.definition() for holding in holdings)


def set_guards(lab: Lab, holdings: Iterable[Holding], protocols: Iterable[str] = ("http/1.1",)) -> None:
    """Makes each holding's host ask for its secret and nothing else; without a guard it is somebody else's to ask."""
    for holding in holdings:
        lab.set_name(holding.at, a=[topology.API])
        lab.speak(holding.at, *protocols)
        if holding.guard is not None:
            keys = () if holding.guard.issuer else (holding.secret,)
            lab.guard(holding.at, dataclasses.replace(holding.guard, keys=keys))


_DRIVER = """
import json, subprocess, sys
print("ready", flush=True)
for line in sys.stdin:
    ran = subprocess.run(["sh", "-c", json.loads(line)], stdin=subprocess.DEVNULL, capture_output=True)
    said = [ran.stdout.decode("latin-1"), ran.stderr.decode("latin-1")]
    print(json.dumps([ran.returncode, *said]), flush=True)
"""


class Inside:
    """A sandbox that runs one script after another until it is closed; `heard` is all that ever came out of it.

    `env` is what `egressd run` itself has in its environment beside the usual, `flags` are its own.
    """

    def __init__(
        self, stand: Stand, *, env: Mapping[str, str] | None = None, flags: Iterable[str] = ()
    ) -> None:
        self.heard: list[str] = []
        self._said = stand.directory / f"said-{secrets.token_hex(4)}.log"
        with open(self._said, "w", encoding="utf-8") as said:
            self.process: subprocess.Popen[str] = stand.start(
                ["/usr/bin/python3", "-Ic", _DRIVER],
                flags=list(flags),
                env=env,
                stdin=subprocess.PIPE,
                stderr=said,
            )
        if self._line() != "ready\n":
            self.close()
            raise AssertionError(f"the sandbox did not start: {self.errors()}")

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Runs a shell script in the sandbox, in its workspace; bytes come as latin-1."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(script) + "\n")
        self.process.stdin.flush()
        status, out, err = json.loads(self._line() or "[-1, '', 'the sandbox is gone']")
        self.heard += [out, err]
        return subprocess.CompletedProcess(script, status, out, err)

    def errors(self) -> str:
        """What egressd and the sandbox said on standard error so far."""
        return self._said.read_text(encoding="utf-8", errors="backslashreplace")

    def close(self) -> None:
        """Ends the sandbox as the end of its command does, and waits for egressd to end."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(30)

    def __enter__(self) -> Inside:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()


_MARK = re.compile(r"\n--answered-(\d{3})\n")


def answers(inside: Inside, urls: Iterable[str], arguments: str = "") -> list[tuple[str, str]]:
    """The status and the whole answer, head and body, of each of several requests by one curl."""
    told = " ".join(f'"{url}"' for url in urls)
    script = f"curl -gsSi -m 20 --compressed -w '\\n--answered-%{{http_code}}\\n' {arguments} {told}"
    *parts, _ = _MARK.split(inside.run(script).stdout)
    return list(zip(parts[1::2], parts[::2], strict=True))


def uses(stand: Stand, credential: str) -> list[dict[str, Any]]:
    """The records of requests that a credential was attached to."""
    return [record for record in stand.records(event="decision") if record.get("credential") == credential]


def needles(secrets_: Iterable[str], users: Iterable[str] = ("x-access-token",)) -> dict[bytes, str]:
    """Every form in which a secret could lie about, and what it is a form of.

    Base64 hides a text in one of three alignments; of each, only what does not depend on what stands before or behind it.
    """
    found: dict[bytes, str] = {}
    for secret in secrets_:
        forms = {secret, quote(secret, safe=""), quote_plus(secret), json.dumps(secret)[1:-1], secret[::-1]}
        forms |= {quote(secret, safe="").lower(), secret.encode().hex()}
        for text in (secret, *(f"{user}:{secret}" for user in users)):
            forms.update(_base64_forms(text.encode()))
        found.update({form.encode(): secret for form in forms})
    return found


def _base64_forms(data: bytes) -> Iterator[str]:
    for before in range(3):
        whole = base64.b64encode(bytes(before) + data)
        start = (0, 2, 3)[before]
        end = len(whole) - (0 if (before + len(data)) % 3 == 0 else 4)
        standard = whole[start:end].decode()
        yield from (standard, standard.translate(str.maketrans("+/", "-_")), quote(standard, safe=""))


def search(places: Mapping[str, bytes], needles_: Mapping[bytes, str]) -> list[str]:
    """Where a needle lies, each as `place: form`."""
    return [
        f"{place}: {needle.decode()}"
        for place, content in places.items()
        for needle in needles_
        if needle in content
    ]
