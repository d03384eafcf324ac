"""The methods of the lab's gRPC service `lab.Echo`: what `streams` answers on its paths."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `streams` has these in its table
    from egressd.lab.streams import Stream

_GRPC = [("content-type", "application/grpc")]


async def say(stream: Stream) -> None:
    """gRPC: one message, and the same back."""
    stream.start(200, _GRPC)
    async for message in stream.messages():
        await stream.send_message(message)
        break
    _finish(stream)


async def many(stream: Stream) -> None:
    """gRPC: one message, and five of it back, each when it is due."""
    stream.start(200, _GRPC)
    async for message in stream.messages():
        for number in range(5):
            await stream.send_message(message + str(number).encode())
            await asyncio.sleep(0.02)
    _finish(stream)


async def collect(stream: Stream) -> None:
    """gRPC: any number of messages, and all of them in one back."""
    stream.start(200, _GRPC)
    whole = b"".join([message async for message in stream.messages()])
    await stream.send_message(whole)
    _finish(stream)


async def chat(stream: Stream) -> None:
    """gRPC: each message back as it comes."""
    stream.start(200, _GRPC)
    await stream.connection.flush()
    async for message in stream.messages():
        await stream.send_message(message)
    _finish(stream)


async def fail(stream: Stream) -> None:
    """gRPC: a status of the origin's own."""
    stream.start(200, [*_GRPC, ("grpc-status", "5"), ("grpc-message", "no such thing")], end=True)


def _finish(stream: Stream) -> None:
    stream.connection.say(stream, [("grpc-status", "0"), ("x-lab", "done")], end=True)
