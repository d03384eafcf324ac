"""`egressd demo`: real tools in a sandbox, in a small internet of its own; what the rules say is held against what happens."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:  # the lab and the rule language are loaded when the demo runs, not for `--help`
    from egressd.lab.demo.books import Account, Expectation, Fields
    from egressd.lab.demo.moves import Move
    from egressd.lab.demo.performer import Outcome, Performer
    from egressd.lab.demo.stage import Left, Stage
    from egressd.rulefiles.load import Rules

YES, NO, COULD_NOT_RUN, INTERRUPTED = 0, 1, 3, 130
_SECONDS = 50.0
"""The longest that a demo may take; it takes about ten."""
_SETTLING = 3.0
"""Seconds for the last record of a move to come: refused packets reach the journal in batches."""
_PROFILE = "lab"
_PROGRAMS = {
    "bwrap": "bubblewrap",
    "iptables-restore": "iptables",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "curl": "curl",
    "git": "git",
    "dig": "bind9-dnsutils",
    "ping": "iputils-ping",
    "/usr/bin/python3": "python3",
    "/usr/bin/pip3": "python3-pip",
}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("demo", help="Show it at work: real tools in a sandbox, allowed and refused.")(demo)


def demo(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep rules and journal, and say where.")] = False,
    rootless: Annotated[bool, typer.Option("--rootless", hidden=True)] = False,
) -> None:
    """Make every move and compare: 0 all as the rules say, 1 any surprise, 3 could not run."""
    from egressd.cli.demo_table import DemoTable
    from egressd.lab import LabError
    from egressd.rulefiles.shipped import shipped_rules

    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # whoever ends us, everything is taken down in order
    _require_programs()
    table = DemoTable(silent=as_json)
    try:
        with table, shipped_rules() as shipped:
            document = Demonstration(shipped, table, rootless=True if rootless else None, keep=keep).run()
    except (LabError, FileNotFoundError) as error:
        print(f"egressd demo: {error}", file=sys.stderr)
        if os.geteuid() != 0 and "CLONE_NEWUSER" in str(error):
            print("hint: let users make user namespaces, or run it as root", file=sys.stderr)
        raise typer.Exit(COULD_NOT_RUN) from None
    except KeyboardInterrupt:
        print("egressd demo: interrupted; everything has been taken down", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print(json.dumps(document, ensure_ascii=True))
    else:
        table.close_with(document)
    raise typer.Exit(NO if document["surprises"] else YES)


class Demonstration:
    """One run of the demo; `run` returns it as a document that `--json` prints and the table shows."""

    def __init__(self, shipped: Path, table: Any, *, rootless: bool | None, keep: bool) -> None:
        self._shipped = shipped
        self._table = table
        self._rootless = rootless
        self._keep = keep
        self._started = time.monotonic()
        self._rows: list[dict[str, Any]] = []
        self._surprises: list[str] = []
        self._kept: str | None = None

    def run(self) -> dict[str, Any]:
        """Build everything, make every move outside and inside, take everything down."""
        from egressd.lab.demo.performer import BrokeOff
        from egressd.lab.demo.stage import Stage

        books: dict[str, Any] = {}
        self._table.say("building a small internet")
        with Stage(self._shipped, rootless=self._rootless, seconds=_SECONDS) as stage:
            try:
                books = self._perform(stage)
            except (BrokeOff, LookupError) as error:
                self._surprises.append(f"the demo broke off: {error}")
            if self._keep:
                self._kept = tempfile.mkdtemp(prefix="egressd-demo-")
                stage.keep(Path(self._kept))
        return self._document(books)

    def _perform(self, stage: Stage) -> dict[str, Any]:
        from egressd.lab.demo import books
        from egressd.lab.demo.moves import FORBIDDEN, WELCOME

        rules = _loaded(stage.stand.rules)
        expected = {move: expectation(rules, move) for move in (*WELCOME, *FORBIDDEN)}
        for welcome, move in [(True, move) for move in WELCOME] + [(False, move) for move in FORBIDDEN]:
            if expected[move].allowed is not welcome:
                self._surprises.append(f"{move.title}: the rules {'refuse' if welcome else 'allow'} it")
        outside = self._outside(stage, FORBIDDEN)
        stage.lab.forget()
        self._table.say("starting a sandbox")
        performer, tally = stage.inside()
        outcomes: list[Outcome] = []
        with performer:
            for move in (*WELCOME, *FORBIDDEN):
                self._table.say(f"{len(outcomes) + 1}/{len(expected)} {move.title}")
                outcome, records = self._inside(stage, performer, move, expected[move])
                outcomes.append(outcome)
                self._row(move, expected[move], outcome, outside.get(move), records)
            performer.finish()
        sent = tally.stop()
        accounts = books.accounts(sent, outcomes, stage.stand.attempts())
        needed = needed_names(rules, (*WELCOME, *FORBIDDEN))
        left = stage.left(needed)
        self._surprises += books.imbalances(accounts, sent, stage.stand.records(event="lost"))
        self._surprises += books.leaks(left, needed)
        return _books(accounts, left)

    def _outside(self, stage: Stage, moves: tuple[Move, ...]) -> dict[Move, Outcome]:
        outcomes: dict[Move, Outcome] = {}
        with stage.outside() as performer:
            for move in moves:
                self._table.say(f"without egressd: {len(outcomes) + 1}/{len(moves)} {move.title}")
                outcomes[move] = performer.make(move)
            performer.finish()
        return outcomes

    def _inside(
        self, stage: Stage, performer: Performer, move: Move, expected: Expectation
    ) -> tuple[Outcome, list[Fields]]:
        """Make a move in the sandbox and wait for its records; those that came since its beginning are its own."""
        from egressd.lab.demo.books import missing

        before = len(stage.stand.records())
        outcome = performer.make(move)
        deadline = time.monotonic() + _SETTLING
        records: list[Fields] = []
        while True:
            records = list(stage.stand.records()[before:])
            if not missing(expected, records) or time.monotonic() > deadline:
                return outcome, records
            time.sleep(0.01)

    def _row(
        self,
        move: Move,
        expected: Expectation,
        inside: Outcome,
        outside: Outcome | None,
        records: list[Fields],
    ) -> None:
        from egressd.lab.demo.books import fits, surprises

        found = surprises(expected, inside, outside, records)
        self._surprises += [f"{move.title}: {surprise}" for surprise in found]
        decisive = expected.records[-1] if expected.records else None
        record = next((record for record in records if decisive is not None and fits(decisive, record)), None)
        row = {
            "tried": move.title,
            "command": [move.tool, *move.argv],
            "requests": list(move.requests),
            "verdict": "allow" if expected.allowed else "deny",
            "law": move.ruling.law if move.ruling else None,
            "saw": inside.saw,
            "record": record,
            "without": {"succeeded": outside.ok, "saw": outside.saw} if outside else None,
            "surprises": found,
        }
        self._rows.append(row)
        self._table.add(row)

    def _document(self, books: dict[str, Any]) -> dict[str, Any]:
        allowed = sum(row["verdict"] == "allow" for row in self._rows)
        refused = len(self._rows) - allowed
        summary = f"demo: {allowed} allowed, {refused} refused, all as the rules say"
        if self._surprises:
            summary = f"demo: {len(self._surprises)} surprises: {'; '.join(self._surprises)}"
        return {
            "schema": 1,
            "moves": self._rows,
            **books,
            "seconds": round(time.monotonic() - self._started, 1),
            "kept": self._kept,
            "surprises": self._surprises,
            "summary": summary,
        }


def expectation(rules: Rules, move: Move) -> Expectation:
    """Return what `egressd explain` says of a move's requests, as the records that must be found."""
    from egressd.lab.demo.books import Expectation

    decisions = [explained(rules, text) for text in move.requests]
    allowed = all(decision["verdict"] == "allow" for decision in decisions)
    if move.ruling is None:
        return Expectation(allowed, tuple(decisions))
    if move.ruling.layer is None:
        return Expectation(False, ())
    ruled = {
        "event": move.ruling.event,
        "layer": move.ruling.layer,
        "verdict": "deny",
        "reason": move.ruling.reason,
    }
    return Expectation(False, (ruled,))


