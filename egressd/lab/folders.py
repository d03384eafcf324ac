"""Sites made of files: package repositories that need no server of their own."""

from __future__ import annotations

import re
from pathlib import Path

from egressd.lab.http1 import Exchange

_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{0,15})")


class FolderSite:
    """A site whose paths are the files below a folder, as they are on disk when they are asked for.

    Answers one range (RFC 9110 section 14), as apt and container tools resume with; no index pages.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    async def answer(self, exchange: Exchange) -> None:
        """Answers with the file, or 404."""
        path = (self._folder / exchange.seen.path.lstrip("/")).resolve()
        if not path.is_relative_to(self._folder) or not path.is_file():
            await exchange.reply(404, b"no such file\n", {"Content-Type": "text/plain"})
            return
        await reply_with_ranges(exchange, path.read_bytes(), {"Content-Type": "application/octet-stream"})


async def reply_with_ranges(exchange: Exchange, content: bytes, headers: dict[str, str]) -> None:
    """Sends the content or, where the request asks for one range of it, that range."""
    headers = {**headers, "Accept-Ranges": "bytes"}
    found = _RANGE.fullmatch(exchange.seen.header("range") or "")
    if found is None:
        await exchange.reply(200, content, headers)
        return
    start, last = int(found[1]), min(int(found[2] or len(content) - 1), len(content) - 1)
    if start > last:
        await exchange.reply(416, b"", {**headers, "Content-Range": f"bytes */{len(content)}"})
        return
    place = f"bytes {start}-{last}/{len(content)}"
    await exchange.reply(206, content[start : last + 1], {**headers, "Content-Range": place})
