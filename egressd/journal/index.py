"""The index: what most queries ask of a journal's records, in SQLite beside the file, so that millions are asked in seconds.

One index for one file, in the folder `FILE.d`. It only says where to look: each line that it names is read from the file and
asked again. What it says of a file that was exchanged or shortened is thrown away.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from egressd.journal.query import Query
from egressd.journal.reader import LINE_LIMIT
from egressd.journal.rotation import folder_of

_VERSION: Final = 2
_WORDS: Final = (
    "event",
    "layer",
    "verdict",
    "reason",
    "sandbox",
    "profile",
    "host",
    "method",
    "rule",
    "labels",
    "address",
)
_KINDS: Final = tuple(enumerate(_WORDS))
_NUMBERS: Final = ("count", "bytes_up", "bytes_down")
_COVERED: Final = frozenset(_WORDS) - {"address"} | {"since", "until", "label"}
_TOTALLED: Final = frozenset({"sandbox", "label", "verdict"})
_BATCH = 20_000
_MOST_WORDS = 500_000
"""Words kept in memory while an index is made; a hostile sandbox can send millions of names, which then stand in it twice."""
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)

_TABLES = f"""
CREATE TABLE known (version INTEGER, device INTEGER, inode INTEGER, size INTEGER, last BLOB);
CREATE TABLE word (id INTEGER PRIMARY KEY, kind INTEGER, text TEXT);
CREATE TABLE line (at INTEGER PRIMARY KEY, time INTEGER, {", ".join(f"{name} INTEGER" for name in (*_WORDS, *_NUMBERS))});
CREATE TABLE total (
    sandbox INTEGER, labels INTEGER, host INTEGER, verdict INTEGER, event INTEGER,
    attempts INTEGER, up INTEGER, down INTEGER, last INTEGER, PRIMARY KEY (sandbox, labels, host, verdict, event)
) WITHOUT ROWID;
"""
_MOST = 1 << 61
"""What a sum stays at: a hostile record may say what it likes, and two of these still are a number to SQLite."""
_SUM = f"""
INSERT INTO total VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    attempts = min(attempts + excluded.attempts, {_MOST}), up = min(up + excluded.up, {_MOST}),
    down = min(down + excluded.down, {_MOST}), last = max(last, excluded.last)
