"""What is asked for, judged by control's own copy of the rules, and what a person may choose from. Pure.

A worker, or the sandbox itself, says what it was; whether that can be asked for at all is decided here: an ask and the default
deny can, a deny rule, the floor and what no rule could allow cannot, and neither can a path with more than one reading.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from egressd.policy import internal
from egressd.policy.attempt import ConnectionAttempt, Decision, Name, RequestAttempt
from egressd.policy.compile import DEFAULT_PORTS, CompiledPolicy
from egressd.policy.decide import decide
from egressd.policy.effective import EffectiveEntry
from egressd.policy.grants import MOST_PATH, WEBSOCKET, Grant, Scope, granted
from egressd.policy.names import parse_name
from egressd.policy.paths import PathPattern, Target, parse_path_pattern, upper_escapes
from egressd.policy.reasons import WORDS, Reason
from egressd.rulefiles.templates import template_of
from egressd.rulefiles.tenancy import shares_paths

type Length = Literal["once", "15m", "life"]

_METHOD: Final = re.compile(r"[A-Z][A-Z0-9_-]{0,31}\Z")
_DEFAULTS: Final = frozenset(
    {
        *(Reason.NOT_ALLOWED, Reason.PORT_NOT_ALLOWED, Reason.SCHEME_NOT_ALLOWED, Reason.METHOD_NOT_ALLOWED),
        *(Reason.PATH_NOT_ALLOWED, Reason.QUERY_NOT_ALLOWED, Reason.UPGRADE_NOT_ALLOWED),
    }
)
_TRIAL: Final = "gnt-0000000000000000"


@dataclass(frozen=True, slots=True)
class Subject:
    """One request that is asked for, without its query; or (`opaque`) connections that nobody reads. `host` in normal form."""

    sandbox: str
    scheme: Literal["https", "http", "tcp"]
    host: str
    port: int
    opaque: bool = False
    method: str = ""
    path: str = ""
    template: str | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """What is the same for people: the same sandbox, host, method and path template."""
        path = self.template or self.path
        return self.sandbox, self.scheme, self.host, str(self.port), str(self.opaque), self.method, path

    @property
    def what(self) -> str:
        """In one line, as rules and `egressd explain` spell it."""
        usual = DEFAULT_PORTS.get(self.scheme) == self.port
        if self.opaque:
            return (
                f"tcp://{self.host}:{self.port}"
                if self.scheme == "tcp"
                else f"TLS to {self.host}:{self.port}"
            )
        return f"{self.method} {self.scheme}://{self.host}{'' if usual else f':{self.port}'}{self.path}"

    @property
    def attempt(self) -> RequestAttempt | ConnectionAttempt:
        """What is judged of it."""
        name = tuple(self.host.split("."))
        if self.opaque or self.scheme == "tcp":
            return ConnectionAttempt(name, self.port, self.scheme)
        upgrade = "websocket" if self.method == WEBSOCKET else None
        method = "GET" if upgrade else self.method
        return RequestAttempt(name, self.port, self.scheme, method, self.path, upgrade)


@dataclass(frozen=True, slots=True)
class Option:
    """What can be granted: what it covers, what else that opens, and for how long it can be given."""

    scope: Scope
    covers: str
    opens: tuple[str, ...]
    lengths: tuple[Length, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A subject that people may decide on, under one policy: what was decided, by which rule, and what may be chosen."""

    subject: Subject
    policy: str
    profile: str
    decision: Decision
    credentials: tuple[str, ...]
    options: tuple[Option, ...]

    @property
    def entry(self) -> EffectiveEntry | None:
        """The rule that asks; None where no rule speaks of it."""
        return self.decision.entry

    @property
    def approvers(self) -> tuple[str, ...]:
        """Whom the rule wants: people or groups, any of them; empty for anybody who may use the control API."""
        return self.entry.approvers if self.entry is not None else ()


@dataclass(frozen=True, slots=True)
class Unaskable:
    """Why nobody is asked; `detail` is printable ASCII and says nothing that the sandbox may not know."""

    detail: str
    allowed: bool = False


def subject_of(
    sandbox: str, scheme: str, host: str, port: int, method: str = "", path: str = "", *, opaque: bool = False
) -> Subject | Unaskable:
    """Return the subject that was named by who is not believed, or why it is none. Total."""
    name = parse_name(host)
    if not isinstance(name, tuple):
        return Unaskable("a bare address or a name that is none cannot be asked for; ask for the host's name")
    text = ".".join(name)
    if opaque:
        if scheme not in ("https", "tcp"):
            return Unaskable("connections in the clear are read")
        return Subject(sandbox, "tcp" if scheme == "tcp" else "https", text, port, opaque=True)
    if scheme not in ("https", "http"):
        return Unaskable("a raw connection needs a rule")
    if not _METHOD.match(method) or method in ("CONNECT", "TRACE"):
        return Unaskable("the method is none that rules can name")
    target = Target(path)
    if "?" in path or len(path) > MOST_PATH or not target.is_origin_form or not target.is_canonical:
        return Unaskable(
            "the path is too long or can be read in more than one way; send it in its plain form"
        )
    path = upper_escapes(path)
    return Subject(
        sandbox,
        "https" if scheme == "https" else "http",
        text,
        port,
        method=method,
        path=path,
        template=_template(path),
    )


