"""HTTP/1 connections for mitmproxy's layers: the same states, events and commands as its own, with our parsers in them.

Different from mitmproxy's `Http1Server` and `Http1Client`, whose places `sandbox_side` and `origin_side` take: heads and
bodies are read by `head` and `body`; interim responses and trailers pass; whether a connection goes on is decided by the heads
as they arrived, not by the fields that are left after an addon; and whatever goes wrong is reported to the engine as a command
(`Rejected`, `Failed`, …) instead of as a page.
"""
