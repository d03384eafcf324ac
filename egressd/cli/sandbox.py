"""`egressd sandbox`: make, list, show and end the daemon's sandboxes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import typer

_ID = re.compile(r"sbx-[0-9a-f]{20}\Z")


class Format(StrEnum):
    """How what a new sandbox's clients need is printed."""

    SH = "sh"
    DOCKER = "docker"
    JSON = "json"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    sandbox = typer.Typer(help="The sandboxes of the daemon.", no_args_is_help=True, rich_markup_mode=None)
    sandbox.command("create", help="Make one, and print what its clients need: this once.")(create)
    sandbox.command("list", help="List those that are not gone.")(list_all)
    sandbox.command("show", help="Show one.")(show)
    sandbox.command("revoke", help="End one; returns when it is gone.")(revoke)
    app.add_typer(sandbox, name="sandbox")


def create(
    profile: Annotated[
        str, typer.Option(envvar="EGRESSD_PROFILE", help="The profile it lives under; there is no default.")
    ],
    wiring: Annotated[str, typer.Option(help="explicit, gateway, sidecar or namespace.")] = "explicit",
    label: Annotated[
        list[str] | None, typer.Option(help="A label for its records, k=v; may come again.")
    ] = None,
    traceparent: Annotated[str | None, typer.Option(help="W3C trace context of the agent.")] = None,
    ttl: Annotated[str | None, typer.Option(help="How long it may live, such as 2h.")] = None,
    source: Annotated[str | None, typer.Option(help="The address that it comes from.")] = None,
    mac: Annotated[str | None, typer.Option(help="gateway: the hardware address behind that.")] = None,
    port: Annotated[str | None, typer.Option(help="gateway: its port of the bridge.")] = None,
    pid: Annotated[int | None, typer.Option(help="namespace: a process of the running container.")] = None,
    netns: Annotated[str | None, typer.Option(help="namespace: the path of its network namespace.")] = None,
    form: Annotated[Format, typer.Option("--format", help="sh, docker (an --env-file) or json.")] = Format.SH,
) -> None:
    """Make a sandbox."""
    from egressd.cli import client
    from egressd.cli.options import label_of, seconds

    try:
        labels = dict(label_of(text) for text in label or ())
        lives = max(1, round(seconds(ttl))) if ttl is not None else None
    except ValueError as error:
        client.fail(str(error), client.BAD_INPUT)
    wanted = {
        "profile": profile, "wiring": wiring, "labels": labels, "traceparent": traceparent, "ttl": lives,
        "source": source, "mac": mac, "port": port, "pid": pid, "netns": netns,
    }  # fmt: skip
    asked = {name: value for name, value in wanted.items() if value is not None}
    made = client.ask("POST", "/v1/sandboxes", asked)
    if form is Format.JSON:
        print(json.dumps(made, indent=2))
        return
    for name, value in made["environment"].items():
        print(f"export {name}={shlex.quote(value)}" if form is Format.SH else f"{name}={value}")


def list_all(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List sandboxes."""
    from egressd.cli import client

    sandboxes = client.ask("GET", "/v1/sandboxes")["sandboxes"]
    if as_json:
        print(json.dumps(sandboxes, indent=2))
        return
    for sandbox in sandboxes:
        print("\t".join(_row(sandbox)))


def show(sandbox: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """Show a sandbox as JSON."""
    from egressd.cli import client

    print(json.dumps(client.ask("GET", f"/v1/sandboxes/{_known(sandbox)}"), indent=2))


def revoke(sandbox: Annotated[str, typer.Argument(metavar="ID")]) -> None:
    """End a sandbox."""
    from egressd.cli import client

    print("\t".join(_row(client.ask("DELETE", f"/v1/sandboxes/{_known(sandbox)}"))))


def _row(sandbox: Mapping[str, Any]) -> list[str]:
    labels = ",".join(f"{key}={value}" for key, value in sandbox["labels"].items())
    under = f"{sandbox['profile']} ({sandbox['canary']})" if sandbox.get("canary") else sandbox["profile"]
    fields = (sandbox["id"], sandbox["stage"], sandbox["wiring"], under, sandbox["created"])
    return [*fields, sandbox["source"] or "-", labels or "-"]


def _known(sandbox: str) -> str:
    """An id is part of a path here, so it is one or nothing is asked."""
    from egressd.cli import client

    if not _ID.match(sandbox):
        client.fail(f"{sandbox!r} is no id of a sandbox", client.BAD_INPUT)
    return sandbox
