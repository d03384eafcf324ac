"""Masking: each form of a secret in a table, and the laws: lengths stay, cuts don't matter, nothing is held back without need."""

from __future__ import annotations

import base64
import html
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from egressd.credentials import needles
from egressd.credentials.needles import UNTOLD, Slot, needles_of
from egressd.credentials.scrub import Mask, Scrubber, SteadyScrubber

SECRET = 'sk-Live_9f"3/Zq+&<7\\=%41 é'
PLAIN = "sk-ant-api03-Zm9vYmFyLXF1eA"

type Form = Callable[[str], str]


def b64(text: str, before: str = "") -> str:
    return base64.b64encode((before + text).encode()).decode()


def safe64(text: str, before: str = "") -> str:
    return base64.urlsafe_b64encode((before + text).encode()).decode().rstrip("=")


def whole_percent(text: str, form: str = "%{:02X}") -> str:
    return "".join(form.format(byte) for byte in text.encode())


def mixed(text: str) -> str:
    """Each character in another spelling than its neighbour."""
    ways: Iterator[Form] = itertools.cycle(
        [str, whole_percent, lambda char: json.dumps(f"\u0394{char}")[7:-1]]
    )
    return "".join(way(char) for way, char in zip(ways, text, strict=False))


FORMS: dict[str, Form] = {
    "as it is": str,
    "in upper case": lambda text: (
        text.replace("é", "e").upper().replace("E", "E") if text.isascii() else text
    ),
    "percent-encoded where it must be": quote,
    "percent-encoded, the slash too": lambda text: quote(text, safe=""),
    "percent-encoded in lower case": lambda text: whole_percent(text, "%{:02x}"),
    "percent-encoded throughout": whole_percent,
    "percent-encoded twice": lambda text: quote(quote(text, safe=""), safe=""),
    "percent-encoded three times": lambda text: quote(quote(quote(text, safe=""), safe=""), safe=""),
    "as a form": quote_plus,
    "as JSON": lambda text: json.dumps(text)[1:-1],
    "as JSON in UTF-8": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "as JSON with escaped slashes": lambda text: json.dumps(text)[1:-1].replace("/", "\\/"),
    "as JSON in JSON": lambda text: json.dumps(json.dumps(text)[1:-1])[1:-1],
    "as JSON, each character escaped": lambda text: "".join(f"\\u{ord(char):04X}" for char in text),
    "with hexadecimal escapes": lambda text: "".join(f"\\x{ord(char):02x}" for char in text),
    "as HTML": html.escape,
    "as HTML, in decimal": lambda text: "".join(f"&#{ord(char)};" for char in text),
    "as HTML, in hexadecimal": lambda text: "".join(f"&#x{ord(char):X};" for char in text),
    "in a mixture": mixed,
    "in hexadecimal": lambda text: text.encode().hex(),
    "in upper hexadecimal": lambda text: text.encode().hex().upper(),
    "in base64": b64,
    "in base64, at the second place": lambda text: b64(text, "a"),
    "in base64, at the third place": lambda text: b64(text, "ab"),
    "in base64 for URLs": safe64,
    "in base64 for URLs, at the third place": lambda text: safe64(text, "ab"),
    "as Basic credentials": lambda text: b64(text, "x-access-token:"),
    "as Basic credentials, percent-encoded": lambda text: quote(b64(text, "user:"), safe=""),
    "as Basic credentials, in JSON": lambda text: b64(text, "someone:").replace("/", "\\/"),
}


