"""A parsed file as values with places: what every later check points into."""

from __future__ import annotations

from dataclasses import dataclass, field

from egressd.rulefiles.problems import Place

type Plain = str | int | float | bool | list[Plain] | dict[str, Plain] | None
type Step = str | int


@dataclass(slots=True)
class Node:
    """A value and the place where it begins; `keys` has the place of each key of a mapping."""

    place: Place
    scalar: str | int | float | bool | None = None
    items: list[Node] | None = None
    fields: dict[str, Node] | None = None
    keys: dict[str, Place] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Document:
    """One parsed file: its values and the place of each."""

    path: str
    root: Node

    @property
    def data(self) -> Plain:
        """The values without their places."""
        return _plain(self.root)

    def place(self, *steps: Step) -> Place:
        """Return where the value at the end of the steps begins, or the nearest thing around it."""
        node = self.root
        for step in steps:
            found = _child(node, step)
            if found is None:
                break
            node = found
        return node.place

    def key_place(self, *steps: Step) -> Place:
        """Return where the last step's key stands (in a list the value), or the nearest thing around it."""
        node = self.root
        for index, step in enumerate(steps):
            if isinstance(step, str) and step in node.keys and index == len(steps) - 1:
                return node.keys[step]
            found = _child(node, step)
            if found is None:
                break
            node = found
        return node.place


def _child(node: Node, step: Step) -> Node | None:
    if isinstance(step, int):
        return node.items[step] if node.items is not None and 0 <= step < len(node.items) else None
    return node.fields.get(step) if node.fields is not None else None


def _plain(node: Node) -> Plain:
    # The reader bounds the depth, so recursion is safe here.
    if node.items is not None:
        return [_plain(item) for item in node.items]
    if node.fields is not None:
        return {key: _plain(value) for key, value in node.fields.items()}
    return node.scalar
