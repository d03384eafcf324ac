"""A request that a rule gives a credential: what the origin gets, what the client is told, and what never leaves."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from mitmproxy import http

from egressd.credentials.lease import Lease
from egressd.policy.compile import compile_policy
from egressd.policy.credential import Attach, Placeholder
from egressd.policy.effective import EffectiveEntry, EffectivePolicy
from tests.gate.inspector.lab import HOST, entry, run
from tests.gate.inspector.lender import DUMMY, KEYS, SECRET, STRANGER, Lender, keyed, lease_of
from tests.gate.inspector.scene import Scene

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
PLACED = Attach(placeholder=Placeholder(variable="KEY", headers=["authorization", "x-key"], query=["key"]))


def request(target: str = "/v1/x", *fields: str, method: str = "GET", body: bytes = b"") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", f"Host: {HOST}", *fields]
    lines += [f"Content-Length: {len(body)}"] if body else []
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@asynccontextmanager
async def scene_of(lender: Lender, *entries: EffectiveEntry) -> AsyncIterator[Scene]:
    scene = Scene(*(entries or (keyed(),)), tls=True)
    connection = scene.engine.connection
    lender.serve(connection.sandbox, connection.services)
    async with scene:
        yield scene


def head_of(scene: Scene) -> tuple[str, list[tuple[str, str]]]:
    """What the origin was sent: the request line, and the fields in order."""
    head = scene.upstreams[-1].written.partition(b"\r\n\r\n")[0].decode("latin-1")
    line, *lines = head.split("\r\n")
    return line, [(name.lower(), value) for name, _, value in (text.partition(": ") for text in lines)]


def nothing_left(scene: Scene) -> None:
    """No byte has left, and the secret was told to nobody."""
    assert all(not stream.written for stream in scene.upstreams)
    assert SECRET.encode() not in scene.client.written
    assert all(SECRET not in str(record.as_dict()) for record in scene.records.all)


def test_the_origin_gets_the_credential_and_the_record_names_it() -> None:
    async def test() -> None:
        lender = Lender(lease_of())
        async with scene_of(lender) as scene:
            await scene.says(request("/v1/x?a=b", "Accept: */*"))
            line, fields = head_of(scene)
            assert line == "GET /v1/x?a=b HTTP/1.1"
            assert fields == [
                ("host", HOST),
                ("accept", "*/*"),
                ("accept-encoding", "identity"),
                ("authorization", f"Bearer {SECRET}"),
            ]
            assert await scene.origin_says(OK) == OK
            assert scene.records.decisions() == [("allow", "rule")]
            assert all(SECRET not in str(record.as_dict()) for record in scene.records.all)
            record = scene.records.of("decision")[0]
            assert (record.credential, record.lease) == ("key", "lease-1")
            assert (record.lease_expires or "").endswith("Z")
            assert [(asked.credential, asked.host, asked.target) for asked in lender.asked] == [
                ("key", HOST, "/v1/x?a=b")
            ]

    run(test())


class Site:
    """A site's own addon, that looks at everything it is shown and adds a key of its own."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        self.shown.append(repr((flow.request.path, flow.request.headers.fields)))
        flow.request.headers["authorization"] = "Bearer of-the-site"
        flow.request.headers["x-note"] = "of-the-site"

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        self.shown.append(repr((flow.request.path, flow.request.headers.fields)))


def test_a_sites_addon_sees_no_secret_and_its_own_keys_go_the_way_of_all_others() -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of())) as scene:
            site = Site()
            scene.engine.connection.services.inspection = (site,)
            await scene.says(request())
            _, fields = head_of(scene)
            assert [value for name, value in fields if name == "authorization"] == [f"Bearer {SECRET}"]
            assert ("x-note", "of-the-site") in fields
            await scene.origin_says(OK)
            assert len(site.shown) == 2
            assert SECRET not in "".join(site.shown)

    run(test())


