"""The authority: made once whoever comes first, refused when it is open or broken, silent about its keys."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from egressd.control.ca import (
    Authority,
    CaPaths,
    finish,
    issue_worker_intermediate,
    load,
    load_or_create,
    rotate,
)
from egressd.control.ca_files import CaError

NOW = time.time()
DAY = 86400.0


@pytest.fixture
def paths(tmp_path: Path) -> CaPaths:
    return CaPaths.at(tmp_path / "ca")


@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def private_pem(authority: Authority) -> bytes:
    return authority.key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


class TestPaths:
    def test_system(self) -> None:
        paths = CaPaths.system()
        assert str(paths.key) == "/var/lib/egressd/ca/ca.key"
        assert str(paths.trust) == "/var/lib/egressd/trust"

    @pytest.mark.parametrize(
        ("environ", "expected"),
        [
            ({"HOME": "/home/a"}, "/home/a/.local/share/egressd/ca/ca.crt"),
            ({"HOME": "/home/a", "XDG_DATA_HOME": "/data"}, "/data/egressd/ca/ca.crt"),
            ({"HOME": "/home/a", "XDG_DATA_HOME": "relative"}, "/home/a/.local/share/egressd/ca/ca.crt"),
            ({"HOME": "/home/a", "XDG_DATA_HOME": ""}, "/home/a/.local/share/egressd/ca/ca.crt"),
        ],
    )
    def test_rootless(self, environ: dict[str, str], expected: str) -> None:
        assert str(CaPaths.rootless(environ).certificate) == expected

    def test_what_sandboxes_see_is_never_inside_the_key_directory(self) -> None:
        for paths in (CaPaths.system(), CaPaths.rootless({"HOME": "/h"}), CaPaths.at(Path("/x/y"))):
            assert paths.ca not in paths.trust.parents
            assert paths.ca != paths.trust


class TestCreation:
    def test_a_restart_never_changes_the_authority(self, paths: CaPaths) -> None:
        first = load_or_create(paths, NOW)
        again = load_or_create(paths, NOW + 1000)
        assert again.fingerprint == first.fingerprint
        assert load(paths, NOW).fingerprint == first.fingerprint

    @pytest.mark.usefixtures("open_umask")
    def test_modes_do_not_depend_on_the_umask(self, paths: CaPaths) -> None:
        load_or_create(paths, NOW)
        assert stat.S_IMODE(paths.ca.stat().st_mode) == 0o700
        assert stat.S_IMODE(paths.key.stat().st_mode) == 0o600
        assert sorted(path.name for path in paths.ca.iterdir()) == ["ca.crt", "ca.key"]

    def test_the_root_is_what_strict_clients_want(self, paths: CaPaths) -> None:
        root = load_or_create(paths, NOW).certificate
        constraints = root.extensions.get_extension_for_class(x509.BasicConstraints)
        usage = root.extensions.get_extension_for_class(x509.KeyUsage)
        assert (constraints.critical, constraints.value.ca, constraints.value.path_length) == (True, True, 1)
        assert (usage.critical, usage.value.key_cert_sign, usage.value.crl_sign) == (True, True, True)
        assert root.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest
        assert isinstance(root.public_key(), ec.EllipticCurvePublicKey)
        assert 3650 <= (root.not_valid_after_utc - root.not_valid_before_utc).days <= 3660
        assert root.not_valid_before_utc.timestamp() < NOW - DAY

    def test_two_installations_have_two_names(self, tmp_path: Path) -> None:
        a = load_or_create(CaPaths.at(tmp_path / "a"), NOW)
        b = load_or_create(CaPaths.at(tmp_path / "b"), NOW)
        assert a.certificate.subject != b.certificate.subject
        assert a.fingerprint != b.fingerprint

    def test_processes_that_start_at_once_agree(self, paths: CaPaths) -> None:
        fork = multiprocessing.get_context("spawn")
        with fork.Pool(4) as pool:
            found = pool.map(_fingerprint, [str(paths.ca)] * 8)
        assert len(set(found)) == 1

    @pytest.mark.parametrize(
        "survivors", [("ca.key", "ca.crt.new"), ("ca.key.new", "ca.crt.new"), ("ca.key.new",)]
    )
    def test_a_creation_that_was_killed_does_not_stand_in_the_way(
        self, paths: CaPaths, survivors: tuple[str, ...]
    ) -> None:
        created = load_or_create(paths, NOW)
        paths.key.rename(paths.ca / survivors[0])
        paths.certificate.rename(paths.ca / survivors[-1]) if len(
            survivors
        ) > 1 else paths.certificate.unlink()
        again = load_or_create(paths, NOW)
        assert (again.fingerprint == created.fingerprint) is ("ca.key" in survivors)
        assert sorted(path.name for path in paths.ca.iterdir()) == ["ca.crt", "ca.key"]

    def test_a_rotation_that_was_killed_leaves_the_old_authority(self, paths: CaPaths) -> None:
        created = load_or_create(paths, NOW)
        (paths.ca / "ca.key.new").write_bytes(b"-----BEGIN")
        (paths.ca / "ca.crt.new").write_bytes(b"-----BEGIN")
        assert load(paths, NOW).fingerprint == created.fingerprint
        assert sorted(path.name for path in paths.ca.iterdir()) == ["ca.crt", "ca.key"]

    def test_rotation_makes_another_and_removes_the_old_key(self, paths: CaPaths) -> None:
        first = load_or_create(paths, NOW)
        second = rotate(paths, NOW)
        assert second.fingerprint != first.fingerprint
        assert load(paths, NOW).fingerprint == second.fingerprint
        assert sorted(path.name for path in paths.ca.iterdir()) == ["ca.crt", "ca.key"]


def certificates(pem: bytes) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(pem)


class TestOverlap:
    def test_both_are_trusted_and_the_new_one_signs(self, paths: CaPaths) -> None:
        first = load_or_create(paths, NOW)
        second = rotate(paths, NOW, DAY)
        assert certificates(second.trusted_pem) == [second.certificate, first.certificate]
        again = load_or_create(paths, NOW + DAY - 60)
        assert again.fingerprint == second.fingerprint
        assert again.previous == first.certificate
        assert again.until == pytest.approx(NOW + DAY, abs=1)
        issued = issue_worker_intermediate(again, "w", NOW)
        certificates(issued.chain_pem)[0].verify_directly_issued_by(second.certificate)
        assert b"PRIVATE" not in paths.previous.read_bytes()
        key = serialization.load_pem_private_key(paths.key.read_bytes(), None)
        assert key.public_key() == second.certificate.public_key()

    def test_its_time_ends_it(self, paths: CaPaths) -> None:
        load_or_create(paths, NOW)
        second = rotate(paths, NOW, DAY)
        after = load(paths, NOW + DAY + 1)
        assert (after.fingerprint, after.previous) == (second.fingerprint, None)
        assert after.trusted_pem == second.pem
        assert rotate(paths, NOW + DAY + 1, DAY).previous == second.certificate

    def test_a_word_ends_it(self, paths: CaPaths) -> None:
        load_or_create(paths, NOW)
        second = rotate(paths, NOW, DAY)
        assert finish(paths, NOW).trusted_pem == second.pem
        assert sorted(path.name for path in paths.ca.iterdir()) == ["ca.crt", "ca.key"]
        with pytest.raises(CaError, match="no other authority"):
            finish(paths, NOW)

    def test_two_at_a_time_and_no_more(self, paths: CaPaths) -> None:
        load_or_create(paths, NOW)
        second = rotate(paths, NOW, DAY)
        with pytest.raises(CaError, match="one more authority") as error:
            rotate(paths, NOW, DAY)
        assert "--finish" in error.value.hint
        assert load(paths, NOW).fingerprint == second.fingerprint
        third = rotate(paths, NOW)
        assert certificates(third.trusted_pem) == [third.certificate]

    def test_a_rotation_that_was_killed_before_it_replaced_anything_counts_for_nothing(
        self, paths: CaPaths
    ) -> None:
        first = load_or_create(paths, NOW)
        paths.previous.write_bytes(b"trusted until %d\n" % (NOW + DAY) + first.pem)
        assert load(paths, NOW).trusted_pem == first.pem
        assert rotate(paths, NOW, DAY).previous == first.certificate

    @pytest.mark.parametrize(
        "content",
        [b"", b"trusted until tomorrow\n", b"trusted until 99999999999999999999\n", b"\xff" * 100],
        ids=["nothing", "no time", "a time out of reach", "rubbish"],
    )
    def test_a_file_that_names_no_time_is_nobody_s_trust(self, paths: CaPaths, content: bytes) -> None:
        first = load_or_create(paths, NOW)
        paths.previous.write_bytes(content)
        assert load(paths, NOW).trusted_pem == first.pem

    def test_a_damaged_certificate_is_said(self, paths: CaPaths) -> None:
        load_or_create(paths, NOW)
        paths.previous.write_bytes(b"trusted until %d\nrubbish" % (NOW + DAY))
        with pytest.raises(CaError, match="not a certificate"):
            load(paths, NOW)

    def test_no_restart_changes_the_authority_or_what_is_trusted(self, paths: CaPaths) -> None:
        load_or_create(paths, NOW)
        second = rotate(paths, NOW, DAY)
        seen = {load_or_create(paths, NOW + hours * 3600).trusted_pem for hours in range(24)}
        assert seen == {second.trusted_pem}


def _fingerprint(directory: str) -> str:
    return load_or_create(CaPaths.at(Path(directory)), NOW).fingerprint


def foreign_pair(paths: CaPaths) -> None:
    other = CaPaths.at(paths.ca.with_name("other"))
    load_or_create(other, NOW)
    paths.certificate.write_bytes(other.certificate.read_bytes())


def a_leaf_instead(paths: CaPaths) -> None:
    authority = load_or_create(paths, NOW)
    issued = issue_worker_intermediate(authority, "w", NOW)
    paths.certificate.write_bytes(issued.chain_pem)
    paths.key.write_bytes(issued.key_pem)


def encrypted_key(paths: CaPaths) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    form = serialization.PrivateFormat.PKCS8
    encryption = serialization.BestAvailableEncryption(b"secret")
    paths.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, encryption))


def fifo(paths: CaPaths) -> None:
    paths.key.unlink()
    os.mkfifo(paths.key, 0o600)


BROKEN: dict[str, tuple[Callable[[CaPaths], object], float, str, str]] = {
    "a key that a group can read": (lambda p: p.key.chmod(0o640), NOW, "mode 0640", "chmod 600"),
    "a key that all can read": (lambda p: p.key.chmod(0o604), NOW, "mode 0604", "chmod 600"),
    "a directory that others can write": (lambda p: p.ca.chmod(0o770), NOW, "written by others", "chmod 700"),
    "no certificate": (lambda p: p.certificate.unlink(), NOW, "ca.crt: is missing", "ca.key"),
    "no key": (lambda p: p.key.unlink(), NOW, "ca.key: is missing", "ca.crt"),
    "another's certificate": (foreign_pair, NOW, "does not belong to the key", "backup"),
    "a key of noise": (lambda p: p.key.write_bytes(b"noise"), NOW, "not an unencrypted EC", "backup"),
    "an encrypted key": (encrypted_key, NOW, "not an unencrypted EC", "backup"),
    "a fifo for a key": (fifo, NOW, "not a small regular file", "backup"),
    "a certificate of noise": (lambda p: p.certificate.write_bytes(b"x"), NOW, "not a certificate", "backup"),
    "an intermediate for a root": (a_leaf_instead, NOW, "may sign intermediates", "pathlen 1"),
    "an expired root": (lambda _: None, NOW + 3700 * DAY, "expired at 20", "ca rotate"),
    "a clock years behind": (lambda _: None, NOW - 400 * DAY, "valid only from", "clock"),
}


@pytest.mark.parametrize(("spoil", "now", "problem", "hint"), BROKEN.values(), ids=BROKEN.keys())
def test_what_is_broken_is_refused_with_a_hint(
    paths: CaPaths, spoil: Callable[[CaPaths], object], now: float, problem: str, hint: str
) -> None:
    load_or_create(paths, NOW)
    spoil(paths)
    before = {path.name: path.stat().st_mtime_ns for path in paths.ca.iterdir()}
    for act in (load, load_or_create):
        with pytest.raises(CaError) as caught:
            act(paths, now)
        assert problem in str(caught.value)
        assert hint in caught.value.hint
    assert {path.name: path.stat().st_mtime_ns for path in paths.ca.iterdir()} == before, (
        "nothing was repaired"
    )


def test_reading_makes_nothing(paths: CaPaths) -> None:
    with pytest.raises(CaError, match="there is no certificate authority"):
        load(paths, NOW)
    assert not paths.ca.exists()


def test_a_place_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CaError) as caught:
        load_or_create(CaPaths.at(tmp_path / "file" / "ca"), NOW)
    assert "--ca-dir" in caught.value.hint


class TestIntermediates:
    def test_it_lives_a_day_and_may_sign_leaves_only(self, paths: CaPaths) -> None:
        authority = load_or_create(paths, NOW)
        issued = issue_worker_intermediate(authority, "worker-1", NOW)
        certificate = x509.load_pem_x509_certificate(issued.chain_pem)
        assert NOW < issued.not_after <= NOW + DAY
        assert certificate.not_valid_before_utc.timestamp() == pytest.approx(NOW - 2 * DAY, abs=2)
        assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
        certificate.verify_directly_issued_by(authority.certificate)

    def test_each_has_its_own_key_and_name(self, paths: CaPaths) -> None:
        authority = load_or_create(paths, NOW)
        one, two = (issue_worker_intermediate(authority, "w", NOW) for _ in range(2))
        assert one.key_pem != two.key_pem
        names = {x509.load_pem_x509_certificate(each.chain_pem).subject for each in (one, two)}
        assert len(names) == 2

    def test_it_never_outlives_the_root(self, paths: CaPaths) -> None:
        authority = load_or_create(paths, NOW)
        end = authority.certificate.not_valid_after_utc.timestamp()
        assert issue_worker_intermediate(authority, "w", end - 60).not_after == end

    @pytest.mark.parametrize("worker", ["", "w" * 500, "a\nb", "Ω", "x/y=z, CN=evil"])
    def test_any_worker_name_will_do(self, paths: CaPaths, worker: str) -> None:
        authority = load_or_create(paths, NOW)
        certificate = x509.load_pem_x509_certificate(
            issue_worker_intermediate(authority, worker, NOW).chain_pem
        )
        name = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)[0].value
        assert len(name) <= 64
        assert str(name).isprintable()

    def test_openssl_accepts_the_chain_strictly(self, paths: CaPaths, tmp_path: Path) -> None:
        authority = load_or_create(paths, NOW)
        file = tmp_path / "intermediate.pem"
        file.write_bytes(issue_worker_intermediate(authority, "w", NOW).chain_pem)
        subprocess.run(
            ["openssl", "verify", "-x509_strict", "-CAfile", paths.certificate, file],
            check=True,
            capture_output=True,
        )


def test_no_key_shows_in_any_text(paths: CaPaths) -> None:
    authority = load_or_create(paths, NOW)
    issued = issue_worker_intermediate(authority, "w", NOW)
    texts = repr(authority) + str(authority) + repr(issued) + str(issued)
    paths.key.chmod(0o644)
    with pytest.raises(CaError) as caught:
        load(paths, NOW)
    texts += repr(caught.value) + str(caught.value) + caught.value.hint
    assert "PRIVATE" not in texts
    for pem in (private_pem(authority), issued.key_pem):
        for line in pem.decode().splitlines()[1:-1]:
            assert line not in texts
