"""CRED rows: nothing of a credential comes back from an origin that says what it was told.

An attacker's own key stands in for the credential where there is no egressd, and is what the sandbox sends as well: there it is
taken out, the real one goes in, and neither may be in what the sandbox gets.
"""

from __future__ import annotations

import base64
import html
import json
import os
import secrets
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from egressd.lab import Lab, topology
from egressd.lab.stand import HERE
from tests.bypass.arena import RULES as COMMON
from tests.bypass.arena import Arena, Outcome, Row, arena
from tests.e2e.conftest import build

pytestmark = pytest.mark.e2e

SECRET = f"sk-lab/{secrets.token_hex(18)}"
OWN = f"sk-own/{secrets.token_hex(18)}"
BEARER, BASIC, RANGED = "bearer.lab-keys.com", "basic.lab-keys.com", "ranged.lab-keys.com"
HOSTS = (BEARER, BASIC, RANGED)
ATTACH = {BEARER: "{bearer: true}", BASIC: "{basic: x-access-token}", RANGED: "{bearer: true}"}
REQUESTS = '["GET,HEAD /**", "WEBSOCKET /ws"]'
STARS = r"\*{36}"


def _name(host: str) -> str:
    return host.partition(".")[0]


RULES = COMMON.replace(
    "deny:\n",
    "".join(
        f"  - {{id: {_name(host)}, hosts: [{host}], requests: {REQUESTS}, credential: {_name(host)}}}\n"
        for host in HOSTS
    )
    + "deny:\n",
)
CREDENTIALS = "schema: 1\ncredentials:\n" + "".join(
    f"  {_name(host)}:\n    for: [{{hosts: [{host}], requests: {REQUESTS}}}]\n"
    f"    source: {{file: {HERE}/secrets/key}}\n    attach: {attach}\n"
    + ("    range: true\n" if host == RANGED else "")
    for host, attach in ATTACH.items()
)


def prepare(lab: Lab) -> None:
    """Origins that say back what they are told, in both versions of HTTP."""
    for host in HOSTS:
        lab.set_name(host, a=[topology.API])
        lab.speak(host, "h2", "http/1.1")


@pytest.fixture(scope="module")
def mirrored() -> Iterator[Arena]:
    """An arena whose sandboxes have a credential for these origins; what masks is the same however the wiring was made."""
    with build(os.geteuid() != 0) as lab:
        prepare(lab)
        with arena(lab, rules=RULES, credentials=CREDENTIALS, secrets={"key": SECRET + "\n"}) as made:
            yield made


def spellings(secret: str) -> Iterator[str]:
    """Ways to write a secret down from which it can be read again."""
    yield from (secret, secret.upper(), quote(secret, safe=""), quote(quote(secret, safe=""), safe=""))
    yield from (json.dumps(secret)[1:-1].replace("/", "\\/"), html.escape(secret), secret.encode().hex())
    for before in ("", "a", "ab"):
        yield base64.b64encode((before + secret).encode()).decode()[4:-4]
    yield secret[:24]


def silent(outcome: Outcome) -> None:
    """Neither key came back in any spelling, nor is one in a record; and the origin did get the real one, alone."""
    records = json.dumps(outcome.records)
    for secret in (SECRET, OWN):
        for spelling in spellings(secret):
            assert spelling not in outcome.said
            assert spelling not in records
    given = [
        value for seen in outcome.lab.requests() for name, value in seen.headers if name == "authorization"
    ]
    assert given
    for value in given:
        real = value.endswith(SECRET) or base64.b64decode(value.partition(" ")[2] + "==").endswith(
            SECRET.encode()
        )
        assert real, "another key than the credential"


def ask(host: str, path: str, head: str = "", seconds: float = 3.0) -> str:
    """Code of a request that brings its own key."""
    fields = f"Authorization: Bearer {OWN}\r\n{head}".encode()
    data = f"get({path!r}, host={host!r}, head={fields!r})"
    return f"say(shown(tls({host!r}, 443, {data}, {host!r}, seconds={seconds})))"


