"""Whose connection it is: by token and source, never by what else a client says (CRED-16, LOG-08)."""

from __future__ import annotations

import base64
import hashlib
from ipaddress import IPv4Address, IPv6Address

import pytest

from egressd.gate.door import tokens
from egressd.gate.door.tokens import (
    GUESSES,
    SOURCES,
    BadCredentials,
    Credentials,
    Known,
    Register,
    Stranger,
    proxy_credentials,
)
from egressd.policy.reasons import Reason

ONE, TWO, OTHER = IPv4Address("172.30.0.3"), IPv4Address("172.30.0.4"), IPv4Address("172.30.0.9")
A = Credentials(b"sbx-a", b"token of a")
B = Credentials(b"sbx-b", b"token of b")


def register(a: IPv4Address | None = None, b: IPv4Address | None = None) -> Register:
    made = Register()
    made.enter("sbx-a", hashlib.sha256(A.token).digest(), a)
    made.enter("sbx-b", hashlib.sha256(B.token).digest(), b)
    return made


def why(judged: Known | Stranger) -> tuple[Reason, str | None]:
    assert isinstance(judged, Stranger)
    return judged.reason, judged.sandbox


def test_the_first_source_that_uses_a_token_is_claimed_for_it() -> None:
    who = register()
    assert who.judge(ONE, A, 0) == Known("sbx-a", claim=True)
    assert who.bind("sbx-a", ONE)
    assert who.judge(ONE, A, 0) == Known("sbx-a")
    assert why(who.judge(TWO, A, 0)) == (Reason.TOKEN_SOURCE_MISMATCH, None)


def test_a_source_that_the_operator_named_is_the_only_one() -> None:
    who = register(a=ONE)
    assert who.judge(ONE, A, 0) == Known("sbx-a")
    assert why(who.judge(TWO, A, 0)) == (Reason.TOKEN_SOURCE_MISMATCH, None)
    with pytest.raises(ValueError, match="one sandbox"):
        who.enter("sbx-c", None, ONE)


def test_cred_16_a_neighbour_s_token_is_worth_nothing_even_before_its_first_use() -> None:
    who = register(a=ONE)
    assert why(who.judge(ONE, B, 0)) == (Reason.TOKEN_SOURCE_MISMATCH, "sbx-a")
    assert who.judge(TWO, B, 0) == Known("sbx-b", claim=True)


def test_a_bound_source_speaks_for_its_sandbox_where_no_token_is_sent() -> None:
    assert register(a=ONE).judge(ONE, None, 0) == Known("sbx-a")
    assert register(a=ONE).owner(ONE) == "sbx-a"
    assert register().judge(ONE, None, 0) == Stranger(Reason.UNKNOWN_SANDBOX, asks=True)


def test_two_that_claim_at_once_do_not_both_get_it() -> None:
    who = register()
    assert who.judge(ONE, A, 0) == who.judge(ONE, A, 0) == Known("sbx-a", claim=True)
    assert who.judge(TWO, A, 0) == Known("sbx-a", claim=True)
    assert who.judge(ONE, B, 0) == Known("sbx-b", claim=True)
    assert who.bind("sbx-a", ONE)
    assert who.bind("sbx-a", ONE)
    assert not who.bind("sbx-a", TWO)
    assert not who.bind("sbx-b", ONE)


def test_who_has_the_address_next_inherits_nothing() -> None:
    who = register(a=ONE)
    who.leave("sbx-a")
    who.leave("sbx-a")
    assert who.owner(ONE) is None
    assert not who.bind("sbx-a", ONE)
    assert why(who.judge(ONE, A, 0)) == (Reason.BAD_PROXY_TOKEN, None)
    assert who.judge(ONE, B, 0) == Known("sbx-b", claim=True)


@pytest.mark.parametrize(
    ("credentials", "detail"),
    [
        pytest.param(Credentials(b"sbx-a", b"token of b"), "for sbx-a", id="another's token"),
        pytest.param(Credentials(b"sbx-a", b""), "for sbx-a", id="an empty token"),
        pytest.param(Credentials(b"sbx-x", b"token of a"), "for no sandbox", id="another name"),
        pytest.param(Credentials(b"token of a", b""), "for no sandbox", id="a token in the user's place is not repeated"),
        pytest.param(Credentials(b"sbx-n", b""), "for sbx-n", id="a sandbox without a token"),
        pytest.param(BadCredentials(Reason.BAD_PROXY_TOKEN, "no Basic credentials"), "no Basic credentials", id="Bearer"),
    ],
)  # fmt: skip
def test_wrong_credentials_are_refused_and_nothing_of_them_is_told(
    credentials: Credentials | BadCredentials, detail: str
) -> None:
    who = register(a=ONE)
    who.enter("sbx-n", None, None)
    judged = who.judge(OTHER, credentials, 0)
    assert judged == Stranger(Reason.BAD_PROXY_TOKEN, detail)
    assert not judged.asks


