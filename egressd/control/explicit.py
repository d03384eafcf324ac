"""Sandboxes of the `explicit` wiring in a daemon: one set of listeners for all, and a token for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from egressd.control.sandboxes import SandboxListener
from egressd.control.sources import ProxyToken, SharedListeners, normal_source, proxy_url
from egressd.control.supervisor import Supervisor
from egressd.control.wirings import NotWired, Order, Plain, Wired, WiringName
from egressd.wiring.explicit import ExplicitSpec, listen

_SHARE: Final = "explicit"
_HTTP: Final = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")
_SOCKS: Final = ("ALL_PROXY", "all_proxy")


class ExplicitWiring:
    """Makes nothing outside this process: what a sandbox has is a token, of which its maker alone hears."""

    name: WiringName = "explicit"

    def __init__(
        self, spec: ExplicitSpec, supervisor: Supervisor, *, host: str, answers: Literal["synthetic", "self"]
    ) -> None:
        """`host` is what sandboxes call egressd in the network that they share with it."""
        self._spec, self._supervisor = spec, supervisor
        self._host, self._answers = host, answers

    async def begin(self) -> None:
        """Listen; raises WiringError, WorkerFailed."""
        made = tuple(
            SandboxListener(each.kind, each.family, each.socket, each.port, each.hops)
            for each in listen(self._spec)
        )
        await self._supervisor.share(SharedListeners(_SHARE, made))

    def traces(self, order: Order) -> Mapping[str, str]:  # noqa: ARG002 -- as the protocol says
        """Nothing outlives this process."""
        return {}

    async def make(self, order: Order) -> Wired:
        """Give a token; raises NotWired for a source that is none."""
        source = None
        if order.source is not None:
            try:
                source = normal_source(order.source)
            except ValueError as error:
                raise NotWired(f"source: {error}", asked=True) from None
        token = ProxyToken.new()
        return Plain(
            environment=self._environment(order.id, token.text),
            token=token.digest,
            source=source,
            answers=self._answers,
        )

    async def sweep(self, traces: Mapping[str, str]) -> None:
        """There is nothing to undo."""

    async def look(self) -> list[str]:
        """There is nothing but sockets, which are this process's own."""
        return []

    async def end(self) -> None:
        """Listen no more."""
        await self._supervisor.unshare(_SHARE)

    def _environment(self, sandbox: str, token: str) -> dict[str, str]:
        env: dict[str, str] = {}
        if self._spec.http:
            env |= dict.fromkeys(_HTTP, proxy_url(sandbox, token, self._host, self._spec.http))
        if self._spec.socks:
            socks = proxy_url(sandbox, token, self._host, self._spec.socks, scheme="socks5h")
            env |= dict.fromkeys(_SOCKS, socks)
        return env
