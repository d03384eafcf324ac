"""credentials.yaml, read: total, with a place and a way out for every problem, and never a word of what may be a secret."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from egressd.policy.credential import Attach, CredentialsFile, Source
from egressd.rulefiles import secrets
from egressd.rulefiles.credentials import load_credentials, read_credentials
from egressd.rulefiles.load import Rules, load_source
from egressd.rulefiles.problems import WARNINGS, Code, Findings, Problems
from egressd.rulefiles.source import RuleSource

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "rules" / "credentials.example.yaml").read_text()
DATA: dict[str, Any] = yaml.safe_load(TEXT)
NOW = 1_796_126_400.0
PROFILE = """schema: 1
profile: box
allow:
  - {id: a, hosts: [api.anthropic.com], requests: ["POST /v1/messages"], credential: anthropic}
  - {id: b, hosts: ["*.example.com"], requests: ["GET /**"]}
"""
FILES = {"organisation.yaml": b"schema: 1\n", "profiles/box.yaml": PROFILE.encode()}

type Steps = tuple[str | int, ...]


def found(content: bytes) -> Findings:
    findings = Findings()
    read_credentials(content, "c.yaml", findings)
    return findings


def said(content: bytes) -> str:
    """Everything that reading the file, and rules with it, has to say."""
    loaded = load_source(
        RuleSource(dict(FILES), "rules"), now=NOW, credentials=content, credentials_name="c.yaml"
    )
    if isinstance(loaded, Problems):
        return str(loaded)
    return "\n".join(str(warning) for warning in loaded.warnings) + repr(loaded)


def places(value: object, steps: Steps = ()) -> Iterator[Steps]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*steps, key)
            yield from places(inner, (*steps, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield (*steps, index)
            yield from places(inner, (*steps, index))


PLACES = list(places(DATA))


def changed(steps: Steps, value: object, *, key: bool = False) -> bytes:
    """The example with one value, or one key, exchanged."""
    data = copy.deepcopy(DATA)
    node: Any = data
    for step in steps[:-1]:
        node = node[step]
    if key and isinstance(node, dict):
        node[value] = node.pop(steps[-1])
    else:
        node[steps[-1]] = value
    return yaml.dump(data, Dumper=yaml.CSafeDumper, allow_unicode=True, width=4000).encode(
        "utf-8", "surrogatepass"
    )


ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
RANDOM = st.text(ALPHABET, min_size=32, max_size=48).filter(secrets.looks_random)
KEYS = st.one_of(
    RANDOM,
    RANDOM.map("sk-ant-api03-{}".format),
    RANDOM.map("ghp_{}".format),
    RANDOM.map("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhIn0.{}".format),
    RANDOM.map("https://agent:{}@login.example.com/".format),
    RANDOM.map("-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n".format),
    RANDOM.map("Authorization: Bearer {}".format),
    RANDOM.map("x\r\nX: {}".format),
)
"""Things that are secrets, in the clothes in which people paste them."""


def core(secret: str) -> str:
    """The part of a pasted text that is the secret."""
    return max(re.findall("[A-Za-z0-9]{20,}", secret), key=len, default=secret)


@settings(max_examples=150)
@given(st.sampled_from(PLACES), KEYS, st.booleans())
def test_a_secret_is_never_repeated_wherever_it_was_pasted(steps: Steps, secret: str, as_key: bool) -> None:
    text = said(changed(steps, secret, key=as_key))
    assert core(secret).lower() not in text.lower()


@settings(max_examples=100)
@given(
    st.sampled_from(PLACES),
    st.sampled_from(["hunter2", "correct horse battery staple", "12345678", 4711, 0.5, True]),
)
def test_a_value_that_does_not_fit_is_never_repeated(steps: Steps, value: object) -> None:
    findings = found(changed(steps, value))
    for problem in findings.errors:
        assert str(value) not in problem.message.replace("true", ""), problem
        assert str(value) not in problem.hint.replace("true", ""), problem


@settings(max_examples=100)
@given(st.data())
def test_reading_is_total_and_every_problem_has_a_place_and_a_way_out(data: st.DataObject) -> None:
    content = bytearray(TEXT.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        begin = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(begin, min(len(content), begin + 40)))
        content[begin:end] = data.draw(
            st.one_of(st.binary(max_size=12), st.sampled_from([b": ", b"[", b"{", b"\n", b"- "]))
        )
    findings = found(bytes(content))
    lines = bytes(content).count(b"\n") + bytes(content).count(b"\r") + 3
    for problem in findings.errors:
        assert 1 <= problem.line <= lines, problem
        assert problem.column >= 1
        assert problem.path == "c.yaml"


@pytest.mark.parametrize("steps", PLACES, ids=lambda steps: ".".join(map(str, steps)))
def test_no_shape_of_a_value_is_a_crash_and_what_is_wrong_has_a_hint(steps: Steps) -> None:
    shapes: list[object] = [[], {}, "", "../x", 10**30, {"a": {}}, "http://example.com/é\x7f"]
    for value in shapes:
        for problem in found(changed(steps, value)).errors:
            assert problem.hint, problem


def test_the_broker_gets_the_file_or_the_problems(tmp_path: Path) -> None:
    path = tmp_path / "credentials.yaml"
    path.write_text(TEXT)
    loaded = load_credentials(path)
    assert isinstance(loaded, CredentialsFile)
    assert sorted(loaded.credentials) == sorted(DATA["credentials"])
    path.write_text("schema: 1\ncredentials: {a: {source: {value: hunter2}}}\n")
    problems = load_credentials(path)
    assert isinstance(problems, Problems)
    assert {problem.code for problem in problems} == {Code.INLINE_SECRET, Code.MISSING_KEY}
    assert "hunter2" not in str(problems)
    missing = load_credentials(tmp_path / "none.yaml")
    assert isinstance(missing, Problems)
    assert [problem.code for problem in missing] == [Code.UNREADABLE]


def test_rules_carry_the_credentials_they_were_judged_with_and_do_not_show_them() -> None:
    loaded = load_source(RuleSource(dict(FILES), "rules"), now=NOW, credentials=TEXT.encode())
    assert isinstance(loaded, Rules)
    assert loaded.credentials is not None
    assert set(loaded.credentials.credentials) == set(DATA["credentials"])
    assert "/run/secrets" not in repr(loaded)


PAGE = (ROOT / "docs" / "credentials.md").read_text()
BLOCKS = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PARTS = [
    part
    for block in BLOCKS
    for part in re.split(r"^(?=attach:|auth:)", block, flags=re.MULTILINE)
    if part and "apiGroups" not in part  # Kubernetes' own
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.split("\n")[0][:40])
def test_what_the_page_shows_is_read(part: str) -> None:
    data = yaml.safe_load(part)
    if "profile" in data or "accept" in data:
        profile = part if "profile" in data else f"schema: 1\nprofile: NAME\n{part}"
        source = RuleSource({**FILES, "profiles/name.yaml": profile.replace("NAME", "name").encode()})
        rules = load_source(source, now=NOW, credentials=TEXT.encode())
        assert isinstance(rules, Rules), str(rules)
        return
    if "credentials" not in data:
        one = {
            "for": DATA["credentials"]["anthropic"]["for"],
            "source": {"env": "A"},
            "attach": {"bearer": True},
        }
        if "auth" in data:
            data = {"source": {"vault": {"address": "https://vault.example.com", "path": "x", **data}}}
        if "aws_sts" in data.get("source", {}):
            one["attach"] = {"sigv4": {"service": "s3", "region": "eu-west-1"}}
        if "sigv4" in data.get("attach", {}):
            one["source"] = {
                "vault": {
                    "address": "https://v.io",
                    "path": "aws/creds/x",
                    "auth": {"token": {"env": "T"}},
                }
            }
        if "path" in data.get("attach", {}):
            one["for"] = DATA["credentials"]["notify"]["for"]
        data = {"schema": 1, "credentials": {"one": {**one, **data}}}
    findings = found(yaml.dump(data, Dumper=yaml.CSafeDumper).encode())
    assert findings.errors == []
    assert findings.warnings == []


def test_the_page_has_every_source_and_every_way() -> None:
    for kind in (*Source.model_fields, *Attach.model_fields):
        assert re.search(rf"^(source|attach|  )[ :{{]*{kind}:", PAGE, re.MULTILINE), kind


def test_the_page_names_every_warning_about_credentials() -> None:
    about = [code for code in WARNINGS if code.value.startswith(("credential_", "attach_"))]
    for code in about:
        assert f"`{code.value}`" in PAGE or code is Code.CREDENTIAL_UNCHECKED, code


@pytest.mark.parametrize(
    "text",
    [
        "ANTHROPIC_API_KEY",
        "ANTHROPIC_API_KEY_PRODUCTION_EU1",
        "x-api-key",
        "x-access-token",
        "session",
        "OPENAI_API_KEY_V2",
        "sk-proj-",
        "sk-ant-api03-",
        "sk-learn-models-for-everybody",
        "X-Amz-Security-Token",
        "arn:aws:iam::123456789012:role/agent-builds",
        "agent@acme-prod.iam.gserviceaccount.com",
        "11111111-2222-3333-4444-555555555555",
        "https://login.microsoftonline.com/common",
        "urn:ietf:params:oauth:token-type:access_token",
        "op://vault/item/field",
        "basic authentication",
        "bearer of the ring",
        "github-acme-read",
        "glpat-readers",
    ],
)
def test_a_name_is_not_taken_for_a_secret(text: str) -> None:
    assert not secrets.looks_issued(text)
    assert not secrets.looks_random(text)


@pytest.mark.parametrize(
    "text",
    [
        "sk-ant-api03-0123456789abcdefghij",
        "sk_live_0123456789abcdefghij",
        "ghs_0123456789abcdefABCDEF0123456789abcd",
        "github_pat_11ABCDEFG0123456789_abcdefgh",
        "glpat-0123456789abcdefghij",
        "xoxb-123456789012-abcdefghijkl",
        "AKIAIOSFODNN7EXAMPLE",
        "AIzaSyA0123456789abcdefghijklmnopqrstuvw",
        "hvs.CAESIJ0123456789abcdefgh",
        "npm_0123456789abcdefghijklmnopqrstuvwxyz",
        "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhIn0.",
        "https://user:pass@example.com/",
        "-----BEGIN EC PRIVATE KEY-----",
        "Authorization: Basic dXNlcjpwYXNz",
        "Bearer abc123456789",
    ],
)
def test_what_issuers_mark_is_taken_for_a_secret(text: str) -> None:
    assert secrets.looks_issued(text)
    assert secrets.looks_issued(f"prefix={text}") or text.startswith(("Auth", "Bearer"))
