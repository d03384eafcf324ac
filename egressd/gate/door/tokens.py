"""Who it is that comes by a listener which many sandboxes share: by its token, and by the address where it first used that. Pure.

The theory. A token names one sandbox and is worth nothing but from one source address: the one that the operator named when the
sandbox was made, or else the one that used it first. An address belongs to one sandbox at most, for as long as both live, and so
speaks for it where no token can be sent (DNS, egressd's own ports 80 and 443) or none was. What a token is is kept nowhere here:
the register holds its SHA-256, and compares that in constant time; 256 random bits need no slower hash.

Guesses are counted for each source, and past a few none of them is looked at any more; never for more than one address, or a
neighbour could lock out its neighbours. Clock readings are handed in.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections import OrderedDict
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Final

from egressd.gate.buckets import TokenBucket
from egressd.gate.door.hops import bare
from egressd.policy.attempt import Address
from egressd.policy.reasons import Reason

GUESSES: Final = 10
"""Wrong credentials a minute from one source; beyond, right ones are not looked at either."""
SOURCES: Final = 4096
"""Sources whose guesses are counted; past it the one that guessed longest ago is forgotten."""
LONGEST: Final = 1024
"""Bytes of a Proxy-Authorization value that are looked at."""

CHALLENGE: Final = b'Basic realm="egressd", charset="UTF-8"'
"""RFC 7617 §2; the user is the sandbox's id, the password its token."""

_BASIC = re.compile(rb"[Bb][Aa][Ss][Ii][Cc] +([A-Za-z0-9+/]+={0,2})[ \t]*")
_FIELD = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*")
_NOBODYS: Final = hashlib.sha256(b"").digest()


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client says to be, and by which token."""

    user: bytes
    token: bytes

    def __repr__(self) -> str:
        """Say nothing of what must never get into a log."""
        return "Credentials(...)"


@dataclass(frozen=True, slots=True)
class BadCredentials:
    """No credentials that could be anybody's; the detail is fixed words."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Known:
    """The sandbox that a connection belongs to; `claim` says that its source must be kept as the sandbox's first."""

    sandbox: str
    claim: bool = False


@dataclass(frozen=True, slots=True)
class Stranger:
    """Nobody, and why; `sandbox` is the one whose source it came from, and `asks` says that credentials might help."""

    reason: Reason
    detail: str | None = None
    sandbox: str | None = None
    asks: bool = False


def proxy_credentials(head: bytes) -> Credentials | BadCredentials | None:
    """Return the credentials in a whole request head (with its empty line), None where it has none.

    A second field, another scheme or any malformed field line is refused: it could be read in two ways.
    """
    found: Credentials | BadCredentials | None = None
    for line in head.removesuffix(b"\r\n\r\n").split(b"\r\n")[1:]:
        if _FIELD.fullmatch(line) is None:
            return BadCredentials(Reason.BAD_HEADER, "header field")
        name, _, value = line.partition(b":")
        if name.lower() != b"proxy-authorization":
            continue
        if found is not None:
            return BadCredentials(Reason.BAD_HEADER, "more than one Proxy-Authorization")
        found = _basic(value.strip(b" \t"))
    return found


def _basic(value: bytes) -> Credentials | BadCredentials:
    basic = _BASIC.fullmatch(value[: LONGEST + 1])
    if basic is None or len(value) > LONGEST:
        return BadCredentials(Reason.BAD_PROXY_TOKEN, "no Basic credentials")
    try:
        user, colon, token = base64.b64decode(basic[1], validate=True).partition(b":")
    except binascii.Error:
        return BadCredentials(Reason.BAD_PROXY_TOKEN, "no Basic credentials")
    if not colon:
        return BadCredentials(Reason.BAD_PROXY_TOKEN, "no Basic credentials")
    return Credentials(user, token)


@dataclass(slots=True)
class _Entry:
    token: bytes | None
    source: Address | None


