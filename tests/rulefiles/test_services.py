"""What a service says of its own entries: which hosts a credential never goes to, and that some are for denials only."""

from __future__ import annotations

from pathlib import Path

import pytest

from egressd.rulefiles.load import Rules, load_rules
from egressd.rulefiles.problems import Problems

NOON = 1_796_126_400.0  # 2026-12-01T12:00Z

HUB = """\
schema: 1
service: hub
description: a hub and its content network
owner: t
reviewed: 2026-12-01
sources: [t]
entries:
  - hosts: [hub.example.com]
    requests: ["GET /v2/**"]
  - hosts: [content.example.net]
    credential: never
"""
SINKS = """\
schema: 1
service: sinks
description: sinks
owner: t
reviewed: 2026-12-01
sources: [t]
access: deny
entries:
  - hosts: [sink.example.com]
"""
CREDENTIALS = """\
schema: 1
credentials:
  key:
    for: [{hosts: [hub.example.com], requests: ["GET /v2/**"]}]
    source: {file: /run/secrets/key}
    attach: {bearer: true}
"""


def load(folder: Path, profile: str) -> Rules | Problems:
    for part, name, text in (
        ("services", "hub", HUB),
        ("services", "sinks", SINKS),
        ("profiles", "a", f"schema: 1\nprofile: a\n{profile}"),
    ):
        (folder / "rules" / part).mkdir(parents=True, exist_ok=True)
        (folder / "rules" / part / f"{name}.yaml").write_text(text)
    (folder / "rules" / "organisation.yaml").write_text("schema: 1\n")
    (folder / "credentials.yaml").write_text(CREDENTIALS)
    return load_rules(folder / "rules", now=NOON, credentials=folder / "credentials.yaml")


def test_a_credential_for_a_service_keeps_away_from_the_hosts_that_never_get_one(tmp_path: Path) -> None:
    rules = load(tmp_path, "allow:\n  - service: hub\n    credential: key\n")
    assert isinstance(rules, Rules), str(rules)
    assert (
        rules.warnings == ()
    )  # in particular not that content.example.net is not covered, or sends own keys
    attached = {entry.hosts[0]: entry.credential for entry in rules.effective("a").entries}
    assert attached == {"hub.example.com": "key", "content.example.net": None}


@pytest.mark.parametrize("effect", ["allow", "ask"])
def test_what_is_for_denials_can_only_be_denied(effect: str, tmp_path: Path) -> None:
    problems = load(tmp_path, f"{effect}:\n  - service: sinks\n")
    assert str(problems).endswith(
        "profiles/a.yaml:4:14: not_together: sinks is for denials: what it names is never to be reached\n"
        "    hint: name it under `deny`"
    )
    rules = load(tmp_path, "deny:\n  - service: sinks\n")
    assert isinstance(rules, Rules)


@pytest.mark.parametrize("value", ["always", "key", "false"])
def test_a_service_names_no_credential(value: str, tmp_path: Path) -> None:
    assert isinstance(load(tmp_path, ""), Rules)
    path = tmp_path / "rules" / "services" / "hub.yaml"
    path.write_text(HUB.replace("never", value))
    assert isinstance(load_rules(tmp_path / "rules", now=NOON), Problems)
