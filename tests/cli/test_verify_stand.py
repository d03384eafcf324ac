"""The stand has this installation's configuration, but for what the lab and its own folder stand in for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from egressd.cli.verify_stand import Standing, described, installed, stood
from egressd.control.config import Config, load_config

FULL = """schema: 1
rules: rules
credentials: credentials.yaml
ca_dir: ca
journal: JOURNAL
state_dir: state
control_socket: control.sock
dns: {upstream: "tls://9.9.9.9#dns.quad9.net", denied: nxdomain}
upstream: {ca_bundle: /etc/ssl/own.pem}
limits: {connections: 7, dns_timeout: 1.5}
"""


def config(folder: Path, text: str = FULL) -> Config:
    file = folder / "egressd.yaml"
    file.write_text(text)
    return load_config({}, {"HOME": "/home/a"}, file=file)


def standing(given: Config, folder: Path, *, lab: bool = True) -> Standing:
    told = Standing(
        described(given),
        {},
        str(folder / "own"),
        "udp://11.0.0.53" if lab else None,
        "/lab/ca.pem" if lab else None,
    )
    return Standing(**json.loads(told.as_json()))


@pytest.mark.parametrize("journal", ["journal.jsonl", "-"])
def test_a_configuration_survives_being_told(tmp_path: Path, journal: str) -> None:
    given = config(tmp_path, FULL.replace("JOURNAL", repr(journal)))
    assert installed(standing(given, tmp_path).config) == given
    plain = load_config({}, {"HOME": "/home/a"}, euid=1000)
    assert installed(standing(plain, tmp_path).config) == plain


def test_in_the_lab_dns_and_authorities_are_the_labs_and_records_are_thrown_away(tmp_path: Path) -> None:
    given = config(tmp_path)
    made = stood(given, standing(given, tmp_path))
    assert (made.dns.upstream, made.dns.denied) == ("udp://11.0.0.53", "nxdomain")
    assert made.upstream.ca_bundle == "/lab/ca.pem"
    assert made.journal == tmp_path / "own/journal.jsonl"
    assert (made.rules, made.credentials, made.limits) == (given.rules, given.credentials, given.limits)


def test_for_a_target_nothing_but_the_records_is_replaced(tmp_path: Path) -> None:
    given = config(tmp_path)
    made = stood(given, standing(given, tmp_path, lab=False))
    assert (made.dns, made.upstream) == (given.dns, given.upstream)
    assert made.journal == tmp_path / "own/journal.jsonl"


def test_the_authority_is_the_installations_where_it_has_one(tmp_path: Path) -> None:
    given = config(tmp_path)
    assert stood(given, standing(given, tmp_path)).ca.ca == tmp_path / "own/ca"
    (tmp_path / "ca").mkdir()
    (tmp_path / "ca/ca.key").touch()
    assert stood(given, standing(given, tmp_path)).ca == given.ca


def test_what_is_private_of_the_installation_stays_private(tmp_path: Path) -> None:
    given = config(tmp_path)
    private = stood(given, standing(given, tmp_path)).private_paths()
    assert set(given.private_paths()) <= set(private)
    assert tmp_path / "own/journal.jsonl" in private
    assert len(set(private)) == len(private)
