"""Allowlists of other programs become profiles that let through the same names: each wildcard means what it meant there."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from egressd.policy.attempt import RequestAttempt
from egressd.policy.decide import decide
from egressd.rulefiles.foreign import codex, smokescreen, squid, srt
from egressd.rulefiles.foreign.allowlist import Form, NotReadable, Section
from egressd.rulefiles.foreign.rendering import render
from egressd.rulefiles.load import Rules, load_source
from egressd.rulefiles.source import RuleSource

SAMPLES = Path(__file__).parent / "samples"
TODAY = dt.date(2026, 12, 1)
NOON = dt.datetime(2026, 12, 1, 12, tzinfo=dt.UTC).timestamp()
READERS: dict[Form, Callable[[str], list[Section]]] = {
    "srt": srt.read,
    "codex": codex.read,
    "smokescreen": smokescreen.read,
    "squid": squid.read,
}


def beside(name: str) -> str:
    return (SAMPLES / name).read_text()


def allows(form: Form, text: str) -> Callable[..., str]:
    """What the profile that comes of the first section says of a request."""
    section = READERS[form](text)[0]
    profile = render(section, form, "sample", TODAY)
    path = f"profiles/{section.name}.yaml"
    rules = load_source(RuleSource({"organisation.yaml": b"schema: 1\n", path: profile.encode()}), now=NOON)
    assert isinstance(rules, Rules), rules
    policy = rules.compiled(section.name)

    def verdict(host: str, method: str = "POST", *, port: int = 443) -> str:
        attempt = RequestAttempt(
            tuple(host.split(".")), port, "http" if port == 80 else "https", method, "/x"
        )
        return decide(policy, attempt, NOON).verdict

    return verdict


@pytest.mark.parametrize(
    ("form", "sample"),
    [
        ("srt", "srt-settings.json"),
        ("codex", "codex-config.toml"),
        ("codex", "codex-early.toml"),
        ("smokescreen", "smokescreen-acl.yaml"),
        ("squid", "squid.conf"),
        ("squid", "squid-confined.conf"),
    ],
)
def test_a_sample_becomes_the_profiles_that_lie_beside_it(form: Form, sample: str) -> None:
    text = beside(sample)
    sections = squid.read(text, beside) if form == "squid" else READERS[form](text)
    for section in sections:
        expected = SAMPLES / f"{sample}.{section.name}.yaml"
        assert render(section, form, sample, TODAY) == expected.read_text(), expected


def wrapped(form: Form, pattern: str) -> str:
    """A file of this form that allows one pattern."""
    quoted = json.dumps(pattern)
    return {
        "srt": f'{{"network": {{"allowedDomains": [{quoted}], "deniedDomains": []}}}}',
        "codex": f'[permissions.p.network.domains]\n{quoted} = "allow"\n',
        "smokescreen": f"version: v1\nservices:\n  - name: p\n    action: enforce\n    allowed_domains: [{quoted}]\n",
        "squid": f"acl p dstdomain {pattern}\nhttp_access allow p\nhttp_access deny all\n",
    }[form]


@pytest.mark.parametrize(
    ("form", "pattern", "itself", "below"),
    [
        ("srt", "example.com", "allow", "deny"),
        ("srt", "*.example.com", "deny", "allow"),
        ("codex", "example.com", "allow", "deny"),
        ("codex", "*.example.com", "deny", "allow"),
        ("codex", "**.example.com", "allow", "allow"),
        ("smokescreen", "example.com", "allow", "deny"),
        ("smokescreen", "*.example.com", "deny", "allow"),
        ("squid", "example.com", "allow", "deny"),
        ("squid", ".example.com", "allow", "allow"),
        ("squid", "EXAMPLE.com", "allow", "deny"),
    ],
)
def test_a_wildcard_means_what_it_meant(form: Form, pattern: str, itself: str, below: str) -> None:
    verdict = allows(form, wrapped(form, pattern))
    assert (verdict("example.com"), verdict("a.b.example.com"), verdict("notexample.com")) == (
        itself,
        below,
        "deny",
    )


@pytest.mark.parametrize(
    ("form", "pattern", "why"),
    [
        ("srt", "*.com", "public suffix"),
        ("srt", "localhost", "two labels"),
        ("codex", "*", "every host"),
        ("codex", "region*.example.com", "whole labels"),
        ("codex", "127.0.0.1", "no rule can allow"),
        ("smokescreen", "*", "every host"),
        ("smokescreen", "*.co.uk", "public suffix"),
        ("squid", ".com", "public suffix"),
        ("squid", "metadata.google.internal", "never resolved"),
    ],
)
def test_what_ours_cannot_say_is_noted_with_its_line(form: Form, pattern: str, why: str) -> None:
    text = wrapped(form, pattern)
    notes = [note for note in READERS[form](text)[0].notes if why in note.why]
    assert notes, READERS[form](text)[0].notes
    assert pattern.removeprefix(".") in text.splitlines()[notes[0].line - 1]
    assert not notes[0].wider


def test_what_is_denied_there_is_denied_here() -> None:
    verdict = allows(
        "srt", '{"network": {"allowedDomains": ["*.example.com"], "deniedDomains": ["*.b.example.com"]}}'
    )
    assert (verdict("a.example.com"), verdict("x.b.example.com"), verdict("b.example.com")) == (
        "allow",
        "deny",
        "allow",
    )


def test_limited_mode_only_reads() -> None:
    verdict = allows("codex", '[network]\nmode = "limited"\nallowed_domains = ["example.com"]\n')
    assert (verdict("example.com", "OPTIONS"), verdict("example.com", "POST")) == ("allow", "deny")


def test_an_entry_for_one_port_is_for_this_one() -> None:
    verdict = allows("srt", '{"network": {"allowedDomains": ["example.com:8443"]}}')
    assert (verdict("example.com", port=8443), verdict("example.com")) == ("allow", "deny")


def test_a_services_own_domain_goes_before_a_global_denial() -> None:
    text = wrapped("smokescreen", "a.example.com") + 'global_deny_list: ["*.example.com"]\n'
    verdict = allows("smokescreen", text)
    assert (verdict("a.example.com"), verdict("b.example.com")) == ("allow", "deny")


def test_an_action_that_only_reports_observes() -> None:
    text = (
        wrapped("smokescreen", "a.example.com").replace("enforce", "report")
        + 'global_deny_list: ["c.example.com"]\n'
    )
    verdict = allows("smokescreen", text)
    assert (verdict("b.example.com"), verdict("c.example.com")) == ("allow", "deny")


@pytest.mark.parametrize(
    ("lines", "verdicts"),
    [
        pytest.param(
            "http_access deny !sites\nhttp_access allow all", ("allow", "deny", "deny"), id="confined"
        ),
        pytest.param(
            "http_access deny !sites\nhttp_access allow more\nhttp_access allow sites",
            ("allow", "deny", "deny"),
            id="an allowance behind what confines",
        ),
        pytest.param(
            "http_access deny bad\nhttp_access allow wide", ("allow", "deny", "allow"), id="a denial before"
        ),
        pytest.param(
            "http_access allow wide\nhttp_access deny bad", ("allow", "deny", "allow"), id="a denial behind"
        ),
        pytest.param("http_access allow wide sites", ("allow", "deny", "deny"), id="two lists in one line"),
        pytest.param("http_access allow !bad", ("deny", "deny", "deny"), id="all but a list"),
        pytest.param("http_access allow all", ("deny", "deny", "deny"), id="everything"),
    ],
)
def test_the_order_of_access_lines(lines: str, verdicts: tuple[str, ...]) -> None:
    acls = (
        "acl sites dstdomain good.example.com\nacl bad dstdomain bad.example.com\n"
        "acl wide dstdomain .example.com\nacl more dstdomain .example.org\n"
    )
    verdict = allows("squid", f"{acls}{lines}\nhttp_access deny all\n")
    assert tuple(verdict(f"{name}.example.com") for name in ("good", "bad", "other")) == verdicts


def test_a_denial_that_cannot_be_carried_over_is_said_loudly() -> None:
    text = "acl ads url_regex ^http://ads\nacl s dstdomain .example.com\nhttp_access deny ads\nhttp_access allow s\n"
    (section,) = squid.read(text)
    assert [(note.line, note.wider) for note in section.notes] == [(3, True)]
    assert "(LETS THROUGH MORE)" in render(section, "squid", "x", TODAY)


@pytest.mark.parametrize("form", sorted(READERS))
@pytest.mark.parametrize(
    "text", ["", "\0", "{}", "[]", "x", "[" * 5000, "network = 1", '{"network": {"allowedDomains": 1}}']
)
def test_what_is_no_such_file_is_refused(form: Form, text: str) -> None:
    with pytest.raises(NotReadable):
        READERS[form](text)


WORD = st.sampled_from(
    [
        "a.example.com",
        ".example.com",
        "*.example.com",
        "**.b.example.com",
        "*",
        "10.0.0.1",
        "[::1]",
        "x y",
        "é.example.com",
        "\u2028",
        "-",
        "a:1",
    ]
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(sorted(READERS)), st.lists(st.one_of(WORD, st.text(max_size=12)), min_size=1, max_size=4)
)
def test_whatever_is_in_a_list_the_profile_loads(form: Form, words: list[str]) -> None:
    text = "\n".join(wrapped(form, word) for word in words) if form == "squid" else wrapped(form, words[0])
    try:
        sections = READERS[form](text)
    except NotReadable:
        return
    for section in sections:
        render(section, form, words[-1], TODAY)
