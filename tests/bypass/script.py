"""The code of attacks that make one try after another, and what all of them must show."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from egressd.rulefiles.load import Rules, load_rules
from tests.bypass.arena import SHIPPED

CRAFTED = "from inside_tls import crafted, raw_alert\n"
"""What a script begins with that sends hellos of its own making."""

_PROFILE = "schema: 1\nprofile: lab\nowner: bypass\nallow:\n"


def tries(call: str, *inputs: object) -> str:
    """Code that makes one call for each input, which it calls `it`, and says each answer in one line."""
    return f"for it in {inputs!r}:\n    say(line({call}))\n"


def each(pattern: str, times: int) -> str:
    """A regular expression for exactly so many lines, each of which has the pattern."""
    return rf"\A(?:[^\n]*(?:{pattern})[^\n]*\n){{{times}}}\Z"


def refused(reason: str) -> str:
    """A regular expression for the first line of an HTTP refusal."""
    return rf"HTTP/1\.1 \d+ egressd(?:: denied: [^|]*\(reason {reason}\)| {reason} )"


def refusals(tmp_path: Path, *entries: str) -> list[str]:
    """Load rules with one allow entry in each line from the fifth on; return `LINE CODE` of all that is said of the profile."""
    rules = tmp_path / "rules"
    shutil.copytree(SHIPPED, rules, dirs_exist_ok=True)
    profile = rules / "profiles" / "lab.yaml"
    profile.write_text(_PROFILE + "".join(f"  - {entry}\n" for entry in entries), encoding="utf-8")
    found = load_rules(rules)
    lines = [str(problem) for problem in (found.warnings if isinstance(found, Rules) else found)]
    matches = [re.match(r"\S*profiles/lab\.yaml:(\d+):\d+: ((?:warning: )?\w+):", line) for line in lines]
    return [f"{match[1]} {match[2]}" for match in matches if match is not None]
