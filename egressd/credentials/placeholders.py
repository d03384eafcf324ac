"""Placeholders: dummies that a sandbox holds in the place of a key. Pure and total.

A placeholder is worth nothing where it is seen, and says that somebody took it for a key and sent it. It belongs into the slots
that its credential names, on requests that its credential goes with; anywhere else it is a leak. In its slot it stands alone,
behind a scheme, or as one half of Basic: whatever else stood beside it could be a key of the sandbox's own.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import quote, unquote_to_bytes

from egressd.credentials.slots import Field, fold
from egressd.policy.credential import Placeholder

_WORD = re.compile(rb"[A-Za-z0-9_.-]{24,512}")
"""What can be a placeholder."""

_SCHEME = re.compile(rb"(?i)(bearer|token|basic|key|apikey|api-key|bot|secret)[ \t]+")
_BASIC = re.compile(rb"(?i)basic[ \t]+([0-9A-Za-z+/=_-]+)[ \t]*")
_HALVES: Final = frozenset(
    {"", "x-access-token", "x-oauth-basic", "oauth2", "oauth2accesstoken", "git", "token", "api", "user", "x"}
    | {
        "__token__",
        "_token",
        "_",
        "apikey",
        "api_token",
        "key",
        "aws",
        "pat",
        "anonymous",
        "00000000-0000-0000-0000-000000000000",
    }
)
"""What may be the other half of Basic: names that say nothing, and are nobody's key."""


@dataclass(frozen=True, slots=True)
class Strangers:
    """All placeholders that there are but one's own, without a copy of them."""

    everywhere: Container[str]
    own: Collection[str]

    def __contains__(self, text: object) -> bool:
        return text in self.everywhere and text not in self.own


class Kept(NamedTuple):
    """A request without what stood in a placeholder's slots, and that by itself."""

    target: str
    fields: tuple[Field, ...]
    own_fields: tuple[Field, ...]
    own_query: tuple[str, ...]

    def put_back(self, target: str, fields: tuple[Field, ...]) -> tuple[str, tuple[Field, ...]]:
        """Return what has become of the rest, with the slots behind it."""
        if self.own_query:
            path, _, query = target.partition("?")
            target = f"{path}?{'&'.join((query, *self.own_query) if query else self.own_query)}"
        return target, (*fields, *self.own_fields)


def keep(way: Placeholder, placeholder: str, target: str, fields: Iterable[Field]) -> Kept | str:
    """Take a placeholder out of its slots; or return where it stands and should not."""
    headers = {fold(name.encode()) for name in way.headers or ()}
    rest: list[Field] = []
    own: list[Field] = []
    for name, value in fields:
        kept = _shaped(fold(name), value, placeholder) if fold(name) in headers else None
        if kept is not None:
            own.append((name, kept))
        else:
            rest.append((name, value))
    path, _, query = target.partition("?")
    pieces = query.split("&") if query else []
    wanted = {f"{quote(name, safe='')}={placeholder}" for name in way.query or ()}
    own_query = [piece for piece in pieces if piece in wanted]
    if own_query:
        left = [piece for piece in pieces if piece not in wanted]
        target = f"{path}?{'&'.join(left)}" if left else path
    found = seek((placeholder,), target, rest)
    if found is not None:
        return found
    if len({fold(name) for name, _ in own}) < len(own) or len(set(own_query)) < len(own_query):
        return "twice in one slot"
    return Kept(target, tuple(rest), tuple(own), tuple(own_query))


def replace(
    way: Placeholder, placeholder: str, secret: str, target: str, fields: tuple[Field, ...]
) -> tuple[str, tuple[Field, ...]] | str:
    """Return a request with the secret where the placeholder stood in its slots, or why there is none."""
    kept = keep(way, placeholder, target, fields)
    if isinstance(kept, str):
        return kept
    if not kept.own_fields and not kept.own_query:
        return "the placeholder stands in none of its slots"
    dummy, real = placeholder.encode(), secret.encode("utf-8", "surrogatepass")
    own = tuple(
        (name, _refilled(value, lambda text: text.replace(dummy, real))) for name, value in kept.own_fields
    )
    query = tuple(
        piece.replace(placeholder, quote(secret, safe="", errors="surrogatepass")) for piece in kept.own_query
    )
    return Kept(kept.target, kept.fields, own, query).put_back(kept.target, kept.fields)


def seek(
    placeholders: Iterable[str], target: str, fields: Iterable[Field], others: Container[str] | None = None
) -> str | None:
    """Return where in a request's head one of these stands, None where none does.

    Of `others`, which may be many, only such are found as stand alone between other characters than theirs.
    """
    needles = tuple(placeholders)
    if not needles and others is None:
        return None
    path, _, query = target.encode("utf-8", "surrogatepass").partition(b"?")
    if holds(needles, path, others):
        return "the path"
    if holds(needles, query, others):
        return "the query"
    for name, value in fields:
        decoded = _decoded(value)
        if holds(needles, value, others) or (decoded is not None and holds(needles, decoded, others)):
            return f"a field: {fold(name)[:64]}"
    return None


def holds(placeholders: Sequence[str], text: bytes, others: Container[str] | None = None) -> bool:
    """Say whether one of these stands in a text, as it is or escaped; `others` as in `seek`."""
    needles = [placeholder.encode() for placeholder in placeholders]
    for spelled in (text, unquote_to_bytes(text)) if b"%" in text else (text,):
        if any(needle in spelled for needle in needles):
            return True
        if others is not None and any(word.decode("ascii") in others for word in _WORD.findall(spelled)):
            return True
    return False


def _shaped(folded: str, value: bytes, placeholder: str) -> bytes | None:
    """Return a slot's value in the one shape that it goes on in, None where the placeholder does not stand in it as it must."""
    dummy = placeholder.encode()
    if folded == "cookie":
        pairs = [pair.strip() for pair in value.split(b";")]
        own = [pair for pair in pairs if pair.partition(b"=")[2] == dummy]
        return own[0] if len(own) == 1 and value.count(dummy) == 1 else None
    decoded = _decoded(value)
    if decoded is not None:
        halves = decoded.split(b":")
        others = [half for half in halves if half != dummy]
        if len(halves) == 2 and len(others) == 1 and others[0].decode("latin-1").lower() in _HALVES:
            return b"Basic " + base64.b64encode(decoded)
    scheme = _SCHEME.match(value)
    return value if value[scheme.end() if scheme else 0 :] == dummy else None


def _refilled(value: bytes, fill: Callable[[bytes], bytes]) -> bytes:
    decoded = _decoded(value)
    return fill(value) if decoded is None else b"Basic " + base64.b64encode(fill(decoded))


def _decoded(value: bytes) -> bytes | None:
    """Return the `user:password` of a Basic value (RFC 7617), None where it is none."""
    basic = _BASIC.fullmatch(value)
    if basic is None:
        return None
    text = basic[1].replace(b"-", b"+").replace(b"_", b"/").rstrip(b"=")
    try:
        decoded = base64.b64decode(text + b"=" * (-len(text) % 4))
    except binascii.Error:
        return None
    return decoded if b":" in decoded else None