@pytest.mark.parametrize("secret", [SECRET, PLAIN], ids=["every kind of character", "plain"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "lead", ["", "%", "\\", "&", "%2"], ids=["bare", "percent", "backslash", "and", "half an escape"]
)
def test_a_secret_is_masked(secret: str, form: str, lead: str) -> None:
    text = f"[{lead}".encode() + FORMS[form](secret).encode() + b"]"
    masked = Mask([secret]).whole(text)
    assert len(masked) == len(text)
    assert masked[1 : 1 + len(lead)] in (lead.encode(), b"*" * len(lead))
    assert (masked[:1], masked[-1:]) == (b"[", b"]")
    hidden = masked[1 + len(lead) : -1]
    if "ase64" in form or "Basic" in form:
        user = hidden.find(b"*")
        assert user <= 26
        assert set(hidden[user:]) <= set(b"*=%3D"), masked
    else:
        assert set(hidden) == {ord("*")}, masked


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be", "utf-16"])
def test_a_secret_in_utf_16_is_masked(codec: str) -> None:
    masked = Mask([SECRET]).whole(f"<{SECRET}>".encode(codec))
    assert set(masked.strip(b"\0<>\xff\xfe")) == {ord("*")}


@pytest.mark.parametrize(("before", "first", "last"), [("", 0, 36), ("a", 2, 38), ("ab", 3, 39)])
def test_in_longer_base64_every_character_with_bits_of_the_secret_behind_its_first_is_masked(
    before: str, first: int, last: int
) -> None:
    text = base64.b64encode(f"{before}{PLAIN}zzzz".encode())
    assert Mask([PLAIN]).whole(text) == text[:first] + b"*" * (last - first) + text[last:]


NOT_MASKED = {
    "another text": b"sk-live but nothing more",
    "a text that ends in three characters of it": b"ends in sk-",
    "all but its last character": PLAIN[:-1].encode() + b"_",
    "the user's name before it": base64.b64encode(b"x-access-token:" + b"other"),
}


@pytest.mark.parametrize("text", NOT_MASKED.values(), ids=NOT_MASKED)
def test_what_is_no_secret_passes_as_it_is(text: bytes) -> None:
    assert Mask([PLAIN]).whole(text) == text


def test_a_text_that_is_cut_off_in_a_secret_tells_at_most_what_leaves_too_much_to_be_guessed() -> None:
    mask = Mask([PLAIN])
    for size in range(len(PLAIN)):
        text = b"= " + PLAIN[:size].encode()
        assert mask.whole(text) == (text if len(PLAIN) - size > UNTOLD else b"= " + b"*" * size)


GUESSED = (
    "as it is",
    "in hexadecimal",
    "in base64",
    "in base64, at the second place",
    "percent-encoded throughout",
)


@pytest.mark.parametrize("form", GUESSED)
@pytest.mark.parametrize(
    "secret", [PLAIN, "glpat-Zm9vYmFyLXF1eAo9", "correct-horse1"], ids=["long", "middle", "short"]
)
def test_nobody_finds_a_secret_character_by_character(secret: str, form: str) -> None:
    """The sandbox says a beginning of it and has that said back: before it has as much as nobody guesses, nothing tells."""
    mask = Mask([secret])
    for size in range(len(secret)):
        if size < max(UNTOLD, len(secret) - UNTOLD):
            text = FORMS[form](secret[:size]).encode().rstrip(b"=")
            assert mask.whole(text) == text


def test_overlapping_and_adjoining_secrets_are_masked_whole() -> None:
    assert Mask(["abcdef", "defghi"]).whole(b"xabcdefghi abcdefabcdef") == b"x********* ************"
    assert Mask(["abab"]).whole(b"_abababa_") == b"_******a_"


def test_a_short_secret_is_masked_as_it_is_but_not_in_base64() -> None:
    mask = Mask(["abc"])
    assert mask.whole(b"abc ABC %61bc YWJj 616263") == b"*** *** ***** YWJj 616263"


def test_nothing_and_empty_secrets_mask_nothing() -> None:
    assert Mask([]).whole(b"abc") == b"abc"
    assert Mask([""]).whole(b"abc") == b"abc"


def test_a_repr_tells_no_secret() -> None:
    mask = Mask([SECRET, PLAIN])
    scrubber = Scrubber(mask)
    scrubber.feed(PLAIN[:12].encode())
    for thing in (mask, scrubber, mask.automaton, mask.automaton.start):
        assert "sk-" not in repr(thing)


# laws


def in_pieces(mask: Mask, pieces: Iterable[bytes]) -> bytes:
    scrubber = Scrubber(mask)
    return b"".join([*map(scrubber.feed, pieces), scrubber.finish()])


def reference(secret: str, text: bytes) -> bytes:
    """The law itself, without an automaton: each place, each needle, each spelling."""
    hidden = bytearray(len(text))
    for slots, telling, tail in needles_of(secret):
        words = [spellings_of(slot) for slot in slots]
        tails = spellings_of(tail) if tail is not None else []
        for begin in range(len(text)):
            places = {begin}
            for index, choice in enumerate(words):
                if index >= telling and any(_is_cut(text[place:], choice) for place in places):
                    hidden[begin:] = b"\1" * (len(text) - begin)
                places = {
                    place + len(word) for place in places for word in choice if text.startswith(word, place)
                }
            for place in places:
                ends = [place + len(word) for word in tails if text.startswith(word, place)]
                last = max(ends, default=place)
                hidden[begin:last] = b"\1" * (last - begin)
                if tails and len(words) >= telling and text[place:] and _is_cut(text[place:], tails):
                    hidden[begin:] = b"\1" * (len(text) - begin)
    return bytes(0x2A if mark else byte for mark, byte in zip(hidden, text, strict=True))


def spellings_of(slot: Slot) -> list[bytes]:
    return [word for word, kind in slot.kinds.items() if kind & 1]


def _is_cut(rest: bytes, words: list[bytes]) -> bool:
    return any(word != rest and word.startswith(rest) for word in words)


SECRETS = st.one_of(
    st.text(st.sampled_from("ab/%2\\&"), min_size=1, max_size=14),
    st.text(min_size=1, max_size=8),
    st.sampled_from([PLAIN, "aaaa", "%25%25", "\\\\u0061", "abcabcabd"]),
)


USUAL = (
    "as it is",
    "percent-encoded where it must be",
    "percent-encoded throughout",
    "in a mixture",
    "as JSON",
    "in base64",
    "in base64, at the second place",
)


@st.composite
def texts_about(draw: st.DrawFn, secret: str) -> bytes:
    """Bytes full of the secret, of parts of it and of what its spellings are made of."""
    data = b""
    for _ in range(draw(st.integers(0, 5))):
        form = FORMS[draw(st.sampled_from(USUAL))]
        cut = draw(st.integers(0, 12))
        word = form(secret).encode("utf-8", "surrogatepass")
        data += draw(st.sampled_from([word, word[:cut], word[cut:], word[:-1]]))
        data += draw(st.sampled_from([b"", b"%", b"\\", b"&#", b"a", b"%25", b"x y", b"\\u00"]))
    return data + draw(st.binary(max_size=4))


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, bytes, list[int]]:
    secret = draw(SECRETS.filter(lambda text: all(not 0xD800 <= ord(char) < 0xE000 for char in text)))
    text = draw(texts_about(secret))
    return secret, text, sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))


