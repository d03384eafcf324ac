"""`mode: observe` as files have it, on a profile and on single rules: what it needs, and for how long it may last.

Observing is for a while: its last day is written down, is at most 30 days ahead, and within the organisation's ceiling. When it
is over, the safe side holds by itself: a profile is enforced, a denial denies, an allow that observed is gone.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Literal

from egressd.policy.model import MOST_OBSERVE_DAYS, AskEntry, Entry, PermittingEntry, ProfileFile
from egressd.rulefiles.ceiling import Top
from egressd.rulefiles.document import Step
from egressd.rulefiles.entries import Reader
from egressd.rulefiles.problems import Code
from egressd.rulefiles.written import Written

_OVER: dict[str, str] = {
    "profile": "the profile is enforced",
    "deny": "the rule denies",
    "allow": "the rule is as if it were not there",
}
_THEN: dict[str, str] = {
    "deny": "write `mode: enforce`",
    "allow": "remove the entry, or write `mode: enforce`",
}


def check_profile(model: ProfileFile, top: Top | None, reader: Reader, today: dt.date) -> None:
    """Add what is wrong with the mode of a profile as a whole."""
    _check(model.mode, model.observe_until, "profile", (), reader, today)
    if model.mode == "observe":
        _check_ceiling(model.observe_until, top, (), reader, today)


def check_rules(entries: Iterable[Written], top: Top | None, today: dt.date) -> None:
    """Add what is wrong with the mode of single rules."""
    for one in entries:
        said = one.said
        if isinstance(said, AskEntry):
            continue
        _check(said.mode or "enforce", said.observe_until, one.effect, one.where, one.reader, today)
        if said.mode == "observe":
            _check_terms(one, said)
            _check_ceiling(said.observe_until, top, one.where, one.reader, today)


def _check(
    mode: Literal["enforce", "observe"],
    until: dt.date | None,
    what: str,
    where: tuple[Step, ...],
    reader: Reader,
    today: dt.date,
) -> None:
    at = (*where, "observe_until")
    if mode == "enforce":
        if until is not None:
            hint = "remove it, or write `mode: observe`"
            reader.note(at, Code.OBSERVE, "`observe_until` without `mode: observe`", hint, key=True)
        return
    last = today + dt.timedelta(days=MOST_OBSERVE_DAYS)
    if until is None:
        hint = f"add `observe_until: {last}` or an earlier day"
        reader.note((*where, "mode"), Code.OBSERVE, "`mode: observe` needs an end", hint)
    elif until > last:
        message = f"observing until {until} is more than {MOST_OBSERVE_DAYS} days ahead"
        reader.note(at, Code.OBSERVE, message, f"{last} is the latest day; renew it then")
    elif until < today:
        hint = _THEN.get(what, "write `mode: enforce`")
        reader.note(at, Code.EXPIRED, f"observing ended on {until}; {_OVER[what]}", hint)


def _check_terms(one: Written, said: Entry) -> None:
    if isinstance(said, PermittingEntry) and said.credential is not None:
        message = "`credential` in a rule that only observes"
        hint = "what nobody has agreed to yet gets no credential; remove it, or write `mode: enforce`"
        one.note("credential", Code.OBSERVE, message, hint, key=True)
    if one.effect == "deny" and said.addresses is not None:
        message = "a denial of addresses cannot only observe"
        hint = "it holds where names resolve to, after the decision; name hosts, or write `mode: enforce`"
        one.note("mode", Code.OBSERVE, message, hint)


def _check_ceiling(
    until: dt.date | None, top: Top | None, where: tuple[Step, ...], reader: Reader, today: dt.date
) -> None:
    most = top.model.observe_days if top is not None else None
    if top is None or most is None:
        return
    place = top.line("observe_days")
    if most == 0:
        message = f"`mode: observe` is beyond the ceiling ({place})"
        reader.note((*where, "mode"), Code.OVER_CEILING, message, "write `mode: enforce`")
    elif until is not None and until > today + dt.timedelta(days=most):
        message = f"observing until {until} is beyond the ceiling of {most} days ({place})"
        latest = today + dt.timedelta(days=most)
        reader.note((*where, "observe_until"), Code.OVER_CEILING, message, f"{latest} is the latest day")
