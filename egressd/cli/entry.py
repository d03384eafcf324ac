"""The command line's front door: it starts what takes longest before it loads anything else."""

from __future__ import annotations

import contextlib
import os
import sys

from egressd.cli.given import GIVEN


def _daemon_runs() -> bool:
    """Whether `run` will hardly need a worker of its own: where a daemon listens by default, something is there."""
    if "--standalone" in sys.argv:
        return False
    place = os.environ.get("EGRESSD_CONTROL_SOCKET") or (
        "/run/egressd/control.sock"
        if os.geteuid() == 0
        else f"{os.environ.get('XDG_RUNTIME_DIR', '')}/egressd/control.sock"
    )
    return os.path.exists(place)


def main() -> None:
    """Run the command line and exit with its status."""
    if (
        "run" in sys.argv and not _daemon_runs()
    ):  # a guess, for which a process is started that `run` takes over and others end
        from egressd.control.process import WorkerProcess

        with contextlib.suppress(OSError):  # `run` tries again, and says why
            GIVEN.first = WorkerProcess()
    from egressd.cli.main import main as line

    line()
