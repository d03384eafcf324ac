"""Host names: the one parser of names, and of names-or-addresses, for the wire, for rules and for the command
line (law 2).

The theory. A name is a tuple of labels `[a-z0-9_-]{1,63}`, at most 253 characters together. What comes in is
ASCII, loses at most one final dot, and is folded to lower case letter by letter; nothing else is repaired,
for each repair (percent-decoding, IDNA mapping, cutting at NUL, dropping brackets) is a place where two
parsers see two hosts. A name whose last label is a number is address syntax for some clients and a name for
others ("ends in a number", WHATWG URL 3.5): here it is never a name.

Every function is total over `str` and `bytes` and linear in its input. A refusal is a `BadHost`; its `detail`
never quotes the input, so that it is safe in a log and on a page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from egressd.policy.attempt import Address, Name
from egressd.policy.reasons import Reason

MAX_NAME = 253
MAX_LABEL = 63

_LABEL = re.compile(r"[a-z0-9_-]{1,63}")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_IPV6 = re.compile(r"[0-9a-f:.]{2,45}")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_PLAIN = re.compile(r"(?:[a-z0-9_-]{1,63}\.)+[a-z][a-z0-9_-]{0,62}")
_USERINFO = re.compile(r"\A([A-Za-z][A-Za-z0-9+.-]*://)?[^/?#]*@")


@dataclass(frozen=True, slots=True)
class BadHost:
    """A text that is no host: the reason code and one sentence, fixed words that never quote the text."""

    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Authority:
    """A host with its port."""

    host: Name | Address
    port: int


@dataclass(frozen=True, slots=True)
class HostPattern:
    """What a rule says of a host: the name itself, or with `wildcard` every name below it and never the name
    itself.
    """

    name: Name
    wildcard: bool

    def matches(self, name: Name) -> bool:
        """Say whether the pattern covers `name`, label by label."""
        if self.wildcard:
            depth = len(self.name)
            return len(name) > depth and name[-depth:] == self.name
        return name == self.name


def parse_name(raw: str | bytes) -> Name | BadHost:
    """Return the labels of a host name; address syntax in any spelling is a `BadHost`."""
    if isinstance(raw, str) and len(raw) <= MAX_NAME and _PLAIN.fullmatch(raw) and "xn--" not in raw:
        return tuple(
            raw.split(".")
        )  # what nearly every name is: a third of the time, which a long list of hosts is read in
    text = _ascii(raw)
    if isinstance(text, BadHost):
        return text
    labels = _labels(text)
    if isinstance(labels, tuple) and _NUMBER.fullmatch(labels[-1]):
        return BadHost(
            Reason.BAD_HOST, "the last label is a number, so this is address syntax and not a name"
        )
    return labels


def parse_host(raw: str | bytes, *, bracketed: bool = True) -> Name | Address | BadHost:
    """Return the name or the address that `raw` spells.

    IPv4 is read as inet_aton(3) reads it: one to four parts, each decimal, octal (`0…`) or hexadecimal
    (`0x…`), the last one filling the remaining bytes; the value that comes out is what is judged and dialled.
    IPv6 stands in brackets where `bracketed` (URL authorities, Host, CONNECT) and without them otherwise
    (SOCKS, command line). Zone ids are refused in both.
    """
    text = _ascii(raw)
    if isinstance(text, BadHost):
        return text
    if text.startswith("["):
        return _bracketed(text) if bracketed else BadHost(Reason.BAD_HOST, "brackets have no place here")
    if ":" in text:
        if bracketed:
            return BadHost(Reason.BAD_HOST, "a colon in a host: an IPv6 address stands in brackets")
        return _ipv6(text)
    labels = _labels(text)
    if isinstance(labels, tuple) and _NUMBER.fullmatch(labels[-1]):
        # inet_aton takes no final dot; browsers do. Where they differ the text is refused.
        if text.endswith("."):
            return BadHost(Reason.BAD_HOST, "an IPv4 address takes no final dot")
        return _ipv4(labels)
    return labels


def parse_authority(raw: str | bytes, default_port: int | None) -> Authority | BadHost:
    """Return host and port of `host[:port]`; without a port `default_port` stands, and None makes that an
    error (CONNECT).

    The port is 1 to 65535 in ASCII digits without sign, space or leading zero. User information is refused by
    its own reason.
    """
    text = raw.decode("latin-1") if isinstance(raw, bytes) else raw
    if "@" in text:
        return BadHost(Reason.USERINFO_IN_AUTHORITY, "user information is not accepted in an authority")
    if text.startswith("["):
        inside, closed, rest = text.partition("]")
        host_text, colon, port_text = inside + closed, rest[:1], rest[1:]
        if rest and colon != ":":
            return BadHost(Reason.BAD_HOST, "only a port may follow the closing bracket")
    else:
        host_text, colon, port_text = text.partition(":")
        if (
            ":" in port_text
            and _IPV6.fullmatch(text.lower())
            and not isinstance(_ipv6(text.lower()), BadHost)
        ):
            return BadHost(Reason.BAD_HOST, "an IPv6 address stands in brackets")
    host = parse_host(host_text)
    if isinstance(host, BadHost):
        return host
    if not colon:
        if default_port is None:
            return BadHost(Reason.BAD_PORT, "the port is missing")
        return Authority(host, default_port)
    port = parse_port(port_text)
    return (
        Authority(host, port)
        if port is not None
        else BadHost(Reason.BAD_PORT, "the port is not a number from 1 to 65535")
    )


def parse_port(text: str) -> int | None:
    """Return the port that `text` spells, or None: 1 to 65535 in ASCII digits, no sign, no space, no leading
    zero.
    """
    if not text.isascii() or not _PORT.fullmatch(text):
        return None
    port = int(text)
    return port if port <= 65535 else None


def parse_pattern(raw: str) -> HostPattern | BadHost:
    """Return the host pattern of a rule, given in normal form: `api.example.com` or `*.example.com`.

    Names have two labels or more, and so does what stands after `*.`; whether that is a public suffix is
    asked in `rulefiles`. What is not in normal form is refused, with `propose_normal` of it in the detail
    where there is one.
    """
    if raw == "*":
        return BadHost(Reason.BAD_HOST, "a bare '*' would cover every host")
    wildcard = raw.startswith("*.")
    rest = raw[2:] if wildcard else raw
    if "*" in rest:
        return BadHost(
            Reason.BAD_HOST, "'*' stands only for whole labels at the front, as in '*.example.com'"
        )
    name = parse_name(rest)
    if isinstance(name, BadHost) or format_name(name) != rest:
        problem = name.detail if isinstance(name, BadHost) else "the name is not in normal form"
        reason = name.reason if isinstance(name, BadHost) else Reason.BAD_HOST
        proposal = propose_normal(raw)
        return BadHost(reason, f"{problem}; write '{proposal}'" if proposal else problem)
    if len(name) < 2:
        return BadHost(
            Reason.BAD_HOST, f"{'a wildcard' if wildcard else 'a host'} needs a name of two labels or more"
        )
    return HostPattern(name, wildcard)


def propose_normal(raw: str) -> str | None:
    """Return the pattern that the writer of `raw` most likely meant, in normal form, or None where there is
    no single one.

    Takes away space, scheme, path, port, final dot and upper case, and reads `.example.com` as
    `*.example.com`. Never proposes something for user information, globs inside a label, addresses or text
    outside ASCII.
    """
    text = raw.strip()
    if not text.isascii() or "@" in text:
        return None
    text = re.sub(r"^[A-Za-z][A-Za-z0-9+.-]*://", "", text)
    text = re.split(r"[/?#]", text, maxsplit=1)[0]
    text = re.sub(r":[0-9]*$", "", text).removesuffix(".").lower()
    if text.startswith("."):
        text = "*" + text
    if text == raw or text.startswith("**"):
        return None
    pattern = parse_pattern(text)
    return format_pattern(pattern) if isinstance(pattern, HostPattern) else None


def format_name(name: Name) -> str:
    """Return the name as text, without a final dot."""
    return ".".join(name)


def format_host(host: Name | Address) -> str:
    """Return the host as an authority spells it: IPv6 in brackets."""
    if isinstance(host, tuple):
        return ".".join(host)
    return f"[{host}]" if isinstance(host, IPv6Address) else str(host)


def format_pattern(pattern: HostPattern) -> str:
    """Return the pattern as a rule spells it; `parse_pattern` of it is the same pattern."""
    return ("*." if pattern.wildcard else "") + format_name(pattern.name)


def hide_userinfo(raw: str) -> str:
    """Return what was sent as an authority or a URL without its user information, which may be a password: for records."""
    return _USERINFO.sub(r"\1***@", raw)


def is_name(labels: Name) -> bool:
    """Say whether `labels` is a tuple that `parse_name` could have made: the check of a value that arrived
    ready-made.
    """
    if not labels or sum(map(len, labels)) + len(labels) - 1 > MAX_NAME or _NUMBER.fullmatch(labels[-1]):
        return False
    return all(_LABEL.fullmatch(label) and _punycode_holds(label) for label in labels)


def _ascii(raw: str | bytes) -> str | BadHost:
    """Decode and fold to lower case; only ASCII passes, so `str.lower` touches nothing but A to Z."""
    if not raw.isascii():
        return BadHost(Reason.NON_ASCII_HOST, "the host holds characters outside ASCII")
    text = raw.decode("ascii") if isinstance(raw, bytes) else raw
    if "@" in text:
        return BadHost(Reason.USERINFO_IN_AUTHORITY, "user information is not accepted in a host")
    if len(text) > MAX_NAME + 1:
        return BadHost(Reason.BAD_HOST, f"the host is longer than {MAX_NAME} characters")
    return text.lower()


def _labels(text: str) -> Name | BadHost:
    text = text.removesuffix(".")
    if not text:
        return BadHost(Reason.BAD_HOST, "the host is empty")
    if len(text) > MAX_NAME:
        return BadHost(Reason.BAD_HOST, f"the name is longer than {MAX_NAME} characters")
    labels = tuple(text.split("."))
    for label in labels:
        if not _LABEL.fullmatch(label):
            return BadHost(Reason.BAD_HOST, _bad_label(label))
        if not _punycode_holds(label):
            return BadHost(Reason.BAD_HOST, "a label starts with 'xn--' but is not valid Punycode")
    return labels


def _bad_label(label: str) -> str:
    if not label:
        return "a label is empty"
    if len(label) > MAX_LABEL:
        return f"a label is longer than {MAX_LABEL} characters"
    return "a label holds a character other than letters, digits, '-' and '_'"


def _punycode_holds(label: str) -> bool:
    """Whether an A-label decodes to text outside ASCII and encodes back to itself (RFC 3492): what does not
    is read differently by different IDNA libraries, and raises in some.
    """
    if not label.startswith("xn--"):
        return True
    try:
        text = label[4:].encode("ascii").decode("punycode")
        return (
            not text.isascii() and text.encode("punycode").decode("ascii") == label[4:] and text.isprintable()
        )
    except (UnicodeError, OverflowError):  # the latter where a code point is too large even to say so
        return False


def _bracketed(text: str) -> IPv6Address | BadHost:
    if not text.endswith("]"):
        return BadHost(Reason.BAD_HOST, "the bracket is not closed")
    return _ipv6(text[1:-1])


def _ipv6(text: str) -> IPv6Address | BadHost:
    """`text` is lower case. The character class keeps zone ids and IPvFuture out before the library sees the
    text.
    """
    if _IPV6.fullmatch(text):
        try:
            return IPv6Address(text)
        except ValueError:
            pass
    return BadHost(Reason.BAD_HOST, "brackets hold a valid IPv6 address and nothing else")


def _ipv4(parts: Name) -> IPv4Address | BadHost:
    bad = BadHost(Reason.BAD_HOST, "the text looks like an IPv4 address and is none")
    if len(parts) > 4:
        return bad
    numbers = [_number(part) for part in parts]
    last = numbers.pop()
    if last is None or last >= 256 ** (4 - len(numbers)):
        return bad
    value = last
    for position, number in enumerate(numbers):
        if number is None or number > 255:
            return bad
        value |= number << (8 * (3 - position))
    return IPv4Address(value)


def _number(part: str) -> int | None:
    """One part by strtoul(3) with base 0; None where it is no number (`0x` alone and `08` are none)."""
    if re.fullmatch(r"0x[0-9a-f]+", part):
        return int(part, 16)
    if re.fullmatch(r"0[0-7]*", part):
        return int(part, 8)
    return int(part) if re.fullmatch(r"[1-9][0-9]*", part) else None
