"""The lab's HTTP/2 origin, spoken to by curl from where nothing stands between."""

from __future__ import annotations

import hashlib
import json

import pytest

from egressd.lab import Lab

pytestmark = pytest.mark.e2e


def curl(lab: Lab, *arguments: str) -> str:
    done = lab.open_exec(["curl", "-sS", "--max-time", "15", *arguments], timeout=20)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("host", "flag", "version"),
    [("h2", "--http2", "2"), ("h2", "--http1.1", "1.1"), ("grpc", "--http2", "2"), ("api", "--http2", "1.1")],
)
def test_what_a_name_agrees_to(lab: Lab, host: str, flag: str, version: str) -> None:
    said = curl(lab, flag, "-w", "\n%{http_version}", f"https://{host}.lab-origin.com/echo?a=b")
    answer, _, spoken = said.rpartition("\n")
    assert spoken == version
    assert json.loads(answer)["target"] == "/echo?a=b"
    assert lab.requests(path="/echo")[0].sni == f"{host}.lab-origin.com"


def test_bodies_go_both_ways(lab: Lab) -> None:
    data = "x" * 100_000
    answer = json.loads(curl(lab, "--http2", "-d", data, "https://h2.lab-origin.com/echo"))
    assert (answer["n"], answer["sha256"]) == (100_000, hashlib.sha256(data.encode()).hexdigest())
    said = curl(
        lab,
        "--http2",
        "-o",
        "/dev/null",
        "-w",
        "%{size_download}",
        "https://h2.lab-origin.com/big?bytes=3000000",
    )
    assert said == "3000000"
    assert lab.requests(path="/big")[0].sent == 3_000_000


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/n", "200", "1"),
        ("/sse?events=2&gap=0", "200", "data: 0\n\ndata: 1\n\n"),
        ("/103", "200", "final"),
        ("/trailers", "200", "hello"),
        ("/slow?seconds=0.1", "200", "at last\n"),
        ("/drain", "200", "the last of this connection\n"),
    ],
)
def test_a_path_is_answered(lab: Lab, path: str, status: str, body: str) -> None:
    assert curl(lab, "--http2", "-w", "%{http_code}", f"https://h2.lab-origin.com{path}") == body + status


def test_streams_of_one_connection_are_answered_side_by_side(lab: Lab) -> None:
    urls = [f"https://h2.lab-origin.com/slow?seconds=0.5&n={number}" for number in range(10)]
    said = curl(lab, "--http2", "--parallel", "--parallel-max", "10", "-w", "%{time_total} ", *urls)
    assert said.count("at last") == 10
    assert len({seen.peer for seen in lab.requests(path="/slow")}) == 1
