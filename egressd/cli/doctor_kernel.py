"""What `egressd doctor` asks of the kernel, the tools and the limits of this machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Final

from egressd.cli.doctor_host import Host, Line

_KERNEL, _SOUND_KERNEL = (5, 4), (5, 12)
"""clone into pidfds and open_tree at least; from 5.12 on mounts can be mapped for a sandbox's uid (mount_setattr)."""
_BUBBLEWRAP: Final = (0, 8, 0)
"""--disable-userns."""
_IPTABLES: Final = (1, 8, 0)
_DESCRIPTORS, _FEW_DESCRIPTORS = 65_536, 4_096
_CONNTRACK: Final = 65_536
_LOCKED: Final = 64 << 20
_NAMESPACES: Final = 1_000
_CAPABILITIES: Final = {
    0: "CHOWN",
    1: "DAC_OVERRIDE",
    6: "SETGID",
    7: "SETUID",
    12: "NET_ADMIN",
    21: "SYS_ADMIN",
}
"""linux/capability.h."""
_CONTAINERS: Final = ("/.dockerenv", "/run/.containerenv")


def kernel_lines(host: Host) -> Iterator[Line]:
    """Say what of this machine will do and what will not: the kernel, tools, namespaces, limits, and a trial of each process."""
    for check in _CHECKS:
        yield from check(host)


def _kernel(host: Host) -> Iterator[Line]:
    version = _version(host.release)
    if version < _KERNEL:
        yield Line("kernel", "fail", f"Linux {host.release}", "egressd needs Linux 5.4, better 5.12 or newer")
    elif version < _SOUND_KERNEL:
        hint = "on Linux 5.12 and newer a workspace of another uid is mapped for the sandbox; here it must be its own"
        yield Line("kernel", "warn", f"Linux {host.release}", hint)
    else:
        yield Line("kernel", "ok", f"Linux {host.release}")
    if host.machine in ("x86_64", "aarch64"):
        yield Line("processor", "ok", host.machine)
    else:
        yield Line(
            "processor", "fail", host.machine, "system-call filters were written for x86_64 and aarch64 only"
        )


def _seccomp(host: Host) -> Iterator[Line]:
    actions = (host.read("/proc/sys/kernel/seccomp/actions_avail") or "").split()
    missing = {"kill_process", "errno", "allow"} - set(actions)
    if missing:
        hint = "workers and sandboxes need it: a kernel with CONFIG_SECCOMP_FILTER"
        yield Line("seccomp", "fail", "no system-call filters" if not actions else f"no {min(missing)}", hint)
    else:
        yield Line("seccomp", "ok", "system-call filters")


def _tools(host: Host) -> Iterator[Line]:
    yield _tool(host, "bwrap", _BUBBLEWRAP, "bubblewrap", "apt-get install bubblewrap (0.8 or newer)")
    for name in ("iptables-restore", "ip6tables-restore"):
        yield _tool(host, name, _IPTABLES, "iptables", "apt-get install iptables (1.8 or newer)")
    for name, what, package in (
        ("conntrack", "gateways forget flows of an address that is used again", "conntrack"),
        ("certutil", "browsers in sandboxes trust our certificates", "libnss3-tools"),
    ):
        found = host.program(name)
        if found:
            yield Line(name, "ok", found)
        else:
            yield Line(name, "warn", "not installed", f"with it {what}: apt-get install {package}")


def _tool(host: Host, name: str, least: tuple[int, ...], what: str, hint: str) -> Line:
    if host.program(name) is None:
        return Line(name, "fail", "not installed", hint)
    ran = host.run(name, "--version")
    if ran is None or ran[0] != 0:
        return Line(name, "fail", "cannot be run", f"does `{name} --version` work? Else {hint}")
    told = ran[1].strip().splitlines()[0] if ran[1].strip() else "no version"
    match = re.search(r"(\d+(?:\.\d+)+)", told)
    version = _version(match[1]) if match else ()
    if version and version < least:
        return Line(name, "fail", told, f"{what} is too old: {hint}")
    return Line(name, "ok", told)


def _privileges(host: Host) -> Iterator[Line]:
    if host.euid != 0:
        yield from _user_namespaces(host)
        return
    status = host.read("/proc/self/status") or ""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.M)
    effective = int(match[1], 16) if match else 0
    missing = [name for bit, name in _CAPABILITIES.items() if not effective >> bit & 1]
    if missing:
        hint = (
            "root without these cannot wire a sandbox: grant them to the container (--cap-add), or run rootless; "
            "the explicit wiring needs none"
        )
        yield Line("privileges", "fail", f"root without {', '.join(missing)}", hint)
    else:
        yield Line("privileges", "ok", "root with what wiring needs")
    if (name := host.account(1337)) is not None:
        hint = "its processes share a uid with workers: move the account to another uid"
        yield Line("worker uid", "warn", f"1337 belongs to the account {name}", hint)