def curl(host: str, path: str, *flags: str) -> str:
    """Code of the same by curl."""
    arguments = [
        "curl",
        "-sSik",
        "--max-time",
        "8",
        "-H",
        f"Authorization: Bearer {OWN}",
        *flags,
        f"https://{host}{path}",
    ]
    return f"say(run(*{arguments!r}))"


def upgrade(path: str, *fields: str) -> str:
    """Code of a WebSocket that brings its own key."""
    own = (f"Authorization: Bearer {OWN}", f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}")
    lines = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13", *own, *fields)
    head = "".join(f"{line}\r\n" for line in lines)
    data = f"get({path!r}, host={BEARER!r}, head={head.encode()!r}, close=False)"
    return f"say(shown(tls({BEARER!r}, 443, {data}, {BEARER!r}, seconds=1)))"


def masked(
    id_: str, title: str, code: str, wins: str, sees: str = STARS, host: str = BEARER, **more: Any
) -> Row:
    """An echo whose key is masked."""
    values: dict[str, Any] = {"records": (("request", "allow", "rule"), ("request", "end", "completed"))}
    values |= {"rule": _name(host), "reaches": (host,), "also": silent, "wired": False}
    return Row(id_, code, title=title, wins=wins, sees=sees, **(values | more))


def blocked(id_: str, title: str, code: str, wins: str, reason: str, **more: Any) -> Row:
    """An answer that is not passed on."""
    records = (("request", "allow", "rule"), ("request", "end", reason))
    return masked(
        id_, title, code, wins, rf"502 egressd: (?!.*\*\*\*).*reason {reason}\)", records=records, **more
    )


