"""Sinks: what reaches them, and that one which is slow, away or broken costs the journal nothing."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, get_args

import jsonschema
import ocsf_json_schema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from egressd.journal.feed import Feed, Fields, Unsent
from egressd.journal.ocsf import VERSION, event_of, url_of
from egressd.journal.otlp import OtlpOutlet, attributes_of, error_of, ids_of
from egressd.journal.outlets import SyslogAddress, SyslogOutlet, parse_address
from egressd.journal.record import FIELDS, Event, Layer, Record
from egressd.journal.writer import Journal

DEADLINE = 30
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def a_record(event: str = "decision", **fields: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "event": event,
        "sandbox": "box",
        "attempt_id": "01a3185c5076a1c2d3e4f5061728",
        "root_id": "01a3185c5076ffffffffffffffff",
        "layer": "request",
        "time": "2027-01-15T08:00:00.118204Z",
        "host": "api.example.com",
        "port": 443,
        "scheme": "https",
        "method": "POST",
        "path": "/v1",
        "query": "key=<12>&page=<1>",
    }
    return Record(**usual | fields).as_dict()


DENIED = a_record(
    verdict="deny", reason="not_allowed", rule="api", place="a.yaml:3", profile="p", policy="77aa0c31d9e2f854"
)


# --- OCSF


@cache
def validator(class_uid: int) -> jsonschema.Draft202012Validator:
    schemas = ocsf_json_schema.OcsfJsonSchemaEmbedded(ocsf_json_schema.get_ocsf_schema(VERSION))
    name = schemas.lookup_class_name_from_uid(class_uid)
    return jsonschema.Draft202012Validator(schemas.get_class_schema(name, ["security_control"]))


def valid(fields: dict[str, Any]) -> dict[str, Any]:
    event = event_of(fields)
    validator(event["class_uid"]).validate(event)
    return event


@pytest.mark.parametrize(
    ("fields", "class_uid", "activity"),
    [
        pytest.param(DENIED, 4002, 6, id="a request that was denied"),
        pytest.param(
            a_record("end", reason="completed", status=200, bytes_up=3, duration_ms=1.5),
            4002,
            6,
            id="its end",
        ),
        pytest.param(
            a_record(verdict="allow", reason="rule", method="BREW"), 4002, 99, id="a method of their own"
        ),
        pytest.param(
            a_record(layer="connection", verdict="allow", reason="rule"), 4001, 1, id="a connection"
        ),
        pytest.param(
            a_record(layer="connection", verdict="deny", reason="ip_literal"),
            4001,
            5,
            id="one that was refused",
        ),
        pytest.param(a_record("end", layer="connection", reason="completed"), 4001, 2, id="one that is over"),
        pytest.param(
            a_record(layer="packet", verdict="deny", protocol="icmp", address="192.0.2.1"),
            4001,
            5,
            id="a packet",
        ),
        pytest.param(
            a_record(layer="dns", verdict="allow", qtype="A", channel="dns-udp"), 4003, 1, id="a DNS query"
        ),
        pytest.param(a_record("policy", detail="adopted"), 5019, 1, id="rules that changed"),
        pytest.param(a_record("sandbox", detail="gone"), 5019, 1, id="a sandbox that is gone"),
        pytest.param(a_record("approval", detail="approved"), 5019, 1, id="an approval"),
        pytest.param(
            a_record("alert", alert="metadata", verdict="deny", reason="floor_metadata"),
            2004,
            1,
            id="an alert",
        ),
        pytest.param(
            a_record("lost", count=3, reason="audit_unavailable"), 2004, 1, id="records that are missing"
        ),
    ],
)
def test_a_record_is_an_event_of_its_class_and_fits_its_schema(
    fields: dict[str, Any], class_uid: int, activity: int
) -> None:
    event = valid(fields)
    assert (event["class_uid"], event["activity_id"]) == (class_uid, activity)
    assert event["type_uid"] == class_uid * 100 + activity


def test_a_denial_says_so_in_every_way_that_a_siem_asks() -> None:
    event = valid(DENIED)
    assert {k: event[k] for k in ("action_id", "disposition_id", "status_id", "severity_id")} == {
        "action_id": 2,
        "disposition_id": 2,
        "status_id": 2,
        "severity_id": 3,
    }
    assert event["firewall_rule"]["uid"] == "api"
    assert (
        event["http_request"]["url"]["url_string"] == "https://api.example.com/v1?key=REDACTED&page=REDACTED"
    )


@given(
    st.sampled_from(get_args(Event.__value__)),
    st.none() | st.sampled_from(get_args(Layer.__value__)),
    st.dictionaries(
        st.sampled_from(FIELDS), st.text(max_size=5) | st.lists(st.text(max_size=1)) | st.integers()
    ),
)
def test_every_record_makes_an_event_and_a_span(
    event: str, layer: str | None, fields: dict[str, Any]
) -> None:
    record = fields | {"event": event, "layer": layer}
    event_of(record)
    attributes_of(record)
    error_of(record)
    assert ids_of(record).trace


# --- syslog


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/dev/log", SyslogAddress("unix", "/dev/log")),
        ("udp://logs.example", SyslogAddress("udp", "logs.example", 514)),
        ("udp://192.0.2.1:5514", SyslogAddress("udp", "192.0.2.1", 5514)),
        ("tcp://[2001:db8::1]", SyslogAddress("tcp", "2001:db8::1", 601)),
        ("tcp://[2001:db8::1]:99", SyslogAddress("tcp", "2001:db8::1", 99)),
    ],
)
def test_an_address_of_syslog(text: str, address: SyslogAddress) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text", ["", "logs", "http://a", "udp://", "tcp://a:0", "tcp://a:x", "udp://a b", "unix:log"]
)
def test_what_is_no_address_of_syslog(text: str) -> None:
    with pytest.raises(ValueError, match=r"wanted|port"):
        parse_address(text)


MESSAGE = re.compile(rb"<(\d+)>1 (\S+) (\S+) egressd \d+ (\S+) - (\{.*\})")


def parsed(message: bytes) -> tuple[int, bytes, bytes, dict[str, Any]]:
    match = MESSAGE.fullmatch(message)
    assert match, message
    return int(match[1]), match[2], match[4], json.loads(match[5])


EXPECTED = (84, b"2027-01-15T08:00:00.118204Z", b"decision", DENIED)


def test_a_datagram_is_one_message(tmp_path: Path) -> None:
    for kind in ("unix", "udp"):
        family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as daemon:
            daemon.settimeout(DEADLINE)
            daemon.bind(str(tmp_path / "log") if kind == "unix" else ("127.0.0.1", 0))
            name = daemon.getsockname()
            address = SyslogAddress("unix", name) if kind == "unix" else SyslogAddress("udp", *name)
            outlet = SyslogOutlet(address, "record")
            outlet.send([DENIED, DENIED], DEADLINE)
            assert [parsed(daemon.recv(65_536)) for _ in range(2)] == [EXPECTED] * 2
            outlet.close()


def test_over_tcp_a_message_says_how_long_it_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as daemon:
        daemon.settimeout(DEADLINE)
        outlet = SyslogOutlet(SyslogAddress("tcp", *daemon.getsockname()), "ocsf")
        outlet.send([DENIED, a_record("alert", alert="key")], DEADLINE)
        connection, _ = daemon.accept()
        outlet.close()
        with connection, connection.makefile("rb") as stream:
            data, seen = stream.read(), []
    while data:
        length, _, data = data.partition(b" ")
        seen.append(parsed(data[: int(length)]))
        data = data[int(length) :]
    assert [(priority, event["class_uid"]) for priority, _, _, event in seen] == [(84, 4002), (81, 2004)]


# --- a feed


class Gathered:
    """An outlet that gathers; it fails until `works` is set, and waits while `open` is not."""

    name = "gathered"

    def __init__(self) -> None:
        self.seen: list[Fields] = []
        self.works, self.open = True, threading.Event()
        self.open.set()
        self.came = threading.Condition()

    def send(self, records: Sequence[Fields], seconds: float) -> None:
        assert self.open.wait(DEADLINE)
        if not self.works:
            raise Unsent("it is away")
        with self.came:
            self.seen.extend(records)
            self.came.notify_all()

    def close(self) -> None:
        pass

    def wait_for(self, done: Callable[[], bool]) -> None:
        with self.came:
            assert self.came.wait_for(done, DEADLINE)


@pytest.fixture
def gathered() -> Gathered:
    return Gathered()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal.jsonl")
    yield journal
    journal.close()


def test_a_sink_gets_every_line_that_the_journal_has_in_order(gathered: Gathered, journal: Journal) -> None:
    feed = Feed(gathered, lambda _text: None)
    journal.hear(feed.hear)
    for number in range(1200):
        journal.append([a_record("end", reason="completed", detail=str(number))])
    feed.close()
    assert [fields["seq"] for fields in gathered.seen] == list(range(1, 1201))
    assert (feed.sent, feed.lost) == (1200, 0)


def test_a_sink_that_hangs_costs_the_journal_nothing_and_is_told_what_it_missed(
    gathered: Gathered, journal: Journal
) -> None:
    gathered.open.clear()
    feed = Feed(gathered, lambda _text: None, limit=50)
    journal.hear(feed.hear)
    for _ in range(300):
        journal.append([a_record("end", reason="completed")])
    assert journal.seq == 300
    assert feed.waiting + feed.lost == 300
    gathered.open.set()
    gathered.wait_for(
        lambda: len(gathered.seen) >= 50 and sum(f.get("count", 0) for f in gathered.seen) == feed.lost
    )
    feed.close()
    whole = [fields["seq"] for fields in gathered.seen if "seq" in fields]
    assert whole == list(range(1, len(whole) + 1))
    assert len(whole) + feed.lost == 300


def test_a_sink_that_is_away_is_tried_again_and_the_operator_is_told_once_each_way(
    gathered: Gathered,
) -> None:
    said: list[str] = []
    gathered.works = False
    feed = Feed(gathered, said.append)
    path = Path(os.devnull)
    journal = Journal(path)
    journal.hear(feed.hear)
    journal.append([a_record("end", reason="completed")])
    deadline = threading.Event()
    while not said:
        deadline.wait(0.01)
    gathered.works = True
    gathered.wait_for(lambda: len(gathered.seen) == 1)
    feed.close()
    journal.close()
    assert said == ["gathered: not sent, tried again: it is away", "gathered: sending again"]


def test_what_cannot_be_sent_at_the_end_is_said(gathered: Gathered) -> None:
    said: list[str] = []
    gathered.works = False
    feed = Feed(gathered, said.append)
    journal = Journal(os.devnull)
    journal.hear(feed.hear)
    journal.append([a_record("end", reason="completed")] * 3)
    feed.close()
    journal.close()
    assert said[-1] == "gathered: 3 records were not sent; the journal has them"


# --- OTLP


class Receiver:
    """An OTLP receiver on loopback, which keeps what it gets."""

    def __init__(self) -> None:
        receiver = self
        self.logs: list[Any] = []
        self.spans: list[Any] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/logs":
                    for each in ExportLogsServiceRequest.FromString(body).resource_logs:
                        receiver.logs += [log for scope in each.scope_logs for log in scope.log_records]
                else:
                    for one in ExportTraceServiceRequest.FromString(body).resource_spans:
                        receiver.spans += [span for scope in one.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    receiver = Receiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.server.server_port}")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    yield receiver
    receiver.close()


def told(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


def test_logs_and_spans_join_the_agent_s_trace(receiver: Receiver) -> None:
    allowed = a_record(verdict="allow", reason="rule", rule="api", traceparent=TRACEPARENT)
    end = a_record(
        "end",
        reason="upstream_closed",
        status=502,
        duration_ms=250.0,
        upstream="192.0.2.1",
        alpn="h2",
        traceparent=TRACEPARENT,
    )
    root = a_record(
        layer="dns",
        verdict="deny",
        reason="not_allowed",
        root_id=allowed["attempt_id"],
        traceparent=TRACEPARENT,
    )
    outlet = OtlpOutlet("both")
    outlet.send([allowed, root], DEADLINE)
    outlet.send([{name: value for name, value in end.items() if name not in {"path", "query"}}], DEADLINE)
    outlet.close()
    assert len(receiver.logs) == 3
    assert {log.trace_id.hex() for log in receiver.logs} == {"0af7651916cd43dd8448eb211c80319c"}
    assert receiver.logs[0].body.string_value.startswith(
        "decision allow POST https://api.example.com/v1?key=REDACTED"
    )
    dns, request = receiver.spans
    assert (dns.name, dns.parent_span_id.hex()) == ("DNS", "b7ad6b7169203331")
    assert (request.name, request.parent_span_id.hex()) == ("POST", "ffffffffffffffff")
    assert request.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert request.end_time_unix_nano - request.start_time_unix_nano == 250_000_000
    found = told(request.attributes)
    wanted = {
        "http.request.method": "POST",
        "http.response.status_code": 502,
        "server.address": "api.example.com",
        "server.port": 443,
        "network.peer.address": "192.0.2.1",
        "network.protocol.version": "2",
        "url.full": "https://api.example.com/v1?key=REDACTED&page=REDACTED",
        "error.type": "upstream_closed",
        "egressd.rule": "api",
        "egressd.sandbox.id": "box",
    }
    assert found | wanted == found


def test_a_trace_that_is_not_sampled_gets_logs_and_no_spans(receiver: Receiver) -> None:
    outlet = OtlpOutlet("both")
    outlet.send([DENIED | {"traceparent": TRACEPARENT[:-1] + "0"}], DEADLINE)
    outlet.close()
    assert (len(receiver.logs), len(receiver.spans)) == (1, 0)


def test_a_receiver_that_is_away_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    outlet = OtlpOutlet("logs")
    with pytest.raises(Unsent):
        outlet.send([DENIED], 1)
    outlet.close()


def test_a_url_holds_no_value_of_a_query() -> None:
    assert (
        url_of({"scheme": "http", "host": "a", "port": 8080, "path": "/", "query": ""}) == "http://a:8080/?"
    )
    assert io.StringIO(url_of({})).read() == "http://"
