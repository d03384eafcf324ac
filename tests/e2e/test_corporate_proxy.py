"""Everything goes out through the operator's own proxy: to the checked address, or to the name, and never past it."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from egressd.lab import Lab, topology
from egressd.lab.stand import Stand
from tests.e2e.conftest import until

pytestmark = pytest.mark.e2e

PROXY = Path(__file__).parent / "programs" / "corporate_proxy.py"
ADDRESS, PORT = topology.GATEWAY[0], 3129
SECRET = "ann:pr0xy-s3cret"
API = "https://api.lab-origin.com/n"


@contextlib.contextmanager
def proxy(lab: Lab, secret: str = "") -> Iterator[list[str]]:
    """A proxy in the world; what it was asked for is what it yields, once it is over."""
    asked: list[str] = []
    argv = [sys.executable, "-P", str(PROXY), ADDRESS, str(PORT), *([secret] if secret else [])]
    process = lab.popen("world", argv)
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    try:
        yield asked
    finally:
        process.kill()
        asked += process.stdout.read().split("\n")[:-1]
        process.wait()


def curl(stand: Stand, url: str, connect: str = "address", **more: str) -> str:
    variables = {
        "EGRESSD_UPSTREAM_PROXY_URL": f"http://{ADDRESS}:{PORT}",
        "EGRESSD_UPSTREAM_PROXY_CONNECT": connect,
        **more,
    }
    return stand.run(["sh", "-c", f"curl -sS -m 20 {url} 2>&1"], env=variables).stdout


@pytest.mark.parametrize(
    ("connect", "target"), [("address", f"{topology.API}:443"), ("name", "api.lab-origin.com:443")]
)
def test_an_allowed_request_goes_by_the_proxy_and_by_nothing_else(
    stand: Stand, connect: str, target: str
) -> None:
    with proxy(stand.lab) as asked:
        assert curl(stand, API, connect) == "1"
        assert "(reason not_allowed)" in curl(stand, "https://evil-lab.com/", connect)
    assert target in [line.removeprefix("CONNECT ").replace("[2600:11::20]", topology.API) for line in asked]
    assert not [line for line in asked if "evil" in line]
    assert stand.lab.packets(port=443) == []
    [upstream] = [end["upstream"] for end in stand.records(event="end", layer="request") if "upstream" in end]
    assert upstream in (["by name"] if connect == "name" else [topology.API, topology.API_V6])


@pytest.mark.parametrize("connect", ["address", "name"])
def test_tunnels_and_plain_http_go_by_it_too(stand: Stand, connect: str) -> None:
    with proxy(stand.lab) as asked:
        assert "www.lab-origin.com" in curl(stand, "http://www.lab-origin.com/headers", connect)
        curl(stand, "-k https://api.anthropic.com/v1/models", connect)
    assert len(asked) >= 2
    assert stand.lab.packets(port=443) == stand.lab.packets(port=80) == []


@pytest.mark.parametrize("name", ["metadata", "loopback", "private"])
def test_law_5_what_resolves_inside_is_not_asked_for(stand: Stand, name: str) -> None:
    with proxy(stand.lab) as asked:
        told = curl(stand, f"https://{name}.lab-origin.com/")
    assert "egressd" in told
    assert not [line for line in asked if topology.API not in line]
    assert stand.lab.metadata_hits() == []


def test_its_credentials_come_from_a_file_and_go_to_it_alone(stand: Stand) -> None:
    file = stand.directory / "proxy-secret"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    with proxy(stand.lab, SECRET) as asked:
        assert curl(stand, API, EGRESSD_UPSTREAM_PROXY_CREDENTIALS_FILE=str(file)) == "1"
        seen = curl(
            stand, "https://api.lab-origin.com/headers", EGRESSD_UPSTREAM_PROXY_CREDENTIALS_FILE=str(file)
        )
    assert "authorization" not in seen.lower()
    assert asked
    assert not [line for line in asked if line.startswith("?")]
    assert "s3cret" not in stand.journal.read_text()


def test_a_proxy_that_wants_others_is_an_upstream_error(stand: Stand) -> None:
    with proxy(stand.lab, SECRET):
        told = curl(stand, API)
    assert "(reason upstream_proxy)" in told
    assert "407" not in re.sub(r"[0-9a-f]{16,}", "", told)  # an id may have it
    until(lambda: stand.records(event="end", reason="upstream_proxy"))
    [end] = stand.records(event="end", reason="upstream_proxy", layer="request")
    assert "407" in end["detail"]
