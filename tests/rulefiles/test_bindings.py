"""Credentials and rules together: no two for one request, whatever the entries are made of."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from egressd.policy.names import HostPattern, parse_pattern
from egressd.policy.paths import Target
from egressd.policy.requests import RequestPattern, parse_request_pattern
from egressd.rulefiles.load import load_source
from egressd.rulefiles.problems import Code, Problem, Problems
from egressd.rulefiles.source import RuleSource

NOW = 1_796_126_400.0
SERVICE = """schema: 1
service: forge
description: a forge
owner: team
reviewed: 2026-11-30
sources: [its manual]
parameters:
  repos: {type: repo}
entries:
  - hosts: [forge.example.com]
    requests: ["GET /{repo}/info"]
  - hosts_from: lists/mirrors.txt
    requests: ["GET /**"]
"""
FILES = {
    "organisation.yaml": "schema: 1\n",
    "services/forge.yaml": SERVICE,
    "lists/mirrors.txt": "mirror.example.com\n",
}


def problems(profile: str, credentials: str | None = None) -> list[Problem]:
    files = {**FILES, "profiles/box.yaml": f"schema: 1\nprofile: box\n{profile}"}
    source = RuleSource({path: text.encode() for path, text in files.items()}, "rules")
    known = credentials.encode() if credentials is not None else None
    found = load_source(source, now=NOW, credentials=known)
    return list(found) if isinstance(found, Problems) else list(found.warnings)


def codes(profile: str, credentials: str | None = None) -> set[Code]:
    return {problem.code for problem in problems(profile, credentials)}


FORGE = "  - {id: one, service: forge, with: {repos: acme/*}, credential: a}\n"
WIDE = 'hosts: ["*.example.com"], requests: ["ANY /**"], credential: b}\n'


@pytest.mark.parametrize(
    ("profile", "conflict"),
    [
        pytest.param(f"allow:\n{FORGE}  - {{id: two, {WIDE}", True, id="a service and a wildcard"),
        pytest.param(f"allow:\n{FORGE}ask:\n  - {{id: two, {WIDE}", True, id="an allow and an ask"),
        pytest.param(
            f"ask:\n{FORGE}  - {{id: two, {WIDE.replace('*.', 'mirror.')}",
            True,
            id="a list within a service, both asked for",
        ),
        pytest.param(
            "allow:\n  - {id: one, hosts_from: lists/mirrors.txt, requests: ['GET /a'], credential: a}\n"
            "  - {id: two, hosts: [mirror.example.com], requests: ['GET /*'], credential: b}\n",
            True,
            id="a list and the name that stands in it",
        ),
        pytest.param(
            "allow:\n  - {id: one, hosts: ['*.example.com'], requests: ['GET /a'], credential: a}\n"
            "  - {id: two, hosts: ['*.b.example.com'], requests: ['GET /a'], credential: b}\n",
            True,
            id="a wildcard below another",
        ),
        pytest.param(
            "allow:\n  - {id: one, hosts: [x.example.com], requests: ['WEBSOCKET /a'], credential: a}\n"
            "  - {id: two, hosts: [x.example.com], requests: ['GET /b', 'WEBSOCKET /*'], credential: b}\n",
            True,
            id="the handshakes of WebSockets",
        ),
        pytest.param(
            "allow:\n  - {id: one, hosts: [x.example.com], requests: ['ANY /a'], credential: a}\n"
            "  - {id: two, hosts: [x.example.com], requests: ['WEBSOCKET /a'], credential: b}\n",
            False,
            id="ANY is no WebSocket",
        ),
        pytest.param(
            "allow:\n  - {id: one, hosts: [x.example.com], ports: [8443], requests: ['GET /a'], credential: a}\n"
            "  - {id: two, hosts: [x.example.com], requests: ['GET /a'], credential: b}\n",
            False,
            id="another port",
        ),
        pytest.param(
            "allow:\n  - {id: one, hosts: [x.example.com], requests: ['GET /a'], credential: a}\n"
            "  - {id: two, hosts: [x.example.com], requests: ['GET /a/**'], credential: a}\n",
            False,
            id="one credential twice",
        ),
    ],
)
def test_two_credentials_for_one_request_are_an_error(profile: str, conflict: bool) -> None:
    assert (Code.CREDENTIAL_CONFLICT in codes(profile)) is conflict


HOSTS = ["a.example.com", "b.example.com", "x.a.example.com", "*.example.com", "*.a.example.com"]
REQUESTS = [
    "GET /a",
    "GET,POST /*",
    "ANY /a/**",
    "POST /**",
    "WEBSOCKET /a",
    "GET /a?k=v",
    "GET /*/b",
    "GET /**/b",
]
entries = st.builds(
    lambda hosts, requests, effect: (sorted(hosts), sorted(requests), effect),
    st.sets(st.sampled_from(HOSTS), min_size=1, max_size=2),
    st.sets(st.sampled_from(REQUESTS), min_size=1, max_size=2),
    st.sampled_from(["allow", "ask"]),
)
type Entry = tuple[list[str], list[str], str]
NAMES = [
    ("a", "example", "com"),
    ("b", "example", "com"),
    ("x", "a", "example", "com"),
    ("y", "x", "a", "example", "com"),
]
SENT = list(
    itertools.product(["GET", "POST"], [None, "websocket"], ["/a", "/a?k=v", "/a/b", "/b", "/a/c/b", "/c/b"])
)


def takes(entry: Entry, name: tuple[str, ...], method: str, upgrade: str | None, target: str) -> bool:
    hosts = [parse_pattern(host) for host in entry[0]]
    requests = [parse_request_pattern(text) for text in entry[1]]
    return any(isinstance(host, HostPattern) and host.matches(name) for host in hosts) and any(
        isinstance(one, RequestPattern) and one.refuses(method, upgrade, Target(target)) is None
        for one in requests
    )


@settings(max_examples=150)
@given(entries, entries)
def test_no_request_that_two_entries_take_goes_unnoticed(one: Entry, other: Entry) -> None:
    met = any(
        takes(one, name, *sent) and takes(other, name, *sent) for name, sent in itertools.product(NAMES, SENT)
    )
    assume(met)
    by_effect: dict[str, list[str]] = {}
    for number, (hosts, requests, effect) in enumerate((one, other)):
        line = f"  - {{id: e{number}, hosts: {hosts!r}, requests: {requests!r}, credential: c{number}}}\n"
        by_effect.setdefault(effect, []).append(line)
    profile = "".join(f"{effect}:\n{''.join(lines)}" for effect, lines in by_effect.items())
    assert Code.CREDENTIAL_CONFLICT in codes(profile)


KEY = """schema: 1
credentials:
  key:
    for: [{{hosts: [{hosts}], requests: [{requests}]}}]
    source: {{file: /run/secrets/key}}
    attach: {{header: x-api-key}}
