"""Attaching, on requests alone: one credential in one slot, or a refusal; nothing of the sandbox's own, nothing of both."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from egressd.credentials.attach import Attached, Body, Prepared, Refused, attach, prepare
from egressd.credentials.lease import AwsKeys, Lease, Token
from egressd.credentials.slots import HEADERS, Field, fold
from egressd.policy.credential import Attach, Placeholder
from egressd.policy.reasons import Reason

NOW = 1_800_000_000.0
SECRET = "s3cr3t-0123456789"
DUMMY = "dummy-5f1d7a0c9b3e4a62d8"
HOST = "api.example.com"
OWN = b"own-k3y"
KEYS = AwsKeys(access_key_id="AKIDREAL", secret_access_key=SecretStr(SECRET))
PLACED = Attach(
    placeholder=Placeholder(variable="KEY", headers=["authorization", "x-key", "cookie"], query=["key"])
)


def lease_of(way: Attach, secret: str = SECRET, **changes: Any) -> Lease:
    values: dict[str, Any] = {
        "id": "l-1",
        "credential": "key",
        "sandbox": "sb-1",
        "material": KEYS if way.sigv4 is not None else Token(value=SecretStr(secret)),
        "attach": way,
        "expires": NOW + 600,
        "placeholder": DUMMY if way.placeholder is not None else None,
    }
    return Lease(**(values | changes))


def carry(
    lease: Lease, target: str = "/v1/x", fields: tuple[Field, ...] = (), method: str = "GET"
) -> Attached | Refused:
    """Both steps, as the inspector takes them."""
    prepared = prepare(lease, method, target, ((b"Host", HOST.encode()), *fields))
    if isinstance(prepared, Refused):
        return prepared
    assert SECRET not in repr(prepared)
    return attach(lease, HOST, method, prepared.target, prepared.fields, NOW)


WAYS = {
    "header": Attach(header="x-api-key"),
    "bearer": Attach(bearer=True),
    "basic": Attach(basic="x-access-token"),
    "query": Attach(query="key"),
    "path": Attach(path="TOKEN"),
    "cookie": Attach(cookie="session"),
    "placeholder": PLACED,
    "sigv4": Attach.model_validate({"sigv4": {"service": "s3", "region": "eu-west-1"}}),
}


@pytest.mark.parametrize(
    ("way", "secret"),
    [
        pytest.param(way, secret, id=f"{way.kind}: {name}")
        for way in WAYS.values()
        if way.sigv4 is None
        for name, secret in (
            ("a line break", "a\r\nX: b"),
            ("a NUL", "a\0b"),
            ("a letter outside ASCII", "schlüssel"),
            ("a space in front", " a"),
            ("a space behind", "a "),
            ("nothing", ""),
            ("a DEL", "a\x7f"),
        )
    ],
)
def test_a_secret_that_would_be_more_than_a_value_is_not_attached(way: Attach, secret: str) -> None:
    target = "/bot{TOKEN}/x" if way.path else "/v1/x"
    fields = ((b"x-key", DUMMY.encode()),) if way.placeholder else ()
    assert carry(lease_of(way, secret), target, fields) == Refused(
        Reason.CREDENTIAL_UNAVAILABLE, "the secret does not fit into its slot"
    )


@pytest.mark.parametrize(
    ("way", "secret"),
    [
        pytest.param(WAYS["bearer"], "two words", id="a bearer of two words"),
        pytest.param(WAYS["cookie"], "a;b=c", id="a cookie that ends"),
        pytest.param(WAYS["cookie"], "a,b", id="a cookie with a comma"),
        pytest.param(WAYS["path"], "..", id="a path that goes up"),
        pytest.param(Attach(basic="a:b"), SECRET, id="a user with a colon"),
    ],
)
def test_a_secret_that_its_slot_does_not_hold(way: Attach, secret: str) -> None:
    result = carry(lease_of(way, secret), "/bot/{TOKEN}/x" if way.path else "/v1/x")
    assert isinstance(result, Refused)
    assert result.reason is Reason.CREDENTIAL_UNAVAILABLE


@pytest.mark.parametrize("material", ["aws", "token"])
def test_keys_of_another_kind_attach_nothing(material: str) -> None:
    if material == "aws":
        result = carry(lease_of(WAYS["bearer"], material=KEYS))
    else:
        result = carry(lease_of(WAYS["sigv4"], material=Token(value=SecretStr(SECRET))))
    assert isinstance(result, Refused)
    assert result.reason is Reason.CREDENTIAL_UNAVAILABLE


def test_an_expired_lease_attaches_nothing() -> None:
    prepared = prepare(lease_of(WAYS["bearer"]), "GET", "/", ())
    assert isinstance(prepared, Prepared)
    result = attach(lease_of(WAYS["bearer"]), HOST, "GET", "/", prepared.fields, NOW + 600)
    assert result == Refused(Reason.CREDENTIAL_UNAVAILABLE, "the lease has expired")


@pytest.mark.parametrize(
    ("target", "found"),
    [
        pytest.param("/bot{TOKEN}/x", f"/bot{SECRET}/x", id="in a segment"),
        pytest.param("/{TOKEN}", f"/{SECRET}", id="alone"),
        pytest.param("/a/%7BTOKEN%7D?x={y}", f"/a/{SECRET}?x={{y}}", id="escaped"),
        pytest.param("/a/x", None, id="nowhere"),
        pytest.param("/a?x={TOKEN}", None, id="in the query alone"),
        pytest.param("/{TOKEN}/{TOKEN}", None, id="twice"),
        pytest.param("/{TOKEN}?x={TOKEN}", None, id="in both"),
        pytest.param("/{token}", None, id="in another case"),
        pytest.param("/{TOKEN", None, id="half"),
    ],
)
def test_the_place_in_the_path(target: str, found: str | None) -> None:
    result = carry(lease_of(WAYS["path"]), target)
    if found is None:
        assert isinstance(result, Refused)
        assert result.reason is Reason.CREDENTIAL_SLOT_MISSING
    else:
        assert isinstance(result, Attached)
        assert (result.target, result.judged) == (found, found)


def test_a_secret_in_a_path_stays_in_its_segment() -> None:
    result = carry(lease_of(WAYS["path"], "a/b?c#d;e%f:g"), "/x/{TOKEN}/y")
    assert isinstance(result, Attached)
    assert result.target == "/x/a%2Fb%3Fc%23d%3Be%25f:g/y"


@pytest.mark.parametrize(
    ("target", "sent"),
    [
        pytest.param("/x", f"/x?key={SECRET}", id="no query"),
        pytest.param("/x?", f"/x?key={SECRET}", id="an empty one"),
        pytest.param("/x?a=b", f"/x?a=b&key={SECRET}", id="one"),
        pytest.param("/x?a=b&", f"/x?a=b&key={SECRET}", id="one that ends open"),
        pytest.param("/x?key=own", f"/x?key={SECRET}", id="its own"),
        pytest.param("/x?KEY=own&%6bey=own&a=b", f"/x?a=b&key={SECRET}", id="its own in other spellings"),
    ],
)
def test_a_key_in_the_query(target: str, sent: str) -> None:
    result = carry(lease_of(WAYS["query"]), target)
    assert isinstance(result, Attached)
    assert result.target == sent
    assert SECRET not in result.judged


def test_a_secret_in_a_query_stays_one_value() -> None:
    result = carry(lease_of(WAYS["query"], "a&b=c#d+e f%"))
    assert isinstance(result, Attached)
    assert parse_qsl(result.target.partition("?")[2]) == [("key", "a&b=c#d+e f%")]


@pytest.mark.parametrize(
    ("accepted", "asked"),
    [
        pytest.param((), b"identity", id="nothing said"),
        pytest.param((b"br, zstd",), b"identity", id="nothing that is read"),
        pytest.param((b"br, GZIP, deflate",), b"gzip", id="gzip among others"),
        pytest.param((b"br", b"gzip;q=0.3"), b"gzip", id="in a second field"),
        pytest.param((b"gzip;q=0",), b"identity", id="gzip refused"),
        pytest.param((b"gzip; q=0.000, *",), b"identity", id="gzip refused, anything else not"),
        pytest.param((b"*",), b"identity", id="anything"),
    ],
)
def test_the_codings_that_are_asked_for(accepted: tuple[bytes, ...], asked: bytes) -> None:
    prepared = prepare(
        lease_of(WAYS["bearer"]), "GET", "/", tuple((b"accept-encoding", value) for value in accepted)
    )
    assert isinstance(prepared, Prepared)
    assert [value for name, value in prepared.fields if fold(name) == "accept-encoding"] == [asked]


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        pytest.param(((b"X-Key", DUMMY),), (b"X-Key", SECRET), id="alone"),
        pytest.param(
            ((b"Authorization", f"Bearer {DUMMY}"),), (b"Authorization", f"Bearer {SECRET}"), id="a bearer"
        ),
        pytest.param(
            ((b"authorization", f"token  {DUMMY}"),), (b"authorization", f"token  {SECRET}"), id="a token"
        ),
        pytest.param(
            ((b"Authorization", "Basic " + base64.b64encode(f"x-access-token:{DUMMY}".encode()).decode()),),
            (b"Authorization", "Basic " + base64.b64encode(f"x-access-token:{SECRET}".encode()).decode()),
            id="a password",
        ),
        pytest.param(
            ((b"Authorization", "basic " + base64.b64encode(f"{DUMMY}:".encode()).decode().rstrip("=")),),
            (b"Authorization", "Basic " + base64.b64encode(f"{SECRET}:".encode()).decode()),
            id="a user",
        ),
        pytest.param(
            ((b"Cookie", f"a=own; sid={DUMMY}; b=own"),), (b"Cookie", f"sid={SECRET}"), id="a cookie"
        ),
    ],
)
def test_a_placeholder_in_its_slot(fields: tuple[tuple[bytes, str], ...], sent: tuple[bytes, str]) -> None:
    result = carry(lease_of(PLACED), fields=tuple((name, value.encode()) for name, value in fields))
    assert isinstance(result, Attached)
    assert [field for field in result.fields if fold(field[0]) in ("authorization", "x-key", "cookie")] == [
        (sent[0], sent[1].encode())
    ]


def basic(text: str) -> bytes:
    return b"Basic " + base64.b64encode(text.encode())


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(((b"X-Key", b"own " + DUMMY.encode()),), id="behind a key"),
        pytest.param(((b"X-Key", DUMMY.encode() + b" own"),), id="before a key"),
        pytest.param(((b"X-Key", DUMMY.encode() * 2),), id="twice"),
        pytest.param(((b"X-Key", b"x" + DUMMY.encode()),), id="as a part of something"),
        pytest.param(((b"Authorization", basic(f"own:{DUMMY}")),), id="beside a user that could be a key"),
        pytest.param(((b"Authorization", basic(f"{DUMMY}:own")),), id="beside a password"),
        pytest.param(((b"Authorization", basic(f"{DUMMY}:{DUMMY}")),), id="in both halves"),
        pytest.param(
            ((b"X-Key", DUMMY.encode()), (b"x_key", DUMMY.encode())), id="in two spellings of one slot"
        ),
        pytest.param(((b"Cookie", f"a={DUMMY}; b={DUMMY}".encode()),), id="in two cookies"),
        pytest.param(((b"X-Key", DUMMY.encode()), (b"X-Api-Key", DUMMY.encode())), id="in another slot too"),
        pytest.param(
            ((b"X-Key", DUMMY.encode()), (b"Referer", b"https://x/?k=" + DUMMY.encode())), id="in Referer"
        ),
    ],
)
def test_a_placeholder_beside_its_slot(fields: tuple[Field, ...]) -> None:
    result = carry(lease_of(PLACED), fields=fields)
    assert isinstance(result, Refused)
    assert result.reason is Reason.PLACEHOLDER_LEAK


def test_a_signature_says_what_becomes_of_the_body() -> None:
    def body(way: str, *fields: Field, service: str = "s3") -> Body | Reason:
        attach_by = (
            Attach.model_validate({"sigv4": {"service": service, "region": "r"}})
            if way == "sigv4"
            else WAYS[way]
        )
        prepared = prepare(lease_of(attach_by), "PUT", "/", fields, has_body=True)
        return prepared.reason if isinstance(prepared, Refused) else prepared.body

    def says(value: bytes) -> Field:
        return (b"X-Amz-Content-Sha256", value)

    assert body("bearer") is Body.PASSES
    assert body("sigv4") is Body.PASSES
    assert body("sigv4", says(b"0" * 64)) is Body.PASSES
    assert body("sigv4", says(b"STREAMING-UNSIGNED-PAYLOAD-TRAILER")) is Body.PASSES
    assert body("sigv4", says(b"STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER")) is Body.CHUNKS
    assert body("sigv4", says(b"STREAMING-AWS4-ECDSA-P256-SHA256-PAYLOAD")) is Reason.UNSIGNABLE
    assert body("sigv4", service="sts") is Body.WHOLE
    assert body("sigv4", says(b"0" * 64), service="bedrock") is Body.WHOLE
    assert body("sigv4", (b"Content-Length", b"1048576"), service="bedrock") is Body.WHOLE
    assert body("sigv4", (b"Content-Length", b"1048577"), service="bedrock") is Reason.UNSIGNABLE


names = st.sampled_from(sorted(HEADERS)).flatmap(
    lambda name: st.sampled_from([name, name.upper(), name.replace("-", "_"), name.title()])
)
others = st.sampled_from(
    ["accept", "X-Note", "content-type", "x-key", "Range", "Accept-Encoding", "x-amz-meta-a"]
)
values = st.sampled_from(
    [
        OWN,
        b"Bearer " + OWN,
        DUMMY.encode(),
        b"Bearer " + DUMMY.encode(),
        b"",
        b"text",
        basic(f"x-access-token:{DUMMY}"),
    ]
)
pieces = st.sampled_from(
    [
        "a=b",
        "key=own-k3y",
        f"key={DUMMY}",
        "API-KEY=own-k3y",
        "%6Bey=own-k3y",
        "x=1;key=own-k3y",
        "",
        "X-Amz-Signature=own-k3y",
    ]
)
paths = st.sampled_from(["/v1/x", "/bot{TOKEN}/x", "/%7BTOKEN%7d", f"/{DUMMY}", "/{TOKEN}/{TOKEN}"])


@given(
    st.sampled_from(sorted(WAYS)),
    paths,
    st.lists(pieces, max_size=4),
    st.lists(st.tuples(st.one_of(names, others), values), max_size=6),
    st.sampled_from(["strip", "deny"]),
)
def test_what_leaves_has_the_credential_once_and_nothing_else(
    name: str, path: str, query: list[str], fields: list[tuple[str, bytes]], client: str
) -> None:
    """The law of this file: never a bare request, never one with two keys, never one with a placeholder."""
    target = f"{path}?{'&'.join(query)}" if query else path
    result = carry(
        lease_of(WAYS[name], client_credentials=client),
        target,
        tuple((field.encode(), value) for field, value in fields),
    )
    if isinstance(result, Refused):
        assert SECRET not in result.detail
        return
    sent = [result.target, *(value.decode("latin-1") for _, value in result.fields)]
    texts = [unquote(text) for text in sent]
    texts += [base64.b64decode(text[6:]).decode() for text in sent if text.startswith("Basic ")]
    whole = "\n".join(texts)
    slots = [fold(field) for field, _ in result.fields]
    assert name != "placeholder" or DUMMY not in whole, "with other ways, the inspector looks for it"
    assert SECRET not in repr(result)
    if name == "sigv4":
        assert whole.count("Credential=AKIDREAL/") == 1
        assert SECRET not in whole
    elif name == "placeholder":
        assert whole.count(SECRET) >= 1
        assert all(
            slots.count(slot) == 1 for slot, value in zip(slots, texts[1:], strict=False) if SECRET in value
        )
    else:
        assert whole.count(SECRET) == 1
    known = [slot for slot in slots if slot in HEADERS or slot in ("x-key" if name == "placeholder" else "")]
    assert len(known) == len(set(known))
    assert OWN.decode() not in "".join(
        value.decode("latin-1") for field, value in result.fields if fold(field) in HEADERS
    )
    if name != "sigv4":
        assert "own-k3y" not in unquote(result.target)
    assert "own-k3y" not in [
        value for key, value in parse_qsl(result.target.partition("?")[2]) if key.startswith("X-Amz")
    ]
    assert slots.count("accept-encoding") == 1
    assert "range" not in slots


@given(
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0x10FFFF), max_size=30),
    st.sampled_from(sorted(WAYS)),
)
def test_any_secret_is_attached_whole_or_not_at_all(secret: str, name: str) -> None:
    if name == "sigv4":
        return
    target = "/bot{TOKEN}/x" if name == "path" else "/v1/x"
    fields = ((b"x-key", DUMMY.encode()),) if name == "placeholder" else ()
    result = carry(lease_of(WAYS[name], secret), target, fields)
    if isinstance(result, Refused):
        return
    assert all(b"\r" not in value and b"\n" not in value for _, value in result.fields)
    assert result.target.isascii()
    assert " " not in result.target
    assert "#" not in result.target
    if name == "query":
        assert result.target == f"/v1/x?key={quote(secret, safe='')}"
    if name == "path":
        assert unquote(result.target.removeprefix("/bot").removesuffix("/x")) == secret


@given(st.text(), st.text(), st.lists(st.tuples(st.binary(), st.binary())), st.sampled_from(sorted(WAYS)))
def test_preparing_is_total(method: str, target: str, fields: list[Field], name: str) -> None:
    prepare(lease_of(WAYS[name]), method, target, tuple(fields), has_body=True)
