"""The import law: which part of egressd may know which, read from the source and held by a test.

`cli → control → {gate, wiring, rulefiles, credentials, journal} → policy`. Parts of one row do not know each
other, except where SIBLINGS says so. Every import counts: inside functions, under TYPE_CHECKING, relative, by
importlib.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "egressd"

MIDDLE = {"gate", "wiring", "rulefiles", "credentials", "journal"}

# part -> the parts it may import besides itself
MAY_IMPORT: dict[str, set[str]] = {
    "policy": set(),
    **{part: {"policy"} for part in MIDDLE},
    "control": {"policy"} | MIDDLE,
    "cli": {"policy", "control", "verify"} | MIDDLE,
    "lab": set(),
    "verify": set(),
}

# (importing part, imported module) -> why these siblings may know each other
SIBLINGS: dict[tuple[str, str], str] = {
    ("gate", "egressd.journal.record"): "the worker fills in the records that control writes",
    ("gate", "egressd.credentials.attach"): "credentials go on at serialisation, in the worker",
    ("gate", "egressd.credentials.sigv4"): "signing is part of attaching",
    ("gate", "egressd.credentials.sigv4_chunks"): "and so are the chunks of a body",
    ("gate", "egressd.credentials.lease"): "what control lends is what a worker attaches",
    ("gate", "egressd.credentials.slots"): "a sandbox's own keys are taken out where the bytes are",
    ("gate", "egressd.credentials.placeholders"): "dummies that stray are found where the bytes are",
    ("gate", "egressd.credentials.scrub"): "what echoes a credential is scrubbed where the bytes are",
    ("credentials", "egressd.rulefiles.yaml"): "one strict YAML reader, with positions",
}

# (importing module, imported module) -> why this one file may
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("egressd.cli.demo", "egressd.lab"): "the demonstration builds the lab",
    **{
        (
            f"egressd.cli.{name}",
            "egressd.lab",
        ): "probes are made in the lab, or anywhere at all they would be attacks"
        for name in ("verify", "verify_ground", "verify_run", "verify_wired", "verify_world")
    },
    ("egressd.__main__", "egressd.cli"): "`python -m egressd` is the command line",
}

# top-level package -> where alone it may be imported, and why
ONLY_IN: dict[str, tuple[tuple[str, ...], str]] = {
    "mitmproxy": (("egressd.gate.inspector",), "pinned insides: one place to change when the pin moves"),
    "hpack": (("egressd.gate.inspector.http2",), "one reader of hostile header sections"),
    "dnslib": (("egressd.gate.dns",), "one parser of hostile DNS messages"),
    "yaml": (("egressd.rulefiles",), "one strict reader, or `on` is true somewhere"),
    "pyroute2": (("egressd.wiring",), "links and routes are made by the wiring alone"),
}

# standard-library modules that policy/ may not import, and why
IMPURE: dict[str, str] = {
    **dict.fromkeys(
        ("asyncio", "threading", "concurrent", "multiprocessing", "queue", "selectors"), "no concurrency"
    ),
    **dict.fromkeys(("socket", "ssl", "http", "urllib.request", "subprocess", "select"), "no I/O"),
    **dict.fromkeys(("os", "io", "pathlib", "shutil", "tempfile", "glob", "fcntl", "mmap", "sys"), "no I/O"),
    **dict.fromkeys(("time", "sched"), "no clock: `now` is an argument"),
    **dict.fromkeys(("random", "secrets", "uuid"), "the same attempt gets the same decision"),
    **dict.fromkeys(("logging", "warnings"), "what was decided is in the decision"),
}


class Import(NamedTuple):
    module: str
    """The importing module, such as egressd.gate.dialer."""
    target: str
    """The imported module; `from a import b` is a.b, a module or a name in one."""
    place: str


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def dynamic_target(call: ast.Call) -> str | None:
    """The target of `__import__` or `import_module`; "?" when it is no constant; None for any other call."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    if name not in {"__import__", "import_module"}:
        return None
    first = call.args[0] if call.args else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else "?"