def _user_namespaces(host: Host) -> Iterator[Line]:
    said = (host.read("/proc/sys/kernel/unprivileged_userns_clone") or "").strip()
    most = _number(host.read("/proc/sys/user/max_user_namespaces"))
    restricted = (host.read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") or "").strip()
    if said == "0":
        hint = "sysctl kernel.unprivileged_userns_clone=1, or run as root"
        yield Line("user namespaces", "fail", "unprivileged users may make none", hint)
    elif most == 0:
        yield Line(
            "user namespaces",
            "fail",
            "user.max_user_namespaces is 0",
            "sysctl user.max_user_namespaces=15000",
        )
    elif restricted == "1":
        hint = (
            "an AppArmor profile with `userns,` for this Python, or sysctl kernel.apparmor_restrict_unprivileged_userns=0, "
            "or run as root; the trial below says whether it matters here"
        )
        yield Line("user namespaces", "warn", "AppArmor restricts unprivileged ones", hint)
    elif most is not None and most < _NAMESPACES:
        yield Line(
            "user namespaces",
            "warn",
            f"at most {most}",
            "sysctl user.max_user_namespaces: one a sandbox, one a worker",
        )
    else:
        yield Line("user namespaces", "ok", "unprivileged users may make them")


def _confinement(host: Host) -> Iterator[Line]:
    profile = (host.read("/proc/self/attr/current") or "").strip("\0\n ")
    inside = next((path for path in _CONTAINERS if host.entry(path) is not None), None)
    if inside is not None:
        hint = "namespaces in a container need its seccomp and AppArmor profiles to allow unshare and mount; the trial says"
        yield Line("container", "warn", f"this is one ({inside})", hint)
    if profile and profile not in ("unconfined", "kernel") and "unconfined" not in profile:
        hint = "where the trial fails: --security-opt apparmor=unconfined, or a profile that allows mount and userns"
        yield Line("confinement", "warn", f"this process runs under {profile}", hint)
    if (host.read("/sys/fs/selinux/enforce") or "").strip() == "1":
        yield Line(
            "selinux",
            "warn",
            "enforcing",
            "where the trial fails, `ausearch -m avc -ts recent` says what it refused",
        )


def _limits(host: Host) -> Iterator[Line]:
    most = host.descriptors()
    if most < _FEW_DESCRIPTORS:
        yield Line("descriptors", "fail", f"at most {most}", "LimitNOFILE=1048576 in the unit, or ulimit -Hn")
    elif most < _DESCRIPTORS:
        hint = "a sandbox takes about 20 and two for each connection: LimitNOFILE=1048576 in the unit"
        yield Line("descriptors", "warn", f"at most {most}", hint)
    else:
        yield Line("descriptors", "ok", f"at most {most}")
    table = _number(host.read("/proc/sys/net/netfilter/nf_conntrack_max"))
    used = _number(host.read("/proc/sys/net/netfilter/nf_conntrack_count")) or 0
    if table is not None and used * 10 > table * 9:
        yield Line(
            "connection table",
            "fail",
            f"{used} of {table} entries used",
            "sysctl net.netfilter.nf_conntrack_max, doubled",
        )
    elif table is not None and table < _CONNTRACK:
        yield Line(
            "connection table",
            "warn",
            f"{table} entries",
            "one a connection: sysctl net.netfilter.nf_conntrack_max=262144",
        )
    elif table is not None:
        yield Line("connection table", "ok", f"{table} entries")
    swaps = (host.read("/proc/swaps") or "").strip().splitlines()[1:]
    lockable = host.lockable()
    if swaps and 0 <= lockable < _LOCKED and host.euid != 0:
        hint = "secrets of credentials may be swapped out: LimitMEMLOCK=infinity in the unit, ulimit -l, or no swap"
        yield Line("swap", "warn", f"in use, and {lockable >> 10} KiB can be kept from it", hint)


def _network(host: Host) -> Iterator[Line]:
    resolv = host.read("/etc/resolv.conf") or ""
    if not re.search(r"^\s*nameserver\s+\S", resolv, re.M):
        hint = "egressd asks the system's resolver by default: name one there, or set dns.upstream"
        yield Line("resolver", "warn", "none in /etc/resolv.conf", hint)
    if any(host.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy")):
        hint = "egressd does not go by it: set upstream.proxy.url if that is the only way out"
        yield Line("proxy", "warn", "HTTPS_PROXY is set here", hint)


def _trials(host: Host) -> Iterator[Line]:
    for name, trial, made in (
        ("sandbox", host.try_sandbox, "made, wired, a command run in it, taken down"),
        ("worker", host.try_worker, "isolated and confined"),
    ):
        problem = trial()
        if problem is None:
            yield Line(f"trial: {name}", "ok", made)
        else:
            said, _, hint = problem.partition("\nhint: ")
            yield Line(f"trial: {name}", "fail", said.removeprefix("hint: "), hint or "see what failed above")


def _version(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match[0].split(".")[:3]) if match else ()


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdecimal() else None


_CHECKS: Final[tuple[Callable[[Host], Iterator[Line]], ...]] = (
    _kernel,
    _seccomp,
    _tools,
    _privileges,
    _confinement,
    _limits,
    _network,
    _trials,
)
