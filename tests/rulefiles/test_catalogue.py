"""Objections to services: one for each kind, none without a cause, and none to what we ship."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from egressd.rulefiles.catalogue import WHY, Finding, Objection, lint
from egressd.rulefiles.entries import Library
from egressd.rulefiles.load import load_services
from egressd.rulefiles.problems import Problems

RULES = Path(__file__).resolve().parents[2] / "rules"
TODAY = dt.date(2026, 12, 1)

GOOD = """\
schema: 1
service: hub
description: a hub
owner: team
reviewed: 2026-11-01
sources: [its documentation]
risks: [it can be read]
parameters:
  repos: {type: repo}
entries:
  - hosts: [github.com]
    requests: ["GET /{repo}/info/refs", "POST /{repo}/git-upload-pack"]
    reads: a fetch asks by POST
"""


def objections(
    tmp_path: Path, *texts: str, known: tuple[str, ...] = (), today: dt.date = TODAY
) -> tuple[Objection, ...]:
    for number, text in enumerate(texts):
        name = f"hub{number or ''}"
        path = tmp_path / "services" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("service: hub\n", f"service: {name}\n"))
    lists = tmp_path / "lists"
    lists.mkdir(exist_ok=True)
    (lists / "a.txt").write_text("raw.githubusercontent.com\ndocs.example.com\n")
    library = load_services(tmp_path)
    assert isinstance(library, Library), str(library)
    return lint(library, today, known=known)


def changed(*changes: tuple[str, str]) -> str:
    text = GOOD
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


REQUESTS = '["GET /{repo}/info/refs", "POST /{repo}/git-upload-pack"]'
READS = "    reads: a fetch asks by POST\n"
CASES: dict[str, tuple[str, Finding, int]] = {
    "nobody owns it": (changed(("owner: team", "owner: TBD")), Finding.NO_OWNER, 4),
    "its source is none": (changed(("[its documentation]", "[todo, '?']")), Finding.NO_SOURCE, 6),
    "its risks are not told": (changed(("risks: [it can be read]\n", "")), Finding.NO_RISKS, 2),
    "its review is old": (changed(("2026-11-01", "2025-11-30")), Finding.STALE_REVIEW, 5),
    "its review is to come": (changed(("2026-11-01", "2026-12-02")), Finding.FUTURE_REVIEW, 5),
    "no path says whose": (
        changed(
            ("parameters:\n  repos: {type: repo}\n", ""),
            (REQUESTS, '["GET /*/*/info/refs"]'),
            (READS, ""),
        ),
        Finding.SHARED_HOST,
        9,
    ),
    "a host of its list is shared": (
        changed(
            ("parameters:\n  repos: {type: repo}\n", ""),
            ("hosts: [github.com]", "hosts_from: lists/a.txt"),
            (f"    requests: {REQUESTS}\n", ""),
            (READS, ""),
        ),
        Finding.SHARED_HOST,
        9,
    ),
    "a wildcard covers everybody's names": (
        changed(("[github.com]", '["*.blob.core.windows.net"]')),
        Finding.SHARED_HOST,
        11,
    ),
    "a shared host is not looked into": (
        changed(
            ("parameters:\n  repos: {type: repo}\n", ""),
            (f"    requests: {REQUESTS}\n", "    treatment: tunnel\n"),
            (READS, ""),
            ("risks:", "access: write\nrisks:"),
        ),
        Finding.SHARED_HOST,
        10,
    ),
    "a POST is not explained": (changed((READS, "")), Finding.WIDE_METHODS, 12),
    "a PUT cannot be explained": (
        changed(("POST /{repo}/git", "PUT /{repo}/git"), (READS, READS)),
        Finding.WIDE_METHODS,
        12,
    ),
    "any method is asked for": (changed(("POST /{repo}", "ANY /{repo}")), Finding.WIDE_METHODS, 12),
    "a WebSocket is asked for": (
        changed(("POST /{repo}", "WEBSOCKET /{repo}")),
        Finding.WIDE_METHODS,
        12,
    ),
    "a call deletes": (
        changed(("risks:", "access: call\nrisks:"), ("POST /{repo}", "DELETE /{repo}"), (READS, "")),
        Finding.WIDE_METHODS,
        13,
    ),
    "a tunnel carries everything": (
        changed(
            ("parameters:\n  repos: {type: repo}\n", ""),
            ("[github.com]", "[x.example.com]"),
            (f"    requests: {REQUESTS}\n", "    treatment: tunnel\n"),
            (READS, ""),
        ),
        Finding.WIDE_METHODS,
        10,
    ),
    "it explains what needs no explanation": (
        changed(("POST /{repo}", "HEAD /{repo}")),
        Finding.NEEDLESS,
        13,
    ),
    "it explains in a service that writes": (
        changed(("risks:", "access: write\nrisks:")),
        Finding.NEEDLESS,
        14,
    ),
    "it accepts what is not there": (
        changed(("risks:", "accept: {shared-host: it is meant}\nrisks:")),
        Finding.NEEDLESS,
        7,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_objection_has_its_place_and_a_way_out(name: str, tmp_path: Path) -> None:
    text, kind, line = CASES[name]
    found = objections(tmp_path, text)
    assert (kind, line) in {(one.kind, one.line) for one in found}, found
    assert {one.kind for one in found} == {kind}
    assert all(one.hint and one.service == "hub" and one.path == "services/hub.yaml" for one in found)


def test_nothing_is_objected_to_a_sound_service(tmp_path: Path) -> None:
    assert objections(tmp_path, GOOD) == ()


@pytest.mark.parametrize(
    ("changes", "accept"),
    [
        ((("GET /{repo}/info/refs", "GET /*/{repo}"),), "shared-host"),
        ((("[github.com]", "[githud.com]"),), "lookalike"),
    ],
    ids=["a shared host", "a lookalike"],
)
def test_what_is_meant_can_be_accepted(
    changes: tuple[tuple[str, str], ...], accept: str, tmp_path: Path
) -> None:
    known = ("github.com",)
    assert objections(tmp_path, changed(*changes), known=known) != ()
    text = changed(*changes, ("risks:", f"accept: {{{accept}: it is meant}}\nrisks:"))
    assert objections(tmp_path, text, known=known) == ()


def test_a_name_that_is_new_is_suspected_and_not_the_known_one(tmp_path: Path) -> None:
    wrong = changed(("[github.com]", "[api.githud.com]"))
    (one,) = objections(tmp_path, wrong, known=("github.com",))
    assert one.kind is Finding.LOOKALIKE
    assert one.message == "api.githud.com is spelled like github.com"
    # Of two in one folder the one that fewer services name is; where they are even, both.
    assert {one.service for one in objections(tmp_path, wrong, GOOD)} == {"hub", "hub1"}
    assert {one.service for one in objections(tmp_path, wrong, GOOD, GOOD)} == {"hub"}


def test_what_is_for_denials_may_name_anything(tmp_path: Path) -> None:
    text = changed(
        ("parameters:\n  repos: {type: repo}\n", ""),
        ("[github.com]", '["*.blob.core.windows.net", githud.com]'),
        (f"    requests: {REQUESTS}\n", ""),
        (READS, ""),
        ("risks: [it can be read]", "access: deny"),
    )
    assert objections(tmp_path, text, known=("github.com",)) == ()


def test_a_review_holds_for_a_year(tmp_path: Path) -> None:
    assert objections(tmp_path, GOOD, today=dt.date(2027, 11, 1)) == ()
    assert objections(tmp_path, GOOD, today=dt.date(2027, 11, 2)) != ()


def test_every_kind_is_shown_and_says_why() -> None:
    shown = {kind for _, kind, _ in CASES.values()} | {Finding.LOOKALIKE}
    assert shown == set(Finding) == set(WHY)


def test_nothing_is_objected_to_what_we_ship() -> None:
    library = load_services(RULES)
    assert isinstance(library, Library)
    assert [str(one) for one in lint(library, TODAY)] == []


def test_a_bad_service_is_a_problem_and_a_bad_profile_is_not(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "a.yaml").write_text("nonsense")
    assert objections(tmp_path, GOOD) == ()
    (tmp_path / "services" / "hub.yaml").write_text("nonsense")
    assert isinstance(load_services(tmp_path), Problems)
    assert isinstance(load_services(tmp_path / "none"), Problems)
