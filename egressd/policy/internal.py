"""egressd.internal: the one name that egressd answers itself, inside each sandbox, and what of it is answered.

No rule can name it (it is floor for them), so that what is said here holds under every profile.
"""

from __future__ import annotations

from typing import Final

from egressd.policy.attempt import Attempt, Decision, DnsQuestion, Name
from egressd.policy.reasons import Reason

NAME: Final[Name] = ("egressd", "internal")

ACCESS: Final = "/access"
"""Where a sandbox sees how its requests for access stand, and makes one (POST)."""
PAGES: Final = ("/", "/whoami", "/policy", "/denials", ACCESS, "/ca.crt")

_PORTS: Final = {"http": 80, "https": 443}
_ALLOWED: Final = Decision("allow", Reason.INTERNAL_PAGE)


def judge(attempt: Attempt) -> Decision | None:
    """Return the decision on an attempt at egressd's own name; None for any other host, which the rules judge."""
    if isinstance(attempt, DnsQuestion):
        return _ALLOWED if attempt.name == NAME else None
    if attempt.host != NAME:
        return None
    if _PORTS.get(attempt.scheme) == attempt.port:
        return _ALLOWED
    usual = attempt.port in _PORTS.values()
    return Decision("deny", Reason.SCHEME_NOT_ALLOWED if usual else Reason.PORT_NOT_ALLOWED)


def unanswered(method: str, target: str, *, body: bool = False, upgrade: bool = False) -> Reason | None:
    """Return why a request for one of the pages is not answered, None when it is; `target` is in origin form."""
    if method not in ("GET", "HEAD") and (method, target.partition("?")[0]) != ("POST", ACCESS):
        return Reason.METHOD_NOT_ALLOWED
    if body or upgrade:
        return Reason.BODY_NOT_ALLOWED if body else Reason.UPGRADE_NOT_ALLOWED
    return None if target.partition("?")[0] in PAGES else Reason.PATH_NOT_ALLOWED
