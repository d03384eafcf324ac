"""Secrets written where credentials.yaml may only refer to one: found by how they look. Pure and total.

Two looks. *Issued*: what those who issue keys mark as theirs (a prefix, PEM, a JWT, a password in a URL), wherever it stands.
*Random*: what no name looks like, in the places where only a name can stand. A path is never a secret, it leads to one.
Nothing here is a promise: a password that is a word looks like a word. Sources: the key formats that the issuers document, and
the secret-scanning patterns that they publish.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from egressd.rulefiles.document import Node, Step
from egressd.rulefiles.problems import Place

NEVER = "this file holds references to secrets, never secrets"
REFER = "put the secret into a file of mode 0600 and write {file: /run/secrets/NAME}, or {env: VARIABLE}"

_ISSUED = re.compile(
    r"-----BEGIN [A-Z ]*(PRIVATE KEY|CERTIFICATE)"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}"  # a JWT (RFC 7519): base64url of '{"'
    r"|://[^/\s:@]*:[^/\s@]+@"  # RFC 3986 §3.2.1: a password in a URL
    r"|\b(?i:authorization\s*:\s*\S|(bearer|basic)\s+(?=\S*[0-9])[\w.~+/=-]{8,})"
    r"|(?<![A-Za-z0-9])(?="  # what follows holds a digit: `sk-learn-models` is a word
    r"[\w.-]*[0-9])("
    r"sk-[\w-]{16,}|(sk|rk|pk|whsec)_(live_|test_)?[A-Za-z0-9]{16,}"
    r"|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|gl(pat|dt|rt|cbt|ptt|ft|soat)-[\w.-]{16,}"
    r"|xox[a-z](-[A-Za-z0-9]+){2,}|xapp-[\w-]{16,}|(AKIA|ASIA)[A-Z0-9]{12,}|AIza[\w-]{30,}|ya29\.[\w-]{16,}"
    r"|GOCSPX-[\w-]{16,}|hv[sbr]\.[\w-]{16,}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}|do[opr]_v1_[0-9a-f]{32,}"
    r"|SG\.[\w-]{16,}\.[\w-]{16,}|shp(at|ss|ca|pa)_[0-9a-fA-F]{16,}|hf_[A-Za-z0-9]{20,}|dckr_(pat|oat)_[\w-]{16,}"
    r"|lin_api_\w{16,}|sq0(atp|csp)-[\w-]{16,}|ATATT3\w[\w=-]{16,}|AGE-SECRET-KEY-1[A-Z0-9]{16,}|PMAK-[\w-]{16,}"
    r"|rubygems_[0-9a-f]{32,}|figd_[\w-]{16,}|ops_eyJ[\w-]{16,}|glsa_\w{16,}|dapi[0-9a-f]{32}"
    r")"
)
_ACCESS_KEY_ID = re.compile(r"(AKIA|ASIA)[A-Z0-9]{12,28}")
_RUN = re.compile(r"[A-Za-z0-9]{20,}")
_SAYS_SECRET = re.compile(
    r"(token|secret|passw(or)?d|passphrase|api_?key|access_key|private_key)\Z", re.IGNORECASE
)
_FLAG = re.compile(r"--?([\w-]*-)?(token|passw(or)?d|passphrase|api-?key)", re.IGNORECASE)
_WORD = re.compile(r"[a-z][a-z0-9_]{0,31}")

_HOST = re.compile(r"(https?://)?(\*\.)?([\w*-]{1,63}\.)+[A-Za-z]{2,24}\.?(:[0-9]{1,5})?/?", re.ASCII)
_REQUEST = re.compile(r"[A-Za-z]{2,10}(,[A-Za-z]{2,10})* /")

_WORDS = frozenset(
    {"value", "values", "secret", "secrets", "token", "key", "api_key", "apikey", "password"}
) | {
    *(
        "passwd",
        "passphrase",
        "private_key",
        "literal",
        "inline",
        "plain",
        "plaintext",
        "text",
        "data",
        "content",
    )
}
_NAMES = frozenset(
    {"env", "header", "headers", "query", "cookie", "basic", "variable", "prefix", "slots", "mask", "field"}
)


def looks_issued(text: str) -> bool:
    """Say whether a text holds what an issuer of keys marks as one."""
    return _ISSUED.search(text) is not None


def looks_random(text: str) -> bool:
    """Say whether a text holds twenty letters and digits in a row that no name would: hex, or digits strewn among letters."""
    for run in _RUN.findall(text):
        strewn = sum(left.isdigit() != right.isdigit() for left, right in pairwise(run))
        digits = sum(letter.isdigit() for letter in run)
        if (digits >= 3 and strewn >= 4) or (len(run) >= 32 and not run.strip("0123456789abcdefABCDEF")):
            return True
    return False


def says_secret(key: str) -> bool:
    """Say whether a key that nothing here knows is one that people write a secret behind."""
    return key.lower() in _WORDS


def is_word(key: str) -> bool:
    """Say whether a key can be shown: one that a person would write for a key, and no secret in the wrong place."""
    return _WORD.fullmatch(key) is not None and not looks_random(key) and not looks_issued(key)


def shows_host(host: str) -> bool:
    """Say whether a host of credentials.yaml can be shown: it is one, or nearly, and looks like no secret."""
    return _HOST.fullmatch(host) is not None and not looks_issued(host) and not looks_random(host)


def shows_request(request: str) -> bool:
    """Say whether a request of credentials.yaml can be shown: it is one, or nearly, and looks like no secret."""
    return _REQUEST.match(request) is not None and not looks_issued(request) and not looks_random(request)


def written_secrets(root: Node) -> Iterator[Place]:
    """Yield the place of every text that is a secret itself, keys included."""
    waiting: list[tuple[Node, tuple[Step, ...]]] = [(root, ())]
    while waiting:
        node, steps = waiting.pop()
        if isinstance(node.scalar, str) and _is_secret(node.scalar, steps):
            yield node.place
        for key, value in (node.fields or {}).items():
            if looks_issued(key) or looks_random(key):
                yield node.keys[key]
            waiting.append((value, (*steps, key)))
        items = node.items or []
        waiting += [(item, (*steps, index)) for index, item in enumerate(items)]
        if steps[-2:] == ("exec", "command"):
            yield from _in_command(items)


def _is_secret(text: str, steps: tuple[Step, ...]) -> bool:
    if text.startswith("/"):
        return False
    words = [step for step in steps if isinstance(step, str)]
    last = words[-1] if words else ""
    if looks_issued(text):
        return not (last == "access_key_id" and _ACCESS_KEY_ID.fullmatch(text))
    if words[-3:-1] == ["exec", "env"]:
        return _SAYS_SECRET.search(last) is not None
    is_name = last in _NAMES or words[-2:] == ["attach", "path"]
    return (is_name and looks_random(text)) or (words[-2:] == ["attach", "basic"] and ":" in text)


def _in_command(items: list[Node]) -> Iterator[Place]:
    """A password on a command line: every process of the machine can read it there, too."""
    flag = False
    for item in items:
        text = item.scalar if isinstance(item.scalar, str) else ""
        name, given, value = text.partition("=")
        whole = _FLAG.fullmatch(name) is not None
        if (flag and not text.startswith(("-", "/"))) or (whole and given and not value.startswith("/")):
            yield item.place
        flag = whole and not given
