"""Every fuzz target, by name; the most exposed parsers first."""

from __future__ import annotations

from tests.fuzz import (
    addresses,
    arrivals,
    bodies,
    channel,
    credentials,
    dns_queries,
    dns_replies,
    heads,
    hellos,
    hops,
    hosts,
    http2,
    journal,
    packets,
    proxy_heads,
    proxy_replies,
    proxy_tokens,
    requests,
    rules,
    socks,
    websockets,
)
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        hellos.TARGET,
        dns_queries.TARGET,
        heads.REQUESTS,
        http2.LINK,
        hosts.TARGET,
        rules.TARGET,
        credentials.TARGET,
        http2.ENGINE,
        heads.RESPONSES,
        bodies.TARGET,
        dns_replies.TARGET,
        proxy_heads.TARGET,
        socks.TARGET,
        hops.TARGET,
        proxy_tokens.TARGET,
        proxy_replies.TARGET,
        arrivals.TARGET,
        requests.TARGET,
        websockets.TARGET,
        addresses.TARGET,
        packets.TARGET,
        journal.TARGET,
        channel.TARGET,
    )
}
