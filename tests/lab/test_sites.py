"""The lab's sites made of files, its container registry and its object store, from where nothing stands between."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from egressd.lab import Lab, topology
from egressd.lab.containers import BLOBS, IMAGE, REGISTRY, TOKENS
from egressd.lab.objects import ACCESS_KEY, BUCKET_HOST, SECRET_KEY

pytestmark = pytest.mark.e2e
SIGN = ("--aws-sigv4", "aws:amz:eu-central-1:s3", "--user", f"{ACCESS_KEY}:{SECRET_KEY}")


def curl(lab: Lab, *arguments: str) -> str:
    done = lab.open_exec(["curl", "-sS", "--max-time", "15", *arguments])
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(lab: Lab, *arguments: str) -> str:
    return curl(lab, "-o", "/dev/null", "-w", "%{http_code}", *arguments)


@pytest.fixture
def files(lab: Lab) -> str:
    """A site made of one file, with another beside its folder."""
    folder = Path(lab.directory) / "files"
    (folder / "a").mkdir(parents=True, exist_ok=True)
    (folder / "a/b.txt").write_bytes(b"0123456789")
    (folder.parent / "outside.txt").write_bytes(b"not of the site")
    lab.serve_folder("files.lab-origin.com", folder)
    return "https://files.lab-origin.com"


@pytest.mark.parametrize(
    ("options", "path", "wanted"),
    [
        pytest.param((), "a/b.txt", "0123456789 200", id="a file"),
        pytest.param(("-r", "2-4"), "a/b.txt", "234 206", id="a range"),
        pytest.param(("-r", "8-"), "a/b.txt", "89 206", id="a range to the end"),
        pytest.param(("-r", "10-"), "a/b.txt", " 416", id="a range past the end"),
        pytest.param(("-I", "-o", "/dev/null"), "a/b.txt", " 200", id="HEAD"),
        pytest.param(("-o", "/dev/null"), "a", " 404", id="a folder"),
        pytest.param(("-o", "/dev/null", "--path-as-is"), "../outside.txt", " 404", id="beside the folder"),
    ],
)
def test_a_folder_is_a_site(lab: Lab, files: str, options: tuple[str, ...], path: str, wanted: str) -> None:
    assert curl(lab, "-w", " %{http_code}", *options, f"{files}/{path}") == wanted


def test_an_image_is_pulled_by_way_of_three_hosts(lab: Lab) -> None:
    for host in (REGISTRY, TOKENS, BLOBS):
        lab.set_name(host, a=[topology.API])
    base = f"https://{REGISTRY}/v2/{IMAGE}"
    assert f'realm="https://{TOKENS}/token"' in curl(lab, "-I", f"{base}/manifests/latest")
    token = json.loads(curl(lab, f"https://{TOKENS}/token?service=registry.docker.io"))["token"]
    bearer = ("-H", f"Authorization: Bearer {token}")
    manifest = json.loads(curl(lab, *bearer, f"{base}/manifests/latest"))
    digest = manifest["layers"][0]["digest"]
    assert status(lab, *bearer, f"{base}/blobs/{digest}") == "307"
    blob = lab.home + "/blob"
    curl(lab, "-L", "-o", blob, *bearer, f"{base}/blobs/{digest}")
    assert digest == "sha256:" + hashlib.sha256(Path(blob).read_bytes()).hexdigest()
    assert manifest["layers"][0]["size"] == Path(blob).stat().st_size
    assert status(lab, *bearer, f"{base}/manifests/another") == "404"


def test_an_object_store_takes_what_is_signed_and_nothing_that_was_touched(lab: Lab) -> None:
    lab.set_name(BUCKET_HOST, a=[topology.API])
    url = f"https://{BUCKET_HOST}/a%20folder/report.txt"
    assert status(lab, *SIGN, "-X", "PUT", "-d", "hello", url) == "200"
    assert curl(lab, *SIGN, url) == "hello"
    assert status(lab, url) == "403"
    assert "InvalidAccessKeyId" in curl(lab, *SIGN[:2], "--user", "AKIAOTHER:x", url)
    assert "SignatureDoesNotMatch" in curl(lab, *SIGN[:2], "--user", f"{ACCESS_KEY}:wrong", url)
    assert status(lab, *SIGN, "-X", "DELETE", url) == "204"
    assert "NoSuchKey" in curl(lab, *SIGN, url)


def test_a_certificate_can_be_had_for_a_server_of_ones_own(lab: Lab) -> None:
    pem = Path(lab.directory) / "own.pem"
    pem.write_text(lab.issue("own.lab-origin.com"))
    checked = lab.open_exec(
        ["openssl", "verify", "-CAfile", lab.ca_file, "-verify_hostname", "own.lab-origin.com", str(pem)]
    )
    assert checked.stdout == f"{pem}: OK\n", checked.stderr


def test_an_upload_by_http_2_larger_than_a_window_ends(lab: Lab) -> None:
    Path(lab.home, "upload").write_bytes(b"x" * 3_000_000)
    for _ in range(3):
        answer = json.loads(
            curl(lab, "--data-binary", f"@{lab.home}/upload", "https://h2.lab-origin.com/upload")
        )
        assert (answer["n"], answer["http"]) == (3_000_000, 2)
