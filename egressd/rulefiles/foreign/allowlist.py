"""What every foreign allowlist comes to: sections of hosts that may or may not be reached, and notes on what is not carried over.

A host pattern is carried over only where ours means the same names. What another program lets through and ours would not is a
note; what it refuses and ours would let through is a note that says so (`wider`), for a reviewer must not miss it.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Literal

import idna

from egressd.policy.addresses import classify
from egressd.policy.values import slug
from egressd.rulefiles.hosts import read_pattern
from egressd.rulefiles.problems import Findings, Place

EVERYTHING = "ANY,WEBSOCKET /**"
MOST_TEXT = 200

type Form = Literal["srt", "codex", "smokescreen", "squid"]


class NotReadable(Exception):
    """The file is not what it was said to be; says why, with the place where there is one."""


@dataclass(frozen=True, slots=True)
class Note:
    """What of a line was not carried over, and why; `wider` where ours therefore lets through what the other refused."""

    line: int
    text: str
    why: str
    wider: bool = False


@dataclass(slots=True)
class Section:
    """What one profile is made of; `observes` where what it does not allow was let through and told."""

    name: str
    owner: str | None = None
    observes: bool = False
    allowed: list[Permission] = field(default_factory=list)
    denied: dict[str, int] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def note(self, line: int, text: object, why: str, *, wider: bool = False) -> None:
        """Note what is not carried over."""
        self.notes.append(Note(line, _shown(text), why, wider))


@dataclass(slots=True)
class Permission:
    """Hosts, each with the line that it comes from, and what may be asked of them on which ports; none are 443 and 80."""

    hosts: dict[str, int] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)
    requests: tuple[str, ...] = (EVERYTHING,)
    ports: tuple[int, ...] = ()


def host(raw: str, line: int, section: Section, *, permits: bool = True) -> str | None:
    """Return a host or a leading `*.` pattern in normal form; None after noting why it is left out."""
    text = raw.strip().lower().removesuffix(".")
    wildcard = "*." if text.startswith("*.") else ""
    if not text.isascii():
        try:
            text = wildcard + idna.encode(text.removeprefix(wildcard), uts46=True).decode("ascii")
        except (idna.IDNAError, UnicodeError):
            section.note(line, raw, "no name that DNS could hold", wider=not permits)
            return None
    if text in ("*", "", "*."):
        why = "every host: ours has no such entry; `public_web: read` or `mode: observe` are for that"
        section.note(line, raw, why if permits else "denies every host: what nothing allows is denied anyway")
        return None
    findings = Findings()
    if read_pattern(text, "", Place(line), findings, permits=permits) is None:
        problem = next(iter(findings.problems()))
        section.note(line, raw, problem.message, wider=not permits)
        return None
    return text


def address(raw: str, line: int, section: Section) -> str | None:
    """Return a literal address as a network, None where it is none; an address that no rule can allow is noted, and is empty."""
    try:
        found = ipaddress.ip_network(raw.strip().removeprefix("[").removesuffix("]"))
    except ValueError:
        return None
    if classify(found.network_address).kind == "floor":
        section.note(line, raw, "loopback, link-local or another address that no rule can allow")
        return ""
    return str(found)


def line_of(text: str, wanted: str, start: int = 1) -> int:
    """Return the first line, from `start` on, that has a text in quotes, else `start`: JSON and TOML are read without places."""
    quoted = re.compile(f"[\"']{re.escape(wanted)}[\"']")
    for number, line in enumerate(text.splitlines()[start - 1 :], start):
        if quoted.search(line):
            return number
    return start


def profile_name(text: str, fallback: str) -> str:
    """Return a text as the name of a profile."""
    return slug(text)[:64].strip("-") or fallback


def _shown(text: object) -> str:
    """A text of somebody else's file, in one line that a terminal and a comment hold."""
    shown = "".join(one if one.isprintable() else "?" for one in str(text))
    return shown if len(shown) <= MOST_TEXT else f"{shown[:MOST_TEXT]}…"
