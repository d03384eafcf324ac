"""Alerts: what in the stream of records a person should look at, as records of their own, one for many attempts.

The same again within five minutes only counts; the next alert says how many. Bounded memory whatever sandboxes send.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from egressd.journal.domains import registered_domain
from egressd.journal.record import Alert, Record, new_id, timestamp
from egressd.policy.reasons import Reason

QUIET_SECONDS: Final = 300.0
WINDOW_SECONDS: Final = 60.0
NAME_LENGTH: Final = 16
"""Characters below a registered domain that a person's name for a host has; what is longer may be data."""
TUNNEL_CHARACTERS: Final = 600
"""Characters beyond that, in different names below one domain in a minute, that are called a tunnel: seven names of a hundred."""

_KEYS_LIMIT = 4096
_NAMES_LIMIT = 1024
_OF_REASON: Final[Mapping[str, tuple[Alert, str]]] = {
    Reason.FLOOR_METADATA.value: ("metadata", "a metadata endpoint was tried"),
    Reason.PLACEHOLDER_LEAK.value: (
        "placeholder",
        "a placeholder of a credential went where it does not belong",
    ),
    Reason.CLIENT_CREDENTIALS.value: (
        "key",
        "a key of the sandbox's own went to a destination that gets egressd's",
    ),
}
_REPEATED = (
    "sandbox",
    "layer",
    "channel",
    "verdict",
    "reason",
    "rule",
    "place",
    "profile",
    "policy",
    "labels",
    "traceparent",
)
_ABOUT = ("source", "host", "host_raw", "address", "port", "scheme", "method", "path", "qtype")


@dataclass(slots=True)
class _Raised:
    """An alert that was raised: when, and how many attempts have come since."""

    at: float
    more: int = 0


@dataclass(slots=True)
class _Names:
    """What was asked below one domain since a moment."""

    since: float
    names: set[int] = field(default_factory=set)
    characters: int = 0


class Alerts:
    """Looks at records once they are written; gives back the alerts that they are."""

    def __init__(self) -> None:
        self._raised: OrderedDict[tuple[str, ...], _Raised] = OrderedDict()
        self._asked: OrderedDict[tuple[str, str], _Names] = OrderedDict()

    def feed(self, records: Iterable[Mapping[str, Any]], now: float) -> list[dict[str, Any]]:
        """Return the alerts that a batch of admitted or sent records calls for; `now` is Unix seconds. Total."""
        found: list[dict[str, Any]] = []
        for record in records:
            if record.get("event") != "decision":
                continue
            known = _OF_REASON.get(record["reason"]) if isinstance(record.get("reason"), str) else None
            if known is not None:
                found += self._raise(record, *known, now)
            if record.get("layer") == "dns" and self._is_tunnel(record, now):
                words = "names below this domain are many and long: they may carry data"
                found += self._raise(record, "dns_tunnel", words, now)
        return found

    def _raise(self, record: Mapping[str, Any], alert: Alert, words: str, now: float) -> list[dict[str, Any]]:
        host = _text(record, "host") or _text(record, "host_raw") or _text(record, "address")
        about = registered_domain(host) if alert == "dns_tunnel" else host
        key = (_text(record, "sandbox"), alert, about)
        count = record.get("count")
        attempts = count if type(count) is int and count > 0 else 1
        raised = self._raised.get(key)
        if raised is not None and now - raised.at < QUIET_SECONDS:
            raised.more += attempts
            return []
        self._raised[key] = _Raised(now)
        self._raised.move_to_end(key)
        if len(self._raised) > _KEYS_LIMIT:
            self._raised.popitem(last=False)
        attempts += raised.more if raised is not None else 0
        return [_alert(record, alert, words, attempts, now)]

    def _is_tunnel(self, record: Mapping[str, Any], now: float) -> bool:
        host = _text(record, "host") or _text(record, "host_raw")
        if len(host) - len(".".join(host.split(".")[-2:])) <= NAME_LENGTH:
            return False  # nearly all names; for the others the list of public suffixes is read once
        domain = registered_domain(host)
        beyond = len(host) - len(domain) - NAME_LENGTH
        if beyond <= 0:
            return False
        key = (_text(record, "sandbox"), domain)
        asked = self._asked.get(key)
        if asked is None or now - asked.since > WINDOW_SECONDS:
            asked = self._asked[key] = _Names(now)
            self._asked.move_to_end(key)
            if len(self._asked) > _KEYS_LIMIT:
                self._asked.popitem(last=False)
        name = hash(host)
        if name not in asked.names and len(asked.names) < _NAMES_LIMIT:
            asked.names.add(name)
            asked.characters += beyond
        return asked.characters >= TUNNEL_CHARACTERS


def _alert(record: Mapping[str, Any], alert: Alert, words: str, attempts: int, now: float) -> dict[str, Any]:
    kept = {name: record[name] for name in (*_REPEATED, *_ABOUT) if record.get(name) is not None}
    attempt = new_id()
    root = _text(record, "root_id") or attempt
    made = Record(
        event="alert",
        sandbox=str(kept.pop("sandbox", "unknown")),
        attempt_id=attempt,
        root_id=root,
        alert=alert,
        count=attempts,
        detail=words,
        time=timestamp(now),
    )
    for name, value in kept.items():
        setattr(made, name, value)
    return made.as_dict()


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    return value if isinstance(value, str) else ""
