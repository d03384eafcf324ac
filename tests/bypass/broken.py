"""egressd with parts that can be made to fail while it runs: `broken.py SWITCH run …` is `egressd run …` otherwise.

A part of control fails while the file SWITCH holds its name; a part of a worker, which sees no files, from the query for a name
with the label `drill-NN` on, NN being its number, until the query for `drill-99`. To fail is to raise when called.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_DOOR, _INSPECTOR = "egressd.gate.door.", "egressd.gate.inspector."
WORKER: tuple[str, ...] = (
    _DOOR + "entering:original_destination",
    _DOOR + "hearing:first_bytes",
    "egressd.gate.door.entrance:parse_proxy_head",
    _DOOR + "hearing:parse_name",
    _DOOR + "passage:accept_tls",
    _DOOR + "hearing:accept_plain",
    _DOOR + "passage:inspect",
    _DOOR + "hearing:inspect",
    _DOOR + "passage:open_early",
    "egressd.gate.door.judgement:decide",
    "egressd.gate.permission:permit_place",
    "egressd.gate.door.splice:Splice.run",
    "egressd.gate.tls.leaves:Leaves.context_for",
    "egressd.gate.tls.leaves:Leaves.explain_context_for",
    "egressd.gate.dns.gatekeeper:plan",
    "egressd.gate.dns.server:decide",
    "egressd.gate.dns.synthetic:SyntheticNames.reserve",
    "egressd.gate.dns.synthetic:SyntheticNames.confirm",
    "egressd.gate.dns.synthetic:SyntheticNames.name_of",
    "egressd.gate.dns.ledger:Ledger.record",
    "egressd.gate.dns.ledger:Ledger.commit",
    "egressd.gate.dns.upstream:Resolver.resolve",
    "egressd.gate.dialer:Dialer._judge",
    "egressd.gate.dialer:race",
    "egressd.gate.limits:Budget.connection",
    "egressd.gate.limits:Budget.release",
    "egressd.gate.limits:Budget.account",
    "egressd.gate.limits:Account.request",
    "egressd.gate.floods:Folding.put",
    "egressd.gate.floods:Folding.commit",
    "egressd.gate.denials:Remembering.put",
    "egressd.gate.reporting:ChannelRecorder.put",
    "egressd.gate.reporting:ChannelRecorder.commit",
    "egressd.gate.reporting:ChannelRecorder.flush",
    "egressd.gate.reporting:ChannelRecorder.written",
    "egressd.gate.packet_log:parse_nflog",
    "egressd.journal.record:Record.as_dict",
    _INSPECTOR + "addon:PolicyAddon.requestheaders",
    _INSPECTOR + "addon:PolicyAddon.responseheaders",
    _INSPECTOR + "addon:bind",
    _INSPECTOR + "addon:decide",
    _INSPECTOR + "addon:onward_request",
    _INSPECTOR + "addon:onward_response",
    _INSPECTOR + "exchange:Exchange.decision_record",
    _INSPECTOR + "exchange:Exchange.commit",
    _INSPECTOR + "exchange:Exchange.charge",
    _INSPECTOR + "exchange:Exchange.end",
    _INSPECTOR + "exchange:Exchange.deny",
    _INSPECTOR + "exchange:refuse_http",
    _INSPECTOR + "uplink:open_upstream",
    _INSPECTOR + "uplink:leads_to",
    _INSPECTOR + "engine:Engine.on_data",
    _INSPECTOR + "http2.engine:Http2Engine.on_data",
    _INSPECTOR + "http2.frames:FrameReader.next",
    _INSPECTOR + "http2.requests:Requests.head",
    _INSPECTOR + "http2.requests:Requests._admit",
    _INSPECTOR + "http2.responses:Responses.head",
    _INSPECTOR + "http2.lane:Course.send",
    _INSPECTOR + "http1.sandbox_side:parse_request_head",
    _INSPECTOR + "http1.origin_side:parse_response_head",
    _INSPECTOR + "http1.side:reader_of",
    _INSPECTOR + "conduit:Conduit.to_upstream",
    _INSPECTOR + "conduit:Conduit.to_client",
    _INSPECTOR + "upstream:connect_tls",
)
"""Parts of a worker, as module:attribute where it is used; the number is the place in this list."""
CONTROL: tuple[str, ...] = (
    "egressd.journal.writer:Journal.append",
    "egressd.journal.file_sink:FileSink.write",
    "egressd.journal.ledger:Ledger.feed",
    "egressd.control.sandboxes:SandboxState.keep_pair",
    "egressd.control.sandboxes:SandboxState.policy_payload",
    "egressd.control.worker:issue_worker_intermediate",
    "egressd.control.worker:local_addresses",
    "egressd.control.worker:sealed",
    "egressd.control.rulebook:load_source",
)
_NONE = 99
_START = f"import runpy, sys; sys.argv[:1] = [{__file__!r}, '--worker']; runpy.run_path({__file__!r}, run_name='__main__')"
"""What a worker of breakable parts is started with instead."""
_LABEL = re.compile(rb"\x08drill-(\d\d)")
_failing = ""
_told: set[str] = set()


def find(part: str) -> tuple[Any, str, Callable[..., Any]]:
    """Where a part hangs, its name there, and itself; raises where there is no such part."""
    module, _, path = part.partition(":")
    holder: Any = importlib.import_module(module)
    *way, name = path.split(".")
    for step in way:
        holder = getattr(holder, step)
    return holder, name, getattr(holder, name)


def breakable(part: str, failing: Callable[[], str]) -> None:
    """Make a part raise while `failing` names it; says once on stderr that it did."""
    holder, name, real = find(part)

    def check() -> None:
        if failing() == part:
            if part not in _told:
                _told.add(part)
                sys.stderr.write(f"drill: {part} failed\n")
                sys.stderr.flush()
            raise RuntimeError("drill")

    @functools.wraps(real)
    async def later(*arguments: Any, **named: Any) -> Any:
        check()
        return await real(*arguments, **named)

    @functools.wraps(real)
    def now(*arguments: Any, **named: Any) -> Any:
        check()
        return real(*arguments, **named)

    setattr(holder, name, later if inspect.iscoroutinefunction(real) else now)


def worker(descriptor: str) -> None:
    """Be a worker with breakable parts."""
    from egressd.gate import worker as real
    from egressd.gate.dns.server import DnsServer

    for part in WORKER:
        breakable(part, lambda: _failing)
    answer = DnsServer._answer

    def listening(self: DnsServer, message: bytes, *rest: Any) -> Any:
        global _failing
        if label := _LABEL.search(message):
            number = int(label.group(1))
            _failing = "" if number == _NONE else WORKER[number]
            return b"\0" * 12
        return answer(self, message, *rest)

    DnsServer._answer = listening  # type: ignore[method-assign,assignment] # the drill's own way in
    real.main([descriptor])


def control(switch: Path, arguments: list[str]) -> None:
    """Be `egressd` with breakable parts, and workers like that."""
    from egressd.cli.main import main
    from egressd.control import process

    def failing() -> str:
        try:
            return switch.read_text().strip()
        except OSError:
            return ""

    for part in CONTROL:
        breakable(part, failing)
    process._START = _START  # type: ignore[misc] # the drill's own way in
    sys.argv = ["egressd", *arguments]
    main()


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        worker(sys.argv[2])
    else:
        control(Path(sys.argv[1]), sys.argv[2:])
