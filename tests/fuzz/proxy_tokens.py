"""The credentials in the head of a request to a shared proxy, beside the standard library's reading of the same field."""

from __future__ import annotations

import base64

from egressd.gate.door.tokens import BadCredentials, Credentials, proxy_credentials
from tests.fuzz.target import Target

_FIELD = b"proxy-authorization"


def check(data: bytes) -> None:
    """Hold every law of proxy credentials."""
    found = proxy_credentials(data)
    lines = data.removesuffix(b"\r\n\r\n").split(b"\r\n")[1:]
    named = [line for line in lines if line.partition(b":")[0].lower() == _FIELD]
    if found is None:
        assert not named, "credentials that were overlooked"
    elif isinstance(found, Credentials):
        assert len(named) == 1
        value = named[0].partition(b":")[2].strip(b" \t")
        scheme, _, coded = value.partition(b" ")
        assert scheme.lower() == b"basic"
        assert base64.b64decode(coded.strip()) == found.user + b":" + found.token
        assert b":" not in found.user
        assert repr(found) == "Credentials(...)"
        assert proxy_credentials(data.removesuffix(b"\r\n\r\n") + b"\r\n" + named[0] + b"\r\n\r\n") != found
    else:
        assert isinstance(found, BadCredentials)


TARGET = Target(
    "proxy_tokens",
    check,
    proxy_credentials,
    seeds=(
        b"CONNECT a.test:443 HTTP/1.1\r\nProxy-Authorization: Basic c2J4LTE6c2VjcmV0\r\n\r\n",
        b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\nproxy-authorization:basic  OjpAOg==\r\n\r\n",
        b"GET http://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n",
        b"GET http://a.test/ HTTP/1.1\r\nProxy-Authorization: Bearer x\r\n\r\n",
        b"GET http://a.test/ HTTP/1.1\r\nProxy-Authorization: Basic eA==\r\nProxy-Authorization: Basic eA==\r\n\r\n",
        b"GET http://a.test/ HTTP/1.1\r\nProxy-Authorization : Basic eA==\r\n\r\n",
        b"GET http://a.test/ HTTP/1.1\r\nX: y\n Proxy-Authorization: Basic eA==\r\n\r\n",
    ),
    words=(
        b"\r\n",
        b"\r\n\r\n",
        b"Proxy-Authorization: ",
        b"Basic ",
        b"c2J4LTE6c2VjcmV0",
        b"=",
        b":",
        b"\n",
        b"\t",
        b"\0",
    ),
    most=1500,
)
