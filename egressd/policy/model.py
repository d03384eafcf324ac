"""What a rule file may say: profiles, services and the organisation file as pydantic models.

These models hold the shape and what can be judged of one value alone; what needs other keys, other files,
the public suffixes or IDNA is judged in `rulefiles`, where places are known. Unknown keys are errors
everywhere: a mistyped key must never widen a rule.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    WithJsonSchema,
)

from egressd.policy.effective import EntryLimits, Mode, Treatment
from egressd.policy.values import (
    ByteRate,
    CountRate,
    Day,
    Id,
    Moment,
    Ports,
    SchemaVersion,
    Schemes,
    Text,
    Texts,
    Values,
)

MOST_OBSERVE_DAYS = 30

type ParameterType = Literal["segment", "repo", "host_label", "prefix", "enum"]
type Access = Literal["read", "call", "write", "deny"]


def _values(value: object) -> object:
    """One text is a list of one."""
    return [value] if isinstance(value, str) else value


def _one_or_more(*types: str) -> dict[str, Any]:
    """The JSON Schema of a scalar, or of a list of which any will do."""
    one = {"type": list(types)}
    return {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]}


_ONE_OR_MORE = WithJsonSchema(_one_or_more("string"))


def _choices(value: object) -> object:
    """One scalar is a list of one."""
    return [value] if isinstance(value, str | bool | int) else value


type JsonScalar = StrictStr | StrictBool | StrictInt
type Json = Annotated[
    dict[
        Text,
        Annotated[
            list[JsonScalar],
            Field(min_length=1, max_length=64),
            BeforeValidator(_choices),
            WithJsonSchema(_one_or_more("string", "boolean", "integer")),
        ],
    ],
    Field(min_length=1, max_length=16),
]
"""What a request's body must be: each key with its value, or with a list of which any will do."""


