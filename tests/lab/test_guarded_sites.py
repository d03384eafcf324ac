"""The lab's origins that ask for a key, and those that issue one, from where nothing stands between."""

from __future__ import annotations

import base64
import gzip
import html
import json
import time

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from egressd.lab import Lab
from egressd.lab.guards import Guard, Guards
from egressd.lab.issuers import GITHUB, GOOGLE, KUBERNETES, OAUTH, QUEUE
from egressd.lab.mirrors import FURTHER, SHAPES, fragments, reflection
from egressd.lab.models import WORDS
from egressd.lab.packages import PythonIndex
from egressd.lab.sightings import SeenRequest

KEY = "the-right-key"
BASIC = "Basic " + base64.b64encode(f"x-access-token:{KEY}".encode()).decode()


def seen(target: str = "/a", *headers: tuple[str, str]) -> SeenRequest:
    return SeenRequest(
        "GET", "guarded.test", target, [list(pair) for pair in headers], "", "11.0.0.20", 443, True
    )


@pytest.mark.parametrize(
    ("guard", "request_", "fits"),
    [
        pytest.param(Guard("header", "x-api-key"), seen("/", ("x-api-key", KEY)), True, id="a header"),
        pytest.param(Guard("header", "x-api-key"), seen(), False, id="none"),
        pytest.param(
            Guard("header", "x-api-key"), seen("/", ("x-api-key", "other")), False, id="a wrong one"
        ),
        pytest.param(
            Guard("header", "x-api-key"),
            seen("/", ("x-api-key", KEY), ("x-api-key", "other")),
            False,
            id="not alone",
        ),
        pytest.param(
            Guard("header", "authorization", "Bearer "),
            seen("/", ("authorization", f"Bearer {KEY}")),
            True,
            id="a bearer",
        ),
        pytest.param(
            Guard("header", "authorization", "Bearer "),
            seen("/", ("authorization", KEY)),
            False,
            id="no scheme",
        ),
        pytest.param(
            Guard("header", "authorization", user="x-access-token"),
            seen("/", ("authorization", BASIC)),
            True,
            id="basic",
        ),
        pytest.param(
            Guard("header", "authorization", user="somebody"),
            seen("/", ("authorization", BASIC)),
            False,
            id="basic of another user",
        ),
        pytest.param(
            Guard("header", "authorization", user="x"),
            seen("/", ("authorization", "Basic =")),
            False,
            id="bad basic",
        ),
        pytest.param(Guard("query", "key"), seen(f"/?a=b&key={KEY}"), True, id="a query"),
        pytest.param(Guard("query", "key"), seen(f"/?key={KEY}&key=mine"), False, id="a query twice"),
        pytest.param(Guard("cookie", "sid"), seen("/", ("cookie", f"a=b; sid={KEY}")), True, id="a cookie"),
        pytest.param(
            Guard("cookie", "sid"), seen("/", ("cookie", f"sid={KEY}; sid=x")), False, id="a cookie twice"
        ),
        pytest.param(Guard("segment"), seen(f"/bot/{KEY}/send"), True, id="a segment"),
        pytest.param(Guard("segment"), seen("/bot/{token}/send"), False, id="a segment unfilled"),
    ],
)
def test_a_guard_lets_in_who_has_the_key_alone(guard: Guard, request_: SeenRequest, fits: bool) -> None:
    guards = Guards()
    guards.set_guard("guarded.test", Guard(guard.place, guard.name, guard.scheme, guard.user, (KEY,)))
    assert (guards.refuses(request_) is None) == fits


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mirror_says_the_key_back_in_some_form(shape: str) -> None:
    headers, pieces = reflection(seen("/mirror", ("authorization", BASIC)), shape)
    body = b"".join(pieces)
    body = gzip.decompress(body) if shape == "gzip" else body
    told = (body.decode("latin-1") + "".join(headers.values())).replace("%20", " ")
    assert (
        (BASIC in told)
        or base64.b64encode(BASIC.encode()).decode() in told
        or BASIC.replace("=", "%3D").replace("Basic ", "") in told
        or shape == "deflate"
    )


@pytest.mark.parametrize("shape", FURTHER)
def test_a_mirror_does_to_the_key_what_origins_do(shape: str) -> None:
    headers, pieces = reflection(seen("/mirror", ("authorization", BASIC)), shape)
    body = b"".join(pieces)
    forms = {
        "hex": BASIC.encode().hex().encode(),
        "upper": BASIC.upper().encode(),
        "html": html.escape(BASIC).encode(),
        "utf16": BASIC.encode("utf-16-le"),
        "reversed": BASIC[::-1].encode(),
    }
    if shape == "twice":
        body = gzip.decompress(gzip.decompress(body))
        assert headers["Content-Encoding"] == "gzip, gzip"
    assert forms.get(shape, BASIC.encode()) in body


def test_a_message_says_the_key_back_in_fragments() -> None:
    frames = fragments(seen("/ws", ("authorization", BASIC)))
    assert frames[0][0] == 1
    assert frames[-1] == b"\x80\0"
    assert BASIC.encode() in b"".join(frame[2:] for frame in frames if frame[0] in (0, 1))
    assert (b"\x89" + bytes((len(BASIC),)) + BASIC.encode()) in frames


pytestmark = pytest.mark.e2e


