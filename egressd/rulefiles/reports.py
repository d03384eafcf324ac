"""Problems in the forms that other programs read: JSON, SARIF 2.1.0 (OASIS), and the workflow commands of GitHub Actions."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import quote

from egressd.rulefiles.lints import WHY
from egressd.rulefiles.problems import Code, Problem

_SARIF = "https://json.schemastore.org/sarif-2.1.0.json"


def as_json(problem: Problem) -> dict[str, object]:
    """Return one problem as plain values with stable keys."""
    return {
        "path": problem.path,
        "line": problem.line,
        "column": problem.column,
        "code": problem.code.value,
        "severity": problem.severity,
        "message": problem.message,
        "hint": problem.hint or None,
    }


def as_sarif(problems: Iterable[Problem], version: str) -> dict[str, object]:
    """Return a SARIF log of one run; `version` is egressd's. Paths stay as they were given, relative ones to where it ran."""
    found = list(problems)
    codes = sorted({problem.code for problem in found})
    rules = [
        {
            "id": code.value,
            "shortDescription": {"text": _words(code)},
            "help": {"text": WHY.get(code, _words(code))},
        }
        for code in codes
    ]
    driver = {"name": "egressd", "version": version, "rules": rules}
    results = [
        {
            "ruleId": problem.code.value,
            "ruleIndex": codes.index(problem.code),
            "level": problem.severity,
            "message": {
                "text": f"{problem.message} (hint: {problem.hint})" if problem.hint else problem.message
            },
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": _uri(problem.path)},
                        "region": {"startLine": problem.line, "startColumn": problem.column},
                    }
                }
            ],
        }
        for problem in found
    ]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return {"$schema": _SARIF, "version": "2.1.0", "runs": [run]}


def as_github(problem: Problem) -> str:
    """Return one problem as a workflow command, which GitHub shows beside the line of a pull request."""
    text = f"{problem.message}\nhint: {problem.hint}" if problem.hint else problem.message
    where = f"file={_property(problem.path)},line={problem.line},col={problem.column}"
    return f"::{problem.severity} {where},title={_property(f'egressd {problem.code}')}::{_data(text)}"


def _words(code: Code) -> str:
    return code.value.replace("_", " ")


def _uri(path: str) -> str:
    """Return a path as a URI reference (RFC 3986): what may not stand in one is escaped."""
    return quote(path, safe="/", errors="surrogateescape")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