class Said(BaseModel):
    """The habits of every part of a rule file: closed, strict, unchanging."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


class Limits(Said):
    """Token buckets per sandbox and entry; `connections` is how many may be open at once."""

    requests: CountRate | None = Field(None, description="requests, like 600/minute")
    upload: ByteRate | None = Field(None, description="bytes sent, request heads included, like 50MB/day")
    download: ByteRate | None = Field(None, description="bytes received, like 2GiB/day")
    upload_per_host: ByteRate | None = Field(None, description="bytes sent to each destination by itself")
    download_per_host: ByteRate | None = Field(None, description="bytes received from each by itself")
    new_hosts: CountRate | None = Field(None, description="hosts not met before, like 30/hour")
    names: CountRate | None = Field(
        None, description="names under its wildcards that get an address, like 100/hour"
    )
    new_connections: CountRate | None = Field(None, description="connections begun, like 20/second")
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
    with_: dict[Text, Annotated[Values, BeforeValidator(_values), _ONE_OR_MORE]] | None = Field(
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
    json_: Json | None = Field(
        None, alias="json", description="what the body must be: one JSON object with these keys and values"
    )
    credential: Id | None = Field(None, description="attached on the way out; the sandbox never sees it")
    limits: Limits | None = None


class AllowEntry(PermittingEntry):
    """A destination that may be reached."""

    mode: Mode | None = Field(
        None,
        description="observe: in place of the default deny, noted as what would be denied, until `observe_until`",
    )
    observe_until: Day | None = Field(
        None, description="the last day (UTC) of mode: observe, at most 30 days ahead; then the rule is gone"
    )
    public_web: Literal["read"] | None = Field(None, description="every public name, GET and HEAD only")


class AskEntry(PermittingEntry):
    """A destination that may be reached once a person has said yes."""

    approvers: Texts | None = Field(
        None, description="who may say yes; anybody with that right when left out"
    )


class DenyEntry(Entry):
    """A destination that may not be reached, whatever allows it; all ports and schemes if it names none."""

    mode: Mode | None = Field(
        None, description="observe: notes what it would deny and denies nothing, until `observe_until`"
    )
    observe_until: Day | None = Field(
        None, description="the last day (UTC) of mode: observe, at most 30 days ahead; then the rule denies"
    )
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
    json_: dict[Text, JsonScalar] | None = Field(
        None, alias="json", description="the body of the request; without it, whatever body the rule asks for"
    )


class FiledTest(Test):
    """One claim of a file of tests."""

    __test__ = False

    under: Id | None = Field(
        None, description="the profile that it speaks of, where that is another than the file's"
    )


class Accept(Said):
    """Risks that the owner takes knowingly, each with the reason."""

    mixed_public: Text | None = Field(
        None, alias="mixed-public", description="public_web beside credentials or private ranges"
    )
    own_keys: Text | None = Field(
        None, alias="own-keys", description="keys that a sandbox brings go out where a credential is expected"
    )


type Tests = Annotated[list[Test], Field(min_length=1)]


type Allows = Annotated[list[AllowEntry], Field(min_length=1)]
type Denies = Annotated[list[DenyEntry], Field(min_length=1)]
type Asks = Annotated[list[AskEntry], Field(min_length=1)]
type Ids = Annotated[list[Id], Field(min_length=1)]


class Additions(Said):
    """What a profile allows beyond the one that it extends; a reviewer reads this first."""

    allow: Allows = []
    ask: Asks = []


class Canary(Said):
    """Who lives under another profile first."""

    labels: Annotated[dict[Text, Text], Field(min_length=1)] = Field(
        description="labels that a sandbox must have, all of them; whoever makes it says them"
    )
    profile: Id = Field(description="the profile that it lives under instead; one without a canary")


class ProfileFile(Said):
    """rules/profiles/NAME.yaml: the policy that a sandbox lives under."""

    schema_version: SchemaVersion = Field(alias="schema")
    profile: Id
    owner: Text | None = None
    description: Text | None = None
    extends: Id | None = Field(
        None, description="the profile whose rules and limits this one has too; it may only narrow them"
    )
    groups: Ids | None = Field(None, description="rules that profiles share: groups/NAME.yaml")
    without: Ids | None = Field(None, description="ids of rules of the extended profile that this one lacks")
    adds: Additions | None = Field(None, description="what goes beyond the extended profile")
    mode: Mode = "enforce"
    observe_until: Day | None = Field(
        None, description="the last day (UTC) of mode: observe, at most 30 days ahead"
    )
    canary: Canary | None = Field(
        None, description="sandboxes with these labels live under another profile, to try it on a few"
    )
    accept: Accept | None = None
    limits: Limits | None = Field(None, description="for the sandbox as a whole, beside those of its rules")
    allow: Allows = []
    deny: Denies = []
    ask: Asks = []
    tests: Tests = []


class GroupFile(Said):
    """rules/groups/NAME.yaml: rules that several profiles name together."""

    schema_version: SchemaVersion = Field(alias="schema")
    group: Id
    owner: Text | None = None
    description: Text | None = None
    allow: Allows = []
    deny: Denies = []
    ask: Asks = []
    tests: Tests = Field([], description="must hold for the group alone, below the organisation's denials")


class Ceiling(Said):
    """The most that any profile may allow; what is left out here has no ceiling."""

    allow: Allows | None = Field(
        None,
        description="every allow and ask of every profile lies within these, read as a profile reads them",
    )
    treatments: Annotated[list[Treatment], Field(min_length=1)] | None = None
    schemes: Schemes | None = None
    ports: Ports | None = None
    addresses: Texts | None = Field(
        None, description="networks that hold whatever non-public ones rules name"
    )
    observe_days: Annotated[int, Field(ge=0, le=MOST_OBSERVE_DAYS)] | None = Field(
        None, description="how far ahead `observe_until` may lie; 0 forbids `mode: observe`"
    )
    limits: Limits | None = Field(
        None, description="of a sandbox as a whole; bind every profile, which may only be tighter"
    )


class OrganisationFile(Said):
    """rules/organisation.yaml: what no profile can weaken."""

    schema_version: SchemaVersion = Field(alias="schema")
    owner: Text | None = None
    description: Text | None = None
    deny: Denies = []
    ceiling: Ceiling | None = None
    tests: Tests = Field([], description="must hold under every profile")


class TestsFile(Said):
    """rules/tests/NAME.yaml: claims about a profile, apart from its file; recorded attempts as a rule."""

    __test__ = False

    schema_version: SchemaVersion = Field(alias="schema")
    under: Id = Field(description="the profile that the tests speak of")
    description: Text | None = None
    tests: Annotated[list[FiledTest], Field(min_length=1)]


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
    json_: Json | None = Field(
        None, alias="json", description="what the body must be: one JSON object with these keys and values"
    )
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


RULE_FILES: tuple[type[Said], ...] = (ProfileFile, ServiceFile, GroupFile, TestsFile, OrganisationFile)


def json_schema() -> dict[str, Any]:
    """Return one JSON Schema (2020-12) for every kind of rule file, told apart by their naming key."""
    definitions: dict[str, Any] = {}
    for model in RULE_FILES:
        part = model.model_json_schema(by_alias=True, ref_template="#/$defs/{model}")
        definitions.update(part.pop("$defs", {}))
        definitions[model.__name__] = part
    chosen: dict[str, Any] = {"$ref": "#/$defs/OrganisationFile"}
    kinds = (("under", TestsFile), ("group", GroupFile), ("service", ServiceFile), ("profile", ProfileFile))
    for key, model in kinds:
        chosen = {"if": {"required": [key]}, "then": {"$ref": f"#/$defs/{model.__name__}"}, "else": chosen}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "egressd rule files",
        **chosen,
        "$defs": {name: definitions[name] for name in sorted(definitions)},
    }