def explained(rules: Rules, text: str) -> dict[str, Any]:
    """Return the fields of the record that a REQUEST must leave, as `egressd explain` decides it."""
    from egressd.policy.attempt import ConnectionAttempt, DnsQuestion
    from egressd.policy.names import format_host, format_name
    from egressd.rulefiles.explain import explain
    from egressd.rulefiles.requestline import BadLine, parse_request_line

    asked = parse_request_line(text)
    if isinstance(asked, BadLine):
        raise ValueError(f"{text!r}: {asked.detail}")
    decision, attempt = explain(rules, _PROFILE, asked, time.time()).decision, asked.attempt
    fields: dict[str, Any] = {
        "event": "decision",
        "verdict": decision.verdict,
        "reason": decision.reason.value,
        "rule": decision.entry.id if decision.entry else None,
        "place": decision.entry.place if decision.entry else None,
    }
    if isinstance(attempt, DnsQuestion):
        return fields | {"layer": "dns", "host": format_name(attempt.name), "qtype": asked.dns_type}
    fields |= {"host": format_host(attempt.host), "port": attempt.port}
    if isinstance(attempt, ConnectionAttempt):
        return fields | {"layer": "connection"}
    if decision.allowed and decision.entry is not None:
        fields["credential"] = decision.entry.credential
    path = attempt.target.partition("?")[0]
    return fields | {"layer": "request", "scheme": attempt.scheme, "method": attempt.method, "path": path}


def needed_names(rules: Rules, moves: tuple[Move, ...]) -> set[str]:
    """Return the names to which the moves make allowed connections: nothing else may be asked of DNS.

    A connection may be allowed and a request on it not: what the server speaks decides what the client is offered, so
    it is asked before the first request.
    """
    from egressd.policy.attempt import ConnectionAttempt, RequestAttempt
    from egressd.policy.decide import decide
    from egressd.policy.names import format_host
    from egressd.rulefiles.requestline import Asked, parse_request_line

    policy, now = rules.compiled(_PROFILE), time.time()
    names = set()
    for asked in (parse_request_line(text) for move in moves for text in move.requests):
        attempt = asked.attempt if isinstance(asked, Asked) else None
        if isinstance(attempt, RequestAttempt):
            attempt = ConnectionAttempt(attempt.host, attempt.port, attempt.scheme)
        if isinstance(attempt, ConnectionAttempt) and decide(policy, attempt, now).allowed:
            names.add(format_host(attempt.host))
    return names


def _loaded(folder: Path) -> Rules:
    from egressd.rulefiles.load import Rules, load_rules

    loaded = load_rules(folder)
    if isinstance(loaded, Rules):
        return loaded
    raise ValueError(str(loaded))


def _books(accounts: list[Account], left: Left) -> dict[str, Any]:
    return {"accounts": [asdict(account) for account in accounts], "left": asdict(left)}


def _require_programs() -> None:
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/local/sbin:/usr/sbin:/sbin"))
    lacking = sorted(
        {package for name, package in _PROGRAMS.items() if shutil.which(name, path=path) is None}
    )
    if lacking:
        print("egressd demo: missing programs.", file=sys.stderr)
        print(f"hint: sudo apt-get install -y {' '.join(lacking)}", file=sys.stderr)
        raise typer.Exit(COULD_NOT_RUN)
