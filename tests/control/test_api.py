"""The control API on its socket: who may ask, what is answered, and every way in which it can be asked wrongly."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from egressd.control import api_server, peers
from egressd.control.api import description
from egressd.control.api_server import ApiServer
from egressd.control.estate import StateError
from egressd.control.surroundings import BadInput
from egressd.control.wirings import NotWired
from egressd.wiring.errors import WiringError
from tests.control.household import House

LAB = {"profile": "lab"}
DESCRIPTION = Path(__file__).parents[2] / "docs" / "openapi.json"


@dataclass
class Answer:
    status: int
    body: Any
    headers: Mapping[str, str]


class Client:
    """Speaks to a house's API over its socket."""

    def __init__(self, house: House, path: Path) -> None:
        self.house, self.path = house, path

    async def ask(self, method: str, path: str, **options: Any) -> Answer:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self.path))) as session,
            session.request(method, f"http://egressd{path}", **options) as response,
        ):
            text = await response.text()
            return Answer(response.status, json.loads(text) if text else None, dict(response.headers))

    async def raw(self, content: bytes, *, eof: bool = False) -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        writer.write(content)
        if eof:
            writer.write_eof()
        try:
            async with asyncio.timeout(5):
                return await reader.read()
        finally:
            writer.close()


def speak(tmp_path: Path, scene: Callable[[Client], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        house = House(tmp_path, **options)
        path = tmp_path / "run" / "control.sock"
        server = ApiServer()
        await server.start_unix(house, peers.listen(path, socket.SOCK_STREAM))
        try:
            await scene(Client(house, path))
        finally:
            await server.stop()
            await house.roster.end_all("drained")
            house.estate.close()

    asyncio.run(run())


def test_a_sandbox_is_made_listed_shown_and_revoked(tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        made = await client.ask("POST", "/v1/sandboxes", json=LAB | {"labels": {"task": "7"}, "ttl": 60})
        assert made.status == 201
        sandbox = made.body["sandbox"]
        assert made.body["environment"]["EGRESSD_SANDBOX"] == sandbox["id"]
        assert "s3cret" in made.body["environment"]["HTTPS_PROXY"]
        assert (sandbox["stage"], sandbox["labels"], sandbox["profile"]) == ("ready", {"task": "7"}, "lab")
        assert sandbox["expires"] > sandbox["created"]
        listed = await client.ask("GET", "/v1/sandboxes")
        assert listed.body == {"sandboxes": [sandbox]}
        assert (await client.ask("GET", f"/v1/sandboxes/{sandbox['id']}")).body == sandbox
        gone = await client.ask("DELETE", f"/v1/sandboxes/{sandbox['id']}")
        assert (gone.status, gone.body["stage"], gone.body["ending"]) == (200, "gone", "revoked")
        assert (await client.ask("GET", f"/v1/sandboxes/{sandbox['id']}")).body == gone.body
        assert (await client.ask("GET", "/v1/sandboxes")).body == {"sandboxes": []}
        assert (
            client.house.carrier.details(sandbox["id"])[-1]
            == f"revoked by uid {os.geteuid()} pid {os.getpid()}"
        )

    speak(tmp_path, scene)


def test_a_token_is_told_once_and_stands_nowhere_else(tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        made = await client.ask("POST", "/v1/sandboxes", json=LAB)
        path = f"/v1/sandboxes/{made.body['sandbox']['id']}"
        others = [await client.ask("GET", "/v1/sandboxes"), await client.ask("GET", path)]
        others += [await client.ask("GET", "/v1/status"), await client.ask("DELETE", path)]
        text = json.dumps([other.body for other in others] + client.house.carrier.records)
        text += "".join(file.read_text() for file in (tmp_path / "state").rglob("*") if file.is_file())
        assert "s3cret" not in text
        assert "ab" * 32 not in text  # nor its digest

    speak(tmp_path, scene)


def test_all_are_killed_at_once(tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        for _ in range(3):
            await client.ask("POST", "/v1/sandboxes", json=LAB)
        assert (await client.ask("GET", "/v1/status")).body["sandboxes"] == 3
        assert (await client.ask("DELETE", "/v1/sandboxes")).body == {"ended": 3}
        assert client.house.roster.living == ()

    speak(tmp_path, scene)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({}, 400, "profile: Field required"),
        ({"profile": 7}, 400, "profile: "),
        ({"profile": "../../etc/passwd"}, 400, "profile: "),
        ({"profile": "lab\n"}, 400, "profile: "),
        ({"profile": "x" * 200}, 400, "profile: "),
        (LAB | {"wirng": "explicit"}, 400, "wirng: "),
        (LAB | {"wiring": "none"}, 400, "wiring: "),
        (LAB | {"labels": {"a": 1}}, 400, "labels.a: "),
        (LAB | {"labels": {"a\n": "b"}}, 400, "labels."),
        (LAB | {"labels": {str(n): "" for n in range(33)}}, 400, "labels: "),
        (LAB | {"labels": {"a": "x" * 257}}, 400, "labels.a: "),
        (LAB | {"ttl": 0}, 400, "ttl: "),
        (LAB | {"ttl": -1}, 400, "ttl: "),
        (LAB | {"ttl": 1e300}, 400, "ttl: "),
        (LAB | {"ttl": True}, 400, "ttl: "),
        (LAB | {"ttl": "60"}, 400, "ttl: "),
        (LAB | {"traceparent": "x"}, 400, "traceparent: "),
        (LAB | {"source": "$(reboot)"}, 400, "source: "),
        (LAB | {"netns": "relative"}, 400, "netns: "),
        (LAB | {"pid": -1}, 400, "pid: "),
        ({"profile": "none"}, 422, "there is no profile 'none'"),
        (LAB | {"wiring": "gateway"}, 422, "does not offer"),
        (LAB | {"wiring": "namespace"}, 422, "egressd run"),
    ],
)  # fmt: skip
def test_a_body_that_cannot_be_used_is_told_why(tmp_path: Path, body: Any, status: int, said: str) -> None:
    async def scene(client: Client) -> None:
        answer = await client.ask("POST", "/v1/sandboxes", json=body)
        assert answer.status == status
        assert said in answer.body["detail"]
        assert client.house.roster.living == ()

    speak(tmp_path, scene)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b"[" * 60_000, b'{"profile": "lab", "profile": 1}',
     b'{"profile": "\\ud800"}'],
)  # fmt: skip
def test_bytes_that_are_no_request_make_nothing(tmp_path: Path, content: bytes) -> None:
    async def scene(client: Client) -> None:
        answer = await client.ask("POST", "/v1/sandboxes", data=content)
        assert (answer.status, answer.body["error"]) == (400, "bad_request")

    speak(tmp_path, scene)


def test_a_value_in_the_wrong_field_is_not_repeated(tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        answer = await client.ask("POST", "/v1/sandboxes", json=LAB | {"ttl": "hunter2", "labels": "hunter2"})
        assert answer.status == 400
        assert "hunter2" not in json.dumps(answer.body)

    speak(tmp_path, scene)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/sandboxes/sbx-00000000000000000000", 404),
        ("DELETE", "/v1/sandboxes/sbx-00000000000000000000", 404),
        ("GET", "/v1/sandboxes/..%2f..%2fetc%2fpasswd", 404),
        ("DELETE", "/v1/sandboxes/%00", 404),
        ("GET", "/", 404),
        ("GET", "/v1/sandboxes/", 404),
        ("PUT", "/v1/sandboxes", 405),
        ("POST", "/v1/status", 405),
        ("GET", "/v1/reload", 405),
    ],
)
def test_what_is_not_there_is_said_so(tmp_path: Path, method: str, path: str, status: int) -> None:
    async def scene(client: Client) -> None:
        from yarl import URL

        connector = aiohttp.UnixConnector(str(client.path))
        async with aiohttp.ClientSession(connector=connector) as session:
            url = URL(f"http://egressd{path}", encoded=True)
            async with session.request(method, url) as response:
                answer = await response.json()
                assert response.status == status
        assert answer["error"] in ("not_found", "method_not_allowed")

    speak(tmp_path, scene)


