"""Tokens and sources as control keeps them."""

from __future__ import annotations

import hashlib

import pytest

from egressd.control.sources import ProxyToken, Sources, normal_source, proxy_url


def test_a_source_belongs_to_one_sandbox_until_that_is_gone() -> None:
    sources = Sources()
    assert sources.claim("sbx-a", "172.30.0.3")
    assert sources.claim("sbx-a", "172.30.0.3")
    assert not sources.claim("sbx-b", "172.30.0.3")
    sources.release("sbx-b")
    assert not sources.claim("sbx-b", "172.30.0.3")
    sources.release("sbx-a")
    assert sources.claim("sbx-b", "172.30.0.3")


def test_the_same_address_at_another_interface_is_another_source() -> None:
    sources = Sources()
    assert sources.claim("sbx-a", "10.90.0.5", "br0")
    assert sources.claim("sbx-b", "10.90.0.5", "br1")
    assert not sources.claim("sbx-b", "10.90.0.5", "br0")
    sources.release("sbx-a")
    assert sources.claim("sbx-c", "10.90.0.5", "br0")
    assert not sources.claim("sbx-c", "10.90.0.5", "br1")


@pytest.mark.parametrize(
    "text", ["", "172.30.0.03", "2001:DB8::1", "::ffff:172.30.0.3", "fe80::1%eth0", "a.test"]
)
def test_a_worker_may_not_claim_an_address_in_another_spelling(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- whichever word says so, it ends the worker
        Sources().claim("sbx-a", text)


def test_addresses_have_one_spelling() -> None:
    assert normal_source("::ffff:172.30.0.3") == "172.30.0.3"
    assert normal_source("2001:DB8:0::1") == "2001:db8::1"


def test_a_token_is_new_each_time_and_never_shown() -> None:
    token, other = ProxyToken.new(), ProxyToken.new()
    assert token.text != other.text
    assert token.digest == hashlib.sha256(token.text.encode()).hexdigest()
    assert token.text not in repr(token)
    assert proxy_url("sbx-a", token.text, "172.30.0.2", 3128) == f"http://sbx-a:{token.text}@172.30.0.2:3128"
    assert proxy_url("s", "t", "fd00::2", 1080, scheme="socks5h") == "socks5h://s:t@[fd00::2]:1080"
