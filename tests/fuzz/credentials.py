"""credentials.yaml: read, and judged with rules. Whatever is in it, no problem of it shows a secret.

Input: the content of the file. `@` stands for a secret, another one for each input.
"""

from __future__ import annotations

import random
from pathlib import Path

from egressd.policy.credential import CredentialsFile
from egressd.rulefiles.credentials import read_credentials
from egressd.rulefiles.load import Rules, load_source
from egressd.rulefiles.problems import Findings, Problems
from egressd.rulefiles.source import RuleSource
from tests.fuzz.target import Target, chance_of

_NOW = 1_900_000_000.0
_EXAMPLE = Path(__file__).parents[2] / "rules" / "credentials.example.yaml"
_RULES = RuleSource(
    {
        "organisation.yaml": b"schema: 1\n",
        "profiles/base.yaml": b"""schema: 1
profile: base
allow:
  - {id: key, hosts: [api.example.com], requests: ["GET /v1/**"], credential: key}
  - {id: bare, hosts: ["*.example.com"], requests: ["ANY /**"]}
""",
    }
)
_HEAD = b'schema: 1\ncredentials:\n  key:\n    for: [{hosts: [api.example.com], requests: ["GET /v1/**"]}]\n'
_SEEDS = (
    _HEAD + b"    source: {file: /run/secrets/key}\n    attach: {header: x-api-key}\n",
    _HEAD + b"    source: {value: @}\n    attach: {header: x-api-key, value: @}\n",
    _HEAD + b"    source: {env: @}\n    attach: {placeholder: {variable: KEY, prefix: sk-, headers: [@]}}\n",
    _HEAD
    + b"    source: {exec: {command: [/bin/x, --token, @], env: {A_TOKEN: @}}}\n    attach: {query: @}\n",
    _HEAD.replace(b"key:", b"@:").replace(b"api.example.com", b"@.@.@") + b"    source: @\n    attach: @\n",
)


def check(data: bytes) -> None:
    """Hold every law of the file."""
    secret = _secret(chance_of(data))
    content = data.replace(b"@", secret.encode())
    findings = Findings()
    known = read_credentials(content, "c.yaml", findings)
    assert known is None or isinstance(known.model, CredentialsFile)
    assert known is not None or findings.count, "a file is refused without a word"
    for problem in (*findings.errors, *findings.warnings):
        assert problem.path == "c.yaml"
        assert problem.line <= content.count(b"\n") + content.count(b"\r") + 3
        str(problem).encode("utf-8")
    loaded = load_source(_RULES, now=_NOW, credentials=content, credentials_name="c.yaml")
    assert isinstance(loaded, Rules | Problems)
    if isinstance(loaded, Problems):
        said = str(loaded)
    else:
        assert not findings.count, "a file that is refused alone is taken with rules"
        said = "\n".join(map(str, loaded.warnings)) + repr(loaded)
    assert secret.lower() not in said.lower(), "a secret is shown"


def _secret(chance: random.Random) -> str:
    """Return letters and digits as keys have them, so mixed that no name could look like it."""
    letters = "abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ"
    return "".join(chance.choice(letters if place % 3 else "23456789") for place in range(1, 31))


def _parse(data: bytes) -> object:
    return read_credentials(data, "c.yaml", Findings())


TARGET = Target(
    "credentials",
    check,
    _parse,
    seeds=(*_SEEDS, _EXAMPLE.read_bytes()[:2500].rpartition(b"\n\n")[0] + b"\n"),
    words=(
        *(
            b"\n",
            b"  ",
            b"    ",
            b"- ",
            b": ",
            b"{",
            b"}",
            b"[",
            b"]",
            b"@",
            b"'@'",
            b"{@: @}",
            b"@: ",
            b": @",
        ),
        *(
            b"source: ",
            b"attach: ",
            b"for: ",
            b"value: @",
            b"env: ",
            b"file: ",
            b"exec: ",
            b"oauth2: ",
            b"vault: ",
        ),
        *(
            b"client_secret: @",
            b"private_key: |\n      @\n",
            b"header: ",
            b"bearer: true",
            b"basic: a:@",
            b"sigv4: ",
        ),
        *(
            b"placeholder: ",
            b"hosts: [@]",
            b"requests: [GET /@]",
            b"&@ ",
            b"*@",
            b"!@ ",
            b"<<: ",
            b"0123",
            b"yes",
        ),
        *(
            b"https://a:@@x.example.com/",
            b"Authorization: Bearer @",
            b"sk-@",
            b"/run/@",
            b"*.github.io",
            b"~",
            b'"',
        ),
    ),
    most=900,
    quick=500,
)
