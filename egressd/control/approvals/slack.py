"""An approval as Slack's blocks: for an incoming webhook, or whatever takes the same form. Pure.

There is no button: who presses one there is whoever Slack says, and an approval is worth what its approver's proof is. What a
sandbox has chosen, its words, host and path, stands in `plain_text` alone, where nothing is a link, a mention or markup.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_LONGEST: Final = 2_900
"""Characters of one text; Slack takes 3,000."""
_TITLES: Final = {
    "asked": "Approval wanted",
    "seconded": "Approved by one, another is needed",
    "approved": "Approved",
    "denied": "Refused",
    "revoked": "Approval taken back",
    "expired": "Approval over",
    "lapsed": "No longer asked, or no longer approved",
    "used": "Approval used",
}


def blocks(event: str, approval: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message; `approval` is the API's own."""
    request = str(approval["request"])
    who = f"{approval['sandbox']}, profile {approval['profile']}"
    rule = (
        f"rule {approval['rule']} ({approval['place']})" if approval.get("rule") else "no rule speaks of it"
    )
    facts = [
        f"sandbox: {who}",
        f"why it waits: {approval['reason']}, {rule}",
        f"asked {approval['count']} times",
    ]
    if approval.get("approvers"):
        facts.append(f"approvers: {', '.join(approval['approvers'])}")
    if approval.get("credentials"):
        facts.append(f"credentials on this host: {', '.join(approval['credentials'])}")
    if approval.get("by"):
        facts.append(f"by: {approval['by']}")
    made: list[dict[str, Any]] = [
        {"type": "header", "text": _plain(_TITLES.get(event, event), 150)},
        {"type": "section", "text": _plain(request)},
        {"type": "section", "text": _plain("\n".join(facts))},
    ]
    if approval.get("untrusted_words"):
        said = f"Words of the program in the sandbox, which may be false: “{approval['untrusted_words']}”"
        made.append({"type": "section", "text": _plain(said)})
    if event in ("asked", "seconded"):
        made.append({"type": "context", "elements": [_plain(f"egressd approvals show {approval['id']}")]})
    return {"text": f"egressd: {_TITLES.get(event, event)}", "blocks": made}


def _plain(text: str, limit: int = _LONGEST) -> dict[str, Any]:
    shown = text if len(text) <= limit else f"{text[: limit - 1]}…"
    return {"type": "plain_text", "text": shown, "emoji": False}
