"""A daemon and its authority: what begins trusts a new one before that signs for anybody, and nobody else notices."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import time
from pathlib import Path

import pytest

from egressd.control.ca import Authority, CaPaths, finish, load_or_create, rotate
from egressd.control.succession import Succession
from egressd.control.trust import Trust
from tests.control.fleet import PATIENCE, Box, Fleet, fleet, until

NOW = time.time()


class Scene:
    def __init__(self, path: Path) -> None:
        self.paths = CaPaths.at(path / "ca")
        self.authority = load_or_create(self.paths, NOW)
        self.shown: list[Trust] = []
        self.signs: list[Authority] = []
        self.succession = Succession(self.paths, self.authority, self.shown.append, self.signs.append)


def test_a_look_at_what_has_not_changed_does_nothing(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for _ in range(3):
        scene.succession.look(NOW)
    assert (scene.shown, scene.signs) == ([], [])


def test_both_are_shown_first_then_the_new_one_signs_then_it_is_shown_alone(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    new = rotate(scene.paths, NOW, 3600)
    scene.succession.look(NOW)
    assert [trust.certificate.read_bytes() for trust in scene.shown] == [new.trusted_pem]
    assert scene.signs == []
    scene.succession.look(NOW + 60)
    assert [signs.fingerprint for signs in scene.signs] == [new.fingerprint]
    scene.succession.look(NOW + 120)
    finish(scene.paths, NOW)
    scene.succession.look(NOW + 180)
    assert scene.shown[-1].certificate.read_bytes() == new.pem
    scene.succession.look(NOW + 240)
    assert (len(scene.shown), len(scene.signs)) == (2, 1)


def test_an_overlap_ends_by_its_time(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    new = rotate(scene.paths, NOW, 3600)
    for minutes in (1, 2, 61):
        scene.succession.look(NOW + minutes * 60)
    assert scene.shown[-1].certificate.read_bytes() == new.pem


def test_an_authority_that_cannot_be_read_is_said_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(tmp_path)
    content = scene.paths.certificate.read_bytes()
    scene.paths.certificate.write_bytes(b"rubbish")
    for _ in range(3):
        scene.succession.look(NOW)
    assert capsys.readouterr().err.count("the one in use stays") == 1
    scene.paths.certificate.write_bytes(content)
    scene.succession.look(NOW)
    assert (scene.shown, scene.signs) == ([], [])


async def trusts(box: Box, authority: Authority) -> bool:
    """Whether a client that trusts this authority alone takes what the sandbox is shown for a denied name."""
    context = ssl.create_default_context(cadata=authority.pem.decode())
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    reader, writer = await asyncio.open_connection("127.0.0.1", box.port)
    try:
        writer.write(b"CONNECT evil.example.net:443 HTTP/1.1\r\nHost: evil.example.net:443\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        await writer.start_tls(context, server_hostname="evil.example.net")
    except ssl.SSLCertVerificationError:
        return False
    finally:
        writer.close()
    return True


async def held(made: Fleet, boxes: dict[Box, Authority], others: dict[Box, Authority]) -> None:
    for box, authority in boxes.items():
        assert await trusts(box, authority)
        assert not await trusts(box, others[box])
        assert (await box.get("/ca.crt"))[1] == authority.trusted_pem.decode()


def test_sandboxes_keep_the_authority_that_they_began_with_whatever_becomes_of_their_worker(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with fleet(tmp_path) as made:
            paths = CaPaths.at(tmp_path / "ca")
            old = load_or_create(paths, NOW)
            before = await made.box()
            new = rotate(paths, NOW, 3600)
            made.supervisor.follow(new)
            after = await made.box()
            boxes, others = {before: old, after: new}, {before: new, after: old}
            await held(made, boxes, others)
            await made.supervisor.roll(1.0)
            await held(made, boxes, others)
            pid = made.supervisor.worker_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            await until(lambda: made.supervisor.worker_pid not in (None, pid), "a successor")
            await held(made, boxes, others)
            await made.supervisor.remove(before.id)
            made.supervisor._outfit.keep([box.root for box in made.supervisor._posts[0].sandboxes.values()])
            assert set(made.supervisor._outfit._authorities) == {new.fingerprint}
            for worker in made.supervisor._posts[0].workers:
                made.supervisor._outfit.renew_all(worker, NOW + 20 * 3600)
            await held(made, {after: new}, others)

    asyncio.run(asyncio.wait_for(scenario(), 2 * PATIENCE))


def test_no_restart_changes_the_authority(tmp_path: Path) -> None:
    async def life() -> bytes:
        async with fleet(tmp_path) as made:
            return (await (await made.box()).get("/ca.crt"))[1].encode()

    first = asyncio.run(life())
    assert asyncio.run(life()) == first == load_or_create(CaPaths.at(tmp_path / "ca"), NOW).pem
