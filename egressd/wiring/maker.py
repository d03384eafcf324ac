"""The process that becomes the sandbox: it makes the namespaces, wires them, answers probes, and turns into bubblewrap.

Started by control with a message socket. A process of its own, by exec and not by fork, because it ends as a process of
the sandbox's uid: nothing of control's memory, no secret and no descriptor may be in it.

    as root:   own mounts, owners mapped → become the sandbox's uid ┐
    rootless:                                                       ├→ new user and network namespace → wire → sockets
               own mounts inside the new namespaces                 ┘    handed out by a child that ends → probes → exec

Everything is imported before the mounts are arranged: afterwards the interpreter's own files may be out of sight.
"""

import errno
import fcntl
import os
import signal
import socket
import termios
from typing import Any, Final, NoReturn

from egressd.wiring import identity, kernel, messages, mounts, network, probe
from egressd.wiring.errors import WiringError
from egressd.wiring.programs import PATH
from egressd.wiring.sockets import live_sockets

_BUBBLEWRAP: Final = "bwrap"
FIRST_PLAN_DESCRIPTOR: Final = 10
"""The descriptors that bubblewrap reads are numbered from here, in the order in which they were sent."""

_NAMESPACE_HINT: Final = (
    "the kernel or the container forbids new user namespaces: see sysctl user.max_user_namespaces, "
    "kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns, or the container's seccomp profile"
)


def main(channel_number: int) -> None:
    """Serve the socket until the command is to be executed. Never returns: ends by exec or by exit."""
    channel = socket.socket(fileno=channel_number)
    channel.set_inheritable(False)
    try:
        kernel.die_with_parent()
        request, _ = messages.receive(channel)
        _make(channel, request)
        while True:
            request, descriptors = messages.receive(channel)
            messages.send(channel, _answer(channel, request, descriptors))
    except EOFError:
        os._exit(0)  # control is gone, and with it every reason to be here
    except WiringError as error:
        _report(channel, error)
    except OSError as error:
        _report(channel, WiringError.from_os("maker", error))
    os._exit(1)


def _report(channel: socket.socket, error: WiringError) -> None:
    failure = {"command": error.command, "stderr": error.stderr[:8000], "hint": error.hint}
    messages.send(channel, {"error": failure})


def _make(channel: socket.socket, request: dict[str, Any]) -> None:
    view = mounts.View(**{key: tuple(value) for key, value in request["view"].items()})
    group: int = request["nflog_group"]
    live = live_sockets(skip=(*view.writable, *view.readonly))
    if request["uid"] is None:
        uid, gid = os.getuid(), os.getgid()
        _enter(os.CLONE_NEWUSER | os.CLONE_NEWNET | os.CLONE_NEWNS)
        identity.write_maps(os.getpid(), [(0, uid, 1)], [(0, gid, 1)])
        notes = mounts.arrange(view, None, live)
        socket_uid = None
    else:
        uid, gid = request["uid"], request["gid"]
        _enter(os.CLONE_NEWNS, "run as root with CAP_SYS_ADMIN, or as an ordinary user")
        notes = mounts.arrange(view, (uid, gid), live)
        _become(uid, gid)
        socket_uid = 1
    if os.getuid() != 0 or os.getgid() != 0:
        raise WiringError("user namespace", f"uid {os.getuid()} instead of 0 in it")
    kernel.die_with_parent()  # undone by the change of uid
    kernel.forbid_inspection()
    notes += network.wire(group)
    _hand_out_listeners(channel, group, socket_uid)
    spaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY | os.O_CLOEXEC) for name in ("user", "net")]
    messages.send(channel, {"made": True, "notes": notes}, spaces)
    for space in spaces:
        os.close(space)


def _enter(flags: int, hint: str = _NAMESPACE_HINT) -> None:
    try:
        os.unshare(flags)
    except OSError as error:
        raise WiringError.from_os("unshare", error, hint) from error


