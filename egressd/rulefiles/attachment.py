"""Which credential goes with a request, by which rule and which binding, and how: told without a word of the secret.

The answer is the rules' and the binding's. Whether the source gives a lease now, nobody can say without asking it
(`egressd credentials check` does).
"""

from __future__ import annotations

from dataclasses import dataclass

from egressd.policy.attempt import Decision, Name, RequestAttempt
from egressd.policy.credential import Attach, Credential
from egressd.policy.names import format_pattern
from egressd.policy.paths import Target
from egressd.policy.reasons import Reason
from egressd.policy.requests import RequestPattern, parse_request_pattern
from egressd.rulefiles.credentials import Known
from egressd.rulefiles.overlaps import patterns
from egressd.rulefiles.secrets import shows_request


@dataclass(frozen=True, slots=True)
class Attachment:
    """What goes with a request: `credential` by name and `how`, or None; `why` says which rule and which binding.

    `bound` is the `file:line` of the binding that covers the request, None where nothing does or nothing was looked at.
    """

    credential: str | None
    how: str
    why: str
    bound: str | None = None

    def as_json(self) -> dict[str, object]:
        """Return it as plain values with stable keys."""
        return {"name": self.credential, "how": self.how or None, "why": self.why, "for": self.bound}


def attachment(
    decision: Decision, attempt: RequestAttempt, known: Known | None, root: str, *, observes: bool = False
) -> Attachment | None:
    """Return what would be attached to a request so decided; None where there is nothing to say about credentials.

    `known` is the credentials file, `root` the folder of rules as people see it; `observes` says that the profile only observes.
    """
    entry = decision.entry
    if decision.verdict == "deny":
        return Attachment(None, "", "the request is denied") if known is not None else None
    if entry is None or entry.credential is None:
        return _none(decision, attempt, known)
    name, rule = entry.credential, f"rule {entry.id} names it ({root}/{entry.place})"
    if decision.verdict == "ask":
        rule = f"once it is approved: {rule}"
    if observes:
        why = f"{rule}, but a profile that only observes attaches nothing: the request is refused"
        return Attachment(None, "", why)
    if known is None:
        return Attachment(name, "", f"{rule}; not checked against its definition: give --credentials FILE")
    credential = known.model.credentials.get(name)
    if credential is None:
        return Attachment(None, "", f"{rule}, but there is no {name!r} in {known.document.path}")
    covering = _covering(name, credential, attempt, known)
    if covering is None:
        return Attachment(None, "", f"{rule}, but its own `for:` does not cover the request: it is refused")
    says, bound = covering
    return Attachment(name, how(credential.attach), f"{rule}; it is for {says} ({bound})", bound)


def how(attach: Attach) -> str:
    """Return the way in which a credential goes into a request, by the name of the field or slot alone."""
    if attach.header is not None:
        return f"in the header field {attach.header}"
    if attach.bearer is not None:
        return "in the header field authorization (Bearer)"
    if attach.basic is not None:
        return "in the header field authorization (Basic)"
    if attach.query is not None:
        return f"in the query parameter {attach.query}"
    if attach.path is not None:
        return f"in the path, in place of {{{attach.path}}}"
    if attach.cookie is not None:
        return f"in the cookie {attach.cookie}"
    if attach.sigv4 is not None:
        return f"by an AWS signature for {attach.sigv4.service} in {attach.sigv4.region}"
    if attach.placeholder is not None:
        slots = [f"header field {name}" for name in attach.placeholder.headers or ()]
        slots += [f"query parameter {name}" for name in attach.placeholder.query or ()]
        return f"in place of the sandbox's dummy in ${attach.placeholder.variable}, in the {' or the '.join(slots)}"
    return ""


def _none(decision: Decision, attempt: RequestAttempt, known: Known | None) -> Attachment | None:
    if known is None or decision.reason is Reason.INTERNAL_PAGE:
        return None
    if decision.entry is None:
        return Attachment(None, "", "no rule decided; a credential goes with a rule alone")
    why = f"rule {decision.entry.id} names none"
    for name, credential in known.model.credentials.items():
        if (covering := _covering(name, credential, attempt, known)) is not None:
            return Attachment(None, "", f"{why}, though {name} is for {covering[0]} ({covering[1]})")
    return Attachment(None, "", why)


def _covering(
    name: str, credential: Credential, attempt: RequestAttempt, known: Known
) -> tuple[str, str] | None:
    """Return the request and host of the first binding that covers the attempt, in words, and its `file:line`."""
    if not isinstance(attempt.host, tuple):
        return None
    host: Name = attempt.host
    target = Target(attempt.target)
    for index, binding in enumerate(credential.for_):
        found = next((pattern for pattern in patterns(binding.hosts) if pattern.matches(host)), None)
        for position, text in enumerate(binding.requests if found is not None else ()):
            pattern = parse_request_pattern(text)
            if not isinstance(pattern, RequestPattern) or found is None:
                continue
            if pattern.refuses(attempt.method, attempt.upgrade, target) is None:
                place = known.document.place("credentials", name, "for", index, "requests", position)
                shown = f'"{text}"' if shows_request(text) else "this request"
                return f"{shown} at {format_pattern(found)}", f"{known.document.path}:{place.line}"
    return None