"""


SIDE_BY_SIDE: list[tuple[Entry, Entry]] = [
    *(
        (([one], ["GET /a"], "allow"), ([other], ["GET /a"], "allow"))
        for one, other in itertools.product(HOSTS, repeat=2)
    ),
    *(
        (([HOSTS[0]], [one], "allow"), ([HOSTS[0]], [other], "allow"))
        for one, other in itertools.product(REQUESTS, repeat=2)
    ),
    ((HOSTS[:2], REQUESTS[:2], "allow"), (HOSTS[:2], REQUESTS[:2], "allow")),
    ((HOSTS[:2], ["GET /a"], "allow"), (["*.example.com"], REQUESTS[:2], "allow")),
]


@pytest.mark.parametrize(("rule", "bound"), SIDE_BY_SIDE)
def test_a_rule_takes_no_more_than_the_binding_and_a_binding_more_than_its_rule_is_told(
    rule: Entry, bound: Entry
) -> None:
    """Law 7: whatever the rule takes with the credential, the credential's own definition takes."""
    profile = f"allow:\n  - {{hosts: {rule[0]!r}, requests: {rule[1]!r}, credential: key}}\n"
    credentials = KEY.format(hosts=", ".join(map(repr, bound[0])), requests=", ".join(map(repr, bound[1])))
    found = codes(profile, credentials)
    for name, sent in itertools.product(NAMES, SENT):
        if Code.CREDENTIAL_NOT_COVERED not in found:
            assert not takes(rule, name, *sent) or takes(bound, name, *sent), (name, sent)
            if Code.CREDENTIAL_WIDE not in found:
                assert not takes(bound, name, *sent) or takes(rule, name, *sent), (name, sent)
    if rule[:2] == bound[:2]:
        assert found == set()