OWN64 = base64.b64encode(f"Bearer {OWN}".encode()).decode()
ROWS = [
    masked("CRED-03", "an echo of the header fields", ask(BEARER, "/mirror"), OWN),
    masked("CRED-03", "an echo in JSON", ask(BEARER, "/echo"), OWN),
    masked(
        "CRED-03",
        "an echo in chunks of three bytes",
        ask(BEARER, "/mirror?as=split"),
        r"\r\n3\r\n",
        r"\*\*\*",
    ),
    masked("CRED-03", "an echo in events", ask(BEARER, "/mirror?as=events"), OWN),
    masked("CRED-03", "an echo in header fields", ask(BEARER, "/mirror?as=head"), rf"X-Echo-\d: [^\n]*{OWN}"),
    masked(
        "CRED-03",
        "an echo of a guess, which is not told from a wrong one",
        ask(BEARER, "/mirror?as=head", f"X-Guess: {SECRET[:20]}\r\nX-Wrong: {SECRET[:19]}#\r\n"),
        OWN,
        rf"(?i)x-guess: {SECRET[:20]}\r?\n.*x-wrong: {SECRET[:19]}#",
    ),
    masked("CRED-03", "an echo in an interim response", ask(BEARER, "/mirror?as=early"), "103 Early"),
    masked("CRED-03", "an echo in trailers", ask(BEARER, "/mirror?as=trailers"), "X-Echo"),
    masked("CRED-03", "an echo in HTTP/2", curl(BEARER, "/mirror", "--http2"), "HTTP/2 200.*" + OWN),
    masked("CRED-03", "an echo in HTTP/2, cut", curl(BEARER, "/mirror?as=split", "--http2"), OWN),
    masked(
        "CRED-03",
        "a part of an echo, where a rule does not allow ranges",
        ask(BEARER, "/mirror?as=ranges", "Range: bytes=0-39\r\n"),
        "206 Partial",
        "200 OK.*" + STARS,
    ),
    masked(
        "CRED-03",
        "a part of an echo, where a credential allows ranges",
        ask(RANGED, "/mirror?as=ranges", "Range: bytes=0-999\r\n"),
        "206 Partial",
        "206 Partial.*" + STARS,
        host=RANGED,
        note="documented limit: with `range: true` whoever chooses the ends of a part can cut the secret in halves",
    ),
    masked(
        "CRED-17",
        "an echo in gzip",
        curl(BEARER, "/mirror?as=gzip", "--http1.1", "-H", "Accept-Encoding: br, zstd, gzip", "--compressed"),
        OWN,
        r"(?i)^(?!.*content-encoding).*transfer-encoding: chunked.*" + STARS,
    ),
    masked(
        "CRED-17", "an echo in deflate", curl(BEARER, "/mirror?as=deflate", "--http1.1", "--compressed"), OWN
    ),
    masked(
        "CRED-17",
        "an echo in gzip, in HTTP/2",
        curl(BEARER, "/mirror?as=gzip", "--http2", "--compressed"),
        OWN,
    ),
    blocked("CRED-17", "an echo in Brotli", ask(BEARER, "/mirror?as=br"), "200 OK", "unscannable"),
    blocked("CRED-17", "an echo in gzip twice", ask(BEARER, "/mirror?as=twice"), "200 OK", "unscannable"),
    masked(
        "CRED-17",
        "an echo in Brotli, in HTTP/2",
        curl(BEARER, "/mirror?as=br", "--http2"),
        "HTTP/2 200",
        r"HTTP/2 502.*reason unscannable\)",
        records=(("request", "allow", "rule"), ("request", "end", "unscannable")),
    ),
    masked("CRED-19", "an echo of Basic", ask(BASIC, "/mirror"), OWN, host=BASIC),
    masked(
        "CRED-19",
        "an echo of Basic, in base64 again as a whole",
        ask(BASIC, "/mirror?as=json"),
        OWN,
        host=BASIC,
    ),
    masked("CRED-19", "an echo in base64", ask(BEARER, "/mirror?as=base64"), OWN64[:24]),
    masked("CRED-19", "an echo for URLs", ask(BEARER, "/mirror?as=url"), quote(OWN, safe="")),
    masked("CRED-19", "an echo in JSON in an array", ask(BEARER, "/mirror?as=json"), OWN),
    masked("CRED-19", "an echo in hexadecimal", ask(BEARER, "/mirror?as=hex"), OWN.encode().hex()),
    masked("CRED-19", "an echo in upper case", ask(BEARER, "/mirror?as=upper"), OWN.upper()),
    masked("CRED-19", "an echo in HTML", ask(BEARER, "/mirror?as=html"), html.escape(OWN)),
    masked("CRED-19", "an echo in UTF-16", ask(BEARER, "/mirror?as=utf16"), "s\0k\0", r"\*{72}"),
    masked(
        "CRED-19",
        "an echo from back to front",
        ask(BEARER, "/mirror?as=reversed"),
        OWN[::-1],
        SECRET[::-1],
        note="documented limit: an origin that wants to hand the secret over can; its binding says to which hosts it goes at all",
    ),
    masked("CRED-20", "an error page of the origin", ask(BEARER, "/mirror?as=error"), OWN, "431 .*" + STARS),
    masked(
        "CRED-21",
        "a WebSocket whose messages say it",
        upgrade("/ws?as=frames"),
        OWN,
        "101 .*" + STARS,
        records=(("request", "allow", "rule"),),
    ),
    blocked(
        "CRED-21",
        "a WebSocket whose subprotocol says it",
        upgrade("/ws?as=protocol", f"Sec-WebSocket-Protocol: chat, {OWN.replace('/', '-')}"),
        "101 Switching",
        "upstream_protocol",
    ),
    blocked(
        "CRED-21",
        "a WebSocket that compresses",
        upgrade("/ws?as=deflate", "Sec-WebSocket-Extensions: permessage-deflate"),
        "101 Switching",
        "upstream_protocol",
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_nothing_comes_back(mirrored: Arena, row: Row) -> None:
    mirrored.holds(row)
