"""What is refused, on the wire: the client is told why, the record says so once, the origin hears nothing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time

import pytest

from egressd.gate.connection import Connection, Destination
from egressd.policy.attempt import Decision
from egressd.policy.compile import compile_policy
from egressd.policy.effective import EffectivePolicy
from egressd.policy.reasons import Reason
from tests.gate.inspector.lab import HOST, NAME, Lab, entry, laboratory, run, wait_until
from tests.gate.inspector.origin import PathOrigin

GOOD = f"Host: {HOST}\r\n"


def post(fields: str, body: str = "") -> bytes:
    return f"POST /echo HTTP/1.1\r\n{GOOD}{fields}\r\n{body}".encode("latin-1")


MALFORMED = {
    "both lengths": (post("Content-Length: 3\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"), "bad_framing"),
    "two lengths": (post("Content-Length: 3\r\nContent-Length: 4\r\n", "abc"), "bad_framing"),
    "the same length twice": (post("Content-Length: 3\r\nContent-Length: 3\r\n", "abc"), "bad_framing"),
    "a list of lengths": (post("Content-Length: 3, 3\r\n", "abc"), "bad_framing"),
    "a signed length": (post("Content-Length: +5\r\n", "abcde"), "bad_framing"),
    "a negative length": (post("Content-Length: -1\r\n"), "bad_framing"),
    "an empty length": (post("Content-Length:\r\n"), "bad_framing"),
    "a hexadecimal length": (post("Content-Length: 0x3\r\n", "abc"), "bad_framing"),
    "a length with a leading zero": (post("Content-Length: 03\r\n", "abc"), "bad_framing"),
    "a length beyond all bounds": (post("Content-Length: 9999999999999999999999\r\n"), "bad_framing"),
    "an unknown coding": (post("Transfer-Encoding: xchunked\r\n"), "bad_framing"),
    "chunked twice": (post("Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n"), "bad_framing"),
    "identity after chunked": (post("Transfer-Encoding: chunked, identity\r\n"), "bad_framing"),
    "gzip before chunked": (post("Transfer-Encoding: gzip, chunked\r\n"), "bad_framing"),
    "an underscore for the hyphen": (post("Content_Length: 3\r\n", "abc"), "bad_framing"),
    "a dot for the hyphen": (post("Transfer.Encoding: chunked\r\n", "abc"), "bad_framing"),
    "space before the colon": (post("Transfer-Encoding : chunked\r\n"), "bad_header"),
    "a fold": (post("X-A: b\r\n Host: evil.example.com\r\n"), "bad_header"),
    "a fold of the first field": (b"GET / HTTP/1.1\r\n Host: x\r\n\r\n", "bad_header"),
    "a tab fold": (post("X-A: b\r\n\tc\r\n"), "bad_header"),
    "a bare LF after a field": (post("X-A: b\nX-B: c\r\n"), "bad_header"),
    "bare LF lines": (f"GET / HTTP/1.1\nHost: {HOST}\n\n".encode(), "bad_request"),
    "a bare CR in a value": (post("X-A: b\rHost: evil.example.com\r\n"), "bad_header"),
    "a NUL in a value": (post("X-A: b\0c\r\n"), "bad_header"),
    "an escape in a value": (post("X-A: \x1b[2J\r\n"), "bad_header"),
    "a space in a name": (post("X Y: 1\r\n"), "bad_header"),
    "an empty name": (post(": 1\r\n"), "bad_header"),
    "a line without colon": (post("nonsense\r\n"), "bad_header"),
    "a name outside ASCII": (post("X-\xe4: 1\r\n"), "bad_header"),
    "another expectation": (post("Expect: 200-ok\r\n"), "bad_header"),
    "HTTP/0.9": (b"GET /\r\n\r\n", "bad_request"),
    "HTTP/9.9": (f"GET / HTTP/9.9\r\n{GOOD}\r\n".encode(), "bad_request"),
    "HTTP/2.0 by name": (f"GET / HTTP/2.0\r\n{GOOD}\r\n".encode(), "bad_request"),
    "HTTP/2 by prior knowledge": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "bad_request"),
    "a lower-case version": (f"GET / http/1.1\r\n{GOOD}\r\n".encode(), "bad_request"),
    "tabs for spaces": (f"GET\t/\tHTTP/1.1\r\n{GOOD}\r\n".encode(), "bad_request"),
    "two spaces": (f"GET  / HTTP/1.1\r\n{GOOD}\r\n".encode(), "bad_request"),
    "a space in the target": (f"GET /a b HTTP/1.1\r\n{GOOD}\r\n".encode(), "bad_request"),
    "a trailing space": (f"GET / HTTP/1.1 \r\n{GOOD}\r\n".encode(), "bad_request"),
    "a target outside ASCII": (f"GET /\xe4 HTTP/1.1\r\n{GOOD}\r\n".encode("latin-1"), "bad_request"),
    "a fragment": (f"GET /#x HTTP/1.1\r\n{GOOD}\r\n".encode(), "bad_request"),
    "an authority for a path": (f"GET //evil.example.com/ HTTP/1.1\r\n{GOOD}\r\n".encode(), "bad_request"),
    "a star for a path": (f"GET * HTTP/1.1\r\n{GOOD}\r\n".encode(), "bad_request"),
    "another scheme": (f"GET ftp://{HOST}/ HTTP/1.1\r\n{GOOD}\r\n".encode(), "bad_request"),
    "a file": (f"GET file:///etc/passwd HTTP/1.1\r\n{GOOD}\r\n".encode(), "bad_request"),
    "https in the clear": (f"GET https://{HOST}/ HTTP/1.1\r\n{GOOD}\r\n".encode(), "bad_request"),
    "a method in lower case": (f"connect / HTTP/1.1\r\n{GOOD}\r\n".encode(), "bad_request"),
    "a method that is no token": (f"G@T / HTTP/1.1\r\n{GOOD}\r\n".encode(), "bad_request"),
    "two empty lines first": (f"\r\n\r\nGET / HTTP/1.1\r\n{GOOD}\r\n".encode(), "bad_request"),
    "CONNECT inside": (
        b"CONNECT evil.example.com:443 HTTP/1.1\r\nHost: evil.example.com:443\r\n\r\n",
        "nested_connect",
    ),
    "too many fields": (post("A: b\r\n" * 300), "head_too_large"),
    "too large a head": (post(f"A: {'b' * 70_000}\r\n"), "head_too_large"),
    "too large a head without end": (post("A: " + "b" * 70_000)[:-4], "head_too_large"),
    "two hosts": (f"GET / HTTP/1.1\r\n{GOOD}Host: evil.example.com\r\n\r\n".encode(), "duplicate_host"),
    "the same host twice": (f"GET / HTTP/1.1\r\n{GOOD}{GOOD}\r\n".encode(), "duplicate_host"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", "bad_host"),
    "an empty host": (b"GET / HTTP/1.1\r\nHost:\r\n\r\n", "bad_host"),
    "a list of hosts": (f"GET / HTTP/1.1\r\nHost: {HOST}, evil.example.com\r\n\r\n".encode(), "bad_host"),
    "user information": (
        f"GET / HTTP/1.1\r\nHost: {HOST}:80@evil.example.com\r\n\r\n".encode(),
        "userinfo_in_authority",
    ),
    "an open bracket": (b"GET / HTTP/1.1\r\nHost: [::1\r\n\r\n", "bad_host"),
    "a host outside ASCII": (
        "GET / HTTP/1.1\r\nHost: \xe4.example\r\n\r\n".encode("latin-1"),
        "non_ascii_host",
    ),
    "a bad port": (f"GET / HTTP/1.1\r\nHost: {HOST}:99999\r\n\r\n".encode(), "bad_port"),
    "another host": (b"GET / HTTP/1.1\r\nHost: evil.example.com\r\n\r\n", "authority_mismatch"),
    "another port": (f"GET / HTTP/1.1\r\nHost: {HOST}:22\r\n\r\n".encode(), "authority_mismatch"),
    "a literal address": (b"GET / HTTP/1.1\r\nHost: 169.254.169.254\r\n\r\n", "authority_mismatch"),
    "absolute form that disagrees": (
        f"GET http://evil.example.com/ HTTP/1.1\r\n{GOOD}\r\n".encode(),
        "authority_mismatch",
    ),
    "absolute form with a disagreeing Host": (
        f"GET http://{HOST}/ HTTP/1.1\r\nHost: evil.example.com\r\n\r\n".encode(),
        "authority_mismatch",
    ),
    "TRACE": (f"TRACE / HTTP/1.1\r\n{GOOD}\r\n".encode(), "method_not_allowed"),
    "WebSocket": (
        f"GET /ws HTTP/1.1\r\n{GOOD}Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n".encode(),
        "upgrade_not_allowed",
    ),
    "an upgrade that Connection does not name": (
        f"GET /ws HTTP/1.1\r\n{GOOD}Upgrade: h2c, websocket\r\n\r\n".encode(),
        "upgrade_not_allowed",
    ),
    "a GET with a body": (
        f"GET / HTTP/1.1\r\n{GOOD}Content-Length: 3\r\n\r\nabc".encode(),
        "body_not_allowed",
    ),
}


@pytest.mark.parametrize(("raw", "reason"), MALFORMED.values(), ids=MALFORMED)
def test_it_is_refused_recorded_once_and_never_sent(raw: bytes, reason: str) -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            client.send(raw)
            answer = await client.answer(raw.split(b" ")[0].decode("latin-1"))
            assert answer.headers["x-egressd-reason"] == reason
            assert answer.status in (400, 403, 431)
            assert answer.headers["connection"] == "close"
            assert answer.headers["cache-control"] == "no-store"
            assert "server" not in answer.headers
            await client.over()
            (decision,) = lab.records.of("decision")
            assert (decision.verdict, decision.reason, decision.layer) == ("deny", reason, "request")
            assert decision.attempt_id == answer.headers["x-egressd-attempt"]
            assert len(lab.records.of("end")) == 1
            assert origin.connections == 0

    run(test())


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    "chunk",
    [
        "xyz\r\n",
        "3\r\nabcd\r\n",
        "3\nabc\r\n",
        "-1\r\n",
        " 3\r\nabc\r\n",
        "0\r\nA b: c\r\n\r\n",
        "1" * 20 + "\r\n",
        "1" * 5000,
    ],
)
def test_a_bad_chunk_ends_the_exchange(chunk: str, at_once: bool) -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            client.send(post("Transfer-Encoding: chunked\r\n", "2\r\nok\r\n" + (chunk if at_once else "")))
            if not at_once:
                await wait_until(lambda: origin.heads)
                client.send(chunk.encode())
            answer = await client.answer()
            assert (answer.status, answer.headers["x-egressd-reason"]) == (400, "bad_framing")
            await client.over()
            if at_once:  # it is known to be bad before it is decided
                assert lab.records.decisions() == [("deny", "bad_framing")]
                assert origin.connections == 0
            else:
                assert lab.records.decisions() == [("allow", "rule")]
            assert lab.records.ends() == ["bad_framing"]

    run(test())


def test_a_client_that_leaves_in_the_middle_of_a_head_is_recorded() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial()
            client.send(b"GET / HTT")
            client.writer.write_eof()
            assert b"reason bad_request" in await client.closed()
            await client.over()
            assert lab.records.decisions() == [("deny", "bad_request")]

    run(test())


def test_a_client_that_says_nothing_leaves_no_request_record() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial()
            await client.over()
            assert lab.records.all == []

    run(test())


def denied(lab: Lab) -> Connection:
    connection = lab.connection()
    connection.decision = Decision("deny", Reason.NOT_ALLOWED)
    return connection


def test_a_denied_connection_answers_with_its_reason_in_plain_text() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial(denied(lab))
            answer = await client.ask("GET /x?token=secret")
            sentence = f"egressd: denied: no rule of this sandbox allows this destination: {HOST}:80 (reason not_allowed)"
            assert (answer.status, answer.phrase) == (403, sentence)
            lines = answer.body.decode().splitlines()
            assert lines[0] == sentence
            assert lines[1].startswith("hint: Ask the operator for a rule")
            assert answer.headers["content-type"].startswith("text/plain")
            assert "secret" not in answer.body.decode()
            await client.over()
            (decision,) = lab.records.of("decision")
            assert (decision.reason, decision.method, decision.path, decision.query) == (
                "not_allowed",
                "GET",
                "/x",
                "token=<6>",
            )
            assert origin.connections == 0

    run(test())


def test_a_denied_connection_answers_in_json_where_that_is_asked_for() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial(denied(lab))
            answer = await client.ask("POST /x\nAccept: application/json\nContent-Length: 0")
            assert answer.headers["content-type"] == "application/json"
            said = json.loads(answer.body)
            assert said["error"] == "denied"
            assert (said["reason"], said["host"], said["port"], said["method"]) == (
                "not_allowed",
                HOST,
                80,
                "POST",
            )
            assert (said["sandbox"], said["attempt"]) == ("sb-1", answer.headers["x-egressd-attempt"])
            assert said["hint"]
            await client.over()

    run(test())


def test_the_answer_to_head_has_no_body() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial(denied(lab))
            answer = await client.ask("HEAD /x")
            assert (answer.status, int(answer.headers["content-length"]) > 0) == (403, True)
            assert await client.closed() == b""
            await client.over()

    run(test())


@pytest.mark.parametrize("framing", ["Content-Length: 800000", "Transfer-Encoding: chunked"])
def test_a_denied_upload_is_answered_at_once_and_the_answer_arrives(framing: str) -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial(denied(lab))
            answer = await client.ask(f"PUT /x\n{framing}", os.urandom(100_000))
            assert answer.status == 403
            for _ in range(7):  # it goes on sending for a while
                client.send(os.urandom(100_000))
                await client.writer.drain()
            assert await client.closed() == b""
            await client.over()
            assert lab.records.of("end")[0].bytes_up == 0

    run(test())


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("tool", [["-T", "-"], ["--data-binary", "@-"]])
def test_curl_shows_the_answer_to_a_denied_upload(tool: list[str]) -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            loop = asyncio.get_running_loop()

            async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                client = await lab.dial(denied(lab))

                async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                    try:
                        while data := await source.read(65536):
                            sink.write(data)
                            await sink.drain()
                    except OSError:
                        pass
                    sink.close()

                await asyncio.gather(pump(reader, client.writer), pump(client.reader, writer))

            door = await asyncio.start_server(accept, "127.0.0.1", 0)
            port = door.sockets[0].getsockname()[1]
            curl = await asyncio.create_subprocess_exec(
                "curl",
                "-sS",
                "-q",
                "--max-time",
                "10",
                *tool,
                "-H",
                f"Host: {HOST}",
                f"http://127.0.0.1:{port}/x",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={"PATH": os.environ["PATH"]},
            )
            out, _ = await curl.communicate(b"z" * 5_000_000)
            assert b"reason not_allowed" in out
            door.close()
            assert loop.is_running()

    run(test())


def test_a_denied_connection_still_calls_a_malformed_request_malformed() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial(denied(lab))
            client.send(b"GET / HTTP/1.1\nHost: x\n\n")
            assert (await client.answer()).headers["x-egressd-reason"] == "bad_request"
            await client.over()

    run(test())


def test_nothing_leaves_when_the_record_cannot_be_written() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            lab.records.broken = True
            client = await lab.dial()
            answer = await client.ask("GET /x")
            assert (answer.status, answer.headers["x-egressd-reason"]) == (503, "audit_unavailable")
            await client.over()
            assert (origin.connections, lab.dialer.dials) == (0, [])
            assert lab.records.decisions() == [("deny", "audit_unavailable")]

    run(test())


def test_nothing_leaves_before_the_record_is_written() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            lab.records.gate = asyncio.Event()
            client = await lab.dial()
            client.send(post("Content-Length: 400000\r\n") + b"x" * 400_000)
            for _ in range(20):
                await asyncio.sleep(0.01)
                assert (lab.dialer.dials, lab.records.all) == ([], [])
            lab.records.gate.set()
            assert (await client.answer()).status == 200
            await client.over()

    run(test())


def test_a_revoked_sandbox_is_told_so() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            lab.sandbox.revoked = True
            client = await lab.dial()
            assert (await client.ask("GET /x")).headers["x-egressd-reason"] == "revoked"
            await client.over()
            assert origin.connections == 0

    run(test())


def test_a_sandbox_revoked_while_the_record_is_written_sends_nothing() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            lab.records.gate = asyncio.Event()
            client = await lab.dial()
            client.send(f"GET /x HTTP/1.1\r\n{GOOD}\r\n".encode())
            await wait_until(lambda: lab.engines[0]._tasks)
            lab.sandbox.revoked = True
            lab.records.gate.set()
            assert (await client.answer()).headers["x-egressd-reason"] == "revoked"
            await client.over()
            assert origin.connections == 0
            assert (lab.records.decisions(), lab.records.ends()) == ([("allow", "rule")], ["revoked"])

    run(test())


@pytest.mark.parametrize("left", [False, True], ids=["the rule went", "the rule stays"])
def test_rules_that_change_while_the_record_is_written_decide_whether_it_goes(left: bool) -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            lab.records.gate = asyncio.Event()
            client = await lab.dial()
            client.send(f"GET /x HTTP/1.1\r\n{GOOD}\r\n".encode())
            await wait_until(lambda: lab.engines[0]._tasks)
            entries = (entry(),) if left else ()
            lab.sandbox.policy = compile_policy(EffectivePolicy(profile="lab", entries=entries))
            for live in tuple(lab.sandbox.live):
                live.rejudge(time.time())
            lab.records.gate.set()
            answer = await client.answer()
            if left:
                assert answer.status == 200
                return
            assert answer.headers["x-egressd-reason"] == "policy_changed"
            await client.over()
            assert origin.connections == 0
            assert (lab.records.decisions(), lab.records.ends()) == ([("allow", "rule")], ["policy_changed"])

    run(test())


def test_the_rule_is_asked_about_each_request() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin, entry(requests=("GET /n",))) as lab:
            client = await lab.dial()
            assert (await client.ask("GET /n")).status == 200
            answer = await client.ask("GET /other")
            assert answer.headers["x-egressd-reason"] == "path_not_allowed"
            await client.over()
            allow, deny = lab.records.of("decision")
            assert (allow.rule, allow.place) == ("origin", "rules/profiles/lab.yaml:7")
            assert (deny.verdict, deny.path) == ("deny", "/other")
            assert b"/other" not in origin.heads

    run(test())


def test_an_offer_of_h2c_is_taken_out_and_the_request_served() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial()
            answer = await client.ask(
                "GET /echo\nConnection: Upgrade, HTTP2-Settings\nUpgrade: h2c\nHTTP2-Settings: AAMAAABk"
            )
            assert set(json.loads(answer.body)["headers"]) == {"host"}
            await client.over()

    run(test())


def test_what_ends_at_a_proxy_does_not_go_on() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            client = await lab.dial()
            answer = await client.ask(
                "POST /echo\nProxy-Authorization: Basic x\nProxy-Connection: keep-alive\nKeep-Alive: 5\nTE: trailers\n"
                "Connection: keep-alive, X-Hop, Host, Content-Length\nX-Hop: 1\nX-HTTP-Method-Override: DELETE\n"
                "X_Http_Method_Override: DELETE\nX-Method-Override: DELETE\nX-HTTP-Method: DELETE\n"
                "Content-Length: 2\nX-Stays: yes",
                b"ok",
                host=f"{HOST.upper()}.:80",
            )
            assert json.loads(answer.body)["headers"] == {
                "host": HOST,
                "content-length": "2",
                "x-stays": "yes",
            }
            await client.over()

    run(test())


def test_absolute_form_that_agrees_goes_on_in_origin_form() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial()
            assert (await client.ask(f"GET HTTP://{HOST}?a=b")).status == 200
            assert origin.heads.startswith(b"GET /?a=b HTTP/1.1\r\n")
            await client.over()

    run(test())


def test_the_port_of_the_destination_goes_into_host() -> None:
    async def test() -> None:
        async with laboratory(PathOrigin()) as lab:
            connection = lab.connection()
            connection.destination = Destination(8444, proved=NAME)
            client = await lab.dial(connection)
            for host in (HOST, f"{HOST}:8444", f"{HOST}:80"):
                answer = await client.ask("GET /echo", host=host)
                assert json.loads(answer.body)["headers"]["host"] == f"{HOST}:8444"
            await client.over()
            assert lab.dialer.dials == [(NAME, 8444)]

    run(test())


def proxied(lab: Lab) -> Connection:
    connection = lab.connection()
    connection.channel = "absolute"
    return connection


def test_on_a_proxy_connection_each_target_is_a_destination_of_its_own() -> None:
    async def test() -> None:
        origin = PathOrigin()
        other = "other.test.example"
        async with laboratory(origin, entry(), entry(id="other", hosts=(other,))) as lab:
            client = await lab.dial(proxied(lab))
            assert (await client.ask(f"GET http://{HOST}/n")).body == b"1"
            assert (await client.ask(f"GET http://{other}:8444/n", host=f"{other}:8444")).body == b"1"
            assert (await client.ask(f"GET http://{HOST}/n")).body == b"1"
            answer = await client.ask("GET http://evil.example.com/n", host="evil.example.com")
            assert answer.headers["x-egressd-reason"] == "not_allowed"
            assert b"evil.example.com:80" in answer.body
            await client.over()
            assert lab.dialer.dials == [(NAME, 80), (tuple(other.split(".")), 8444), (NAME, 80)]
            assert [record.host for record in lab.records.of("decision")] == [
                HOST,
                other,
                HOST,
                "evil.example.com",
            ]
            assert lab.engines[0].connection.host == NAME

    run(test())


@pytest.mark.parametrize(
    ("request_head", "reason"),
    [
        pytest.param("GET /n HTTP/1.1\r\nHost: {}\r\n\r\n", "bad_request", id="origin form"),
        pytest.param(
            "GET http://{}/ HTTP/1.1\r\nHost: evil.example.com\r\n\r\n",
            "authority_mismatch",
            id="Host says otherwise",
        ),
        pytest.param("GET https://{}/ HTTP/1.1\r\n\r\n", "bad_request", id="https in the clear"),
        pytest.param("GET http://169.254.169.254/ HTTP/1.1\r\n\r\n", "floor_metadata", id="metadata"),
        pytest.param("GET http://2852039166/ HTTP/1.1\r\n\r\n", "floor_metadata", id="metadata in decimal"),
    ],
)
def test_a_proxy_connection_refuses(request_head: str, reason: str) -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            client = await lab.dial(proxied(lab))
            client.send(request_head.format(HOST).encode())
            answer = await client.answer()
            assert answer.headers["x-egressd-reason"] == reason
            assert b"169.254" not in answer.body
            await client.over()
            assert origin.connections == 0

    run(test())


def test_a_connection_that_was_never_decided_lets_nothing_out() -> None:
    async def test() -> None:
        origin = PathOrigin()
        async with laboratory(origin) as lab:
            for channel in ("transparent", "absolute"):
                fresh = Connection(lab.sandbox, lab.services, "transparent", Destination(80, proved=NAME))
                fresh.channel = "absolute" if channel == "absolute" else "transparent"
                client = await lab.dial(fresh)
                assert (await client.ask(f"GET http://{HOST}/x")).headers[
                    "x-egressd-reason"
                ] == "internal_error"
                await client.over()
            assert origin.connections == 0

    run(test())
