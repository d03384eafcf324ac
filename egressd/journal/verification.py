"""Verification: walks a journal's lines and says where one was changed, removed, moved or put in, and where the end was cut.

What each line proves: `prev` is the SHA-256 of the line before, so a line is vouched for by the one behind it. The last one
is vouched for by its own signature where it is a head, or by the tip that control keeps outside of the journal. Flat memory;
total on any bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from egressd.journal.chain import BEGINNING, GENESIS, Link, digest, prev_of
from egressd.journal.heads import is_signed
from egressd.journal.rotation import REMOVED, last_line_of

FINDINGS_LIMIT: Final = 1000
"""Findings that are told; more are counted."""
UNSIGNED_LIMIT: Final = 5000
"""Lines without a head behind them that control, which signs every thousand, never leaves."""

_WAITING_LIMIT = 100_000
_TORN_LIMIT = 100
_SHAPE = re.compile(
    rb'\{"time":"[^"\\]{20,40}","schema":1,"seq":(\d{1,16}),"event":"(decision|end|lost|sandbox|policy|alert)",[ -~]*'
    rb',"prev":"([0-9a-f]{64})"\}\Z'
)
_PREFIX = b'{"time":"'
_NO_FIELDS: Final[Mapping[str, Any]] = {}

type Kind = Literal[
    "changed", "removed", "moved", "foreign", "cut", "beginning", "signature", "unsigned", "unchained"
]


class Finding(NamedTuple):
    """What is not as it was written: `place` is FILE:LINE as an editor counts, `words` a sentence with the records' numbers."""

    kind: Kind
    place: str
    words: str


