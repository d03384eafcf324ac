"""What a probe is, and how it says what it found.

A probe is a function from the scene to an outcome, with its name, what it tries (its docstring), why that matters, and
what `held` means. It raises nothing that its runner would not turn into `not tried`.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from egressd.verify.scene import Scene

HELD, OPEN, UNTRIED = "held", "open", "not tried"
VERDICTS = (HELD, OPEN, UNTRIED)

LONGEST = 300
_NAMED, _ENOUGH = 4, 6
_UNSAFE = re.compile(r"[^\x20-\x7e]")


class Outcome(NamedTuple):
    """What a probe found: a verdict, and a sentence without anything that a terminal or a reader could be steered by."""

    verdict: str
    detail: str


class Probe(NamedTuple):
    """One probe; `proves` is what `held` means."""

    name: str
    part: str
    tries: str
    why: str
    proves: str
    attempt: Callable[[Scene], Outcome]


PROBES: dict[str, Probe] = {}
"""Every probe of the inside half by its name."""

PARTS = ("works", "privilege", "kernel", "processes", "files", "secrets", "network", "names", "neighbours")
"""In the order in which they are made: what asks no network first, for nothing can keep it waiting."""


def probe(part: str, *, why: str, held: str) -> Callable[[Callable[[Scene], Outcome]], Probe]:
    """Make a probe of a function: its name with hyphens names the probe, its docstring says what is tried."""

    def make(attempt: Callable[[Scene], Outcome]) -> Probe:
        name = attempt.__name__.replace("_", "-")
        tries = " ".join((attempt.__doc__ or "").split())
        made = PROBES[name] = Probe(name, part, tries, why, held, attempt)
        return made

    return make


def in_order() -> list[Probe]:
    """The probes by part, in the order in which they are made."""
    return sorted(PROBES.values(), key=lambda each: PARTS.index(each.part))


BROKE_OFF = "broke off: "
"""How the reason begins where a probe ought to have been made and was not: then nothing is proved."""


def broke_off(why: str) -> Outcome:
    """Something could not be tried although it should have been."""
    return Outcome(UNTRIED, safe(BROKE_OFF + why))


def held(detail: str) -> Outcome:
    """Nothing got through."""
    return Outcome(HELD, safe(detail))


def opened(detail: str) -> Outcome:
    """Something got through."""
    return Outcome(OPEN, safe(detail))


def untried(why: str) -> Outcome:
    """Nothing could be tried."""
    return Outcome(UNTRIED, safe(why))


def judged(tries: Iterable[str | None], what: str, seconds: float = 12.0) -> Outcome:
    """Many tries of one kind: None for each that was stopped, else what got through. `what` follows their number.

    When a few got through it is enough; when time is up, what was not tried yet is not claimed to hold.
    """
    through: list[str] = []
    count, deadline = 0, time.monotonic() + seconds
    for count, found in enumerate(tries, 1):
        if found is not None:
            through.append(found)
        if len(through) == _ENOUGH:
            break
        if time.monotonic() > deadline:
            if through:
                break
            return broke_off(f"not done after {count} tries and {seconds:g} s")
    if through:
        return opened(listed(through))
    return held(f"{count} {what}") if count else untried("there is nothing here to try it on")


def listed(things: list[str]) -> str:
    """The first few, and how many more."""
    more = len(things) - _NAMED
    return "; ".join(things[:_NAMED]) + (f"; and {more} more" if more > 0 else "")


def safe(text: str) -> str:
    """Printable ASCII of bounded length: what is found in a sandbox, or comes from a network, is never trusted text."""
    clean = _UNSAFE.sub("?", text)
    return clean if len(clean) <= LONGEST else clean[: LONGEST - 3] + "..."


def word(error: OSError) -> str:
    """The name of an error, such as EPERM; of an error of TLS, whose numbers are other ones, that of its class."""
    name = type(error).__name__
    return name if name.startswith("SSL") else errno.errorcode.get(error.errno or 0, name)
