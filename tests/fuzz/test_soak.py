"""Minutes of fuzzing for every parser: `make soak`, FUZZ_SECONDS for another time than ten minutes each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz.catalogue import TARGETS

SECONDS = int(os.environ.get("FUZZ_SECONDS", "600"))
ROOT = Path(__file__).parents[2]


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 300)
@pytest.mark.parametrize("name", TARGETS)
def test_minutes_of_fuzzing_break_no_law(
    name: str, capsys: pytest.CaptureFixture[str], record_property: Callable[[str, object], None]
) -> None:
    command = [sys.executable, "-m", "tests.fuzz", name, str(SECONDS)]
    with capsys.disabled():  # its progress is for whoever waits
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    shown = json.loads(done.stdout.splitlines()[-1])
    record_property("fuzz", shown)
    assert done.returncode == 0, f"a law broke: {shown['found']}"
