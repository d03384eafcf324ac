"""Leaves: exactly the judged name, strict X.509, bounded caches, and no key left in any file."""

from __future__ import annotations

import datetime
import os
import pickle
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from egressd.gate.tls.leaves import EXPLAIN_PER_MINUTE, Issuer, IssuerExpiredError, Leaves

from .authority import DAY, NOW, Authority, client_context, make_authority, pem, shake_hands

AUTHORITY = make_authority()


def leaf_of(leaves: Leaves, host: str, authority: Authority = AUTHORITY) -> x509.Certificate:
    """Return the leaf that a strict client accepted for `host`."""
    _, client = shake_hands(leaves.context_for(host), client_context(authority.root_pem), host)
    der = client.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der)


class TestTheLeaf:
    @pytest.mark.parametrize(
        "host", ["pypi.org", "a" * 63 + "." + "b" * 63 + ".test", "under_score.test", "x"]
    )
    def test_it_names_the_judged_host_and_nothing_else(self, host: str) -> None:
        leaf = leaf_of(Leaves(AUTHORITY.issuer), host)
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert list(names) == [x509.DNSName(host)]

    @pytest.mark.parametrize("host", ["192.0.2.7", "2001:db8::7"])
    def test_an_address_is_named_as_an_address(self, host: str) -> None:
        leaf = leaf_of(Leaves(AUTHORITY.issuer), host)
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert [str(name) for name in names.get_values_for_type(x509.IPAddress)] == [host]

    @pytest.mark.parametrize("host", ["", "*.evil.test", "a.*.test", "ü.test"])
    def test_what_no_judge_can_have_passed_is_refused(self, host: str) -> None:
        with pytest.raises(ValueError, match="no certificate"):
            Leaves(AUTHORITY.issuer).context_for(host)

    def test_another_name_is_refused_by_the_client(self) -> None:
        with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
            shake_hands(
                Leaves(AUTHORITY.issuer).context_for("a.test"), client_context(AUTHORITY.root_pem), "b.test"
            )

    def test_its_key_is_not_the_issuers_and_may_not_sign(self) -> None:
        leaf = leaf_of(Leaves(AUTHORITY.issuer), "a.test")
        assert leaf.public_key() != AUTHORITY.issuer.certificate.public_key()
        usage = leaf.extensions.get_extension_for_class(x509.KeyUsage)
        assert usage.critical
        assert usage.value.digital_signature
        assert not usage.value.key_cert_sign
        assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca

    def test_it_serves_a_slow_clock_and_never_outlives_its_issuer(self) -> None:
        leaf = leaf_of(Leaves(AUTHORITY.issuer), "a.test")
        assert leaf.not_valid_before_utc <= datetime.datetime.now(datetime.UTC) - 2 * DAY
        assert leaf.not_valid_after_utc == AUTHORITY.issuer.certificate.not_valid_after_utc
        assert (leaf.not_valid_after_utc - leaf.not_valid_before_utc).days < 398

    def test_it_begins_no_earlier_than_its_issuer(self) -> None:
        young = make_authority(begin=NOW - DAY / 24)
        leaf = leaf_of(Leaves(young.issuer), "a.test", young)
        assert leaf.not_valid_before_utc == NOW - DAY / 24

    def test_openssl_verifies_the_chain_strictly(self, tmp_path: Path) -> None:
        leaf = leaf_of(Leaves(AUTHORITY.issuer), "a.test")
        files = {"root": AUTHORITY.root, "mid": AUTHORITY.issuer.certificate, "leaf": leaf}
        for name, certificate in files.items():
            (tmp_path / name).write_bytes(pem(certificate))
        command = "openssl verify -x509_strict -purpose sslserver -verify_hostname a.test"
        subprocess.run(
            [*command.split(), "-CAfile", "root", "-untrusted", "mid", "leaf"],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )

    def test_serials_differ(self) -> None:
        leaves = Leaves(AUTHORITY.issuer)
        assert leaf_of(leaves, "a.test").serial_number != leaf_of(leaves, "b.test").serial_number


def explained(leaves: Leaves, host: str, alpn: str) -> ssl.SSLContext:
    context = leaves.explain_context_for("sb", host, 0.0, alpn)
    assert context is not None
    return context


