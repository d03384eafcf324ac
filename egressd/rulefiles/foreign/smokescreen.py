"""The egress ACL of Smokescreen (version v1): a profile for each service, one more for `default`.

A domain is itself, or `*.name`: all below it and not itself. A service's own domains come first, then `global_deny_list`, then
`global_allow_list`, then its action: `enforce` refuses the rest, `report` lets it through and tells, `open` lets it through. With
us a denial wins always, so a global one that a service's own domain goes before is left out where that is all it could hit.
"""

from __future__ import annotations

from collections.abc import Iterator

from egressd.policy.names import BadHost, HostPattern, parse_pattern
from egressd.rulefiles.document import Document, Node
from egressd.rulefiles.foreign.allowlist import NotReadable, Permission, Section, address, host, profile_name
from egressd.rulefiles.problems import Findings
from egressd.rulefiles.yaml import load_document

_SERVICE = frozenset({"name", "project", "action", "allowed_domains"})
_TOP = frozenset({"version", "services", "default", "global_allow_list", "global_deny_list"})
_EXTRA = {
    "mitm_domains": "headers that are added and bodies that are logged; ours inspects every host",
    "allowed_external_proxies": "a second proxy behind the first; ours goes through the one in egressd.yaml",
}


def read(text: str) -> list[Section]:
    """Return a section for each service; raises NotReadable."""
    document = _document(text)
    root = document.root.fields or {}
    version = root.get("version")
    if version is None or version.scalar != "v1":
        raise NotReadable("no `version: v1` in it, as an egress ACL of Smokescreen has")
    services = (root["services"].items or []) if "services" in root else []
    nodes = [*services, *([root["default"]] if "default" in root else [])]
    if not nodes:
        raise NotReadable("it has neither services nor a default")
    sections = [_section(node, root, default=index >= len(services)) for index, node in enumerate(nodes)]
    for key in sorted(root.keys() - _TOP):
        sections[0].note(document.root.keys[key].line, key, "unknown")
    return sections


def _document(text: str) -> Document:
    findings = Findings()
    document = load_document(text.encode(), "", findings)
    if document is None or document.root.fields is None:
        problem = next(iter(findings.problems()), None)
        raise NotReadable(f"{problem.line}: {problem.message}" if problem else "it is no mapping")
    return document


def _section(node: Node, root: dict[str, Node], *, default: bool) -> Section:
    fields = node.fields or {}
    name = "default" if default else _text(fields, "name")
    section = Section(profile_name(name, "imported-smokescreen"), owner=_text(fields, "project") or None)
    action = fields.get("action")
    at = (action or node).place.line
    if action is None or action.scalar not in ("enforce", "report", "open"):
        section.note(at, "action", "no action that is known; this profile enforces")
    elif action.scalar == "report":
        section.observes = True
    elif action.scalar == "open":
        section.note(
            at, "action: open", "every host passes there; ours allows what is listed and nothing else"
        )
    own = dict(_hosts(fields.get("allowed_domains"), section))
    listed = dict(_hosts(root.get("global_allow_list"), section))
    section.denied = _denied(root, section, own, listed)
    permission = Permission()
    for raw, line in (listed | own).items():
        (permission.addresses if "/" in raw else permission.hosts)[raw] = line
    if permission.hosts or permission.addresses:
        section.allowed.append(permission)
        section.note(node.place.line, name, "a CONNECT to any port; here 443 and 80")
    for key in sorted(fields.keys() - _SERVICE):
        section.note(node.keys[key].line, key, _EXTRA.get(key, "unknown"))
    return section


def _denied(
    root: dict[str, Node], section: Section, own: dict[str, int], listed: dict[str, int]
) -> dict[str, int]:
    denied = {}
    for raw, line in _hosts(root.get("global_deny_list"), section, permits=False):
        before = [one for one in own if _meet(one, raw)]
        beside = [one for one in listed if one not in own and _meet(one, raw)]
        if before and not beside and not section.observes:
            section.note(
                line, raw, f"the service's own {before[0]} goes before it; the rest is denied by default"
            )
            continue
        if before:
            section.note(line, raw, f"denies {before[0]} too, which the service may reach there")
        denied[raw] = line
    return denied


def _meet(one: str, other: str) -> bool:
    """Whether two patterns have a name in common."""
    mine, theirs = parse_pattern(one), parse_pattern(other)
    if isinstance(mine, BadHost) or isinstance(theirs, BadHost):
        return one == other
    return _holds(mine, theirs) or _holds(theirs, mine)


def _holds(wide: HostPattern, narrow: HostPattern) -> bool:
    if wide.wildcard and narrow.wildcard:
        return narrow.name[-len(wide.name) :] == wide.name
    return not narrow.wildcard and wide.matches(narrow.name)


def _hosts(node: Node | None, section: Section, *, permits: bool = True) -> Iterator[tuple[str, int]]:
    for item in (node.items or []) if node is not None else []:
        line = item.place.line
        raw = str(item.scalar)
        literal = address(raw, line, section) if permits else None
        found = literal if literal is not None else host(raw, line, section, permits=permits)
        if found:
            yield found, line


def _text(fields: dict[str, Node], key: str) -> str:
    node = fields.get(key)
    return str(node.scalar) if node is not None and node.scalar is not None else ""
