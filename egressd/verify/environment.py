"""Probes of what the sandbox was given: its variables, and whom it trusts."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator

from egressd.verify.probe import Outcome, held, judged, listed, opened, probe, untried
from egressd.verify.processes import visible
from egressd.verify.scene import Scene

_NAMED = re.compile(
    r"(^|_)(TOKEN|SECRET|SECRETS|PASSWORD|PASSWD|PASS|PWD_HASH|CREDENTIALS?|APIKEY|API_KEY|ACCESS_KEY|ACCESS_KEY_ID|"
    r"PRIVATE_KEY|SECRET_KEY|SIGNING_KEY|AUTH|AUTHORIZATION|BEARER|COOKIE|SESSION_KEY|DSN|CONNECTION_STRING|PAT)(_|$)|"
    r"(_KEY|TOKEN|PASSWORD|SECRET|APIKEY)$",
    re.IGNORECASE,
)
_SHAPED = re.compile(
    r"\b(gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[A-Za-z0-9_-]{16,}|xox[abprs]-[\w-]{10,}|"
    r"(AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}|hvs\.[\w-]{20,}|dckr_pat_[\w-]{20,}|"
    r"eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,})|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^/\s:@]+:[^/\s:@]+@"
)
_POINTERS = ("KUBERNETES_SERVICE_HOST", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
             "AWS_WEB_IDENTITY_TOKEN_FILE", "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_FEDERATED_TOKEN_FILE", "DOCKER_HOST",
             "SSH_AUTH_SOCK", "DBUS_SESSION_BUS_ADDRESS", "KUBECONFIG")  # fmt: skip
_INNOCENT = re.compile(r"^(SSH_ASKPASS|GPG_TTY|GIT_ASKPASS)$")
_PRIVATE_KEY = b"PRIVATE KEY-----"
_MOST_FILES, _MOST_BYTES = 5000, 4 << 20


@probe(
    "secrets",
    why="a variable is read by every program, and printed by many; a key in one is a key that the agent has",
    held="no variable looks like a credential, by its name or by its value, and none points to one",
)
def environment_secrets(_scene: Scene) -> Outcome:
    """Read our own variables for names and values that look like credentials; values are never shown."""
    found = []
    for name, value in sorted(os.environ.items()):
        if not value or _INNOCENT.match(name):
            continue
        if name in _POINTERS:
            found.append(f"{name} (it leads to one)")
        elif _NAMED.search(name):
            found.append(f"{name} (by its name)")
        elif _SHAPED.search(value):
            found.append(f"{name} (by its value)")
    return (
        opened(listed(found)) if found else held(f"{len(os.environ)} variables, none of which looks like one")
    )


@probe(
    "secrets",
    why="the caller's variables were cleared from ours; another process's copy of them would do",
    held="no process that can be seen has the variable that the caller was given for this probe",
)
def callers_environment(scene: Scene) -> Outcome:
    """Read the variables of every visible process for one that was put into the caller's environment."""
    if not scene.secret:
        return untried("no variable was put there")
    secret = scene.secret.encode()

    def tries() -> Iterator[str | None]:
        for pid in visible():
            for name in ("environ", "cmdline"):
                try:
                    with open(f"/proc/{pid}/{name}", "rb") as file:
                        content = file.read(_MOST_BYTES)
                except OSError:
                    continue
                yield f"process {pid} shows it" if secret in content else None

    return judged(tries(), "places, none of which shows it")


@probe(
    "secrets",
    why="a trust store without our authority breaks every client; a private key in one gives the authority away",
    held="the store holds the host's certificates and this installation's, public parts only, and cannot be written",
)
def trust_store(scene: Scene) -> Outcome:
    """Load the certificates that programs here trust; look for this installation's own, and for private keys among them."""
    places = _trust_places()
    found = []
    if scene.authority and not _trusts(scene.authority):
        found.append("this installation's authority is not trusted")
    keys, seen = _private_keys(places)
    found += [f"{path} holds a private key" for path in keys]
    found += [f"{path} can be written" for path in places if os.access(path, os.W_OK)]
    return (
        opened(listed(found))
        if found
        else held(f"{seen} files, public certificates only, this installation's among them")
    )


def _trust_places() -> list[str]:
    named = {
        value for name, value in os.environ.items() if re.search(r"(CA|CERT)", name) and value.startswith("/")
    }
    usual = (
        "/etc/ssl/certs",
        "/etc/pki/tls/certs",
        "/etc/pki/ca-trust/extracted",
        "/etc/ca-certificates/extracted",
    )
    return sorted({*named, *(path for path in usual if os.path.isdir(path))})


def _trusts(fingerprint: str) -> bool:
    """Whether Python's default context, and with it whatever uses OpenSSL's defaults, trusts the certificate."""
    import hashlib

    context = ssl.create_default_context()
    return any(
        hashlib.sha256(der).hexdigest() == fingerprint for der in context.get_ca_certs(binary_form=True)
    )


def _private_keys(places: list[str]) -> tuple[list[str], int]:
    keys: list[str] = []
    seen = 0
    for place in places:
        paths = [place]
        if os.path.isdir(place):
            paths = [os.path.join(folder, name) for folder, _, names in os.walk(place) for name in names]
        for path in paths[:_MOST_FILES]:
            try:
                with open(path, "rb") as file:
                    content = file.read(_MOST_BYTES)
            except OSError:
                continue
            seen += 1
            if _PRIVATE_KEY in content:
                keys.append(path)
    return keys, seen
