"""Sinks: the outlets that the configuration names, each fed with every line once the journal has it."""

from __future__ import annotations

from collections.abc import Iterator

from egressd.control.config_file import SinksSection
from egressd.control.voice import say
from egressd.journal.feed import Feed, Outlet


def open_feeds(sinks: SinksSection, *, has_stdout: bool) -> list[Feed]:
    """Return a running feed for each sink; one that cannot be made is said and left out: the journal has every record.

    `has_stdout`: standard output is ours and not a command's.
    """
    return [Feed(outlet, say) for outlet in _outlets(sinks, has_stdout=has_stdout)]


def _outlets(sinks: SinksSection, *, has_stdout: bool) -> Iterator[Outlet]:
    from egressd.journal.outlets import StdoutOutlet, SyslogOutlet, parse_address

    if sinks.stdout != "off":
        if has_stdout:
            yield StdoutOutlet(sinks.stdout)
        else:
            say("sinks.stdout: standard output is the command's here, so no records go there")
    if sinks.syslog.address:
        yield SyslogOutlet(parse_address(sinks.syslog.address), sinks.syslog.format)
    if sinks.otlp != "off":
        from egressd.journal.otlp import NoTelemetry, OtlpOutlet

        try:
            yield OtlpOutlet(sinks.otlp)
        except NoTelemetry as error:
            say(f"sinks.otlp: {error}")
