"""What a rule asks of a request's body: `json: {operation: download}`. Pure; no body is ever repaired, and none is raised on.

The origin must not read another document than the one that was judged. So a body is one JSON object (RFC 8259) in UTF-8, small,
flat enough, without anything that two readers take differently: a byte order mark, a key that stands twice (in any case, width or
composition, for some readers fold those; at any depth), a key with a NUL, half a surrogate, NaN, a number that overflows.
The head says that it is one, in no coding and no other charset. Whatever is not so does not match, and what does not match is
denied: the rule that decides by host, path and method decides, and no other rule is asked.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Iterable
from typing import Final

MOST: Final = 64 * 1024
"""Bytes of a body that is looked into."""
MOST_DEPTH: Final = 64
CARRIERS: Final = frozenset({"POST", "PUT", "PATCH"})
"""Methods whose body means something (RFC 9110 §9.3)."""

type Scalar = str | bool | int
type Conditions = tuple[tuple[str, tuple[Scalar, ...]], ...]
"""Each key that the object must have, and the values that it may have there."""

_TYPE: Final = re.compile(
    r"application/(?:[a-z0-9!#$&^_.-]+\+)?json(?:[ \t]*;[ \t]*charset=(?:utf-8|\"utf-8\"))?", re.IGNORECASE
)
_TEXTS: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_TOO_LARGE: Final = f"the body is larger than {MOST // 1024} KiB"


class _Doubtful(ValueError):
    """The document could be read as another one."""


def refuses_head(fields: Iterable[tuple[bytes, bytes]], *, has_body: bool) -> str | None:
    """Say why no body behind these fields can match, before any of it has come; None where one can."""
    values: dict[bytes, list[bytes]] = {}
    for name, value in fields:
        values.setdefault(name.lower(), []).append(value)
    types = [value.decode("latin-1") for value in values.get(b"content-type", ())]
    length = b"".join(values.get(b"content-length", ()))[:20]
    if not has_body:
        return "there is no body"
    if len(types) != 1 or not _TYPE.fullmatch(types[0].strip(" \t")):
        return "the content type is not JSON in UTF-8"
    if any(value.strip().lower() != b"identity" for value in values.get(b"content-encoding", ())):
        return "the body is coded"
    if b"content-range" in values:
        return "the body is a part of one"
    return _TOO_LARGE if length.isdigit() and int(length) > MOST else None


def refuses(conditions: Conditions, body: bytes) -> str | None:
    """Say why a whole body does not match, in fixed words that never quote it; None where it does. Total."""
    if len(body) > MOST:
        return _TOO_LARGE
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        return "the body is not UTF-8"
    if _depth(text) > MOST_DEPTH:
        return "the body is nested too deeply"
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # which half a surrogate keeps from being done
    except _Doubtful as doubt:
        return str(doubt)
    except UnicodeEncodeError:
        return "the body holds half a surrogate"
    except (ValueError, RecursionError):  # a number of too many digits, too
        return "the body is not JSON"
    if not isinstance(value, dict):
        return "the body is not one JSON object"
    for key, wanted in conditions:
        found = value.get(key)
        if not any(type(found) is type(one) and found == one for one in wanted):
            return f"'{key}' is not what the rule names"
    return None


def is_within(one: Conditions, other: Conditions) -> bool:
    """Whether every body that meets `one` meets `other`."""
    mine = dict(one)
    return all(
        key in mine
        and {(type(value), value) for value in mine[key]} <= {(type(value), value) for value in wanted}
        for key, wanted in other
    )


def show(conditions: Conditions) -> str:
    """Return the conditions as a rule file spells them."""
    parts = (
        f"{json.dumps(key)}: {json.dumps(values[0] if len(values) == 1 else values)}"
        for key, values in conditions
    )
    return f"{{{', '.join(parts)}}}"


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    folded: set[str] = set()
    for key, value in pairs:
        if "\0" in key:
            raise _Doubtful("a key holds a NUL")
        found[key] = value
        folded.add(unicodedata.normalize("NFKC", key).casefold().strip())
    if len(folded) < len(pairs):
        raise _Doubtful("a key stands twice, for some readers")
    return found


def _constant(_: str) -> object:
    raise _Doubtful("the body holds a number that is none")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Doubtful("a number is too large")
    return value


def _depth(text: str) -> int:
    """How deeply a text is nested at the most, were it JSON."""
    depth = deepest = 0
    for letter in _TEXTS.sub("", text):
        if letter in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif letter in "]}":
            depth -= 1
    return deepest
