"""The command line's front door: it starts what takes longest before it loads anything else."""

from __future__ import annotations

import contextlib
import sys

from egressd.cli.given import GIVEN


def main() -> None:
    """Run the command line and exit with its status."""
    if "run" in sys.argv:  # a guess, for which a process is started that `run` takes over and others end
        from egressd.control.process import WorkerProcess

        with contextlib.suppress(OSError):  # `run` tries again, and says why
            GIVEN.first = WorkerProcess()
    from egressd.cli.main import main as line

    line()
