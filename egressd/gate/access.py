"""egressd.internal/access: how a sandbox asks for what it may not do, and what has come of it. Pure.

What it sends is a request and a reason in its own words, in the target of a POST without a body; control judges the one and shows
people the other as what it is, the words of a program. Here both are only bounded.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl

from egressd.gate.messages import PLEA_LIMIT, WHY_LIMIT, Petitioned
from egressd.gate.pages import Facts, Page, Plea, Unanswered
from egressd.policy.reasons import Reason

if TYPE_CHECKING:  # as in gate.internal
    from egressd.gate.sandbox import Sandbox

HOW_TO_ASK: Final = (
    "POST http://egressd.internal/access?request=METHOD%20URL&why=TEXT, such as curl -G -X POST --data-urlencode "
    "'request=GET https://example.org/page' --data-urlencode 'why=to read it' http://egressd.internal/access"
)
_ANSWERS: Final = {
    "waiting": "It waits for a person. Look here for what comes of it.",
    "approved": "A person has approved it. Send the request.",
    "denied": "A person has refused it. Do not ask again.",
    "refused": "It is not put to a person.",
}


def plea_of(target: str) -> Plea | Unanswered:
    """Return what a request target pleads for, or what is wrong with it; total."""
    query = target.partition("?")[2]
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="replace", max_num_fields=2)
    except ValueError:
        pairs = []
    given = dict(pairs)
    request, why = given.get("request", "").strip(), given.get("why", "").strip()
    if len(pairs) != 2 or not request or not why:
        return Unanswered(
            Reason.BAD_REQUEST, 400, f"Give the request and the reason for it, once each: {HOW_TO_ASK}"
        )
    if len(request) > PLEA_LIMIT or len(why) > WHY_LIMIT:
        hint = f"Keep the request below {PLEA_LIMIT} characters and the reason below {WHY_LIMIT}."
        return Unanswered(Reason.BAD_REQUEST, 400, hint)
    return Plea(request, why)


def pleaded(answer: Petitioned | None, *, as_json: bool) -> Page | Unanswered:
    """Return the page that says what came of a plea."""
    if answer is None:
        return Unanswered(Reason.APPROVAL_REQUIRED, 503, "Nobody can be asked now; try again later.")
    if answer.state == "refused":
        return Unanswered(Reason.BAD_REQUEST, 422, f"It cannot be put to a person: {answer.detail}.")
    told: Facts = {"approval": answer.approval, "state": answer.state, "says": _ANSWERS[answer.state]}
    if as_json:
        return Page("application/json", json.dumps(told, ensure_ascii=True, indent=1).encode() + b"\n")
    lines = (f"{told['approval']}: {told['says']}", "See http://egressd.internal/access")
    return Page(
        "text/plain; charset=utf-8",
        "".join(f"{line}\n" for line in lines).encode("ascii", "backslashreplace"),
    )


def facts(sandbox: Sandbox, _now: float) -> Facts:
    """Return how the requests of a sandbox stand."""
    return {
        "sandbox": sandbox.id,
        "how_to_ask": HOW_TO_ASK,
        "requests": [
            {
                "approval": row.id,
                "request": row.what,
                "state": row.state,
                "asked": _moment(row.asked),
                **({"covers": row.covers} if row.covers else {}),
                **({"until": _moment(row.until)} if row.until is not None else {}),
            }
            for row in sandbox.standing.rows
        ],
    }


_STATES: Final = {
    "waiting": "waits for a person",
    "approved": "approved: send the request again",
    "denied": "refused by a person",
    "used": "approved for one request, which has come",
    "ended": "over: ask again if it is still needed",
}


def tell(facts: Facts) -> Iterable[str]:
    """Return the same as lines for people."""
    yield from (
        "Whoever needs what the rules do not allow may ask a person for it, once, with the reason:",
        facts["how_to_ask"],
    )
    yield (
        "What was asked for from here, the latest first:"
        if facts["requests"]
        else "Nothing was asked for lately."
    )
    for row in facts["requests"]:
        yield from (
            "",
            f"{row['asked']} {row['approval']} {json.dumps(row['request'])}",
            f"  {_STATES[row['state']]}",
        )
        if "covers" in row:
            yield f"  it covers {json.dumps(row['covers'])}"
        if "until" in row:
            yield f"  until {row['until']}"


def _moment(seconds: float) -> str:
    """RFC 3339 in seconds; what lies outside the calendar is shown as its number."""
    try:
        return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return str(seconds)
