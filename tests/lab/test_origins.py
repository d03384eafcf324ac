"""Real clients against the lab's origins, from where nothing stands between."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from pathlib import Path

import pytest

from egressd.lab import Lab

pytestmark = pytest.mark.e2e


def curl(lab: Lab, *arguments: str, timeout: float = 20.0) -> str:
    done = lab.open_exec(["curl", "-sS", "--max-time", "15", *arguments], timeout=timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_pip_installs_wheels_and_builds_a_source_package(lab: Lab) -> None:
    target = f"{lab.home}/site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", target]
    done = lab.open_exec(
        [*install, "--index-url", "https://pypi.org/simple/", "lab-hello", "lab-farewell"], timeout=60
    )
    assert done.returncode == 0, done.stderr
    script = f"import sys; sys.path.insert(0, {target!r}); import lab_hello, lab_farewell; print(lab_hello.MESSAGE)"
    assert lab.open_exec([sys.executable, "-I", "-c", script]).stdout == "hello, sandbox\n"
    assert {seen.path for seen in lab.requests(host="pypi.org")} == {
        "/simple/lab-hello/",
        "/simple/lab-greeting/",
        "/simple/lab-farewell/",
    }
    assert len(lab.requests(host="files.pythonhosted.org")) >= 3


def test_git_clones_and_pushes(lab: Lab) -> None:
    clone = f"{lab.home}/clone"
    shutil.rmtree(clone, ignore_errors=True)
    done = lab.open_exec(["git", "clone", "-q", "https://github.com/acme/tools", clone])
    assert done.returncode == 0, done.stderr
    assert Path(clone, "README.md").read_text() == "# tools of acme\n"
    push = ["git", "-C", clone, "push", "-q", "https://github.com/acme/tools.git", "HEAD:refs/heads/mine"]
    assert lab.open_exec(push).returncode == 0
    services = [(seen.method, seen.path) for seen in lab.requests(host="github.com")]
    assert ("POST", "/acme/tools/git-upload-pack") in services
    assert ("POST", "/acme/tools.git/git-receive-pack") in services


def test_a_private_repository_asks_for_a_login_of_its_own(lab: Lab) -> None:
    done = lab.open_exec(["git", "clone", "-q", "https://github.com/other/private", f"{lab.home}/none"])
    assert done.returncode == 128
    assert lab.requests(host="github.com")[0].status == 401


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_npm_installs_a_package(lab: Lab) -> None:
    project = f"{lab.home}/project"
    shutil.rmtree(project, ignore_errors=True)
    Path(project).mkdir()
    done = lab.open_exec(
        [str(shutil.which("npm")), "install", "--no-audit", "--no-fund", "lab-greeting"],
        cwd=project,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert Path(project, "node_modules/lab-greeting/index.js").exists()


def test_a_debian_mirror_answers_in_plain_http(lab: Lab) -> None:
    assert "Codename: bookworm" in curl(lab, "http://deb.debian.org/debian/dists/bookworm/InRelease")
    assert not lab.requests(host="deb.debian.org")[0].tls


def test_what_was_received_is_recorded(lab: Lab) -> None:
    body = "x" * 100_000
    arguments = [
        "-H",
        "X-One: 1",
        "-H",
        "x-one: 2",
        "--data-binary",
        "@-",
        "https://api.anthropic.com/v1/messages?a=b",
    ]
    done = lab.open_exec(["curl", "-sS", *arguments], input=body)
    assert json.loads(done.stdout)["input_bytes"] == 100_000
    (seen,) = lab.requests(host="api.anthropic.com")
    assert (seen.method, seen.path, seen.target) == ("POST", "/v1/messages", "/v1/messages?a=b")
    assert (seen.address, seen.port, seen.tls, seen.sni) == ("11.0.0.14", 443, True, "api.anthropic.com")
    assert seen.body_sha256 == hashlib.sha256(body.encode()).hexdigest()
    assert [value for name, value in seen.headers if name == "x-one"] == ["1", "2"]
    assert seen.peer.startswith("11.0.0.3:")
    assert (seen.status, seen.aborted) == (200, False)


def test_a_host_that_differs_from_its_sni_shows_in_the_record(lab: Lab) -> None:
    curl(lab, "-H", "Host: evil.tenant.com", "https://pypi.org/n")
    (seen,) = lab.requests()
    assert (seen.host, seen.sni, seen.address) == ("evil.tenant.com", "pypi.org", "11.0.0.11")


def test_large_bodies_go_both_ways(lab: Lab) -> None:
    size = 20_000_000
    output = curl(
        lab, "-o", "/dev/null", "-w", "%{size_download}", f"https://api.lab-origin.com/big?bytes={size}"
    )
    assert output == str(size)
    upload = f"head -c {size} /dev/zero | curl -sS -T - https://api.lab-origin.com/upload"
    answer = json.loads(lab.open_exec(["sh", "-c", upload]).stdout)
    assert answer == {"n": size, "sha256": hashlib.sha256(bytes(size)).hexdigest()}
    assert lab.requests(path="/big")[0].sent == size


def test_a_download_that_the_client_leaves_is_recorded_as_aborted(lab: Lab) -> None:
    lab.open_exec(
        ["sh", "-c", "curl -sS https://api.lab-origin.com/big 2>/dev/null | head -c 1000 >/dev/null"]
    )
    deadline = time.monotonic() + 20
    while not (seen := lab.requests(path="/big")[0]).aborted:  # the server hears of it at its next write
        assert time.monotonic() < deadline, seen
        time.sleep(0.05)
    sent = json.loads(curl(lab, "https://api.lab-origin.com/aborted"))
    assert sent == seen.sent
    assert 1000 <= sent < 200_000_000


ANSWERS = [
    ("/status/418", "418"),
    ("/204", "204"),
    ("/304", "304"),
    ("/redirect", "302"),
    ("/raw?hex=485454502f312e3120323939200d0a0d0a", "299"),
    ("/early", "413"),
    ("/v1/models", "200"),
    ("/slow?seconds=0.1", "200"),
    ("/103", "200"),
]


@pytest.mark.parametrize(("path", "status"), ANSWERS)
def test_an_answer_has_the_status_its_path_names(lab: Lab, path: str, status: str) -> None:
    url = f"https://api.lab-origin.com{path}"
    assert curl(lab, "-o", "/dev/null", "-w", "%{http_code}", "-d", "x", url) == status


BODIES = [
    ("/chunked", "hello world"),
    ("/nolen", "abcdef"),
    ("/trailers", "hello"),
    ("/closeafter", "bye"),
    ("/id7", "/id7"),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_body_survives_its_framing(lab: Lab, path: str, body: str) -> None:
    assert curl(lab, f"https://api.lab-origin.com{path}") == body


def test_events_come_one_by_one(lab: Lab) -> None:
    url = "https://api.lab-origin.com/sse?events=4&gap=0.1"
    *events, first, whole = curl(lab, "-N", "-w", "%{time_starttransfer}\n%{time_total}\n", url).split()
    assert events == ["data:", "0", "data:", "1", "data:", "2", "data:", "3"]
    assert float(whole) - float(first) >= 0.25


def test_a_cut_body_is_an_error_to_the_client(lab: Lab) -> None:
    done = lab.open_exec(["curl", "-sS", "https://api.lab-origin.com/cut"])
    assert done.returncode in {18, 35, 56}
    assert done.stdout == "y" * 500


def test_a_connection_is_kept_and_counted(lab: Lab) -> None:
    url = "https://api.lab-origin.com/n"
    assert curl(lab, url, url, url) == "123"


def test_a_request_is_awaited_where_the_client_expects_so(lab: Lab) -> None:
    arguments = ["-H", "Expect: 100-continue", "-d", "abc", "-v", "https://api.lab-origin.com/upload"]
    done = lab.open_exec(["curl", "-sS", *arguments])
    assert "< HTTP/1.1 100 Continue" in done.stderr
    assert json.loads(done.stdout)["n"] == 3


def test_requests_that_are_none_get_400(lab: Lab) -> None:
    script = "printf 'NONSENSE\\r\\n\\r\\n' | timeout 5 curl -sS telnet://api.lab-origin.com:80"
    assert lab.open_exec(["sh", "-c", script]).stdout.startswith("HTTP/1.1 400 ")


WEBSOCKET = """
import os, socket, ssl
raw = socket.create_connection(("api.lab-origin.com", 443), 5)
tls = ssl.create_default_context().wrap_socket(raw, server_hostname="api.lab-origin.com")
key = "dGhlIHNhbXBsZSBub25jZQ=="
lines = ["GET /ws HTTP/1.1", "Host: api.lab-origin.com", "Upgrade: websocket", "Connection: Upgrade"]
tls.sendall("\\r\\n".join([*lines, "Sec-WebSocket-Key: " + key, "", ""]).encode())
head = b""
while b"\\r\\n\\r\\n" not in head: head += tls.recv(1)
assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head, head  # the example of RFC 6455
tls.sendall(bytes([0x81, 0x82, 1, 2, 3, 4]) + bytes([ord("h") ^ 1, ord("i") ^ 2]))
assert tls.recv(4) == b"\\x81\\x02hi"
print("echoed")
"""


def test_a_websocket_echoes(lab: Lab) -> None:
    done = lab.open_exec([sys.executable, "-I", "-c", WEBSOCKET])
    assert done.stdout == "echoed\n", done.stderr


@pytest.mark.parametrize("kind", ["expired", "self-signed", "wrong-name", "not-yet-valid"])
def test_a_bad_certificate_is_refused_by_a_verifying_client(lab: Lab, kind: str) -> None:
    assert lab.open_exec(["curl", "-sS", f"https://{kind}.lab-origin.com/"]).returncode == 60
    assert lab.requests() == []
    assert curl(lab, "-k", f"https://{kind}.lab-origin.com/n") == "1"


def test_a_certificate_may_change(lab: Lab) -> None:
    url = "https://changing.wild.lab-origin.com/n"
    assert curl(lab, url) == "1"
    lab.set_certificate("changing.wild.lab-origin.com", "expired")
    assert lab.open_exec(["curl", "-sS", url]).returncode == 60


def test_the_labs_root_and_leaves_pass_the_strictest_check(lab: Lab) -> None:
    script = f"openssl s_client -connect pypi.org:443 -x509_strict -verify_return_error -CAfile {lab.ca_file} </dev/null"
    done = lab.open_exec(["sh", "-c", script])
    assert "Verification: OK" in done.stdout, done.stdout + done.stderr


METADATA = [
    "http://169.254.169.254/latest/meta-data/iam/security-credentials/lab-role",
    "http://[fd00:ec2::254]/latest/meta-data/iam/security-credentials/lab-role",
    "http://168.63.129.16/machine?comp=goalstate",
    "http://100.100.100.200/latest/meta-data/",
    "http://metadata.lab-origin.com/computeMetadata/v1/",
]


@pytest.mark.parametrize("url", METADATA)
def test_a_metadata_endpoint_hands_out_credentials_and_writes_it_down(lab: Lab, url: str) -> None:
    assert curl(lab, url)
    (seen,) = lab.metadata_hits()
    assert (seen.method, seen.status) == ("GET", 200)
    assert lab.requests() == []


def test_other_ports_and_address_literals_work_without_egressd(lab: Lab) -> None:
    assert curl(lab, "https://pypi.org:8443/n")
    assert curl(lab, "http://pypi.org:8080/n")
    assert curl(lab, "https://11.0.0.14/n") == "1"
    banner = lab.open_exec(["sh", "-c", "echo | timeout 5 curl -sS telnet://github.com:22"]).stdout
    assert banner.startswith("SSH-2.0-lab")


def test_ipv6_is_a_way_out_without_egressd(lab: Lab) -> None:
    assert curl(lab, "-6", "https://v6only.lab-origin.com/n") == "1"
    assert lab.requests()[0].address == "2600:11::20"


def test_dead_addresses_are_dead_in_two_ways(lab: Lab) -> None:
    refused = lab.open_exec(["curl", "-sS", "--max-time", "2", "http://refused.lab-origin.com/"])
    lost = lab.open_exec(["curl", "-sS", "--max-time", "0.5", "http://blackhole.lab-origin.com/"])
    assert (refused.returncode, lost.returncode) == (7, 28)
