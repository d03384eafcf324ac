"""What a rule file may say: profiles, services and the organisation file as pydantic models.

These models hold the shape and what can be judged of one value alone; what needs other keys, other files,
the public suffixes or IDNA is judged in `rulefiles`, where places are known. Unknown keys are errors
everywhere: a mistyped key must never widen a rule.
"""

from __future__ import annotations

import datetime as dt
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StrictStr, WithJsonSchema

from egressd.policy.effective import EntryLimits, Rate, Scheme, Treatment

MOST_OBSERVE_DAYS = 30

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
type ParameterType = Literal["segment", "repo", "host_label", "prefix", "enum"]
type Values = Annotated[list[Text], Field(min_length=1)]
type Access = Literal["read", "call", "write", "deny"]


def _values(value: object) -> object:
    """One text is a list of one."""
    return [value] if isinstance(value, str) else value


class Said(BaseModel):
    """The habits of every part of a rule file: closed, strict, unchanging."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


class Limits(Said):
    """Token buckets per sandbox and entry; `connections` is how many may be open at once."""

    requests: CountRate | None = Field(None, description="requests, like 600/minute")
    upload: ByteRate | None = Field(None, description="bytes sent, request heads included, like 50MB/day")
    download: ByteRate | None = Field(None, description="bytes received, like 2GiB/day")
    new_hosts: CountRate | None = Field(None, description="hosts not met before, like 30/hour")
    connections: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None, description="open at the same time"
    )

    def resolved(self) -> EntryLimits:
        """Return the limits in the form that travels to a worker."""
        return EntryLimits.model_validate(self, from_attributes=True)


class Entry(Said):
    """What allow, ask and deny have in common: a name, a destination and its history."""

    id: Id | None = Field(
        None, description="names the rule in records; derived from the destination when left out"
    )
    hosts: Texts | None = Field(
        None, description="exact names, or *.name for everything below it (never itself)"
    )
    hosts_from: Text | None = Field(None, description="a file of hosts, one a line: lists/x.txt")
    service: Id | None = Field(None, description="a reviewed set of hosts and requests: services/x.yaml")
    with_: dict[Text, Annotated[Values, BeforeValidator(_values)]] | None = Field(
        None, alias="with", description="values for the service's parameters; a list means any of them"
    )
    addresses: Texts | None = Field(
        None,
        description="alone: literal addresses; with hosts: the only networks that they may resolve into",
    )
    schemes: Schemes | None = Field(None, description="https and/or http; [https] when left out")
    ports: Ports | None = Field(None, description="443 for https and 80 for http when left out")
    expires: Day | None = Field(None, description="the last day (UTC) on which the rule exists")
    because: Text | None = None
    ticket: Text | None = None
    owner: Text | None = None


class PermittingEntry(Entry):
    """What allow and ask have in common: how the traffic is treated once it may pass."""

    treatment: Treatment | None = Field(
        None, description="inspect (default), tunnel (opaque TLS) or relay (raw TCP)"
    )
    requests: Texts | None = Field(
        None, description='like "GET,HEAD /path?query"; GET,HEAD /** when left out'
    )
    credential: Id | None = Field(None, description="attached on the way out; the sandbox never sees it")
    limits: Limits | None = None


class AllowEntry(PermittingEntry):
    """A destination that may be reached."""

    public_web: Literal["read"] | None = Field(None, description="every public name, GET and HEAD only")


class AskEntry(PermittingEntry):
    """A destination that may be reached once a person has said yes."""

    approvers: Texts | None = Field(
        None, description="who may say yes; anybody with that right when left out"
    )


class DenyEntry(Entry):
    """A destination that may not be reached, whatever allows it; all ports and schemes if it names none."""

    requests: Texts | None = Field(
        None, description="only these requests are denied; everything when left out"
    )


class Test(Said):
    """One claim about the file: one of allow, deny, ask, with a request as `egressd explain` takes it."""

    __test__ = False  # pytest collects classes by this name

    allow: Text | None = None
    deny: Text | None = None
    ask: Text | None = None
    rule: Text | None = Field(None, description="the rule that must have decided")
    reason: Text | None = Field(None, description="the reason code that must be given")
    at: Moment | None = Field(None, description="judged as at this day (noon UTC) or time")


class Accept(Said):
    """Risks that the owner takes knowingly, each with the reason."""

    mixed_public: Text | None = Field(
        None, alias="mixed-public", description="public_web beside credentials or private ranges"
    )
    own_keys: Text | None = Field(
        None, alias="own-keys", description="keys that a sandbox brings go out where a credential is expected"
    )


type Tests = Annotated[list[Test], Field(min_length=1)]


class ProfileFile(Said):
    """rules/profiles/NAME.yaml: the policy that a sandbox lives under."""

    schema_version: SchemaVersion = Field(alias="schema")
    profile: Id
    owner: Text | None = None
    description: Text | None = None
    mode: Literal["enforce", "observe"] = "enforce"
    observe_until: Day | None = Field(
        None, description="the last day (UTC) of mode: observe, at most 30 days ahead"
    )
    accept: Accept | None = None
    limits: Limits | None = Field(None, description="for the sandbox as a whole, beside those of its rules")
    allow: Annotated[list[AllowEntry], Field(min_length=1)] = []
    deny: Annotated[list[DenyEntry], Field(min_length=1)] = []
    ask: Annotated[list[AskEntry], Field(min_length=1)] = []
    tests: Tests = []


class OrganisationFile(Said):
    """rules/organisation.yaml: what no profile can weaken."""

    schema_version: SchemaVersion = Field(alias="schema")
    owner: Text | None = None
    description: Text | None = None
    deny: Annotated[list[DenyEntry], Field(min_length=1)] = []
    tests: Tests = Field([], description="must hold under every profile")


class Parameter(Said):
    """A value that a profile gives to a service; `{name}` stands for it, for `names` too."""

    type: ParameterType
    values: Values | None = Field(None, description="the choices of an enum")
    description: Text | None = None


class ServiceEntry(Said):
    """One group of hosts of a service and what may be asked of them."""

    hosts: Texts | None = None
    hosts_from: Text | None = None
    schemes: Schemes | None = None
    ports: Ports | None = None
    treatment: Treatment | None = None
    requests: Texts | None = None
    credential: Literal["never"] | None = Field(
        None, description="a profile's credential for the service does not go to these hosts"
    )
    reads: Text | None = Field(
        None, description="why requests other than GET and HEAD here change nothing; for `access: read`"
    )
    because: Text | None = Field(None, description="what these hosts are for")


class AcceptService(Said):
    """Findings of `egressd services lint` that the owner takes knowingly, each with the reason."""

    shared_host: Text | None = Field(
        None, alias="shared-host", description="hosts of many tenants whose paths the service does not bind"
    )
    lookalike: Text | None = Field(
        None, description="a host that is spelled nearly like another one and is meant"
    )


class ServiceFile(Said):
    """rules/services/NAME.yaml: a named and reviewed set of hosts, methods and paths."""

    schema_version: SchemaVersion = Field(alias="schema")
    service: Id
    description: Text
    owner: Text
    reviewed: Day = Field(description="the day on which the hosts below were last compared with the sources")
    sources: Texts = Field(description="where the facts come from")
    risks: Texts | None = Field(None, description="what a sandbox can still do with it")
    access: Access = Field(
        "read",
        description="read: nothing changes there; call: an API computes on what is sent; write: it publishes or "
        "stores; deny: for denials only",
    )
    accept: AcceptService | None = None
    expects: Literal["credential"] | None = Field(
        None, description="whoever uses it should attach a credential, or the sandbox's own keys go out"
    )
    parameters: Annotated[dict[Text, Parameter], Field(min_length=1)] | None = None
    entries: Annotated[list[ServiceEntry], Field(min_length=1)]


RULE_FILES: tuple[type[Said], ...] = (ProfileFile, ServiceFile, OrganisationFile)


def json_schema() -> dict[str, Any]:
    """Return one JSON Schema (2020-12) for the three kinds of rule file, told apart by their naming key."""
    definitions: dict[str, Any] = {}
    for model in RULE_FILES:
        part = model.model_json_schema(by_alias=True, ref_template="#/$defs/{model}")
        definitions.update(part.pop("$defs", {}))
        definitions[model.__name__] = part
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "egressd rule files",
        "if": {"required": ["profile"]},
        "then": {"$ref": "#/$defs/ProfileFile"},
        "else": {
            "if": {"required": ["service"]},
            "then": {"$ref": "#/$defs/ServiceFile"},
            "else": {"$ref": "#/$defs/OrganisationFile"},
        },
        "$defs": {name: definitions[name] for name in sorted(definitions)},
    }
