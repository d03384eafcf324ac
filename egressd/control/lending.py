"""Which worker gets which credential for whom: control's own judgement, by its own copy of the rules.

A worker that has fallen to what it reads may ask for anything. It gets a lease only where control's rules allow the very request
it names and attach that credential to it, where the credential's own `for:` covers that request too (law 7), and where the
sandbox is one that the worker carries; to the last its caller sees. Everything is judged again once the source has answered.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from egressd.control.sandboxes import SandboxState
from egressd.control.voice import say
from egressd.credentials.broker import Broker, Unavailable
from egressd.credentials.lease import Lease
from egressd.credentials.providers.base import For
from egressd.gate.messages import Ask
from egressd.gate.policies import stepwise
from egressd.policy.attempt import RequestAttempt
from egressd.policy.compile import CompiledPolicy, compile_policy, compile_steps
from egressd.policy.credential import Credential, CredentialsFile
from egressd.policy.decide import decide
from egressd.policy.effective import EffectiveEntry, EffectivePolicy
from egressd.policy.grants import granted
from egressd.policy.names import parse_name
from egressd.policy.reasons import Reason

_PORT: Final = 443
"""A binding speaks of hosts and requests; which ports may be dialled the rules say. It is judged as if on this one."""
_COMPLAIN_AGAIN: Final = 10.0


def compile_binding(name: str, credential: Credential) -> CompiledPolicy:
    """Return what a credential's own `for:` covers, as a policy that allows that and nothing else; raises ValueError."""
    entries = tuple(
        EffectiveEntry(
            id=f"{name}-{number}",
            place="credentials.yaml",
            effect="allow",
            hosts=tuple(binding.hosts),
            requests=tuple(binding.requests),
            ports=(_PORT,),
        )
        for number, binding in enumerate(credential.for_)
    )
    return compile_policy(EffectivePolicy(profile=name, entries=entries))


class Lending:
    """Answers what workers ask for, by the credentials of one file."""

    def __init__(
        self,
        broker: Broker,
        file: CredentialsFile,
        *,
        wall: Callable[[], float] = time.time,
        tell: Callable[[str], None] = say,
    ) -> None:
        """`broker` goes by the same file; raises ValueError for a binding that could not be judged."""
        self._broker = broker
        self._wall, self._tell = wall, tell
        self._bindings = _bindings(file)
        self._compiled: dict[str, tuple[EffectivePolicy, CompiledPolicy]] = {}
        self._told = float("-inf")

    async def lend(self, sandbox: SandboxState, ask: Ask) -> Lease | None:
        """Return the lease for a request of this sandbox, None where it gets none; never raises but for cancellation."""
        try:
            if ask.sandbox != sandbox.id or not await self._covers(sandbox, ask):
                self._refused(sandbox, ask)
                return None
            for_ = For(sandbox.id, dict(sandbox.labels))
            lease = await self._broker.lease(ask.credential, for_, sandbox.placeholders.get(ask.credential))
            return lease if await self._covers(sandbox, ask) else None
        except Unavailable:  # the broker has said why
            return None
        except Exception as error:  # noqa: BLE001 -- law 1; and its text may hold what was read
            self._tell(f"credential {ask.credential}: not lent: {type(error).__name__}")
            return None

    async def end(self, sandbox_id: str) -> None:
        """Take back everything lent to a sandbox; returns within a few seconds."""
        self._compiled.pop(sandbox_id, None)
        await self._broker.revoke(sandbox_id)

    def replace(self, file: CredentialsFile) -> list[Lease]:
        """Go by another file from now on; returns the leases that it ends. Raises ValueError and changes nothing."""
        self._bindings = _bindings(file)
        return self._broker.replace(file)

    async def close(self) -> None:
        """End everything lent, and the sources."""
        await self._broker.close()

    async def _covers(self, sandbox: SandboxState, ask: Ask) -> bool:
        binding = self._bindings.get(ask.credential)
        name = parse_name(ask.host)
        if binding is None or not isinstance(name, tuple) or ask.scheme != "https":
            return False
        policy = granted(await self._policy(sandbox), sandbox.standing.grants, sandbox.id)
        now = self._wall()
        attempt = RequestAttempt(name, ask.port, "https", ask.method, ask.target, ask.upgrade)
        decision = decide(policy, attempt, now)
        if not decision.allowed or decision.reason is Reason.OBSERVED or policy.observes(now):
            return False
        if decision.entry is None or decision.entry.credential != ask.credential:
            return False
        bound = RequestAttempt(name, _PORT, "https", ask.method, ask.target, ask.upgrade)
        return decide(binding, bound, now).allowed

    async def _policy(self, sandbox: SandboxState) -> CompiledPolicy:
        """Return the sandbox's newest policy, compiled beside the loop: a large one takes a while."""
        while True:
            said = sandbox.policy
            known = self._compiled.get(sandbox.id)
            if known is not None and known[0] is said:
                return known[1]
            compiled = await stepwise(compile_steps(said))
            if said is sandbox.policy:
                self._compiled[sandbox.id] = (said, compiled)
                return compiled

    def _refused(self, sandbox: SandboxState, ask: Ask) -> None:
        now = time.monotonic()
        if now - self._told >= _COMPLAIN_AGAIN:
            self._told = now
            self._tell(
                f"credential {ask.credential} for {sandbox.id}: a worker asked for it for a request "
                "that the rules and its own `for:` do not give it"
            )


def _bindings(file: CredentialsFile) -> dict[str, CompiledPolicy]:
    return {name: compile_binding(name, said) for name, said in file.credentials.items()}
