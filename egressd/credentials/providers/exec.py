"""A secret that a command prints as an ExecCredential (client.authentication.k8s.io/v1, kubernetes.io/docs/reference/config-api).

The command gets PATH and what its definition says, an empty input, and nobody reads what it says on its standard error: that
could hold the secret. It runs in a session of its own, so that with it everything that it started is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import os
import signal
from typing import Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, SecretStr, ValidationError

from egressd.credentials.lease import Token
from egressd.credentials.providers.base import For, Minted, Provider, SourceFailed
from egressd.policy.credential import ExecSource

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where a command without a slash is looked for: never in a folder that somebody's shell happens to look in."""

_OUTPUT_LIMIT: Final = 64 * 1024
_KILL_DEADLINE: Final = 1.0


class _Status(BaseModel):
    model_config = ConfigDict(hide_input_in_errors=True)

    token: SecretStr
    expirationTimestamp: AwareDatetime | None = None  # noqa: N815 -- as the protocol spells it


class _ExecCredential(BaseModel):
    """What of the object matters here; a client certificate is no text that could be attached."""

    model_config = ConfigDict(hide_input_in_errors=True)

    apiVersion: Literal["client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1"]  # noqa: N815 -- as above
    kind: Literal["ExecCredential"]
    status: _Status


class _Exec:
    def __init__(self, source: ExecSource) -> None:
        self._source = source

    async def mint(self, for_: For) -> Minted:  # noqa: ARG002 -- the convention has no place for it
        try:
            async with asyncio.timeout(self._source.timeout):
                output = await _output(self._source)
        except TimeoutError:
            raise SourceFailed(f"the command did not end within {self._source.timeout} s") from None
        try:
            status = _ExecCredential.model_validate_json(output).status
        except (ValidationError, ValueError):
            raise SourceFailed("the command printed no ExecCredential with a token") from None
        return Minted(Token(value=status.token), _seconds(status.expirationTimestamp))

    async def close(self) -> None:
        """A command that still runs ends with the `mint` that waits for it."""


def _seconds(moment: dt.datetime | None) -> float | None:
    return moment.timestamp() if moment is not None else None


async def _output(source: ExecSource) -> bytes:
    """Return what the command prints; nothing of it is left running, however this ends."""
    try:
        process = await asyncio.create_subprocess_exec(
            *source.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PATH": PATH, **source.env},
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise SourceFailed(f"the command cannot be started: {error.strerror}") from None
    try:
        assert process.stdout is not None
        output = b""
        while more := await process.stdout.read(_OUTPUT_LIMIT):
            output += more
            if len(output) > _OUTPUT_LIMIT:
                raise SourceFailed(f"the command printed more than {_OUTPUT_LIMIT // 1024} KiB")
        status = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILL_DEADLINE):
                await process.wait()
    if status != 0:
        raise SourceFailed(f"the command ended with status {status}")
    return output


def provider(_name: str, source: ExecSource, _ca_bundle: str | None) -> Provider:
    """Return the source that runs the command of `source`."""
    return _Exec(source)
