"""`egressd approvals`: what sandboxes ask people for, and the answers: the daemon's, and those of runs that stand alone."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

_APPROVAL: Final = re.compile(r"apr-[0-9a-f]{16}\Z")
_GRANT: Final = re.compile(r"gnt-[0-9a-f]{16}\Z")
_SANDBOX: Final = re.compile(r"sbx-[0-9a-f]{20}\Z")
_PAUSE: Final = 1.0
"""Seconds between two looks of `watch`."""
_TOKEN: Final = "x-egressd-approver-token"  # noqa: S105 -- the name of a field


class Scope(StrEnum):
    """What an approval covers, the narrowest first."""

    REQUEST = "request"
    TEMPLATE = "template"
    HOST = "host"
    CONNECTION = "connection"


class Length(StrEnum):
    """For how long."""

    ONCE = "once"
    SHORT = "15m"
    LIFE = "life"


_Id = Annotated[str, typer.Argument(metavar="ID", help="apr-…, as `ls` shows it.")]
_Because = Annotated[str, typer.Option(help="Why, for the record.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Token = Annotated[
    Path | None,
    typer.Option(
        "--as-token-file", metavar="FILE", help="Your token of approvals.people, which says who you are."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the verb."""
    verbs = typer.Typer(
        help="What sandboxes ask people for, and the answers.", no_args_is_help=True, rich_markup_mode=None
    )
    verbs.command("ls", help="List what waits.")(ls)
    verbs.command("show", help="Show one: what it asks for, and what can be granted.")(show)
    verbs.command("approve", help="Approve one, by default for one request.")(approve)
    verbs.command("deny", help="Refuse one.")(deny)
    verbs.command("watch", help="Print what comes, until interrupted.")(watch)
    verbs.command("ask", help="Ask for a request on a sandbox's behalf, to approve it then.")(ask)
    verbs.command("propose", help="Print a patch of the rules that allows it for good.")(propose)
    verbs.command("grants", help="List what is granted.")(grants)
    verbs.command("revoke", help="Take a grant back; what goes on by it is cut.")(revoke)
    app.add_typer(verbs, name="approvals")


def ls(
    every: Annotated[bool, typer.Option("--all", help="Answered ones too.")] = False, as_json: _Json = False
) -> None:
    """List approvals."""
    found = [
        one
        for _, said in _everywhere(f"/v1/approvals?state={'all' if every else 'waiting'}")
        for one in said["approvals"]
    ]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for one in found:
        print(
            "\t".join(
                (one["id"], one["state"], one["sandbox"], one["profile"], one["request"], f"{one['count']}x")
            )
        )


def show(approval: _Id, as_json: _Json = False) -> None:
    """Show an approval."""
    _, one = _find(approval)
    print(json.dumps(one, indent=2) if as_json else "\n".join(_told(one)))


def approve(
    approval: _Id,
    scope: Annotated[Scope | None, typer.Option(help="What it covers.", show_default="the narrowest")] = None,
    length: Annotated[
        Length | None, typer.Option("--for", help="For how long.", show_default="the shortest")
    ] = None,
    because: _Because = "",
    policy: Annotated[
        str | None,
        typer.Option(metavar="DIGEST", help="The rules that you reviewed it under; others are refused."),
    ] = None,
    token: _Token = None,
) -> None:
    """Approve a question."""
    from egressd.cli import client

    place, one = _find(approval)
    option = next((each for each in one["options"] if scope is None or each["scope"] == scope), None)
    if option is None:
        offered = ", ".join(each["scope"] for each in one["options"])
        client.fail(f"{scope} is none of what can be granted here: {offered}", client.BAD_INPUT)
    chosen = length or option["lengths"][0]
    body = {
        "scope": option["scope"],
        "length": str(chosen),
        "policy": policy or one["policy"],
        "because": because,
    }
    made = client.at(place, "POST", f"/v1/approvals/{approval}/approve", body, _fields(token))
    if made["state"] == "waiting":
        print(f"{approval}\tapproved by {', '.join(made['approved_by'])}; {made['needed']} people are needed")
        return
    print(f"{approval}\t{made['state']}\t{made['grant']}\t{option['covers']}\tfor {chosen}")


def deny(approval: _Id, because: _Because = "", token: _Token = None) -> None:
    """Refuse a question."""
    from egressd.cli import client

    place, _ = _find(approval)
    made = client.at(place, "POST", f"/v1/approvals/{approval}/deny", {"because": because}, _fields(token))
    print(f"{approval}\t{made['state']}")


def watch(as_json: _Json = False) -> None:
    """Print what comes to wait, and what becomes of it."""
    seen: dict[str, tuple[str, int]] = {}
    try:
        while True:
            for _, said in _everywhere("/v1/approvals?state=all"):
                for one in said["approvals"]:
                    now = (one["state"], len(one["approved_by"]))
                    if seen.get(one["id"]) == now or (one["id"] not in seen and one["state"] != "waiting"):
                        continue
                    seen[one["id"]] = now
                    print(json.dumps(one) if as_json else "\n".join((*_told(one), "")), flush=True)
            time.sleep(_PAUSE)
    except KeyboardInterrupt:
        return