@pytest.mark.parametrize(
    "part", ["attach.prepare", "attach.attach", "decide", "_judged", "placeholders.seek"]
)
def test_what_breaks_while_the_bytes_are_made_lets_nothing_out(
    part: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"egressd.gate.inspector.credential.{part}", fail)

    async def test() -> None:
        lender = Lender(lease_of(Attach(path="T"), placeholder=DUMMY))
        async with scene_of(lender) as scene:
            answer = await scene.says(request("/v1/{T}"))
            assert b"(reason internal_error)" in answer
            nothing_left(scene)

    run(test())
    assert SECRET not in capfd.readouterr().err


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("broken on purpose")


def test_a_second_request_asks_nobody() -> None:
    async def test() -> None:
        lender = Lender(lease_of())
        async with scene_of(lender) as scene:
            for _ in range(3):
                await scene.says(request())
                assert await scene.origin_says(OK) == OK
            assert scene.upstreams[0].written.count(b"Authorization: Bearer " + SECRET.encode()) == 3
            assert len(scene.upstreams) == 1
            assert len(lender.asked) == 1

    run(test())


def test_no_upstream_carries_requests_with_a_credential_and_without() -> None:
    """An origin may take a connection for whoever was authenticated on it (Negotiate), or answer the next request late."""
    rules = (keyed(requests=("GET /v1/*",)), entry(schemes=("https",), ports=(443,), requests=("GET /open",)))

    async def test() -> None:
        async with scene_of(Lender(lease_of()), *rules) as scene:
            for target, upstreams in (("/v1/x", 1), ("/v1/y", 1), ("/open", 2), ("/open", 2), ("/v1/x", 3)):
                await scene.says(request(target))
                assert await scene.origin_says(OK) == OK
                assert len(scene.upstreams) == upstreams
            assert [stream.written.count(SECRET.encode()) for stream in scene.upstreams] == [2, 0, 1]
            assert [stream.closed for stream in scene.upstreams] == [True, True, False]

    run(test())


@pytest.mark.parametrize(
    ("attach", "target", "fields", "line", "slot"),
    [
        pytest.param(Attach(header="x-api-key"), "/v1/x", (), "/v1/x", ("x-api-key", SECRET), id="header"),
        pytest.param(
            Attach(bearer=True), "/v1/x", (), "/v1/x", ("authorization", f"Bearer {SECRET}"), id="bearer"
        ),
        pytest.param(
            Attach(basic="x-access-token"),
            "/v1/x",
            (),
            "/v1/x",
            ("authorization", f"Basic {base64.b64encode(f'x-access-token:{SECRET}'.encode()).decode()}"),
            id="basic",
        ),
        pytest.param(
            Attach(cookie="session"), "/v1/x", (), "/v1/x", ("cookie", f"session={SECRET}"), id="cookie"
        ),
        pytest.param(Attach(query="key"), "/v1/x?a=b", (), f"/v1/x?a=b&key={SECRET}", None, id="query"),
        pytest.param(Attach(query="key"), "/v1/x", (), f"/v1/x?key={SECRET}", None, id="query alone"),
        pytest.param(Attach(path="TOKEN"), "/bot{TOKEN}/send?a", (), f"/bot{SECRET}/send?a", None, id="path"),
        pytest.param(
            Attach(path="TOKEN"), "/bot%7BTOKEN%7d/send", (), f"/bot{SECRET}/send", None, id="path, escaped"
        ),
        pytest.param(
            PLACED,
            "/v1/x",
            (f"Authorization: Bearer {DUMMY}",),
            "/v1/x",
            ("authorization", f"Bearer {SECRET}"),
            id="placeholder in a header",
        ),
        pytest.param(
            PLACED,
            f"/v1/x?key={DUMMY}&a=b",
            (),
            f"/v1/x?a=b&key={SECRET}",
            None,
            id="placeholder in the query",
        ),
    ],
)
def test_every_way_to_attach(
    attach: Attach, target: str, fields: tuple[str, ...], line: str, slot: tuple[str, str] | None
) -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of(attach))) as scene:
            await scene.says(request(target, *fields))
            said, seen = head_of(scene)
            assert said == f"GET {line} HTTP/1.1"
            assert [
                field for field in seen if SECRET in field[1] or field[0] in ("authorization", "cookie")
            ] == ([slot] if slot else [])
            assert DUMMY.encode() not in scene.upstreams[-1].written
            assert await scene.origin_says(OK) == OK

    run(test())


