"""Probes of files: what is egressd's own, what is the system's, what is the caller's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from egressd.verify.probe import Outcome, held, judged, listed, opened, probe, untried
from egressd.verify.scene import Scene
from egressd.verify.strangers import connects, mount_points

_MOST_LISTED = 2000


def _can(scene: Scene, path: str) -> str | None:
    """What can be done with a file or folder that should be out of reach; nothing in it is changed.

    An empty folder in its place, and a file that cannot be opened, are how it looks when it is hidden.
    """
    if os.path.isdir(path):
        return _can_with_folder(scene, path)
    for how, what in ((os.O_RDONLY, "read"), (os.O_WRONLY | os.O_APPEND, "written")):
        try:
            os.close(os.open(path, how | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY))
        except OSError:
            continue
        return f"{path} can be {what}"
    return f"{path} answers" if connects(path) else None


def _can_with_folder(scene: Scene, path: str) -> str | None:
    try:
        inside = os.listdir(path)
    except OSError:
        inside = []
    if inside:
        return f"{path} can be listed ({len(inside)} entries)"
    return f"files can be made in {path}" if _is_the_hosts(scene, path) and creates(scene, path) else None


def _is_the_hosts(scene: Scene, folder: str) -> bool:
    """Whether a folder is the host's own, and not an empty one of the sandbox's in its place."""
    try:
        found = os.stat(folder)
    except OSError:
        return False
    return scene.folders.get(folder) in (None, (found.st_dev, found.st_ino))


def creates(scene: Scene, folder: str) -> bool:
    """Whether a file can be made in a folder; it is removed at once."""
    path = os.path.join(folder, f".verify-{scene.nonce}")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except OSError:
        return False
    with contextlib.suppress(OSError):
        os.unlink(path)
    return True


def _out_of_reach(scene: Scene, what: str) -> Outcome:
    paths = scene.paths.get(what, [])
    if not paths:
        return untried("this installation has none")
    return judged((_can(scene, path) for path in paths), "places, all out of reach")


@probe(
    "secrets",
    why="whoever holds the key makes certificates for every name that sandboxes trust",
    held="neither the folder's content nor the key could be seen",
)
def authority_key(scene: Scene) -> Outcome:
    """Open the certificate authority's key and list its folder."""
    return _out_of_reach(scene, "authority key")


@probe(
    "secrets",
    why="the file says where every credential comes from, and to which host it may go",
    held="it could be neither read nor written",
)
def credentials_file(scene: Scene) -> Outcome:
    """Open the file of credentials."""
    return _out_of_reach(scene, "credentials")


@probe(
    "files",
    why="who writes the rules decides what is allowed; who reads them knows where to try",
    held="the folder of rules could be neither seen nor written",
)
def rules(scene: Scene) -> Outcome:
    """List the folder of rules, open its files, and make a file in it."""
    return _out_of_reach(scene, "rules")


@probe(
    "files",
    why="who can rename a folder above the rules puts others in their place",
    held="no folder above what is egressd's own can be written, but where a mount holds its place",
)
def folders_above(scene: Scene) -> Outcome:
    """Make a file in every folder above the rules, the key, the journal and the configuration; see what could be renamed."""
    points = mount_points()
    above = sorted({folder for paths in scene.paths.values() for path in paths for folder in _above(path)})

    def tries() -> Iterator[str | None]:
        for folder in above:
            parent = os.path.dirname(folder)
            movable = folder not in points and _is_the_hosts(scene, folder) and _is_the_hosts(scene, parent)
            yield f"{folder} can be renamed" if movable and creates(scene, parent) else None

    return judged(tries(), "folders, none of which can be renamed")


def _above(path: str) -> Iterator[str]:
    folder = os.path.dirname(os.path.realpath(path))
    while folder != "/":
        yield folder
        folder = os.path.dirname(folder)


@probe(
    "files",
    why="a journal that the sandbox can read tells it others' business; one that it can write proves nothing",
    held="it could be neither read nor written",
)
def journal(scene: Scene) -> Outcome:
    """Open the journal for reading and for writing."""
    return _out_of_reach(scene, "journal")


@probe(
    "files",
    why="the configuration says where everything is; the state is what control believes after a restart",
    held="neither could be read or written",
)
def configuration(scene: Scene) -> Outcome:
    """Open the configuration file and the folder of state."""
    return _out_of_reach(scene, "configuration")


@probe(
    "files",
    why="what controls egressd approves, reloads and revokes",
    held="the socket could not be reached",
)
def control_socket(scene: Scene) -> Outcome:
    """Connect to the control socket at its place, where a listener waits for this probe."""
    return _out_of_reach(scene, "control socket")


@probe(
    "files",
    why="code that the sandbox can change is run by the operator the next time",
    held="no file of egressd's code or of its Python could be written",
)
def own_code(scene: Scene) -> Outcome:
    """Make a file in the folders that hold egressd's code and its Python, and open its modules for writing."""

    def tries() -> Iterator[str | None]:
        for folder in scene.paths.get("code", []):
            yield (
                f"files can be made in {folder}" if os.path.isdir(folder) and creates(scene, folder) else None
            )
            path = os.path.join(folder, "__init__.py")
            yield f"{path} can be written" if os.access(path, os.W_OK) else None

    return judged(tries(), "tries, all refused")


