"""`json:` of an entry: what its requests must be so that it can bind them, and its form once it does."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence

from egressd.policy.bodies import CARRIERS, Conditions, Scalar
from egressd.policy.requests import RequestPattern, parse_request_pattern
from egressd.rulefiles.document import Document, Step
from egressd.rulefiles.problems import Code, Findings, quoted

_KEY = "json"


def conditions(said: Mapping[str, Sequence[Scalar]] | None) -> Conditions:
    """Return what an entry asks of bodies."""
    return tuple((key, tuple(values)) for key, values in (said or {}).items())


def check_json(
    said: Mapping[str, Sequence[Scalar]],
    requests: Sequence[str] | None,
    document: Document,
    where: tuple[Step, ...],
    findings: Findings,
) -> None:
    """Add a problem where a condition could be passed by: by a request without a body, or by a query that says otherwise."""
    if not requests:
        hint = 'like requests: ["POST /graphql?"]'
        _note(document, (*where, _KEY), "`json` needs the requests whose bodies it means", hint, findings)
    for index, text in enumerate(requests or ()):
        pattern = parse_request_pattern(text)
        if not isinstance(pattern, RequestPattern):
            continue  # a problem of its own
        at = (*where, "requests", index)
        if pattern.methods is None or pattern.websocket or not pattern.methods <= CARRIERS:
            message = (
                f"{quoted(text)} beside `json`: only {', '.join(sorted(CARRIERS))} carry a body to look at"
            )
            _note(document, at, message, "put other methods into an entry of their own", findings)
        elif pattern.query is None or pattern.query.open:
            message = f"{quoted(text)} beside `json` lets every query in, and some origins read one as they read the body"
            _note(
                document,
                at,
                message,
                f'write "{text.removesuffix("&*")}{"" if pattern.query else "?"}"',
                findings,
            )
    folded: set[str] = set()
    for key in said:
        plain = unicodedata.normalize("NFKC", key).casefold().strip()
        if plain in folded or "\0" in key:
            _note(
                document,
                (*where, _KEY, key),
                f"{quoted(key)} is a key that readers take for another",
                "",
                findings,
            )
        folded.add(plain)


def _note(document: Document, steps: tuple[Step, ...], message: str, hint: str, findings: Findings) -> None:
    findings.add(document.path, document.key_place(*steps), Code.JSON_CONDITION, message, hint)
