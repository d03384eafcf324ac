"""Hosts on which many owners live side by side, and where a path says whose it is.

To allow such a host without naming an owner is to allow whoever wants one there. Where the owner is a label of the host
(`*.blob.core.windows.net`), `hosts.shared_suffix` tells; here are those where it is a segment of the path.
"""

from __future__ import annotations

from collections.abc import Iterable

_REGISTRY = ("v2",)
_GIT = ("",)
_TENANTS: dict[str, tuple[str, ...]] = {
    # host -> the paths behind which an owner's name stands; "" is the top
    **dict.fromkeys(
        ("github.com", "raw.githubusercontent.com", "codeload.github.com", "gist.github.com"), _GIT
    ),
    "gist.githubusercontent.com": _GIT,
    "media.githubusercontent.com": ("media",),
    **dict.fromkeys(("api.github.com", "uploads.github.com"), ("repos", "orgs", "users", "gists")),
    "gitlab.com": ("", "api/v4/projects", "api/v4/groups"),
    "bitbucket.org": _GIT,
    "api.bitbucket.org": ("2.0/repositories", "2.0/snippets", "2.0/workspaces"),
    "dev.azure.com": _GIT,
    "pkgs.dev.azure.com": _GIT,
    "codeberg.org": ("", "api/v1/repos"),
    "sourceforge.net": ("projects", "p"),
    "huggingface.co": (
        *("", "datasets", "spaces", "api/models", "api/datasets", "api/spaces"),
        *("api/resolve-cache/models", "api/resolve-cache/datasets"),
    ),
    **dict.fromkeys(("registry-1.docker.io", "index.docker.io", "ghcr.io", "quay.io"), _REGISTRY),
    **dict.fromkeys(("gcr.io", "us.gcr.io", "eu.gcr.io", "asia.gcr.io", "public.ecr.aws"), _REGISTRY),
    "hub.docker.com": ("r", "v2/repositories"),
    "storage.googleapis.com": ("", "storage/v1/b", "upload/storage/v1/b", "download/storage/v1/b"),
    "storage.cloud.google.com": _GIT,
    "s3.amazonaws.com": _GIT,
    "conda.anaconda.org": _GIT,
    "anaconda.org": _GIT,
    "packagecloud.io": _GIT,
    "ppa.launchpad.net": _GIT,
    "ppa.launchpadcontent.net": _GIT,
    "copr.fedorainfracloud.org": ("coprs",),
    "hooks.slack.com": ("services",),
    "script.google.com": ("macros/s",),
    "cdn.jsdelivr.net": ("gh",),
}


def shares_paths(host: str) -> bool:
    """Return whether the host's paths belong to many owners, or a wildcard covers one whose do."""
    return _behind(host) is not None


def names_owner(host: str, path: str) -> bool:
    """Return whether a path pattern on such a host says whose paths it covers; `{parameter}` stands for one that does."""
    behind = _behind(host)
    if behind is None:
        return True
    if host.startswith("*."):
        return False  # which of the hosts below it the pattern is for is not said
    segments = path.removeprefix("/").split("/")
    star = next((index for index, segment in enumerate(segments) if "*" in segment), None)
    if star is None:
        return True
    roots = [tuple(filter(None, root.split("/"))) for root in behind]
    # A star at an owner's place, or on the way there, stands for everybody who is behind it.
    return not any(star <= len(root) and root[:star] == tuple(segments[:star]) for root in roots)


def _behind(host: str) -> Iterable[str] | None:
    if not host.startswith("*."):
        return _TENANTS.get(host)
    return next((roots for name, roots in _TENANTS.items() if name.endswith(host[1:])), None)
