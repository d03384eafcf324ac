"""The credentials of one sandboxed command: what is lent to it, what it holds in their place, and what it must not see."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from egressd.control.lending import Lending
from egressd.control.secrecy import (
    exposed_programs,
    leaks,
    replaceable,
    secret_files,
    secret_variables,
    unmasked,
)
from egressd.credentials.broker import Broker
from egressd.credentials.providers.base import pin, take_variables
from egressd.policy.credential import CredentialsFile, Placeholder
from egressd.policy.effective import EffectivePolicy
from egressd.wiring.launch import covering
from egressd.wiring.spec import SandboxSpec

_CHARSETS: Final = {
    "alnum": string.ascii_letters + string.digits,
    "hex": "0123456789abcdef",
    "base64url": string.ascii_letters + string.digits + "-_",
    "digits": string.digits,
}


class Exposed(Exception):
    """A sandbox would hold or see what it must not; the text says what, a line each, never a secret."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """What another file changes for a sandbox that is there: the leases that end, by id, and what its operator is told."""

    ended: list[str]
    notes: list[str]


def credentials_of(policy: EffectivePolicy) -> frozenset[str]:
    """Return the credentials that a policy's rules attach."""
    return frozenset(entry.credential for entry in policy.entries if entry.credential is not None)


def make_placeholder(shape: Placeholder) -> str:
    """Return a fresh dummy: the prefix, and random characters of the charset up to the length."""
    charset = _CHARSETS[shape.charset]
    return shape.prefix + "".join(secrets.choice(charset) for _ in range(shape.length - len(shape.prefix)))


