"""Messages between control and a worker that may have been taken over, as they come off the socket."""

from __future__ import annotations

import os
import socket
from typing import Any

from pydantic import BaseModel, TypeAdapter

from egressd.gate.channel import MESSAGE_LIMIT, ChannelBroken, receive
from egressd.gate.messages import (
    TO_CONTROL,
    TO_WORKER,
    Ask,
    Gone,
    Lent,
    Pair,
    Ready,
    Recall,
    Records,
    Revoke,
    Serve,
    Spent,
    Written,
)
from tests.fuzz.target import JUNK, Target, offsets_of

_ADAPTERS: tuple[TypeAdapter[Any], ...] = (TO_CONTROL, TO_WORKER)


def _read(data: bytes, adapter: TypeAdapter[Any]) -> BaseModel | None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        far.send(data)
        far.shutdown(socket.SHUT_WR)
        try:
            message, descriptors = receive(near, adapter)
        except ChannelBroken as broken:
            text = str(broken)
            if len(text) > 80:
                raise AssertionError("a refusal repeats what was sent") from broken
            return None
        for descriptor in descriptors:
            os.close(descriptor)
        assert isinstance(message, BaseModel)
        return message


def check(data: bytes) -> None:
    """Hold every law of messages."""
    for adapter in _ADAPTERS:
        message = _read(data, adapter)
        if message is None:
            continue
        written = message.model_dump_json().encode()
        assert len(written) <= 6 * MESSAGE_LIMIT
        assert adapter.validate_json(written) == message, (
            "a message is not what it was when it was written again"
        )
        for at in offsets_of(data.rstrip())[-8:]:
            assert _read(data[:at], adapter) is None, "a message that is not all there"
        for junk in JUNK:
            assert junk.isspace() or _read(data + junk, adapter) is None, "a message with something behind it"


def _seed(message: BaseModel) -> bytes:
    return message.model_dump_json().encode()


TARGET = Target(
    "channel",
    check,
    lambda data: [_read(data, adapter) for adapter in _ADAPTERS],
    seeds=(
        _seed(Ready()),
        _seed(Gone(sandbox="sb-1")),
        _seed(Records(batch=1, records=({"event": "end", "n": 1.5},))),
        _seed(Pair(pair=1, sandbox="sb-1", name="a.test", address="198.18.1.0")),
        _seed(Spent(sandbox="sb-1", owner="", kind="requests", tokens=1.5)),
        _seed(Revoke(sandbox="sb-1")),
        _seed(
            Ask(
                ticket=1,
                sandbox="sb-1",
                credential="key",
                method="GET",
                scheme="https",
                host="a.test",
                port=443,
                target="/",
            )
        ),
        _seed(Lent(ticket=1, ok=True)),
        _seed(Recall(leases=("lease-1",))),
        _seed(Written(batch=2, ok=True)),
        _seed(Serve(sandbox="sb-1", labels={"a": "b"}, listeners=())),
        b'{"type":"configure","worker":"w","settings":{}}',
        b"{}",
    ),
    words=(
        b'"type":',
        b'"ready"',
        b'"records"',
        b"null",
        b"NaN",
        b"Infinity",
        b"1e999",
        b"[" * 50,
        b"\\ud800",
        b"\\u0000",
        b'"',
        b"}",
        b"{",
        b",",
        b"-1",
        b"9" * 40,
    ),
    most=2000,
)
