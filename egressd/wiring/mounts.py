"""What of the host's files a sandbox will see, arranged in the maker's own mount namespace before bubblewrap copies it.

Everything happens in a private namespace, so the host's mounts are never touched and nothing is left behind. In order:

1. The trees that are let in (workspace, binds, sockets) are copied out. As root they are idmapped, so that their owner
   on disk appears as the sandbox's uid: what the sandbox writes belongs to the owner of the workspace.
2. Directories of other people's business (HOME, /root, /home) and directories that the sandbox's uid could not enter
   are covered with an empty tmpfs, in which the way to the let-in trees is rebuilt.
3. The trees are attached at their own paths.
4. What must not be seen is masked, what must not change is made read-only, *even inside a writable tree*. A mask alone
   would not hold there: the sandbox could rename a directory above it and build its own in the old place. So every
   directory between the tree and the mask becomes a mount point too, which cannot be renamed (EBUSY).
"""

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from egressd.wiring import identity, kernel
from egressd.wiring.errors import WiringError
from egressd.wiring.sockets import is_socket

WALK_LIMIT: Final = 100_000
"""Entries looked at, breadth first, in search of sockets in the trees let in. Sockets whose services the kernel lists are
found beyond it too (see `sockets`)."""

_IDMAP_HINT: Final = (
    "the sandbox's uid cannot write there and this file system cannot map owners (idmapped mounts: ext4, xfs, btrfs, "
    "tmpfs from Linux 6.3 ...): run with --uid set to the owner's uid, or give the directory to uid {uid}"
)


class View(NamedTuple):
    """The paths of one sandbox; all absolute and free of symbolic links. `writable` begins with the workspace."""

    writable: tuple[str, ...]
    readonly: tuple[str, ...]
    sockets: tuple[str, ...]
    masks: tuple[str, ...]
    protected: tuple[str, ...]
    hidden: tuple[str, ...]
    emptied: tuple[str, ...]
    """Directories that bubblewrap will replace by empty ones, so that nothing in them needs a mask."""
    replaced: tuple[tuple[str, str], ...] = ()
    """Directories of the system that show another's content: (path inside, host directory whose content it is)."""


def within(path: str, directory: str) -> bool:
    """Is `path` the directory or anything below it?"""
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def ancestors(path: str) -> Iterator[str]:
    """The directories above `path`, from / down."""
    parts = path.strip("/").split("/")
    for count in range(len(parts)):
        yield "/" + "/".join(parts[:count])


