"""`egressd services`: the catalogue that profiles name, to look through and to review."""

from __future__ import annotations

import datetime as dt
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from egressd.cli.given import rules_folder

if TYPE_CHECKING:  # the reader of rules takes longer to import than `--help` should
    from egressd.policy.model import ServiceEntry
    from egressd.rulefiles.catalogue import Objection
    from egressd.rulefiles.entries import Library
    from egressd.rulefiles.services import Service

OBJECTIONS, BAD_INPUT = 1, 2

_HOSTS_SHOWN = 12

Folder = Annotated[
    Path | None, typer.Argument(metavar="[DIR]", help="The rules folder; otherwise --rules and its kin.")
]


def register(app: typer.Typer) -> None:
    """Add the verb with its own verbs."""
    services = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    services.command("list", help="Name every service, one a line.")(list_)
    services.command("show", help="Say what a service lets through, and what its risks are.")(show)
    services.command("lint", help="Say what a reviewer would object to.")(lint)
    services.callback()(lambda: None)
    app.add_typer(services, name="services", help="The catalogue of services that rules name.")


def list_(
    directory: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a service on stdout.")] = False,
) -> None:
    """Print every service with its access and parameters: 0, even if there is none; 2 bad input."""
    library, _ = _read(directory)
    services = sorted(library.services.values(), key=lambda service: service.model.service)
    if as_json:
        for service in services:
            print(json.dumps(_summary(service), ensure_ascii=True))
        return
    width = max((len(service.model.service) for service in services), default=0)
    for service in services:
        model = service.model
        given = f" (with {', '.join(model.parameters)})" if model.parameters else ""
        print(f"{model.service:<{width}}  {model.access:<5}  {model.reviewed}  {model.description}{given}")


def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The service.")],
    directory: Folder = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Print all that a service's file says, and how a profile names it: 0, or 2 for bad input."""
    from egressd.rulefiles.shape import did_you_mean

    library, root = _read(directory)
    service = library.services.get(name)
    if service is None:
        near = did_you_mean(name, sorted(library.services))
        raise _bad(f"there is no service {name!r}{near}\nhint: egressd services list")
    if as_json:
        print(json.dumps(_whole(service, library), ensure_ascii=True))
    else:
        print("\n".join(_lines(service, library, root)))


def lint(
    directory: Folder = None,
    at: Annotated[
        str | None, typer.Option(metavar="DAY", help="As on this day, like 2027-03-31; otherwise today.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a finding on stdout.")] = False,
) -> None:
    """Print every objection with its place: 0 none, 1 some, 2 bad input."""
    from egressd.rulefiles.catalogue import lint as objections

    library, root = _read(directory)
    found = objections(library, _day(at), root=str(root), known=_shipped_hosts())
    for one in found:
        print(json.dumps(_finding(one), ensure_ascii=True) if as_json else one)
    count = len(library.services)
    if found:
        print(
            f"egressd services lint: {len(found)} finding{'' if len(found) == 1 else 's'} in {count} services",
            file=sys.stderr,
        )
        raise typer.Exit(OBJECTIONS)
    print(f"egressd services lint: nothing to object to in {count} services", file=sys.stderr)


def _read(directory: Path | None) -> tuple[Library, Path]:
    from egressd.rulefiles.load import load_services
    from egressd.rulefiles.problems import Problems

    try:
        folder = directory or rules_folder()
    except ValueError as error:
        raise _bad(str(error)) from None
    loaded = load_services(folder)
    if isinstance(loaded, Problems):
        raise _bad(str(loaded))
    return loaded, folder


def _shipped_hosts() -> set[str]:
    """Return the hosts of the catalogue that comes with egressd; none where an installation lacks it."""
    from egressd.rulefiles.catalogue import hosts_of
    from egressd.rulefiles.load import load_services
    from egressd.rulefiles.problems import Problems
    from egressd.rulefiles.shipped import shipped_rules

    try:
        with shipped_rules() as folder:
            loaded = load_services(folder)
    except FileNotFoundError:
        return set()
    return set() if isinstance(loaded, Problems) else hosts_of(loaded)


