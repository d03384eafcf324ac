"""`egressd kill --all`: ends every sandbox of the daemon, now."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("kill", help="End every sandbox of the daemon, now.")(kill)


def kill(
    every: Annotated[
        bool, typer.Option("--all", help="Every sandbox; there is no other choice, and no default.")
    ] = False,
) -> None:
    """End them; returns when they are gone."""
    from egressd.cli import client

    if not every:
        client.fail("--all is wanted\nhint: `egressd sandbox revoke ID` ends one", client.BAD_INPUT)
    print(f"{client.ask('DELETE', '/v1/sandboxes')['ended']} ended")
