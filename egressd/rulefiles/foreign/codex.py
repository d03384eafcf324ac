"""The network lists of Codex: `config.toml`, `requirements.toml`, in any of the places where versions of it have had them.

A name is itself; `*.name` is all below it and not itself; `**.name` is both; a `*` elsewhere is a glob inside a label, which ours
has not. A denial wins. `mode = "limited"` is GET, HEAD and OPTIONS. Early versions took `*.name` for both, which a note says.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping

from egressd.rulefiles.foreign.allowlist import (
    EVERYTHING,
    NotReadable,
    Permission,
    Section,
    address,
    host,
    line_of,
    profile_name,
)

_LIMITED = "GET,HEAD,OPTIONS /**"
_LISTS = frozenset({"domains", "allowed_domains", "denied_domains", "mode", "enabled"})


def read(text: str) -> list[Section]:
    """Return a section for each list of the file; raises NotReadable."""
    try:
        config = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise NotReadable(f"no TOML: {error}") from None
    sections = [_section(name, table, text) for name, table in _tables(config)]
    workspace = config.get("sandbox_workspace_write")
    if isinstance(workspace, dict) and workspace.get("network_access") is True and sections:
        sections[0].note(
            _key_line(text, "network_access"), "network_access = true", "every host, without a list"
        )
    if not sections:
        raise NotReadable("no list of domains in it: neither [permissions.NAME.network] nor an older place")
    return sections


def _tables(config: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield every table of lists with the name of its profile."""
    for key in ("network", "experimental_network", "network_proxy"):
        found = config.get(key)
        if not isinstance(found, dict):
            continue
        policy = found.get("policy")
        merged = found | policy if isinstance(policy, dict) else found
        if _lists(merged):
            yield "imported-codex", {name: value for name, value in merged.items() if name != "policy"}
    permissions = config.get("permissions")
    for name, profile in permissions.items() if isinstance(permissions, dict) else ():
        network = (
            profile if name == "network" else profile.get("network") if isinstance(profile, dict) else None
        )
        if isinstance(network, dict) and _lists(network):
            yield "imported-codex" if name == "network" else profile_name(name, "imported-codex"), network


def _lists(table: Mapping[str, object]) -> bool:
    return bool(table.keys() & {"domains", "allowed_domains", "denied_domains"})


def _section(name: str, table: Mapping[str, object], text: str) -> Section:
    section = Section(name)
    permission = Permission(requests=(_LIMITED if table.get("mode") == "limited" else EVERYTHING,))
    for raw, verdict in _said(table):
        line = line_of(text, raw)
        allows = verdict == "allow"
        if verdict not in ("allow", "deny"):
            section.note(line, raw, f"neither allow nor deny: {verdict}")
            continue
        literal = address(raw, line, section) if allows else None
        if literal is not None:
            if literal:
                permission.addresses[literal] = line
            continue
        for spelled in _spelled(raw):
            found = host(spelled, line, section, permits=allows)
            if found is not None:
                (permission.hosts if allows else section.denied).setdefault(found, line)
        if allows and raw.startswith("*.") and "policy" in text and "[network_proxy" in text:
            section.note(line, raw, "in early versions this is also the name itself; if it is needed, add it")
    if permission.hosts or permission.addresses:
        section.allowed.append(permission)
    if table.get("enabled") is False:
        section.note(
            _key_line(text, "enabled"), "enabled = false", "the proxy is off: these lists bind nobody there"
        )
    for key in sorted(table.keys() - _LISTS):
        section.note(
            _key_line(text, key), key, "not about hosts; sockets are `--socket`, proxies are egressd.yaml"
        )
    return section


def _said(table: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, verdict in (("allowed_domains", "allow"), ("denied_domains", "deny")):
        found = table.get(key, [])
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise NotReadable(f"{key} is no list of texts")
        yield from ((one, verdict) for one in found)
    domains = table.get("domains", {})
    if not isinstance(domains, dict):
        raise NotReadable("domains is no table of names")
    yield from domains.items()


def _spelled(raw: str) -> tuple[str, ...]:
    """A pattern in our spelling: itself, or the name and all below it."""
    text = raw.strip()
    below = text.removeprefix("**.")
    return (below, f"*.{below}") if below != text else (text,)


def _key_line(text: str, key: str) -> int:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().startswith((f"{key} ", f"{key}=", f'"{key}"')) or line.strip() == key:
            return number
    return 1
