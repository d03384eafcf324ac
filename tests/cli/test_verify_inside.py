"""What comes out of a sandbox is data: within its size, its time and its shape, or it is not believed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from egressd.cli.verify_inside import BrokeOff, Inside, argv
from egressd.verify.probe import Outcome, Probe, held

PROBE = Probe("a-probe", "works", "", "", "", lambda _: held(""))
READ = "import sys, time; n = int(sys.stdin.buffer.readline()); sys.stdin.buffer.read(n); "


@pytest.fixture
def speaking(tmp_path: Path) -> Iterator[Callable[[str], Inside]]:
    made: list[Inside] = []

    def start(code: str) -> Inside:
        with open(tmp_path / "said", "wb") as said:
            process = subprocess.Popen([sys.executable, "-c", READ + code], stdin=-1, stdout=-1, stderr=said)
        made.append(Inside(process, tmp_path / "said"))
        return made[-1]

    yield start
    for each in made:
        each.close()


def say(text: str) -> str:
    return f"sys.stdout.write({text!r}); sys.stdout.flush(); sys.stdin.read()"


GOOD = '{"name": "a-probe", "verdict": "held", "detail": "2 tries", "seconds": 0.5}\n'


def test_an_outcome_is_taken(speaking: Callable[[str], Inside]) -> None:
    assert speaking(say(GOOD)).make(PROBE, 5.0) == (Outcome("held", "2 tries"), 0.5)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(GOOD.replace("a-probe", "another"), id="another probe's"),
        pytest.param(GOOD.replace("held", "splendid"), id="no verdict"),
        pytest.param(GOOD.replace('"2 tries"', "7"), id="no sentence"),
        pytest.param("{}\n", id="nothing"),
    ],
)
def test_what_is_no_outcome_is_not_believed(speaking: Callable[[str], Inside], line: str) -> None:
    outcome, _ = speaking(say(line)).make(PROBE, 5.0)
    assert outcome == ("not tried", "broke off: what it said is no outcome of this probe")


def test_what_it_says_is_printable_and_short(speaking: Callable[[str], Inside]) -> None:
    line = GOOD.replace("2 tries", "\\u001b[2J\\u202e" + "x" * 1000)
    outcome, _ = speaking(say(line)).make(PROBE, 5.0)
    assert outcome.detail.startswith("?[2J?xxx")
    assert len(outcome.detail) == 300


@pytest.mark.parametrize(
    ("code", "why"),
    [
        pytest.param(say("no json\n"), "it said 'no json'", id="no JSON"),
        pytest.param(say("[1]\n"), "it said something else", id="no object"),
        pytest.param(say("x" * 100_000), "it says too much", id="a line without an end"),
        pytest.param("sys.stdin.read()", "nothing came in 0.3 s", id="silence"),
        pytest.param(
            "sys.exit('a \\x1b[31mcomplaint')", r"a \?\[31mcomplaint \(exit status 1\)", id="an end"
        ),
        pytest.param("sys.exit(0)", r"it said nothing \(exit status 0\)", id="an end without a word"),
    ],
)
def test_what_cannot_be_read_ends_it(speaking: Callable[[str], Inside], code: str, why: str) -> None:
    with pytest.raises(BrokeOff, match=why):
        speaking(code).hear(0.3 if "0.3" in why else 5.0)


def test_what_has_ended_cannot_be_asked(speaking: Callable[[str], Inside]) -> None:
    made = speaking("sys.exit('gone')")
    made.process.wait()
    with pytest.raises(BrokeOff, match="gone"):
        made.make(PROBE, 5.0)


def test_where_there_is_no_python_it_says_so(tmp_path: Path) -> None:
    command = [
        "/bin/sh",
        "-c",
        argv()[2].replace("/usr", "/nonexistent").replace("/bin", "/nonexistent"),
        "code",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tmp_path)}, check=False)
    assert (ran.returncode, ran.stderr) == (127, "no Python 3 with ssl can be run there\n")
