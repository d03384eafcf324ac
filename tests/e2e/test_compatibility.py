"""What users of other egress proxies report as broken, and works here: one test for each complaint, by its number.

Where a complaint is about one client, the client does it; clients that not every machine has are held by docs/clients.md.
"""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from egressd.lab.containers import BLOBS, IMAGE, REGISTRY, TOKENS
from egressd.lab.objects import ACCESS_KEY, BUCKET_HOST, SECRET_KEY
from tests.clients import page
from tests.clients.cache import Cache
from tests.clients.ground import ROOT, Ground

pytestmark = pytest.mark.e2e
API = "https://api.lab-origin.com"
HTTP2 = "https://h2.lab-origin.com"
PYTHON = "/usr/bin/python3"
TRUST = "/run/egressd-trust"
ROWS = page.read((ROOT / "docs/clients.md").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def shared() -> Iterator[Ground]:
    """A lab with the package repositories, as root where we are root."""
    with Ground(Cache()) as ground:
        yield ground


@pytest.fixture
def ground(shared: Ground) -> Ground:
    """The module's, with empty records."""
    shared.lab.forget()
    shared.stand.journal.unlink(missing_ok=True)
    return shared


def inside(ground: Ground, script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """A shell script in a sandbox; `$P` is the folder of programs."""
    programs = f"P={ground.stand.workspace}/programs"
    return ground.stand.run(["sh", "-ec", f"cd $(mktemp -d); {script}"], flags=["--env", programs, *flags])


def python(ground: Ground, source: str) -> str:
    """What a Python program prints in a sandbox."""
    ran = ground.stand.run([PYTHON, "-I", "-c", source])
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def needs(*commands: str) -> pytest.MarkDecorator:
    missing = [command for command in commands if shutil.which(command) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {' '.join(missing)}")


@pytest.mark.parametrize(
    "client",
    [
        pytest.param("Node fetch", id="CMP-01 ignores proxy variables, and needs none"),
        pytest.param("npm", id="CMP-02 has a CA list of its own"),
        pytest.param("pip", id="CMP-03 uses certifi"),
        pytest.param("requests", id="CMP-03 uses certifi too"),
        pytest.param("httpx", id="CMP-04 believes SSL_CERT_FILE alone"),
        pytest.param("uv", id="CMP-06 rustls"),
        pytest.param("cargo", id="CMP-07 sparse index"),
        pytest.param("go", id="CMP-08 module proxy"),
        pytest.param("git", id="CMP-09 GnuTLS"),
        pytest.param("skopeo", id="CMP-12 three hosts"),
        pytest.param("apt (http)", id="CMP-13 pipelining and by-hash"),
        pytest.param("apt (https)", id="CMP-13 the system's store alone"),
        pytest.param("Java HttpClient", id="CMP-14 a trust store of its own"),
        pytest.param("Maven", id="CMP-14 no proxy settings"),
        pytest.param("Chromium", id="CMP-21 NSS"),
        pytest.param("websockets", id="CMP-16 upgrades"),
        pytest.param("grpcio", id="CMP-18 HTTP/2 with trailers"),
        pytest.param("deno", id="CMP-22 a store of its own"),
        pytest.param("boto3", id="CMP-28 signed requests"),
    ],
)
def test_the_client_works(client: str) -> None:
    assert ROWS[client].works


@needs("node")
def test_cmp_01_node_is_caught_without_a_proxy_and_leaves_the_same_records(ground: Ground) -> None:
    ran = inside(ground, f"env | grep -ic _proxy= || true; node $P/fetch.mjs {API}/n")
    assert ran.stdout == "0\n1\n", ran
    layers = [
        record["layer"] for record in ground.stand.attempts() if record.get("host") == "api.lab-origin.com"
    ]
    assert {"dns", "connection", "request"} == set(layers)


def test_cmp_02_a_client_that_does_not_know_our_authority_is_recorded_as_such(ground: Ground) -> None:
    ran = inside(ground, "grep -c BEGIN $NODE_EXTRA_CA_CERTS")
    assert ran.stdout == "1\n", "what adds to a store needs ours alone"
    shutil.copy(ground.lab.ca_file, ground.stand.workspace / "other.crt")
    ran = inside(ground, f"curl -sS --capath /none --cacert {ground.stand.workspace}/other.crt {API}/n")
    assert ran.returncode == 60, ran
    assert "client_rejected_ca" in {record.get("reason") for record in ground.stand.records()}
    assert ground.lab.requests() == []


def test_cmp_03_variables_that_replace_a_store_name_one_with_the_systems_in_it(ground: Ground) -> None:
    names = (
        "REQUESTS_CA_BUNDLE",
        "PIP_CERT",
        "SSL_CERT_FILE",
        "CURL_CA_BUNDLE",
        "GIT_SSL_CAINFO",
        "AWS_CA_BUNDLE",
    )
    ran = inside(
        ground,
        f"grep -c BEGIN {TRUST}/bundle.crt; grep -c BEGIN /etc/ssl/certs/ca-certificates.crt; printenv {' '.join(names)}",
    )
    count, system, *values = ran.stdout.split()
    assert count == system
    assert int(count) > 1
    assert values == [f"{TRUST}/bundle.crt"] * len(names)


def test_cmp_04_no_proxy_is_set_so_none_can_be_misread(ground: Ground) -> None:
    assert inside(ground, "env | cut -d= -f1 | grep -i proxy || true").stdout == ""


def test_cmp_05_the_strictest_python_believes_us(ground: Ground) -> None:
    source = f"""
import ssl, urllib.request
context = ssl.create_default_context()
context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
print(urllib.request.urlopen("{API}/n", context=context, timeout=10).read())
"""
    assert python(ground, source) == "b'1'\n"


def test_cmp_07_http_2_is_spoken_where_both_ends_speak_it_and_nowhere_else(ground: Ground) -> None:
    show = "curl -sS -o /dev/null -w '%{http_version} %{http_code} %{size_download} %{size_upload}\\n'"
    script = (
        f"head -c 2000000 /dev/zero > up; {show} {HTTP2}/n; {show} --http1.1 {HTTP2}/n; {show} '{HTTP2}/big?bytes=3000000';"
        f" {show} --data-binary @up {HTTP2}/upload; {show} {API}/n"
    )
    shown = [line.split() for line in inside(ground, script).stdout.splitlines()]
    assert [line[0] for line in shown] == ["2", "1.1", "2", "2", "1.1"], shown
    assert {line[1] for line in shown} == {"200"}
    assert (shown[2][2], shown[3][3]) == ("3000000", "2000000")


@needs("node")
def test_cmp_07_streams_share_a_connection_and_one_refusal_spares_the_others(ground: Ground) -> None:
    source = f"""
const link = require("http2").connect("{HTTP2}"); let left = 6;
for (const path of ["/n", "/n", "/big?bytes=100000", "/n", "/trailers", "/upload"]) {{
  const stream = link.request({{":path": path, ":method": path == "/trailers" ? "POST" : "GET"}}); let status, size = 0;
  stream.on("response", head => status = head[":status"]); stream.on("data", data => size += data.length); stream.end();
  stream.on("close", () => {{ console.log(path, status, size > 99999); if (!--left) link.close(); }});
}}
"""
    ran = ground.stand.run(["node", "-e", source])
    assert sorted(ran.stdout.splitlines()) == [
        "/big?bytes=100000 200 true",
        "/n 200 false",
        "/n 200 false",
        "/n 200 false",
        "/trailers 403 false",
        "/upload 200 false",
    ], ran
    connections = [r for r in ground.stand.attempts() if r["layer"] == "connection"]
    assert len(connections) == 1


def test_cmp_09_git_clones_shallow_and_whole_and_fetches(ground: Ground) -> None:
    script = (
        "git clone -q --depth 1 https://github.com/acme/tools a; git clone -q https://github.com/acme/tools.git b;"
        " git -C b fetch -q; ls a b"
    )
    ran = inside(ground, script)
    assert ran.stdout.split() == ["a:", "README.md", "tool.sh", "b:", "README.md", "tool.sh"], ran


def test_cmp_10_a_post_after_the_origin_has_closed_gets_its_answer(ground: Ground) -> None:
    """The client's connection stays; the origin's is gone and said nothing."""
    pair = f"-sS -d x {API}/closeafter --next -sS -d y {API}/echo"
    ran = inside(ground, f"curl {pair} --next {pair}")
    assert ran.returncode == 0, ran
    assert [request.path for request in ground.lab.requests()] == ["/closeafter", "/echo"] * 2, (
        "nothing was sent twice"
    )


@needs("npm")
def test_cmp_11_npm_asks_for_its_audit_by_post(ground: Ground) -> None:
    inside(ground, "npm install --audit lab-greeting", "--env", "NPM_CONFIG_USERCONFIG=/dev/null")
    asked = [(r.method, r.path) for r in ground.lab.requests(host="registry.npmjs.org")]
    assert ("POST", "/-/npm/v1/security/advisories/bulk") in asked


def test_cmp_12_a_blob_comes_whole_and_in_part_from_the_third_host(ground: Ground) -> None:
    script = f"""
token=$(curl -sS "https://{TOKENS}/token" | sed 's/.*"token": "\\([^"]*\\)".*/\\1/')
curl -sS -H "Authorization: Bearer $token" https://{REGISTRY}/v2/{IMAGE}/manifests/latest > manifest
digest=$(sed 's/.*"digest": "\\(sha256:[0-9a-f]*\\)"}}]}}/\\1/' manifest)
for range in 0-9 0-; do
  curl -sSL -r $range -o blob -w '%{{http_code}} %header{{content-length}} %{{num_redirects}}\\n' \\
    -H "Authorization: Bearer $token" https://{REGISTRY}/v2/{IMAGE}/blobs/$digest
done
sha256sum blob; echo $digest
"""
    first, whole, summed, digest = inside(ground, script).stdout.splitlines()
    assert first == "206 10 1"
    assert whole.startswith("206 ")
    assert digest == "sha256:" + summed.split()[0]
    assert ground.lab.requests(host=BLOBS)[-1].header("authorization") is None, "curl's own habit, kept"


def test_cmp_13_pipelined_requests_are_answered_in_order(ground: Ground) -> None:
    source = """
import socket
with socket.create_connection(("deb.debian.org", 80), 10) as link:
    names = ["Release", "main/binary-amd64/Packages", "none", "Release"]
    link.sendall("".join(f"GET /debian/dists/stable/{n} HTTP/1.1\\r\\nHost: deb.debian.org\\r\\n\\r\\n" for n in names).encode())
    reader = link.makefile("rb")
    for _ in names:
        status, length = reader.readline().split()[1].decode(), 0
        while (line := reader.readline().strip().lower()):
            length = int(line.split(b":")[1]) if line.startswith(b"content-length") else length
        print(status, reader.read(length)[:8])
"""
    assert python(ground, source).splitlines() == [
        "200 b'Origin: '",
        "200 b'Package:'",
        "404 b'no such '",
        "200 b'Origin: '",
    ]


def test_cmp_15_and_17_events_arrive_when_they_are_sent(ground: Ground) -> None:
    source = f"""
import time, urllib.request
answer = urllib.request.urlopen("{API}/sse?events=3&gap=0.6", timeout=10)
begin, times = time.monotonic(), []
while line := answer.readline():
    if line.strip():
        times.append(time.monotonic() - begin)
print(*times)
"""
    first, second, third = map(float, python(ground, source).split())
    assert first < 0.4
    assert second - first > 0.3
    assert third - second > 0.3


def test_cmp_15_denied_telemetry_fails_at_once(ground: Ground) -> None:
    ran = inside(
        ground,
        "curl -sS -m 5 -w '%{http_code} %{time_total}' -o /dev/null -d {} https://statsig.evil-lab.com/v1/rgstr",
    )
    code, seconds = ran.stdout.split()
    assert code == "403"
    assert float(seconds) < 1


def test_cmp_16_a_denied_websocket_fails_at_its_handshake(ground: Ground) -> None:
    upgrade = (
        "curl -sS -m 5 --http1.1 -w '\\n%{http_code}' -H 'Connection: Upgrade' -H 'Upgrade: websocket'"
        " -H 'Sec-WebSocket-Version: 13' -H 'Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=='"
    )
    ran = inside(ground, f"{upgrade} {API}/echo; {upgrade} https://evil-lab.com/ws")
    assert ran.returncode == 0, ran
    assert ran.stdout.count("\n403") == 2, ran
    assert ground.lab.requests() == []


def test_cmp_19_a_hello_in_two_segments_is_one_hello(ground: Ground) -> None:
    source = """
import socket, ssl, time
ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
context = ssl.create_default_context()
tls = context.wrap_bio(theirs, ours, server_hostname="api.lab-origin.com")
with socket.create_connection(("api.lab-origin.com", 443), 10) as link:
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            hello = ours.read()
            link.sendall(hello[:100])
            time.sleep(0.3)
            link.sendall(hello[100:])
            theirs.write(link.recv(65536))
    print(tls.version())
"""
    assert python(ground, source).startswith("TLSv1.")


@pytest.mark.soak
def test_cmp_20_a_quiet_stream_is_not_cut(ground: Ground) -> None:
    ran = ground.stand.run(["curl", "-sS", "-m", "100", f"{API}/slow?seconds=75"], timeout=120)
    assert ran.stdout == "at last\n", ran


def test_cmp_23_leaves_hold_for_clocks_that_are_wrong_and_not_for_long(ground: Ground) -> None:
    script = (
        "openssl s_client -connect api.lab-origin.com:443 -servername api.lab-origin.com </dev/null 2>/dev/null"
        " | openssl x509 -noout -startdate -enddate"
    )
    dates = [line.partition("=")[2] for line in inside(ground, script).stdout.splitlines()]
    begin, end = (
        datetime.datetime.strptime(d, "%b %d %H:%M:%S %Y %Z").replace(tzinfo=datetime.UTC) for d in dates
    )
    now = datetime.datetime.now(datetime.UTC)
    assert now - begin > datetime.timedelta(hours=24)
    assert end > now
    assert end - begin < datetime.timedelta(days=398)


def test_cmp_24_a_denied_name_is_answered_at_once_in_every_way(ground: Ground) -> None:
    ask = "dig +noall +comments +answer +stats +tries=1 +time=3"
    script = "; ".join(f"{ask} {how} evil-lab.com" for how in ("A", "AAAA", "+tcp A", "HTTPS"))
    out = inside(ground, script).stdout
    assert out.count("status: NOERROR") == 4, out
    assert out.count("198.18.0.2") == 2, out
    assert "AAAA\t" not in out
    waits = [int(line.split()[3]) for line in out.splitlines() if line.startswith(";; Query time")]
    assert len(waits) == 4
    assert max(waits) < 500
    assert ground.lab.dns_queries() == []


@pytest.mark.parametrize(
    ("host", "port"), [("evil-lab.com", 25), ("evil-lab.com", 5432), ("api.lab-origin.com", 110)]
)
def test_cmp_24_nor_does_anybody_wait_for_a_server_to_speak_first(
    ground: Ground, host: str, port: int
) -> None:
    source = f"""
import socket, time
begin = time.monotonic()
with socket.create_connection(("{host}", {port}), 20) as link:
    try:
        print(link.recv(100))
    except ConnectionResetError:
        print("reset", time.monotonic() - begin < 4)
"""
    assert python(ground, source) == "reset True\n"


def test_cmp_25_a_refusal_is_ours_alone_and_has_one_shape(ground: Ground) -> None:
    script = (
        "curl -sS -D head -H 'Accept: application/json' https://evil-lab.com/; echo; grep -ci '^x-egressd-' head;"
        f" for code in 401 403; do curl -sS -D head {API}/status/$code; head -1 head; grep -ci x-egressd head || true; done"
    )
    answer, fields, *upstream = (
        inside(ground, script).stdout.replace("\r", "").replace("\n\n", "\n").splitlines()
    )
    body = json.loads(answer)
    assert {"error": "denied", "reason": "not_allowed", "host": "evil-lab.com"}.items() <= body.items()
    assert fields == "2"
    assert upstream == [
        "status 401",
        "HTTP/1.1 401 Unauthorized",
        "0",
        "status 403",
        "HTTP/1.1 403 Forbidden",
        "0",
    ]


@pytest.mark.parametrize("size", [1, 3_000_000])
@pytest.mark.parametrize("version", ["http1.1", "http2"])
def test_cmp_25_a_refusal_is_read_by_who_is_still_sending(ground: Ground, version: str, size: int) -> None:
    """curl 7.88 shows no answer whose HTTP/2 stream was reset while it was sending."""
    post = f"curl -sS -m 10 --{version} --data-binary @up {HTTP2}/elsewhere"
    ran = inside(ground, f"head -c {size} /dev/zero > up; for n in 1 2 3 4; do {post}; done")
    assert ran.stdout.count("(reason method_not_allowed)") == 4, ran
    assert ground.lab.requests() == []


@needs("ssh")
@pytest.mark.parametrize(
    ("remote", "reason"),
    [
        pytest.param(
            "git@github.com:acme/tools", "github.com:22 (reason port_not_allowed)", id="a known host"
        ),
        pytest.param("git@gitlab.evil-lab.com:acme/tools", "(reason not_allowed)", id="another host"),
        pytest.param(
            "ssh://git@github.com:443/acme/tools",
            "github.com:443 (reason unknown_protocol)",
            id="by the port of https",
        ),
    ],
)
def test_cmp_25_git_over_ssh_is_told_why_too(ground: Ground, remote: str, reason: str) -> None:
    ran = inside(ground, f"git clone {remote}", "--env", "GIT_SSH_COMMAND=ssh -F /dev/null -o BatchMode=yes")
    assert ran.returncode == 128
    assert "egressd: denied: " in ran.stderr, ran
    assert reason in ran.stderr, ran


@pytest.mark.parametrize("name", ["https_proxy", "HTTPS_PROXY", "all_proxy"])
def test_cmp_26_and_27_a_proxy_variable_works_in_either_case_and_is_not_challenged(
    ground: Ground, name: str
) -> None:
    ran = inside(ground, f"curl -sSv {API}/n", "--env", f"{name}=http://127.0.0.1:3128")
    assert ran.stdout == "1", ran
    assert "Connection established" in ran.stderr or "200" in ran.stderr
    assert "407" not in ran.stderr


def test_cmp_28_a_signed_request_arrives_as_it_was_signed(ground: Ground) -> None:
    """Large enough that curl waits to be invited to send it; nobody signs that `Expect`, which is between neighbours."""
    sign = f"curl -sS --aws-sigv4 aws:amz:eu-central-1:s3 --user {ACCESS_KEY}:{SECRET_KEY}"
    url = f"https://{BUCKET_HOST}/folder/object.bin"
    script = (
        "head -c 1500000 /dev/zero | tr '\\0' x > object;"
        f" {sign} -X PUT -H 'x-amz-meta-note: kept' --data-binary @object {url};"
        f" {sign} {url} | cmp - object && echo same"
    )
    ran = inside(ground, script)
    assert ran.stdout == "same\n", ran


def test_cmp_29_framing_is_relayed_as_received(ground: Ground) -> None:
    script = f"""
show() {{
  curl -sS -m 5 -D head -o body "$@"
  tr -d '\\r' < head | grep -Ei '^(HTTP|content-length|transfer-encoding)' | tr '\\n' ' '; wc -c < body
}}
show -I {API}/cl; show {API}/cl; show {API}/204; show {API}/304; show -0 {API}/cl; show {API}/chunked
curl -sS --compressed {API}/headers | grep -c '"accept-encoding", "deflate, gzip'
"""
    output = inside(ground, script).stdout
    head, whole, empty, unchanged, old, chunked, encoding = output.splitlines()
    assert head.lower().split()[:2] == ["http/1.1", "200"]
    assert "content-length: 100" in head.lower()
    assert whole.lower().endswith("content-length: 100 100")
    assert (empty.split()[1], unchanged.split()[1]) == ("204", "304")
    assert "content-length: 100" in old.lower()
    assert "transfer-encoding: chunked" in chunked.lower()
    assert chunked.endswith(" 11")
    assert encoding == "1"


def test_cmp_30_a_pinned_client_needs_a_tunnel_and_nothing_is_learnt(ground: Ground) -> None:
    shutil.copy(ground.lab.ca_file, ground.stand.workspace / "pinned.crt")
    get = f"curl -sS --capath /none --cacert {ground.stand.workspace}/pinned.crt"
    ran = inside(
        ground, f"{get} https://pinned.lab-origin.com/n; {get} {API}/n || {get} {API}/n || echo refused"
    )
    assert ran.stdout == "1refused\n", ran
    reasons = [
        record.get("reason")
        for record in ground.stand.records()
        if record.get("host") == "api.lab-origin.com"
    ]
    assert reasons.count("client_rejected_ca") == 2
