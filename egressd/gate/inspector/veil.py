"""What lies over the response of an exchange that carries a credential: whatever the origin says of it, the sandbox sees `*`.

The last thing before bytes are written, behind the policy and a site's addons: heads, interim responses, trailers, bodies and the
frames of a WebSocket pass through here, or do not pass. Whatever raises ends the response (law 1). A body that is coded in a way
that could hide a secret is undone, or else not passed on at all.

A body that was undone is another representation than the origin has described. Its length is left to the framing; fields that
are true of the coded bytes alone are dropped; a strong ETag becomes a weak one (RFC 9110 §8.8.1: a strong one must change with
every byte; a weak one still finds its match in If-None-Match, which compares weakly, and no longer in If-Match and If-Range,
which must not match). A body that was only masked keeps its length, and its ETag: S3 wants those of uploads back as they are,
and what strong ones are for, joining ranges, is what `range` is off for.

A body whose length was declared is nobody's live stream, and of lines and structures nobody reads less than all: of these so much
stays behind always as could be a secret's beginning, and no cut tells whether it was. Other streams are not held back without
need, so their pauses can tell: docs/limits.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

from mitmproxy import http

from egressd.credentials.scrub import Mask, Scrubber, SteadyScrubber
from egressd.credentials.slots import fold, is_slot
from egressd.gate.inspector.body import Broken
from egressd.gate.inspector.head import Field
from egressd.gate.inspector.inflate import Inflater, coding_of

SIP: Final = 4 * 1024
_LEAST_SIP: Final = 64
"""Bytes of a coded body that are undone at a time: fewer where they stand for many, as they may for a thousand times as many."""

TURN: Final = 256 * 1024
"""Bytes that are masked before whatever else waits has its turn: a text made to look like a secret takes its time."""

_FRAMING: Final = frozenset({b"content-length", b"transfer-encoding"})
"""Fields that were judged as framing, and hold nothing else."""

_MESSAGE_CODINGS: Final = frozenset({b"grpc-encoding", b"connect-content-encoding"})
"""Codings inside a body, message by message: gRPC (PROTOCOL-HTTP2.md) and Connect."""

_CODED_ONLY: Final = frozenset(
    {b"content-encoding", b"content-length", b"content-digest", b"repr-digest", b"digest", b"content-md5"}
    | {b"accept-ranges", b"x-goog-hash"}
)
_CODED_ONLY_PREFIX: Final = b"x-amz-checksum-"

_SESSIONS: Final = frozenset({"set-cookie", "set-cookie2"})

_BY_LINE: Final = frozenset(
    {"text/event-stream", "text/html", "text/xml", "text/csv", "application/json", "application/xml"}
    | {"application/x-ndjson", "application/ndjson", "application/jsonl", "application/json-seq"}
    | {"application/jsonlines", "application/x-jsonlines", "application/stream+json"}
)
"""Types of which nobody waits for less than a line; and those that end in these: a structure is read when it is whole."""
_BY_LINE_ENDINGS: Final = ("+json", "+xml")


class Veil:
    """Masks one response."""

    __slots__ = ("_inflater", "_keys", "_scrubber", "_texts", "mask", "sip", "taken", "undone")

    def __init__(self, mask: Mask, *, keys: bool = False) -> None:
        """`mask` is that of the exchange's lease; with `keys` the sandbox may be given such as the origin makes."""
        self.mask = mask
        self._keys = keys
        self.taken: dict[str, None] = {}
        """The fields that held a key that the origin has made, and did not go on."""
        self.sip = SIP // 16
        """How many bytes of a coded body to give next."""
        self.undone = 0
        """Bytes that those given so far stood for."""
        self._texts = 0  # bytes masked outside the body
        self._scrubber: Scrubber | SteadyScrubber = Scrubber(mask)
        self._inflater: Inflater | None = None

    @property
    def found(self) -> int:
        """Bytes that were masked."""
        return self._texts + self._scrubber.found

    @property
    def inflates(self) -> bool:
        """Whether more may come out than goes in."""
        return self._inflater is not None

    def head(self, response: http.Response, method: str) -> str | None:
        """Mask a final head, and make ready for its body; returns why that cannot be looked into, and then nothing may go on."""
        given, status = response.headers.fields, response.status_code
        fields = given
        names = {name.lower() for name, _ in fields}
        coding = coding_of(value for name, value in fields if name.lower() == b"content-encoding")
        bodiless = method == "HEAD" or status in (204, 304)
        by_line = any(_is_by_line(value) for name, value in fields if name.lower() == b"content-type")
        if by_line or b"content-length" in names:
            self._scrubber = SteadyScrubber(self.mask, lines=by_line)
        if not bodiless:
            if isinstance(coding, Broken):
                return coding.detail
            if coding is not None and (status == 206 or b"content-range" in names):
                return "a part of a coded body"
            if not names.isdisjoint(_MESSAGE_CODINGS) and any(map(_codes_messages, fields)):
                return "messages are coded"
            if status == 226 or b"im" in names:
                return "a difference to another body"
        if coding is not None and not isinstance(coding, Broken):
            fields = tuple(_weak(field) for field in fields if not _is_coded_only(field[0].lower()))
            self._inflater = None if bodiless else Inflater(coding)
        masked = self.fields(fields)
        if masked is not given:
            response.headers = http.Headers(masked)
        response.data.reason = self.text(response.data.reason)
        return None

    def fields(self, fields: tuple[Field, ...]) -> tuple[Field, ...]:
        """Return fields of a head or a trailer section, masked: names too; without those that give the sandbox a key.

        A session that an origin opens for the credential (Set-Cookie) is as good as that: it would go wherever the sandbox takes
        it. Requests with the credential would not bring it back, as their cookies are taken out.
        """
        if not self._keys:
            given = [fold(name) for name, _ in fields if _gives_key(name)]
            if given:
                self.taken.update(dict.fromkeys(given))
                fields = tuple(field for field in fields if not _gives_key(field[0]))
        together = b"\n".join(chain.from_iterable(fields))
        if self.mask.whole(together) == together:
            return fields
        return tuple(
            (self.text(name), self.text(value)) if name.lower() not in _FRAMING else (name, value)
            for name, value in fields
        )

    def text(self, data: bytes) -> bytes:
        """Return some bytes that stand alone, masked."""
        masked = self.mask.whole(data)
        if masked != data:
            self.note(sum(old != new for old, new in zip(data, masked, strict=True)))
        return masked

    def note(self, count: int) -> None:
        """Count what was masked elsewhere."""
        self._texts += count

    def body(self, data: bytes) -> Iterator[bytes | Broken]:
        """Return what may go on of the body once `data` has come, in pieces, none of them empty; `Broken` is the last one."""
        pieces: Iterable[bytes | Broken] = (
            (data,) if self._inflater is None else self._undo(self._inflater, data)
        )
        for piece in pieces:
            masked = piece if isinstance(piece, Broken) else self._scrubber.feed(piece)
            if masked:
                yield masked

    def _undo(self, inflater: Inflater, data: bytes) -> Iterator[bytes | Broken]:
        before = self.undone
        for piece in inflater.feed(data):
            self.undone += len(piece) if isinstance(piece, bytes) else 0
            yield piece
        stood_for = self.undone - before
        if stood_for > TURN // 4:
            self.sip = max(_LEAST_SIP, self.sip // 2)
        elif stood_for < TURN // 16:
            self.sip = min(SIP, self.sip * 2)

    def end(self) -> Iterator[bytes | Broken]:
        """Return what is left of the body at its end."""
        problem = self._inflater.finish() if self._inflater is not None else None
        if problem is not None:
            yield problem
        elif rest := self._scrubber.finish():
            yield rest


def _gives_key(name: bytes) -> bool:
    folded = fold(name)
    return folded in _SESSIONS or is_slot(folded)


def _is_by_line(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower().decode("latin-1")
    return kind in _BY_LINE or kind.endswith(_BY_LINE_ENDINGS)


def _is_coded_only(lower: bytes) -> bool:
    return lower in _CODED_ONLY or lower.startswith(_CODED_ONLY_PREFIX)


def _codes_messages(field: Field) -> bool:
    return field[0].lower() in _MESSAGE_CODINGS and field[1].lower() != b"identity"


def _weak(field: Field) -> Field:
    name, value = field
    return (name, b"W/" + value) if name.lower() == b"etag" and value.startswith(b'"') else field
