"""`egressd log`: the journal as a table, as sums, or its lines as they are; what is asked for, and in which form."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import chain
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from egressd.cli import log_verify
from egressd.cli.folding import folded
from egressd.cli.log_export import print_csv, print_json, print_ocsf
from egressd.cli.log_source import Choice, NoJournal, Opened, open_journal, search
from egressd.cli.log_source import follow as following
from egressd.cli.log_summary import print_summary, summed
from egressd.cli.log_table import print_table
from egressd.cli.rows import row_of
from egressd.journal.query import KEYS, Query, is_term, parse_query, parse_term
from egressd.journal.reader import BadFilter, Line, Tally

_SHOW = "show"

type Verdict = Literal["allow", "deny", "ask"]
type Form = Literal["folded", "each", "followed", "summary", "json", "ocsf", "csv", "test"]


class _Out(Console):
    """Standard output; that its reader left is for the verb to judge."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


class Verbs(TyperGroup):
    """What stands below `log`; where none of them is named, the records are shown."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]  # typer hands in its own Context
        """Return what is left of the arguments, the verb first."""
        return super().parse_args(ctx, args if args and args[0] in self.commands else [_SHOW, *args])


def register(app: typer.Typer) -> None:
    """Add the verb and those below it."""
    verbs = typer.Typer(cls=Verbs, rich_markup_mode=None)
    verbs.command(_SHOW, help="Show what was tried, and what became of it. Below: `log verify`, `log key`.")(
        log
    )
    log_verify.register(verbs)
    app.add_typer(verbs, name="log", help="Show what was tried, and what became of it.")


def log(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE] [KEY:VALUE]...",
            help="The journal (- is standard input; default: the configured one), and what is asked for, as in "
            f"sandbox:web verdict:deny host:*.io since:2h method:POST. Keys: {', '.join(KEYS)}.",
        ),
    ] = None,
    sandbox: Annotated[str | None, typer.Option(help="Only this sandbox.")] = None,
    verdict: Annotated[Verdict | None, typer.Option(help="Only this verdict.")] = None,
    host: Annotated[str | None, typer.Option(help="Only this host; *.example.com is all below it.")] = None,
    since: Annotated[
        str | None, typer.Option(help="Only from then on: 30m, 2h, 7d, or a date or time, in UTC.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is written from now on.")
    ] = False,
    summary: Annotated[
        bool, typer.Option("--summary", help="Sums by sandbox and registered domain.")
    ] = False,
    each: Annotated[bool, typer.Option("--each", help="Each record in a row of its own, ends too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The lines of the journal as they are.")] = False,
    as_ocsf: Annotated[bool, typer.Option("--ocsf", help="OCSF events, a line each.")] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Comma-separated values, every field a column.")
    ] = False,
    as_test: Annotated[
        bool, typer.Option("--as-test", help="A file of tests: what was decided must be decided again.")
    ] = False,
    index: Annotated[
        bool | None,
        typer.Option(
            "--index/--no-index", help="Make an index beside the file, or none. Default: of large ones."
        ),
    ] = None,
) -> None:
    """Print the wanted records, newest last; exits 0 even if there is none."""
    query = _query(words or [], {"sandbox": sandbox, "verdict": verdict, "host": host, "since": since})
    choice: Choice = "auto" if index is None else ("always" if index else "never")
    form = _form(
        summary=summary, each=each, follow=follow, json=as_json, ocsf=as_ocsf, csv=as_csv, test=as_test
    )
    name = _file(words or [])
    tally = Tally()
    try:
        with ExitStack() as stack:
            opened = open_journal(stack, name, query.since)
            if form == "summary":
                _print_summary(opened, query, tally, choice)
            else:
                lines = search(opened, query, tally, ends=form == "folded", index=choice)
                _print_lines(chain(lines, following(opened[-1], query)) if follow else lines, form, query)
    except NoJournal as error:
        _refuse(str(error))
    except KeyboardInterrupt:  # how one stops to follow
        if not follow:
            raise
    except BrokenPipeError:  # `| head` has seen enough; Python flushes once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    except OSError as error:
        _refuse(f"{name or 'journal'}: {error.strerror or error}")
    if tally.torn:
        print(f"egressd: {tally.torn} torn or foreign lines were skipped", file=sys.stderr)


def _print_lines(lines: Iterable[Line], form: Form, query: Query) -> None:
    match form:
        case "test":
            _print_tests(lines)
        case "json":
            print_json(lines)
        case "ocsf":
            print_ocsf(lines)
        case "csv":
            print_csv(lines)
        case _:
            _allow_any_locale()
            records = folded(lines, query) if form == "folded" else (line.fields for line in lines)
            print_table(map(row_of, records), _Out(highlight=False), at_once=form == "followed")


def _print_summary(opened: list[Opened], query: Query, tally: Tally, choice: Choice) -> None:
    _allow_any_locale()
    print_summary(summed(opened, query, tally, choice), _Out(highlight=False))


def _allow_any_locale() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for locales that lack a character


def _print_tests(lines: Iterable[Line]) -> None:
    from egressd.rulefiles.fixtures import Fixtures

    fixtures = Fixtures()
    for line in lines:
        fixtures.add(line.fields)
    for text in fixtures.lines():
        print(text)
    for why, number in sorted(fixtures.left_out.items()):
        print(f"egressd log: {number} left out: {why}", file=sys.stderr)


def _query(words: list[str], options: dict[str, str | None]) -> Query:
    """Return what is asked for, by words and by options; what cannot be understood ends the verb."""
    now = time.time()
    query = parse_query(filter(is_term, words), now)
    if isinstance(query, BadFilter):
        _refuse(query.problem)
    terms = [*query.terms]
    for key, text in options.items():
        if text is None:
            continue
        term = parse_term(key, text, now)
        if isinstance(term, BadFilter):
            _refuse(f"--{key} {text!r}: {term.problem}")
        terms.append(term)
    return Query(tuple(terms))


def _file(words: list[str]) -> str | None:
    files = [word for word in words if not is_term(word)]
    if len(files) > 1:
        _refuse(
            f"{files[1]}: one journal at a time\nhint: a term begins with one of {', '.join(KEYS)} and a colon"
        )
    return files[0] if files else None


def _form(*, summary: bool, each: bool, follow: bool, json: bool, ocsf: bool, csv: bool, test: bool) -> Form:
    if summary + json + ocsf + csv + test + each > 1 or (follow and (summary or test)):
        _refuse(
            "--summary, --each, --json, --ocsf, --csv and --as-test exclude each other, and --follow the first and the last"
        )
    forms: dict[Form, bool] = {
        "summary": summary,
        "json": json,
        "ocsf": ocsf,
        "csv": csv,
        "test": test,
        "followed": follow,
        "each": each,
    }
    return next((form for form, wanted in forms.items() if wanted), "folded")


def _refuse(problem: str) -> NoReturn:
    print(f"egressd: {problem}", file=sys.stderr)
    raise typer.Exit(2)
