"""Which services of the catalogue would allow an attempt, and with which values of their parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from egressd.policy.attempt import RequestAttempt
from egressd.policy.effective import EffectiveEntry
from egressd.policy.model import AllowEntry, Parameter
from egressd.policy.names import format_host
from egressd.policy.paths import Target
from egressd.policy.requests import RequestPattern, parse_request_pattern
from egressd.rulefiles.document import Document, Node
from egressd.rulefiles.entries import Library, Reader
from egressd.rulefiles.narrowing import lanes, request_patterns
from egressd.rulefiles.overlaps import patterns
from egressd.rulefiles.problems import Findings, Place
from egressd.rulefiles.services import Service, spells

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_SHAPES = {"repo": r"[^/]+/[^/]+", "prefix": r"[^/]+(?:/[^/]+)*?"}


@dataclass(frozen=True, slots=True)
class Fit:
    """A service that would allow an attempt: the values for its parameters, and what it comes to with them."""

    service: str
    values: tuple[tuple[str, str], ...]
    entries: tuple[EffectiveEntry, ...]

    @property
    def as_yaml(self) -> str:
        """The words of an entry that name it, without the dash."""
        given = ", ".join(f'{name}: ["{value}"]' for name, value in self.values)
        return f"service: {self.service}" + (f"\nwith: {{{given}}}" if given else "")


def fits(library: Library, attempt: RequestAttempt) -> Iterator[Fit]:
    """Yield each service that surely allows the attempt, those for denials aside."""
    host = format_host(attempt.host)
    for name in sorted(library.services):
        service = library.services[name]
        if service.model.access == "deny":
            continue
        fit = next(
            filter(None, (_made(library, name, each) for each in _values(service, library, host, attempt))),
            None,
        )
        if fit is not None and any(allows(entry, attempt) for entry in fit.entries):
            yield fit


def allows(entry: EffectiveEntry, attempt: RequestAttempt) -> bool:
    """Return whether an allow by itself covers a request on an inspected connection."""
    if entry.treatment != "inspect" or not isinstance(attempt.host, tuple):
        return False
    if (attempt.scheme, attempt.port) not in lanes(entry):
        return False
    if not any(pattern.matches(attempt.host) for pattern in patterns(entry.hosts)):
        return False
    target = Target(attempt.target)
    return (
        target.is_origin_form
        and target.is_canonical
        and any(
            one.refuses(attempt.method, attempt.upgrade, target) is None for one in request_patterns(entry)
        )
    )


def _made(library: Library, name: str, values: dict[str, str]) -> Fit | None:
    findings = Findings()
    reader = Reader(Document("", Node(Place())), library, findings)
    given = {key: [value] for key, value in values.items()}
    entry = AllowEntry.model_validate({"service": name} | ({"with": given} if given else {}))
    made = reader.read("allow", entry, ())
    return Fit(name, tuple(values.items()), tuple(made)) if made and not findings.count else None


def _values(
    service: Service, library: Library, host: str, attempt: RequestAttempt
) -> Iterator[dict[str, str]]:
    """Yield values for all parameters of the service with which one of its groups may cover the attempt."""
    parameters = service.model.parameters or {}
    path = attempt.target.partition("?")[0]
    for entry in service.model.entries:
        hosts = entry.hosts or library.lists.get(entry.hosts_from or "", ())
        for text in hosts:
            from_host = _matched(text, host, parameters, below=text.startswith("*."))
            if from_host is None:
                continue
            for request in entry.requests or ("GET,HEAD /**",):
                template = request.partition(" ")[2].partition("?")[0]
                from_path = _matched(template, path, parameters)
                if from_path is None or any(from_host.get(k, v) != v for k, v in from_path.items()):
                    continue
                values = from_host | from_path
                if values.keys() == parameters.keys() and _carries(request, attempt.method):
                    yield values


def _carries(request: str, method: str) -> bool:
    parsed = parse_request_pattern(_PLACEHOLDER.sub("a", request))
    return (
        not isinstance(parsed, RequestPattern)
        or parsed.methods is None
        or method in parsed.methods
        or parsed.websocket
    )


def _matched(
    template: str, text: str, parameters: dict[str, Parameter], *, below: bool = False
) -> dict[str, str] | None:
    """Return the values with which the template becomes a pattern for the text; None when there are none."""
    pieces, names, last = [], [], 0
    for match in _PLACEHOLDER.finditer(template):
        name = next((n for n in (match[1], f"{match[1]}s") if n in parameters), None)
        if name is None:
            return None
        pieces.append(_glob(template[last : match.start()]))
        last = match.end()
        if name in names:
            pieces.append(f"(?P={name})")
        else:
            names.append(name)
            pieces.append(f"(?P<{name}>{_SHAPES.get(parameters[name].type, '[^/]+')})")
    pieces.append(_glob(template[last:]))
    expression = "".join(pieces)
    found = re.fullmatch(expression if not below else rf".+{expression[len('[^/]+') :]}", text)
    if found is None:
        return None
    values = {name: found[name] for name in names}
    return values if all(_holds(parameters[name], value) for name, value in values.items()) else None


def _glob(text: str) -> str:
    """Return an expression for literal text with stars; wider than the pattern, which is judged afterwards."""
    return "".join(
        ".*" if part == "**" else "[^/]+" if part == "*" else re.escape(part)
        for part in re.split(r"(\*\*|\*)", text)
    )


def _holds(parameter: Parameter, value: str) -> bool:
    if parameter.type == "enum":
        return value in (parameter.values or ())
    return "*" not in value and spells(parameter.type, value)