OWN = [
    ("Authorization: Bearer sk-attacker", "authorization"),
    ("X-API-Key: sk-attacker", "x-api-key"),
    ("x_api_key: sk-attacker", "x-api-key"),
    ("Cookie: session=sk-attacker", "cookie"),
    ("X-Goog-Api-Key: sk-attacker", "x-goog-api-key"),
    ("Connection: keep-alive, x-odd\r\nX-Odd: sk-attacker", None),
    ("X-Team: sk-attacker", "x-team"),
]


@pytest.mark.parametrize(("field", "slot"), OWN, ids=[field for field, _ in OWN])
def test_the_sandboxs_own_keys_are_taken_out(field: str, slot: str | None) -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of(slots=("x-team",)))) as scene:
            await scene.says(request("/v1/x?key=sk-attacker&a=b", field))
            assert b"sk-attacker" not in scene.upstreams[-1].written
            line, fields = head_of(scene)
            assert line == "GET /v1/x?a=b HTTP/1.1"
            assert ("authorization", f"Bearer {SECRET}") in fields
            detail = scene.records.of("decision")[0].detail or ""
            assert "query key" in detail
            assert slot is None or slot in detail
            assert "sk-attacker" not in detail

    run(test())


@pytest.mark.parametrize(
    ("field", "slot"), [one for one in OWN if one[1]], ids=[one[0] for one in OWN if one[1]]
)
def test_or_refused_where_the_credential_says_so(field: str, slot: str) -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of(client_credentials="deny", slots=("x-team",)))) as scene:
            answer = await scene.says(request("/v1/x", field))
            assert b"403 egressd: denied" in answer
            assert b"(reason client_credentials)" in answer
            assert scene.records.decisions() == [("deny", "client_credentials")]
            assert scene.records.of("decision")[0].detail == f"sent in {slot}"
            nothing_left(scene)

    run(test())


def test_what_hides_an_answer_from_the_mask_is_taken_out() -> None:
    async def test() -> None:
        fields = (
            "Range: bytes=0-1",
            'If-Range: "x"',
            "Accept-Encoding: br, gzip;q=0.5, zstd",
            "A-IM: gzip, vcdiff",
            "Accept-Charset: utf-32",
        )
        async with scene_of(Lender(lease_of())) as scene:
            await scene.says(request("/v1/x", *fields))
            seen = dict(head_of(scene)[1])
            assert "range" not in seen
            assert "if-range" not in seen
            assert "a-im" not in seen
            assert "accept-charset" not in seen
            assert seen["accept-encoding"] == "gzip"
        async with scene_of(Lender(lease_of(range=True))) as scene:
            await scene.says(request("/v1/x", *fields))
            assert dict(head_of(scene)[1])["range"] == "bytes=0-1"

    run(test())


async def _hangs() -> Lease | None:
    await asyncio.Event().wait()
    return None


async def _garbage() -> Lease | None:
    return {"material": SECRET}  # type: ignore[return-value]  # what a broken channel could hand over


@pytest.mark.parametrize(
    "lender",
    [
        pytest.param(lambda: Lender(None), id="control says no"),
        pytest.param(lambda: Lender(OSError(SECRET)), id="control is gone"),
        pytest.param(lambda: Lender(RuntimeError(SECRET)), id="asking raises"),
        pytest.param(lambda: Lender(_garbage), id="garbage comes"),
        pytest.param(lambda: Lender(lease_of(sandbox="sb-2")), id="another sandbox's lease comes"),
        pytest.param(lambda: Lender(lease_of(expires=time.time() - 1)), id="an expired lease comes"),
        pytest.param(
            lambda: Lender(lease_of(material=KEYS)),
            id="keys of another kind come",
        ),
    ],
)
def test_without_a_lease_nothing_leaves(
    lender: Callable[[], Lender], capfd: pytest.CaptureFixture[str]
) -> None:
    async def test() -> None:
        async with scene_of(lender()) as scene:
            answer = await scene.says(request("/v1/x", "Authorization: Bearer sk-own"))
            assert answer.startswith(b"HTTP/1.1 502 egressd: denied")
            assert b"(reason credential_unavailable)" in answer
            nothing_left(scene)

    run(test())
    assert SECRET not in capfd.readouterr().err


