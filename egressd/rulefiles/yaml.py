"""Strict YAML: bytes in, values with places out, and every doubtful construct a problem with its place.

The events of libyaml are put together here rather than by a YAML constructor, because what a security policy
means must not depend on the reader: no duplicate keys, no anchors, aliases, merge keys, tags or directives,
one document, YAML 1.2's core schema for plain scalars (`scalars`), no empty values, a bounded size and depth.
Reading does not recurse, so that depth costs no stack.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import BaseModel

from egressd.rulefiles.document import Document, Node
from egressd.rulefiles.problems import MOST, Code, Findings, Place, Problems, quoted
from egressd.rulefiles.scalars import Surprise, resolve
from egressd.rulefiles.shape import fit

MOST_BYTES = 4 * 1024 * 1024
MOST_DEPTH = 32


def load_document(content: bytes, path: str, findings: Findings, *, quotes: bool = True) -> Document | None:
    """Return the document in `content`, or None after adding its problems to `findings`. Total.

    `quotes` as in `fit`.
    """
    text = _text(content, path, findings)
    if text is None:
        return None
    before = findings.count
    builder = _Builder(path, findings, quotes)
    try:
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            if not builder.take(event) or findings.left_out > MOST:
                return None
    except yaml.MarkedYAMLError as error:
        _syntax(error, text, path, findings)
        return None
    except yaml.YAMLError as error:
        findings.add(path, Place(), Code.BAD_YAML, str(error).split("\n", maxsplit=1)[0])
        return None
    if builder.root is None:
        findings.add(path, Place(), Code.EMPTY_FILE, "the file holds nothing", "begin with `schema: 1`")
        return None
    return Document(path, builder.root) if findings.count == before else None


def load_model[M: BaseModel](path: Path, model: type[M]) -> M | Problems:
    """Read the YAML file at `path` as `model`, or return all its problems. Total."""
    findings = Findings()
    name = str(path)
    content = read_bytes(path, name, findings)
    loaded = parse_model(content, name, model, findings) if content is not None else None
    return loaded[0] if loaded is not None else findings.problems()


def parse_model[M: BaseModel](
    content: bytes, path: str, model: type[M], findings: Findings, *, quotes: bool = True
) -> tuple[M, Document] | None:
    """Return `content` as `model` with its places, or None after adding its problems to `findings`. Total.

    `quotes` as in `fit`.
    """
    document = load_document(content, path, findings, quotes=quotes)
    if document is None:
        return None
    value = fit(document, model, findings, quotes=quotes)
    return (value, document) if value is not None else None


def read_bytes(path: Path, name: str, findings: Findings) -> bytes | None:
    """Return the file's bytes (of one too large, only the beginning), or None after adding the problem."""
    try:
        if not path.is_file():  # a FIFO or a device would block, or never end
            reason = "it is not a regular file" if path.exists() else "there is no such file"
            findings.add(name, Place(), Code.UNREADABLE, reason)
            return None
        with path.open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        findings.add(name, Place(), Code.UNREADABLE, error.strerror or type(error).__name__)
        return None


def _text(content: bytes, path: str, findings: Findings) -> str | None:
    if len(content) > MOST_BYTES:
        message = f"the file is larger than {MOST_BYTES // 1024 // 1024} MiB"
        findings.add(
            path,
            Place(),
            Code.TOO_LARGE,
            message,
            "put long host lists into rules/lists/ and several of them",
        )
        return None
    if content.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        findings.add(
            path,
            Place(),
            Code.BYTE_ORDER_MARK,
            "the file begins with a byte order mark",
            "save it as plain UTF-8",
        )
        return None
    try:
        return _one_kind_of_line(content.decode("utf-8"), path, findings)
    except UnicodeDecodeError as error:
        head = content[: error.start]
        line_start = head.rfind(b"\n") + 1
        column = len(head[line_start:].decode("utf-8")) + 1
        place = Place(head.count(b"\n") + 1, column)
        findings.add(
            path,
            place,
            Code.NOT_UTF8,
            f"byte 0x{content[error.start]:02x} is not UTF-8",
            "save the file as UTF-8",
        )
        return None


