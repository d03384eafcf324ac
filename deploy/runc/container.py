#!/usr/bin/env python3
"""Run a command in a container by runc alone: no engine, no image. Its files are this machine's /usr, read-only.

    container.py [OPTIONS] NAME -- COMMAND...

The container has its own mounts, processes, users of its own /etc, hostname and, with --network, network; without, it shares that
of the caller, as the containers of a pod do. By default it is what a manifest for agents should ask for: uid 1000, no capability,
no way to gain one. Exit status: the command's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
FOLDERS = ("usr", "etc", "proc", "dev", "sys", "run", "var", "home", "root")
SCRATCH = ("/dev/shm", "/tmp")  # noqa: S108 - the container's own
NAMES = """\
127.0.0.1 localhost
::1 localhost
"""


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run a command in a container by runc alone.")
    parser.add_argument("name", help="the container's name, and its hostname")
    parser.add_argument(
        "--network",
        metavar="PATH",
        help="join this network namespace; 'none': one of its own, with nothing in it",
    )
    parser.add_argument("--uid", type=int, default=1000, help="uid and gid of the command (default: 1000)")
    parser.add_argument(
        "--capability", action="append", default=[], metavar="CAP_…", help="grant it; repeatable"
    )
    parser.add_argument(
        "--new-privileges", action="store_true", help="let set-uid programs work, as engines do by default"
    )
    parser.add_argument("--resolver", metavar="ADDRESS", help="what its resolv.conf names")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--bind", action="append", default=[], metavar="PATH[:ro]", help="show it at the same path"
    )
    parser.add_argument("--workdir", default="/", metavar="PATH")
    parser.add_argument(
        "--state", default="/run/egressd-runc", metavar="PATH", help="where runc keeps what it runs"
    )
    parser.usage = "%(prog)s [OPTIONS] NAME -- COMMAND..."
    # By hand: argparse takes away a second -- too, which is the command's own.
    words = sys.argv[1:]
    if "--" not in words[:-1]:
        parser.error("a command is needed, behind --")
    place = words.index("--")
    return parser.parse_args(words[:place], argparse.Namespace(command=words[place + 1 :]))


def mounts(options: argparse.Namespace) -> list[dict[str, object]]:
    """What is mounted where, in order."""
    small = ["nosuid", "nodev", "mode=1777"]
    terminals = ["newinstance", "ptmxmode=0666", "mode=0620"]
    made: list[dict[str, object]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755", "size=64k"]},
        {"destination": "/dev/pts", "type": "devpts", "source": "devpts", "options": terminals},
        {"destination": "/usr", "type": "bind", "source": "/usr", "options": ["rbind", "ro"]},
    ]  # fmt: skip
    for path in SCRATCH:
        made.append({"destination": path, "type": "tmpfs", "source": "tmpfs", "options": small})
    for shared in ("/etc/alternatives", "/etc/ssl", "/etc/protocols", "/etc/services"):
        if Path(shared).exists():
            made.append({"destination": shared, "type": "bind", "source": shared, "options": ["rbind", "ro"]})
    for bind in options.bind:
        path, _, mode = bind.partition(":")
        flags = ["rbind", "ro" if mode == "ro" else "rw"]
        made.append({"destination": path, "type": "bind", "source": path, "options": flags})
    return made


def specification(options: argparse.Namespace) -> dict[str, object]:
    """The OCI runtime configuration (config.json)."""
    spaces: list[dict[str, str]] = [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]
    if options.network is not None:
        spaces.append({"type": "network"} | ({} if options.network == "none" else {"path": options.network}))
    granted = dict.fromkeys(("bounding", "effective", "permitted"), options.capability)
    if options.uid != 0:  # without root's magic, exec keeps what is ambient, and nothing else
        granted |= dict.fromkeys(("inheritable", "ambient"), options.capability)
    environment = [
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME=/tmp",
        "LANG=C.UTF-8",
    ]
    return {
        "ociVersion": "1.0.2",
        "root": {"path": "rootfs", "readonly": True},
        "hostname": options.name,
        "mounts": mounts(options),
        "process": {
            "terminal": False,
            "user": {"uid": options.uid, "gid": options.uid},
            "args": options.command,
            "env": environment + options.env,
            "cwd": options.workdir,
            "capabilities": granted,
            "noNewPrivileges": not options.new_privileges,
        },
        "linux": {
            "namespaces": spaces,
            "maskedPaths": ["/proc/kcore", "/proc/keys"],
            "readonlyPaths": ["/proc/sys"],
        },
    }


def root(folder: Path, options: argparse.Namespace) -> None:
    """Lay out the root file system."""
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)
    for name in LINKS:
        if Path(f"/usr/{name}").exists():
            (folder / name).symlink_to(f"usr/{name}")
    uid, etc = options.uid, folder / "etc"
    own = "" if uid == 0 else f"user:x:{uid}:{uid}::/tmp:/bin/sh\n"
    (etc / "passwd").write_text(f"root:x:0:0::/root:/bin/sh\n{own}")
    (etc / "group").write_text("root:x:0:\n" + ("" if uid == 0 else f"user:x:{uid}:\n"))
    (etc / "hosts").write_text(NAMES)
    (etc / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files dns\n")
    if options.resolver:
        (etc / "resolv.conf").write_text(f"nameserver {options.resolver}\noptions timeout:2 attempts:1\n")


def main() -> int:
    """Run the container to its end."""
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="egressd-runc-") as folder:
        bundle = Path(folder)
        bundle.chmod(0o755)
        root(bundle / "rootfs", options)
        (bundle / "config.json").write_text(json.dumps(specification(options)))
        os.makedirs(options.state, mode=0o700, exist_ok=True)
        run = ["runc", "--root", options.state, "run", "--bundle", folder, options.name]
        return subprocess.run(run, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
