"""REQUEST as people write it in tests and on the command line: `METHOD URL`, `tcp://host:port`, `dns:NAME[/TYPE]`.

A request is taken as a client would send it; nothing is repaired, so that what is judged is what was written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from egressd.policy.attempt import Attempt, ConnectionAttempt, DnsQuestion, RequestAttempt
from egressd.policy.names import Authority, BadHost, parse_authority, parse_name

_URL = re.compile(r"(https|http|wss|ws)://([^/?#]*)([^#]*)(#.*)?", re.DOTALL)
_METHOD = re.compile(r"[A-Z][A-Z0-9_-]{0,31}")
_TYPE = re.compile(r"[A-Z][A-Z0-9]{0,15}")
_PORTS = {"https": 443, "http": 80}
_LONGEST = 16_384

FORMS = "`METHOD URL`, `tcp://host:port` or `dns:NAME[/TYPE]`"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as written, and the attempt that it is; `dns_type` is the record type asked for."""

    text: str
    attempt: Attempt
    dns_type: str = "A"


@dataclass(frozen=True, slots=True)
class BadLine:
    """A text that is no request: what is wrong with it, and what to write instead."""

    detail: str
    hint: str = ""


def parse_request_line(text: str) -> Asked | BadLine:
    """Return the attempt that `text` describes. Total."""
    if len(text) > _LONGEST:
        return BadLine("the request is too long")
    if text.startswith("dns:"):
        return _dns(text)
    if text.startswith("tcp://"):
        return _tcp(text)
    method, space, url = text.partition(" ")
    if not space:
        hint = f'write "GET {text}"' if "://" in text else f"a request is {FORMS}"
        return BadLine("the method is missing" if "://" in text else "not a request", hint)
    if not _METHOD.fullmatch(method):
        upper = method.upper()
        hint = f"write {upper}" if _METHOD.fullmatch(upper) else f"a request is {FORMS}"
        return BadLine("a method is a word in capitals", hint)
    return _http(text, method, url)


def _http(text: str, method: str, url: str) -> Asked | BadLine:
    match = _URL.fullmatch(url)
    if match is None:
        return BadLine("the URL begins with https:// or http://, in small letters", f"a request is {FORMS}")
    scheme, raw_authority, target, fragment = match.groups()
    if fragment is not None:
        return BadLine("a fragment (#…) is never sent", "leave it out")
    if any(not "!" <= letter <= "~" for letter in target):
        return BadLine("the URL holds a space or a character outside ASCII", "write it escaped, like %20")
    secure: Literal["https", "http"] = "https" if scheme in ("https", "wss") else "http"
    authority = parse_authority(raw_authority, _PORTS[secure])
    if isinstance(authority, BadHost):
        return BadLine(authority.detail)
    upgrade = method == "WEBSOCKET" or scheme in ("wss", "ws")
    if upgrade and method not in ("WEBSOCKET", "GET"):
        return BadLine("a WebSocket begins with GET", f'write "WEBSOCKET {url}"')
    attempt = RequestAttempt(
        host=authority.host,
        port=authority.port,
        scheme=secure,
        method="GET" if upgrade else method,
        target=target if target.startswith("/") else f"/{target}",
        upgrade="websocket" if upgrade else None,
    )
    return Asked(text, attempt)


def _tcp(text: str) -> Asked | BadLine:
    authority = parse_authority(text.removeprefix("tcp://"), None)
    if isinstance(authority, Authority):
        return Asked(text, ConnectionAttempt(authority.host, authority.port, "tcp"))
    return BadLine(authority.detail, "like tcp://db.example.org:5432")


def _dns(text: str) -> Asked | BadLine:
    raw, _, kind = text.removeprefix("dns:").partition("/")
    name = parse_name(raw)
    if isinstance(name, BadHost):
        return BadLine(name.detail, "like dns:example.org or dns:example.org/TXT")
    if kind and not _TYPE.fullmatch(kind):
        return BadLine("a record type is a word in capitals", "like dns:example.org/AAAA")
    return Asked(text, DnsQuestion(name), kind or "A")