def cut(text: bytes, places: list[int]) -> list[bytes]:
    return [text[first:last] for first, last in itertools.pairwise([0, *places, len(text)])]


@given(cases())
@settings(max_examples=150)
@example(("aab", b"aaab", [1, 2, 3]))
@example(("ab12cdef", b"%ab12cdef", [1]))
def test_no_cut_changes_what_comes_out_and_it_is_what_the_law_says(
    case: tuple[str, bytes, list[int]],
) -> None:
    secret, text, places = case
    mask = Mask([secret], ["token"])
    masked = mask.whole(text)
    assert masked == reference(secret, text)
    assert in_pieces(mask, cut(text, places)) == masked
    assert in_pieces(mask, (text[at : at + 1] for at in range(len(text)))) == masked


@given(cases())
@settings(max_examples=100)
def test_only_what_begins_a_needle_is_held_back(case: tuple[str, bytes, list[int]]) -> None:
    secret, text, _ = case
    scrubber = Scrubber(Mask([secret]))
    out = scrubber.feed(text)
    held = scrubber.held
    assert len(out) + held == len(text)
    begins = held > 0 and any(_begins(text[-held:], needle.slots) for needle in needles_of(secret))
    assert begins == (held > 0) or held <= needles_tail(secret)


def needles_tail(secret: str) -> int:
    """The longest spelling of a tail, which may be undecided too."""
    tails = (needle.tail for needle in needles_of(secret) if needle.tail is not None)
    return max((len(word) for slot in tails for word in slot.kinds), default=0)


def _begins(rest: bytes, slots: tuple[Slot, ...]) -> bool:
    places = {0}
    for slot in slots:
        words = spellings_of(slot)
        if any(_is_cut(rest[place:], words) for place in places):
            return True
        places = {place + len(word) for place in places for word in words if rest.startswith(word, place)}
    return False


@given(cases(), st.booleans())
@settings(max_examples=150)
def test_steady_cuts_tell_the_length_and_the_line_ends_and_no_more(
    case: tuple[str, bytes, list[int]], lines: bool
) -> None:
    secret, text, places = case
    if (
        "\n" in secret or "\r" in secret or not secret.isascii()
    ):  # no secret is such, or begins a line in UTF-16
        return
    mask = Mask([secret])
    pieces = cut(text, places)
    blank = [bytes(byte if byte in b"\r\n" else 0x20 for byte in piece) for piece in pieces]
    said, silent = SteadyScrubber(mask, lines=lines), SteadyScrubber(mask, lines=lines)
    out = [said.feed(piece) for piece in pieces]
    assert [len(piece) for piece in out] == [len(silent.feed(piece)) for piece in blank]
    assert b"".join([*out, said.finish()]) == mask.whole(text)


def test_a_steady_line_passes_at_once() -> None:
    scrubber = SteadyScrubber(Mask([PLAIN]), lines=True)
    for line in (b'data: {"delta": "s"}\n\n', b"x\r", PLAIN[:-1].encode() + b"\n"):
        assert scrubber.feed(line) == line
    assert scrubber.feed(b"sk-ant") == b""
    assert scrubber.feed(b"x" * 1000) != b""


def test_what_a_steady_scrubber_keeps_is_as_much_as_a_needle_may_have() -> None:
    for secret in (PLAIN, "s", "x" * 16384):
        scrubber = SteadyScrubber(Mask([secret]))
        assert len(scrubber.feed(b"." * 1_000_000)) >= 1_000_000 - 16 * max(len(secret), 4)


