"""What no single key of the configuration shows: values that need a parser of their own, and keys that need each other."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Final

from egressd.control.config_file import (
    ApiSection,
    ConfigFile,
    ExplicitSection,
    ProxySection,
    ServeSection,
    WebhookSection,
)
from egressd.gate.dns.servers import parse_upstream
from egressd.gate.via import parse_proxy_url
from egressd.journal.outlets import parse_address
from egressd.rulefiles.problems import Code, Findings, Place, quoted
from egressd.wiring.explicit import ExplicitSpec
from egressd.wiring.gateway_rules import checked_interface


def check(model: ConfigFile, name: str, findings: Findings) -> None:
    """Add a problem for each thing that does not fit together; `name` stands for where it was said."""
    _check_dns_upstream(model.dns.upstream, name, findings)
    _check_proxy(model.upstream.proxy, name, findings)
    _check_explicit(model, name, findings)
    _check_gateway(model.gateway.interfaces, name, findings)
    _check_serve(model.serve, model.explicit, name, findings)
    _check_sinks(model, name, findings)
    _check_webhook(model.approvals.webhook, name, findings)


def parse_listen(text: str) -> tuple[IPv4Address | IPv6Address, int]:
    """Return the address and port of `ADDRESS:PORT`, an IPv6 address in brackets; raises ValueError."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    address = ip_address(host[1:-1] if bracketed else host)
    if not colon or bracketed != (address.version == 6):
        raise ValueError("ADDRESS:PORT is wanted, an IPv6 address in brackets")
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65_536):
        raise ValueError("a port lies between 1 and 65535")
    return address, int(port)


def explicit_spec(section: ExplicitSection) -> ExplicitSpec | None:
    """Return what is listened on for sandboxes of the explicit wiring, None where there are none; raises ValueError."""
    if not section.addresses:
        if section != ExplicitSection():
            raise ValueError("there are no addresses")
        return None
    direct = {80: section.direct_80, 443: section.direct_443}
    return ExplicitSpec(
        tuple(section.addresses),
        http=section.http or None,
        socks=section.socks or None,
        dns=section.dns or None,
        direct={meant: port for meant, port in direct.items() if port},
        hops=tuple(section.hops),
    )


def _check_dns_upstream(text: str, name: str, findings: Findings) -> None:
    if text == "system":  # resolv.conf is the worker's to read
        return
    try:
        parse_upstream(text)
    except ValueError as error:
        findings.add(name, Place(), Code.BAD_VALUE, f"dns.upstream: {quoted(text)}: {error}")


def _check_sinks(model: ConfigFile, name: str, findings: Findings) -> None:
    address = model.sinks.syslog.address
    if address:
        try:
            parse_address(address)
        except ValueError as error:
            findings.add(name, Place(), Code.BAD_VALUE, f"sinks.syslog.address: {quoted(address)}: {error}")
    if model.sinks.stdout != "off" and model.journal == "-":
        findings.add(name, Place(), Code.BAD_VALUE, "sinks.stdout: the journal itself is on standard output")


def _check_proxy(proxy: ProxySection, name: str, findings: Findings) -> None:
    if proxy.url is None:
        if proxy != ProxySection():
            findings.add(name, Place(), Code.BAD_VALUE, "upstream.proxy: there is no url")
        return
    try:
        parse_proxy_url(proxy.url, proxy.connect)
    except ValueError as error:
        findings.add(name, Place(), Code.BAD_VALUE, f"upstream.proxy.url: {error}")


def _check_explicit(model: ConfigFile, name: str, findings: Findings) -> None:
    try:
        spec = explicit_spec(model.explicit)
    except ValueError as error:
        findings.add(name, Place(), Code.BAD_VALUE, f"explicit: {error}")
        return
    named = model.explicit.host or not any(
        ip_address(each).is_unspecified for each in model.explicit.addresses
    )
    if not named:
        said = "explicit: addresses is for all addresses, so host must say what sandboxes call egressd"
        findings.add(name, Place(), Code.BAD_VALUE, said)
    if spec is not None and (spec.dns is not None or spec.direct) and model.dns.answers != "self":
        findings.add(
            name,
            Place(),
            Code.BAD_VALUE,
            "explicit: dns, direct_80 and direct_443 go with `dns: {answers: self}`",
        )


def _check_gateway(interfaces: list[str], name: str, findings: Findings) -> None:
    if len(set(interfaces)) != len(interfaces):
        findings.add(name, Place(), Code.BAD_VALUE, "gateway.interfaces: an interface stands there twice")
    for interface in interfaces:
        try:
            checked_interface(interface)
        except ValueError as error:
            findings.add(name, Place(), Code.BAD_VALUE, f"gateway.interfaces: {error}")


def _check_webhook(section: WebhookSection, name: str, findings: Findings) -> None:
    if section == WebhookSection():
        return
    problems = []
    if (section.url is None) == (section.url_file is None):
        problems.append("approvals.webhook: url or url_file says where to, one of the two")
    if section.secret.file is None:
        problems.append("approvals.webhook: secret.file is needed: unsigned, anybody could say the same")
    for problem in problems:
        findings.add(name, Place(), Code.BAD_VALUE, problem)


_WHO_ASKS: Final = (
    "serve.api: a TCP client shows a certificate (client_ca) or a token (token.file); neither is set"
)


def _check_serve(serve: ServeSection, explicit: ExplicitSection, name: str, findings: Findings) -> None:
    for key, text in (("serve.health", serve.health), ("serve.api.listen", serve.api.listen)):
        try:
            if text:
                parse_listen(text)
        except ValueError as error:
            findings.add(name, Place(), Code.BAD_VALUE, f"{key}: {quoted(text)}: {error}")
            return
    for problem in _api_problems(serve.api, explicit):
        findings.add(name, Place(), Code.BAD_VALUE, problem)


def _api_problems(api: ApiSection, explicit: ExplicitSection) -> list[str]:
    if not api.listen:
        return [] if api == ApiSection() else ["serve.api: there is no listen"]
    problems = []
    if api.certificate is None or api.key is None:
        problems.append("serve.api: certificate and key are needed: without TLS nothing is told over TCP")
    if api.client_ca is None and api.token.file is None:
        problems.append(_WHO_ASKS)
    address, _ = parse_listen(api.listen)
    ours = [ip_address(text) for text in explicit.addresses]
    if ours and (address.is_unspecified or address in ours or any(each.is_unspecified for each in ours)):
        problems.append(
            "serve.api.listen: sandboxes reach egressd at explicit.addresses, so the API must be at another address, "
            "and both must be named"
        )
    return problems
