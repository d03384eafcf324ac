"""A document held against its model: pydantic's errors as problems with places, in words for rule writers."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeAliasType, get_args

from pydantic import BaseModel, ValidationError

from egressd.policy.model import UnfitError
from egressd.rulefiles.document import Document, Step
from egressd.rulefiles.problems import Code, Findings, quoted

_MEANT = {
    "host": "hosts",
    "domain": "hosts",
    "domains": "hosts",
    "method": "requests",
    "methods": "requests",
    "path": "requests",
    "paths": "requests",
    "url": "hosts",
    "urls": "hosts",
    "ip": "addresses",
    "ips": "addresses",
    "cidr": "addresses",
    "cidrs": "addresses",
    "networks": "addresses",
    "scheme": "schemes",
    "protocol": "schemes",
    "port": "ports",
    "reason": "because",
    "comment": "because",
    "params": "with",
    "parameters": "with",
    "secret": "credential",
    "credentials": "credential",
    "until": "expires",
    "rate": "limits",
    "limit": "limits",
    "version": "schema",
    "block": "deny",
}
"""What people type who know another tool."""

_EXPECTED = {
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def fit[M: BaseModel](
    document: Document, model: type[M], findings: Findings, *, quotes: bool = True
) -> M | None:
    """Return the document as `model`, or None after adding a problem for all that does not fit. Total.

    `quotes` says whether a problem may show the value: not where a secret may have been written by mistake.
    """
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            _report(detail, document, model, findings, quoted if quotes else _unsaid)
        return None


def _unsaid(_: object) -> str:
    return "this"


def close_to(word: str, known: list[str]) -> str | None:
    """Return the known word that was most likely meant."""
    if _MEANT.get(word) in known:
        return _MEANT[word]
    near = difflib.get_close_matches(word[:64], known, n=1, cutoff=0.6)
    return near[0] if near else None


def did_you_mean(word: str, known: list[str]) -> str:
    """Return ` (did you mean 'x'?)`, or nothing when no known word is near."""
    near = close_to(word, known)
    return f" (did you mean {near!r}?)" if near else ""


def _report(
    detail: Mapping[str, Any],
    document: Document,
    model: type[BaseModel],
    findings: Findings,
    show: Callable[[object], str],
) -> None:
    steps = tuple(detail["loc"])
    kind = detail["type"]
    place = document.place(*steps)
    if kind == "extra_forbidden":
        place = document.key_place(*steps)
    code, message, hint = _explained(detail, kind, steps, model, show)
    findings.add(document.path, place, code, message, hint)


def _explained(
    detail: Mapping[str, Any],
    kind: str,
    steps: tuple[Step, ...],
    model: type[BaseModel],
    show: Callable[[object], str],
) -> tuple[Code, str, str]:
    context: dict[str, Any] = detail.get("ctx", {})
    given = detail["input"]
    if kind == "extra_forbidden":
        known = _known_keys(model, steps[:-1])
        word = str(steps[-1])
        near = did_you_mean(word, known)
        return Code.UNKNOWN_KEY, f"{quoted(word)}{near}", "" if near else f"known here: {', '.join(known)}"
    if kind == "missing":
        return (
            Code.MISSING_KEY,
            f"{quoted(str(steps[-1]))} is missing",
            "write `schema: 1`" if steps[-1] == "schema" else "",
        )
    own = context.get("error")
    if isinstance(own, UnfitError):
        shown = "" if isinstance(given, dict | list) else f"{show(given)}: "
        return Code(own.code), f"{shown}{own}", ""
    if kind in ("too_short", "string_too_short"):
        thing = "text" if kind == "string_too_short" else "list" if isinstance(given, list) else "mapping"
        return (
            Code.EMPTY_LIST,
            f"the {thing} is empty",
            "an empty one would not say what it means; remove the key",
        )
    if kind == "literal_error":
        expected = str(context.get("expected", ""))
        words = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
        return (
            Code.BAD_VALUE,
            f"{show(given)}{did_you_mean(str(given), words)}",
            f"one of: {', '.join(words)}",
        )
    if kind in _EXPECTED:
        return (
            Code.WRONG_TYPE,
            f"expected {_EXPECTED[kind]}, found {_described(given, show)}",
            _type_hint(kind, given, show),
        )
    return Code.BAD_VALUE, f"{show(given)}: {detail['msg']}", ""


def _described(value: object, show: Callable[[object], str]) -> str:
    if isinstance(value, bool):
        return f"the truth value {str(value).lower()}"
    if isinstance(value, int | float):
        return f"the number {value}" if show is quoted else "a number"
    if isinstance(value, str):
        return f"the text {quoted(value)}" if show is quoted else "a text"
    return "a list" if isinstance(value, list) else "a mapping"


def _type_hint(kind: str, value: object, show: Callable[[object], str]) -> str:
    if kind == "string_type" and isinstance(value, int | float):
        return "put it in quotes if the text is meant"
    if kind == "list_type" and isinstance(value, str):
        return f"write a list: [{show(value)}]"
    if kind == "int_type" and isinstance(value, str) and value.isdecimal():
        return "remove the quotes"
    return ""


def _known_keys(model: type[BaseModel], steps: tuple[Step, ...]) -> list[str]:
    """Return the keys of the mapping at the end of the steps."""
    here: type[BaseModel] | None = model
    for step in steps:
        if here is None or not isinstance(step, str):
            continue  # an index, or a key of a free mapping: the model inside is already the one that counts
        for name, info in here.model_fields.items():
            if step in (name, info.alias):
                here = _model_in(info.annotation)
                break
    return [info.alias or name for name, info in here.model_fields.items()] if here is not None else []


def _model_in(annotation: Any) -> type[BaseModel] | None:  # annotations are objects of many kinds
    if isinstance(annotation, TypeAliasType):
        return _model_in(annotation.__value__)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in get_args(annotation):
        found = _model_in(part)
        if found is not None:
            return found
    return None
