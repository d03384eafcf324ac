"""How a daemon follows its authority on disk: what begins trusts a new one before that signs for anybody.

A rotation is seen at a look, and what sandboxes are shown holds both certificates from then on. At the next look, when whoever
was shown less has begun, the new authority signs for what begins then. Sandboxes that run trust what they were shown and
notice nothing. No look ends anything: an authority that cannot be read is complained of, and the one before serves on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from egressd.control.ca import Authority, CaPaths, load
from egressd.control.ca_files import CaError
from egressd.control.trust import Trust, TrustError, build_trust
from egressd.control.voice import say

LOOK: Final = 60.0
"""Seconds between two looks: longer than a start takes."""


class Succession:
    """The authority that a daemon goes by. `show` hears what sandboxes are shown next, `sign` which authority signs next."""

    def __init__(
        self,
        paths: CaPaths,
        authority: Authority,
        show: Callable[[Trust], None],
        sign: Callable[[Authority], None],
    ) -> None:
        """`authority` is what signs and is shown by now."""
        self._paths = paths
        self._show, self._sign = show, sign
        self._signing = authority.fingerprint
        self._shown = authority.trusted_pem
        self._told = ""

    def look(self, now: float) -> None:
        """See what is there at `now` (Unix seconds), and go by it; never raises."""
        try:
            authority = load(self._paths, now)
            if authority.trusted_pem != self._shown:
                self._show(build_trust(self._paths.trust, authority.trusted_pem))
                self._shown = authority.trusted_pem
            elif authority.fingerprint != self._signing:
                self._sign(authority)
                self._signing = authority.fingerprint
                say(
                    f"sandboxes that begin now trust the authority {authority.fingerprint[:16]}…, which signs for them"
                )
        except (CaError, TrustError, OSError) as error:
            if str(error) != self._told:
                self._told = str(error)
                say(f"the authority cannot be looked at, the one in use stays: {error}")
        else:
            self._told = ""
