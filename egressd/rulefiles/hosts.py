"""Hosts as rule files write them: normal form or a problem that proposes it, and no wildcard over other people's names."""

from __future__ import annotations

import functools
import ipaddress
import re
from pathlib import Path

import idna
from publicsuffixlist import PSLFILE, PublicSuffixList

from egressd.policy.addresses import is_floor_name
from egressd.policy.names import BadHost, HostPattern, format_name, parse_host, parse_pattern, propose_normal
from egressd.rulefiles.problems import Code, Findings, Place, quoted

_ALSO_SHARED = (
    *(
        "s3.amazonaws.com",
        "s3-accelerate.amazonaws.com",
        "storage.googleapis.com",
        "r2.cloudflarestorage.com",
        "backblazeb2.com",
    ),
    *(
        "wasabisys.com",
        "aliyuncs.com",
        "myqcloud.com",
        "oraclecloud.com",
        "scw.cloud",
        "b-cdn.net",
        "fastly.net",
    ),
    *("blob.core.windows.net", "dfs.core.windows.net", "queue.core.windows.net", "table.core.windows.net"),
    *(
        "servicebus.windows.net",
        "openai.azure.com",
        "sharepoint.com",
        "my.salesforce.com",
        "snowflakecomputing.com",
    ),
)
"""Storage, queues and the like where anybody gets names, which the public suffix list leaves out or has only in part."""

_LIST_LINE = re.compile(r"\s*([^\s#]\S*)?\s*(#.*)?")


def read_pattern(
    raw: str, path: str, place: Place, findings: Findings, *, permits: bool
) -> HostPattern | None:
    """Return the host pattern that `raw` writes, or None after adding its problem.

    `permits` says whether the entry allows or asks: then a name that the floor refuses is a problem too, for the entry could do
    nothing.
    """
    pattern = parse_pattern(raw)
    if isinstance(pattern, BadHost):
        code, message, hint = _refused(raw, pattern)
        findings.add(path, place, code, message, hint)
        return None
    if pattern.wildcard and not _wildcard_holds(raw, pattern, path, place, findings):
        return None
    if permits and is_floor_name(pattern.name) is not None:
        findings.add(
            path,
            place,
            Code.FLOOR_NAME,
            f"{quoted(raw)} is never resolved for a sandbox, whatever a rule says",
        )
        return None
    return pattern


def read_list(content: bytes, path: str, findings: Findings) -> tuple[str, ...]:
    """Return the hosts of a list file: one a line, `#` begins a comment. Hosts with a problem are left out."""
    hosts: dict[str, int] = {}
    before = findings.count
    try:
        # Nothing else ends a line: to an editor a comment goes on behind U+2028, and a host in it would be hidden.
        lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        at = Place(content.count(b"\n", 0, error.start) + 1)
        findings.add(path, at, Code.NOT_UTF8, "the line is not UTF-8", "save the file as UTF-8")
        return ()
    for number, line in enumerate(lines, 1):
        match = _LIST_LINE.fullmatch(line)
        if match is None:
            findings.add(
                path,
                Place(number),
                Code.BAD_HOST,
                f"{quoted(line.strip())} is more than one host",
                "one host a line",
            )
            continue
        if match[1] is None:
            continue
        place = Place(number, match.start(1) + 1)
        if match[1] in hosts:
            message = f"{quoted(match[1])} stands here a second time (first in line {hosts[match[1]]})"
            findings.add(path, place, Code.DUPLICATE_ITEM, message, "remove it")
        elif read_pattern(match[1], path, place, findings, permits=False) is not None:
            hosts[match[1]] = number
    if not hosts and findings.count == before:
        findings.add(
            path, Place(), Code.EMPTY_LIST, "the list is empty", "an empty one would not say what it means"
        )
    return tuple(hosts)


@functools.cache
def _suffixes(*, only_registry: bool) -> PublicSuffixList:
    return PublicSuffixList(only_icann=only_registry)


def _wildcard_holds(raw: str, pattern: HostPattern, path: str, place: Place, findings: Findings) -> bool:
    base = format_name(pattern.name)
    if _suffixes(only_registry=True).is_public(base):
        findings.add(path, place, Code.PUBLIC_SUFFIX, _everybody(raw, base), _below(base))
        return False
    return True


def _everybody(raw: str, base: str) -> str:
    return f"{quoted(raw)} covers everybody's names: '{base}' is a public suffix"


def _below(base: str) -> str:
    return f'name a domain below it, like "*.example.{base}"'


def shared_suffix(host: str) -> str | None:
    """Return a suffix that a wildcard covers and below which anybody gets names: its own (`*.github.io`) or one further down."""
    base = host.removeprefix("*.")
    if base == host:
        return None
    return base if _suffixes(only_registry=False).is_public(base) else _shared().get(base)


@functools.cache
def _shared() -> dict[str, str]:
    """Every domain, of two labels at least, that is or lies above a suffix below which anybody can get names, and that suffix."""
    text = Path(PSLFILE).read_text(encoding="utf-8").partition("===BEGIN PRIVATE DOMAINS===")[2]
    listed = (line.split(" ")[0].removeprefix("*.") for line in text.splitlines())
    suffixes = [suffix for suffix in listed if suffix.isascii() and suffix[:1].isalnum()]
    found: dict[str, str] = {}
    for suffix in (*_ALSO_SHARED, *suffixes):
        labels = suffix.split(".")
        for cut in range(len(labels) - 1):
            found.setdefault(".".join(labels[cut:]), suffix)
    return found


def _refused(raw: str, bad: BadHost) -> tuple[Code, str, str]:
    if not raw.isascii():
        return _unicode(raw)
    base = raw.removeprefix("*.")
    if base != raw and base.isalpha():
        return Code.PUBLIC_SUFFIX, _everybody(raw, base), _below(base)
    if "*" in raw.removeprefix("*."):
        hint = "name the hosts; a wildcard is a leading '*.' on a domain of one owner"
        return Code.BAD_WILDCARD, f"{quoted(raw)}: {bad.detail}", hint
    if _is_address(raw):
        hint = "write `addresses: [10.30.0.7/32]` with `ports` instead of hosts"
        return Code.BAD_HOST, f"{quoted(raw)} is an address, not a name", hint
    proposal = propose_normal(raw)
    if proposal is not None:
        return Code.NOT_NORMAL, f"{quoted(raw)} is not a host in normal form", f'write "{proposal}"'
    return Code.BAD_HOST, f"{quoted(raw)}: {bad.detail}", ""


def _is_address(raw: str) -> bool:
    try:
        ipaddress.ip_network(raw, strict=False)
    except ValueError:
        parsed = parse_host(raw)
        return not isinstance(parsed, tuple | BadHost)
    return True


def _unicode(raw: str) -> tuple[Code, str, str]:
    """Names outside ASCII are proposed in the form that goes over the wire (RFC 5891; mapped by UTS 46 as browsers do)."""
    wildcard = "*." if raw.startswith("*.") else ""
    try:
        label_form = idna.encode(raw.removeprefix("*.").strip(), uts46=True).decode("ascii")
    except (idna.IDNAError, UnicodeError, OverflowError):
        return (
            Code.BAD_HOST,
            f"{quoted(raw)} holds characters that no host name has",
            "write the name as it is in DNS",
        )
    return (
        Code.NOT_NORMAL,
        f"{quoted(raw)} holds characters outside ASCII",
        f'if this is the host, write "{wildcard}{label_form}"',
    )