def _become(uid: int, gid: int) -> None:
    """Leave root for good: the sandbox's uid, no other group, and a user and network namespace made by that uid.

    Only a process that stays behind with root's power can map a second uid into the new namespace, the sockets' own.
    """
    ready, told = os.pipe()
    maker = os.getpid()
    helper = os.fork()
    if helper == 0:
        status = 1
        try:
            os.close(told)
            if os.read(ready, 1):
                pairs = [(0, uid, 1), (1, identity.SOCKET_UID, 1)]
                groups = [(0, gid, 1), (1, identity.SOCKET_UID, 1)]
                identity.write_maps(maker, pairs, groups)
                status = 0
        finally:
            os._exit(status)
    os.close(ready)
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    _enter(os.CLONE_NEWUSER | os.CLONE_NEWNET)
    os.write(told, b"1")
    os.close(told)
    _, result = os.waitpid(helper, 0)
    if result != 0:
        raise WiringError("uid_map", "could not be written", "run as root with CAP_SETUID and CAP_SETGID")


def _hand_out_listeners(channel: socket.socket, group: int, socket_uid: int | None) -> None:
    """Make the sockets in a child that ends before the command starts, so that they never were in the sandbox's hands."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            made = list(network.listeners(group, socket_uid))
            manifest = [{"kind": kind, "family": family} for kind, family, _ in made]
            messages.send(channel, {"listeners": manifest}, [listener.fileno() for _, _, listener in made])
            status = 0
        except WiringError as error:
            _report(channel, error)
        finally:
            os._exit(status)
    _, result = os.waitpid(child, 0)
    if result != 0:
        os._exit(1)  # the child has said why


def _answer(channel: socket.socket, request: dict[str, Any], descriptors: list[int]) -> dict[str, Any]:
    match request["op"]:
        case "dns":
            return probe.dns(
                request["name"], request["server"], request["port"], request["timeout"], tcp=request["tcp"]
            )
        case "tcp":
            return probe.tcp(
                request["host"], request["port"], request["send"].encode("latin-1"), request["timeout"]
            )
        case "exec":
            _execute(channel, request, descriptors)
    return {"error": {"command": "maker", "stderr": f"no such operation: {request['op']}", "hint": ""}}


def _execute(channel: socket.socket, request: dict[str, Any], descriptors: list[int]) -> NoReturn:
    """Become bubblewrap. Descriptors: the command's 0, 1 and 2, the command line, then what the plan numbers."""
    command = [os.fsdecode(word) for word in messages.contents(descriptors.pop(3)).split(b"\0")]
    channel_number = _place([*descriptors, channel.fileno()])
    if request["controlling"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        # Python ignores SIGPIPE, and what is ignored stays so across exec.
        signal.signal(number, signal.SIG_IGN if number in request["ignored"] else signal.SIG_DFL)
    argv = [_BUBBLEWRAP, "--args", str(FIRST_PLAN_DESCRIPTOR), "--", *command]
    failure = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for directory in PATH.split(":"):
        try:
            # Its environment can be read in the sandbox (/proc/1/environ), so it gets none of ours.
            os.execve(f"{directory}/{_BUBBLEWRAP}", argv, {"PATH": PATH})  # noqa: S606 - no shell is wanted
        except OSError as error:
            if error.errno != errno.ENOENT:
                failure = error
    hint = "install bubblewrap (Debian: apt-get install bubblewrap)"
    _report(socket.socket(fileno=channel_number), WiringError.from_os(_BUBBLEWRAP, failure, hint))
    os._exit(1)


def _place(descriptors: list[int]) -> int:
    """Give the descriptors their numbers: 0, 1, 2, then from FIRST_PLAN_DESCRIPTOR; returns where the last one, the
    message socket, went: it alone does not survive exec."""
    beyond = FIRST_PLAN_DESCRIPTOR + len(descriptors)
    away = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, beyond) for descriptor in descriptors]
    for place, descriptor in enumerate(away[:-1]):
        os.dup2(descriptor, place if place < 3 else FIRST_PLAN_DESCRIPTOR + place - 3, inheritable=True)
    return away[-1]
