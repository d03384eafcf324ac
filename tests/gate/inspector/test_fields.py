"""What ends at the proxy and what goes on."""

from __future__ import annotations

from egressd.gate.inspector.exchange import redacted_query
from egressd.gate.inspector.fields import onward_request, onward_response, onward_trailers


def test_host_is_replaced_in_its_place() -> None:
    fields = ((b"A", b"1"), (b"hOST", b"API.example.com."), (b"B", b"2"))
    assert onward_request(fields, b"api.example.com") == (
        (b"A", b"1"),
        (b"hOST", b"api.example.com"),
        (b"B", b"2"),
    )


def test_host_is_put_first_where_there_was_none() -> None:
    assert onward_request(((b"A", b"1"),), b"x") == ((b"Host", b"x"), (b"A", b"1"))


def test_a_connection_field_takes_its_own_away_but_not_the_framing() -> None:
    fields = (
        (b"Connection", b"close, X-A"),
        (b"X-A", b"1"),
        (b"Content-Length", b"3"),
        (b"Connection", b"content-length, host"),
    )
    assert onward_request(fields, b"x") == ((b"Host", b"x"), (b"Content-Length", b"3"))
    assert onward_response(fields) == ((b"Content-Length", b"3"),)


def test_the_coding_goes_upstream_in_the_one_spelling_that_no_origin_overlooks() -> None:
    assert onward_request(((b"Transfer-Encoding", b"chuNked"),), b"x")[1:] == (
        (b"Transfer-Encoding", b"chunked"),
    )


def test_an_underscore_hides_no_field_of_a_request() -> None:
    fields = (
        (b"X_HTTP_Method_Override", b"PUT"),
        (b"X-Original-URL", b"/admin"),
        (b"X_Rewrite_Url", b"/admin"),
        (b"Proxy_Authorization", b"x"),
        (b"My_Field", b"1"),
    )
    assert onward_request(fields, b"x") == ((b"Host", b"x"), (b"My_Field", b"1"))


def test_a_site_cannot_speak_as_egressd_nor_lead_round_it() -> None:
    fields = (
        (b"X-Egressd-Reason", b"rule"),
        (b"alt-svc", b"h3"),
        (b"Proxy-Authenticate", b"Basic"),
        (b"Location", b"/x"),
    )
    assert onward_response(fields) == ((b"Location", b"/x"),)


def test_trailers_neither_frame_nor_authorise() -> None:
    fields = (
        (b"Content-Length", b"1"),
        (b"Authorization", b"x"),
        (b"grpc-status", b"0"),
        (b"x-egressd-attempt", b"1"),
    )
    assert onward_trailers(fields) == ((b"grpc-status", b"0"),)


def test_a_query_keeps_its_keys_and_the_lengths_of_its_values() -> None:
    assert redacted_query("a=secret&b=&c&=x&%41=1") == "a=<6>&b=<0>&<1>&=<1>&%41=<1>"
    assert redacted_query("k" * 65 + "=v") == "<67>"
    assert redacted_query("") == "<0>"
