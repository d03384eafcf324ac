"""The control API over TCP: TLS always, and nobody without what was configured; never a sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from egressd.control.api_server import ApiServer
from egressd.control.approvals.people import People, PeopleFile
from egressd.control.config_file import ApiSection, ApiTokenSection
from egressd.control.estate import StateError
from egressd.control.roster import Wanted
from tests.control.household import House

TOKEN = "t0ken-" * 8
NOW = dt.datetime.now(dt.UTC)


class Authority:
    """A certificate authority of a test's own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._builder(self.subject, self.key).add_extension(
            x509.BasicConstraints(True, 0), True
        )
        usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
        certificate = certificate.add_extension(usage, True)
        certificate = certificate.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), False
        )
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(_pem(certificate.sign(self.key, hashes.SHA256())))

    def issue(self, name: str) -> tuple[str, str]:
        """Return the files of a certificate for 127.0.0.1 and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        certificate = (
            self._builder(subject, key)
            .add_extension(alternative, False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False)
            .sign(self.key, hashes.SHA256())
        )
        paths = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        paths[0].write_bytes(_pem(certificate))
        paths[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return str(paths[0]), str(paths[1])

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - dt.timedelta(days=1))
            .not_valid_after(NOW + dt.timedelta(days=1))
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


class Scene:
    """A house served over TCP, and its clients."""

    def __init__(self, tmp_path: Path, *, token: bool, client_ca: bool) -> None:
        self.house = House(tmp_path)
        self.server: ApiServer
        self.ours, self.theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
        certificate, key = self.ours.issue("server")
        self.token_file = tmp_path / "token"
        self.token_file.write_text(TOKEN + "\n")
        self.token_file.chmod(0o600)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = int(sock.getsockname()[1])
        self.section = ApiSection(
            listen=f"127.0.0.1:{self.port}",
            certificate=certificate,
            key=key,
            client_ca=str(self.ours.file) if client_ca else None,
            token=ApiTokenSection(file=str(self.token_file) if token else None),
        )

    async def ask(self, *, token: str | None = None, shows: Authority | None = None) -> int | str:
        """Return the status of an answer, or `no` where TLS or TCP ended it."""
        context = ssl.create_default_context(cafile=str(self.ours.file))
        if shows is not None:
            context.load_cert_chain(*shows.issue("client"))
        headers = {"Authorization": token} if token is not None else {}
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(
                    f"https://127.0.0.1:{self.port}/v1/status", ssl=context, headers=headers
                ) as response,
            ):
                return response.status
        except aiohttp.ClientError:
            return "no"


def run(scene: Scene, body: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        server = scene.server = ApiServer()
        try:
            await server.start_tcp(scene.house, scene.section)
            await body(scene)
        finally:
            await server.stop()
            await scene.house.roster.end_all("drained")
            scene.house.estate.close()

    asyncio.run(main())


def test_a_token_lets_in_and_nothing_like_it(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        assert await scene.ask(token=f"Bearer {TOKEN}") == 200
        assert await scene.ask(token=f"bearer  {TOKEN}") == 200
        for wrong in (
            None,
            "",
            "Bearer",
            f"Bearer {TOKEN[:-1]}",
            f"Bearer {TOKEN}x",
            f"Basic {TOKEN}",
            TOKEN,
            "Bearer é",
        ):
            assert await scene.ask(token=wrong) == 401

    run(Scene(tmp_path, token=True, client_ca=False), body)


def test_a_certificate_of_the_configured_authority_lets_in_and_no_other(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        assert await scene.ask(shows=scene.ours) == 200
        assert await scene.ask() == "no"
        assert await scene.ask(shows=scene.theirs) == "no"

    run(Scene(tmp_path, token=False, client_ca=True), body)


def test_where_both_are_configured_both_are_needed(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        assert await scene.ask(shows=scene.ours, token=f"Bearer {TOKEN}") == 200
        assert await scene.ask(shows=scene.ours) == 401
        assert await scene.ask(token=f"Bearer {TOKEN}") == "no"

    run(Scene(tmp_path, token=True, client_ca=True), body)


def test_a_sandboxs_address_has_no_business_there_whatever_it_shows(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        life = await scene.house.roster.create(Wanted("lab", "explicit", source="127.0.0.1"))
        assert await scene.ask(token=f"Bearer {TOKEN}") == 403
        await scene.house.roster.end(life, "revoked")
        assert await scene.ask(token=f"Bearer {TOKEN}") == 200

    run(Scene(tmp_path, token=True, client_ca=False), body)


def test_a_token_is_exchanged_without_a_restart(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        other = "0ther-" * 8
        scene.token_file.write_text(other)
        assert await scene.ask(token=f"Bearer {other}") == 401
        scene.server.reload()
        assert await scene.ask(token=f"Bearer {other}") == 200
        assert await scene.ask(token=f"Bearer {TOKEN}") == 401
        scene.token_file.write_text("short")
        with pytest.raises(StateError):
            scene.server.reload()
        assert await scene.ask(token=f"Bearer {other}") == 200

    run(Scene(tmp_path, token=True, client_ca=False), body)


def test_clear_text_gets_nothing(tmp_path: Path) -> None:
    async def body(scene: Scene) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", scene.port)
        writer.write(f"GET /v1/status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        with contextlib.suppress(ConnectionResetError):
            assert b"HTTP" not in await asyncio.wait_for(reader.read(), 5)
        writer.close()

    run(Scene(tmp_path, token=True, client_ca=False), body)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda scene: scene.token_file.chmod(0o644), "can be read by others"),
        (lambda scene: scene.token_file.write_text("short"), "at least 32 characters"),
        (lambda scene: scene.token_file.write_text(""), "token"),
        (lambda scene: scene.token_file.unlink(), "token"),
        (lambda scene: Path(scene.section.key).write_text("x"), "certificates cannot be read"),
    ],
)
def test_what_cannot_be_used_stops_the_start_without_its_content(
    tmp_path: Path, spoil: Callable[[Scene], object], said: str
) -> None:
    async def nothing(_: Scene) -> None:
        raise AssertionError

    scene = Scene(tmp_path, token=True, client_ca=False)
    spoil(scene)
    with pytest.raises(StateError, match=said) as caught:
        run(scene, nothing)
    assert TOKEN not in str(caught.value)


def test_an_approver_is_whom_his_certificate_names(tmp_path: Path) -> None:
    scene = Scene(tmp_path, token=False, client_ca=True)
    people = {
        "schema": 1,
        "people": {"alice": {"certificate": "alice@example.com"}, "bob": {"certificate": "bob"}},
    }
    scene.house.approvals.people = People(PeopleFile.model_validate(people))

    async def call(name: str, method: str, path: str, body: object) -> tuple[int, dict[str, str]]:
        context = ssl.create_default_context(cafile=str(scene.ours.file))
        context.load_cert_chain(*scene.ours.issue(name))
        url = f"https://127.0.0.1:{scene.port}{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, url, ssl=context, json=body) as response,
        ):
            return response.status, await response.json()

    async def body(scene: Scene) -> None:
        life = await scene.house.roster.create(Wanted("lab", "explicit"))
        wanted = {"sandbox": life.id, "request": "GET https://new.example.com/page"}
        status, asked = await call("alice@example.com", "POST", "/v1/approvals", wanted)
        assert status == 201
        said = {"scope": "request", "length": "once", "policy": asked["policy"]}
        for name, known in (("alice@example.com", "alice ("), ("mallory", "127.0.0.1 as 'mallory'")):
            status, made = await call(name, "POST", f"/v1/approvals/{asked['id']}/approve", said)
            assert (status, made["by"].startswith(known)) == (200, True)
            status, asked = await call(
                name, "POST", "/v1/approvals", wanted | {"request": "GET https://other.example.com/"}
            )

    run(scene, body)