@probe(
    "files",
    why="what is changed in the system is run by everybody on the machine",
    held="every folder of the system is read-only",
)
def system_folders(scene: Scene) -> Outcome:
    """Make a file in /, /etc, /usr, /var, /boot and other folders of the system, and open files of /etc for writing."""
    folders = (
        "/", "/etc", "/etc/cron.d", "/etc/ssl/certs", "/usr", "/usr/bin", "/usr/local/bin", "/usr/lib", "/lib", "/bin",
        "/sbin", "/opt", "/srv", "/var", "/var/lib", "/var/log", "/var/spool", "/boot", "/mnt",
    )  # fmt: skip
    files = (
        "/etc/passwd",
        "/etc/resolv.conf",
        "/etc/hosts",
        "/etc/nsswitch.conf",
        "/etc/ld.so.preload",
        "/etc/ld.so.cache",
    )

    def tries() -> Iterator[str | None]:
        for folder in folders:
            if os.path.isdir(folder):
                yield f"files can be made in {folder}" if creates(scene, folder) else None
        for path in files:
            yield f"{path} can be written" if os.access(path, os.W_OK) else None

    return judged(tries(), "places, all read-only")


@probe(
    "files",
    why="sysfs shows the host's network devices and their addresses to whoever looks",
    held="/sys names no network device but the loopback",
)
def sysfs_network(_scene: Scene) -> Outcome:
    """List the network devices that /sys shows."""
    found: set[str] = set()
    for folder in ("/sys/class/net", "/sys/devices/virtual/net"):
        with contextlib.suppress(OSError):
            found |= set(os.listdir(folder))
    found -= {"lo", "bonding_masters"}
    return opened(f"it shows {listed(sorted(found))}") if found else held("it shows none")


@probe(
    "files",
    why="a resolver of somebody else's, or a search list, sends names elsewhere or makes others of them",
    held="resolv.conf names egressd's resolver and nothing else",
)
def resolver_configuration(scene: Scene) -> Outcome:
    """Read /etc/resolv.conf."""
    try:
        with open("/etc/resolv.conf", encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file]
    except FileNotFoundError:
        return held("there is none; libc then asks this machine, where egressd answers")
    wanted = f"nameserver {scene.resolver}"
    strange = [line for line in lines if line and not line.startswith(("#", ";")) and line != wanted]
    return opened(f"it says: {listed(strange)}") if strange else held(wanted)


_PRIVATE_FILES = (
    ".ssh", ".aws", ".azure", ".config/gcloud", ".config/gh", ".config/git", ".docker", ".kube", ".gnupg", ".netrc",
    ".git-credentials", ".npmrc", ".pypirc", ".cargo/credentials.toml", ".gem/credentials", ".m2/settings.xml",
    ".terraform.d", ".vault-token", ".claude", ".claude.json", ".codex", ".mozilla", ".config/google-chrome",
    ".bash_history", ".zsh_history", ".python_history", ".psql_history", ".local/share/keyrings", ".password-store",
)  # fmt: skip


@probe(
    "secrets",
    why="homes hold ssh keys, cloud tokens, histories and shell start-up files",
    held="no home held any of them",
)
def private_homes(scene: Scene) -> Outcome:
    """Look in every home for keys, tokens and histories."""
    homes = {os.path.expanduser("~"), "/root", *scene.paths.get("home", [])}
    with contextlib.suppress(OSError):
        homes |= {os.path.join("/home", name) for name in os.listdir("/home")[:_MOST_LISTED]}

    def tries() -> Iterator[str | None]:
        for home in sorted(homes):
            for name in _PRIVATE_FILES:
                path = os.path.join(home, name)
                yield f"{path} can be read" if os.access(path, os.R_OK) else None

    return judged(tries(), "places, none of which holds anything")


@probe(
    "secrets",
    why="these files hold password hashes, host keys and tokens of the machine itself",
    held="none could be read",
)
def private_system_files(_scene: Scene) -> Outcome:
    """Open shadow, ssh host keys, Kubernetes' and machine tokens, and other secrets of the system for reading."""
    paths = (
        "/etc/shadow", "/etc/gshadow", "/etc/sudoers", "/etc/ssh/ssh_host_ed25519_key", "/etc/ssh/ssh_host_rsa_key",
        "/etc/kubernetes/admin.conf", "/var/lib/kubelet/pki", "/etc/rancher/k3s/k3s.yaml", "/etc/krb5.keytab",
        "/var/run/secrets/kubernetes.io/serviceaccount/token", "/var/run/secrets/eks.amazonaws.com/serviceaccount/token",
        "/run/secrets", "/etc/ssl/private", "/var/lib/cloud/instance/user-data.txt", "/etc/docker/key.json", "/root/.ssh",
        "/run/cloud-init/instance-data-sensitive.json",
    )  # fmt: skip

    def tries() -> Iterator[str | None]:
        for path in paths:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:
                yield None
                continue
            os.close(descriptor)
            yield f"{path} can be read" if not os.path.isdir(path) or os.listdir(path) else None

    return judged(tries(), "places, all closed")
