"""A body matches only where every reader of it reads the document that was judged."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.policy.bodies import MOST, Conditions, is_within, refuses, refuses_head, show

DOWNLOAD: Conditions = (("operation", ("download",)),)
GOOD = b'{"operation": "download", "objects": [{"oid": "a", "size": 1}]}'


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(GOOD, id="as git-lfs sends it"),
        pytest.param(b' \r\n\t{"operation":"download"}\n', id="white space around it"),
        pytest.param(b'{"\\u006fperation":"down\\u006coad"}', id="escapes that mean the same"),
        pytest.param(
            '{"operation":"download","é":"\\ud83d\\ude00"}'.encode(), id="letters and a pair of surrogates"
        ),
        pytest.param(
            b'{"operation":"download","a":{"operation":"upload"}}', id="another object has another one"
        ),
        pytest.param(b'{"operation":"download","n":' + b"9" * 4000 + b"}", id="a large number elsewhere"),
    ],
)
def test_a_body_that_says_so_matches(body: bytes) -> None:
    assert refuses(DOWNLOAD, body) is None


@pytest.mark.parametrize(
    ("body", "why"),
    [
        pytest.param(b"", "not JSON", id="nothing"),
        pytest.param(b"operation=download", "not JSON", id="a form"),
        pytest.param(GOOD[:-1], "not JSON", id="cut short"),
        pytest.param(GOOD + b"x", "not JSON", id="junk behind it"),
        pytest.param(GOOD + GOOD, "not JSON", id="two documents"),
        pytest.param(GOOD + b"\0", "not JSON", id="a NUL behind it"),
        pytest.param(b"\xef\xbb\xbf" + GOOD, "not JSON", id="a byte order mark"),
        pytest.param(GOOD.decode().encode("utf-16"), "not UTF-8", id="UTF-16"),
        pytest.param(GOOD.decode().encode("utf-16-le"), "not JSON", id="UTF-16 without a mark"),
        pytest.param(GOOD.decode().encode("utf-32-be"), "not JSON", id="UTF-32"),
        pytest.param(b'{"operation":"download","a":"\xff"}', "not UTF-8", id="a byte that is no UTF-8"),
        pytest.param(b'{"operation":"download","a":"\xc0\xaf"}', "not UTF-8", id="an overlong form"),
        pytest.param(b'{"operation":"download","a":"\xed\xa0\x80"}', "not UTF-8", id="a surrogate in UTF-8"),
        pytest.param(b"[" + GOOD + b"]", "one JSON object", id="a batch"),
        pytest.param(b'"download"', "one JSON object", id="a text"),
        pytest.param(b"{}", "'operation' is not", id="without the key"),
        pytest.param(b'{"operation":"upload"}', "'operation' is not", id="another value"),
        pytest.param(b'{"operation":"Download"}', "'operation' is not", id="another case"),
        pytest.param(b'{"operation":["download"]}', "'operation' is not", id="a list"),
        pytest.param(b'{"operation":null}', "'operation' is not", id="null"),
        pytest.param(b'{"operation":"download\\u0000"}', "'operation' is not", id="a NUL in the value"),
        pytest.param(b'{"operation":"download","operation":"upload"}', "twice", id="the key twice"),
        pytest.param(
            b'{"operation":"upload","operation":"download"}', "twice", id="the key twice, ours last"
        ),
        pytest.param(b'{"operation":"download","Operation":"upload"}', "twice", id="in another case"),
        pytest.param(
            b'{"operation":"download","\\u004fperation":"upload"}', "twice", id="in another case, escaped"
        ),
        pytest.param(
            '{"operation":"download","operatiﬁ":1,"operatifi":2}'.encode(), "twice", id="a ligature"
        ),
        pytest.param('{"task":"a","ta\u017fk":"b"}'.encode(), "twice", id="a long s, which Go folds"),
        pytest.param('{"ok":"a","o\u212a":"b"}'.encode(), "twice", id="a Kelvin sign, which Go folds"),
        pytest.param(
            '{"operation":"download","\uff4fperation":"upload"}'.encode(), "twice", id="a wide letter"
        ),
        pytest.param(b'{"operation":"download","operation ":"upload"}', "twice", id="with a blank"),
        pytest.param(b'{"operation":"download","operation\\u0000":"upload"}', "NUL", id="with a NUL"),
        pytest.param(b'{"operation":"download","a":{"b":1,"b":2}}', "twice", id="twice, further down"),
        pytest.param(
            b'{"operation":"download","a":"\\ud800"}', "surrogate", id="half a surrogate in a value"
        ),
        pytest.param(
            b'{"operation":"download","operation\\udc00":1}', "surrogate", id="half a surrogate in a key"
        ),
        pytest.param(b'{"operation":"download","a":NaN}', "number", id="NaN"),
        pytest.param(b'{"operation":"download","a":-Infinity}', "number", id="infinity"),
        pytest.param(b'{"operation":"download","a":1e999}', "too large", id="a number that overflows"),
        pytest.param(
            b'{"operation":"download","a":' + b"9" * 5000 + b"}", "not JSON", id="a number of 5,000 digits"
        ),
        pytest.param(b'{"operation":"download","a":01}', "not JSON", id="a leading zero"),
        pytest.param(b'{"operation":"download",}', "not JSON", id="a comma too many"),
        pytest.param(b'{"operation":"download"/*,*/}', "not JSON", id="a comment"),
        pytest.param(b"{'operation':'download'}", "not JSON", id="single quotes"),
        pytest.param(b'{operation:"download"}', "not JSON", id="no quotes"),
        pytest.param(b'{"operation":"down\tload"}', "not JSON", id="a raw tab in a text"),
        pytest.param(b'{"operation":"download","a":' + b"[" * 70 + b"]" * 70 + b"}", "deeply", id="deep"),
        pytest.param(b"[" * 60_000, "deeply", id="deeper than any stack"),
        pytest.param(b'{"operation":"download","a":"' + b"a" * MOST + b'"}', "larger", id="large"),
    ],
)
def test_a_body_that_could_mean_something_else_does_not(body: bytes, why: str) -> None:
    found = refuses(DOWNLOAD, body)
    assert found is not None
    assert why in found


@pytest.mark.parametrize(
    ("wanted", "given", "matches"),
    [
        ("true", "true", True),
        ("true", "1", False),
        ("1", "true", False),
        ("1", "1.0", False),
        ("1", '"1"', False),
        ('"true"', "true", False),
        ("1", "1", True),
        ("-0", "0", True),
    ],
)
def test_a_value_has_its_type(wanted: str, given: str, matches: bool) -> None:
    body = f'{{"k": {given}}}'.encode()
    assert (refuses((("k", (json.loads(wanted),)),), body) is None) is matches


def test_any_of_several_values_will_do_and_every_key_must() -> None:
    conditions: Conditions = (("a", ("x", 2)), ("b", (True,)))
    assert refuses(conditions, b'{"a": 2, "b": true}') is None
    assert refuses(conditions, b'{"a": "x", "b": true, "c": 1}') is None
    assert refuses(conditions, b'{"a": "x"}') == "'b' is not what the rule names"
    assert show(conditions) == '{"a": ["x", 2], "b": true}'


JSON = [(b"Content-Type", b"application/json")]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        pytest.param(JSON, None, id="JSON"),
        pytest.param(
            [(b"content-type", b"application/vnd.git-lfs+json; charset=utf-8")], None, id="a kind of JSON"
        ),
        pytest.param([(b"content-type", b'Application/JSON;charset="UTF-8"')], None, id="in other letters"),
        pytest.param([*JSON, (b"content-encoding", b"identity")], None, id="no coding"),
        pytest.param([], "content type", id="no type"),
        pytest.param([*JSON, *JSON], "content type", id="two types"),
        pytest.param([(b"content-type", b"text/json")], "content type", id="another type"),
        pytest.param(
            [(b"content-type", b"application/json, text/plain")], "content type", id="a list of types"
        ),
        pytest.param([(b"content-type", b"application/jsonp")], "content type", id="nearly it"),
        pytest.param([(b"content-type", b"application/json; charset=utf-7")], "content type", id="UTF-7"),
        pytest.param(
            [(b"content-type", b"application/json; charset=utf-8; charset=utf-16")],
            "content type",
            id="two charsets",
        ),
        pytest.param([(b"content-type", b"application/json; boundary=x")], "content type", id="a boundary"),
        pytest.param([(b"content-type", b"multipart/form-data; boundary=x")], "content type", id="a form"),
        pytest.param([*JSON, (b"Content-Encoding", b"gzip")], "coded", id="gzip"),
        pytest.param([*JSON, (b"content-encoding", b"identity, gzip")], "coded", id="two codings"),
        pytest.param([*JSON, (b"content-range", b"bytes 0-1/2")], "part", id="a part"),
        pytest.param([*JSON, (b"content-length", b"65537")], "larger", id="one byte too many"),
        pytest.param([*JSON, (b"content-length", b"65536")], None, id="as many as there may be"),
    ],
)
def test_the_head_says_whether_a_body_can_match(fields: list[tuple[bytes, bytes]], why: str | None) -> None:
    found = refuses_head(fields, has_body=True)
    assert found is None if why is None else found is not None and why in found


def test_without_a_body_nothing_matches() -> None:
    assert refuses_head(JSON, has_body=False) == "there is no body"


SCALARS = st.one_of(st.sampled_from(["a", "b", True, False, 0, 1]))
CONDITIONS = st.dictionaries(st.sampled_from("xyz"), st.lists(SCALARS, min_size=1, max_size=3)).map(
    lambda made: tuple((key, tuple(values)) for key, values in made.items())
)


@given(CONDITIONS, CONDITIONS, st.dictionaries(st.sampled_from("xyz"), SCALARS))
def test_what_lies_within_lets_nothing_more_through(
    one: Conditions, other: Conditions, value: dict[str, object]
) -> None:
    body = json.dumps(value).encode()
    if is_within(one, other) and refuses(one, body) is None:
        assert refuses(other, body) is None


@given(st.binary(max_size=200))
def test_no_body_raises(body: bytes) -> None:
    refuses(DOWNLOAD, body)
    refuses(DOWNLOAD, b'{"operation":"download","x":' + body + b"}")
