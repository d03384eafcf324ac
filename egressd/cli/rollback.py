"""`egressd rollback`: puts rules in force again that were before, by the daemon where one runs, else by rewriting the folder.

The daemon keeps every set of rules that it adopts, and so does `egressd run`. Going back does not change the folder, unless
`--write` says so: the daemon passes it over until somebody changes it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from egressd.cli.rows import printable

if TYPE_CHECKING:
    from egressd.control.archive import Archive
    from egressd.control.config import Config
    from egressd.rulefiles.source import RuleSource

OK, NO, BAD_INPUT, COULD_NOT_RUN = 0, 1, 2, 3


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("rollback", help="Put rules in force again that were before, or list those that are kept.")(
        rollback
    )


def rollback(
    digest: Annotated[
        str | None,
        typer.Argument(
            metavar="[DIGEST]",
            help="Of the rules, or of a policy as records have it; its first digits do. Default: the rules before these.",
        ),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List the rules that are kept, and go nowhere.")
    ] = False,
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Also rewrite the rules folder; without a daemon nothing else goes back."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Go back: 0 done, 1 nothing to go back to or nothing done, 2 bad input, 3 could not."""
    from egressd.cli import client

    if digest is not None and not _is_digest(digest):
        client.fail(f"{digest!r} is no digest: 4 to 16 hex digits\nhint: egressd rollback --list", BAD_INPUT)
    daemon = client.is_there()
    if listed:
        _list(client.ask("GET", "/v1/rules") if daemon else _without_daemon(), as_json=as_json)
        return
    if daemon:
        back = client.ask("POST", "/v1/rules/rollback", {"digest": digest})
        if write:
            _rewrite(back["rules"])
        _tell(back, as_json=as_json)
        return
    _alone(digest, write=write, as_json=as_json)


def _is_digest(text: str) -> bool:
    return 4 <= len(text) <= 16 and not set(text) - set("0123456789abcdef")


def _tell(back: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(back, ensure_ascii=True))
        return
    print(printable(f"in force: {back['rules']}, gone back to from {back['before']}"))
    for note in back["notes"]:
        print(printable(str(note)))


def _list(known: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(known, ensure_ascii=True))
        return
    for one in known["kept"]:
        mark = "*" if one["digest"] == known["rules"] else " "
        count = len(one["policies"])
        profiles = f"{count} profile{'' if count == 1 else 's'}" if count else "no profiles told"
        print(printable(f"{mark} {one['digest']}  {one['adopted']}  {profiles}"))
    if known["passed_over"]:
        print(f"the rules folder ({known['passed_over']}) is passed over until it changes", file=sys.stderr)
    if not known["kept"]:
        print("no rules are kept yet", file=sys.stderr)


# without a daemon


def _config() -> Config:
    from egressd.cli import client
    from egressd.cli.options import given_config
    from egressd.control.config import ConfigError

    try:
        return given_config()
    except ConfigError as error:
        client.fail(str(error), BAD_INPUT)


def _without_daemon() -> dict[str, Any]:
    """Return what the daemon's API would tell."""
    from egressd.control.archive import Archive, in_force
    from egressd.journal.record import timestamp
    from egressd.rulefiles.problems import Findings

    config = _config()
    archive = Archive(config.state_dir, config.rules)
    passed = archive.passed()
    rules = in_force(config.rules, config.state_dir, Findings())
    return {
        "rules": rules.digest,
        "passed_over": passed.folder if passed is not None and rules.digest == passed.digest else None,
        "kept": [
            {"digest": one.digest, "adopted": timestamp(one.adopted), "policies": dict(one.policies)}
            for one in archive.kept()
        ],
    }


def _alone(digest: str | None, *, write: bool, as_json: bool) -> None:
    from egressd.cli import client
    from egressd.control.archive import Archive, Unkept
    from egressd.control.rollback import changed
    from egressd.rulefiles.problems import Findings
    from egressd.rulefiles.source import read_source

    config = _config()
    archive = Archive(config.state_dir, config.rules)
    current = read_source(config.rules, Findings())
    try:
        copy = archive.find(digest) if digest is not None else archive.before(current.digest)
        wanted = archive.read(copy.digest)
    except Unkept as error:
        client.fail(f"{error}\nhint: egressd rollback --list", NO)
    found = changed(current, wanted)
    if write:
        _rewrite(copy.digest)
        _tell(
            {"rules": copy.digest, "before": current.digest, "notes": [" ".join(one) for one in found]},
            as_json=as_json,
        )
        return
    if as_json:
        files = [{"path": path, "how": word} for word, path in found]
        print(json.dumps({"rules": copy.digest, "before": current.digest, "files": files}, ensure_ascii=True))
    else:
        print(f"going back from {current.digest} to {copy.digest} would change in {config.rules}:")
        for word, path in found:
            print(printable(f"  {word} {path}"))
    hint = f"egressd rollback {copy.digest} --write"
    client.fail(f"no daemon runs, and nothing was changed\nhint: `{hint}` rewrites the folder", NO)


def _rewrite(digest: str) -> None:
    """Rewrite the folder with a copy that can be used, what it holds now kept first, and record it. Exits where it fails."""
    from egressd.cli import client
    from egressd.control.archive import Archive, Unkept
    from egressd.control.rollback import rewrite
    from egressd.control.rulebook import kept_rules
    from egressd.control.surroundings import BadInput
    from egressd.rulefiles.problems import Findings
    from egressd.rulefiles.source import read_source

    config = _config()
    archive = Archive(config.state_dir, config.rules)
    findings = Findings(str(config.rules))
    current = read_source(config.rules, findings)
    try:
        wanted = kept_rules(config, os.environ, digest).source
        if findings.count:
            raise OSError(0, f"the folder cannot be read\n{findings.problems()}")
        _keep(archive, current)
        rewrite(config.rules, current, wanted)
    except BadInput as error:
        client.fail(str(error), BAD_INPUT)
    except Unkept as error:
        client.fail(str(error), NO)
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or str(error)
        client.fail(f"{config.rules} was not rewritten: {said}", COULD_NOT_RUN)
    _record(
        config,
        f"{config.rules} was rewritten from {current.digest} to {digest}, by uid {os.getuid()} pid {os.getpid()}",
    )


def _keep(archive: Archive, current: RuleSource) -> None:
    """Keep what is about to be overwritten, sound or not."""
    import time

    from egressd.rulefiles.load import Rules, load_source

    loaded = load_source(current, tested=False)
    policies = [loaded.effective(name) for name in loaded.profiles] if isinstance(loaded, Rules) else []
    archive.save(current, lambda: policies, time.time())


def _record(config: Config, detail: str) -> None:
    """Write it down. The folder is rewritten by then, so a journal that cannot be written is only told of."""
    from egressd.control.journaling import write_once
    from egressd.journal.heads import KeyUnusable
    from egressd.journal.record import Record, new_id
    from egressd.journal.writer import JournalUnavailable

    if not isinstance(config.journal, os.PathLike):
        print(f"egressd: not recorded, the journal is standard output: {detail}", file=sys.stderr)
        return
    attempt_id = new_id()
    record = Record(event="policy", sandbox="-", attempt_id=attempt_id, root_id=attempt_id, detail=detail)
    try:
        write_once(config, record.as_dict())
    except (JournalUnavailable, KeyUnusable, OSError) as error:
        print(f"egressd: not recorded, {error}: {detail}", file=sys.stderr)
