"""A site's own inspection: addons that are asked after the policy has allowed a request, and may refuse it.

They are trusted code (`inspect.addons` names their files) in mitmproxy's form: `requestheaders(flow)` and
`responseheaders(flow)`, plain functions that return at once. A request is refused by setting `flow.response`; what is sent
is egressd's own refusal. Fields may be changed, but nothing that was judged or that frames the message: whoever changes
that, or raises, has the request refused (law 1). Bodies pass by unseen.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from mitmproxy import http

_FIXED: Final = frozenset(
    {
        *("host", "connection", "upgrade", "expect", "te", "trailer", "keep-alive", "http2-settings"),
        *("content-length", "transfer-encoding", "sec-websocket-key", "sec-websocket-version"),
    }
)
"""Fields that say where a message goes and where it ends."""


class BadAddon(Exception):
    """A file that is no addon, and why."""


def load_addons(paths: Iterable[str]) -> tuple[Any, ...]:
    """Return the addons of these Python files, in order: their `addons`, or else the module itself. Raises BadAddon."""
    found: list[Any] = []
    for number, path in enumerate(paths):
        spec = importlib.util.spec_from_file_location(f"egressd_site_{number}_{Path(path).stem}", path)
        if spec is None or spec.loader is None:
            raise BadAddon(f"{path}: not a Python file")
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise BadAddon(f"{path}: {type(error).__name__}: {error}") from error
        addons = list(getattr(module, "addons", [module]))
        for addon in addons:
            _check(path, addon)
        found += addons
    return tuple(found)


def _check(path: str, addon: Any) -> None:
    hooks = [getattr(addon, name, None) for name in ("requestheaders", "responseheaders")]
    if not any(callable(hook) for hook in hooks):
        raise BadAddon(f"{path}: neither requestheaders nor responseheaders")
    if any(inspect.iscoroutinefunction(hook) for hook in hooks):
        raise BadAddon(f"{path}: its hooks must be plain functions, not coroutines")


def ask(addons: Sequence[Any], flow: http.HTTPFlow) -> str | None:
    """Return who refuses a request that the policy allowed, None when nobody does.

    Raises what an addon raises, and RuntimeError when one changed what it may not. `flow.response` is as it was afterwards.
    """
    standing, judged = flow.response, _request(flow.request)
    for addon in addons:
        hook = getattr(addon, "requestheaders", None)
        if hook is None:
            continue
        hook(flow)
        if flow.response is not standing or flow.error is not None:
            flow.response, flow.error = standing, None
            return _name(addon)
        if _request(flow.request) != judged:
            raise RuntimeError(f"{_name(addon)} changed what was judged of a request")
    return None


def show(addons: Sequence[Any], flow: http.HTTPFlow) -> None:
    """Show each addon a response; raises as `ask` does."""
    response = flow.response
    assert response is not None
    framed = _response(response)
    for addon in addons:
        hook = getattr(addon, "responseheaders", None)
        if hook is not None:
            hook(flow)
            if flow.response is not response or flow.error is not None or _response(response) != framed:
                raise RuntimeError(f"{_name(addon)} changed what a response is")


def _name(addon: Any) -> str:
    return str(getattr(addon, "name", None) or getattr(addon, "__name__", None) or type(addon).__name__)[:64]


def _request(request: http.Request) -> tuple[Any, ...]:
    data = request.data
    where = (data.method, data.path, data.authority, data.scheme, data.host, data.port, data.http_version)
    return *where, _fixed(request)


def _response(response: http.Response) -> tuple[Any, ...]:
    return response.data.status_code, response.data.http_version, _fixed(response)


def _fixed(message: http.Message) -> tuple[tuple[bytes, bytes], ...]:
    return tuple(field for field in message.headers.fields if field[0].decode("latin-1").lower() in _FIXED)
