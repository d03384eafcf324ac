"""How a worker gives up what it does not need, after its imports and before it reads a hostile byte.

It ends in an empty root on a private tmpfs, in its own pid and mount namespaces, without capabilities, non-dumpable, unable
to gain privileges; what system calls are left to it then is `gate.seccomp`'s. With a second uid to go to (root) it takes
that one; without (rootless) it keeps the caller's uid inside a user namespace of its own. The network namespace stays: it is
where the worker dials.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
"""linux/sched.h."""
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE = 2, 4, 8, 0x4000, 1 << 18
MNT_DETACH = 2
"""linux/mount.h."""
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAPBSET_DROP = 1, 4, 38, 47, 24
PR_CAP_AMBIENT_CLEAR_ALL = 4
"""linux/prctl.h."""
_LINUX_CAPABILITY_VERSION_3 = 0x2008_0522
"""linux/capability.h."""

_FORBIDDEN = (
    b"egressd: worker: ended by the kernel for a system call that no worker makes: was it taken over?\n"
)

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def protect_process() -> None:
    """Die with the parent, leave no core, be closed to ptrace and /proc of the same uid. Raises OSError."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _check(_libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
    _check(_libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")


def _map_own_uid(uid: int, gid: int) -> None:
    # The /proc files of a process that is closed to its uid belong to root (proc(5)), who need not be us: it stands open
    # for these three writes. No sandbox can name it meanwhile, for each has a pid namespace of its own.
    _check(_libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "PR_SET_DUMPABLE")
    try:
        for path, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{path}", "w", encoding="utf-8") as file:
                file.write(text)
    finally:
        _check(_libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")


def _enter_empty_root(owner: tuple[int, int]) -> None:
    """Make an empty, private tmpfs the root of this process; leaf certificates pass by one file in it, by name."""
    _check(_libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None), "mount --make-rprivate /")
    options = f"size=1m,nr_inodes=64,mode=0700,uid={owner[0]},gid={owner[1]}"
    # over /proc, which is always there: a directory made for this would stay behind on the host
    _check(
        _libc.mount(b"tmpfs", b"/proc", b"tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options.encode()),
        "mount tmpfs",
    )
    os.chdir("/proc")
    _check(_libc.pivot_root(b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "umount of the old root")
    os.chdir("/")


def _drop_capabilities() -> None:
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # past the last one that this kernel knows, or not permitted: the sets below are cleared all the same
    _check(_libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "PR_CAP_AMBIENT")
    header = (ctypes.c_uint32 * 2)(_LINUX_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)())), "capset")
    _check(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")


def isolate(identity: tuple[int, int] | None, keep: tuple[int, ...]) -> None:
    """Isolate this process for good; returns in a child that is pid 1 of its namespace, while the original process waits for
    it.

    `identity` is the uid and gid to become, or None to keep the caller's in a user namespace of its own. `keep` are the
    descriptors
    that only the child keeps. Raises OSError where the kernel refuses; nothing is half isolated then, the caller must exit.
    """
    uid, gid = identity or (os.geteuid(), os.getegid())
    _check(_libc.unshare(CLONE_NEWNS | CLONE_NEWPID | (CLONE_NEWUSER if identity is None else 0)), "unshare")
    if identity is None:
        _map_own_uid(uid, gid)
    child = os.fork()
    if child:
        _wait_for(child, keep)
    _enter_empty_root((uid, gid))
    if identity is not None:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    _drop_capabilities()
    protect_process()


def _wait_for(child: int, keep: tuple[int, ...]) -> None:
    """Be nothing but the child's parent: hold none of its descriptors, end when it ends, end it when told to."""
    for fd in keep:
        os.close(fd)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: os.kill(child, signal.SIGKILL))
    protect_process()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSYS:
        os.write(2, _FORBIDDEN)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