def targets(node: ast.AST, package: list[str]) -> list[str]:
    """The modules that one node imports; `package` is what a relative import counts from."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        stem = ".".join([*base, *([node.module] if node.module else [])])
        return [stem if alias.name == "*" else f"{stem}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and (target := dynamic_target(node)):
        return [target]
    return []


def imports_of(source: str, module: str, *, is_package: bool, place: str) -> Iterator[Import]:
    parts = module.split(".")
    package = parts if is_package else parts[:-1]
    for node in ast.walk(ast.parse(source)):
        for target in targets(node, package):
            yield Import(module, target, f"{place}:{getattr(node, 'lineno', 0)}")


def all_imports() -> list[Import]:
    found: list[Import] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = str(path.relative_to(ROOT))
        is_package = path.name == "__init__.py"
        found += imports_of(path.read_text(), module_of(path), is_package=is_package, place=place)
    return found


def part_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "egressd" and len(parts) > 1 else None


def within(module: str, roots: tuple[str, ...]) -> bool:
    return any(module == root or module.startswith(f"{root}.") for root in roots)


def breach(found: Import) -> str | None:
    """What is wrong with one import, or None."""
    if found.target == "?":
        return "imports a name that only running it tells"
    top = found.target.partition(".")[0]
    if top in ONLY_IN and not within(found.module, ONLY_IN[top][0]):
        places, why = ONLY_IN[top]
        return f"{top} belongs in {' and '.join(places)} alone: {why}"
    here = part_of(found.module)
    if here == "policy":
        for module, why in IMPURE.items():
            if within(found.target, (module,)):
                return f"policy/ is pure, so not {module}: {why}"
        if top not in sys.stdlib_module_names and top not in {"pydantic", "egressd", "__future__"}:
            return f"policy/ imports the standard library and pydantic, not {top}"
    if here == "verify" and top not in sys.stdlib_module_names and top != "egressd":
        return f"verify/ runs on whatever Python a sandbox has, which has no {top}"
    there = part_of(found.target)
    if here is None or there is None or here == there or not is_part(there):
        return None
    if there in MAY_IMPORT.get(here, set()):
        return None
    if any(here == part and within(found.target, (module,)) for part, module in SIBLINGS):
        return None
    if any(found.module == module and within(found.target, (target,)) for module, target in EXCEPTIONS):
        return None
    return f"{here} may not know {there}"


def is_part(name: str) -> bool:
    """Whether `name` is a part (and not, say, `__version__`, imported from the package itself)."""
    return name in MAY_IMPORT or (PACKAGE / name).exists() or (PACKAGE / f"{name}.py").exists()


def test_every_import_obeys_the_law() -> None:
    breaches = sorted({f"{found.place}: {why}" for found in all_imports() if (why := breach(found))})
    assert not breaches, "\n".join(["the import law is broken:", *breaches])


def test_every_folder_is_a_part_that_the_law_knows() -> None:
    folders = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*/*.py")}
    assert folders <= MAY_IMPORT.keys(), folders - MAY_IMPORT.keys()


def test_every_third_party_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name != "dev"}
    core, optional = modules(project["dependencies"]), modules([*chain(*extras.values())])
    foreign = [
        (top, found)
        for found in all_imports()
        if (top := found.target.partition(".")[0]) not in sys.stdlib_module_names | {"egressd", "?"}
    ]
    undeclared = {top: found.place for top, found in foreign if top not in core | optional}
    assert not undeclared, undeclared
    # A library of a source or a sink may be missing: only that itself may import it.
    outside = [
        found.place for top, found in foreign if top not in core and not within(found.module, OPTIONAL)
    ]
    assert not outside, outside


OPTIONAL = ("egressd.credentials.providers", "egressd.journal.otlp")

MODULES = {
    "azure-identity": "azure",
    "dnspython": "dns",
    "google-auth": "google",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "pyjwt": "jwt",
    "pyopenssl": "OpenSSL",
    "pyyaml": "yaml",
}


def modules(requirements: list[str]) -> set[str]:
    """The packages that requirements install, by the names that they are imported by."""
    names = {re.split(r"[\[<>=~!; ]", line)[0].lower() for line in requirements}
    return {MODULES.get(name, name) for name in names}


DNSLIB = "dnslib belongs in egressd.gate.dns alone: one parser of hostile DNS messages"

CASES: list[tuple[str, str, str | None]] = [
    ("egressd.gate.dialer", "from egressd.policy import names", None),
    ("egressd.gate.dialer", "from egressd import __version__", None),
    ("egressd.gate.worker", "from egressd.journal import record", None),
    ("egressd.gate.worker", "import egressd.journal.record", None),
    ("egressd.gate.worker", "from egressd.journal import sink", "gate may not know journal"),
    ("egressd.policy.decide", "import egressd.gate", "policy may not know gate"),
    ("egressd.policy.decide", "def f():\n    from ..gate import door", "policy may not know gate"),
    ("egressd.policy.decide", "import time", "policy/ is pure, so not time: no clock: `now` is an argument"),
    ("egressd.policy.decide", "from datetime import datetime", None),
    ("egressd.policy.paths", "from urllib.parse import unquote", None),
    ("egressd.policy.paths", "from urllib import request", "policy/ is pure, so not urllib.request: no I/O"),
    ("egressd.policy.decide", "import idna", "policy/ imports the standard library and pydantic, not idna"),
    ("egressd.wiring.namespace", "import egressd.gate.door", "wiring may not know gate"),
    ("egressd.gate.door", "from egressd.control import api", "gate may not know control"),
    ("egressd.gate.door", "importlib.import_module('egressd.control')", "gate may not know control"),
    ("egressd.gate.door", "__import__('egressd.' + part)", "imports a name that only running it tells"),
    ("egressd.lab.names", "from egressd.policy import names", "lab may not know policy"),
    ("egressd.cli.demo", "from egressd.lab import Lab", None),
    ("egressd.cli.run", "from egressd.lab import Lab", "cli may not know lab"),
    ("egressd.cli.verify_run", "from egressd.lab import topology", None),
    ("egressd.cli.verify_run", "from egressd.verify.probe import Probe", None),
    ("egressd.cli.verify_scene", "from egressd.lab import Lab", "cli may not know lab"),
    ("egressd.verify.files", "from egressd.wiring import ruleset", "verify may not know wiring"),
    (
        "egressd.verify.files",
        "import pydantic",
        "verify/ runs on whatever Python a sandbox has, which has no pydantic",
    ),
    ("egressd.wiring.launch", "from egressd.verify import probe", "wiring may not know verify"),
    ("egressd.control.supervisor", "from egressd.cli import main", "control may not know cli"),
    ("egressd.lab.names", "import dnslib", DNSLIB),
    ("egressd.gate.dns.server", "import dnslib", None),
    ("egressd.gate.dnsx", "import dnslib", DNSLIB),
]


@pytest.mark.parametrize(("module", "source", "expected"), CASES)
def test_the_law_reads_every_form_of_import(module: str, source: str, expected: str | None) -> None:
    found = list(imports_of(source, module, is_package=False, place="here"))
    whys = {why for one in found if (why := breach(one))}
    assert found
    assert whys == (set() if expected is None else {expected})
