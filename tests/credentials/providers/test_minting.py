"""Mints that are not lost when nobody waits for them any more."""

from __future__ import annotations

import asyncio

import pytest
from pydantic import SecretStr

from egressd.credentials.lease import Token
from egressd.credentials.providers.base import Minted, SourceFailed
from egressd.credentials.providers.minting import Minting
from tests.credentials.providers.loopback import run


class Source:
    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.given = self.revoked = 0

    async def mint(self) -> Minted:
        await self.may_answer.wait()
        self.given += 1
        return Minted(Token(value=SecretStr("s")), revoke=self.revoke)

    async def fail(self) -> Minted:
        await self.may_answer.wait()
        raise SourceFailed("no")

    async def revoke(self) -> None:
        self.revoked += 1
        raise SourceFailed("it does not matter any more")


def test_what_is_waited_for_is_given_and_stays() -> None:
    async def scene() -> tuple[int, int]:
        source, minting = Source(), Minting()
        source.may_answer.set()
        await minting.run(source.mint())
        await minting.close()
        return source.given, source.revoked

    assert run(scene()) == (1, 0)


def test_what_nobody_waits_for_is_revoked() -> None:
    async def scene() -> tuple[int, int]:
        source, minting = Source(), Minting()
        waiting = asyncio.create_task(minting.run(source.mint()))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        source.may_answer.set()
        await minting.close()
        return source.given, source.revoked

    assert run(scene()) == (1, 1)


def test_a_failure_reaches_who_waits_and_nobody_else() -> None:
    async def scene() -> None:
        source, minting = Source(), Minting()
        waiting = asyncio.create_task(minting.run(source.fail()))
        await asyncio.sleep(0)
        waiting.cancel()
        source.may_answer.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(SourceFailed, match="no"):
            await minting.run(source.fail())
        await minting.close()

    run(scene())
