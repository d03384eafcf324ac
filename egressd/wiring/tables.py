"""The packet rules in force in this network namespace: read, put in place, read again, taken away."""

import functools
from collections.abc import Callable, Mapping
from typing import Final

from egressd.wiring.errors import WiringError
from egressd.wiring.overlay import Overlay, applied, missing, remnants, undone
from egressd.wiring.programs import Program
from egressd.wiring.ruleset import Family

FAMILIES: Final[tuple[Family, ...]] = (4, 6)
_TOOLS: Final[dict[Family, str]] = {4: "iptables", 6: "ip6tables"}
_WAIT_SECONDS: Final = 5
"""How long others may hold the lock of the older kind of tables (/run/xtables.lock)."""
_ATTEMPTS: Final = 3
"""A text is made from what was read; it fails where somebody has changed that meanwhile, and is made again."""

_HINT: Final = (
    "needs CAP_NET_ADMIN in this network namespace and iptables (Debian: apt-get install iptables); what the kernel lacks "
    "is loaded on the host: modprobe -a nf_tables nft_compat nf_nat nf_conntrack xt_conntrack xt_owner xt_addrtype xt_REDIRECT "
    "xt_NFLOG xt_mac xt_physdev ipt_rpfilter ipt_REJECT ip6t_REJECT nfnetlink_log"
)


def read(family: Family, *, counters: bool = False) -> str:
    """What iptables-save prints now; WiringError where it cannot be read."""
    return Program([f"{_TOOLS[family]}-save", *(["-c"] if counters else [])], hint=_HINT).output()


def put(overlays: Mapping[Family, Overlay]) -> None:
    """Put overlays in place and read them back: nothing is changed where all is there. Raises WiringError otherwise.

    What is in place by then stays: it refuses more than it lets through.
    """
    for family, overlay in overlays.items():
        _change(family, functools.partial(applied, overlay))
    if problems := differences(overlays):
        raise WiringError("iptables-save", "; ".join(problems), _HINT)


def take_away(overlays: Mapping[Family, Overlay]) -> None:
    """Take away what is there of overlays; raises WiringError where something is left."""
    for family, overlay in overlays.items():
        _change(family, functools.partial(undone, overlay))
        if left := remnants(overlay, read(family)):
            raise WiringError("iptables-save", f"IPv{family}: still there: {', '.join(left)}", _HINT)


def differences(overlays: Mapping[Family, Overlay]) -> list[str]:
    """What of overlays is missing or altered, read back now."""
    return [
        f"IPv{family}: {problem}"
        for family, overlay in overlays.items()
        for problem in missing(overlay, read(family))
    ]


def restore(family: Family, text: str) -> None:
    """Apply a text beside what is there, each of its tables whole or not at all; raises WiringError."""
    Program(
        [f"{_TOOLS[family]}-restore", "--noflush", "--wait", str(_WAIT_SECONDS)], text, hint=_HINT
    ).output()


def _change(family: Family, text_for: Callable[[str], str]) -> None:
    for attempt in range(1, _ATTEMPTS + 1):
        text = text_for(read(family))
        if not text:
            return
        try:
            restore(family, text)
        except WiringError:
            if attempt == _ATTEMPTS:
                raise
        else:
            return
