"""The lobby: connections at listeners that many sandboxes share, until it is known whose each of them is.

Here nothing is decided but that: whoever proves to be of a sandbox goes on into a visit of that sandbox, with the bytes that
were read; everybody else is told so, in the protocol of the listener, and written down. The proof is a token, or the source
address that a token was first used from (`tokens`). Nothing that a client says of itself is repeated, to it or to the journal.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from egressd.gate.door import socks
from egressd.gate.door.connect import BadHead, NeedMore
from egressd.gate.door.entrance import (
    CHANNELS,
    Entrance,
    Listening,
    Unheard,
    Way,
    greet,
    proxy_head,
    source_of,
)
from egressd.gate.door.hops import BadHop, Networks
from egressd.gate.door.socks import BadSocks
from egressd.gate.door.splice import reset_on_close
from egressd.gate.door.tokens import (
    CHALLENGE,
    BadCredentials,
    Credentials,
    Known,
    Register,
    Stranger,
    proxy_credentials,
)
from egressd.gate.door.words import last_word
from egressd.gate.inspector.refusal import Refused, refuse_http
from egressd.gate.settings import Settings
from egressd.gate.strangers import Strangers, Stray
from egressd.journal.record import new_id
from egressd.policy.attempt import Address
from egressd.policy.reasons import Reason

GUESTS: Final = 2048
"""Connections of which it is not known yet whose they are."""
GUESTS_OF_ONE: Final = 128
"""The same from one source, so that a neighbour cannot fill the lobby."""

_TELLING: Final = frozenset({Reason.BAD_REQUEST, Reason.UNKNOWN_SANDBOX})
"""Reasons whose detail says more, in fixed words."""
_ASKING: Final = "Use the proxy URL that the operator gave this sandbox: user is its id, password its token."

type Claim = Callable[[str, Address], Awaitable[bool]]
"""Has control keep a source as a sandbox's; raises what says that control could not be asked."""
type Admit = Callable[[str, socket.socket, Entrance], Awaitable[None]]
"""Carries a sandbox's connection to its end, and owns its socket."""


