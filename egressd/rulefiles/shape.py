"""A document held against its model: pydantic's errors as problems with places, in words for rule writers."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAliasType, get_args, get_origin

from pydantic import BaseModel, ValidationError

from egressd.policy.values import UnfitError
from egressd.rulefiles.document import Document, Step
from egressd.rulefiles.problems import Code, Findings, Place, quoted

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

_MEANT_OF_CREDENTIALS = {
    **dict.fromkeys(("variable", "environment", "envvar"), "env"),
    **dict.fromkeys(("path", "filename", "from_file"), "file"),
    **dict.fromkeys(("command", "cmd", "shell", "run", "script"), "exec"),
    **dict.fromkeys(("oauth", "oidc", "client_credentials", "jwt"), "oauth2"),
    **dict.fromkeys(("github", "gh", "githubapp"), "github_app"),
    **dict.fromkeys(("aws", "sts", "assume_role"), "aws_sts"),
    **dict.fromkeys(("google", "gcloud"), "gcp"),
    **dict.fromkeys(("entra", "microsoft"), "azure"),
    **dict.fromkeys(("openbao", "bao", "hashicorp", "hvac"), "vault"),
    **dict.fromkeys(("k8s", "service_account"), "kubernetes"),
    **dict.fromkeys(("headers", "field"), "header"),
    **dict.fromkeys(("authorization", "auth"), "bearer"),
    **dict.fromkeys(("param", "parameter"), "query"),
    **dict.fromkeys(("cookies",), "cookie"),
    **dict.fromkeys(("aws4", "signature", "sign"), "sigv4"),
    **dict.fromkeys(("dummy", "replace"), "placeholder"),
    **dict.fromkeys(("binding", "bindings", "allowed"), "for"),
}
"""The same of credentials.yaml, whose words are others."""

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


type Reword = Callable[[Told, Mapping[str, Any]], Told | None]
"""Says it in other words, given pydantic's own account of it; None leaves it out."""


@dataclass(frozen=True, slots=True)
class Told:
    """What does not fit, as it will be shown."""

    place: Place
    code: Code
    message: str
    hint: str = ""


def fit[M: BaseModel](
    document: Document,
    model: type[M],
    findings: Findings,
    *,
    quotes: bool = True,
    reword: Reword | None = None,
) -> M | None:
    """Return the document as `model`, or None after adding a problem for all that does not fit. Total.

    `quotes` says whether a problem may show the value: not where a secret may have been written by mistake.
    """
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            told: Told | None = _told(detail, document, model, quoted if quotes else _unsaid)
            if reword is not None and told is not None:
                told = reword(told, detail)
            if told is not None:
                findings.add(document.path, told.place, told.code, told.message, told.hint)
        return None


def _unsaid(_: object) -> str:
    return "this"


def close_to(word: str, known: list[str]) -> str | None:
    """Return the known word that was most likely meant."""
    for meant in (_MEANT, _MEANT_OF_CREDENTIALS):
        if meant.get(word) in known:
            return meant[word]
    near = difflib.get_close_matches(word[:64], known, n=1, cutoff=0.6)
    return near[0] if near else None


def did_you_mean(word: str, known: list[str]) -> str:
    """Return ` (did you mean 'x'?)`, or nothing when no known word is near."""
    near = close_to(word, known)
    return f" (did you mean {near!r}?)" if near else ""


def _told(
    detail: Mapping[str, Any], document: Document, model: type[BaseModel], show: Callable[[object], str]
) -> Told:
    steps = tuple(detail["loc"])
    kind = detail["type"]
    place = document.place(*steps)
    if kind == "extra_forbidden" or steps[-1:] == ("[key]",):  # so pydantic ends the way to a key
        place = document.key_place(*steps[: steps.index("[key]") if "[key]" in steps else None])
    return Told(place, *_explained(detail, kind, steps, model, show))


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
    free = False
    for step in steps:
        if here is None or not isinstance(step, str) or free:
            free = (
                False  # an index, or a key of a free mapping: the model inside is already the one that counts
            )
            continue
        for name, info in here.model_fields.items():
            if step in (name, info.alias):
                here, free = _model_in(info.annotation), _is_free(info.annotation)
                break
    return [info.alias or name for name, info in here.model_fields.items()] if here is not None else []


def _is_free(annotation: Any) -> bool:  # see _model_in
    """Whether a value of this type is a mapping whose keys the file's writer chooses."""
    if isinstance(annotation, TypeAliasType):
        return _is_free(annotation.__value__)
    return get_origin(annotation) is dict or any(_is_free(part) for part in get_args(annotation))


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
