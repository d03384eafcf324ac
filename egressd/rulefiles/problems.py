"""What is wrong with a file, where, and how to put it right.

A problem is a value: reading goes on after it, so that one run reports them all. The codes are a closed list,
each kept by a bad file of its own in `tests/golden/bad/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

type Severity = Literal["error", "warning"]

MOST = 200
"""Problems kept of one reading; the rest are counted: a hostile file must not fill a terminal or a log."""
_CLIP = 80


class Code(StrEnum):
    """Every kind of problem a file can have."""

    # the bytes and the YAML
    UNREADABLE = "unreadable"
    TOO_LARGE = "too_large"
    NOT_UTF8 = "not_utf8"
    BYTE_ORDER_MARK = "byte_order_mark"
    EMPTY_FILE = "empty_file"
    BAD_YAML = "bad_yaml"
    TAB = "tab"
    SEVERAL_DOCUMENTS = "several_documents"
    DIRECTIVE = "directive"
    ALIAS = "alias"
    TAG = "tag"
    MERGE_KEY = "merge_key"
    TOO_DEEP = "too_deep"
    DUPLICATE_KEY = "duplicate_key"
    BAD_KEY = "bad_key"
    AMBIGUOUS_VALUE = "ambiguous_value"
    EMPTY_VALUE = "empty_value"
    # the shape
    UNKNOWN_KEY = "unknown_key"
    MISSING_KEY = "missing_key"
    WRONG_TYPE = "wrong_type"
    BAD_VALUE = "bad_value"
    EMPTY_LIST = "empty_list"
    BAD_SCHEMA = "bad_schema"
    BAD_ID = "bad_id"
    BAD_DATE = "bad_date"
    BAD_LIMIT = "bad_limit"
    BAD_PORT = "bad_port"
    # the folder
    MISSING_FILE = "missing_file"
    UNEXPECTED_FILE = "unexpected_file"
    NAME_MISMATCH = "name_mismatch"
    # entries
    ENTRY_SELECTOR = "entry_selector"
    NOT_TOGETHER = "not_together"
    DUPLICATE_ID = "duplicate_id"
    JSON_CONDITION = "json_condition"
    DUPLICATE_ITEM = "duplicate_item"
    PORTS_REQUIRED = "ports_required"
    NOT_INSPECTED = "not_inspected"
    OBSERVE = "observe"
    # what rules are put together from
    UNKNOWN_GROUP = "unknown_group"
    UNKNOWN_PROFILE = "unknown_profile"
    EXTENDS_CYCLE = "extends_cycle"
    NOT_NARROWER = "not_narrower"
    OVER_CEILING = "over_ceiling"
    # hosts, addresses, requests
    BAD_HOST = "bad_host"
    NOT_NORMAL = "not_normal"
    BAD_WILDCARD = "bad_wildcard"
    PUBLIC_SUFFIX = "public_suffix"
    FLOOR_NAME = "floor_name"
    BAD_NETWORK = "bad_network"
    FLOOR_NETWORK = "floor_network"
    BAD_REQUEST = "bad_request"
    # services and lists
    UNKNOWN_SERVICE = "unknown_service"
    UNKNOWN_LIST = "unknown_list"
    UNKNOWN_PARAMETER = "unknown_parameter"
    MISSING_PARAMETER = "missing_parameter"
    BAD_PARAMETER = "bad_parameter"
    TOO_MANY_VALUES = "too_many_values"
    # public_web
    PUBLIC_WEB_LIMITS = "public_web_limits"
    MIXED_PUBLIC = "mixed_public"
    # credentials
    UNKNOWN_CREDENTIAL = "unknown_credential"
    CREDENTIAL_NOT_COVERED = "credential_not_covered"
    CREDENTIAL_CONSTRAINT = "credential_constraint"
    CREDENTIAL_CONFLICT = "credential_conflict"
    INLINE_SECRET = "inline_secret"  # noqa: S105 -- the name of a problem
    ATTACH_MISFIT = "attach_misfit"
    PLACEHOLDER_COLLISION = "placeholder_collision"
    # the files' own tests
    BAD_TEST = "bad_test"
    UNKNOWN_RULE = "unknown_rule"
    TEST_FAILED = "test_failed"
    # warnings: the file loads
    EXPIRED = "expired"
    TEST_EXPIRED = "test_expired"
    SHARED_SUFFIX = "shared_suffix"
    CREDENTIAL_UNCHECKED = "credential_unchecked"
    CREDENTIAL_UNUSED = "credential_unused"
    CREDENTIAL_WIDE = "credential_wide"
    CREDENTIAL_MISSING = "credential_missing"
    ATTACH_DOUBTFUL = "attach_doubtful"
    COVERT_CAPACITY = "covert_capacity"
    # lints: `egressd check` says them beside the warnings
    SHADOWED = "shadowed"
    DUPLICATE_RULE = "duplicate_rule"
    NEVER_MATCHES = "never_matches"
    NEVER_MATCHED = "never_matched"
    EXPIRES_SOON = "expires_soon"
    NO_OWNER = "no_owner"
    MULTI_TENANT = "multi_tenant"
    DENY_WITHOUT_APEX = "deny_without_apex"
    HOST_TYPO = "host_typo"
    UPLOAD_API = "upload_api"
    TUNNEL_FRONTING = "tunnel_fronting"
    WIDE_PORTS = "wide_ports"
    BAD_SILENCE = "bad_silence"


LINTS = frozenset(
    {
        Code.SHADOWED,
        Code.DUPLICATE_RULE,
        Code.NEVER_MATCHES,
        Code.NEVER_MATCHED,
        Code.EXPIRES_SOON,
        Code.NO_OWNER,
        Code.MULTI_TENANT,
        Code.DENY_WITHOUT_APEX,
        Code.HOST_TYPO,
        Code.UPLOAD_API,
        Code.TUNNEL_FRONTING,
        Code.WIDE_PORTS,
        Code.BAD_SILENCE,
    }
)
"""What is looked for once the rules are sound, and not when they are loaded to be in force."""

WARNINGS = LINTS | frozenset(
    {
        Code.EXPIRED,
        Code.TEST_EXPIRED,
        Code.SHARED_SUFFIX,
        Code.CREDENTIAL_UNCHECKED,
        Code.CREDENTIAL_UNUSED,
        Code.CREDENTIAL_WIDE,
        Code.CREDENTIAL_MISSING,
        Code.ATTACH_DOUBTFUL,
        Code.COVERT_CAPACITY,
    }
)


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where in a file: lines and columns count from 1, columns in characters."""

    line: int = 1
    column: int = 1


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One thing wrong in one place, with the way out of it in `hint` where there is a likely one."""

    path: str
    line: int
    column: int
    code: Code
    message: str
    hint: str = ""

    @property
    def severity(self) -> Severity:
        """Whether the file still loads (`warning`) or not."""
        return "warning" if self.code in WARNINGS else "error"

    def __str__(self) -> str:
        """Return `path:line:column: code: message` and, on a line of its own, the hint."""
        kind = "warning: " if self.severity == "warning" else ""
        head = f"{self.path}:{self.line}:{self.column}: {kind}{self.code}: {self.message}"
        return f"{head}\n    hint: {self.hint}" if self.hint else head


@dataclass(frozen=True, slots=True)
class Problems:
    """All that is wrong, sorted by place; `left_out` counts what was over the most that are kept."""

    items: tuple[Problem, ...]
    left_out: int = 0

    def __iter__(self) -> Iterator[Problem]:
        """Iterate in order of place."""
        return iter(self.items)

    def __len__(self) -> int:
        """Return how many there are, those left out included."""
        return len(self.items) + self.left_out

    def __str__(self) -> str:
        """Return one text for people, a problem after the other."""
        lines = [str(item) for item in self.items]
        if self.left_out:
            lines.append(f"… and {self.left_out} more")
        return "\n".join(lines)

    @property
    def only_tests_failed(self) -> bool:
        """Whether the files are sound and merely a test of theirs says no (exit status 1, not 2)."""
        return all(item.code is Code.TEST_FAILED for item in self.items) and not self.left_out


@dataclass(slots=True)
class Findings:
    """Collects problems while reading; `root` is put before each path as it is shown."""

    root: str = ""
    errors: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    left_out: int = 0

    def add(self, path: str, place: Place, code: Code, message: str, hint: str = "") -> None:
        """Note one problem; a second one in the same words at the same place is the same problem."""
        problem = Problem(
            self.shown(path), place.line, place.column, code, printable(message), printable(hint)
        )
        kept = self.warnings if problem.severity == "warning" else self.errors
        if len(kept) >= MOST:
            self.left_out += problem.severity == "error"
        elif problem not in kept:
            kept.append(problem)

    @property
    def count(self) -> int:
        """How many errors there are so far; grows with each new one."""
        return len(self.errors) + self.left_out

    def shown(self, path: str) -> str:
        """Return a path as people see it."""
        return printable("/".join(part for part in (self.root, path) if part))

    def problems(self) -> Problems:
        """Return the errors in order of place."""
        return Problems(tuple(sorted(self.errors)), self.left_out)


def printable(text: str) -> str:
    """Return `text` with everything escaped that could write on a terminal other than as a letter."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def quoted(value: object) -> str:
    """Return file content for a message: quoted, escaped, and cut at 80 characters."""
    text = value if isinstance(value, str) else str(value)
    return f"'{printable(text[:_CLIP])}{'…' if len(text) > _CLIP else ''}'"
