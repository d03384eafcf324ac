"""Rule files in one layout: what editors leave behind is taken away, and not a word of the file is touched.

Lines lose what is blank at their end, end with LF, and stand at most one blank line apart; the file ends with one newline and
begins with the line that leads editors to the schema. Comments stay where they are, for nothing is written anew. What could
change the meaning (blanks at the end of a line of a block text) is left alone: what the file says is compared before and after.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from egressd.rulefiles.document import Document
from egressd.rulefiles.problems import Findings, Problems
from egressd.rulefiles.yaml import load_document

_SCHEMA = "# yaml-language-server: $schema="
_COMMENT = re.compile(r"(?:^|\s)#.*")


@dataclass(frozen=True, slots=True)
class Refused:
    """A file that is left as it is, and why."""

    why: str


def tidy(content: bytes, path: str, schema: str | None) -> bytes | Refused | Problems:
    """Return the file in its layout, or why it is left alone. Total.

    `schema` is the reference to the schema that a rule file begins with; None leaves the beginning as it is, as of lists.
    """
    before: Document | None = None
    if not path.endswith(".txt"):
        findings = Findings()
        before = load_document(content, path, findings, quotes=False)  # a credentials file may be given too
        if before is None:
            return findings.problems()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return Refused("it is not UTF-8")
    made = _laid_out(text, schema if before is not None else None)
    if before is not None:
        after = load_document(made.encode(), path, Findings())
        if after is None or after.data != before.data:
            return Refused("blanks at the end of a line belong to a text in it")
    if _comments(made, schema) != _comments(text, schema):
        return Refused("a comment would be lost")
    return made.encode()


def _laid_out(text: str, schema: str | None) -> str:
    lines = [line.rstrip(" \t\r") for line in text.split("\n")]
    if schema is not None and not any(line.startswith(_SCHEMA) for line in lines[:3]):
        lines.insert(0, f"{_SCHEMA}{schema}")
    kept: list[str] = []
    for line in lines:
        if line or (kept and kept[-1]):
            kept.append(line)
    while kept and not kept[-1]:
        kept.pop()
    return "\n".join(kept) + "\n"


def _comments(text: str, schema: str | None) -> list[str]:
    """Return every comment, as far as a search for `#` tells, without the line that leads to the schema."""
    found = (match[0].strip() for line in text.split("\n") if (match := _COMMENT.search(line)))
    return [comment for comment in found if schema is None or not comment.startswith(_SCHEMA)]
