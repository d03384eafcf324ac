"""Sandboxes for tests: made as root, and made by an ordinary user."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ORDINARY_UID = 47123
ENV = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8"}


@dataclass
class Done:
    """A sandbox that was: what the driver saw, and what the command said."""

    seen: dict[str, Any]
    out: str
    err: str


@dataclass
class Ground:
    """A place for sandboxes of one user: its workspace, its home, and how to run a command in one."""

    mode: str
    top: Path
    owner: int
    workspace: Path = field(init=False)
    home: Path = field(init=False)

    def __post_init__(self) -> None:
        self.workspace, self.home = self.top / "work", self.top / "home"
        for directory in (self.workspace, self.home):
            directory.mkdir()
        (self.home / "secret").write_text("ssh key")
        self.own(self.top)

    def own(self, path: Path) -> None:
        """Give everything under a path to the user."""
        if os.geteuid() == 0:
            for place in (path, *path.rglob("*")):
                os.chown(place, self.owner, self.owner, follow_symlinks=False)

    @contextlib.contextmanager
    def started(
        self,
        *command: str,
        streams: tuple[Any, Any, Any] = (subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE),
        spec: dict[str, Any] | None = None,
        driver: Path = HERE / "driver.py",
        **job: Any,
    ) -> Iterator[tuple["subprocess.Popen[str]", Path]]:
        """One sandbox in the making: its driver, and the file that will hold the driver's answer."""
        given = dict(spec or {})
        env = {**ENV, "HOME": str(self.home), **given.pop("env", {})}
        work = {
            "spec": {"workspace": str(self.workspace), "home": str(self.home), "env": env, **given},
            "command": command,
            **job,
        }
        if self.mode == "rootless" and os.geteuid() == 0:
            work["become"] = self.owner
        with tempfile.TemporaryDirectory() as scratch:
            task, answer = Path(scratch) / "job.json", Path(scratch) / "answer.json"
            task.write_text(json.dumps(work))
            answer.touch()
            process = subprocess.Popen(
                [sys.executable, "-B", str(driver), str(task), str(answer)],
                stdin=streams[0], stdout=streams[1], stderr=streams[2], text=True,
                env={"PATH": ENV["PATH"], "CALLER_SECRET": "of the caller"},
            )  # fmt: skip
            with process:
                try:
                    yield process, answer
                finally:
                    process.kill()

    def run(self, *command: str, **how: Any) -> Done:
        """One sandbox, from make to destroy."""
        with self.started(*command, **how) as (process, answer):
            out, err = process.communicate(timeout=60)
            assert answer.read_text(), err
            return Done(json.loads(answer.read_text()), out or "", err or "")


@pytest.fixture(scope="module", params=["root", "rootless"])
def ground_maker(request: pytest.FixtureRequest) -> Iterator[Callable[[], Ground]]:
    """Makes places for sandboxes, as root and as an ordinary user."""
    if request.param == "root" and os.geteuid() != 0:
        pytest.skip("needs root")
    made: list[Path] = []

    def make() -> Ground:
        top = Path(tempfile.mkdtemp(prefix="egressd-test-"))
        made.append(top)
        owner = os.geteuid() if request.param == "root" or os.geteuid() != 0 else ORDINARY_UID
        return Ground(request.param, top, owner)

    yield make
    for top in made:
        shutil.rmtree(top)


@pytest.fixture
def ground(ground_maker: Callable[[], Ground]) -> Ground:
    """One fresh place."""
    return ground_maker()


@pytest.fixture(scope="module")
def attacked(ground_maker: Callable[[], Ground]) -> dict[str, Any]:
    """One sandbox in which everything was tried: {"inside": what happened there, "ground": ..., and the driver's view}."""
    ground = ground_maker()
    shutil.copy(HERE / "inside.py", ground.workspace)
    os.umask(0o022)
    (ground.workspace / "deep" / "state").mkdir(parents=True)
    (ground.workspace / "deep" / "state" / "journal").write_text("kept")
    (ground.workspace / "deep" / "key").write_text("CA")
    outside = ground.top / "outside"
    outside.mkdir()
    (outside / "read").write_text("let in")
    ground.own(ground.top)
    paths = {
        "masked directory": str(ground.workspace / "deep" / "state"),
        "masked file": str(ground.workspace / "deep" / "key"),
        "read-only bind": str(outside),
    }
    spec = {
        "masks": [paths["masked directory"], paths["masked file"]],
        "binds": [f"{outside}:ro"],
        "env": {"PATHS": json.dumps(paths)},
    }
    done = ground.run("/usr/bin/python3", "inside.py", spec=spec)
    assert done.seen.get("status") == 0, (done.seen.get("error"), done.err)
    return {**done.seen, "inside": json.loads(done.out), "ground": ground}
