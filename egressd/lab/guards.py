"""Origins that ask for a key: which hosts do, where it must be, and which keys are right at this moment.

A key counts only where it is alone: an origin that took the first of two `Authorization` fields would hide that a client's own
went along.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote, unquote_plus

from egressd.lab.sightings import SeenRequest

DENIED = b"no key, or a wrong one\n"


@dataclass(frozen=True)
class Guard:
    """What a host asks for. `user` makes a header's value that of `Authorization: Basic`; `scheme` comes before the key.

    Right are the `keys`, and what the `issuer` has issued and not taken back.
    """

    place: Literal["header", "query", "cookie", "segment"]
    name: str = ""
    scheme: str = ""
    user: str | None = None
    keys: tuple[str, ...] = ()
    issuer: str | None = None

    def offered(self, seen: SeenRequest) -> list[str]:
        """Every key that the request has in the place, right or wrong."""
        if self.place == "segment":
            return [unquote(segment) for segment in seen.path.split("/")]
        return [key for value in self._values(seen) if (key := self._key(value)) is not None]

    def _values(self, seen: SeenRequest) -> Iterator[str]:
        if self.place == "query":
            for pair in seen.target.partition("?")[2].split("&"):
                name, _, value = pair.partition("=")
                if unquote_plus(name) == self.name:
                    yield unquote_plus(value)
        elif self.place == "cookie":
            for field in (value for name, value in seen.headers if name == "cookie"):
                for pair in field.split(";"):
                    name, _, value = pair.strip().partition("=")
                    if name == self.name:
                        yield value
        else:
            yield from (value for name, value in seen.headers if name == self.name)

    def _key(self, value: str) -> str | None:
        if self.user is None:
            return value.removeprefix(self.scheme) if value.startswith(self.scheme) else ""
        try:
            user, _, key = (
                base64.b64decode(value.removeprefix("Basic "), validate=True).decode().partition(":")
            )
        except (binascii.Error, UnicodeDecodeError):
            return ""
        return key if user == self.user else ""


class Guards:
    """The guards of all hosts, and the keys that issuers have issued: `live` changes while the lab runs."""

    def __init__(self) -> None:
        self.live: dict[str, set[str]] = {}
        self._guards: dict[str, Guard] = {}

    def set_guard(self, host: str, guard: Guard | None) -> None:
        """Asks for a key at a host from now on; None asks for none."""
        if guard is None:
            self._guards.pop(host, None)
        else:
            self._guards[host] = guard

    def refuses(self, seen: SeenRequest) -> dict[str, str] | None:
        """The header fields of a refusal (401), or None for a request that has the right key or needs none."""
        guard = self._guards.get(seen.host)
        if guard is None:
            return None
        right = {*guard.keys, *self.live.get(guard.issuer or "", ())}
        offered = guard.offered(seen)
        alone = guard.place == "segment" or len(offered) == 1
        fits = alone and not right.isdisjoint(offered)
        challenge = "Bearer" if guard.user is None else "Basic"
        return (
            None if fits else {"WWW-Authenticate": f'{challenge} realm="lab"', "Content-Type": "text/plain"}
        )
