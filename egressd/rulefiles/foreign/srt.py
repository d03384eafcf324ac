"""The settings of the sandbox runtime (`~/.srt-settings.json`), also inside of an agent's settings under `sandbox`.

`network.allowedDomains` and `network.deniedDomains` hold names, `*.name` for all below it and not itself, each with `:port` where
it is for one port only; a denial wins. What is allowed may be asked anything, on every port where none is named.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from egressd.rulefiles.foreign.allowlist import NotReadable, Permission, Section, address, host, line_of

_PORT = re.compile(r"(.*\]|[^:]*):(\d{1,5})\Z")
_SILENT = frozenset({"allowedDomains", "deniedDomains"})


def read(text: str) -> list[Section]:
    """Return the one section of a file; raises NotReadable."""
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotReadable(f"no JSON: {error}") from None
    network = _network(settings)
    section = Section("imported-srt")
    ports: dict[int | None, Permission] = {}
    for raw in _texts(network, "allowedDomains"):
        line = line_of(text, raw)
        name, port = _split(raw)
        permission = ports.setdefault(port, Permission(ports=() if port is None else (port,)))
        literal = address(name, line, section)
        if literal:
            permission.addresses[literal] = line
        elif literal is None and (found := host(name, line, section)) is not None:
            permission.hosts.setdefault(found, line)
    section.allowed = [one for one in ports.values() if one.hosts or one.addresses]
    if None in ports:
        section.note(
            line_of(text, "allowedDomains"),
            "allowedDomains",
            "an entry without a port is for every port; here for 443 and 80",
        )
    for raw in _texts(network, "deniedDomains"):
        line = line_of(text, raw, line_of(text, "deniedDomains"))
        name, port = _split(raw)
        if port is not None and name != "*":
            section.note(line, raw, "denied on one port; here on every port")
        if address(name, line, section) is not None:
            section.note(line, raw, "a denied address: what no rule allows is denied anyway")
        elif (found := host(name, line, section, permits=False)) is not None:
            section.denied.setdefault(found, line)
    for key in sorted(network.keys() - _SILENT):
        section.note(
            line_of(text, key), key, "not about hosts; sockets are `--socket`, proxies are egressd.yaml"
        )
    return [section]


def _network(settings: object) -> Mapping[str, object]:
    for keys in (("network",), ("sandbox", "network")):
        found: object = settings
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, dict):
            return found
    raise NotReadable("no `network` in it, as the settings of the sandbox runtime have")


def _texts(network: Mapping[str, object], key: str) -> list[str]:
    found = network.get(key, [])
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise NotReadable(f"network.{key} is no list of texts")
    return found


def _split(raw: str) -> tuple[str, int | None]:
    match = _PORT.fullmatch(raw.strip())
    if match is None or not 1 <= int(match[2]) <= 65535:
        return raw.strip(), None
    return match[1], int(match[2])
