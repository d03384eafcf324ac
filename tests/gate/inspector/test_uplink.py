"""The way out of an HTTP/1 connection, asked past everything that should have asked before."""

from __future__ import annotations

import dataclasses
from typing import cast

import pytest
from mitmproxy.connection import ConnectionState, Server

from egressd.credentials.lease import Lease
from egressd.gate.inspector.exchange import Exchange
from egressd.gate.inspector.uplink import Uplink
from egressd.gate.inspector.upstream import Opened, OpenFailed
from egressd.gate.tls.stream import ByteStream
from egressd.policy.reasons import Reason
from tests.gate.inspector.lab import HOST, run
from tests.gate.inspector.scene import PUBLIC, VERIFYING, FakeStream, Scene

LEASE = cast(Lease, object())


def opened(stream: FakeStream, *, verified: bool = True) -> Opened:
    return Opened(cast(ByteStream, stream), PUBLIC, "sb-1", HOST, 443, VERIFYING if verified else None)


class Way:
    """An uplink and the exchange that it was opened for."""

    def __init__(self, *, verified: bool = True) -> None:
        self.scene = Scene(tls=True)
        self.stream = FakeStream()
        self.opened = opened(self.stream, verified=verified)
        self.exchange = Exchange(self.scene.engine.connection, admitted=True)
        self.conduit = self.scene.engine._conduit
        self.uplink = Uplink(self.conduit, None)
        self.server = Server(address=(HOST, 443))
        self.uplink.adopt(self.server, self.opened, self.exchange)

    def send(self, exchange: Exchange | None, server: Server | None = None) -> bytes:
        self.uplink.send(exchange, server or self.server, b"secrets")
        self.conduit.flush()
        return self.stream.written


def test_an_admitted_exchange_is_sent_and_counted() -> None:
    async def test() -> None:
        way = Way()
        assert way.send(way.exchange) == b"secrets"
        assert (way.exchange.up, way.exchange.upstream) == (7, PUBLIC)

    run(test())


@pytest.mark.parametrize("who", ["nobody's", "one that was not admitted", "one that is refused by now"])
def test_bytes_of_any_other_exchange_are_a_fault(who: str) -> None:
    async def test() -> None:
        way = Way()
        exchange: Exchange | None = way.exchange
        if who == "nobody's":
            exchange = None
        elif who == "one that was not admitted":
            exchange = Exchange(way.scene.engine.connection)
        else:
            way.exchange.refuse(Reason.POLICY_CHANGED)
        with pytest.raises(RuntimeError, match="not admitted"):
            way.send(exchange)
        way.conduit.flush()
        assert way.stream.written == b""

    run(test())


def test_a_credential_for_a_host_that_has_not_proved_its_name_is_a_fault() -> None:
    async def test() -> None:
        way = Way(verified=False)
        way.exchange.lease = LEASE
        with pytest.raises(RuntimeError, match="not verified"):
            way.send(way.exchange)
        way.conduit.flush()
        assert way.stream.written == b""

    run(test())


def test_bytes_for_an_upstream_that_is_gone_are_dropped() -> None:
    async def test() -> None:
        way = Way()
        way.uplink.drop()
        assert way.send(way.exchange) == b""
        assert way.exchange.up == 0
        assert way.server.state is ConnectionState.CLOSED

    run(test())


def test_an_end_is_told_once() -> None:
    async def test() -> None:
        way = Way()
        assert [way.uplink.ended(), way.uplink.ended()] == [way.server, None]

    run(test())


def test_what_was_dialled_early_serves_one_exchange_and_no_credential_unless_verified() -> None:
    async def test() -> None:
        way, stream = Way(), FakeStream()
        failed = OpenFailed(Reason.UPSTREAM_TLS, "as told")
        assert await Uplink(way.conduit, failed).open(way.exchange) == failed
        bound = dataclasses.replace(way.exchange, lease=LEASE)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("egressd.gate.inspector.uplink.leads_to", lambda *_: True)
            refused = await Uplink(way.conduit, opened(stream, verified=False)).open(bound)
        assert isinstance(refused, OpenFailed)
        assert refused.reason is Reason.CREDENTIAL_NEEDS_TLS
        assert stream.state == "aborted"

    run(test())


def test_what_was_dialled_early_for_nothing_is_let_go() -> None:
    async def test() -> None:
        way, stream = Way(), FakeStream()
        uplink = Uplink(way.conduit, opened(stream))
        uplink.release()
        uplink.release()
        assert stream.state == "closed"

    run(test())