def curl(lab: Lab, *arguments: str) -> str:
    done = lab.open_exec(["curl", "-sS", "--max-time", "15", *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(lab: Lab, *arguments: str) -> str:
    return curl(lab, "-o", "/dev/null", "-w", "%{http_code}", *arguments)


def open_with(lab: Lab, host: str, token: str) -> str:
    return status(lab, "-H", f"Authorization: Bearer {token}", f"https://{host}/echo")


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
def test_a_guarded_host_asks_in_both_versions(lab: Lab, version: str) -> None:
    host = "h2.lab-origin.com"
    lab.guard(host, Guard("header", "x-api-key", keys=(KEY,)))
    try:
        assert status(lab, version, f"https://{host}/echo") == "401"
        assert status(lab, version, "-H", f"x-api-key: {KEY}", f"https://{host}/mirror?as=split") == "200"
        assert [request.status for request in lab.requests(host=host)] == [401, 200]
    finally:
        lab.guard(host, None)


def test_issued_tokens_open_what_they_are_for(lab: Lab) -> None:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    signed = jwt.encode({"iss": "12", "exp": time.time() + 60}, key, algorithm="RS256")
    forged = jwt.encode(
        {"iss": "12", "exp": time.time() + 60}, rsa.generate_private_key(65537, 2048), "RS256"
    )
    target = "api.lab-origin.com"
    for issuer in ("oauth", "github", "google", "kubernetes"):
        lab.expect(issuer, public.decode() if issuer in {"github", "google"} else "me:secret")
    asks = {
        "oauth": ("-u", "me:secret", "-d", "grant_type=client_credentials", f"https://{OAUTH}/token"),
        "github": (
            "-H",
            f"Authorization: Bearer {signed}",
            "-d",
            "{}",
            f"https://{GITHUB}/app/installations/1/access_tokens",
        ),
        "google": ("-d", f"assertion={signed}", f"https://{GOOGLE}/token"),
        "kubernetes": (
            "-H",
            "Authorization: Bearer me:secret",
            "-d",
            "{}",
            f"https://{KUBERNETES}/api/v1/namespaces/n/serviceaccounts/s/token",
        ),
    }
    for issuer, ask in asks.items():
        lab.guard(target, Guard("header", "authorization", "Bearer ", issuer=issuer))
        answer = json.loads(curl(lab, *ask))
        token = answer.get("access_token") or answer.get("token") or answer["status"]["token"]
        assert open_with(lab, target, token) == "200", issuer
        assert token in lab.issued()
        assert (
            status(lab, *(part.replace(signed, forged).replace("secret", "guess") for part in ask)) == "401"
        )
    lab.expect("oauth", "")
    assert status(lab, *asks["oauth"]) == "503"
    lab.guard(target, None)


def test_a_password_is_good_while_its_user_is_there(lab: Lab) -> None:
    lab.expect("queue", "admin:secret")
    lab.guard("api.lab-origin.com", Guard("header", "authorization", "Bearer ", issuer="queue"))
    user = f"https://{QUEUE}/api/users/one"
    assert (
        status(lab, "-u", "admin:secret", "-X", "PUT", "-d", '{"password": "passing"}', user),
        open_with(lab, "api.lab-origin.com", "passing"),
        status(lab, "-u", "admin:secret", "-X", "DELETE", user),
        open_with(lab, "api.lab-origin.com", "passing"),
    ) == ("204", "200", "204", "401")
    lab.guard("api.lab-origin.com", None)


def test_a_relayed_host_is_a_server_of_the_owners_own(lab: Lab) -> None:
    lab.relay("relayed.lab-origin.com", 9999)
    assert status(lab, "https://relayed.lab-origin.com/") == "502"
    server = lab.popen("world", ["/usr/bin/python3", "-um", "http.server", "-b", "127.0.0.1", "9999"])
    assert server.stdout is not None
    assert server.stdout.readline().startswith("Serving")
    assert curl(lab, "https://relayed.lab-origin.com/").startswith("<!DOCTYPE HTML")
    assert [request.status for request in lab.requests(host="relayed.lab-origin.com")] == [502, 200]
    server.kill()


@pytest.mark.parametrize(
    ("url", "last"),
    [
        ("https://api.anthropic.com/v1/messages", '"message_stop"}'),
        ("https://api.openai.com/v1/chat/completions", "data: [DONE]"),
    ],
)
def test_a_model_streams_its_words(lab: Lab, url: str, last: str) -> None:
    said = curl(lab, "-d", '{"stream": true}', url)
    assert said.rstrip().endswith(last)
    assert [word for word in WORDS if json.dumps(word) in said] == list(WORDS)
    assert "hello" in curl(lab, "-d", "{}", url)


def test_a_company_has_its_own_indexes(lab: Lab) -> None:
    page = curl(lab, "https://pypi.lab-origin.com/simple/lab-greeting/")
    url = page.partition('href="')[2].partition("#")[0]
    assert url.startswith("https://pypi.lab-origin.com/")
    assert int(curl(lab, "-o", "/dev/null", "-w", "%{size_download}", url)) == len(
        PythonIndex().files["lab_greeting-1.0-py3-none-any.whl"]
    )
    assert "https://npm.lab-origin.com/" in curl(lab, "https://npm.lab-origin.com/lab-greeting")