def ask(
    sandbox: Annotated[str, typer.Argument(metavar="SANDBOX")],
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="METHOD URL, or tcp://host:port.")],
) -> None:
    """Ask for a request on a sandbox's behalf."""
    from egressd.cli import client

    if not _SANDBOX.match(sandbox):
        client.fail(f"{sandbox!r} is no id of a sandbox", client.BAD_INPUT)
    body = {"sandbox": sandbox, "request": request}
    places = [place for place, _ in _everywhere("/v1/grants")]
    alone = [place for place in places if sandbox in place.name]
    print("\n".join(_told(client.at((alone or places)[0], "POST", "/v1/approvals", body))))


def propose(
    approval: _Id,
    scope: Annotated[Scope | None, typer.Option(help="What it covers.", show_default="the narrowest")] = None,
) -> None:
    """Print a patch for the rules folder."""
    from egressd.cli import client

    place, one = _find(approval)
    wanted = scope or one["options"][0]["scope"]
    print(client.at(place, "GET", f"/v1/approvals/{approval}/proposal?scope={wanted}")["patch"], end="")


def grants(
    every: Annotated[bool, typer.Option("--all", help="Those that are over too.")] = False,
    as_json: _Json = False,
) -> None:
    """List grants."""
    found = [one for _, said in _everywhere("/v1/grants") for one in said["grants"]]
    found = [one for one in found if every or one["state"] in ("live", "spent")]
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for one in found:
        print(
            "\t".join(
                (
                    one["id"],
                    one["state"],
                    one["sandbox"],
                    one["ends"],
                    one["covers"],
                    one["by"],
                    one["because"] or "-",
                )
            )
        )


def revoke(
    grant: Annotated[str, typer.Argument(metavar="GRANT", help="gnt-…")], token: _Token = None
) -> None:
    """Take a grant back."""
    from egressd.cli import client

    if not _GRANT.match(grant):
        client.fail(f"{grant!r} is no id of a grant", client.BAD_INPUT)
    for place, said in _everywhere("/v1/grants"):
        if any(one["id"] == grant for one in said["grants"]):
            print(
                f"{grant}\t{client.at(place, 'DELETE', f'/v1/grants/{grant}', None, _fields(token))['state']}"
            )
            return
    client.fail("there is no such grant", client.NO)


# what is asked of whom


def _everywhere(path: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield what each process that can be asked says; exits with 3 where there is none."""
    from egressd.cli import client
    from egressd.cli.options import given_config
    from egressd.control.approvals.window import places
    from egressd.control.config import ConfigError

    try:
        control = given_config().control_socket
    except ConfigError as error:
        client.fail(str(error), client.BAD_INPUT)
    asked = 0
    for place in (control, *places(control)):
        said = client.reach(place, "GET", path)
        if said is not None:
            asked += 1
            yield place, client.fit(said)
    if not asked:
        hint = "`egressd serve` is one; a run that stands alone listens beside it"
        client.fail(
            f"no daemon listens at {control}, and no run beside it\nhint: {hint}", client.COULD_NOT_RUN
        )


def _find(approval: str) -> tuple[Path, dict[str, Any]]:
    from egressd.cli import client

    if not _APPROVAL.match(approval):
        client.fail(f"{approval!r} is no id of an approval", client.BAD_INPUT)
    everywhere = _everywhere("/v1/approvals?state=all")
    found = ((place, one) for place, said in everywhere for one in said["approvals"] if one["id"] == approval)
    place, one = next(found, (None, {}))
    if place is None:
        client.fail("there is no such approval", client.NO)
    return place, one


def _fields(token: Path | None) -> dict[str, str]:
    from egressd.cli import client

    if token is None:
        return {}
    try:
        text = token.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        client.fail(f"{token}: {getattr(error, 'strerror', None) or 'it is no text'}", client.BAD_INPUT)
    if not text.isascii() or not text.isprintable() or not text:
        client.fail(f"{token}: it holds no token", client.BAD_INPUT)
    return {_TOKEN: text}


# how it is shown


def _told(one: Mapping[str, Any]) -> Iterator[str]:
    """Say what a person has to know. What the sandbox chose was escaped where it was heard."""
    labels = "".join(f" {key}={value}" for key, value in one["labels"].items())
    rule = f"{one['rule']} ({one['place']})" if one["rule"] else "no rule speaks of it"
    yield f"{one['id']}  {one['state']}  {one['request']}"
    yield f"  sandbox: {one['sandbox']}, profile {one['profile']}{labels}"
    yield f"  why it waits: {one['reason']}: {rule}; rules {one['policy']}"
    yield f"  asked: {one['count']} times, first {one['asked']}, last {one['last']} (by {one['asked_by']})"
    if one["untrusted_words"]:
        yield f"  words of the program in the sandbox, which may be false: {json.dumps(one['untrusted_words'])}"
    if one["credentials"]:
        yield f"  credentials that rules attach on this host: {', '.join(one['credentials'])}"
    if one["approvers"]:
        yield f"  approvers: {', '.join(one['approvers'])}"
    if one["needed"] > 1:
        yield f"  {one['needed']} people must approve it; so far: {', '.join(one['approved_by']) or 'nobody'}"
    if one["by"]:
        yield f"  {one['state']} by {one['by']} at {one['decided']}{': ' + one['because'] if one['because'] else ''}"
    if one["grant"]:
        yield f"  grant: {one['grant']}"
    for option in one["options"] if one["state"] == "waiting" else ():
        yield f"  {option['scope']} ({', '.join(option['lengths'])}): {option['covers']}"
        yield from (f"    opens: {opened}" for opened in option["opens"])
        first = option["lengths"][0]
        yield f"    egressd approvals approve {one['id']} --scope {option['scope']} --for {first} --policy {one['policy']}"
