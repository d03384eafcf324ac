"""The rules in force: read with the credentials they name, and what a profile is by them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from egressd.control.config import Config
from egressd.control.paths import default_paths
from egressd.control.surroundings import BadInput
from egressd.policy.effective import EffectivePolicy
from egressd.rulefiles.load import Rules, load_rules
from egressd.rulefiles.problems import Code


def read_rules(config: Config, environ: Mapping[str, str]) -> Rules:
    """Read rules and credentials together; a credentials file that nobody named need not be there. Raises BadInput."""
    wanted = config.credentials != default_paths(environ, os.geteuid()).credentials
    there = wanted or os.path.lexists(config.credentials)
    loaded = load_rules(config.rules, credentials=config.credentials if there else None)
    if isinstance(loaded, Rules):
        return loaded
    raise BadInput(str(loaded), passing=any(problem.code is Code.UNREADABLE for problem in loaded))


def effective(rules: Rules, profile: str) -> EffectivePolicy:
    """Return what a profile allows; raises BadInput where there is none of this name."""
    if profile not in rules.profiles:
        known = ", ".join(sorted(rules.profiles)) or "none"
        raise BadInput(f"there is no profile {profile!r}\nhint: profiles here: {known}")
    return rules.effective(profile)
