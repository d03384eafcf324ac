"""The packet rules in force in a sandbox's own network namespace, read from outside at any time, and what they counted."""

import asyncio
from collections.abc import Sequence

from egressd.wiring import ruleset
from egressd.wiring.errors import WiringError
from egressd.wiring.programs import PATH
from egressd.wiring.ruleset import Family


class Readings:
    """Reads in `net`, from within its `user` namespace where that is given; both are descriptors of the caller's."""

    def __init__(self, net: int, user: int | None, nflog_group: int) -> None:
        self._net, self._user, self._group = net, user, nflog_group

    async def missing_rules(self) -> tuple[str, ...]:
        """How the packet rules in force differ from those wanted, read back now; empty means not at all."""
        problems = []
        for family, saved in (await self._rules()).items():
            wanted = ruleset.namespace_ruleset(family, nflog_group=self._group)
            problems += [f"IPv{family}: {problem}" for problem in ruleset.missing_rules(wanted, saved)]
        return tuple(problems)

    async def counted(self) -> ruleset.Counted | None:
        """What the kernel counted at the packet rules so far; None where a rule that counts is gone."""
        return ruleset.counted(await self._rules(), nflog_group=self._group)

    async def _rules(self) -> dict[Family, str]:
        four, six = await asyncio.gather(
            self.inside("iptables-save", "-c"), self.inside("ip6tables-save", "-c")
        )
        return {4: four, 6: six}

    async def inside(self, *command: str) -> str:
        """Run a program of the host inside the sandbox's network, with power over it."""
        entering = ["nsenter", f"--net=/proc/self/fd/{self._net}"]
        descriptors: Sequence[int] = (self._net,)
        if self._user is not None:
            # Root is above the namespace already; its owner has power over it only from within.
            entering += [f"--user=/proc/self/fd/{self._user}", "--preserve-credentials"]
            descriptors = (self._net, self._user)
        try:
            process = await asyncio.create_subprocess_exec(
                *entering, *command, pass_fds=descriptors, env={"PATH": PATH, "LC_ALL": "C"},
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            raise WiringError.from_os("nsenter", error, "install util-linux") from error
        output, complaint = await process.communicate()
        if process.returncode != 0:
            raise WiringError(" ".join(command), complaint.decode(errors="replace"))
        return output.decode(errors="replace")
