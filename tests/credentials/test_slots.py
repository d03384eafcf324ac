"""The slots of a request: every place where a key is looked for is cleared, and nothing else is touched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.credentials.slots import AWS_QUERY, HEADERS, QUERY, clear, fold, fold_parameter

KEY = b"sk-attacker-0123456789"

NAMES = [
    *(
        b"Authorization",
        b"AUTHORIZATION",
        b"authorization",
        b"Cookie",
        b"x-api-key",
        b"X_Api_Key",
        b"api-key",
    ),
    *(
        b"x.api.key",
        b"X-Goog-Api-Key",
        b"PRIVATE-TOKEN",
        b"Job-Token",
        b"x-amz-security-token",
        b"X-Amz-Date",
    ),
    *(
        b"xi-api-key",
        b"DD-API-KEY",
        b"DD-APPLICATION-KEY",
        b"X-Shopify-Access-Token",
        b"Ocp-Apim-Subscription-Key",
    ),
    *(b"X-Vault-Token", b"X-Auth-Token", b"X-Auth-Key", b"CF-Access-Client-Secret", b"X-Amzn-Authorization"),
    *(b"Access-Token", b"Auth_Token", b"App-Key", b"Token", b"X-JWT", b"password", b"Secret-Key"),
]


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_a_field_that_holds_a_key_goes_in_every_spelling(name: bytes) -> None:
    cleared = clear("/v1/x", ((b"Host", b"a.example"), (name, KEY), (b"Accept", b"*/*")))
    assert cleared.fields == ((b"Host", b"a.example"), (b"Accept", b"*/*"))
    assert cleared.found == (fold(name),)


STAY = [
    *(b"Accept", b"Content-Type", b"Idempotency-Key", b"Sec-WebSocket-Key", b"X-CSRF-Token", b"X-Amz-Target"),
    *(
        b"x-amz-content-sha256",
        b"x-amz-meta-key",
        b"x-amz-server-side-encryption-customer-key",
        b"anthropic-version",
    ),
    *(
        b"X-Ms-Continuation-Token",
        b"Surrogate-Key",
        b"If-None-Match",
        b"User-Agent",
        b"Git-Protocol",
        b"OpenAI-Beta",
    ),
]


@pytest.mark.parametrize("name", STAY, ids=str)
def test_a_field_that_holds_no_key_stays_as_it_was(name: bytes) -> None:
    fields = ((name, b"value"),)
    assert clear("/", fields).fields == fields
    assert clear("/", fields).found == ()


def test_a_slot_that_the_credential_names_goes_too() -> None:
    fields = ((b"X-Team", b"a"), (b"X-Other", b"b"))
    assert clear("/", fields, headers=frozenset({"x-team"})).fields == ((b"X-Other", b"b"),)


def test_an_empty_slot_is_cleared_and_not_found() -> None:
    cleared = clear("/?key=&api_key", ((b"Authorization", b"  "),))
    assert (cleared.target, cleared.fields, cleared.found) == ("/", (), ())


@pytest.mark.parametrize(
    ("target", "left", "found"),
    [
        pytest.param("/a?key=k", "/a", ("query key",), id="alone"),
        pytest.param("/a?x=1&key=k&y=2", "/a?x=1&y=2", ("query key",), id="between others"),
        pytest.param("/a?key=k&key=l", "/a", ("query key",), id="twice"),
        pytest.param(
            "/a?authToken=k&clientSecret=k&x=1",
            "/a?x=1",
            ("query authtoken", "query clientsecret"),
            id="as one word",
        ),
        pytest.param(
            "/a?page_token=k&nextToken=k", "/a?page_token=k&nextToken=k", (), id="where a list goes on"
        ),
        pytest.param("/a?API_KEY=k&Api-Key=k", "/a", ("query api_key",), id="in capitals and with a hyphen"),
        pytest.param("/a?%6Bey=k&x=1", "/a?x=1", ("query key",), id="escaped"),
        pytest.param("/a?key[]=k&key[0]=k", "/a", ("query key",), id="as a list"),
        pytest.param("/a?+key=k&%20key=k", "/a", ("query key",), id="behind a space"),
        pytest.param("/a?access.token=k", "/a", ("query access_token",), id="with a dot"),
        pytest.param("/a?x=1;key=k;y=2", "/a?x=1;y=2", ("query key",), id="behind a semicolon"),
        pytest.param("/a?key%00x=k", "/a", ("query key",), id="before a NUL"),
        pytest.param(
            "/a?X-Amz-Credential=AK%2Fx&X-Amz-Signature=0&prefix=p",
            "/a?prefix=p",
            ("query x_amz_credential", "query x_amz_signature"),
            id="a presigned URL",
        ),
        pytest.param("/a?x=1&&y=2", "/a?x=1&&y=2", (), id="nothing there: as it was"),
        pytest.param("/a?", "/a?", (), id="an empty query"),
        pytest.param("/a", "/a", (), id="no query"),
        pytest.param(
            "/a?keys=1&monkey=2&pageToken=3&key.x=4",
            "/a?keys=1&monkey=2&pageToken=3&key.x=4",
            (),
            id="others",
        ),
        pytest.param(
            "/a;jsessionid=k/b;v=1;%4ASESSIONID=l?x=1",
            "/a/b;v=1?x=1",
            ("path jsessionid",),
            id="a session in the path",
        ),
        pytest.param("/a;v=1/b?x=1", "/a;v=1/b?x=1", (), id="another parameter in the path"),
        pytest.param("/a?x=key=1", "/a?x=key=1", (), id="inside a value"),
    ],
)
def test_query_keys(target: str, left: str, found: tuple[str, ...]) -> None:
    cleared = clear(target, ())
    assert (cleared.target, cleared.found) == (left, found)


@pytest.mark.parametrize(
    ("value", "left"),
    [
        pytest.param(b"chat, json", b"chat, json", id="none"),
        pytest.param(b"realtime, openai-insecure-api-key.sk-x, beta", b"realtime, beta", id="OpenAI's"),
        pytest.param(
            b"base64url.bearer.authorization.k8s.io.abc, v4.channel.k8s.io",
            b"v4.channel.k8s.io",
            id="of Kubernetes",
        ),
        pytest.param(b"bearer, sk-x", b"", id="behind its mark"),
        pytest.param(b"Access_Token,sk-x,chat", b"chat", id="behind another"),
    ],
)
def test_subprotocols(value: bytes, left: bytes) -> None:
    cleared = clear("/", ((b"Sec-WebSocket-Protocol", value),))
    assert cleared.fields == (((b"Sec-WebSocket-Protocol", left),) if left else ())
    assert bool(cleared.found) == (left != value)


names = st.sampled_from(sorted(HEADERS)).flatmap(
    lambda name: st.sampled_from([name, name.upper(), name.title(), name.replace("-", "_")])
)
keys = st.sampled_from(sorted(QUERY | AWS_QUERY))
texts = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), max_size=20)


@given(
    st.lists(st.tuples(st.one_of(names, texts.filter(bool)), texts)),
    st.lists(st.tuples(st.one_of(keys, texts), texts)),
)
def test_clearing_twice_is_clearing_once_and_leaves_no_slot(
    fields: list[tuple[str, str]], pairs: list[tuple[str, str]]
) -> None:
    raw = tuple((name.encode(), value.encode()) for name, value in fields)
    target = "/p?" + "&".join(f"{key}={value}" for key, value in pairs)
    cleared = clear(target, raw)
    again = clear(cleared.target, cleared.fields)
    assert (again.target, again.fields, again.found) == (cleared.target, cleared.fields, ())
    assert not {fold(name) for name, _ in cleared.fields} & HEADERS
    assert set(cleared.fields) <= set(raw) | {
        field for field in cleared.fields if fold(field[0]).startswith("sec-w")
    }


@given(st.text())
def test_folding_is_total(text: str) -> None:
    fold_parameter(text)
    fold(text.encode("utf-8", "surrogatepass"))
