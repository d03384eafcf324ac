"""What `egressd verify` expects of a sandbox by its wiring: which probes can be made there, and what is true of its network.

A container that egressd did not make has the files, processes and system calls that its maker gave it: of those nothing is tried.
Of its power what counts is what could undo the wiring.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from egressd.cli.verify_outside import (
    HOST_FILES,
    HOST_IDENTITY,
    NOTHING_LEFT,
    RECORDS,
    WIRING_RULES,
    OutsideProbe,
)
from egressd.verify import inside  # noqa: F401 -- whose import fills PROBES
from egressd.verify.probe import PROBES, Probe, in_order

WIRINGS: Final = ("namespace", "attached", "gateway", "explicit", "sidecar")
_POWER: Final = frozenset({
    "capabilities", "no-new-privileges", "other-ids", "raw-sockets", "packet-sockets", "network-administration", "packet-rules",
})  # fmt: skip
_PARTS: Final = frozenset({"works", "network", "names"})
_BEYOND: Final = frozenset({"host-services", "neighbour-services"})
_LEFT_OUT: Final[Mapping[str, frozenset[str]]] = {
    "attached": frozenset(),
    # Its device and its route lead to egressd, and what comes of them is what the others try; neither proxy nor port is there.
    "gateway": frozenset({"network-devices", "routes", "metadata-spellings", "port-theft"}),
    # The network is shared with the neighbours, and with nobody else; egressd's ports are elsewhere.
    "explicit": frozenset({"network-devices", "multicast", "neighbour-services", "port-theft"}),
    # It has egressd's own device and routes, and whatever listens in the pod is for everybody there.
    "sidecar": frozenset({"network-devices", "routes", "host-services", "neighbour-services"}),
}


def probes_of(wiring: str) -> list[Probe]:
    """The probes inside that can be made under a wiring, in the order in which they are made."""
    if wiring == "namespace":
        return in_order()
    left_out = _LEFT_OUT[wiring]
    return [
        probe
        for probe in in_order()
        if (probe.part in _PARTS or probe.name in _POWER | _BEYOND) and probe.name not in left_out
    ]


def outside_of(wiring: str) -> list[OutsideProbe]:
    """The probes outside, but for what left."""
    if wiring == "namespace":
        return [HOST_FILES, HOST_IDENTITY, RECORDS]
    rules = [] if wiring == "explicit" else [WIRING_RULES]
    return [HOST_FILES, *([HOST_IDENTITY] if wiring == "sidecar" else []), RECORDS, *rules]


def layers_of(wiring: str, *, names: bool) -> frozenset[str]:
    """Attempts of which layers must be in the journal; `names` says whether egressd answers for names in the explicit wiring."""
    if wiring == "explicit":
        return frozenset({"connection", *(["dns"] if names else [])})
    return frozenset({"dns", "connection", "packet"})


def names_of(wiring: str) -> list[str]:
    """The names of all of them, in the order in which they are told."""
    return [
        *(probe.name for probe in probes_of(wiring)),
        *(probe.name for probe in outside_of(wiring)),
        NOTHING_LEFT.name,
    ]


assert _POWER | _BEYOND | frozenset().union(*_LEFT_OUT.values()) <= PROBES.keys()