class TestTheContext:
    def test_tls_1_1_is_refused(self) -> None:
        context = Leaves(AUTHORITY.issuer).context_for("a.test")
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
        assert context.options & ssl.OP_NO_COMPRESSION
        assert context.options & ssl.OP_NO_RENEGOTIATION
        assert context.num_tickets == 1

    @pytest.mark.parametrize(
        ("ours", "theirs", "chosen"),
        [
            ("http/1.1", ("h2", "http/1.1"), "http/1.1"),
            ("h2", ("http/1.1", "h2"), "h2"),
            ("h2", ("h2",), "h2"),
            ("http/1.1", ("h2",), None),
            ("http/1.1", ("acme-tls/1",), None),
        ],
    )
    def test_protocols(self, ours: str, theirs: tuple[str, ...], chosen: str | None) -> None:
        leaves = Leaves(AUTHORITY.issuer)
        for context in (leaves.context_for("a.test", ours), explained(leaves, "a.test", ours)):
            server, _ = shake_hands(context, client_context(AUTHORITY.root_pem, theirs), "a.test")
            assert server.selected_alpn_protocol() == chosen

    def test_a_host_has_a_context_for_each_protocol(self) -> None:
        leaves = Leaves(AUTHORITY.issuer)
        first, second = leaves.context_for("a.test"), leaves.context_for("a.test", "h2")
        assert first is not second
        assert leaves.context_for("a.test", "http/1.1") is first
        assert leaves.context_for("a.test", "h2") is second


