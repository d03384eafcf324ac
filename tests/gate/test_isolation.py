"""What a worker is after its isolation, when it has no second uid to go to."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import pytest

from egressd.gate import isolation

_PR_GET_DUMPABLE = 3
_libc = ctypes.CDLL(None, use_errno=True)


def in_a_process_of(uid: int, act: Callable[[], None]) -> int:
    """Runs `act` in a child that is `uid` and nothing more; its exit status, 0 if nothing was raised."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            _libc.prctl(
                isolation.PR_SET_DUMPABLE, 1, 0, 0, 0
            )  # what exec does for a program that its uid may read
            act()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def isolated_as_a_worker_is() -> None:
    isolation.protect_process()
    isolation.isolate(None, keep=())
    assert os.getpid() == 1
    assert os.listdir("/") == []
    assert _libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) == 0
    with pytest.raises(PermissionError):
        os.unshare(os.CLONE_NEWUTS)
    os._exit(42)


@pytest.mark.root
@pytest.mark.parametrize(
    "uid", [pytest.param(1000, id="an ordinary user"), pytest.param(0, id="root itself")]
)
def test_a_process_closed_to_its_uid_can_still_be_isolated_without_a_second_one(uid: int) -> None:
    assert in_a_process_of(uid, isolated_as_a_worker_is) == 42