def _one_kind_of_line(text: str, path: str, findings: Findings) -> str | None:
    """Return `text` if editors and YAML 1.1 see the same lines in it: else a comment may hide what is read."""
    odd = _ODD_BREAK.search(text)
    if odd is None:
        return text
    before = text[: odd.start()]
    place = Place(before.count("\n") + 1, odd.start() - before.rfind("\n"))
    message = f"the character U+{ord(odd[0]):04X} ends a line here, which few editors show"
    findings.add(
        path, place, Code.BAD_YAML, message, "end lines with LF; in a text in double quotes write an escape"
    )
    return None


_ODD_BREAK = re.compile("[\x85\u2028\u2029]|\r(?!\n)")


def _syntax(error: yaml.MarkedYAMLError, text: str, path: str, findings: Findings) -> None:
    mark = error.problem_mark or error.context_mark
    place = Place(mark.line + 1, mark.column + 1) if mark is not None else Place()
    lines = text.splitlines()
    line = lines[place.line - 1] if place.line <= len(lines) else ""
    indent = line[: len(line) - len(line.lstrip())]
    if "\t" in indent or line[place.column - 1 : place.column] == "\t":
        column = line.index("\t") + 1
        findings.add(
            path, Place(place.line, column), Code.TAB, "a tab where YAML wants spaces", "indent with spaces"
        )
        return
    context = f"{error.context}: " if error.context else ""
    findings.add(
        path,
        place,
        Code.BAD_YAML,
        f"{context}{error.problem or 'not YAML'}",
        _SYNTAX_HINTS.get(error.problem or "", ""),
    )


_SYNTAX_HINTS = {
    "did not find expected alphabetic or numeric character": "a text that begins with * or & needs quotes",
    "mapping values are not allowed in this context": "a text that holds `: ` needs quotes",
    "found character that cannot start any token": "a text that begins with @, ` or % needs quotes",
    "did not find expected ',' or '}'": "a text that holds `,` `{` or `}` needs quotes",
    "did not find expected ',' or ']'": "a text that holds `,` `[` or `]` needs quotes",
}


@dataclass(slots=True)
class _Open:
    """A list or mapping not yet closed; in a mapping `key` (None when refused) waits for its value."""

    node: Node
    key: str | None = None
    place: Place = field(default_factory=Place)
    wants_value: bool = False