@dataclass(slots=True)
class Outcome:
    """What a verification found; `notes` are no alarms but what a person should know of it."""

    lines: int = 0
    first: Link = BEGINNING
    last: Link = BEGINNING
    signed_to: int = 0
    signed_at: str = ""
    findings: list[Finding] = field(default_factory=list)
    more: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Say whether every line is as it was written."""
        return not self.findings

    def find(self, kind: Kind, place: str, words: str) -> None:
        """Add a finding, or count it where there are many."""
        if len(self.findings) < FINDINGS_LIMIT:
            self.findings.append(Finding(kind, place, words))
        else:
            self.more += 1


class _Read(NamedTuple):
    """A line of the chain, as far as a verification looks at it."""

    link: Link
    prev: str | None
    event: str
    place: str
    fields: Mapping[str, Any]


class _Gap(NamedTuple):
    """Lines that are missing: the last of them, before which line that shows, and what their neighbours say of them."""

    last: int
    place: str
    before: str
    after: str | None


class Verification:
    """One walk: `feed` every line of every file in order, then `end`."""

    def __init__(self, keys: Mapping[str, Ed25519PublicKey], *, restarts: bool = False) -> None:
        """`keys` are the public keys of heads by their ids; without any, heads prove nothing and are only counted.

        `restarts`: a chain may begin anew, as on a stream, which nobody reads back.
        """
        self.outcome = Outcome()
        self._keys = keys
        self._restarts = restarts
        self._last = BEGINNING
        self._place = ""
        self._expected = 1
        self._held: _Read | None = (
            None  # a line from further on: the first behind a gap, or one that stands wrong
        )
        self._suspects: list[tuple[int, str]] = []  # lines that the one behind them does not know
        self._gaps: dict[int, _Gap] = {}
        self._strays: list[_Read] = []
        self._torn: list[tuple[bytes, str]] = []
        self._since_head = 0
        self._unchained = 0
        self._is_chained = False
        self._removed_to = 0
        self._changed: set[int] = set()

    def feed(self, line: bytes, place: str) -> None:
        """Take the next line without its newline."""
        self.outcome.lines += 1
        read = _read(line, place)
        if read is None:
            self._torn.append((line, place))
            if len(self._torn) > _TORN_LIMIT:  # no crash leaves so much
                for _, where in self._torn:
                    self.outcome.find("foreign", where, "no record")
                self._torn.clear()
            return
        if self._torn:
            self._judge_torn(read)
        if read.prev is None:
            self._take_unchained(read)
            return
        self._is_chained = True
        self._since_head += 1
        if read.event == "head":
            self._judge_head(line, read)
        elif read.event == "journal":
            name = str(read.fields.get("detail")).removeprefix(REMOVED)
            self._removed_to = max(self._removed_to, last_line_of(name))
        self._judge(read)

    def end(self, tip: Link = BEGINNING) -> Outcome:
        """Close the walk; `tip` is the last line that is known to have been written, BEGINNING where that is not known."""
        outcome = self.outcome
        self._close_chain(tip)
        for line, place in self._torn:
            if _is_half(line):
                outcome.notes.append(
                    f"{place}: half a line at the end: egressd was killed in it, or writes it now"
                )
            else:
                outcome.find("foreign", place, "no record, and nothing behind it says where it came from")
        self._judge_end(tip)
        outcome.findings.sort(key=lambda found: _order(found.place))
        return outcome

    # one line

    def _judge(self, read: _Read) -> None:
        held, self._held = self._held, None
        if held is not None:
            if read.prev == held.link.digest and read.link.seq == held.link.seq + 1:
                self._resume(held)
            else:
                self._stray(held)
        joined = read.prev == self._last.digest
        if joined:
            self._confirm()
            if (
                read.link.seq != self._expected
            ):  # what stands before it is right, so that its number is not its own
                self._change(self._expected, read.place)
                read = read._replace(link=read.link._replace(seq=self._expected))
            self._accept(read)
        elif read.link.seq == self._expected:
            self._suspects.append((self._expected - 1, self._place))
            self._accept(read)
        elif read.link.seq > self._expected or read.prev == GENESIS:
            self._held = read
        else:
            self._stray(read)

    def _accept(self, read: _Read) -> None:
        if self.outcome.first == BEGINNING:
            self.outcome.first = read.link
        self._last, self._place = read.link, read.place
        self._expected = read.link.seq + 1

    def _resume(self, read: _Read) -> None:
        """Go on with a line that another follows: it is the first behind a gap, or of a chain of its own."""
        if read.link.seq < self._expected:
            self._begin_anew(read)
        else:
            self._confirm()
            self._accept_behind_gap(read)

    def _accept_behind_gap(self, read: _Read) -> None:
        if len(self._gaps) < _WAITING_LIMIT:
            gap = _Gap(read.link.seq - 1, read.place, self._last.digest, read.prev)
            self._gaps[self._expected] = gap
        else:
            self.outcome.more += 1
        self._accept(read)

    def _stray(self, read: _Read) -> None:
        if len(self._strays) < _WAITING_LIMIT:
            self._strays.append(read)
        else:
            self.outcome.more += 1

    def _begin_anew(self, read: _Read) -> None:
        self._close_chain(BEGINNING)
        words = "a chain begins anew here"
        if self._restarts:
            self.outcome.notes.append(
                f"{read.place}: {words}: egressd was started again; nothing proves the end before it"
            )
        else:
            self.outcome.find("beginning", read.place, words)
        self._changed.clear()
        self._accept(read)

    def _confirm(self) -> None:
        """The line behind the suspects stands where it was written, so that the last of them is not what it was.

        Those before it are not proved any more: each is known by the next alone.
        """
        if not self._suspects:
            return
        suspects, self._suspects = self._suspects, []
        seq, place = suspects[-1]
        unproved = f"; {_lines(suspects[0][0], seq - 1)} not proved any more" if len(suspects) > 1 else ""
        self._change(seq, place, unproved)

    def _change(self, seq: int, place: str, more: str = "") -> None:
        if seq not in self._changed:
            self._changed.add(seq)
            self.outcome.find("changed", place, f"line {seq} is not as it was written{more}")

    # the end of a chain

    def _close_chain(self, tip: Link) -> None:
        held, self._held = self._held, None
        if held is not None:
            if held.link.seq < self._expected:
                self._stray(held)
            else:
                self._confirm()
                self._accept_behind_gap(held)
        last = self._last
        if tip.seq == last.seq and tip != last:  # then the last one's word of its neighbour is worth nothing
            self._suspects.append((last.seq, self._place))
        self._confirm()
        for stray in self._strays:
            self._place_stray(stray)
        for first, gap in sorted(self._gaps.items()):
            if gap.before == GENESIS:
                words = f"{_lines(first, gap.last)} not in these files"
                if gap.last <= self._removed_to:
                    self.outcome.notes.append(f"{words}: removed by its retention, as the journal says")
                else:
                    self.outcome.find("beginning", gap.place, f"{words}: removed, or kept elsewhere")
            else:
                self.outcome.find("removed", gap.place, f"{_lines(first, gap.last)} missing before this one")
        self._strays.clear()
        self._gaps.clear()

    def _place_stray(self, stray: _Read) -> None:
        """Say of a line that stands wrong where it stood: where one of its number is missing, or nowhere."""
        seq = stray.link.seq
        for first, gap in self._gaps.items():
            if not first <= seq <= gap.last:
                continue
            del self._gaps[first]
            if first < seq:
                self._gaps[first] = _Gap(seq - 1, gap.place, gap.before, stray.prev)
            if seq < gap.last:
                self._gaps[seq + 1] = _Gap(gap.last, gap.place, stray.link.digest, gap.after)
            known = (seq < gap.last or gap.after == stray.link.digest) and (
                seq > first or gap.before == stray.prev
            )
            changed = "" if known else ", and is not as it was written"
            self.outcome.find("moved", stray.place, f"line {seq} stood before {gap.place}{changed}")
            return
        self.outcome.find("foreign", stray.place, f"a second line {seq}, or one that was given this number")

    # what is no line of the chain

    def _take_unchained(self, read: _Read) -> None:
        if self._is_chained:
            self.outcome.find(
                "unchained",
                read.place,
                f"line {read.link.seq} says nothing of the line before it: put in, or changed",
            )
            return
        self._unchained += 1
        self._accept(read)

    def _judge_torn(self, read: _Read) -> None:
        """Half lines that the next line vouches for, as they stand, are the traces of a crash or of a full disk."""
        torn, self._torn = self._torn, []
        content = b"\n".join(line for line, _ in torn)
        vouched = read.fields.get("torn") == f"{len(content)} {digest(content)}" and read.event == "journal"
        if vouched and all(_is_half(line) for line, _ in torn):
            said = f"egressd was killed in it, or its disk was full; line {read.link.seq} says so"
            self.outcome.notes.append(f"{torn[0][1]}: half a line: {said}")
            return
        for line, place in torn:
            seen = f", seen by egressd before line {read.link.seq}" if vouched else ""
            what = "half a line, and the line behind it does not say so" if _is_half(line) else "no record"
            self.outcome.find("foreign", place, f"{what}{seen}")

    # heads and the end

    def _judge_head(self, line: bytes, read: _Read) -> None:
        seq = read.link.seq
        key = self._keys.get(str(read.fields.get("key")))
        if key is None:
            if self._keys:
                self.outcome.find(
                    "signature", read.place, f"head {seq} is signed with a key that is not known"
                )
        elif is_signed(line, key):
            self.outcome.signed_to, self.outcome.signed_at = seq, str(read.fields.get("time"))
        else:
            self.outcome.find("signature", read.place, f"head {seq} does not bear its signature")
        self._since_head = 0

    def _judge_end(self, tip: Link) -> None:
        outcome, last = self.outcome, self._last
        outcome.last = last
        if tip.seq > last.seq:
            words = f"{_lines(last.seq + 1, tip.seq)} missing: cut off, or lost with a power failure"
            outcome.find("cut", self._place or "-", words)
        elif tip != BEGINNING and tip.seq < last.seq:
            outcome.notes.append(
                f"{_lines(tip.seq + 1, last.seq)} behind the end that is known: written just now, or by a process that was killed"
            )
        if self._keys and self._since_head > UNSIGNED_LIMIT:
            words = (
                f"the last {self._since_head} lines have no head behind them: made anew, or without the key"
            )
            outcome.find("unsigned", self._place, words)
        elif self._keys and self._since_head and tip == BEGINNING:
            outcome.notes.append(
                f"the last {self._since_head} lines are not signed; nothing proves that none was cut off behind them"
            )
        if self._unchained:
            outcome.notes.append(
                f"{self._unchained} lines are older than the chain; of them only the last is vouched for"
            )


def _read(line: bytes, place: str) -> _Read | None:
    match = _SHAPE.match(line)
    if match is not None:  # what egressd writes, read in a tenth of the time; its hash is judged in any case
        link = Link(int(match[1]), digest(line))
        return _Read(link, match[3].decode("ascii"), match[2].decode("ascii"), place, _NO_FIELDS)
    try:
        fields: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    seq = fields.get("seq")
    if type(seq) is not int or not 0 < seq < 2**53:
        return None
    return _Read(Link(seq, digest(line)), prev_of(fields), str(fields.get("event")), place, fields)


def _is_half(line: bytes) -> bool:
    """Say whether a crash can have left this: the beginning of a record, or the zeros of a block that was never written."""
    return _PREFIX.startswith(line[: len(_PREFIX)]) or not line.strip(b"\0")


def _lines(first: int, last: int) -> str:
    return f"line {first} is" if first == last else f"lines {first} to {last} are"


def _order(place: str) -> tuple[str, int]:
    name, _, number = place.rpartition(":")
    return name, int(number) if number.isdigit() else 0
