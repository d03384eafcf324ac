"""What a plain YAML scalar means: the YAML 1.2 core schema, without all that YAML 1.1 reads otherwise.

Sources: YAML 1.2.2, section 10.3.2 (core schema); YAML 1.1 type repository (bool, int, float, merge, value).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

type Scalar = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Surprise:
    """A plain scalar that readers of YAML disagree on; `fix` says what to write instead."""

    reads: str
    fix: str


_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_BOOL_1_1 = re.compile(r"y|yes|on|n|no|off", re.IGNORECASE)
_YES = frozenset({"y", "yes", "on"})

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(0|[1-9][0-9]*)\.[0-9]*|\.[0-9]+")
_FLOAT_1_2 = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

_UNDERSCORES = re.compile(
    r"[-+]?[0-9][0-9_]*_[0-9_]*(\.[0-9_]*)?|[-+]?[0-9]*\.[0-9_]*_[0-9_]*([eE][-+]?[0-9]+)?|[-+]?0[xob][0-9a-fA-F_]*_[0-9a-fA-F_]*"
)
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?")
_BINARY = re.compile(r"[-+]?0b[01]+")
_LONG_HEX = re.compile(r"[-+]?0x[0-9a-fA-F_]+")
_SIGNED_BASE = re.compile(r"[-+]0[xo][0-9a-fA-F]+")

_MOST_DIGITS = 18
"""More digits than any port, limit or version has; int() of a longer text is a way to burn time."""
_LONGEST_NUMBER = 64
"""Longer texts are not tried against the patterns below, some of which take quadratic time to fail."""


def resolve(text: str) -> Scalar | Surprise:
    """Return what a plain scalar means in the core schema, or why it must be quoted or rewritten. Total."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    first = text[0]
    if first not in "+-.0123456789":
        return _word(text)
    return _number(text)


def _word(text: str) -> str | Surprise:
    if len(text) <= 3 and _BOOL_1_1.fullmatch(text):
        meaning = "true" if text.lower() in _YES else "false"
        return Surprise(f"the word or {meaning}", f'write "{text}" for the word, or {meaning}')
    if text == "=":
        return Surprise("a sign or the YAML 1.1 default value", 'write "="')
    return text


def _number(text: str) -> Scalar | Surprise:
    if len(text) > _LONGEST_NUMBER:
        numeric = not text.strip("+-.0123456789_:eE") or _LONG_HEX.fullmatch(text)
        return Surprise("a number or a text", "put the text in quotes") if numeric else text
    quoted = f'write "{text}" for the text'
    if _INT.fullmatch(text):
        return int(text) if len(text) <= _MOST_DIGITS else Surprise("a number or a text", quoted)
    if _UNDERSCORES.fullmatch(text):
        return Surprise("a number or a text", f"{quoted}, or {text.replace('_', '')} for the number")
    if _SEXAGESIMAL.fullmatch(text):
        return Surprise("a text or a number to base 60", quoted)
    if _LEADING_ZERO.fullmatch(text):
        return Surprise(
            "a decimal or an octal number",
            f"{quoted}, or {text.lstrip('+-').lstrip('0') or '0'} for the number",
        )
    if _BINARY.fullmatch(text) or _OCTAL.fullmatch(text) or _SIGNED_BASE.fullmatch(text):
        return Surprise("a number or a text", quoted)
    too_long = len(text) > _MOST_DIGITS
    if too_long and (_HEX.fullmatch(text) or _FLOAT.fullmatch(text)):
        return Surprise("a number or a text", quoted)
    if _HEX.fullmatch(text):
        return int(text[2:], 16)
    if _NOT_FINITE.fullmatch(text):
        return Surprise("a text or a number that is not finite", quoted)
    if _FLOAT.fullmatch(text):
        return float(text)
    # Without a dot, or without a sign in the exponent, readers of YAML 1.1 see a text.
    return Surprise("a number or a text", quoted) if _FLOAT_1_2.fullmatch(text) else text