def test_a_broker_that_hangs_costs_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("egressd.gate.leases.TIMEOUT", 0.02)

    async def test() -> None:
        async with scene_of(Lender(_hangs)) as scene:
            scene.client.arrive(request())
            async with asyncio.timeout(5):
                while not scene.client.written:  # noqa: ASYNC110 # a state of an object that knows no event
                    await asyncio.sleep(0.01)
            assert b"credential_unavailable" in scene.client.written
            nothing_left(scene)

    run(test())


def test_without_a_broker_nothing_leaves() -> None:
    async def test() -> None:
        async with Scene(keyed(), tls=True) as scene:
            assert b"credential_unavailable" in await scene.says(request())
            nothing_left(scene)

    run(test())


def test_nothing_leaves_over_an_upstream_that_was_not_verified() -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of())) as scene:
            scene.context = None
            answer = await scene.says(request())
            assert answer.startswith(b"HTTP/1.1 403 egressd: denied")
            assert b"(reason credential_needs_tls)" in answer
            assert scene.records.ends() == ["credential_needs_tls"]
            nothing_left(scene)

    run(test())


def test_a_profile_that_only_observes_attaches_nothing() -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of())) as scene:
            sandbox = scene.engine.connection.sandbox
            values = sandbox.policy.effective.model_dump() | {
                "mode": "observe",
                "observe_until": "2999-01-01",
            }
            sandbox.policy = compile_policy(EffectivePolicy.model_validate(values))
            assert b"credential_unavailable" in await scene.says(request())
            nothing_left(scene)

    run(test())


@pytest.mark.parametrize(
    ("target", "fields", "reason"),
    [
        pytest.param("/v1/x", (), "credential_slot_missing", id="nowhere"),
        pytest.param(
            "/v1/x",
            ("Authorization: Bearer sk-own",),
            "credential_slot_missing",
            id="another key in its slot",
        ),
        pytest.param(f"/v1/{DUMMY}", (f"X-Key: {DUMMY}",), "placeholder_leak", id="in the path"),
        pytest.param(
            f"/v1/x?q={DUMMY}", (f"X-Key: {DUMMY}",), "placeholder_leak", id="under another key of the query"
        ),
        pytest.param("/v1/x", (f"X-Note: {DUMMY}",), "placeholder_leak", id="in another field"),
        pytest.param("/v1/x", (f"X-Key: sk-own, {DUMMY}",), "placeholder_leak", id="beside a key"),
        pytest.param("/v1/x", (f"X-Key: {DUMMY}", f"X-Key: {DUMMY}"), "placeholder_leak", id="twice"),
        pytest.param(
            "/v1/x", (f"X-Key: {DUMMY}", f"X-Note: {STRANGER}"), "placeholder_leak", id="another sandbox's"
        ),
    ],
)
def test_a_placeholder_belongs_into_its_slot(target: str, fields: tuple[str, ...], reason: str) -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of(PLACED))) as scene:
            answer = await scene.says(request(target, *fields))
            assert f"(reason {reason})".encode() in answer
            assert scene.records.decisions() == [("deny", reason)]
            nothing_left(scene)

    run(test())


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(request("/v1/x", f"Authorization: Bearer {DUMMY}"), id="its own, in a field"),
        pytest.param(
            request("/v1/x", f"Authorization: Bearer {STRANGER}"), id="another sandbox's, in a field"
        ),
        pytest.param(request(f"/v1/x?key={DUMMY}"), id="in the query"),
        pytest.param(request(f"/v1/x?key=%64{DUMMY[1:]}"), id="in the query, escaped"),
        pytest.param(
            request("/v1/x", f"Authorization: Basic {base64.b64encode(f'u:{DUMMY}'.encode()).decode()}"),
            id="in Basic",
        ),
    ],
)
def test_a_placeholder_goes_to_no_other_host(data: bytes) -> None:
    async def test() -> None:
        bare = keyed(credential=None)
        async with scene_of(Lender(lease_of(PLACED)), bare) as scene:
            assert b"(reason placeholder_leak)" in await scene.says(data)
            nothing_left(scene)

    run(test())


