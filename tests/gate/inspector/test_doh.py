"""DNS-26: what tells that a request carries a DNS question."""

from __future__ import annotations

import base64

import dns.message
import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.gate.inspector.doh import asks_dns

WIRE = dns.message.make_query("secret.evil.test", "A", id=0).to_wire()
TEXT = base64.urlsafe_b64encode(WIRE).rstrip(b"=").decode("ascii")
REPLY = dns.message.make_response(dns.message.from_wire(WIRE)).to_wire()


@pytest.mark.parametrize(
    ("target", "fields", "asks"),
    [
        pytest.param(
            "/dns-query", [(b"content-type", b"application/dns-message")], True, id="a posted message"
        ),
        pytest.param(
            "/x", [(b"Content-Type", b" Application/DNS-Message; a=b")], True, id="in other letters"
        ),
        pytest.param(
            "/x", [(b"accept", b"text/html, application/dns-json;q=0.9")], True, id="JSON is wanted"
        ),
        pytest.param(
            "/x", [(b"content-type", b"application/oblivious-dns-message")], True, id="an oblivious one"
        ),
        pytest.param(f"/dns-query?dns={TEXT}", [], True, id="in the query"),
        pytest.param(f"/anything?a=b&dns={TEXT}&c=d", [], True, id="on another path, among others"),
        pytest.param(f"/dns-query?d%6es={TEXT}", [], True, id="an escaped key"),
        pytest.param(f"/dns-query?dns={TEXT.replace('A', '%41')}", [], True, id="an escaped value"),
        pytest.param("/dns-query?dns=AAABAAABAAAAAAAA", [], True, id="a header alone"),
        pytest.param("/settings?dns=true", [], False, id="another meaning of the key"),
        pytest.param("/settings?dns=8.8.8.8", [], False, id="an address"),
        pytest.param("/?dns=" + base64.urlsafe_b64encode(REPLY).decode(), [], False, id="an answer"),
        pytest.param("/?dns=", [], False, id="nothing"),
        pytest.param("/dns-query", [(b"accept", b"*/*")], False, id="a path alone"),
        pytest.param("/", [(b"x-note", b"application/dns-message")], False, id="another field"),
    ],
)
def test_a_question_is_told_by_its_type_or_by_its_bytes(
    target: str, fields: list[tuple[bytes, bytes]], asks: bool
) -> None:
    assert asks_dns(target, tuple(fields)) is asks


@given(st.text(), st.lists(st.tuples(st.binary(), st.binary())))
def test_it_is_total(target: str, fields: list[tuple[bytes, bytes]]) -> None:
    assert asks_dns(target, tuple(fields)) in (True, False)
    assert asks_dns("/?dns=" + target, ()) in (True, False)