class Lobby:
    """Receives connections until `admit` takes them over."""

    def __init__(
        self, settings: Settings, register: Register, strangers: Strangers, claim: Claim, admit: Admit
    ) -> None:
        """Nobody is in."""
        self._settings = settings
        self._register = register
        self._strangers = strangers
        self._claim = claim
        self._admit = admit
        self._guests: Counter[Address] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def guests(self) -> tuple[asyncio.Task[None], ...]:
        """Who is in."""
        return tuple(self._tasks)

    async def close(self) -> None:
        """Send away whoever is still in; returns once that is written down."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def receive(self, sock: socket.socket, way: Way, port: int, hops: Networks) -> None:
        """Find out whose connection this is and hand it on, or refuse it; owns the socket, never raises but when cancelled."""
        guest = _Guest(self, sock, way, port)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            entered = await guest.enter(hops)
        except asyncio.CancelledError:
            guest.refuse(Reason.SHUTDOWN)
            guest.close()
            raise
        except Exception:  # noqa: BLE001 -- law 1: refused, recorded, and the operator is told
            traceback.print_exc(limit=8, file=sys.stderr)
            guest.refuse(Reason.INTERNAL_ERROR)
            entered = None
        finally:
            self._tasks.discard(task)
            guest.leave()
        if entered is None:
            guest.close()
        else:
            await self._admit(entered.sandbox, sock, guest.entrance)


class _Guest:
    """One connection in the lobby."""

    def __init__(self, lobby: Lobby, sock: socket.socket, way: Way, port: int) -> None:
        self._lobby = lobby
        self._sock = sock
        self._way = way
        self._source: Address | None = None
        self._counted = False
        self._said = False
        self._noted = False
        self.entrance = Entrance(way, port)

    async def enter(self, hops: Networks) -> Known | None:
        """Return whose connection it is, which `entrance` then describes; None once it was refused."""
        lobby = self._lobby
        source = await source_of(self._sock, hops, lobby._settings.first_bytes_timeout)
        if isinstance(source, BadHop):
            self.refuse(Reason.BAD_HOP, source.detail)
            return None
        self._source = source
        guests = lobby._guests
        if guests.total() >= GUESTS or guests[source] >= GUESTS_OF_ONE:
            self.refuse(Reason.TOO_MANY_CONNECTIONS, "waiting to be known")
            return None
        guests[source] += 1
        self._counted = True
        settings = lobby._settings
        listening = Listening(self._sock, b"", settings.head_timeout, settings.head_bytes)
        if self._way == "explicit":
            known = await self._explicit(listening, source)
        elif self._way == "socks":
            known = await self._socks(listening, source)
        else:
            known = self._known(await self._judged(source, None))
        self.entrance = replace(
            self.entrance, source=source, data=listening.data, greeted=self._way == "socks"
        )
        return known

    async def _judged(
        self, source: Address, credentials: Credentials | BadCredentials | None
    ) -> Known | Stranger:
        """Judge who it is; a source that is to be bound is bound before anybody acts on it."""
        lobby = self._lobby
        judged = lobby._register.judge(source, credentials, time.monotonic())
        if isinstance(judged, Stranger) or not judged.claim:
            return judged
        try:
            kept = await lobby._claim(judged.sandbox, source)
        except Exception:  # noqa: BLE001 -- law 1: what control did not keep binds nobody
            return Stranger(Reason.AUDIT_UNAVAILABLE, "the source was not kept")
        if not kept or not lobby._register.bind(judged.sandbox, source):
            return Stranger(Reason.TOKEN_SOURCE_MISMATCH, f"the token of {judged.sandbox}")
        return judged

    # HTTP

    async def _explicit(self, listening: Listening, source: Address) -> Known | None:
        head = await proxy_head(listening)
        if isinstance(head, BadHead):
            return await self._unread(head.reason, source, head.hint)
        whole = await listening.until(lambda data: True if b"\r\n\r\n" in data else NeedMore())
        if isinstance(whole, Unheard):
            return await self._unread(whole.reason, source)
        found = proxy_credentials(listening.data[: listening.data.index(b"\r\n\r\n") + 4])
        judged = await self._judged(source, found)
        if isinstance(judged, Stranger):
            await self._tell(judged.reason, judged)
            return None
        return judged

    async def _unread(self, reason: Reason, source: Address, hint: str | None = None) -> Known | None:
        """What is no request is refused by the visit of the sandbox whose source it comes from, in its name, or else here."""
        owner = self._lobby._register.owner(source)
        if owner is not None:
            return Known(owner)
        await self._tell(reason, None, hint)
        return None

    async def _tell(self, reason: Reason, stranger: Stranger | None, hint: str | None = None) -> None:
        """Refuse in HTTP: 407 where credentials would help and none came, never where they were wrong."""
        attempt_id = new_id()
        asks = stranger is not None and stranger.asks
        told = Refused(attempt_id, "", status=407 if asks else None, hint=_ASKING if asks else hint)
        refusal = refuse_http(reason, told)
        if asks:
            refusal = replace(refusal, fields=((b"proxy-authenticate", CHALLENGE), *refusal.fields))
        self._note(reason, stranger, refusal.status, attempt_id)
        if reason is not Reason.CLIENT_CLOSED:
            self._said = await last_word(self._sock, refusal.to_http1())

    # SOCKS

    async def _socks(self, listening: Listening, source: Address) -> Known | None:
        owner = self._lobby._register.owner(source)

        def choose(methods: frozenset[int]) -> int:
            if socks.USERNAME_PASSWORD in methods:
                return socks.USERNAME_PASSWORD
            if socks.NO_AUTHENTICATION in methods and owner is not None:
                return socks.NO_AUTHENTICATION
            return socks.NO_METHOD

        login = await greet(listening, choose)
        if isinstance(login, BadSocks):
            self.refuse(login.reason, login.detail if login.reason in _TELLING else None)
            if login.reply:
                self._said = await last_word(self._sock, login.reply)
            return None
        credentials = Credentials(login.user, login.password) if login is not None else None
        judged = await self._judged(source, credentials)
        known = self._known(judged)
        if known is None:
            self._said = await last_word(self._sock, socks.judge_login(ok=False))
        elif login is not None:
            await listening.say(socks.judge_login(ok=True))
        return known

    # the end

    def _known(self, judged: Known | Stranger) -> Known | None:
        if isinstance(judged, Known):
            return judged
        self._note(judged.reason, judged)
        return None

    def refuse(self, reason: Reason, detail: str | None = None) -> None:
        """Write down that it is nobody's, and why; `detail` in fixed words."""
        owner = self._lobby._register.owner(self._source) if self._source is not None else None
        self._note(reason, Stranger(reason, detail, owner))

    def _note(
        self,
        reason: Reason,
        stranger: Stranger | None,
        status: int | None = None,
        attempt_id: str | None = None,
    ) -> None:
        if self._noted:
            return
        self._noted = True
        detail, sandbox = (stranger.detail, stranger.sandbox) if stranger is not None else (None, None)
        stray = Stray("connection", CHANNELS[self._way], reason, self._source, sandbox, detail)
        self._lobby._strangers.note(stray, status=status, attempt_id=attempt_id)

    def leave(self) -> None:
        """Make room for the next."""
        if self._counted and self._source is not None:
            guests = self._lobby._guests
            guests[self._source] -= 1
            if guests[self._source] <= 0:
                del guests[self._source]

    def close(self) -> None:
        """Close what nobody took over."""
        if not self._said:
            reset_on_close(self._sock)
        self._sock.close()
