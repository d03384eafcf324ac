"""Recorded attempts as a file of tests: what happened becomes what must go on happening.

A journal holds what hostile programs sent, so that each line is checked as a request before it is written, and quoted as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from egressd.policy.attempt import ConnectionAttempt
from egressd.policy.reasons import Reason
from egressd.policy.values import slug
from egressd.rulefiles.recorded import Recorded, Unplayable, read_recorded, request_text
from egressd.rulefiles.requestline import Asked, parse_request_line

MOST = 10_000
"""Tests in one file, at most; memory is bounded by it."""


@dataclass(slots=True)
class Fixtures:
    """Collects tests from records; what the same rule did to the same request is one test."""

    tests: dict[tuple[str, str, str], tuple[str, str | None, str]] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    def add(self, fields: Mapping[str, object]) -> None:
        """Take one record of the journal; what cannot become a test is counted by why."""
        if fields.get("event") != "decision":
            return
        found = read_recorded(fields)
        why = found.why if isinstance(found, Unplayable) else self._take(found)
        if why is not None:
            self.left_out[why] = self.left_out.get(why, 0) + 1

    def _take(self, found: Recorded) -> str | None:
        if found.has_query:
            return "the values of its query are not recorded"
        if not _is_id(found.profile):
            return "no decision under a profile"
        if found.reason in (Reason.RATE_LIMITED, Reason.TOO_MANY_CONNECTIONS, Reason.GRANT):
            return "decided by a limit or an approval"
        if found.would_deny:
            return "only observed"
        attempt, text = found.attempt, found.text
        reason = found.reason
        if isinstance(attempt, ConnectionAttempt) and attempt.scheme != "tcp":
            if found.verdict != "deny":
                return None  # its requests speak for it
            text, reason = f"GET {request_text(attempt)}/", ""
        if not isinstance(parse_request_line(text), Asked):
            return "no request that can be written down"
        key = (found.profile, found.verdict, text)
        if key not in self.tests and len(self.tests) >= MOST:
            return f"beyond the first {MOST}"
        self.tests.setdefault(key, (reason, found.rule, text))
        return None

    def lines(self) -> Iterator[str]:
        """Yield the file, line by line; empty when there is no test."""
        profiles = sorted({profile for profile, _, _ in self.tests})
        if not profiles:
            return
        yield "# yaml-language-server: $schema=../schema.json"
        yield "schema: 1"
        yield f"under: {json.dumps(profiles[0])}"  # `on` and `22` are profiles too
        yield "tests:"
        for (profile, verdict, text), (reason, rule, _) in sorted(self.tests.items()):
            parts = [f"{verdict}: {json.dumps(text)}"]
            if rule is not None and _is_id(rule):
                parts.append(f"rule: {json.dumps(rule)}")
            elif verdict == "deny" and reason:
                parts.append(f"reason: {reason}")
            if profile != profiles[0]:
                parts.append(f"under: {json.dumps(profile)}")
            yield f"  - {{{', '.join(parts)}}}"


def _is_id(text: str) -> bool:
    return bool(text) and slug(text) == text
