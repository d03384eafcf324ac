"""The values that rule files hold: rates, days, moments, ids, ports; each read strictly, with the remedy in words."""

from __future__ import annotations

import datetime as dt
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StrictStr, WithJsonSchema

from egressd.policy.effective import Rate, Scheme

_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_MOMENT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2})?Z)?")
_RATE = re.compile(r"([0-9]{1,15})([A-Za-z]*)/([a-z]+)")

_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
_BYTES = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class UnfitError(ValueError):
    """A value that a rule file may not hold; `code` is the problem's code, the text says what is right."""

    def __init__(self, code: str, says: str) -> None:
        super().__init__(says)
        self.code = code


def parse_rate(text: object, *, counts_bytes: bool) -> Rate:
    """Return `N[unit]/period` as a rate; a unit only where bytes are counted. ValueError with the remedy."""
    example = "50MB/day" if counts_bytes else "600/minute"
    if isinstance(text, Rate):
        return text
    match = _RATE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"a limit is written like {example}")
    amount, unit, period = int(match[1]), match[2], match[3]
    if period not in _SECONDS:
        raise ValueError(f"the period is one of {', '.join(_SECONDS)}: {example}")
    if unit and not counts_bytes:
        raise ValueError(f"this limit counts, it has no unit: {example}")
    if unit not in _BYTES:
        raise ValueError(f"the unit is one of {', '.join(filter(None, _BYTES))}: {example}")
    if amount == 0:
        raise ValueError("a limit of nothing denies; leave the rule out or write a deny")
    return Rate(amount=amount * _BYTES[unit], seconds=_SECONDS[period])


def _count_rate(value: object) -> Rate:
    try:
        return parse_rate(value, counts_bytes=False)
    except ValueError as error:
        raise UnfitError("bad_limit", str(error)) from None


def _byte_rate(value: object) -> Rate:
    try:
        return parse_rate(value, counts_bytes=True)
    except ValueError as error:
        raise UnfitError("bad_limit", str(error)) from None


def _date(value: object) -> dt.date:
    if isinstance(value, dt.date):
        return value
    try:
        if isinstance(value, str) and _DATE.fullmatch(value):
            return dt.date.fromisoformat(value)
    except ValueError:
        pass
    raise UnfitError("bad_date", "a day is written like 2027-03-31 and exists in the calendar")


def parse_moment(value: object) -> dt.datetime:
    """Return the moment that `2027-03-31` (its noon) or `2027-03-31T18:00Z` names, in UTC; UnfitError for all else.

    Noon, so that a claim about a rule's last valid day is not one about a midnight.
    """
    try:
        if isinstance(value, str) and _MOMENT.fullmatch(value):
            moment = dt.datetime.fromisoformat(value)
            return moment if moment.tzinfo else moment.replace(hour=12, tzinfo=dt.UTC)
    except ValueError:
        pass
    raise UnfitError("bad_date", "a time is written like 2027-03-31 or 2027-03-31T18:00Z (UTC)")


def _id(value: str) -> str:
    if _ID.fullmatch(value) and len(value) <= 64:
        return value
    proposal = slug(value) or "my-rule"
    raise UnfitError("bad_id", f"small letters, digits and single hyphens, at most 64, like {proposal}")


def slug(text: str) -> str:
    """Return the nearest kebab-case id to any text; empty when nothing of it can stand in one."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:64].strip("-")


def _port(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535:
        return value
    raise UnfitError("bad_port", "a port is a number from 1 to 65535")


def _schema(value: object) -> Literal[1]:
    if isinstance(value, int) and not isinstance(value, bool) and value == 1:
        return 1
    raise UnfitError("bad_schema", "this egressd reads `schema: 1`")


_RATE_SCHEMA = WithJsonSchema({"type": "string", "pattern": r"^[0-9]{1,15}/(second|minute|hour|day)$"})
_BYTE_RATE_SCHEMA = WithJsonSchema(
    {"type": "string", "pattern": r"^[0-9]{1,15}(kB|MB|GB|KiB|MiB|GiB)?/(second|minute|hour|day)$"}
)

type CountRate = Annotated[Rate, BeforeValidator(_count_rate), _RATE_SCHEMA]
type ByteRate = Annotated[Rate, BeforeValidator(_byte_rate), _BYTE_RATE_SCHEMA]
type Day = Annotated[dt.date, BeforeValidator(_date), WithJsonSchema({"type": "string", "format": "date"})]
type Moment = Annotated[dt.datetime, BeforeValidator(parse_moment), WithJsonSchema({"type": "string"})]
type Id = Annotated[str, AfterValidator(_id), Field(json_schema_extra={"pattern": f"^{_ID.pattern}$"})]
type Port = Annotated[
    int, BeforeValidator(_port), WithJsonSchema({"type": "integer", "minimum": 1, "maximum": 65535})
]
type SchemaVersion = Annotated[Literal[1], BeforeValidator(_schema), WithJsonSchema({"const": 1})]
type Text = Annotated[StrictStr, Field(min_length=1, max_length=1000)]
type Texts = Annotated[list[Text], Field(min_length=1)]
type Ports = Annotated[list[Port], Field(min_length=1)]
type Schemes = Annotated[list[Scheme], Field(min_length=1)]
type Values = Annotated[list[Text], Field(min_length=1)]