def _lines(service: Service, library: Library, root: Path) -> Iterator[str]:
    model = service.model
    yield f"{model.service}: {model.description}"
    yield f"  file: {root}/{service.document.path}"
    yield f"  owner: {model.owner}, reviewed {model.reviewed}"
    yield f"  access: {model.access}{', expects a credential' if model.expects else ''}"
    for name, parameter in (model.parameters or {}).items():
        choices = f" ({', '.join(parameter.values)})" if parameter.values else ""
        told = f": {parameter.description}" if parameter.description else ""
        yield f"  with {name} ({parameter.type}{choices}){told}"
    for entry in model.entries:
        yield ""
        default = "everything" if model.access == "deny" else "GET,HEAD /**"
        yield from (f"  {line}" for line in _entry_lines(entry, library, default))
    for title, texts in (("risks", model.risks), ("sources", model.sources)):
        if texts:
            yield ""
            yield f"  {title}:"
            yield from (f"    {text}" for text in texts)
    yield ""
    yield f"  {'denied' if model.access == 'deny' else 'allowed'} by:"
    yield f"    - service: {model.service}"
    if model.parameters:
        yield f"      with: {{{', '.join(f'{name}: […]' for name in model.parameters)}}}"


def _entry_lines(entry: ServiceEntry, library: Library, default: str) -> Iterator[str]:
    from egressd.rulefiles.catalogue import hosts_named

    hosts = hosts_named(entry, library)
    more = f" and {len(hosts) - _HOSTS_SHOWN} more" if len(hosts) > _HOSTS_SHOWN else ""
    listed = f" ({entry.hosts_from})" if entry.hosts_from else ""
    schemes = f" over {' and '.join(entry.schemes)}" if entry.schemes else ""
    yield f"{', '.join(hosts[:_HOSTS_SHOWN])}{more}{listed}{schemes}"
    if entry.treatment not in (None, "inspect"):
        yield f"  {entry.treatment} on {', '.join(map(str, entry.ports or (443,)))}"
    else:
        yield from (f"  {request}" for request in entry.requests or (default,))
    if entry.credential == "never":
        yield "  never with the credential of the service"
    if entry.reads:
        yield f"  reads: {entry.reads}"
    if entry.because:
        yield f"  because: {entry.because}"


def _summary(service: Service) -> dict[str, object]:
    model = service.model
    return {
        "service": model.service,
        "description": model.description,
        "owner": model.owner,
        "reviewed": model.reviewed.isoformat(),
        "access": model.access,
        "expects_credential": model.expects is not None,
        "parameters": {name: parameter.type for name, parameter in (model.parameters or {}).items()},
    }


def _whole(service: Service, library: Library) -> dict[str, object]:
    from egressd.rulefiles.catalogue import hosts_named

    model = service.model
    entries = [
        {
            "hosts": list(hosts_named(entry, library)),
            "hosts_from": entry.hosts_from,
            "schemes": entry.schemes or ["https"],
            "ports": entry.ports,
            "treatment": entry.treatment or "inspect",
            "requests": entry.requests
            or (["GET,HEAD /**"] if entry.treatment in (None, "inspect") else None),
            "credential": entry.credential,
            "reads": entry.reads,
            "because": entry.because,
        }
        for entry in model.entries
    ]
    return {
        **_summary(service),
        "parameters": {
            name: {"type": one.type, "values": one.values, "description": one.description}
            for name, one in (model.parameters or {}).items()
        },
        "entries": entries,
        "risks": model.risks or [],
        "sources": model.sources,
    }


def _finding(one: Objection) -> dict[str, object]:
    from egressd.rulefiles.catalogue import WHY

    return {
        "path": one.path,
        "line": one.line,
        "column": one.column,
        "code": one.kind.value,
        "service": one.service,
        "message": one.message,
        "hint": one.hint,
        "why": WHY[one.kind],
    }


def _day(at: str | None) -> dt.date:
    if at is None:
        return dt.datetime.now(dt.UTC).date()
    try:
        return dt.date.fromisoformat(at)
    except ValueError:
        raise _bad(f"--at {at!r}: a day is written like 2027-03-31") from None


def _bad(text: str) -> typer.Exit:
    print(text, file=sys.stderr)
    return typer.Exit(BAD_INPUT)
