"""The inside half as one program: old Pythons read it, it needs nothing beside itself, and it says what it should."""

from __future__ import annotations

import ast
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from egressd.verify.bundle import LAUNCHER, bundle, modules

OLDEST = (3, 8)
PYTHONS = sorted({sys.executable, *(path for path in ("/usr/bin/python3",) if Path(path).exists())})
SOURCES = [name for name, source in modules().items() if source]


@pytest.mark.parametrize("name", SOURCES)
def test_its_grammar_is_that_of_the_oldest_python_it_promises(name: str) -> None:
    ast.parse(modules()[name], feature_version=OLDEST)


@pytest.mark.parametrize("name", SOURCES)
def test_its_annotations_are_never_evaluated(name: str) -> None:
    """`str | None` is no expression of Python 3.8."""
    tree = ast.parse(modules()[name])
    assert any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)


@pytest.mark.parametrize("name", SOURCES)
def test_it_imports_the_standard_library_and_itself(name: str) -> None:
    for node in ast.walk(ast.parse(modules()[name])):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for each in names:
            assert each.partition(".")[0] in sys.stdlib_module_names or each.startswith("egressd.verify"), (
                each
            )


def test_it_fits_into_a_pipe_that_nobody_reads_yet() -> None:
    assert len(bundle()) < 60_000
    assert "egressd.verify.bundle" not in modules()


def started(python: str, entry: str, *lines: str, inherited: tuple[int, ...] = ()) -> list[str]:
    program = bundle(entry)
    told = b"%d\n" % len(program) + program + "".join(f"{line}\n" for line in lines).encode()
    command = [python, "-I", "-S", "-c", LAUNCHER]
    return (
        subprocess.run(
            command, input=told, capture_output=True, timeout=30, check=True, cwd="/", pass_fds=inherited
        )
        .stdout.decode()
        .splitlines()
    )


@pytest.mark.parametrize("python", PYTHONS)
def test_it_runs_where_there_is_no_egressd_and_answers_line_by_line(python: str) -> None:
    ready, first, second = started(
        python, "inside", json.dumps({"nonce": "n"}), "no-new-privileges", "no-such-probe"
    )
    assert json.loads(ready).keys() == {"ready", "python", "uid"}
    assert json.loads(first)["verdict"] in ("held", "open")
    assert json.loads(second) == {
        "name": "no-such-probe",
        "verdict": "not tried",
        "detail": "broke off: there is no such probe",
        "seconds": json.loads(second)["seconds"],
    }


@pytest.mark.parametrize(("left_open", "verdict"), [(True, "open"), (False, "held")])
def test_a_descriptor_that_came_along_shows_as_open(*, left_open: bool, verdict: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        _, told = started(
            sys.executable,
            "inside",
            json.dumps({"nonce": "n"}),
            "inherited-descriptors",
            inherited=(theirs.fileno(),) if left_open else (),
        )
        outcome = json.loads(told)
        assert outcome["verdict"] == verdict, outcome
        assert (f"descriptor {theirs.fileno()} (socket)" in outcome["detail"]) is left_open


def test_a_neighbour_says_where_it_is_and_takes_everything_away_again(tmp_path: Path) -> None:
    path = tmp_path / "n.sock"
    (said,) = started(sys.executable, "neighbour", json.dumps({"token": "t0ken", "sockets": [str(path)]}))
    told = json.loads(said)
    assert told["ports"]
    assert told["sockets"] == [str(path)]
    assert not path.exists()
    assert told["files"]
    assert not any(Path(each).exists() for each in told["files"])
    assert str(told["memory"]) not in Path("/proc/sysvipc/shm").read_text().split()