"""  # noqa: S608 -- a number of ours
_MOST_SUMS = 200_000
_INSERT = f"INSERT INTO line VALUES (?, ?{', ?' * len((*_WORDS, *_NUMBERS))})"  # noqa: S608 -- names of ours

_NOTHING: tuple[int, int, int, int, bytes] = (0, 0, 0, 0, b"")

type Advance = Callable[[int, int], None]


def index_path(journal: Path) -> Path:
    """Return where the index of a file lies."""
    return folder_of(journal) / f"{journal.name}.index"


class Index:
    """An open index of one file, which `file` is; brought up to what the file holds now."""

    def __init__(self, path: Path, file: BinaryIO, advance: Advance = lambda _at, _records: None) -> None:
        """Open or make it, and read what is new; raises OSError and sqlite3.Error. `advance` is told (bytes, records)."""
        place = index_path(path)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        self._file = file
        self._words: dict[tuple[int, str], int] = {}
        self._next_word = 1
        self._sums: dict[tuple[int, ...], list[int]] = {}
        self._size = 0
        try:
            self._open(place, advance)
        except sqlite3.DatabaseError:  # spoiled, by a crash for one
            place.unlink()
            self._open(place, advance)

    def _open(self, place: Path, advance: Advance) -> None:
        os.close(os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        self._db = sqlite3.connect(place, isolation_level=None)
        try:
            self._db.execute("PRAGMA synchronous = OFF")  # it can be made anew
            self._db.execute("PRAGMA journal_mode = MEMORY")
            self._size = self._known()
            self._follow(advance)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        """Let it go."""
        self._db.close()

    def lines(self, query: Query, *, ends: bool) -> Iterator[bytes]:
        """Yield the lines, without their newlines, that may be asked for, in order; with `ends` also those of attempts."""
        where, values = self._with_ends(query) if ends else self._where(query)
        found = self._db.execute(f"SELECT at FROM line WHERE {where} ORDER BY at", values)  # noqa: S608 -- of ids
        for (at,) in found:
            self._file.seek(at)
            yield self._file.readline(LINE_LIMIT + 1).rstrip(b"\n")

    def sums(self, query: Query) -> Iterator[tuple[str, str, str, str, int, int, int, float]]:
        """Yield (sandbox, labels, host, verdict, attempts, bytes up, bytes down, last time) of what is asked for, by host."""
        found: Iterable[tuple[Any, ...]]
        if all(term.key in _TOTALLED for term in query.terms):
            # kept as lines come; no time, no method and the like, but what is asked of a whole journal
            where, values = self._with_ends(query)
            rows: Iterator[tuple[Any, ...]] = self._db.execute(f"SELECT * FROM total WHERE {where}", values)  # noqa: S608 -- of ids
            found = (
                (s, la, h, v, n, up, down, last, event) for s, la, h, v, event, n, up, down, last in rows
            )
        else:
            where, values = self._with_ends(query)
            found = self._db.execute(
                "SELECT sandbox, labels, host, verdict, total(coalesce(count, 1)), total(bytes_up), total(bytes_down),"  # noqa: S608
                f" max(time), event FROM line WHERE {where} GROUP BY sandbox, labels, host, verdict, event",
                values,
            )
        names: dict[int | None, str] = {None: "", 0: ""}
        names.update(self._db.execute("SELECT id, text FROM word"))
        for sandbox, labels, host, verdict, attempts, up, down, last, event in found:
            said = names[verdict] if names[event] == "decision" else ""
            told = int(attempts) if said else 0
            if names[event] in {"decision", "end"}:
                yield (
                    names[sandbox],
                    names[labels],
                    names[host],
                    said,
                    told,
                    int(up),
                    int(down),
                    (last or 0) / 1e6,
                )

    def covers(self, query: Query) -> bool:
        """Say whether every term is answered by the index alone."""
        return all(term.key in _COVERED and "would-deny" not in term.values for term in query.terms)

    # asking

    def _with_ends(self, query: Query) -> tuple[str, list[int | None]]:
        """Return the same condition, or that it is the end of what may have been asked for."""
        where, values = self._where(query)
        loose, more = self._where(query.of_ends)
        return f"({where}) OR (event IN ({self._ids('event', 'end'.__eq__)}) AND ({loose}))", [*values, *more]

    def _where(self, query: Query) -> tuple[str, list[int | None]]:
        """Return a condition that holds for every line that is asked for, and for few others."""
        parts, values = ["1"], list[int | None]()
        for term in query.terms:
            if term.key in {"since", "until"}:
                parts.append("time >= ?" if term.key == "since" else "time < ?")
                values.append(_microseconds(term.values[0]))
            elif term.key == "sandbox":
                ids = self._ids("sandbox", lambda text, t=term: t.holds({"sandbox": text}))  # type: ignore[misc]
                labels = self._ids("labels", lambda text, t=term: t.holds({"labels": json.loads(text)}))  # type: ignore[misc]
                parts.append(f"(sandbox IN ({ids}) OR labels IN ({labels}))")
            elif term.key == "label":
                ids = self._ids("labels", lambda text, t=term: t.holds({"labels": json.loads(text)}))  # type: ignore[misc]
                parts.append(f"labels IN ({ids})")
            elif term.key == "host":
                hosts = self._ids("host", lambda text, t=term: t.holds({"host": text}))  # type: ignore[misc]
                dialled = self._ids("address", lambda text, t=term: t.holds({"address": text}))  # type: ignore[misc]
                parts.append(f"(host IN ({hosts}) OR address IN ({dialled}))")
            elif term.key == "verdict" and "would-deny" in term.values:
                continue
            elif term.key in _WORDS:
                ids = self._ids(term.key, lambda text, t=term: t.holds({t.key: text}))  # type: ignore[misc]
                parts.append(f"{term.key} IN ({ids})")
        return " AND ".join(parts), values

    def _ids(self, kind: str, wanted: Callable[[str], bool]) -> str:
        words = self._db.execute("SELECT id, text FROM word WHERE kind = ?", (_WORDS.index(kind),))
        return ",".join(str(number) for number, text in words if wanted(text))

    # making

    def _known(self) -> int:
        """Return how much of the file is in the index; an index of another file is emptied."""
        with contextlib.suppress(sqlite3.OperationalError):
            known = self._db.execute("SELECT version, device, inode, size, last FROM known").fetchone()
            version, device, inode, size, last = known if known is not None else _NOTHING
            if version == _VERSION and self._is_same(device, inode, size, last):
                (self._next_word,) = self._db.execute("SELECT coalesce(max(id), 0) + 1 FROM word").fetchone()
                for number, kind, text in self._db.execute(
                    "SELECT id, kind, text FROM word ORDER BY id DESC LIMIT ?", (_MOST_WORDS,)
                ):
                    self._words[kind, text] = number
                return int(size)
        for name in ("known", "word", "line", "total"):
            self._db.execute(f"DROP TABLE IF EXISTS {name}")
        self._db.executescript(_TABLES)
        return 0

    def _is_same(self, device: int, inode: int, size: int, last: bytes) -> bool:
        status = os.fstat(self._file.fileno())
        if (status.st_dev, status.st_ino) != (device, inode) or status.st_size < size:
            return False
        return os.pread(self._file.fileno(), len(last), max(0, size - len(last))) == last

    def _follow(self, advance: Advance) -> None:
        """Read what the file holds behind what is known."""
        self._file.seek(self._size)
        at, records, last = self._size, 0, b""
        self._db.execute("BEGIN")
        batch: list[tuple[Any, ...]] = []
        while raw := self._file.readline(LINE_LIMIT + 1):
            if not raw.endswith(b"\n") and len(raw) <= LINE_LIMIT:
                break  # it is being written
            row = self._row(at, raw)
            at, last = at + len(raw), raw
            if row is not None:
                batch.append(row)
                self._add(row)
                records += 1
            if len(batch) >= _BATCH:
                self._db.executemany(_INSERT, batch)
                batch.clear()
                if len(self._sums) >= _MOST_SUMS:
                    self._write_sums()
                advance(at, records)
        self._db.executemany(_INSERT, batch)
        self._write_sums()
        if at != self._size:
            status = os.fstat(self._file.fileno())
            self._db.execute("DELETE FROM known")
            known = (_VERSION, status.st_dev, status.st_ino, at, last[-256:])
            self._db.execute("INSERT INTO known VALUES (?, ?, ?, ?, ?)", known)
        self._db.execute("COMMIT")
        self._size = at

    def _add(self, row: tuple[Any, ...]) -> None:
        _, time, event, _, verdict, _, sandbox, _, host, _, _, labels, _, count, up, down = row
        key = (sandbox or 0, labels or 0, host or 0, verdict or 0, event or 0)
        one = self._sums.get(key)
        if one is None:
            one = self._sums[key] = [0, 0, 0, 0]
        one[0] = min(one[0] + (1 if count is None else count), _MOST)
        one[1] = min(one[1] + (up or 0), _MOST)
        one[2] = min(one[2] + (down or 0), _MOST)
        if time is not None and time > one[3]:
            one[3] = time

    def _write_sums(self) -> None:
        self._db.executemany(_SUM, ((*key, *one) for key, one in self._sums.items()))
        self._sums.clear()

    def _row(self, at: int, raw: bytes) -> tuple[Any, ...] | None:
        try:
            fields = json.loads(raw)
        except (ValueError, RecursionError):
            return None
        if not isinstance(fields, dict):
            return None
        get, word = fields.get, self._word
        if "host" not in fields:
            fields["host"] = get("host_raw") or get("address")
        labels = get("labels")
        if labels is not None:
            fields["labels"] = json.dumps(labels) if isinstance(labels, dict) else None
        words = [word(kind, get(name)) for kind, name in _KINDS]
        return (
            at,
            _microseconds(get("time")),
            *words,
            _number(get("count")),
            _number(get("bytes_up")),
            _number(get("bytes_down")),
        )

    def _word(self, kind: int, text: Any) -> int | None:
        if not isinstance(text, str):
            return None
        number = self._words.get((kind, text))
        if number is None:
            if len(self._words) >= _MOST_WORDS:
                self._words.clear()
            number = self._words[kind, text] = self._next_word
            self._next_word += 1
            text = text.encode("utf-8", "backslashreplace").decode("utf-8")
            self._db.execute("INSERT INTO word VALUES (?, ?, ?)", (number, kind, text))
        return number


def _microseconds(time: Any) -> int | None:
    try:
        moment = dt.datetime.fromisoformat(time)
        return (moment - _EPOCH) // _MICROSECOND
    except (TypeError, ValueError, OverflowError):
        return None


def _number(value: Any) -> int | None:
    if value is None:
        return None
    return value if type(value) is int and 0 <= value <= _MOST else None
