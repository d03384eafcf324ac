"""What an editor shows beside each key of a rule file: what it is for where the model does not say, and examples.

By key, and by `Part.key` where a key means something else in one part; an example is a value as it stands behind the key.
"""

from __future__ import annotations

from typing import Any, Final

SAYS: Final[dict[str, str]] = {
    "schema": "the version of the format; this egressd reads 1",
    "profile": "the name of this profile, which is that of the file",
    "group": "the name of this group, which is that of the file",
    "service": "the name of this service, which is that of the file",
    "owner": "who answers for it: a team or a person",
    "description": "what it is for, for people",
    "because": "why, for people; records and denials show it",
    "ticket": "where it was decided",
    "allow": "destinations that may be reached",
    "deny": "destinations that may not be reached, whatever allows them",
    "ask": "destinations that may be reached once a person has said yes",
    "tests": "claims about single requests; where one does not hold, nothing is loaded",
    "limits": "how much passes, for each sandbox",
    "mode": "enforce, or observe: note what the rules would deny by default, and let it through until `observe_until`",
    "accept": "risks that the owner takes knowingly, each with the reason",
    "ceiling": "the most that any profile may allow",
    "treatments": "how connections may be treated at all",
    "schemes": "https and/or http",
    "ports": "ports of the destination",
    "hosts": "exact names, or *.name for everything below it (never itself)",
    "hosts_from": "a file of hosts, one a line: lists/x.txt",
    "treatment": "inspect (default), tunnel (opaque TLS) or relay (raw TCP)",
    "requests": 'like "GET,HEAD /path?query"; GET,HEAD /** when left out',
    "type": "what a value looks like: a path segment, owner/name, a label of a host, a prefix, one of `values`",
    "parameters": "values that a profile gives; `{name}` stands for one in hosts and requests",
    "entries": "groups of hosts, and what may be asked of them",
    "Test.allow": "a request that is allowed",
    "Test.deny": "a request that is denied",
    "Test.ask": "a request that a person is asked about",
    "Additions.allow": "destinations beyond those of the extended profile",
    "Additions.ask": "destinations beyond those of the extended profile, once a person has said yes",
}

_HOSTS: Final = [["api.example.com"], ["docs.example.com", "*.docs.example.com"]]
_ALLOW: Final = [[{"service": "pypi"}], [{"hosts": ["docs.example.com"]}]]
_ASK: Final = [
    [{"hosts": ["pay.example.com"], "requests": ["POST /charges"], "approvers": ["payments-oncall"]}]
]
_DENY: Final = [
    [{"hosts": ["pastebin.com", "*.pastebin.com"], "because": "made for handing data to strangers"}]
]

EXAMPLES: Final[dict[str, list[Any]]] = {
    "schema": [1],
    "profile": ["coding-agent"],
    "group": ["python-reading"],
    "service": ["pypi", "github-clone"],
    "owner": ["platform-security"],
    "description": ["Packages, one organisation's repositories, one model"],
    "because": ["anybody with a token can write there"],
    "ticket": ["SEC-412"],
    "id": ["anthropic"],
    "hosts": _HOSTS,
    "hosts_from": ["lists/documentation.txt"],
    "with": [{"repos": ["acme/*"]}],
    "addresses": [["10.20.0.0/16"]],
    "schemes": [["https"], ["https", "http"]],
    "ports": [[8443]],
    "expires": ["2027-03-31"],
    "treatment": ["inspect", "tunnel", "relay"],
    "requests": [["GET,HEAD /**"], ["POST /v1/messages", "GET /v1/models/*"], ["GET /find?safe=on&*"]],
    "json": [{"operation": "download"}, {"operation": ["download", "verify"]}],
    "credential": ["anthropic"],
    "limits": [{"requests": "600/minute", "upload": "50MB/day"}],
    "mode": ["enforce", "observe"],
    "observe_until": ["2026-12-24"],
    "public_web": ["read"],
    "approvers": [["payments-oncall"]],
    "extends": ["coding-agent"],
    "groups": [["python-reading"]],
    "without": [["news"]],
    "adds": [{"allow": [{"hosts": ["papers.example.org"]}]}],
    "canary": [{"labels": {"ring": "first"}, "profile": "coding-agent-next"}],
    "labels": [{"ring": "first"}],
    "accept": [{"own-keys": "an example has no credentials to attach"}],
    "mixed-public": ["the wiki holds nothing that the web may not know"],
    "own-keys": ["each developer has a key of their own"],
    "shared-host": ["every repository of the host is public"],
    "lookalike": ["both names are the vendor's own"],
    "allow": _ALLOW,
    "ask": _ASK,
    "deny": _DENY,
    "tests": [
        [{"allow": "GET https://pypi.org/simple/requests/"}, {"deny": "POST https://upload.pypi.org/legacy/"}]
    ],
    "ceiling": [{"treatments": ["inspect"], "ports": [443], "limits": {"upload": "50MB/day"}}],
    "treatments": [["inspect"]],
    "observe_days": [7, 0],
    "under": ["coding-agent"],
    "rule": ["pypi"],
    "reason": ["method_not_allowed"],
    "at": ["2027-03-31", "2027-03-31T18:00Z"],
    "new_hosts": ["30/hour"],
    "names": ["100/hour"],
    "new_connections": ["20/second"],
    "connections": [20],
    "upload": ["50MB/day"],
    "download": ["2GiB/day"],
    "upload_per_host": ["1MB/hour"],
    "download_per_host": ["200MB/hour"],
    "type": ["repo"],
    "values": [["stable", "beta"]],
    "reviewed": ["2026-12-01"],
    "sources": [["https://docs.example.com/firewall"]],
    "risks": [["An upload could carry something out."]],
    "access": ["read", "call", "write", "deny"],
    "expects": ["credential"],
    "parameters": [{"repos": {"type": "repo", "description": "owner/name, or owner/*"}}],
    "entries": [[{"hosts": ["pypi.org"], "requests": ["GET,HEAD /simple/**"]}]],
    "reads": ["a fetch asks by POST"],
    "Limits.requests": ["600/minute"],
    "ServiceFile.accept": [{"shared-host": "every repository of the host is public"}],
    "ServiceEntry.credential": ["never"],
    "Test.allow": ["GET https://pypi.org/simple/requests/"],
    "Test.deny": ["POST https://upload.pypi.org/legacy/"],
    "Test.ask": ["POST https://pay.example.com/charges"],
    "Test.json": [{"operation": "download"}],
}

_SAME: Final = {"FiledTest": "Test"}
"""Parts that have the keys of another one."""


def annotate(
    schema: dict[str, Any], says: dict[str, str] = SAYS, examples: dict[str, list[Any]] = EXAMPLES
) -> dict[str, Any]:
    """Put descriptions and examples into a schema, where the model has none; returns it."""
    for part, definition in [("", schema), *schema["$defs"].items()]:
        for key, shown in definition.get("properties", {}).items():
            names = (f"{part}.{key}", f"{_SAME.get(part, part)}.{key}", key)
            if "description" not in shown and (told := _first(names, says)) is not None:
                shown["description"] = told
            if "examples" not in shown and (given := _first(names, examples)) is not None:
                shown["examples"] = given
    return schema


def _first[T](names: tuple[str, ...], table: dict[str, T]) -> T | None:
    return next((table[name] for name in names if name in table), None)
