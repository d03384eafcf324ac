"""Services: reviewed sets of hosts and requests, with typed parameters that a profile fills in.

A parameter's type is a character class that cannot spell anything with a meaning in a host or a path pattern beyond what the
type says, so that no value can widen a rule past the service's own text.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from egressd.policy.model import Parameter, ServiceEntry, ServiceFile
from egressd.policy.paths import BadPattern
from egressd.policy.requests import parse_request_pattern
from egressd.rulefiles.bodies import check_json
from egressd.rulefiles.document import Document, Step
from egressd.rulefiles.hosts import read_pattern
from egressd.rulefiles.problems import Code, Findings, quoted
from egressd.rulefiles.shape import did_you_mean

MOST_EXPANSIONS = 10_000

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_NAME = re.compile(r"[a-z][a-z_]*")
# In paths `*` stands for a part of one segment; `**` would cross segments and is kept out by spells.
_SEGMENT = r"(?!\.{1,2}(/|$))[A-Za-z0-9._~*-]+"
_TYPES = {
    "segment": re.compile(_SEGMENT),
    "repo": re.compile(rf"{_SEGMENT}/(?!.*\.git$){_SEGMENT}"),
    "prefix": re.compile(rf"{_SEGMENT}(/{_SEGMENT})*"),
    "host_label": re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"),
    "enum": re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._~-]+"),
}
_SAMPLES = {"segment": "a", "repo": "a/b", "prefix": "a/b", "host_label": "a", "enum": "a"}
_EXPECTED = {
    "segment": "one path segment of letters, digits, `.`, `_`, `~`, `-`; `*` for a part of it",
    "repo": "owner/name without .git, like acme/widgets or acme/*",
    "prefix": "path segments without a slash at either end, like team/app",
    "host_label": "one label of a host name in small letters, like eu-west-1",
    "enum": "one of the values of the service",
}


@dataclass(frozen=True, slots=True)
class Service:
    """A service that has been checked, with the places of what it says."""

    model: ServiceFile
    document: Document


@dataclass(frozen=True, slots=True)
class Reach:
    """One group of hosts and requests with every parameter filled in; `via` is its `file:line`."""

    entry: ServiceEntry
    hosts: tuple[str, ...]
    requests: tuple[str, ...]
    via: str


def check_service(service: Service, lists: Container[str], findings: Findings) -> None:
    """Add every problem that a service has by itself, used or not; `lists` are the lists that exist."""
    model, document = service.model, service.document
    parameters = model.parameters or {}
    used: set[str] = set()
    for name, parameter in parameters.items():
        _check_parameter(name, parameter, parameters, document, findings)
    for index, entry in enumerate(model.entries):
        _check_entry(index, entry, parameters, document, findings)
        if entry.hosts_from is not None and entry.hosts_from not in lists:
            at = document.place("entries", index, "hosts_from")
            hint = "lists are files in lists/, like lists/docs.txt"
            findings.add(
                document.path, at, Code.UNKNOWN_LIST, f"there is no list {quoted(entry.hosts_from)}", hint
            )
        for kind, texts in (("hosts", entry.hosts), ("requests", entry.requests)):
            for position, text in enumerate(texts or ()):
                steps = ("entries", index, kind, position)
                used |= _check_text(kind, text, parameters, document, steps, findings)
    for name in parameters.keys() - used:
        place = document.key_place("parameters", name)
        findings.add(
            document.path,
            place,
            Code.BAD_PARAMETER,
            f"nothing uses the parameter {quoted(name)}",
            "remove it",
        )


def expand(
    service: Service,
    given: Mapping[str, list[str]],
    where: tuple[Document, tuple[Step, ...]],
    findings: Findings,
) -> Iterator[Reach]:
    """Yield the service's groups with the given values; problems with the values are added at `where`, the profile's entry."""
    parameters = service.model.parameters or {}
    if not _values_hold(service, given, where, findings):
        return
    for index, entry in enumerate(service.model.entries):
        line = service.document.place("entries", index).line
        hosts = tuple(_filled(entry.hosts or (), given, parameters, where, findings))
        requests = tuple(_filled(entry.requests or (), given, parameters, where, findings))
        yield Reach(entry, hosts, requests, f"{service.document.path}:{line}")


def sampled(text: str, parameters: Mapping[str, Parameter]) -> str:
    """Return a host or request of a service that has been checked, with a sample in place of each parameter."""
    for placeholder in _PLACEHOLDER.findall(text):
        name = _parameter(placeholder, parameters)
        sample = _SAMPLES[parameters[name].type] if name is not None else "a"
        text = text.replace(f"{{{placeholder}}}", sample)
    return text


def _check_parameter(
    name: str,
    parameter: Parameter,
    all_of_them: Mapping[str, Parameter],
    document: Document,
    findings: Findings,
) -> None:
    place = document.key_place("parameters", name)
    if not _NAME.fullmatch(name):
        findings.add(
            document.path,
            place,
            Code.BAD_PARAMETER,
            f"{quoted(name)}: small letters and `_` name a parameter",
        )
    if f"{name}s" in all_of_them:
        findings.add(
            document.path, place, Code.BAD_PARAMETER, f"{{{name}}} could mean {name} or {name}s", "rename one"
        )
    if (parameter.type == "enum") != (parameter.values is not None):
        hint = "an enum has `values`, no other type does"
        findings.add(
            document.path, place, Code.BAD_PARAMETER, f"{quoted(name)} is of type {parameter.type}", hint
        )
    for index, value in enumerate(parameter.values or ()):
        if not spells("enum", value):
            at = document.place("parameters", name, "values", index)
            findings.add(
                document.path, at, Code.BAD_PARAMETER, f"{quoted(value)}: letters, digits, `.`, `_`, `~`, `-`"
            )


def _check_entry(
    index: int,
    entry: ServiceEntry,
    parameters: Mapping[str, Parameter],
    document: Document,
    findings: Findings,
) -> None:
    place = document.place("entries", index)
    if (entry.hosts is None) == (entry.hosts_from is None):
        findings.add(
            document.path, place, Code.ENTRY_SELECTOR, "an entry has exactly one of: hosts, hosts_from"
        )
    if entry.treatment in ("tunnel", "relay") and entry.requests is not None:
        at = document.key_place("entries", index, "requests")
        findings.add(
            document.path, at, Code.NOT_INSPECTED, f"`requests` cannot be judged under {entry.treatment}"
        )
    if entry.treatment == "relay" and entry.ports is None:
        findings.add(document.path, place, Code.PORTS_REQUIRED, "`relay` needs `ports`")
    if entry.json_ is not None:
        requests = [sampled(text, parameters) for text in entry.requests or ()]
        check_json(entry.json_, requests, document, ("entries", index), findings)


def _check_text(
    kind: str,
    text: str,
    parameters: Mapping[str, Parameter],
    document: Document,
    steps: tuple[Step, ...],
    findings: Findings,
) -> set[str]:
    """Check one host or request with a sample in place of each parameter; return the parameters it uses."""
    place = document.place(*steps)
    used: set[str] = set()
    sample = text
    for name in _PLACEHOLDER.findall(text):
        parameter = _parameter(name, parameters)
        if parameter is None:
            near = did_you_mean(name, list(parameters))
            findings.add(document.path, place, Code.UNKNOWN_PARAMETER, f"{quoted('{' + name + '}')}{near}")
            return used
        if kind == "hosts" and not _is_label(parameters[parameter]):
            message = f"{{{name}}} in a host must be a host_label, or an enum of such labels"
            findings.add(document.path, place, Code.BAD_PARAMETER, message)
            return used | {parameter}
        used.add(parameter)
        sample = sample.replace(f"{{{name}}}", _SAMPLES[parameters[parameter].type])
    if kind == "hosts":
        read_pattern(sample, document.path, place, findings, permits=False)
    else:
        check_request(sample, document.path, document, steps, findings)
    return used


def check_request(
    text: str, path: str, document: Document, steps: tuple[Step, ...], findings: Findings
) -> None:
    """Add the problem of a request pattern, if it has one."""
    parsed = parse_request_pattern(text)
    if isinstance(parsed, BadPattern):
        hint = f'write "{parsed.proposal}"' if parsed.proposal else 'like "GET,HEAD /path/**"'
        findings.add(path, document.place(*steps), Code.BAD_REQUEST, f"{quoted(text)}: {parsed.detail}", hint)


def _parameter(placeholder: str, parameters: Mapping[str, object]) -> str | None:
    """`{repo}` is one value of the parameter `repo`, or of `repos`."""
    return next((name for name in (placeholder, f"{placeholder}s") if name in parameters), None)


def _is_label(parameter: Parameter) -> bool:
    if parameter.type == "enum":
        return all(spells("host_label", value) for value in parameter.values or ())
    return parameter.type == "host_label"


def spells(kind: str, value: str) -> bool:
    """Return whether a value is one of the type of parameter `kind`."""
    return _TYPES[kind].fullmatch(value) is not None and "**" not in value and len(value) <= 253


def _values_hold(
    service: Service,
    given: Mapping[str, list[str]],
    where: tuple[Document, tuple[Step, ...]],
    findings: Findings,
) -> bool:
    document, steps = where
    parameters = service.model.parameters or {}
    before = findings.count
    for name in given.keys() - parameters.keys():
        place = document.key_place(*steps, "with", name)
        message = (
            f"{quoted(name)} is no parameter of {service.model.service}{did_you_mean(name, list(parameters))}"
        )
        known = ", ".join(parameters) or "none"
        findings.add(document.path, place, Code.UNKNOWN_PARAMETER, message, f"its parameters: {known}")
    for name, parameter in parameters.items():
        if name not in given:
            message = f"{service.model.service} needs `{name}`: {_EXPECTED[parameter.type]}"
            place = document.place(*steps, "service")
            findings.add(document.path, place, Code.MISSING_PARAMETER, message, f"with: {{{name}: […]}}")
            continue
        for index, value in enumerate(given[name]):
            held = (
                value in (parameter.values or ())
                if parameter.type == "enum"
                else spells(parameter.type, value)
            )
            if not held:
                choices = ", ".join(parameter.values or ()) or _EXPECTED[parameter.type]
                place = document.place(*steps, "with", name, index)
                findings.add(
                    document.path,
                    place,
                    Code.BAD_PARAMETER,
                    f"{quoted(value)} is not a {parameter.type}",
                    choices,
                )
    return findings.count == before


def _filled(
    texts: tuple[str, ...] | list[str],
    given: Mapping[str, list[str]],
    parameters: Mapping[str, Parameter],
    where: tuple[Document, tuple[Step, ...]],
    findings: Findings,
) -> Iterator[str]:
    left = MOST_EXPANSIONS
    for text in texts:
        names = list(dict.fromkeys(_PLACEHOLDER.findall(text)))
        choices = [given[_parameter(name, parameters) or name] for name in names]
        for values in itertools.product(*choices):
            left -= 1
            if left < 0:
                document, steps = where
                message = f"the values make more than {MOST_EXPANSIONS} patterns"
                findings.add(
                    document.path, document.place(*steps), Code.TOO_MANY_VALUES, message, "use `*` in a value"
                )
                return
            filled = text
            for name, value in zip(names, values, strict=True):
                filled = filled.replace(f"{{{name}}}", value)
            yield filled
