"""`egressd run` in this very process, and on stderr when each of its steps was over: wall, CPU of this process, how long it took.

The steps are wrapped from outside, as soon as their modules are loaded; what is not there any more is left out, so that this
follows the code and not the other way round.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable
from typing import Any

STEPS = (
    ("egressd.control.config", "load_config"),
    ("egressd.control.session", "Session.__init__"),
    ("egressd.control.session", "load_or_create"),
    ("egressd.control.session", "build_trust"),
    ("egressd.control.supervisor", "Supervisor.start"),
    ("egressd.wiring.namespace", "Namespace.make"),
    ("egressd.control.session", "Session._serve"),
    ("egressd.control.session", "Session._prove"),
    ("egressd.wiring.namespace", "Namespace.missing_rules"),
    ("egressd.control.session", "Session._carry"),
    ("egressd.wiring.namespace", "Namespace.launch"),
    ("egressd.control.session", "Session._take_down"),
    ("egressd.wiring.namespace", "Namespace.end"),
    ("egressd.wiring.namespace", "Namespace.counted"),
    ("egressd.control.supervisor", "Supervisor.remove"),
    ("egressd.control.supervisor", "Supervisor.stop"),
    ("egressd.wiring.namespace", "Namespace.destroy"),
)


def _began() -> float:
    """When this process began, by the clock of `time.monotonic` (proc(5), starttime)."""
    with open("/proc/self/stat", encoding="utf-8") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK") + time.monotonic() - time.clock_gettime(time.CLOCK_BOOTTIME)


BEGAN = _began()


def tell(what: str, began: float | None = None) -> None:
    """Say when something was over, and how long it took."""
    now = time.monotonic()
    took = "" if began is None else f"{(now - began) * 1000:7.0f} ms"
    cpu = time.process_time() * 1000
    sys.stderr.write(f"{(now - BEGAN) * 1000:7.0f}{cpu:7.0f}  {what:36}{took}\n")


def timed(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a step, a function or a coroutine function."""
    if inspect.iscoroutinefunction(step):

        @functools.wraps(step)
        async def waiting(*given: Any, **named: Any) -> Any:
            began = time.monotonic()
            try:
                return await step(*given, **named)
            finally:
                tell(name, began)

        return waiting

    @functools.wraps(step)
    def calling(*given: Any, **named: Any) -> Any:
        began = time.monotonic()
        try:
            return step(*given, **named)
        finally:
            tell(name, began)

    return calling


def wrap(module: str, path: str) -> None:
    """Time one step from now on."""
    holder: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        holder = getattr(holder, parent, None)
    step = inspect.getattr_static(holder, name, None)
    if isinstance(step, classmethod):
        setattr(holder, name, classmethod(timed(path, step.__func__)))
    elif step is not None:
        setattr(holder, name, timed(path, step))


def load() -> None:
    """Load what `egressd run` loads next, and time its steps from then on."""
    began = time.monotonic()
    for module in dict.fromkeys(module for module, _ in STEPS):
        importlib.import_module(module)
    tell("imports of control", began)
    for module, path in STEPS:
        wrap(module, path)


def main() -> None:
    """Run the command line; exits with its status."""
    tell("the interpreter is up")
    began = time.monotonic()
    from egressd.cli import main as line

    importlib.import_module("egressd.cli.run")
    tell("imports of the command line", began)
    process = importlib.import_module("egressd.control.process")
    start = process.WorkerProcess.__init__

    def started(self: Any) -> None:
        began = time.monotonic()
        start(self)
        if "egressd.control.session" not in sys.modules:
            tell("the worker's process is started", began)
            load()

    process.WorkerProcess.__init__ = started
    line.main()


if __name__ == "__main__":
    main()
