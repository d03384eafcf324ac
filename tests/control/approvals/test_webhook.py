"""The webhook: signed, tried again, bounded, and nothing of a sandbox's becomes markup or reaches its fields."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from egressd.control.approvals.establishment import Establishment, check_url
from egressd.control.approvals.slack import blocks
from egressd.control.approvals.webhook import MOST, TRIES, Endpoint, Webhook
from egressd.control.config import load_config
from egressd.control.estate import StateError
from tests.control.household import until

SECRET = b"0123456789abcdef0123456789abcdef"
APPROVAL: dict[str, Any] = {
    "id": "apr-0000000000000001", "sandbox": "sbx-1", "profile": "p", "request": "POST https://pay.test/<!channel>",
    "reason": "x", "rule": None, "place": None, "count": 1, "approvers": ["oncall"], "credentials": [], "by": None,
    "untrusted_words": "<https://evil.test|click> *bold* @here",
}  # fmt: skip


class Hook:
    """An endpoint that answers with these statuses in turn, the last one for ever."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.heard: list[tuple[dict[str, str], bytes]] = []

    async def take(self, request: web.Request) -> web.Response:
        self.heard.append(
            ({key.lower(): value for key, value in request.headers.items()}, await request.read())
        )
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        return web.Response(status=status, headers={"Location": "/elsewhere"} if status == 302 else {})


def play(hook: Hook, scene: Callable[[Webhook], Awaitable[None]], **fields: Any) -> None:
    async def run() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", hook.take)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]  # asyncio's server has them
        webhook = Webhook(
            Endpoint(f"http://127.0.0.1:{port}/hook", SECRET, **fields),
            wall=lambda: 1_800_000_000.5,
            first_pause=0.001,
        )
        webhook.start()
        try:
            async with asyncio.timeout(60):
                await scene(webhook)
        finally:
            await webhook.close()
            await runner.cleanup()

    asyncio.run(run())


def test_a_delivery_is_signed_with_its_time() -> None:
    hook = Hook(204)

    async def scene(webhook: Webhook) -> None:
        webhook.tell("asked", APPROVAL)
        await until(lambda: hook.heard)

    play(hook, scene)
    [(fields, body)] = hook.heard
    expected = hmac.new(SECRET, b"v1:1800000000:" + body, hashlib.sha256).hexdigest()
    assert fields["x-egressd-timestamp"] == "1800000000"
    assert fields["x-egressd-signature"] == f"v1={expected}"
    assert len(fields["x-egressd-delivery"]) == 28
    assert json.loads(body)["approval"] == APPROVAL


def test_what_fails_is_tried_again_under_the_same_id() -> None:
    hook = Hook(500, 429, 302, 200)

    async def scene(webhook: Webhook) -> None:
        webhook.tell("asked", APPROVAL)
        await until(lambda: len(hook.heard) == 4)
        webhook.tell("denied", APPROVAL)
        await until(lambda: len(hook.heard) == 5)
        assert webhook.dropped == 0

    play(hook, scene)
    ids = [fields["x-egressd-delivery"] for fields, _ in hook.heard]
    assert len(set(ids[:4])) == 1
    assert ids[4] != ids[0]


@pytest.mark.parametrize(("status", "tries"), [(503, TRIES), (400, 1), (410, 1)])
def test_one_that_nobody_takes_is_given_up(
    status: int, tries: int, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = Hook(status)

    async def scene(webhook: Webhook) -> None:
        webhook.tell("asked", APPROVAL)
        await until(lambda: webhook.dropped)

    play(hook, scene)
    assert len(hook.heard) == tries
    said = capsys.readouterr().err
    assert "1 messages were not delivered" in said
    assert "127.0.0.1" not in said


def test_nobody_waits_for_it_and_what_is_too_much_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    webhook = Webhook(Endpoint("https://hooks.example.com/", SECRET))

    async def scene() -> None:
        for _ in range(MOST + 3):
            webhook.tell("asked", APPROVAL)

    asyncio.run(scene())
    assert webhook.dropped == 3


def test_in_slack_nothing_of_a_sandbox_is_markup() -> None:
    message = blocks("asked", APPROVAL)
    kinds = {block["text"]["type"] for block in message["blocks"] if "text" in block}
    kinds |= {each["type"] for block in message["blocks"] for each in block.get("elements", ())}
    assert kinds == {"plain_text"}
    assert "<" not in message["text"]
    assert "may be false" in json.dumps(message["blocks"])
    long = blocks("asked", APPROVAL | {"request": "x" * 10_000})
    assert all(len(block["text"]["text"]) <= 3000 for block in long["blocks"] if "text" in block)


def test_an_endpoint_tells_nothing_of_itself() -> None:
    assert "hooks" not in repr(Endpoint("https://hooks.example.com/T0/secret", SECRET))


@pytest.mark.parametrize(
    ("url", "fine"),
    [
        ("https://hooks.example.com/x", True),
        ("http://127.0.0.1:8080/", True),
        ("http://hooks.example.com/", False),
        ("ftp://hooks.example.com/", False),
        ("https://", False),
        ("https://[::1", False),
        ("https://a:99999999/", False),
    ],
)
def test_only_tls_leaves_this_host(url: str, *, fine: bool) -> None:
    assert (check_url(url) is None) is fine


@pytest.mark.parametrize(
    ("secret", "mode", "said"),
    [
        ("x" * 32, 0o644, "can be read by others"),
        ("short", 0o600, "at least 32"),
        (None, 0o600, "secret.file"),
    ],
)
def test_a_webhook_that_cannot_be_signed_does_not_start(
    tmp_path: Path, secret: str | None, mode: int, said: str
) -> None:
    file = tmp_path / "secret"
    if secret is not None:
        file.write_text(secret)
        file.chmod(mode)
    environ = {
        "HOME": str(tmp_path),
        "EGRESSD_APPROVALS_WEBHOOK_URL": "https://hooks.example.com/",
        "EGRESSD_APPROVALS_WEBHOOK_SECRET_FILE": str(file),
    }
    config = load_config({}, environ)
    with pytest.raises(StateError, match=said):
        Establishment(config, lambda: pytest.fail("nobody asks"))


def test_people_that_cannot_be_read_stop_the_start(tmp_path: Path) -> None:
    config = load_config({}, {"HOME": str(tmp_path), "EGRESSD_APPROVALS_PEOPLE": str(tmp_path / "none.yaml")})
    with pytest.raises(StateError, match=r"none\.yaml"):
        Establishment(config, lambda: pytest.fail("nobody asks"))
