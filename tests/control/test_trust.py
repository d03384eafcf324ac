"""The trust directory: complete, public, never changed under a running sandbox, and believed by real clients."""

from __future__ import annotations

import http.server
import json
import multiprocessing
import os
import shlex
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, pkcs12

from egressd.control import trust as trust_module
from egressd.control.ca import Authority, CaPaths, issue_worker_intermediate, load_or_create, rotate
from egressd.control.trust import (
    JAVA_PASSWORD,
    Format,
    Trust,
    TrustError,
    build_trust,
    java_store_paths,
    render_environment,
    system_bundle_paths,
    trust_environment,
)
from egressd.gate.tls.leaves import Issuer, Leaves

NOW = time.time()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return load_or_create(CaPaths.at(tmp_path_factory.mktemp("authority") / "ca"), NOW)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Two certificates that stand for the system's."""
    base = tmp_path_factory.mktemp("others")
    return b"# a comment\n" + b"".join(load_or_create(CaPaths.at(base / n), NOW).pem for n in ("a", "b"))


@pytest.fixture
def trust(tmp_path: Path, authority: Authority, others: bytes) -> Trust:
    return build_trust(tmp_path / "trust", authority.pem, others)


class TestContent:
    def test_the_bundle_holds_the_systems_and_ours(
        self, trust: Trust, authority: Authority, others: bytes
    ) -> None:
        found = x509.load_pem_x509_certificates(trust.bundle.read_bytes())
        assert found[:2] == x509.load_pem_x509_certificates(others)
        assert found[2] == authority.certificate
        assert trust.system_certificates == 2
        assert trust.certificate.read_bytes() == authority.pem
        assert (trust.certs / "ca-certificates.crt").read_bytes() == trust.bundle.read_bytes()

    def test_the_contracts_two_files_stand_at_the_top(self, trust: Trust) -> None:
        top = trust.directory.parent
        assert (top / "ca.crt").read_bytes() == trust.certificate.read_bytes()
        assert (top / "bundle.crt").read_bytes() == trust.bundle.read_bytes()

    def test_openssl_finds_each_by_its_hash(self, trust: Trust, authority: Authority) -> None:
        for path in (authority.paths.certificate, trust.certs / "system-000.pem"):
            done = subprocess.run(
                ["openssl", "verify", "-no-CAfile", "-no-CAstore", "-CApath", trust.certs, path],
                capture_output=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr

    def test_hash_links_are_those_of_openssl_for_the_whole_system_store(
        self, tmp_path: Path, authority: Authority
    ) -> None:
        if not system_bundle_paths():
            pytest.skip("this host has no system certificates")
        trust = build_trust(tmp_path / "t", authority.pem)
        again = tmp_path / "again"
        again.mkdir()
        for path in trust.certs.glob("*.pem"):
            shutil.copy(path, again)
        subprocess.run(["openssl", "rehash", again], check=True, capture_output=True)
        links = {path.name for path in again.iterdir() if path.is_symlink()}
        assert links == {path.name for path in trust.certs.iterdir() if path.is_symlink()}
        assert trust.system_certificates > 50

    def test_two_certificates_of_one_name_get_two_links(self, tmp_path: Path, authority: Authority) -> None:
        other = load_or_create(CaPaths.at(tmp_path / "other"), NOW)
        renewed = x509.CertificateBuilder(
            issuer_name=other.certificate.subject,
            subject_name=other.certificate.subject,
            public_key=other.key.public_key(),
            serial_number=7,
            not_valid_before=other.certificate.not_valid_before_utc,
            not_valid_after=other.certificate.not_valid_after_utc,
        ).sign(other.key, hashes.SHA256())
        pem = renewed.public_bytes(Encoding.PEM)
        certs = build_trust(tmp_path / "t", authority.pem, other.pem + pem).certs
        assert sorted(path.suffix for path in certs.iterdir() if path.is_symlink()) == [".0", ".0", ".1"]

    @pytest.mark.parametrize("name", ["java.p12", "certs/java/cacerts"])
    def test_java_stores_hold_all(self, trust: Trust, name: str) -> None:
        password = JAVA_PASSWORD.encode() if name == "java.p12" else None
        store = pkcs12.load_pkcs12((trust.directory / name).read_bytes(), password)
        assert len(store.additional_certs) == 3

    def test_a_host_without_certificates_is_counted(self, tmp_path: Path, authority: Authority) -> None:
        trust = build_trust(tmp_path / "t", authority.pem, b"")
        assert trust.system_certificates == 0
        assert trust.bundle.read_bytes() == authority.pem

    def test_what_cannot_be_parsed_stays_in_the_bundle_only(
        self, tmp_path: Path, authority: Authority
    ) -> None:
        odd = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
        trust = build_trust(tmp_path / "t", authority.pem, odd)
        assert odd in trust.bundle.read_bytes()
        assert [path.name for path in trust.certs.glob("*.pem")] == ["egressd.pem"]

    def test_ours_is_not_doubled_when_the_system_has_it(self, tmp_path: Path, authority: Authority) -> None:
        assert build_trust(tmp_path / "t", authority.pem, authority.pem).bundle.read_bytes() == authority.pem

    @pytest.mark.skipif(shutil.which("certutil") is None, reason="certutil is not installed")
    def test_a_browsers_database_trusts_ours_for_servers_alone(self, trust: Trust, tmp_path: Path) -> None:
        assert set(trust.nss) == {".pki/nssdb/cert9.db", ".pki/nssdb/key4.db"}
        copy = tmp_path / "copy"
        copy.mkdir()
        for path in trust.nss.values():
            shutil.copy(path, copy)
        listed = subprocess.run(
            ["certutil", "-L", "-d", f"sql:{copy}"], capture_output=True, text=True, check=True
        )
        assert listed.stdout.split()[-2:] == ["egressd", "C,,"]

    def test_there_is_no_such_database_without_certutil(
        self, tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with_it = build_trust(tmp_path / "t", authority.pem, b"")
        monkeypatch.setenv("PATH", "/nonexistent")
        without = build_trust(tmp_path / "t", authority.pem, b"")
        assert without.nss == {}
        assert (without.directory == with_it.directory) == (shutil.which("certutil", path=os.defpath) is None)

    def test_a_certutil_that_fails_leaves_no_database(
        self, tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broken = tmp_path / "bin/certutil"
        broken.parent.mkdir()
        broken.write_text("#!/bin/sh\nexit 1\n")
        broken.chmod(0o755)
        monkeypatch.setenv("PATH", str(broken.parent))
        trust = build_trust(tmp_path / "t", authority.pem, b"")
        assert trust.nss == {}
        assert trust.bundle.read_bytes() == authority.pem


class TestBuilding:
    def test_everybody_can_read_it_whatever_the_umask(self, tmp_path: Path, authority: Authority) -> None:
        before = os.umask(0o077)
        try:
            trust = build_trust(tmp_path / "trust", authority.pem, b"")
        finally:
            os.umask(before)
        for path in (trust.directory.parent, *trust.directory.parent.rglob("*")):
            if not path.is_symlink():
                wanted = 0o755 if path.is_dir() else 0o644
                assert stat.S_IMODE(path.stat().st_mode) == wanted, path

    def test_the_same_content_is_built_once_and_found_fast(
        self, tmp_path: Path, authority: Authority, others: bytes
    ) -> None:
        first = build_trust(tmp_path / "trust", authority.pem, others)
        inodes = {path: path.stat().st_ino for path in first.directory.parent.rglob("*")}
        begin = time.process_time()
        assert build_trust(tmp_path / "trust", authority.pem, others) == first
        assert time.process_time() - begin < 0.05
        assert {path: path.stat().st_ino for path in first.directory.parent.rglob("*")} == inodes

    def test_another_content_leaves_the_old_one_to_those_who_have_it(
        self, tmp_path: Path, trust: Trust, authority: Authority
    ) -> None:
        before = trust.bundle.read_bytes()
        newer = build_trust(tmp_path / "trust", authority.pem, b"")
        assert newer.directory != trust.directory
        assert trust.bundle.read_bytes() == before
        assert (tmp_path / "trust/bundle.crt").read_bytes() == newer.bundle.read_bytes()

    def test_a_content_that_nobody_was_started_with_for_long_goes(
        self, tmp_path: Path, trust: Trust, authority: Authority
    ) -> None:
        os.utime(trust.directory, (NOW - 40 * 86400,) * 2)
        build_trust(tmp_path / "trust", authority.pem, b"")
        assert not trust.directory.exists()

    def test_a_half_removed_content_is_built_again(
        self, trust: Trust, authority: Authority, others: bytes
    ) -> None:
        (trust.directory / "built").unlink()
        trust.bundle.unlink()
        assert build_trust(trust.directory.parent, authority.pem, others).bundle.exists()

    def test_processes_that_build_at_once_agree(
        self, tmp_path: Path, authority: Authority, others: bytes
    ) -> None:
        arguments = [(tmp_path / "trust", authority.pem, others)] * 6
        with multiprocessing.get_context("spawn").Pool(3) as pool:
            assert len({trust.directory for trust in pool.starmap(build_trust, arguments)}) == 1
        assert not list((tmp_path / "trust").glob("*.new"))

    def test_who_comes_second_leaves_a_finished_build_in_its_place(
        self, tmp_path: Path, authority: Authority, others: bytes
    ) -> None:
        built = build_trust(tmp_path / "trust", authority.pem, others)
        before = built.directory.stat().st_ino
        trust_module._build(
            built.directory, [authority.pem], others, None
        )  # it looked before the other had finished
        assert built.directory.stat().st_ino == before

    def test_two_authorities_are_in_every_form(self, tmp_path: Path, others: bytes) -> None:
        paths = CaPaths.at(tmp_path / "ca")
        load_or_create(paths, time.time())
        both = rotate(paths, time.time(), 3600)
        trust = build_trust(paths.trust, both.trusted_pem, others)
        ours = x509.load_pem_x509_certificates(both.trusted_pem)
        assert x509.load_pem_x509_certificates(trust.certificate.read_bytes()) == ours
        assert x509.load_pem_x509_certificates(trust.bundle.read_bytes())[-2:] == ours
        assert (paths.trust / "ca.crt").read_bytes() == trust.certificate.read_bytes()
        names = {path.name for path in trust.certs.iterdir()}
        assert {"egressd.pem", "egressd-previous.pem"} <= names
        found = {path.resolve().name for path in trust.certs.glob("*.[0-9]")}
        assert {"egressd.pem", "egressd-previous.pem"} <= found
        for store, password in (
            (trust.java, trust_module.JAVA_PASSWORD.encode()),
            (trust.java_default, None),
        ):
            held = pkcs12.load_pkcs12(store.read_bytes(), password)
            assert {each.certificate for each in held.additional_certs} >= set(ours)
        for path in trust.nss.values():
            assert path.stat().st_size
        if trust.nss:
            place = f"sql:{next(iter(trust.nss.values())).parent}"
            listed = subprocess.run(
                ["certutil", "-L", "-d", place], capture_output=True, text=True, check=True
            )
            assert "egressd-previous" in listed.stdout

    @pytest.mark.parametrize("more", [b"", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"])
    def test_only_one_certificate_comes_in_and_never_a_key(
        self, tmp_path: Path, authority: Authority, more: bytes
    ) -> None:
        trust = build_trust(tmp_path / "trust", authority.pem + more, more)
        for path in trust.directory.rglob("*"):
            assert not path.is_file() or b"PRIVATE" not in path.read_bytes()

    def test_what_cannot_be_used_is_said(self, tmp_path: Path, authority: Authority, others: bytes) -> None:
        with pytest.raises(TrustError, match="not one certificate, or two"):
            build_trust(tmp_path / "a", b"", b"")
        with pytest.raises(TrustError, match="not one certificate, or two"):
            build_trust(tmp_path / "b", authority.pem + others, b"")
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o777)
        with pytest.raises(TrustError, match="written by others") as caught:
            build_trust(tmp_path / "open", authority.pem, b"")
        assert "remove" in caught.value.hint
        (tmp_path / "file").write_text("")
        with pytest.raises(TrustError, match="cannot be built"):
            build_trust(tmp_path / "file" / "trust", authority.pem, b"")


class TestEnvironment:
    ENVIRONMENT = trust_environment("/run/egressd/trust")

    def test_what_replaces_a_store_gets_the_bundle_and_what_adds_gets_ours(self) -> None:
        for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO", "AWS_CA_BUNDLE", "PIP_CERT"):
            assert self.ENVIRONMENT[name] == "/run/egressd/trust/bundle.crt"
        for name in ("NODE_EXTRA_CA_CERTS", "DENO_CERT"):
            assert self.ENVIRONMENT[name] == "/run/egressd/trust/ca.crt"

    def test_every_path_exists_in_the_directory(self, trust: Trust) -> None:
        for name, value in trust_environment(str(trust.directory)).items():
            for word in value.replace("=", " ").split():
                if word.startswith("/"):
                    assert Path(word).exists(), name

    def test_it_survives_a_shell(self) -> None:
        environment = {**self.ENVIRONMENT, "ODD": "a 'quoted' $HOME `x`"}
        script = render_environment(environment, "sh") + f"{shlex.quote(sys.executable)} -c 'import os,json;"
        script += "print(json.dumps(dict(os.environ)))'"
        done = subprocess.run(["sh", "-c", script], env={}, capture_output=True, check=True)
        assert environment.items() <= json.loads(done.stdout).items()

    @pytest.mark.parametrize("form", ["docker", "json"])
    def test_it_can_be_read_back(self, form: Format) -> None:
        text = render_environment(self.ENVIRONMENT, form)
        assert text.endswith("\n")
        read = json.loads(text) if form == "json" else dict(line.split("=", 1) for line in text.splitlines())
        assert read == self.ENVIRONMENT

    def test_a_line_break_is_no_second_variable(self) -> None:
        with pytest.raises(ValueError, match="no line breaks"):
            render_environment({"A": "b\nEVIL=1"}, "docker")


def test_known_places_are_real_files_each_once() -> None:
    for paths in (system_bundle_paths(), java_store_paths()):
        assert len(set(paths)) == len(paths)
        assert all(path.is_file() and path == path.resolve() for path in paths)


class _Quiet(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "8")
        self.end_headers()
        self.wfile.write(b"trusted\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the base class's name
        """Say nothing."""


@pytest.fixture(scope="module")
def origin(authority: Authority) -> Iterator[str]:
    """An HTTPS server on loopback that shows a leaf for localhost as the worker would mint it."""
    issued = issue_worker_intermediate(authority, "w", NOW)
    context = Leaves(Issuer.from_pem(issued.chain_pem, issued.key_pem)).context_for("localhost")

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def finish_request(self, request: Any, client_address: object) -> None:
            try:
                with context.wrap_socket(request, server_side=True) as wrapped:
                    super().finish_request(wrapped, client_address)
            except OSError:
                pass  # a client that does not trust us is what some tests want

    server = Server(("127.0.0.1", 0), _Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"https://localhost:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


PYTHON = "import sys,urllib.request as u;print(u.urlopen(sys.argv[1]).read().decode(),end='')"
NODE = "fetch(process.argv[1]).then(r=>r.text()).then(t=>process.stdout.write(t)).catch(e=>{console.error(e);process.exit(1)})"
JAVA = """
import java.net.URI; import java.net.http.*;
public class Fetch { public static void main(String[] a) throws Exception {
  System.out.print(HttpClient.newHttpClient().send(HttpRequest.newBuilder(URI.create(a[0])).build(),
    HttpResponse.BodyHandlers.ofString()).body()); } }
"""

CLIENTS = {
    "curl": ["curl", "-sS", "URL"],
    "python": [sys.executable, "-c", PYTHON, "URL"],
    "node": ["node", "-e", NODE, "URL"],
    "java": ["java", "FETCH.java", "URL"],
}


def fetch(
    command: list[str], url: str, environment: dict[str, str], home: Path
) -> subprocess.CompletedProcess[str]:
    """Run a client with nothing but the environment given: a developer's own variables would hide a fault."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    source = home / "Fetch.java"
    source.write_text(JAVA)
    words = [{"URL": url, "FETCH.java": str(source)}.get(word, word) for word in command]
    bare = {"PATH": os.environ["PATH"], "HOME": str(home), "no_proxy": "*"}
    return subprocess.run(
        words, env=bare | environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("command", CLIENTS.values(), ids=CLIENTS.keys())
def test_a_real_client_believes_the_variables(
    command: list[str], origin: str, trust: Trust, tmp_path: Path
) -> None:
    done = fetch(command, origin, trust_environment(str(trust.directory)), tmp_path)
    assert done.stdout == "trusted\n", done.stderr


@pytest.mark.parametrize("command", CLIENTS.values(), ids=CLIENTS.keys())
def test_a_real_client_refuses_without_them(command: list[str], origin: str, tmp_path: Path) -> None:
    done = fetch(command, origin, {}, tmp_path)
    assert done.returncode != 0
    assert "trusted" not in done.stdout


def test_git_believes_its_variable(origin: str, trust: Trust, tmp_path: Path) -> None:
    command = ["git", "-c", "http.proxy=", "ls-remote", "URL"]
    for environment, trusted in ((trust_environment(str(trust.directory)), True), ({}, False)):
        done = fetch(command, origin, environment, tmp_path)
        assert ("certificate" not in done.stderr) is trusted, done.stderr


def test_curl_believes_the_directory_alone(origin: str, trust: Trust, tmp_path: Path) -> None:
    done = fetch(
        ["curl", "-sS", "--capath", str(trust.certs), "URL"], origin, {"SSL_CERT_FILE": "/dev/null"}, tmp_path
    )
    assert done.stdout == "trusted\n", done.stderr


def test_java_believes_the_default_store_alone(origin: str, trust: Trust, tmp_path: Path) -> None:
    options = f"-Djavax.net.ssl.trustStore={trust.java_default}"
    done = fetch(["java", options, "FETCH.java", "URL"], origin, {}, tmp_path)
    assert done.stdout == "trusted\n", done.stderr


def test_a_strict_python_believes_the_bundle(origin: str, trust: Trust) -> None:
    context = ssl.create_default_context(cafile=str(trust.bundle))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    port = int(origin.rsplit(":", 1)[1].rstrip("/"))
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as wrapped,
    ):
        assert wrapped.version() == "TLSv1.3"