@dataclass(slots=True)
class _Builder:
    """Puts events together; `take` returns False once there is no point in going on."""

    path: str
    findings: Findings
    quotes: bool = True
    root: Node | None = None
    documents: int = 0
    stack: list[_Open] = field(default_factory=list)

    def take(self, event: yaml.Event) -> bool:
        """Take one event; its problems are noted."""
        place = _place(event)
        if isinstance(event, yaml.DocumentStartEvent):
            return self._document(event, place)
        if isinstance(event, yaml.AliasEvent):
            self._note(
                place,
                Code.ALIAS,
                f"the alias{self._named(event.anchor)}",
                "write the value out; a text that begins with * needs quotes",
            )
            self._put(Node(place, scalar=""), is_key=False)
        elif isinstance(event, yaml.ScalarEvent):
            self._anchor_and_tag(event, place)
            self._scalar(event, place)
        elif isinstance(event, yaml.CollectionStartEvent):
            self._anchor_and_tag(event, place)
            return self._open(event, place)
        elif isinstance(event, yaml.CollectionEndEvent):
            self.stack.pop()
        return True

    def _document(self, event: yaml.DocumentStartEvent, place: Place) -> bool:
        self.documents += 1
        if event.version or event.tags:
            self._note(place, Code.DIRECTIVE, "a YAML directive", "remove the line that begins with %")
        if self.documents == 2:
            self._note(
                place,
                Code.SEVERAL_DOCUMENTS,
                "a second document",
                "one file holds one document; remove the `---`",
            )
            return False
        return True

    def _anchor_and_tag(self, event: yaml.ScalarEvent | yaml.CollectionStartEvent, place: Place) -> None:
        if event.anchor is not None:
            self._note(
                place,
                Code.ALIAS,
                f"the anchor{self._named(event.anchor)}",
                "write the value out where it is needed",
            )
        if event.tag is not None:
            self._note(
                place,
                Code.TAG,
                f"the tag{self._named(event.tag)}",
                "remove it; values have the types that the rules expect",
            )

    def _open(self, event: yaml.CollectionStartEvent, place: Place) -> bool:
        if len(self.stack) >= MOST_DEPTH:
            self._note(place, Code.TOO_DEEP, f"more than {MOST_DEPTH} levels deep")
            return False
        is_list = isinstance(event, yaml.SequenceStartEvent)
        node = Node(place, items=[]) if is_list else Node(place, fields={})
        top = self.stack[-1] if self.stack else None
        if top is not None and top.node.fields is not None and not top.wants_value:
            self._note(place, Code.BAD_KEY, "a list or mapping as a key", "a key is one word")
        self._put(node, is_key=False)
        self.stack.append(_Open(node))
        return True

    def _scalar(self, event: yaml.ScalarEvent, place: Place) -> None:
        text = event.value
        value = resolve(text) if event.implicit[0] else text
        top = self.stack[-1] if self.stack else None
        is_key = top is not None and top.node.fields is not None and not top.wants_value
        if isinstance(value, Surprise):
            self._note(place, Code.AMBIGUOUS_VALUE, *self._doubt(text, value))
            value = text
        elif value is None and not is_key and (self.stack or text):
            self._note(
                place,
                Code.EMPTY_VALUE,
                "there is no value here",
                'give it one or remove the key; write "null" for the word',
            )
        elif is_key and text == "<<" and event.implicit[0]:
            self._note(place, Code.MERGE_KEY, "the merge key <<", "write the keys out")
        elif is_key and not isinstance(value, str):
            self._note(
                place,
                Code.BAD_KEY,
                f"the key{self._named(text)} is not a word",
                "put it in quotes if it is meant",
            )
            value = text
        if not self.stack and value is None and not text:
            return  # a file of comments, or nothing behind `---`: empty
        self._put(Node(place, scalar=value), is_key=is_key)

    def _put(self, node: Node, *, is_key: bool) -> None:
        """Place a node where it belongs; in a mapping, keys and values take turns."""
        if not self.stack:
            self.root = node
            return
        top = self.stack[-1]
        if top.node.items is not None:
            top.node.items.append(node)
        elif not top.wants_value:
            top.key = node.scalar if is_key and isinstance(node.scalar, str) else None
            top.place, top.wants_value = node.place, True
        else:
            top.wants_value = False
            self._store(top, node)

    def _store(self, top: _Open, node: Node) -> None:
        fields = top.node.fields
        if top.key is None or fields is None:
            return
        if top.key in fields:
            first = top.node.keys[top.key].line
            self._note(
                top.place,
                Code.DUPLICATE_KEY,
                f"{quoted(top.key) if self.quotes else 'the key'} stands here a second time (first in line {first})",
                "join the two; readers of YAML disagree on which one counts",
            )
            return
        fields[top.key] = node
        top.node.keys[top.key] = top.place

    def _named(self, text: object) -> str:
        return f" {quoted(text)}" if self.quotes else ""

    def _doubt(self, text: str, value: Surprise) -> tuple[str, str]:
        if self.quotes:
            return f"{quoted(text)} can be read as {value.reads}", value.fix
        return "readers of YAML disagree on what this is", "put it in quotes if the text is meant"

    def _note(self, place: Place, code: Code, message: str, hint: str = "") -> None:
        self.findings.add(self.path, place, code, message, hint)


def _place(event: yaml.Event) -> Place:
    mark = event.start_mark
    return Place(mark.line + 1, mark.column + 1) if mark is not None else Place()