class Register:
    """The sandboxes of a worker that may come by shared listeners."""

    def __init__(self) -> None:
        """Nobody may."""
        self._entries: dict[str, _Entry] = {}
        self._owners: dict[Address, str] = {}
        self._guesses: OrderedDict[Address, TokenBucket] = OrderedDict()

    def enter(self, sandbox: str, token: bytes | None, source: Address | None) -> None:
        """Let a sandbox in by the SHA-256 of its token, from `source` if that is known. ValueError if another has the source."""
        if source is not None and self._owners.setdefault(source, sandbox) != sandbox:
            raise ValueError("a source address belongs to one sandbox")
        self._entries[sandbox] = _Entry(token, source)

    def leave(self, sandbox: str) -> None:
        """Forget a sandbox; who has its address next is nobody."""
        entry = self._entries.pop(sandbox, None)
        if entry is not None and entry.source is not None:
            del self._owners[entry.source]

    def bind(self, sandbox: str, source: Address) -> bool:
        """Give a source to a sandbox, now that control keeps it so; False where either has another by now."""
        entry = self._entries.get(sandbox)
        if entry is None or entry.source not in (None, source):
            return False
        if self._owners.setdefault(source, sandbox) != sandbox:
            return False
        entry.source = source
        return True

    def owner(self, source: Address) -> str | None:
        """Return the sandbox that a source belongs to."""
        return self._owners.get(source)

    def judge(
        self, source: Address, credentials: Credentials | BadCredentials | None, now: float
    ) -> Known | Stranger:
        """Return whose connection from `source` this is, which brings these credentials or none."""
        if isinstance(source, IPv6Address) and source.is_link_local:
            # The same address on another link is another host, and which link it was nobody downstream of here knows.
            return Stranger(Reason.UNKNOWN_SANDBOX, "a link-local source")
        owner = self._owners.get(source)
        if credentials is None:
            return Known(owner) if owner is not None else Stranger(Reason.UNKNOWN_SANDBOX, asks=True)
        bucket = self._guesses.get(source)
        if bucket is not None and bucket.wait(now) > 0:
            return Stranger(Reason.RATE_LIMITED, "wrong credentials from this source", owner)
        judged = self._compared(source, owner, credentials)
        if isinstance(judged, Stranger):
            self._count(source, now)
        return judged

    def _compared(
        self, source: Address, owner: str | None, credentials: Credentials | BadCredentials
    ) -> Known | Stranger:
        if isinstance(credentials, BadCredentials):
            return Stranger(credentials.reason, credentials.detail, owner)
        named = credentials.user.decode("latin-1")
        entry = self._entries.get(named)
        expected = entry.token if entry is not None else None
        # Compared in any case, so that a name without a sandbox takes as long as a wrong token.
        given = hashlib.sha256(credentials.token).digest()
        right = hmac.compare_digest(expected or _NOBODYS, given) and expected is not None
        if entry is None or not right:
            # A user name may be a misplaced token: only what is a sandbox's id is repeated.
            return Stranger(
                Reason.BAD_PROXY_TOKEN, f"for {named}" if entry is not None else "for no sandbox", owner
            )
        if entry.source is not None:
            if entry.source != source:
                return Stranger(Reason.TOKEN_SOURCE_MISMATCH, f"the token of {named}", owner)
            return Known(named)
        if owner is not None:  # the source has a sandbox of its own
            return Stranger(Reason.TOKEN_SOURCE_MISMATCH, f"the token of {named}", owner)
        return Known(named, claim=True)

    def _count(self, source: Address, now: float) -> None:
        bucket = self._guesses.get(source)
        if bucket is None:
            bucket = self._guesses[source] = TokenBucket(GUESSES, 60.0)
            if len(self._guesses) > SOURCES:
                self._guesses.popitem(last=False)
        self._guesses.move_to_end(source)
        bucket.take(now)


def read_address(text: str) -> Address:
    """Return a source address that control names; raises ValueError."""
    return bare(ip_address(text))