@dataclass(slots=True)
class Keyring:
    """What credentials.yaml means for one sandbox. Without a file there is nothing to lend and nothing to hide."""

    file: CredentialsFile | None
    policy: EffectivePolicy
    ca_bundle: str | None = None
    placeholders: dict[str, str] = field(init=False)
    """By credential: of those that the policy attaches by one."""
    lending: Lending | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Nothing is opened."""
        self.placeholders = {
            name: make_placeholder(shape) for name, shape in _shapes(self.file, self.policy).items()
        }

    @property
    def used(self) -> bool:
        """Whether the policy attaches any credential."""
        return bool(credentials_of(self.policy))

    def missing(self) -> list[str]:
        """Return what the policy attaches and the file does not define."""
        defined = self.file.credentials.keys() if self.file is not None else set()
        return sorted(credentials_of(self.policy) - defined)

    @property
    def hidden(self) -> frozenset[str]:
        """The variables that the sandbox never gets from egressd's own environment."""
        return secret_variables(self.file) if self.file is not None else frozenset()

    def masks(self, spec: SandboxSpec) -> tuple[str, ...]:
        """Return what is masked besides, so that no secret's file can be seen."""
        found = secret_files(self.file) if self.file is not None else ()
        return tuple(dict.fromkeys(place for path in found for place in covering(spec, path)))

    def environment(
        self, env: Mapping[str, str], asked: tuple[str, ...], environ: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the sandbox's environment with its placeholders and without secrets; raises Exposed.

        `asked` is what `--env` said (`NAME` or `NAME=VALUE`), `environ` the caller's environment.
        """
        hidden = self.hidden
        problems = [
            f"--env {name}: a credential's secret is read from this variable, which no sandbox gets"
            for name in (text for text in asked if "=" not in text)
            if name in hidden
        ]
        given = {text.partition("=")[0] for text in asked if "=" in text}
        result = {name: value for name, value in env.items() if name not in hidden or name in given}
        problems += [
            f"{'--env ' if name in given else ''}{name}: its value holds a credential's secret"
            for name in leaks(result, environ, hidden)
        ]
        for credential, shape in _shapes(self.file, self.policy).items():
            if shape.variable in given:
                problems.append(
                    f"--env {shape.variable}: the placeholder of the credential {credential} goes there"
                )
            result[shape.variable] = self.placeholders[credential]
        if problems:
            raise Exposed("\n".join(problems))
        return result

    def notes(self, spec: SandboxSpec) -> list[str]:
        """Return what the operator is told of secrets that lie where the sandbox looks; `spec` is without their masks."""
        found = secret_files(self.file) if self.file is not None else ()
        return [
            f"{path} holds a secret in what the sandbox sees: it is masked, but what replaces it by renaming is not, nor read\n"
            "hint: keep it in a folder of its own, outside the workspace and everything that --bind names"
            for path in unmasked(found, spec)
            if covering(spec, path) == (path,)
        ]

    def check(self, spec: SandboxSpec) -> None:
        """Raise Exposed where a sandbox made as `spec` says could see a secret or give one."""
        if self.file is not None:
            _check(self.file, spec)

    def begin(self) -> Lending | None:
        """Take the secrets out of this process's environment, and return what lends them; None where there is no file."""
        if self.file is not None:
            take_variables(self.hidden)
            self.lending = Lending(Broker(self.file, ca_bundle=self.ca_bundle), self.file)
        return self.lending

    async def close(self) -> None:
        """Take back what was lent, and close its sources."""
        if self.lending is not None:
            await self.lending.close()

    def adopt(
        self, file: CredentialsFile | None, policy: EffectivePolicy, spec: SandboxSpec | None
    ) -> Adopted | None:
        """Go by another file and policy from now on; returns what that ends, None where the file says the same.

        Raises Exposed and changes nothing. `spec` is what the sandbox was made of.
        """
        self.admit(file, policy, spec)
        if file is None or file == self.file:
            self.policy = policy
            return None
        if self.lending is None:
            if credentials_of(policy):
                raise Exposed("the sandbox was started without any credentials: start it anew")
            self.policy = policy
            return None
        ended = self.lending.replace(file)
        take_variables(secret_variables(file) - self.hidden)
        return Adopted([lease.id for lease in ended], self.follow(file, policy))

    def admit(self, file: CredentialsFile | None, policy: EffectivePolicy, spec: SandboxSpec | None) -> None:
        """Raise Exposed where the sandbox may not live under another file and policy. `spec` is what it was made of.

        None: it was made elsewhere, and sees nothing of this host.
        """
        if file is None and credentials_of(policy):
            raise Exposed("the rules attach credentials, and the file that defines them is gone")
        if file is None or file == self.file or spec is None:
            return
        _check(file, spec)
        held = sorted((secret_variables(file) - self.hidden) & spec.env.keys())
        if held:
            names = ", ".join(held)
            raise Exposed(f"the sandbox holds {names}, where a secret would be read from now: start it anew")

    def follow(self, file: CredentialsFile | None, policy: EffectivePolicy) -> list[str]:
        """Go by what was admitted; returns what the operator is told."""
        self.policy = policy
        if file is None:
            return []
        self.file = file
        missing = sorted(_shapes(file, policy).keys() - self.placeholders.keys())
        return [f"the sandbox has no placeholder for {name}: start it anew" for name in missing]


def dummies(
    file: CredentialsFile | None, policy: EffectivePolicy, placeholders: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that hold placeholders, for clients of a sandbox that was not made here."""
    return {
        shape.variable: placeholders[name]
        for name, shape in _shapes(file, policy).items()
        if name in placeholders
    }


def _shapes(file: CredentialsFile | None, policy: EffectivePolicy) -> dict[str, Placeholder]:
    if file is None:
        return {}
    used = credentials_of(policy)
    return {
        name: said.attach.placeholder
        for name, said in file.credentials.items()
        if name in used and said.attach.placeholder is not None
    }


def _check(file: CredentialsFile, spec: SandboxSpec) -> None:
    problems = exposed_programs(file, spec)
    problems += [
        f"{path} is for a secret, and the sandbox would see it" for path in unmasked(secret_files(file), spec)
    ]
    if problems:
        raise Exposed("\n".join(problems))
    pin(replaceable(secret_files(file), spec))
