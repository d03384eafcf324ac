"""The limits of rules, by real clients: told, cut, counted, and not filled again by a death of the worker."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator

import pytest

from egressd.lab import Lab
from egressd.lab.stand import Stand
from tests.e2e.conftest import SHIPPED
from tests.e2e.test_drills import line_of, running, worker_of

pytestmark = pytest.mark.e2e
BOTH_WAYS = True

RULES = """schema: 1
profile: lab
owner: e2e
limits: {download: 3MB/day}
allow:
  - id: few
    hosts: [few.wild.lab-origin.com]
    limits: {requests: 4/day}
  - id: small
    hosts: [api.lab-origin.com]
    requests: ["POST /upload", "GET /big"]
    limits: {upload: 300kB/day}
  - id: pinned
    hosts: [api.anthropic.com]
    treatment: tunnel
    limits: {upload: 300kB/day}
  - id: wide
    hosts: ["*.wild.lab-origin.com"]
    limits: {new_hosts: 2/day}
"""
REFILL = 2_000
"""More bytes than these limits give back while a test runs."""
STATUS = "curl -sS -m 10 -o /dev/null -w '%{http_code}\\n'"


@pytest.fixture
def stand(shared_lab: Lab) -> Iterator[Stand]:
    """An installation whose rules have limits."""
    shared_lab.forget()
    with Stand(shared_lab, RULES, shipped=SHIPPED) as stand:
        yield stand


def sh(text: str) -> list[str]:
    return ["sh", "-c", text]


def test_requests_over_a_limit_are_told_when_to_come_back(stand: Stand) -> None:
    ran = stand.run(
        sh(
            f"for n in 1 2 3 4; do {STATUS} https://few.wild.lab-origin.com/n; done; curl -sS -i https://few.wild.lab-origin.com/n"
        )
    )
    assert ran.stdout.startswith("200\n" * 4 + "HTTP/1.1 429 egressd: denied: "), ran
    fields = ran.stdout.lower()
    assert "x-egressd-reason: rate_limited\n" in fields
    retry_after = int(fields.partition("retry-after: ")[2].partition("\n")[0])
    assert 20_000 < retry_after <= 21_600, "a quarter of a day"
    assert len(stand.lab.requests(host="few.wild.lab-origin.com")) == 4
    (denied,) = [r for r in stand.attempts() if r["reason"] == "rate_limited"]
    assert (denied["layer"], denied["rule"], denied["detail"]) == ("request", "few", "requests of rule few")


def test_a_flood_over_a_limit_is_counted_and_not_lost(stand: Stand) -> None:
    ran = stand.run(sh(f"seq 60 | xargs -P 6 -I N {STATUS} https://few.wild.lab-origin.com/n"))
    assert sorted(ran.stdout.split()) == ["200"] * 4 + ["429"] * 56
    denied = [r for r in stand.attempts() if r["layer"] == "request" and r["reason"] == "rate_limited"]
    assert sum(r.get("count", 1) for r in denied) == 56
    assert len(denied) < 30, "folded"
    assert len(stand.lab.requests(host="few.wild.lab-origin.com")) == 4


def test_an_upload_stops_at_its_last_byte(stand: Stand) -> None:
    put = "head -c 1000000 /dev/zero | curl -sS -m 10 -o /dev/null -w '%{http_code}' -T - -X POST https://api.lab-origin.com/upload"
    ran = stand.run(sh(put))
    assert ran.stdout == "429", ran
    (end,) = stand.records(event="end", layer="request")
    assert end["reason"] == "rate_limited"
    assert 300_000 <= end["bytes_up"] <= 300_000 + REFILL
    assert sum(request.body_bytes for request in stand.lab.requests(path="/upload")) <= 300_000 + REFILL


def test_a_download_stops_at_its_last_byte_whoever_asks(stand: Stand) -> None:
    get = "curl -sS -m 10 -o /dev/null -w '%{http_code} %{size_download}\\n' 'https://api.lab-origin.com/big?bytes=2000000'"
    ran = stand.run(sh(f"{get}; {get}; {STATUS} https://few.wild.lab-origin.com/n"))
    first, second, third = ran.stdout.split("\n")[:3]
    assert first == "200 2000000"
    status, size = second.split()
    assert status == "200"
    assert int(size) < 1_000_000
    assert third == "429", "the profile's limit binds every rule"
    ends = stand.records(event="end", layer="request")
    assert [end["reason"] for end in ends] == ["completed", "rate_limited", "rate_limited"]
    assert sum(end["bytes_down"] for end in ends) <= 3_000_000 + REFILL


def test_a_tunnel_is_cut_at_its_limit(stand: Stand) -> None:
    shutil.copy(stand.lab.ca_file, stand.workspace / "lab.crt")
    put = "head -c 1000000 /dev/zero | curl -sS -m 10 --capath /nonexistent --cacert lab.crt -T - -X POST https://api.anthropic.com/upload"
    ran = stand.run(sh(f"{put}; {put}"))
    assert "rate_limited" not in ran.stdout
    (end,) = stand.records(event="end", layer="connection", host="api.anthropic.com")
    assert end["reason"] == "rate_limited"
    assert end["bytes_up"] <= 300_000 + REFILL
    tunnels = [r for r in stand.attempts() if r["layer"] == "connection"]
    assert [(r["verdict"], r["reason"]) for r in tunnels] == [("allow", "rule"), ("deny", "rate_limited")]


def test_new_hosts_are_counted(stand: Stand) -> None:
    names = ["one", "two", "one", "three", "two"]
    ran = stand.run(sh("; ".join(f"{STATUS} https://{name}.wild.lab-origin.com/n" for name in names)))
    assert ran.stdout.split() == ["200", "200", "200", "429", "200"]
    assert {request.host for request in stand.lab.requests()} == {
        "one.wild.lab-origin.com",
        "two.wild.lab-origin.com",
    }


def test_a_killed_worker_fills_nothing(stand: Stand) -> None:
    ask = f'while read url; do {STATUS} "$url" 2>/dev/null || echo failed; done'
    with running(stand, ask) as process:
        assert process.stdin is not None

        def status(url: str) -> str:
            process.stdin.write(url + "\n")  # type: ignore[union-attr]  # asserted above
            process.stdin.flush()  # type: ignore[union-attr]
            return line_of(process)

        few = "https://few.wild.lab-origin.com/n"
        assert [status(few) for _ in range(3)] == ["200"] * 3
        for answer in ("200", "429", "429"):
            os.kill(worker_of(process.pid), signal.SIGKILL)
            assert status(few) == answer
        assert len(stand.lab.requests(host="few.wild.lab-origin.com")) == 4