@pytest.mark.parametrize(
    "entries", [(keyed(),), (keyed(credential=None),)], ids=["with", "without a credential"]
)
@pytest.mark.parametrize("needle", [DUMMY, STRANGER], ids=["its own", "another sandbox's"])
def test_a_body_gives_no_placeholder_away(entries: tuple[EffectiveEntry, ...], needle: str) -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of(PLACED)), *entries) as scene:
            own = (f"X-Key: {DUMMY}",) if entries[0].credential else ()
            body = b'{"key": "' + needle.encode() + b'"}'
            data = request("/v1/x", *own, f"Content-Length: {len(body)}", method="POST") + body
            cut = len(data) - 8
            await scene.says(data[:cut])
            answer = await scene.says(data[cut:])
            assert b"(reason placeholder_leak)" in answer
            assert needle.encode() not in scene.upstreams[-1].written
            assert scene.records.ends() == ["placeholder_leak"]

    run(test())


def test_tokens_are_asked_for_only_where_the_credential_says_so() -> None:
    async def test() -> None:
        data = request("/oauth/token", method="POST", body=b"x=y")
        async with scene_of(Lender(lease_of())) as scene:
            assert b"(reason token_request)" in await scene.says(data)
            nothing_left(scene)
        async with scene_of(Lender(lease_of(token_requests=True))) as scene:
            await scene.says(data)
            assert await scene.origin_says(OK) == OK

    run(test())


def test_a_query_that_the_rule_spells_is_judged_without_the_key() -> None:
    async def test() -> None:
        rule = keyed(requests=("GET /v1/x?a=b",))
        async with scene_of(Lender(lease_of(Attach(query="key"))), rule) as scene:
            await scene.says(request("/v1/x?a=b"))
            assert head_of(scene)[0] == f"GET /v1/x?a=b&key={SECRET} HTTP/1.1"
        async with scene_of(Lender(lease_of(Attach(query="key"))), rule) as scene:
            assert b"query_not_allowed" in await scene.says(request("/v1/x?a=b&key=own"))
            nothing_left(scene)

    run(test())


def test_the_final_bytes_are_judged_by_the_rules_of_their_time() -> None:
    async def test() -> None:
        async with scene_of(
            Lender(lease_of(Attach(path="T"))),
            keyed(requests=("GET /a/*/b",)),
        ) as scene:
            await scene.says(request("/a/{T}/b"))
            assert head_of(scene)[0] == f"GET /a/{SECRET}/b HTTP/1.1"
        slashed = lease_of(Attach(path="T"), material={"type": "token", "value": "a/../b"})
        async with scene_of(Lender(slashed), keyed(requests=("GET /a/*/b",))) as scene:
            answer = await scene.says(request("/a/{T}/b"))
            assert b"(reason credential_unavailable)" in answer
            nothing_left(scene)

    run(test())


UPGRADE = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==",
)
ACCEPT = base64.b64encode(
    hashlib.sha1(
        b"MDEyMzQ1Njc4OWFiY2RlZg==258EAFA5-E914-47DA-95CA-C5AB0DC85B11", usedforsecurity=False
    ).digest()
)
SWITCHED = (
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Accept: " + ACCEPT + b"\r\n\r\n"
)


def test_a_websocket_gets_it_in_its_handshake_and_is_cut_when_it_is_taken_back() -> None:
    async def test() -> None:
        lender = Lender(lease_of(expires=time.time() + 600))
        async with scene_of(lender) as scene:
            own = "Sec-WebSocket-Protocol: chat, openai-insecure-api-key.sk-own"
            await scene.says(request("/ws", *UPGRADE, own))
            _, fields = head_of(scene)
            assert fields.count(("authorization", f"Bearer {SECRET}")) == 1
            assert ("upgrade", "websocket") in fields
            assert ("sec-websocket-protocol", "chat") in fields
            answer = await scene.origin_says(SWITCHED)
            assert answer.startswith(b"HTTP/1.1 101 ")
            for live in tuple(scene.engine.connection.sandbox.live):
                live.rejudge(time.time() + 3600)
            assert scene.client.state == "open", "that it expires does not cut what was begun"
            lender.leases.withdraw("lease-1")
            for live in tuple(scene.engine.connection.sandbox.live):
                live.rejudge(time.time())
            await scene.settle()
            assert scene.client.closed
            assert scene.records.ends() == ["policy_changed"]

    run(test())