class TestTheCaches:
    def test_a_host_keeps_its_context_until_others_were_used_more_lately(self) -> None:
        leaves = Leaves(AUTHORITY.issuer, capacity=2)
        a, b = leaves.context_for("a.test"), leaves.context_for("b.test")
        assert leaves.context_for("a.test") is a
        leaves.context_for("c.test")
        assert leaves.context_for("a.test") is a
        assert leaves.context_for("b.test") is not b

    def test_explained_hosts_never_push_out_allowed_ones(self) -> None:
        leaves = Leaves(AUTHORITY.issuer, capacity=1, explain_capacity=2)
        a = leaves.context_for("a.test")
        for number in range(5):
            assert leaves.explain_context_for("s", f"{number}.test", 0) is not a
        assert leaves.context_for("a.test") is a
        assert repr(leaves) == "Leaves(1 allowed, 2 explained)"

    def test_a_new_issuer_signs_from_now_on(self) -> None:
        other = make_authority()
        leaves = Leaves(AUTHORITY.issuer)
        leaf_of(leaves, "a.test")
        leaves.explain_context_for("s", "b.test", 0)
        leaves.replace_issuer(other.issuer)
        leaf_of(leaves, "a.test", other)
        assert repr(leaves) == "Leaves(1 allowed, 0 explained)"

    def test_an_expired_issuer_mints_nothing(self) -> None:
        leaves = Leaves(AUTHORITY.issuer, clock=lambda: (NOW + 2 * DAY).timestamp())
        with pytest.raises(IssuerExpiredError, match="ended at"):
            leaves.context_for("a.test")

    def test_sessions_of_clients_without_tickets_do_not_pile_up(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("egressd.gate.tls.leaves._SWEEP_EVERY", 8)
        leaves = Leaves(AUTHORITY.issuer)
        client = client_context(AUTHORITY.root_pem)
        client.maximum_version = ssl.TLSVersion.TLSv1_2
        client.options |= ssl.OP_NO_TICKET
        held = []
        for _ in range(40):
            context = leaves.context_for("a.test")
            server, connected = shake_hands(context, client, "a.test")
            for side in (connected, server):  # only a session that ended properly is kept by OpenSSL
                try:
                    side.unwrap()
                except ssl.SSLWantReadError:
                    continue
            held.append(context.session_stats()["number"])
        assert 0 < max(held) <= 9


class TestTheRate:
    def test_one_sandbox_mints_thirty_a_minute_and_the_others_are_not_hurt(self) -> None:
        leaves = Leaves(AUTHORITY.issuer)
        granted = [leaves.explain_context_for("a", f"{n}.test", 100.0) for n in range(EXPLAIN_PER_MINUTE + 5)]
        assert [context is None for context in granted] == [False] * EXPLAIN_PER_MINUTE + [True] * 5
        assert leaves.explain_context_for("b", "other.test", 100.0) is not None
        assert leaves.explain_context_for("a", "later.test", 101.9) is None
        assert leaves.explain_context_for("a", "later.test", 102.1) is not None
        assert leaves.explain_context_for("a", "again.test", 102.1) is None

    def test_a_kept_context_costs_nothing(self) -> None:
        leaves = Leaves(AUTHORITY.issuer)
        assert {leaves.explain_context_for("a", "same.test", 0) is None for _ in range(100)} == {False}

    def test_a_clock_that_goes_back_grants_nothing(self) -> None:
        leaves = Leaves(AUTHORITY.issuer, explain_capacity=1)
        for n in range(EXPLAIN_PER_MINUTE):
            leaves.explain_context_for("a", f"{n}.test", 1000.0)
        assert leaves.explain_context_for("a", "x.test", 5.0) is None


class TestFiles:
    def test_the_file_that_leaves_pass_by_is_private_and_emptied_at_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[int] = []
        load = ssl.SSLContext.load_cert_chain

        def spy(context: ssl.SSLContext, name: str) -> None:
            seen.append(stat.S_IMODE(Path(name).stat().st_mode))
            load(context, name)

        monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", spy)
        before = os.umask(0)
        try:
            leaves = Leaves(AUTHORITY.issuer)
            leaves.settle(tmp_path / "leaf.pem")
            leaf_of(leaves, "a.test")
            leaf_of(leaves, "b.test")
        finally:
            os.umask(before)
        assert seen == [0o600] * 2
        assert [file.stat().st_size for file in tmp_path.iterdir()] == [0]

    def test_a_failed_load_leaves_nothing_in_it_either(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(context: ssl.SSLContext, name: str) -> None:
            raise OSError("no")

        monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", fail)
        leaves = Leaves(AUTHORITY.issuer)
        leaves.settle(tmp_path / "leaf.pem")
        with pytest.raises(OSError, match="no"):
            leaves.context_for("a.test")
        assert [file.stat().st_size for file in tmp_path.iterdir()] == [0]

    def test_a_file_that_is_there_already_is_not_taken(self, tmp_path: Path) -> None:
        (tmp_path / "leaf.pem").write_text("another's")
        with pytest.raises(FileExistsError):
            Leaves(AUTHORITY.issuer).settle(tmp_path / "leaf.pem")

    def test_no_descriptor_stays_open(self) -> None:
        leaves = Leaves(AUTHORITY.issuer)
        before = len(os.listdir("/proc/self/fd"))
        for n in range(5):
            leaves.context_for(f"{n}.test")
        assert len(os.listdir("/proc/self/fd")) == before

    @pytest.mark.root
    @pytest.mark.skipif(os.geteuid() != 0, reason="chroot needs root")
    def test_it_mints_in_an_empty_root_without_proc(self, tmp_path: Path) -> None:
        script = (
            "import os, pickle, sys\n"
            "from pathlib import Path\n"
            "from egressd.gate.tls.leaves import Issuer, Leaves\n"
            "pair = pickle.load(sys.stdin.buffer)\n"
            "os.chroot(sys.argv[1]); os.chdir('/'); os.setgid(65534); os.setuid(65534)\n"
            "leaves = Leaves(Issuer.from_pem(*pair)); leaves.settle(Path('/leaf.pem'))\n"
            "leaves.context_for('a.test'); leaves.context_for('192.0.2.7')\n"
            "print(leaves, os.listdir('/'))\n"
        )
        os.chown(tmp_path, 65534, 65534)
        key = AUTHORITY.issuer.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        done = subprocess.run(
            [sys.executable, "-c", script, tmp_path],
            input=pickle.dumps((pem(*AUTHORITY.issuer.chain), key)),
            capture_output=True,
            check=False,
            cwd=Path(__file__).parents[3],
        )
        assert (done.stdout, done.stderr) == (b"Leaves(2 allowed, 0 explained) ['leaf.pem']\n", b"")


class TestTheIssuer:
    def test_it_comes_from_pem_and_hides_its_key(self) -> None:
        key = AUTHORITY.issuer.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        issuer = Issuer.from_pem(pem(*AUTHORITY.issuer.chain), key)
        assert issuer.chain == AUTHORITY.issuer.chain
        assert "key" not in repr(issuer)

    @pytest.mark.parametrize(
        ("chain", "key"),
        [(b"", b""), (b"noise", b"noise"), (pem(AUTHORITY.root), b"-----BEGIN PRIVATE KEY-----\nSECRET")],
    )
    def test_noise_is_refused_without_being_repeated(self, chain: bytes, key: bytes) -> None:
        with pytest.raises(ValueError, match="not readable PEM") as caught:
            Issuer.from_pem(chain, key)
        assert "SECRET" not in str(caught.value)

    def test_another_key_is_refused(self) -> None:
        other = make_authority().issuer.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        with pytest.raises(ValueError, match="not the EC key"):
            Issuer.from_pem(pem(*AUTHORITY.issuer.chain), other)