def arrange(view: View, owner: tuple[int, int] | None, live_sockets: Iterable[str]) -> list[str]:
    """Make the calling process's mount namespace (already its own) show `view`; returns notes for the operator.

    `owner` is the sandbox's host uid and gid when the caller is root, None when the sandbox keeps the caller's uid.
    Raises WiringError.
    """
    live = tuple(live_sockets)
    notes = refuse_sockets(view, live)
    try:
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        _uncover_proc()
        brought = sorted({*view.writable, *view.readonly, *view.sockets}, key=_depth)
        trees = {path: _copy(path, owner, writable=path in view.writable) for path in brought}
        replacing = {inside: _copy(outside, None, writable=False) for inside, outside in view.replaced}
        covers = _covers(view, brought, owner)
        for cover in covers:
            kernel.mount("tmpfs", cover, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=1m")
        for hidden in view.hidden:
            if any(within(hidden, cover) for cover in covers):
                os.makedirs(hidden, mode=0o755, exist_ok=True)
        for path, tree in trees.items():
            _ensure_point(path, tree, covers)
            kernel.attach_tree(tree, path)
            os.close(tree)
        for inside, tree in replacing.items():
            kernel.attach_tree(tree, inside)
            os.close(tree)
        _close_off(view, live)
    except OSError as error:
        raise WiringError.from_os("mount", error, "is this a container without CAP_SYS_ADMIN?") from error
    return notes


def _uncover_proc() -> None:
    """Where a container covers parts of /proc, mount it anew: with parts covered, the kernel lets no user namespace
    mount a /proc of its own (mount_too_revealing, fs/namespace.c), so bubblewrap could not. The sandbox sees neither."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        covered = any(line.split(" ")[4].startswith("/proc/") for line in table)
    if covered:
        with contextlib.suppress(OSError):  # not allowed to: then bubblewrap will say so
            kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)


def refuse_sockets(view: View, live: Iterable[str]) -> list[str]:
    """Stop the start when a Unix socket lies in a tree that is let in, and was not itself let in by name.

    In read-only trees too: a read-only mount keeps nobody from connecting.
    """
    trees = (*view.writable, *view.readonly)
    for path in (*trees, *(path for path in live if any(within(path, tree) for tree in trees))):
        if is_socket(path):
            _refuse_socket(path, view)
    seen = 0
    queue = list(trees)
    for directory in queue:
        try:
            entries = list(os.scandir(directory))
        except OSError:
            continue
        for entry in entries:
            seen += 1
            if entry.is_dir(follow_symlinks=False):
                queue.append(entry.path)
            elif not entry.is_file(follow_symlinks=False) and is_socket(entry.path):
                _refuse_socket(entry.path, view)
        if seen > WALK_LIMIT:
            return [
                f"looked for Unix sockets in the first {seen} files of what the sandbox is given, no further"
            ]
    return []


def _refuse_socket(path: str, view: View) -> None:
    if path in view.sockets or any(within(path, mask) for mask in view.masks):
        return
    hint = f"a service behind it would act for the sandbox: --socket {path} if that is wanted, otherwise remove it"
    raise WiringError("run", f"{path} is a Unix socket in what the sandbox is given", hint)


def _copy(path: str, owner: tuple[int, int] | None, *, writable: bool) -> int:
    place = kernel.open_exactly(path)
    try:
        tree = kernel.clone_tree(place)
        found = os.fstat(place)
    finally:
        os.close(place)
    if owner is None or found.st_uid == owner[0]:
        return tree
    try:
        _give(tree, found, owner)
    except OSError as error:
        # What is only to be read may well be readable as it is; what is to be written is not writable.
        if writable:
            hint = _IDMAP_HINT.format(uid=owner[0])
            raise WiringError.from_os(f"idmap {path}", error, hint) from error
    return tree


def _give(tree: int, found: os.stat_result, owner: tuple[int, int]) -> None:
    """Show what belongs to the tree's owner on disk as the sandbox's own, and what it makes as the owner's."""
    mapping = identity.user_namespace([(found.st_uid, owner[0], 1)], [(found.st_gid, owner[1], 1)])
    try:
        kernel.map_owners(tree, mapping)
    finally:
        os.close(mapping)


def _covers(view: View, brought: list[str], owner: tuple[int, int] | None) -> list[str]:
    """Directories to hide behind a tmpfs, outermost only."""
    wanted = {path for path in view.hidden if path != "/" and os.path.isdir(path)}
    if owner is not None:
        for path in brought:
            if not any(path != other and within(path, other) for other in brought):
                wanted.update(_first_closed(path, owner))
    return sorted(
        path for path in wanted if not any(path != other and within(path, other) for other in wanted)
    )


def _first_closed(path: str, owner: tuple[int, int]) -> list[str]:
    """The first directory above `path` that the sandbox's uid may not enter, if there is one."""
    for directory in ancestors(path):
        found = os.stat(directory)
        bit = 0o100 if found.st_uid == owner[0] else 0o010 if found.st_gid == owner[1] else 0o001
        if not found.st_mode & bit:
            if directory == "/":
                raise WiringError("run", "the root directory is closed to other users", "chmod o+x /")
            return [directory]
    return []


def _ensure_point(path: str, tree: int, covers: list[str]) -> None:
    """Rebuild the way to a let-in tree through the tmpfs that covers it."""
    if os.path.lexists(path) or not any(within(path, cover) for cover in covers):
        return
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    if stat.S_ISDIR(os.fstat(tree).st_mode):
        os.mkdir(path, 0o755)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))


def _close_off(view: View, live: tuple[str, ...]) -> None:
    """Masks and read-only places, and the mount points above them that keep them in place."""
    masks = [path for path in view.masks if os.path.lexists(path)]
    protected = [path for path in view.protected if _in_writable(path, view) and os.path.lexists(path)]
    inner = [path for path in (*view.readonly, *view.sockets) if _in_writable(path, view)]
    for point in sorted({p for path in (*masks, *protected, *inner) for p in _above(path, view)}, key=_depth):
        kernel.mount(point, point, "", kernel.MS_BIND | kernel.MS_REC)
    for path in protected:
        kernel.mount(path, path, "", kernel.MS_BIND | kernel.MS_REC)
        kernel.make_read_only(path)
    for path in sorted(masks, key=_depth):
        if os.path.lexists(path):  # not already below another mask
            _mask(path)
    for path in live:
        if (
            path not in view.sockets
            and not any(within(path, gone) for gone in view.emptied)
            and is_socket(path)
        ):
            _mask(path)


def _mask(path: str) -> None:
    if os.path.isdir(path):
        kernel.mount("tmpfs", path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0555,size=4k")
        kernel.make_read_only(path)
    else:
        # Opening it fails: bubblewrap mounts everything but /dev without devices.
        kernel.mount("/dev/null", path, "", kernel.MS_BIND)


def _in_writable(path: str, view: View) -> bool:
    return any(path != tree and within(path, tree) for tree in view.writable)


def _above(path: str, view: View) -> Iterator[str]:
    """The directories strictly between a writable tree and `path`."""
    for tree in view.writable:
        if path != tree and within(path, tree):
            yield from (point for point in ancestors(path) if point != tree and within(point, tree))


def _depth(path: str) -> tuple[int, str]:
    return path.count("/"), path