@pytest.mark.parametrize(
    "entries",
    [
        pytest.param((keyed(credential="other"),), id="another credential"),
        pytest.param((keyed(credential=None),), id="none any more"),
        pytest.param((), id="no rule any more"),
    ],
)
def test_a_reload_that_changes_the_credential_cuts_what_is_open(entries: tuple[EffectiveEntry, ...]) -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of())) as scene:
            await scene.says(request())
            await scene.origin_says(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
            sandbox = scene.engine.connection.sandbox
            sandbox.policy = compile_policy(EffectivePolicy(profile="lab", entries=entries))
            for live in tuple(sandbox.live):
                live.rejudge(time.time())
            await scene.settle()
            assert scene.records.ends() == ["policy_changed"]

    run(test())


@pytest.mark.parametrize(
    "entries",
    [(keyed(credential="other"),), (keyed(credential=None),), ()],
    ids=["another", "none", "no rule"],
)
def test_a_reload_while_the_lease_is_asked_for_sends_nothing(entries: tuple[EffectiveEntry, ...]) -> None:
    async def test() -> None:
        go = asyncio.Event()

        async def slow() -> Lease:
            await go.wait()
            return lease_of()

        async with scene_of(Lender(slow)) as scene:
            await scene.says(request())
            sandbox = scene.engine.connection.sandbox
            sandbox.policy = compile_policy(EffectivePolicy(profile="lab", entries=entries))
            go.set()
            await scene.settle()
            assert b"(reason policy_changed)" in scene.client.written
            assert scene.records.decisions() == [("deny", "policy_changed")]
            nothing_left(scene)

    run(test())


S3 = Attach.model_validate({"sigv4": {"service": "s3", "region": "eu-west-1"}})
STS = Attach.model_validate({"sigv4": {"service": "sts", "region": "us-east-1"}})
FAKE = (
    "Authorization: AWS4-HMAC-SHA256 Credential=AKIDFAKE/20200101/us-east-1/s3/aws4_request,"
    " SignedHeaders=host, Signature=0"
)


def chunked(*chunks: bytes) -> bytes:
    """A body in aws-chunked, with signatures of the sandbox's own."""
    return b"".join(b"%x;chunk-signature=%s\r\n%s\r\n" % (len(chunk), b"0" * 64, chunk) for chunk in chunks)


def test_a_signature_of_the_sandboxs_own_becomes_ours() -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of(S3))) as scene:
            own = (FAKE, "X-Amz-Date: 20200101T000000Z", "X-Amz-Security-Token: own", "x-amz-meta-a: b")
            await scene.says(request("/b/k?X-Amz-Signature=own&list-type=2", *own))
            line, fields = head_of(scene)
            assert line == "GET /b/k?list-type=2 HTTP/1.1"
            seen = dict(fields)
            assert len(seen) == len(fields)
            assert seen["authorization"].startswith("AWS4-HMAC-SHA256 Credential=AKIDREAL/")
            assert "/eu-west-1/s3/aws4_request" in seen["authorization"]
            assert "x-amz-meta-a" in seen["authorization"]
            assert seen["x-amz-security-token"] == "t0ken"
            assert seen["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
            assert SECRET.encode() not in scene.upstreams[-1].written
            assert b"own" not in scene.upstreams[-1].written

    run(test())


@pytest.mark.parametrize("framed", ["content-length", "chunked"])
def test_a_body_that_must_be_seen_is_kept_and_signed(framed: str) -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of(STS))) as scene:
            body = b"Action=GetCallerIdentity&Version=2011-06-15"
            fields = (FAKE, "Expect: 100-continue")
            if framed == "chunked":
                head = request("/", *fields, "Transfer-Encoding: chunked", method="POST")
                pieces = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (body[:9], body[9:])] + [
                    b"0\r\n\r\n"
                ]
            else:
                head = request("/", *fields, f"Content-Length: {len(body)}", method="POST")
                pieces = [body[:9], body[9:]]
            assert await scene.says(head) == b"HTTP/1.1 100 Continue\r\n\r\n"
            for piece in pieces:
                assert scene.upstreams[-1].written == b""
                await scene.says(piece)
            seen = dict(head_of(scene)[1])
            assert seen["content-length"] == str(len(body))
            assert "transfer-encoding" not in seen
            assert "expect" not in seen
            assert "AKIDREAL" in seen["authorization"]
            assert scene.upstreams[-1].written.endswith(b"\r\n\r\n" + body)
            assert await scene.origin_says(OK) == OK
            assert scene.engine.connection.sandbox.signing == 0

    run(test())