def test_an_event_that_ends_in_no_beginning_passes_at_once() -> None:
    scrubber = Scrubber(Mask([PLAIN]))
    event = b'data: {"delta": "s"}\n\n'
    assert scrubber.feed(event) is event


ADVERSARIAL = {
    "the beginning that everybody knows": b"sk-ant-api03-",
    "all but the last character": PLAIN[:-1].encode(),
    "nothing but the first character": b"s",
    "percent-encoded beginnings": whole_percent(PLAIN[:-1]).encode(),
    "backslashes": b"\\",
    "halves of escapes": b"%25",
    "base64 of beginnings": base64.b64encode(PLAIN[:-1].encode()),
}


@pytest.mark.parametrize("unit", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_time_is_linear_whatever_comes(unit: bytes) -> None:
    def seconds(size: int) -> float:
        best = float("inf")
        for _ in range(3):
            scrubber, began = Scrubber(mask), time.process_time()
            for _ in range(size):
                scrubber.feed(piece)
            best = min(best, time.process_time() - began)
        return best

    mask, piece = Mask([PLAIN]), unit * (4096 // len(unit))
    few, many = seconds(8), seconds(64)
    assert many < 8 * few * 3 + 0.05
    assert many < 1.0, "a quarter of a megabyte"


def test_what_is_held_in_memory_is_bounded_whatever_comes() -> None:
    mask = Mask([PLAIN])
    scrubber = Scrubber(mask)
    for number in range(20_000):
        scrubber.feed(b"sk-ant-%%%d\\%d" % (number, number * 7919))
        assert scrubber.held <= 12 * len(PLAIN)
    assert len(mask.automaton._states) <= needles._STATES


# JSON members

MEMBERS = Mask([], ["access_token", "refresh_token"])
JSON = {
    "a value": ('{"access_token":"abc","x":"access_token"}', '{"access_token":"***","x":"access_token"}'),
    "whitespace": ('{"access_token" \n:\t "abc"}', '{"access_token" \n:\t "***"}'),
    "escapes in a value": (r'{"access_token":"a\"b\\","k":"v"}', r'{"access_token":"******","k":"v"}'),
    "two of them": (
        '{"refresh_token":"r","access_token":"abc"}',
        '{"refresh_token":"*","access_token":"***"}',
    ),
    "an empty one": ('{"access_token":""}', '{"access_token":""}'),
    "another name": ('{"my_access_token":"abc"}', '{"my_access_token":"abc"}'),
    "a number": ('{"access_token":12}', '{"access_token":12}'),
    "JSON in JSON": (
        json.dumps({"body": json.dumps({"access_token": "abc", "k": "v"})}),
        json.dumps({"body": json.dumps({"access_token": "***", "k": "v"})}),
    ),
    "JSON in JSON in JSON": (
        json.dumps(json.dumps(json.dumps({"access_token": "abc", "k": "v"}))),
        json.dumps(json.dumps(json.dumps({"access_token": "***", "k": "v"}))),
    ),
    "a value that never ends": ('{"access_token":"abc', '{"access_token":"***'),
    "a line end, which no value has": ('{"access_token":"abc\nde"', '{"access_token":"***\nde"'),
    "a name that ends nothing": ('["access_token","abc"]', '["access_token","abc"]'),
}


@pytest.mark.parametrize(("text", "masked"), JSON.values(), ids=JSON)
def test_values_of_named_members_are_masked(text: str, masked: str) -> None:
    assert MEMBERS.whole(text.encode()) == masked.encode()
    for at in range(len(text)):
        assert in_pieces(MEMBERS, [text[:at].encode(), text[at:].encode()]) == masked.encode()
    assert in_pieces(MEMBERS, (char.encode() for char in text)) == masked.encode()


@given(st.text(), st.lists(st.integers(0, 200), max_size=6))
def test_a_minted_token_never_passes_whatever_it_is_made_of(token: str, places: list[int]) -> None:
    text = json.dumps({"a": 1, "access_token": token, "b": "end"}).encode()
    cuts = sorted(min(place, len(text)) for place in places)
    masked = in_pieces(MEMBERS, cut(text, cuts))
    found = json.loads(masked)
    assert found == {"a": 1, "access_token": "*" * len(found["access_token"]), "b": "end"}
    assert len(masked) == len(text)


def test_members_hold_nothing_back() -> None:
    scrubber = Scrubber(MEMBERS)
    assert [scrubber.feed(piece) for piece in (b'{"access_', b'token":', b' "ab', b'c"}')] == [
        b'{"access_',
        b'token":',
        b' "**',
        b'*"}',
    ]
    assert scrubber.found == 3