def test_failures_of_the_host_are_503_with_a_hint_and_nothing_left(tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        for error in (
            WiringError("ip", "failed\nmore", "install it"),
            OSError(24, "no"),
            NotWired("no", "do this"),
        ):
            client.house.thing.error = error
            answer = await client.ask("POST", "/v1/sandboxes", json=LAB)
            assert (answer.status, answer.body["error"]) == (503, "could_not_run")
        client.house.thing.error = None
        client.house.carrier.fails = True
        assert (await client.ask("POST", "/v1/sandboxes", json=LAB)).status == 503
        assert client.house.roster.living == ()

    speak(tmp_path, scene)


def test_what_nobody_foresaw_is_500_without_its_words(tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        client.house.thing.error = KeyError("hunter2")
        answer = await client.ask("POST", "/v1/sandboxes", json=LAB)
        assert (answer.status, answer.body["error"]) == (500, "internal_error")
        assert "hunter2" not in json.dumps(answer.body)
        assert client.house.roster.living == ()

    speak(tmp_path, scene)


def test_a_full_house_says_so(tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        await client.ask("POST", "/v1/sandboxes", json=LAB)
        answer = await client.ask("POST", "/v1/sandboxes", json=LAB)
        assert (answer.status, answer.body["error"]) == (429, "full")

    speak(tmp_path, scene, most=1)


def test_a_reload_says_what_it_did_and_why_not(tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        client.house.reloads = ["credentials reloaded"]
        answer = await client.ask("POST", "/v1/reload")
        assert answer.body == {"rules": client.house.roster.rules.digest, "notes": ["credentials reloaded"]}
        client.house.refuses = BadInput("profiles/a.yaml:1:1: bad")
        answer = await client.ask("POST", "/v1/reload")
        assert (answer.status, answer.body["detail"]) == (409, "profiles/a.yaml:1:1: bad")

    speak(tmp_path, scene)


def test_a_body_beyond_the_limit_is_refused_unread(tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        answer = await client.ask("POST", "/v1/sandboxes", data=b" " * 70_000)
        assert (answer.status, answer.body["error"]) == (413, "too_large")

    speak(tmp_path, scene)


@pytest.mark.parametrize(
    "content",
    [
        b"\x16\x03\x01\x00\x05hello",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 100_000,
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
        b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_bytes_that_are_no_http_end_their_connection_alone(tmp_path: Path, content: bytes) -> None:
    async def scene(client: Client) -> None:
        answer = await client.raw(content, eof=True)
        assert answer == b"" or (answer.startswith(b"HTTP/1.") and answer[9:10] == b"4")
        assert (await client.ask("GET", "/v1/status")).status == 200

    speak(tmp_path, scene)


def test_a_flood_of_silent_connections_is_bounded_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(client: Client) -> None:
        opened = [await asyncio.open_unix_connection(str(client.path)) for _ in range(api_server.MOST + 20)]
        refused = 0
        for reader, _ in opened[api_server.MOST :]:
            with_end = await asyncio.wait_for(reader.read(), 5)
            refused += with_end == b""
        assert refused == 20
        await asyncio.sleep(0.4)  # the silent ones have had their time
        assert (await client.ask("GET", "/v1/status")).status == 200
        for _, writer in opened:
            writer.close()

    monkeypatch.setattr(api_server, "FIRST_SECONDS", 0.3)
    speak(tmp_path, scene)


def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(client: Client) -> None:
        reader, writer = await asyncio.open_unix_connection(str(client.path))
        writer.write(b"POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
        async with asyncio.timeout(5):
            assert b" 408 " in await reader.readline()
        writer.close()

    monkeypatch.setattr("egressd.control.api_wire._BODY_SECONDS", 0.1)
    speak(tmp_path, scene)


def test_the_socket_is_its_owners_alone(tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        assert client.path.stat().st_mode & 0o777 == 0o600
        assert client.path.parent.stat().st_mode & 0o077 == 0

    speak(tmp_path, scene)


AS_NOBODY = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.sendall(b"DELETE /v1/sandboxes HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
sys.stdout.buffer.write(sock.recv(65536))
"""


async def _output(*argv: str) -> bytes:
    process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE)
    return (await process.communicate())[0]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another uid")
def test_another_uid_gets_403_even_where_the_file_was_opened_to_it(tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        await client.ask("POST", "/v1/sandboxes", json=LAB)
        for folder in (client.path.parent, tmp_path, *tmp_path.parents):
            if folder.owner() == "root" and folder not in (Path("/"), Path("/tmp")):
                folder.chmod(0o755)
        client.path.chmod(0o666)
        answer = await _output(sys.executable, "-I", "-c", AS_NOBODY, str(client.path))
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b"uid 65534 is neither root nor egressd's" in answer
        assert len(client.house.roster.living) == 1

    speak(tmp_path, scene)


IN_A_PID_NAMESPACE = """
import socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
sock.sendall(b"DELETE /v1/sandboxes HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
sys.stdout.buffer.write(sock.recv(65536))
"""


def test_whoever_is_in_a_pid_namespace_of_its_own_gets_403_whatever_it_can_see(tmp_path: Path) -> None:
    async def scene(client: Client) -> None:
        inside = ["unshare", "--user", "--map-current-user", "--pid", "--fork"]
        answer = await _output(*inside, sys.executable, "-I", "-c", IN_A_PID_NAMESPACE, str(client.path))
        if not answer:
            pytest.skip("this kernel lets nobody make a user namespace")
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert b"pid namespace of its own" in answer

    speak(tmp_path, scene)


@pytest.mark.parametrize(
    ("peer", "status", "said"),
    [
        (peers.Peer(1, 0), "NSpid:\t1\n", None),
        (peers.Peer(1, os.geteuid()), "NSpid:\t1\n", None),
        (peers.Peer(1, os.geteuid() + 1), "NSpid:\t1\n", "neither root"),
        (peers.Peer(1, 0), "NSpid:\t1\t7\n", "of its own"),
        (peers.Peer(1, 0), "Name:\tNSpid:\t1\n", "cannot be told"),
        (peers.Peer(1, 0), "", "cannot be told"),
        (peers.Peer(2, 0), "NSpid:\t1\n", "cannot be told"),
        (peers.Peer(0, 0), "NSpid:\t1\n", "cannot see into"),
    ],
)
def test_who_may_ask(tmp_path: Path, peer: peers.Peer, status: str, said: str | None) -> None:
    for name in ("self", "1"):
        (tmp_path / name).mkdir()
    (tmp_path / "self/status").write_text("Name:\tpython\nNSpid:\t77\n")
    (tmp_path / "1/status").write_text(status)
    why = peers.refusal(peer, proc=tmp_path)
    assert why is None if said is None else why is not None and said in why


def test_a_socket_that_a_killed_daemon_left_is_replaced_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    first = peers.listen(path, socket.SOCK_STREAM)
    with pytest.raises(StateError, match="somebody listens"):
        peers.listen(path, socket.SOCK_STREAM)
    first.close()
    peers.listen(path, socket.SOCK_STREAM).close()
    path.unlink()
    path.write_text("mine")
    with pytest.raises(StateError, match="no socket"):
        peers.listen(path, socket.SOCK_STREAM)
    assert path.read_text() == "mine"


def test_the_description_is_the_one_that_is_published(tmp_path: Path) -> None:
    assert DESCRIPTION.read_text() == description(), (
        "python -c 'from egressd.control.api import description; …'"
    )

    async def scene(client: Client) -> None:
        assert (await client.ask("GET", "/openapi.json")).body == json.loads(description())

    speak(tmp_path, scene)