def test_guesses_are_counted_by_source_and_then_not_looked_at() -> None:
    who = register()
    for _ in range(GUESSES):
        assert why(who.judge(OTHER, Credentials(b"sbx-a", b"x"), 0)) == (Reason.BAD_PROXY_TOKEN, None)
    assert why(who.judge(OTHER, A, 0)) == (Reason.RATE_LIMITED, None)
    assert who.judge(ONE, A, 0) == Known("sbx-a", claim=True)
    assert who.judge(OTHER, A, 60 / GUESSES) == Known("sbx-a", claim=True)


def test_who_guesses_locks_out_nobody_but_itself() -> None:
    who = register()
    for _ in range(GUESSES + 1):
        who.judge(IPv6Address("2001:db8::1"), Credentials(b"sbx-a", b"x"), 0)
    assert why(who.judge(IPv6Address("2001:db8::1"), A, 0)) == (Reason.RATE_LIMITED, None)
    assert who.judge(IPv6Address("2001:db8::2"), A, 0) == Known("sbx-a", claim=True)


def test_a_link_local_source_is_nobody_s_since_every_link_has_the_same() -> None:
    assert register().judge(IPv6Address("fe80::1"), A, 0) == Stranger(
        Reason.UNKNOWN_SANDBOX, "a link-local source"
    )


def test_memory_is_bounded_however_many_sources_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "SOURCES", 3)
    who = register()
    for last in range(9):
        who.judge(IPv4Address(f"10.0.0.{last}"), Credentials(b"x", b"x"), 0)
    assert len(who._guesses) == 3
    assert SOURCES > 1000


def test_every_comparison_is_of_whole_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("egressd.gate.door.tokens.hmac.compare_digest", compare)
    who = register()
    for credentials in (A, Credentials(b"sbx-a", b"x"), Credentials(b"nobody", b"x")):
        who.judge(OTHER, credentials, 0)
    assert [(len(a), len(b)) for a, b in compared] == [(32, 32)] * 3


def head(*fields: bytes) -> bytes:
    return b"\r\n".join((b"GET http://a.test/ HTTP/1.1", *fields, b"", b""))


def basic(text: bytes) -> bytes:
    return b"Basic " + base64.b64encode(text)


def test_credentials_are_read_from_the_one_field() -> None:
    assert proxy_credentials(head(b"proxy-AUTHORIZATION:\t" + basic(b"sbx-a:a:b") + b" ")) == Credentials(
        b"sbx-a", b"a:b"
    )
    assert proxy_credentials(head(b"Authorization: " + basic(b"sbx-a:b"))) is None
    assert "a:b" not in repr(proxy_credentials(head(b"Proxy-Authorization: " + basic(b"sbx-a:a:b"))))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        pytest.param([b"Proxy-Authorization: Bearer abc"], Reason.BAD_PROXY_TOKEN, id="another scheme"),
        pytest.param([b"Proxy-Authorization: Basic !!!"], Reason.BAD_PROXY_TOKEN, id="no base64"),
        pytest.param([b"Proxy-Authorization: Basic YQ="], Reason.BAD_PROXY_TOKEN, id="base64 cut off"),
        pytest.param([b"Proxy-Authorization: " + basic(b"nocolon")], Reason.BAD_PROXY_TOKEN, id="no colon"),
        pytest.param([b"Proxy-Authorization: " + basic(b"a:" + b"x" * 2000)], Reason.BAD_PROXY_TOKEN, id="too long"),
        pytest.param([b"Proxy-Authorization:"], Reason.BAD_PROXY_TOKEN, id="empty"),
        pytest.param([b"Proxy-Authorization: " + basic(b"a:b")] * 2, Reason.BAD_HEADER, id="twice"),
        pytest.param([b"Proxy-Authorization : " + basic(b"a:b")], Reason.BAD_HEADER, id="a space before the colon"),
        pytest.param([b"X: y", b" Proxy-Authorization: x"], Reason.BAD_HEADER, id="HTTP-07 folded"),
        pytest.param([b"X: y\n", b"Proxy-Authorization: " + basic(b"a:b")], Reason.BAD_HEADER, id="HTTP-05 a bare LF"),
    ],
)  # fmt: skip
def test_a_field_that_could_be_read_in_two_ways_is_refused(fields: list[bytes], reason: Reason) -> None:
    found = proxy_credentials(head(*fields))
    assert isinstance(found, BadCredentials)
    assert found.reason is reason
