"""What tells that a request carries a DNS question (RFC 8484, Oblivious DoH, and the JSON forms in use). Pure.

Whoever answers it asks any name server in the world on the sandbox's behalf: a host that the rules allow for something else
would be a way out for data in names.
"""

from __future__ import annotations

import base64
import binascii
from typing import Final
from urllib.parse import unquote_to_bytes

from egressd.gate.inspector.head import Field

_TYPES: Final = frozenset(
    {
        b"application/dns-message",
        b"application/dns-udpwireformat",
        b"application/dns-json",
        b"application/dns+json",
        b"application/oblivious-dns-message",
    }
)
_HEADER: Final = 12
"""Bytes of a DNS message's header (RFC 1035 §4.1.1)."""


def asks_dns(target: str, fields: tuple[Field, ...]) -> bool:
    """Say whether a request of this target and these fields carries a DNS question or wants such an answer; total."""
    for name, value in fields:
        if name.lower() in (b"content-type", b"accept"):
            types = (part.partition(b";")[0].strip().lower() for part in value.split(b","))
            if any(media_type in _TYPES for media_type in types):
                return True
    _, _, query = target.partition("?")
    return any(_is_question(part) for part in query.split("&"))


def _is_question(part: str) -> bool:
    """Whether a query parameter is `dns=` and a question in base64url, on whatever path (RFC 8484 §4.1)."""
    key, _, value = part.partition("=")
    if unquote_to_bytes(key) != b"dns":
        return False
    text = unquote_to_bytes(value[:96]).translate(bytes.maketrans(b"+/", b"-_"))[
        :16
    ]  # twelve bytes: the header
    try:
        header = base64.urlsafe_b64decode(text)
    except (binascii.Error, ValueError):
        return False
    # A query with one question and no answer: `?dns=true` is something else.
    return len(header) == _HEADER and header[2] < 0x80 and header[4:8] == b"\0\1\0\0"
