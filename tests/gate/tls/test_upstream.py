"""Trusting servers: which certificates count, and when a session may stand for one."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from egressd.gate.tls import upstream
from egressd.gate.tls.leaves import Leaves
from egressd.gate.tls.stream import TlsStream, UpstreamTlsError, connect_tls
from egressd.gate.tls.upstream import READ_EVERY, SessionCache, upstream_context

from .authority import DAY, NOW, make_authority, pem
from .peers import AUTHORITY, DEADLINE, LEAVES, NAME, BlockingServer, Recorder, blocking, run, tcp_pair

KEY = (NAME, "127.0.0.1", 443)


@pytest.fixture
def ca_file(tmp_path: Path) -> str:
    path = tmp_path / "ca.crt"
    path.write_bytes(pem(AUTHORITY.root))
    return str(path)


class TestContext:
    def test_it_verifies_and_starts_at_tls_1_2(self, ca_file: str) -> None:
        context = upstream_context(ca_file)
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.check_hostname
        assert not context.hostname_checks_common_name
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2

    def test_a_named_file_replaces_the_system(self, ca_file: str) -> None:
        assert upstream_context(ca_file).cert_store_stats()["x509_ca"] == 1

    @pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
    def test_an_operators_variable_counts_and_is_read_at_once(
        self, ca_file: str, variable: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = "SSL_CERT_FILE" if variable == "SSL_CERT_DIR" else "SSL_CERT_DIR"
        monkeypatch.setenv(variable, ca_file if variable == "SSL_CERT_FILE" else str(Path(ca_file).parent))
        monkeypatch.delenv(other, raising=False)
        context = upstream_context(None)
        Path(ca_file).unlink()  # a worker's root is empty by the time it dials
        assert any(
            ("commonName", "test root") in part for ca in context.get_ca_certs() for part in ca["subject"]
        )

    def test_a_file_that_is_not_there_stops_the_start(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError):
            upstream_context(str(tmp_path / "none"))

    def test_a_file_without_certificates_stops_the_start(self, tmp_path: Path) -> None:
        (tmp_path / "empty").write_text("")
        with pytest.raises(OSError):  # noqa: PT011 # ssl.SSLError or FileNotFoundError, as OpenSSL's version likes
            upstream_context(str(tmp_path / "empty"))


async def one_connection(
    server: ssl.SSLContext, client: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> TlsStream:
    """Connect, read one answer (which brings TLS 1.3 tickets) and close."""
    accepted, connected = tcp_pair()

    def answer(sock: ssl.SSLSocket) -> None:
        sock.sendall(b"hi")
        sock.unwrap()

    peer = BlockingServer(accepted, server, answer)
    stream = await connect_tls(asyncio.get_running_loop(), connected, client, NAME, DEADLINE, session)
    owner = Recorder()
    stream.owner = owner
    await owner.told("eof")
    stream.close()
    await owner.told("lost")
    await blocking(peer.join)
    return stream


class TestSessions:
    @pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
    def test_a_kept_session_shortens_the_next_handshake(self, ca_file: str, version: ssl.TLSVersion) -> None:
        async def talk() -> None:
            client, cache = upstream_context(ca_file), SessionCache()
            client.maximum_version = version
            server = LEAVES.context_for(NAME)
            first = await one_connection(server, client)
            assert not first.resumed
            cache.put(KEY, client, first.session, first.resumed, now=0)
            second = await one_connection(server, client, cache.get(KEY, client, now=1))
            assert second.resumed

        run(talk())

    def test_resuming_never_stretches_the_trust_in_a_certificate(self, ca_file: str) -> None:
        async def talk() -> None:
            client, cache = upstream_context(ca_file), SessionCache(max_age=100)
            server = LEAVES.context_for(NAME)
            stream = await one_connection(server, client)
            cache.put(KEY, client, stream.session, stream.resumed, now=0)
            stream = await one_connection(server, client, cache.get(KEY, client, now=99))
            assert stream.resumed
            cache.put(KEY, client, stream.session, stream.resumed, now=99)
            assert cache.get(KEY, client, now=99.5) is not None
            assert cache.get(KEY, client, now=100) is None
            cache.put(KEY, client, stream.session, True, now=100)
            assert cache.get(KEY, client, now=100) is None, "nothing to inherit from: not kept"

        run(talk())

    def test_a_session_is_for_its_name_address_port_and_context(self, ca_file: str) -> None:
        async def talk() -> None:
            client, cache = upstream_context(ca_file), SessionCache()
            stream = await one_connection(LEAVES.context_for(NAME), client)
            cache.put(KEY, client, stream.session, False, now=0)
            for key in ((NAME, "127.0.0.1", 444), (NAME, "127.0.0.2", 443), ("b.test", "127.0.0.1", 443)):
                assert cache.get(key, client, now=1) is None
            assert cache.get(KEY, upstream_context(ca_file), now=1) is None
            cache.forget(KEY)
            assert len(cache) == 0

        run(talk())

    def test_the_cache_is_bounded(self, ca_file: str) -> None:
        async def talk() -> None:
            client, cache = upstream_context(ca_file), SessionCache(capacity=2)
            stream = await one_connection(LEAVES.context_for(NAME), client)
            for port in range(5):
                cache.put((NAME, "127.0.0.1", port), client, stream.session, False, now=0)
            cache.put(KEY, client, None, False, now=0)
            assert len(cache) == 2

        run(talk())

    def test_a_session_of_another_context_is_an_error_and_not_a_crash(self, ca_file: str) -> None:
        async def talk() -> None:
            stream = await one_connection(LEAVES.context_for(NAME), upstream_context(ca_file))
            accepted, connected = tcp_pair()
            loop, other = asyncio.get_running_loop(), upstream_context(ca_file)
            with pytest.raises(UpstreamTlsError, match="different SSLContext"):
                await connect_tls(loop, connected, other, NAME, DEADLINE, stream.session)
            assert connected.fileno() == -1
            accepted.close()

        run(talk())


def test_an_expired_server_is_refused(ca_file: str, tmp_path: Path) -> None:
    past = make_authority(begin=NOW - 9 * DAY, end=NOW - DAY)
    leaves = Leaves(past.issuer, clock=lambda: (NOW - 2 * DAY).timestamp())
    path = tmp_path / "past.crt"
    path.write_bytes(pem(past.root))

    async def talk() -> None:
        accepted, connected = tcp_pair()
        peer = BlockingServer(accepted, leaves.context_for(NAME))
        with pytest.raises(UpstreamTlsError) as caught:
            await connect_tls(
                asyncio.get_running_loop(), connected, upstream_context(str(path)), NAME, DEADLINE
            )
        assert (caught.value.kind, caught.value.detail) == ("certificate", "certificate has expired")
        await blocking(peer.join)

    run(talk())


def test_where_reading_a_session_leaks_it_is_read_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "READING_LEAKS", True)
    cache = SessionCache(capacity=2)
    assert [cache.due(KEY, now) for now in (0, 1, READ_EVERY - 1, READ_EVERY, READ_EVERY + 1)] == [
        True, False, False, True, False
    ]  # fmt: skip
    assert [cache.due(other, READ_EVERY + 2) for other in ("a", "b", "a", KEY)] == [
        True,
        True,
        False,
        True,
    ]


def test_elsewhere_it_is_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "READING_LEAKS", False)
    cache = SessionCache()
    assert [cache.due(KEY, 0) for _ in range(3)] == [True] * 3
