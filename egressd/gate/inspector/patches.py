"""What is replaced inside mitmproxy, each with its reason; everything else is subclassed. A test keeps each fact.

Nothing here is a matter of speed. `apply` is idempotent, and raises at start when a name to replace has gone: a patch that
silently patches nothing is how the next version of mitmproxy would get its old habits back.
"""

from __future__ import annotations

from mitmproxy.proxy.layers.http import _base, _http1, _http2, _http3


def bare_error_page(_status_code: int, _message: str = "") -> bytes:
    """An error page that says nothing: mitmproxy's own repeats resolved addresses and errno texts to the client.

    No path leads to it on HTTP/1 (`SandboxSide` reports errors to the engine); it stands in for HTTP/2 and HTTP/3 and for what a
    later version may add.
    """
    return b""


def bare_error_response(_status_code: int, _message: str = "") -> bytes:
    """The whole response of the same kind, without mitmproxy's `Server` field."""
    return b"HTTP/1.1 502 egressd\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


_REPLACED = (
    (_base, "format_error", bare_error_page),
    (_http1, "format_error", bare_error_page),
    (_http2, "format_error", bare_error_page),
    (_http3, "format_error", bare_error_page),
    (_http1, "make_error_response", bare_error_response),
)


def apply() -> None:
    """Replace them; raises AttributeError when mitmproxy no longer has one."""
    for module, name, replacement in _REPLACED:
        getattr(module, name)
        setattr(module, name, replacement)
