"""The rules that a verb works on, read from where the command line says, or every reason why they cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from egressd.cli.given import credentials_file, rules_folder

if TYPE_CHECKING:  # the reader of rules takes longer to import than `--help` should
    from egressd.rulefiles.load import Rules


class BadRules(Exception):
    """The rules cannot be used; says why and what to do."""


def loaded_rules(
    credentials: Path | None, *, profile: str | None = None, folder: Path | None = None
) -> Rules:
    """Return the rules in `folder`, else where the configuration has them; raises BadRules.

    Where a profile is named, they have it.
    """
    from egressd.rulefiles.load import load_rules
    from egressd.rulefiles.problems import Problems

    try:
        rules = load_rules(folder or rules_folder(), credentials=credentials_file(credentials))
    except ValueError as error:
        raise BadRules(str(error)) from None
    if isinstance(rules, Problems):
        raise BadRules(f"the rules cannot be used\n{rules}\nhint: egressd check")
    if profile is not None:
        has_profile(rules, profile)
    return rules


def has_profile(rules: Rules, profile: str) -> None:
    """Raise BadRules unless the rules have the profile."""
    from egressd.rulefiles.shape import did_you_mean

    if profile not in rules.profiles:
        known = ", ".join(rules.profiles)
        near = did_you_mean(profile, rules.profiles)
        raise BadRules(f"there is no profile {profile!r}{near}\nhint: known: {known}")
