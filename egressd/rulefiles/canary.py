"""A canary: sandboxes with certain labels live under another profile than the one they were made for, to try it on a few first.

The other profile is one like any other, below the same organisation; what it is called stands in every record. Labels are said by
whoever makes a sandbox, never by the sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping

from egressd.policy.model import Canary, ProfileFile
from egressd.rulefiles.document import Document
from egressd.rulefiles.problems import Code, Findings
from egressd.rulefiles.shape import did_you_mean
from egressd.rulefiles.source import PROFILES


def lives_under(canaries: Mapping[str, Canary], profile: str, labels: Mapping[str, str]) -> str:
    """Return the profile that a sandbox with these labels lives under when it was made for `profile`."""
    canary = canaries.get(profile)
    if canary is None or any(labels.get(key) != value for key, value in canary.labels.items()):
        return profile
    return canary.profile


def read_canaries(files: Mapping[str, tuple[ProfileFile, Document]], findings: Findings) -> dict[str, Canary]:
    """Return the canary of each profile that has one; problems are added to `findings`."""
    found: dict[str, Canary] = {}
    for name, (model, document) in files.items():
        canary = model.canary
        if canary is None:
            continue
        place = document.place("canary", "profile")
        if canary.profile not in files:
            message = f"there is no profile {canary.profile!r}{did_you_mean(canary.profile, sorted(files))}"
            hint = f"{PROFILES}/{canary.profile}.yaml would be it"
            findings.add(document.path, place, Code.UNKNOWN_PROFILE, message, hint)
        elif files[canary.profile][0].canary is not None:
            message = f"{canary.profile!r} {'is this profile itself' if canary.profile == name else 'has a canary too'}"
            hint = "name a profile that has no canary"
            findings.add(document.path, place, Code.NOT_TOGETHER, message, hint)
        else:
            found[name] = canary
    return found