def assess(policy: CompiledPolicy, subject: Subject, now: float) -> Case | Unaskable:
    """Return what people may decide on, or why they are not asked; `now` in Unix seconds. Total."""
    attempt = subject.attempt
    if internal.judge(attempt) is not None:
        return Unaskable("egressd answers this itself")
    decision = decide(policy, attempt, now)
    if decision.allowed:
        return Unaskable("it is allowed already: send it", allowed=True)
    if decision.verdict != "ask" and (decision.entry is not None or decision.reason not in _DEFAULTS):
        return Unaskable(f"{WORDS[decision.reason].says} ({decision.reason.value})")
    if decision.verdict != "ask" and subject.opaque:
        return Unaskable("a connection that is not read needs a rule")
    if decision.verdict == "ask" and subject.opaque != (decision.treatment != "inspect"):
        return Unaskable("the rule that asks carries it in another way")
    trial = grant_of(
        _TRIAL, subject, policy.digest, "connection" if subject.opaque else "request", now, now + 1.0
    )
    if not decide(granted(policy, (trial,), subject.sandbox), attempt, now).allowed:
        return Unaskable(f"no approval could allow it: {WORDS[decision.reason].says}")
    name = tuple(subject.host.split("."))
    found = sorted(
        {
            rule.entry.credential
            for level in policy.levels_of_name(name)
            for rule in level
            if rule.entry.credential
        }
    )
    credentials = tuple(filter(None, found))
    return Case(
        subject,
        policy.digest,
        policy.profile,
        decision,
        credentials,
        options(policy, subject, decision, name),
    )


def grant_of(
    grant_id: str,
    subject: Subject,
    policy: str,
    scope: Scope,
    begins: float,
    ends: float,
    *,
    once: bool = False,
) -> Grant:
    """Return the grant of a scope for a subject; raises ValueError where the scope is none of it."""
    spelled = scope in ("request", "template")
    path = (subject.template or "") if scope == "template" else subject.path
    return Grant(
        id=grant_id,
        sandbox=subject.sandbox,
        policy=policy,
        host=subject.host,
        scheme=subject.scheme,
        port=subject.port,
        scope=scope,
        method=subject.method if spelled else "",
        path=path if spelled else "",
        once=once,
        begins=begins,
        ends=ends,
    )


def options(policy: CompiledPolicy, subject: Subject, decision: Decision, name: Name) -> tuple[Option, ...]:
    """Return what can be granted, the narrowest first."""
    entry = decision.entry
    credential = entry.credential if entry is not None else None
    goes = (f"the credential {credential} goes with it",) if credential else ()
    if subject.opaque:
        opens = (
            "whatever is sent there: nobody reads it, so nothing of it is judged or recorded but its size",
        )
        return (
            Option("connection", f"connections to {subject.host}:{subject.port}", opens, ("15m", "life")),
        )
    usual = DEFAULT_PORTS.get(subject.scheme) == subject.port
    site = f"{subject.scheme}://{subject.host}{'' if usual else f':{subject.port}'}"
    any_query = "with any query, fields and body"
    found = [
        Option(
            "request", f"{subject.method} {site}{subject.path}, {any_query}", goes, ("once", "15m", "life")
        )
    ]
    if subject.template is not None:
        covers = f"{subject.method} {site}{subject.template}, {any_query}"
        opens = (*goes, "whatever stands in the place of each *")
        found.append(Option("template", covers, opens, ("once", "15m", "life")))
    if subject.method != WEBSOCKET:
        found.append(
            Option(
                "host", f"every request to {site}", (*goes, *_opened(policy, subject, name)), ("15m", "life")
            )
        )
    return tuple(found)


def _opened(policy: CompiledPolicy, subject: Subject, name: Name) -> tuple[str, ...]:
    """What else the whole host would open."""
    found = ["every method and path there, uploads and deletions too"]
    if shares_paths(subject.host):
        found.append("what anybody keeps there: the host's paths belong to many owners")
    rules = [rule for level in policy.levels_of_name(name) for rule in level]
    asks = [rule.entry for rule in rules if rule.entry.effect == "ask"]
    found += [f"all that the rule {entry.id} ({entry.place}) asks for there" for entry in asks[:4]]
    keys = sorted({entry.credential for entry in asks if entry.credential})
    found += [f"the credential {key}, with each request that its rule covers" for key in keys[:4]]
    denied = [rule.entry.id for rule in rules if rule.is_deny]
    if denied:
        found.append(f"but not what is denied there by {', '.join(denied[:4])}")
    return tuple(found)


def _template(path: str) -> str | None:
    """Return the path with segments that name single objects as `*`; None where there are none, or it has a `*` of its own."""
    template = template_of(path) if "*" not in path else None
    if template is None or template == path:
        return None
    parsed = parse_path_pattern(template)
    fits = isinstance(parsed, PathPattern) and parsed.text == template and parsed.allows(Target(path))
    return template if fits else None
