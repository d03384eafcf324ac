"""Which change to the rules would allow an attempt that they do not, the narrowest first.

Every change that is proposed has been tried: with it, and nothing else, `decide` allows the attempt. What the organisation
denies, or has no room for below its ceiling, is never proposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from egressd.policy import internal
from egressd.policy.attempt import Attempt, ConnectionAttempt, Decision, DnsQuestion, RequestAttempt
from egressd.policy.compile import CompiledPolicy, compile_policy
from egressd.policy.effective import EffectiveEntry
from egressd.policy.names import format_host
from egressd.policy.reasons import WORDS, Reason
from egressd.policy.requests import RequestPattern, parse_request_pattern
from egressd.rulefiles.ceiling import excess
from egressd.rulefiles.claims import judge
from egressd.rulefiles.fitting import fits
from egressd.rulefiles.load import Rules
from egressd.rulefiles.requestline import Asked
from egressd.rulefiles.tenancy import shares_paths

MOST_SERVICES = 3
_SHORT_QUERY = 80


@dataclass(frozen=True, slots=True)
class Change:
    """One way: `what` it lets in, in a few words, and YAML for the profile or a sentence; `what` is empty for advice."""

    what: str
    text: str


@dataclass(frozen=True, slots=True)
class Case:
    """An attempt under a profile, as it was decided; `missed` are the rules on its host that do not cover it, `ended` an
    expired one."""

    rules: Rules
    policy: CompiledPolicy
    asked: Asked
    decision: Decision
    missed: tuple[EffectiveEntry, ...]
    ended: EffectiveEntry | None
    now: float


def changes(case: Case) -> tuple[Change, ...]:
    """Return the changes that would allow the attempt, the narrowest first; advice where no rule would; none if it is allowed."""
    advice = _advice(case)
    if advice is not None:
        return (Change("", advice),) if advice else ()
    otherwise = WORDS[case.decision.reason].hint
    found: list[Change] = []
    beyond = ""
    for what, entries, text in _candidates(case):
        over = _over(case, entries)
        beyond = beyond or over
        if not over and _allowed(case, entries) and text not in [change.text for change in found]:
            found.append(Change(what, text))
    if found:
        return tuple(found)
    return (Change("", beyond or otherwise),) if beyond or otherwise else ()


def _advice(case: Case) -> str | None:
    """Return what to say where no new rule is the answer, empty for nothing; None where one may be."""
    decision, entry, root = case.decision, case.decision.entry, case.rules.root
    if _host(case.asked.attempt) == internal.NAME:
        pages = ", ".join(internal.PAGES)
        return "" if decision.allowed else f"egressd itself answers GET and HEAD of {pages}"
    if decision.verdict == "ask":
        who = f" by {', '.join(entry.approvers)}" if entry is not None and entry.approvers else ""
        return f"an approval{who} is needed"
    if decision.allowed:
        return ""
    if decision.reason in (Reason.DENIED_BY_RULE, Reason.DENIED_BY_ORGANISATION) and entry is not None:
        return f"a deny wins over every allow; it stands at {root}/{entry.place}"
    if decision.reason.startswith("floor_"):
        return "no rule can allow this"
    if case.ended is not None:
        return f"{case.ended.id} has expired; renew it ({root}/{case.ended.place})"
    return None


def _candidates(case: Case) -> Iterator[tuple[str, list[EffectiveEntry], str]]:
    """Yield ways, the narrowest first: what each lets in, as entries, and as text."""
    exact = _exact(case.asked.attempt)
    if exact is None:
        return
    near = next((entry for entry in case.missed if _takes(entry, exact)), None)
    if near is not None:
        place = f"{case.rules.root}/{near.place}"
        yield (
            "this request alone",
            [exact],
            f'add "{exact.requests[0]}" to the requests of {near.id} ({place})',
        )
    else:
        yield "this request alone" if exact.requests else "this connection alone", [exact], as_yaml(exact)
    attempt = case.asked.attempt
    if not isinstance(attempt, RequestAttempt):
        return
    method, _, path = exact.requests[0].partition(" ")
    folder, _, last = path.partition("?")[0].rpartition("/")
    if folder and last and "?" not in path:
        beside = exact.model_copy(update={"requests": (f"{method} {folder}/*",)})
        yield f"every path in {folder}/", [beside], as_yaml(beside)
    for number, fit in enumerate(fits(case.rules.library, attempt)):
        if number == MOST_SERVICES:
            break
        service = case.rules.library.services[fit.service].model
        lines = ["allow:", "  - " + fit.as_yaml.replace("\n", "\n    ")]
        taken = {entry.id for entry in case.policy.effective.entries}
        if fit.service in taken:
            lines.append(
                f"    id: {next(name for n in range(2, 1000) if (name := f'{fit.service}-{n}') not in taken)}"
            )
        what = f"the service {fit.service} ({service.access}): {service.description}"
        yield what, list(fit.entries), "\n".join(lines)
    if method in ("GET", "HEAD") and not shares_paths(exact.hosts[0]):  # there it would be everybody's pages
        whole = exact.model_copy(update={"requests": ("GET,HEAD /**",)})
        yield f"reading everything on {exact.hosts[0]}", [whole], as_yaml(whole)


def _over(case: Case, entries: list[EffectiveEntry]) -> str:
    top = case.rules.top
    for entry in entries if top is not None else ():
        assert top is not None
        found = excess(top, entry)
        if found is not None:
            what, key = found
            return f"{what} is beyond the organisation's ceiling ({case.rules.root}/{top.line(key)})"
    return ""


def _allowed(case: Case, entries: list[EffectiveEntry]) -> bool:
    effective = case.policy.effective
    widened = effective.model_copy(update={"entries": (*effective.entries, *entries)})
    try:
        return judge(compile_policy(widened), case.asked, case.now).allowed
    except ValueError:  # a path that no pattern can spell
        return False


def _host(attempt: Attempt) -> object:
    return attempt.name if isinstance(attempt, DnsQuestion) else attempt.host


def _exact(attempt: Attempt) -> EffectiveEntry | None:
    """Return the narrowest entry for an attempt on a name; a literal address is better asked for by name."""
    host = attempt.name if isinstance(attempt, DnsQuestion) else attempt.host
    if not isinstance(host, tuple):
        return None
    narrow = EffectiveEntry(id="proposal", place="", effect="allow", hosts=(format_host(host),))
    if isinstance(attempt, DnsQuestion):
        return narrow
    if isinstance(attempt, ConnectionAttempt):
        treatment: Literal["relay", "inspect"] = "relay" if attempt.scheme == "tcp" else "inspect"
        return narrow.model_copy(update={"ports": (attempt.port,), "treatment": treatment})
    method = "WEBSOCKET" if attempt.upgrade else attempt.method
    path, _, query = attempt.target.partition("?")
    request = f"{method} {path}"
    if (
        query
        and len(query) <= _SHORT_QUERY
        and isinstance(parse_request_pattern(f"{request}?{query}"), RequestPattern)
    ):
        request = f"{request}?{query}"
    return narrow.model_copy(
        update={"ports": (attempt.port,), "schemes": (attempt.scheme,), "requests": (request,)}
    )


def _takes(entry: EffectiveEntry, proposal: EffectiveEntry) -> bool:
    """Whether the proposal's request could stand in the entry without widening anything else: a service's text is shared by
    profiles, and a credential must not go out with more requests than were thought of.
    """
    same_lane = entry.ports == proposal.ports and entry.schemes == proposal.schemes
    own = entry.via is None and entry.credential is None and len(entry.hosts) == 1
    return entry.effect == "allow" and same_lane and own and bool(entry.requests and proposal.requests)


def as_yaml(entry: EffectiveEntry) -> str:
    """Return a proposed entry as it stands in a profile."""
    default_port = 80 if entry.schemes == ("http",) else 443
    lines = ["allow:", f"  - hosts: [{entry.hosts[0]}]"]
    if entry.schemes != ("https",):
        lines.append("    schemes: [http]")
    if entry.treatment == "relay":
        lines.append("    treatment: relay")
    if entry.treatment == "relay" or entry.ports != (default_port,):
        lines.append(f"    ports: [{entry.ports[0]}]")
    if entry.requests:
        lines.append(f'    requests: ["{entry.requests[0]}"]')
    return "\n".join(lines)
