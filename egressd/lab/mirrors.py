"""What an origin says when it says back what it was told: the request's head, in each shape in which a secret could come home."""

from __future__ import annotations

import base64
import gzip
import html
import json
import zlib
from collections.abc import Callable
from urllib.parse import quote

from egressd.lab.http1 import Exchange
from egressd.lab.sightings import SeenRequest

FURTHER = ("hex", "upper", "html", "utf16", "twice", "reversed", "error", "early", "trailers")
"""Shapes of the kind that an origin gives a text on the way, and places besides the body and the final head."""

_CHANGED: dict[str, Callable[[bytes], bytes]] = {
    "hex": lambda text: text.hex().encode(),
    "upper": bytes.upper,
    "html": lambda text: b"<pre>%s</pre>" % html.escape(text.decode()).encode(),
    "utf16": lambda text: text.decode().encode("utf-16"),
    "reversed": lambda text: text[::-1],
}

SHAPES = ("plain", "split", "events", "gzip", "deflate", "json", "base64", "url", "head", "ranges", "br")


def reflection(seen: SeenRequest, shape: str) -> tuple[dict[str, str], list[bytes]]:
    """The header fields of an answer, and the pieces of its body, each sent on its own; any other shape is `plain`."""
    lines = [f"{seen.method} {seen.target}", *(f"{name}: {value}" for name, value in seen.headers)]
    text = "\n".join([*lines, ""]).encode()
    headers = {"Content-Type": "text/plain"}
    match shape:
        case "split":
            return headers, _cut(text, 3)
        case "events":
            return {"Content-Type": "text/event-stream"}, [f"data: {line}\n\n".encode() for line in lines]
        case "gzip":
            return {**headers, "Content-Encoding": "gzip"}, _cut(gzip.compress(text), 11)
        case "deflate":
            return {**headers, "Content-Encoding": "deflate"}, _cut(zlib.compress(text), 11)
        case "json":
            return {"Content-Type": "application/json"}, [json.dumps({"head": lines}).encode()]
        case "base64":
            values = [base64.b64encode(value.encode()).decode() for _, value in seen.headers]
            return headers, [line.encode() + b"\n" for line in (*values, base64.b64encode(text).decode())]
        case "url":
            return headers, [quote(text, safe="").encode()]
        case "head":
            return {f"X-Echo-{number}": line for number, line in enumerate(lines)}, [b"see the head\n"]
        case "br":  # a coding that nobody was offered
            return {**headers, "Content-Encoding": "br"}, [text]
        case "twice":
            return {**headers, "Content-Encoding": "gzip, gzip"}, [gzip.compress(gzip.compress(text))]
        case _:
            return headers, [_CHANGED[shape](text) if shape in _CHANGED else text]


async def mirror(exchange: Exchange) -> None:
    """Answers `?as=SHAPE`, in chunks; `ranges` with the one range that was asked for."""
    async for _ in exchange.chunks():
        pass
    shape = exchange.query.get("as", "plain")
    headers, pieces = reflection(exchange.seen, shape)
    first, _, last = (exchange.seen.header("range") or "").removeprefix("bytes=").partition("-")
    if shape == "ranges" and first.isdigit() and last.isdigit():
        content = b"".join(pieces)
        part = content[int(first) : int(last) + 1]
        place = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        await exchange.reply(206, part, {**headers, "Content-Range": place})
        return
    told = "; ".join(value for _, value in exchange.seen.headers)
    if shape == "early":
        await exchange.start(103, {"Link": f"</{told}>; rel=preload"})
    await exchange.start(431 if shape == "error" else 200, headers, framing="Transfer-Encoding: chunked")
    for piece in pieces:
        await exchange.send(b"%x\r\n%b\r\n" % (len(piece), piece))
    await exchange.send(f"0\r\nX-Echo: {told}\r\n\r\n".encode() if shape == "trailers" else b"0\r\n\r\n")


def fragments(seen: SeenRequest) -> list[bytes]:
    """The frames of one WebSocket message that says the head back: short fragments, with a ping between them that says it too."""
    _, (text, *_) = reflection(seen, "plain")
    pieces = _cut(text, 7)
    frames = [bytes((0 if number else 1, len(piece))) + piece for number, piece in enumerate(pieces)]
    value = (seen.header("authorization") or "").encode()[:125]
    return [*frames, bytes((0x89, len(value))) + value, b"\x80\0"]


def _cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]