def test_a_body_that_asks_for_keys_is_not_signed() -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of(STS))) as scene:
            data = request("/", FAKE, method="POST", body=b"Action=AssumeRole&RoleArn=x")
            assert b"(reason token_request)" in await scene.says(data)
            assert scene.records.ends() == ["token_request"]
            assert scene.records.of("end")[0].verdict == "deny"
            nothing_left(scene)

    run(test())


@pytest.mark.parametrize("framed", ["content-length", "chunked"])
def test_a_body_too_large_to_be_kept_is_refused(framed: str) -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of(STS))) as scene:
            size = 1024 * 1024 + 1
            if framed == "chunked":
                scene.client.arrive(request("/", "Transfer-Encoding: chunked", method="POST"))
                await scene.settle()
                for _ in range(17):
                    scene.client.arrive(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                    await scene.settle()
            else:
                await scene.says(request("/", f"Content-Length: {size}", method="POST"))
            assert b"HTTP/1.1 413 " in scene.client.written
            assert b"(reason unsignable)" in scene.client.written
            nothing_left(scene)

    run(test())


def test_signed_chunks_are_signed_anew_as_they_come_and_keep_their_length() -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of(S3))) as scene:
            body = chunked(b"a" * 70000, b"b" * 10, b"")
            fields = (
                FAKE,
                "x-amz-content-sha256: STREAMING-AWS4-HMAC-SHA256-PAYLOAD",
                "Content-Encoding: aws-chunked",
                "x-amz-decoded-content-length: 70010",
                f"Content-Length: {len(body)}",
            )
            await scene.says(request("/b/k", *fields, method="PUT"))
            before = len(scene.upstreams[-1].written)
            assert before
            for start in range(0, len(body), 30000):
                await scene.says(body[start : start + 30000])
            sent = scene.upstreams[-1].written[before:]
            assert len(sent) == len(body)
            assert b"0" * 64 not in sent
            assert sent.count(b";chunk-signature=") == 3
            assert await scene.origin_says(OK) == OK
            assert scene.engine.connection.sandbox.signing == 0

    run(test())


def test_chunks_that_are_framed_otherwise_end_the_request() -> None:
    async def test() -> None:
        async with scene_of(Lender(lease_of(S3))) as scene:
            fields = ("x-amz-content-sha256: STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "Content-Length: 100")
            await scene.says(request("/b/k", *fields, method="PUT"))
            answer = await scene.says(b"5;chunk-signature=xyz\r\nhello\r\n")
            assert b"(reason unsignable)" in answer
            assert b"hello" not in scene.upstreams[-1].written
            assert scene.upstreams[-1].closed

    run(test())


def test_what_waits_to_be_signed_is_bounded_and_counted_no_longer_than_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("egressd.gate.inspector.outgoing.SIGNING_MOST", 1000)

    async def test() -> None:
        async with scene_of(Lender(lease_of(STS))) as scene:
            sandbox = scene.engine.connection.sandbox
            sandbox.signing = 900
            answer = await scene.says(request("/", method="POST", body=b"x" * 200))
            assert b"(reason unsignable)" in answer
            nothing_left(scene)
        assert sandbox.signing == 900

    run(test())
