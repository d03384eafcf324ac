"""Two language model APIs as their clients know them: answers whole, or as a stream of events, each when it is due."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

from egressd.lab.http1 import Exchange

WORDS = ("The", " sandbox", " holds", " no", " key", ".")
GAP = 0.15
"""Seconds between two events."""

_JSON = {"Content-Type": "application/json"}


def anthropic_events() -> Iterator[bytes]:
    """The events of `POST /v1/messages` with `"stream": true`."""
    message = {"id": "msg_lab", "type": "message", "role": "assistant", "content": [], "model": "lab-model"}
    yield _event({"type": "message_start", "message": message})
    yield _event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    for word in WORDS:
        yield _event(
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}}
        )
    yield _event({"type": "content_block_stop", "index": 0})
    yield _event(
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 6}}
    )
    yield _event({"type": "message_stop"})


def openai_events() -> Iterator[bytes]:
    """The events of `POST /v1/chat/completions` with `"stream": true`."""
    for word in WORDS:
        choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
        chunk = {"id": "chatcmpl-lab", "object": "chat.completion.chunk", "choices": [choice]}
        yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


async def messages(exchange: Exchange) -> None:
    """Answers as Anthropic's Messages API."""
    body = await exchange.body()
    if _streams(body):
        await _stream(exchange, anthropic_events())
        return
    answer = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "hello"}]}
    await exchange.reply(200, json.dumps({**answer, "input_bytes": len(body)}).encode(), _JSON)


async def completions(exchange: Exchange) -> None:
    """Answers as OpenAI's Chat Completions API."""
    if exchange.seen.path != "/v1/chat/completions":
        await exchange.reply(404, b'{"error": {"message": "no such path"}}', _JSON)
    elif _streams(await exchange.body()):
        await _stream(exchange, openai_events())
    else:
        message = {"role": "assistant", "content": "hello"}
        answer = {"object": "chat.completion", "choices": [{"index": 0, "message": message}]}
        await exchange.reply(200, json.dumps(answer).encode(), _JSON)


def _streams(body: bytes) -> bool:
    try:
        asked = json.loads(body or b"{}")
    except ValueError:
        return False
    return isinstance(asked, dict) and asked.get("stream") is True


async def _stream(exchange: Exchange, events: Iterator[bytes]) -> None:
    await exchange.start(
        200, {"Content-Type": "text/event-stream; charset=utf-8"}, framing="Transfer-Encoding: chunked"
    )
    for number, event in enumerate(events):
        if number:
            await asyncio.sleep(GAP)
        await exchange.send(b"%x\r\n%b\r\n" % (len(event), event))
    await exchange.send(b"0\r\n\r\n")


def _event(data: dict[str, object]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()
