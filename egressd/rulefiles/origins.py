"""Where each word of an effective policy is written: the file and line of every host, request and limit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from egressd.policy.effective import EffectiveEntry
from egressd.rulefiles.document import Document, Node
from egressd.rulefiles.problems import Findings
from egressd.rulefiles.source import LISTS, ORGANISATION, PROFILES, RuleSource
from egressd.rulefiles.yaml import load_document

DEFAULT = "default"
"""The origin of what no file says."""

_HOLDERS = ("deny", "allow", "ask", "entries")
_PLACEHOLDER = re.compile(r"\\\{[^{}]*\\\}")


@dataclass(slots=True)
class Origins:
    """Looks into the files that the rules were read from; each is parsed once, when it is asked for."""

    source: RuleSource
    documents: dict[str, Document | None] = field(default_factory=dict)
    lists: dict[str, dict[str, int]] = field(default_factory=dict)
    entries: dict[str, dict[int, Node]] = field(default_factory=dict)

    def of(self, entry: EffectiveEntry, key: str) -> str:
        """Return where an entry's key is written, in the entry itself or in the service that it names; else `default`."""
        for place in filter(None, (entry.place, entry.via)):
            path, node = self._entry(place)
            if node is not None and key in node.keys:
                return f"{path}:{node.keys[key].line}"
        return DEFAULT

    def of_items(self, entry: EffectiveEntry, key: str, values: tuple[str, ...]) -> list[str]:
        """Return where each value of a list is written: in the entry, its service, or the list file that one of them names."""
        for place in filter(None, (entry.place, entry.via)):
            path, node = self._entry(place)
            if node is None or node.fields is None:
                continue
            named = node.fields.get("hosts_from") if key == "hosts" else None
            if named is not None and isinstance(named.scalar, str):
                lines = self._list(named.scalar)
                return [f"{named.scalar}:{lines.get(value, 1)}" for value in values]
            if key in node.fields:
                return [f"{path}:{_line_of(node.fields[key], value)}" for value in values]
        return [DEFAULT for _ in values]

    def of_limit(self, entry: EffectiveEntry, name: str) -> str:
        """Return where one limit of an entry is written."""
        path, node = self._entry(entry.place)
        limits = node.fields.get("limits") if node is not None and node.fields is not None else None
        return f"{path}:{limits.keys[name].line}" if limits is not None and name in limits.keys else DEFAULT

    def of_profile(self, profile: str, key: str) -> str:
        """Return where a key of the profile itself is written; else `default`."""
        document = self.document(f"{PROFILES}/{profile}.yaml")
        found = document is not None and key in document.root.keys
        return f"{document.path}:{document.root.keys[key].line}" if document and found else DEFAULT

    def of_profile_limit(self, profile: str, name: str) -> str:
        """Return where a limit of the whole sandbox is written: in the profile, in one that it extends, or in the ceiling."""
        for document in (*self._chain(profile), self.document(ORGANISATION)):
            root = document.root.fields if document is not None else None
            if document is None or root is None:
                continue
            holder = root.get("ceiling") if document.path == ORGANISATION else document.root
            limits = holder.fields.get("limits") if holder is not None and holder.fields else None
            if limits is not None and name in limits.keys:
                return f"{document.path}:{limits.keys[name].line}"
        return DEFAULT

    def _chain(self, profile: str) -> Iterator[Document]:
        name: object = profile
        for _ in self.source.below(PROFILES):  # no longer than there are profiles
            document = self.document(f"{PROFILES}/{name}.yaml")
            if document is None:
                return
            yield document
            above = (document.root.fields or {}).get("extends")
            if above is None:
                return
            name = above.scalar

    def _entry(self, place: str) -> tuple[str, Node | None]:
        path, _, line = place.rpartition(":")
        document = self.document(path) if line.isdecimal() else None
        if document is None:
            return path, None
        if path not in self.entries:
            self.entries[path] = {node.place.line: node for node in reversed([*_entries(document.root)])}
        return path, self.entries[path].get(int(line))

    def document(self, path: str) -> Document | None:
        """Return a file of the rules with its places; None where there is none."""
        if path not in self.documents:
            content = self.source.files.get(path)
            self.documents[path] = load_document(content, path, Findings()) if content is not None else None
        return self.documents[path]

    def _list(self, path: str) -> dict[str, int]:
        if path not in self.lists:
            text = self.source.files.get(path, b"").decode("utf-8", "replace")
            numbered = enumerate(text.split("\n"), 1) if path.startswith(f"{LISTS}/") else ()
            self.lists[path] = {line.partition("#")[0].strip(): number for number, line in numbered}
        return self.lists[path]


def _entries(root: Node) -> Iterator[Node]:
    fields = root.fields or {}
    for holder in (root, fields.get("adds")):
        for key in _HOLDERS:
            listed = (holder.fields or {}).get(key) if holder is not None else None
            yield from (listed.items or ()) if listed is not None else ()


def _line_of(node: Node, value: str) -> int:
    """Return the line of an item that is `value`, or becomes it when a service's parameters are filled in."""
    items = node.items or [node]
    texts = [str(item.scalar) for item in items]
    for item, text in zip(items, texts, strict=True):
        if text == value:
            return item.place.line
    for item, text in zip(items, texts, strict=True):
        if re.fullmatch(_PLACEHOLDER.sub(".+", re.escape(text)), value):
            return item.place.line
    return node.place.line
