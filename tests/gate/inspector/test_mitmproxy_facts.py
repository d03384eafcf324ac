"""Facts about the pinned mitmproxy that the engine leans on, or that it closes: read these again when the pin moves."""

from __future__ import annotations

import inspect as introspect
import re
import subprocess
import sys
from importlib.metadata import requires, version

import pytest
from mitmproxy import http
from mitmproxy.net.http.http1.read import read_request_head
from mitmproxy.proxy.layers import http as http_layer
from mitmproxy.proxy.layers import websocket
from mitmproxy.proxy.layers.http import _http1, _http2, _http3, _upstream_proxy

from egressd.gate.inspector import patches, warm
from egressd.gate.inspector.layers import OPTIONS, Options
from egressd.gate.settings import Settings


def test_it_is_the_version_that_was_read() -> None:
    assert version("mitmproxy") == "12.3.1"
    pins = [line.replace(" ", "") for line in requires("mitmproxy") or [] if line.startswith("h11")]
    assert pins == ["h11<=0.16.0,>=0.16.0"] or pins == [
        "h11>=0.16.0,<=0.16.0"
    ]  # HeadBuffer is a ReceiveBuffer of it


def test_our_options_are_all_that_its_http_layers_read() -> None:
    read: set[str] = set()
    for module in (http_layer, _http1, _http2, _http3, _upstream_proxy, websocket):
        read |= set(re.findall(r"\boptions\.([a-z0-9_]+)", introspect.getsource(module)))
    read -= {"stream_large_bodies_"}
    assert read <= set(Options.__dataclass_fields__)
    with pytest.raises(AttributeError):
        _ = OPTIONS.anything_new  # type: ignore[attr-defined] # what is not looked at raises


def test_its_own_parser_of_heads_is_lax_which_is_why_it_sees_none() -> None:
    assert read_request_head([b"GET\t/\tHTTP/9.9", b"A: b", b" Host: evil"]).http_version == "HTTP/9.9"


def test_a_flow_with_a_response_and_a_stream_is_not_implemented_which_is_why_refusals_end_the_layer() -> None:
    assert "Can't set a response and enable streaming" in introspect.getsource(
        http_layer.HttpStream.start_request_stream
    )


def test_its_error_pages_say_nothing() -> None:
    secret = "connect to 10.0.0.5 failed"
    for module in (_http1, _http2, _http3):
        assert module.format_error(502, secret) == b""
    assert secret.encode() not in _http1.make_error_response(502, secret)
    assert b"erver" not in _http1.make_error_response(502, secret)


def test_a_patch_that_finds_nothing_to_replace_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_http1, "format_error")
    with pytest.raises(AttributeError):
        patches.apply()


def test_messages_check_their_types_which_is_left_on() -> None:
    with pytest.raises(TypeError):
        http.Response(b"HTTP/1.1", "200", b"", http.Headers(), None, None, 0.0, None)  # type: ignore[arg-type]


def python(code: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=False)


def test_it_does_not_run_without_asserts() -> None:
    done = python("import egressd.gate.inspector", "-O")
    assert done.returncode == 1
    assert "does not run with -O" in done.stderr


def test_neither_a_master_nor_its_tls_nor_its_configuration_is_loaded() -> None:
    done = python(
        "import sys, egressd.gate.inspector\n"
        "unwanted = ('mitmproxy.master', 'mitmproxy.addons.tlsconfig', 'mitmproxy.addons.proxyserver')\n"
        "print([name for name in unwanted if name in sys.modules])"
    )
    assert done.stdout.strip() == "[]"


def test_after_warming_up_an_exchange_loads_and_opens_nothing() -> None:
    done = python(
        "import sys\n"
        "from egressd.gate.inspector import warm\n"
        "warm()\n"
        "before = set(sys.modules)\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, args: event in ('open', 'import') and opened.append(args[0]))\n"
        "module = sys.modules['egressd.gate.inspector.warm']\n"
        "module.asyncio.run(module._exchange(module.Settings()))\n"
        "module.asyncio.run(module._exchange_http2(module.Settings()))\n"
        "print(sorted(set(sys.modules) - before), opened)"
    )
    assert done.stderr == ""
    assert done.stdout.strip() == "[] []"


def test_warming_up_twice_is_no_harm() -> None:
    warm(Settings())
    warm()
