"""How a refusal looks to an SSH client: a disconnect with a sentence, which it prints. Pure.

`git clone git@…` is what people and agents type first; a bare reset would send them looking for a broken network.
"""

from __future__ import annotations

import struct

_VERSION = b"SSH-2.0-egressd\r\n"
_DISCONNECT = 1  # SSH_MSG_DISCONNECT, RFC 4253 section 11.1
_HOST_NOT_ALLOWED = 1  # SSH_DISCONNECT_HOST_NOT_ALLOWED_TO_CONNECT
_BLOCK, _LEAST_PADDING = 8, 4  # RFC 4253 section 6, before any cipher is agreed
_MAX_TEXT = 1024


def speaks_ssh(data: bytes) -> bool:
    """Say whether a connection began with an SSH client's version (RFC 4253 section 4.2)."""
    return data.startswith(b"SSH-")


def refuse_ssh(sentence: str) -> bytes:
    """Return all that a server says to refuse: its version, and one packet that needs no key exchange."""
    text = sentence.encode("ascii", "replace")[:_MAX_TEXT]
    payload = struct.pack("!BII", _DISCONNECT, _HOST_NOT_ALLOWED, len(text)) + text + struct.pack("!I", 0)
    padding = _BLOCK - (5 + len(payload)) % _BLOCK
    padding += _BLOCK if padding < _LEAST_PADDING else 0
    return _VERSION + struct.pack("!IB", 1 + len(payload) + padding, padding) + payload + bytes(padding)
