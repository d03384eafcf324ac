"""A lender in the place of control: leases that a test makes, given to one connection in memory."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import SecretStr

from egressd.credentials.lease import AwsKeys, Lease, Token
from egressd.gate.connection import Services
from egressd.gate.leases import Asked, Leases
from egressd.gate.sandbox import Sandbox
from egressd.policy.credential import Attach
from egressd.policy.effective import EffectiveEntry
from tests.gate.inspector.lab import entry

SECRET = "s3cr3t-0123456789abcdef"
DUMMY = "dummy-5f1d7a0c9b3e4a62"
STRANGER = "dummy-0a1b2c3d4e5f6a7b8c9d"
KEYS = AwsKeys(
    access_key_id="AKIDREAL", secret_access_key=SecretStr(SECRET), session_token=SecretStr("t0ken")
)

BEARER = Attach(bearer=True)


def keyed(**changes: object) -> EffectiveEntry:
    """A rule whose requests go with the credential `key`."""
    values: dict[str, object] = {"id": "keyed", "schemes": ("https",), "ports": (443,), "credential": "key"}
    return entry(**(values | {"requests": ("ANY /**", "WEBSOCKET /**")} | changes))


def lease_of(attach: Attach = BEARER, **changes: Any) -> Lease:
    """A lease of the credential `key` for the sandbox of a scene."""
    values: dict[str, Any] = {
        "id": "lease-1",
        "credential": "key",
        "sandbox": "sb-1",
        "material": KEYS if attach.sigv4 is not None else Token(value=SecretStr(SECRET)),
        "attach": attach,
        "expires": time.time() + 600,
        "placeholder": DUMMY if attach.placeholder is not None else None,
    }
    return Lease(**(values | changes))


class Lender:
    """Lends what it is told to, and keeps what it was asked for."""

    def __init__(self, lease: Lease | BaseException | Callable[[], Awaitable[Lease | None]] | None) -> None:
        """`lease` is given every time; a callable gives it itself, an exception is raised."""
        self.lease = lease
        self.asked: list[Asked] = []
        self.leases = Leases(self._lend)

    async def _lend(self, asked: Asked) -> Lease | None:
        self.asked.append(asked)
        lease = self.lease
        if isinstance(lease, BaseException):
            raise lease
        return await lease() if callable(lease) else lease

    def serve(self, sandbox: Sandbox, services: Services) -> None:
        """Be the lender of a sandbox, whose placeholders are `DUMMY` where its lease has one; another sandbox has `STRANGER`."""
        services.leases = self.leases
        if isinstance(self.lease, Lease) and self.lease.placeholder is not None:
            sandbox.placeholders["key"] = self.lease.placeholder
            services.placeholders.update((self.lease.placeholder, STRANGER))
