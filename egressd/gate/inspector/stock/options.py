"""The options of mitmproxy under which the policy holds, and the end of a process in which it does not."""

# mypy: allow-untyped-calls
# (mitmproxy's options are not annotated throughout)

from __future__ import annotations

import os
import sys
from typing import Any, Final

from mitmproxy.options import Options
from mitmproxy.proxy import mode_specs

SET: Final[dict[str, Any]] = {
    "connection_strategy": "lazy",  # eager connects before anything was judged
    "http2": False,  # several requests at a time on one connection: a dial could not be told whose it is
    "http3": False,
    "onboarding": False,
    "rawtcp": False,
}
"""What mitmproxy is set to when this file is loaded."""

GUARDED: Final[dict[str, Any]] = SET | {
    # what opens, skips or rewrites a request after it was judged
    **dict.fromkeys(("ignore_hosts", "allow_hosts", "tcp_hosts", "udp_hosts"), ()),
    **dict.fromkeys(("map_remote", "map_local", "modify_headers", "modify_body"), ()),
    **dict.fromkeys(("client_replay", "server_replay"), ()),
    **dict.fromkeys(("client_certs", "upstream_auth", "stickyauth", "stickycookie"), None),
    "keep_host_header": False,
    # what believes anybody, or everybody
    "ssl_insecure": False,
    "validate_inbound_headers": True,
    "emudhra": False,
    "emudhra_old": False,
    # streaming before the addon has spoken
    "stream_large_bodies": None,
}
"""What mitmproxy must be set to, or nothing is carried. config.yaml and `--set` can say otherwise; then it does not start."""

_MODES: Final = (mode_specs.RegularMode, mode_specs.Socks5Mode)


def end_process(why: str) -> None:
    """End at once: every moment without the policy is an open proxy's."""
    print(f"egressd: {why}, so mitmproxy ends", file=sys.stderr, flush=True)  # noqa: T201 # the log may be off
    os._exit(1)


def unguarded(options: Options) -> str | None:
    """Return the first guarded option that is not as it must be, None when all are."""
    for name, wanted in GUARDED.items():
        value = getattr(options, name)
        if (tuple(value) if wanted == () else value) != wanted:
            return f"{name}={value!r}; it must be {wanted!r}"
    for text in options.mode:
        if not isinstance(mode_specs.ProxyMode.parse(text), _MODES):
            return f"mode={text}; only regular and socks5 say which name a connection is for"
    return None
