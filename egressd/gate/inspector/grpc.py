"""How a refusal looks to a gRPC client: an answer of trailers alone, with a status of gRPC's own. Pure.

The form is that of "gRPC over HTTP2" (PROTOCOL-HTTP2.md of the grpc project), under Trailers-Only.
"""

from __future__ import annotations

from typing import Final

from egressd.gate.inspector.head import Field
from egressd.gate.inspector.refusal import Refusal

PERMISSION_DENIED: Final = 7
RESOURCE_EXHAUSTED: Final = 8
UNAVAILABLE: Final = 14

_OWN = b"x-egressd-"


def is_grpc(content_type: bytes | None) -> bool:
    """Say whether a request's content type is gRPC's own; gRPC-Web is not."""
    if content_type is None:
        return False
    lower = content_type.lower()
    return lower.startswith(b"application/grpc") and lower[16:17] in (b"", b"+", b";", b" ")


def status_of(refusal: Refusal) -> int:
    """Return the gRPC status of a refusal: no rule, over a limit, or nobody to answer."""
    if refusal.status == 429:
        return RESOURCE_EXHAUSTED
    return UNAVAILABLE if refusal.status >= 500 else PERMISSION_DENIED


def trailers_of(refusal: Refusal) -> tuple[Field, ...]:
    """Return the trailers that end a call with a refusal; the message is its one sentence."""
    own = tuple(field for field in refusal.fields if field[0].startswith(_OWN))
    status = str(status_of(refusal)).encode("ascii")
    return ((b"grpc-status", status), (b"grpc-message", _encoded(refusal.phrase)), *own)


def answer_of(refusal: Refusal) -> tuple[Field, ...]:
    """Return the only header section of a refused call (Trailers-Only), its pseudo-header included."""
    return ((b":status", b"200"), (b"content-type", b"application/grpc"), *trailers_of(refusal))


def _encoded(text: str) -> bytes:
    """Percent-encode what a grpc-message may not hold as it is."""
    return b"".join(
        b"%c" % byte if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte for byte in text.encode()
    )
