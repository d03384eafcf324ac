"""Rule files: a small folder with one file changed, and its YAML beside PyYAML's.

Input: a byte that chooses the file, then its content.
"""

from __future__ import annotations

import re
from functools import cache

import yaml

from egressd.rulefiles.load import Rules, load_source
from egressd.rulefiles.problems import Findings, Problems
from egressd.rulefiles.source import RuleSource
from egressd.rulefiles.yaml import load_document
from tests.fuzz.target import Target, chance_of

_NOW = 1_900_000_000.0
FILES = {
    "organisation.yaml": b"""schema: 1
owner: security
deny:
  - hosts: ["*.evil.example.com"]
    because: known to be bad
""",
    "profiles/base.yaml": b"""schema: 1
profile: base
owner: security
allow:
  - service: origin
  - id: web
    hosts: [www.example.com, "*.api.example.com"]
    requests: ["GET,HEAD /**", "POST /a?k=v&*"]
    limits: {requests: 600/minute, upload: 50MB/day}
  - id: listed
    hosts_from: lists/mirrors.txt
    ports: [443]
ask:
  - id: other
    hosts: [ask.example.com]
    because: 'somebody must look'
deny:
  - id: old
    hosts: [old.api.example.com]
    because: it is old
tests:
  - {allow: "GET https://www.example.com/", rule: web}
  - {deny: "POST https://www.example.com/", reason: method_not_allowed}
  - {deny: "tcp://169.254.169.254:80"}
""",
    "services/origin.yaml": b"""schema: 1
service: origin
description: an origin
owner: security
reviewed: 2026-01-01
sources: ["https://example.net/hosts"]
entries:
  - because: files
    hosts: [origin.example.net]
    requests: [GET /x]
""",
    "lists/mirrors.txt": b"# mirrors\nmirror.example.org\n\nm2.example.org\n",
}
PATHS = tuple(FILES)
_ODD_BREAK = re.compile("[\x0b\x0c\x1c-\x1e\x85\u2028\u2029][^\n]|\r[^\n]")
_BEHIND = (b"\n\0", b"\n---\nschema: 1\n", b"\nschema: 1\n", b"\n\xff", b"\n&a b: *a\n")


def check(data: bytes) -> None:
    """Hold every law of rule files."""
    if not data:
        return
    path, content = PATHS[data[0] % len(PATHS)], data[1:]
    loaded = _load(path, content)
    assert isinstance(loaded, Rules | Problems)
    if isinstance(loaded, Problems):
        assert len(loaded)
        for problem in loaded:
            assert problem.line <= content.count(b"\n") + content.count(b"\r") + 3 or problem.path != path
            str(problem).encode("utf-8")
    elif path.endswith(".txt"):
        plain = [line.partition("#")[0].strip() for line in content.decode().split("\n")]
        (listed,) = (entry for entry in loaded.effective("base").entries if entry.id == "listed")
        assert list(listed.hosts) == [line for line in plain if line], (
            "a list holds other hosts than its lines"
        )
    else:
        assert not _ODD_BREAK.search(content.decode()), "a line ends where editors see none"
        for profile in loaded.profiles:
            assert loaded.effective(profile).model_dump_json()
        if path.endswith(".yaml"):
            for junk in chance_of(data).sample(_BEHIND, 2):
                assert isinstance(_load(path, content + junk), Problems), "junk behind a file passes"
    _agree_with_pyyaml(content)


class _Undated(yaml.CSafeLoader):
    """PyYAML's safe reader, but dates are texts, as the rules' schema has them."""


_Undated.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in held if not tag.endswith(":timestamp")]
    for first, held in yaml.CSafeLoader.yaml_implicit_resolvers.items()
}


def _load(path: str, content: bytes) -> Rules | Problems:
    return load_source(RuleSource(FILES | {path: content}), now=_NOW)


def _agree_with_pyyaml(content: bytes) -> None:
    document = load_document(content, "x.yaml", Findings())
    if document is None:
        return
    try:
        theirs = yaml.load(content, Loader=_Undated)
    except (yaml.YAMLError, ValueError):
        return
    assert document.data == theirs, "PyYAML reads something else"


@cache
def _seeds() -> tuple[bytes, ...]:
    for path, content in FILES.items():
        loaded = _load(path, content)
        assert isinstance(loaded, Rules), [str(problem) for problem in loaded]
    return tuple(bytes((number,)) + FILES[path] for number, path in enumerate(PATHS))


TARGET = Target(
    "rules",
    check,
    lambda data: _load(PATHS[1], data),
    seeds=_seeds(),
    words=(
        b"\n",
        b"  ",
        b"- ",
        b": ",
        b"{",
        b"}",
        b"[",
        b"]",
        b"&a ",
        b"*a",
        b"<<: ",
        b"!!str ",
        b"---\n",
        b"%YAML 1.1\n",
        b"yes",
        b"0o17",
        b"017",
        b"1_0",
        b"1:30",
        b"2030-01-01",
        b"~",
        b"null",
        b'"',
        b"'",
        b"|\n  ",
        b"? ",
        b"#",
        b"\t",
        b"\xc2\x85",
        b"\xe2\x80\xa8",
        b"*.com",
        b"GET /",
        b"expires: ",
        b"ask:\n",
        b"limits:\n",
        b"addresses: [10.0.0.0/8]\n",
        b"schemes: [http]\n",
        b"treatment: tunnel\n",
        b"ports: [22]\n",
        b".inf",
        b"=",
        b"0x1F",
    ),
    most=900,
    quick=500,
)
