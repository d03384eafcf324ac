"""An office of approvals as configured: its people, and who is told of what happens there."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from egressd.control.approvals.book import Given, Item
from egressd.control.approvals.office import Floor, Office
from egressd.control.approvals.people import BadPeople, read_people
from egressd.control.config import Config
from egressd.control.config_file import WebhookSection
from egressd.control.estate import StateError
from egressd.credentials.providers.base import SourceFailed, read_file
from egressd.rulefiles.source import RuleSource

if TYPE_CHECKING:
    from egressd.control.approvals.webhook import Endpoint, Webhook

_LEAST_SECRET: Final = 32
_LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})


class Establishment:
    """The office, and its webhook where there is one."""

    def __init__(self, config: Config, source: Callable[[], RuleSource]) -> None:
        """Read what the configuration names; raises StateError. `source` gives the rule files in force."""
        section = config.approvals
        self._people = Path(section.people) if section.people is not None else None
        try:
            people = read_people(self._people)
        except BadPeople as bad:
            raise StateError(f"approvals.people: {bad}") from None
        self._webhook = _webhook(config)
        self.office = Office(people, four_eyes=section.four_eyes, source=source, tell=self._tell)

    def open(self, floor: Floor) -> None:
        """Begin to hear workers and to tell; in the running loop."""
        self.office.attach(floor)
        if self._webhook is not None:
            self._webhook.start()

    def reload(self) -> None:
        """Read the people anew; raises StateError and changes nothing."""
        try:
            self.office.people = read_people(self._people)
        except BadPeople as bad:
            raise StateError(f"approvals.people: {bad}") from None

    async def close(self) -> None:
        """Stop."""
        await self.office.close()
        if self._webhook is not None:
            await self._webhook.close()

    def _tell(self, event: str, item: Item | None, _given: Given | None) -> None:
        if self._webhook is not None and item is not None:
            from egressd.control.approvals_schema import told_item

            self._webhook.tell(event, told_item(self.office, item).model_dump(mode="json"))


def check_url(url: str) -> str | None:
    """Return what is wrong with a webhook's URL, None for nothing. The text never holds the URL."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "it is no URL"
    if not host or parts.scheme not in ("https", "http"):
        return "it begins with https:// and a host"
    if parts.scheme == "http" and host not in _LOOPBACK:
        return "in the clear it may only lead to this host itself; write https://"
    return None


def _webhook(config: Config) -> Webhook | None:
    section = config.approvals.webhook
    if section == WebhookSection():
        return None
    from egressd.control.approvals.webhook import Webhook  # aiohttp takes a while, and most have none

    return Webhook(_endpoint(section, config.upstream.ca_bundle))


def _endpoint(section: WebhookSection, ca_bundle: str | None) -> Endpoint:
    from egressd.control.approvals.webhook import Endpoint

    url = section.url if section.url_file is None else _read("approvals.webhook.url_file", section.url_file)
    secret = _read("approvals.webhook.secret.file", section.secret.file or "")
    if url is None or (wrong := check_url(url)) is not None:
        raise StateError(f"approvals.webhook: the URL: {'there is none' if url is None else wrong}")
    if len(secret) < _LEAST_SECRET:
        raise StateError(f"approvals.webhook.secret.file: a secret has at least {_LEAST_SECRET} characters")
    return Endpoint(url, secret.encode(), section.format, ca_bundle)


def _read(key: str, path: str) -> str:
    try:
        if stat.S_IMODE(Path(path).stat().st_mode) & 0o077:
            raise StateError(f"{key}: {path} can be read by others", f"chmod 600 {path}")
        return read_file(path)
    except (OSError, SourceFailed) as error:
        raise StateError(f"{key}: {path}: {getattr(error, 'strerror', None) or error}") from None
