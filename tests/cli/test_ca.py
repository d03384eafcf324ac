"""`egressd ca`: public certificates come out, keys never."""

from __future__ import annotations

import json
import os
import shlex
import stat
from pathlib import Path

import pytest
import typer
from cryptography import x509
from typer.testing import CliRunner, Result

from egressd.cli import ca as verb
from egressd.control.ca import CaPaths

app = typer.Typer()
verb.register(app)
app.callback()(lambda: None)


@pytest.fixture
def place(tmp_path: Path) -> CaPaths:
    return CaPaths.at(tmp_path / "ca")


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(app, ["ca", *map(str, args)])


def test_export_prints_the_certificate_and_never_a_key(place: CaPaths) -> None:
    result = run("export", "--ca-dir", place.ca)
    assert result.exit_code == 0
    certificate = x509.load_pem_x509_certificate(result.stdout.encode())
    assert result.stdout == place.certificate.read_text()
    assert certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert "PRIVATE" not in result.output
    assert "made a new authority" in result.stderr


def test_a_second_export_is_the_same_authority(place: CaPaths) -> None:
    first, second = run("export", "--ca-dir", place.ca), run("export", "--ca-dir", place.ca)
    assert first.stdout == second.stdout
    assert second.stderr == ""


def test_show_says_which_authority_it_is(place: CaPaths) -> None:
    run("export", "--ca-dir", place.ca)
    result = run("show", "--ca-dir", place.ca)
    said = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    certificate = x509.load_pem_x509_certificate(place.certificate.read_bytes())
    assert said["subject"] == certificate.subject.rfc4514_string()
    assert len(said["sha-256"].split(":")) == 32
    assert said["valid"].endswith(f"{certificate.not_valid_after_utc:%Y-%m-%d}")
    assert said["certificate"] == str(place.certificate)
    assert "PRIVATE" not in result.output


def test_show_makes_nothing(place: CaPaths) -> None:
    result = run("show", "--ca-dir", place.ca)
    assert result.exit_code == 3
    assert "there is no certificate authority" in result.stderr
    assert "hint: " in result.stderr
    assert not place.ca.exists()


def test_export_to_a_file_replaces_a_link_and_does_not_follow_it(place: CaPaths, tmp_path: Path) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out.crt"
    victim.write_text("precious")
    out.symlink_to(victim)
    result = run("export", "--ca-dir", place.ca, "--out", out)
    assert (result.exit_code, result.stdout) == (0, "")
    assert victim.read_text() == "precious"
    assert out.read_bytes() == place.certificate.read_bytes()
    assert stat.S_IMODE(out.stat().st_mode) & 0o444 == 0o444
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ca", "out.crt", "victim"]


def test_export_to_where_nothing_can_be_written_is_status_3(place: CaPaths, tmp_path: Path) -> None:
    result = run("export", "--ca-dir", place.ca, "--out", tmp_path / "none" / "out.crt")
    assert result.exit_code == 3
    assert "No such file" in result.stderr


def test_env_in_every_format_names_files_that_are_there(place: CaPaths) -> None:
    as_json = json.loads(run("env", "--ca-dir", place.ca, "--format", "json").stdout)
    assert Path(as_json["SSL_CERT_FILE"]).read_bytes().endswith(place.certificate.read_bytes())
    assert Path(as_json["NODE_EXTRA_CA_CERTS"]).read_bytes() == place.certificate.read_bytes()
    exports = shlex.split(run("env", "--ca-dir", place.ca).stdout)
    assert dict(word.split("=", 1) for word in exports if word != "export") == as_json
    docker = run("env", "--ca-dir", place.ca, "--format", "docker").stdout
    assert dict(line.split("=", 1) for line in docker.splitlines()) == as_json


def test_env_may_name_the_directory_as_a_container_sees_it(place: CaPaths) -> None:
    result = run("env", "--ca-dir", place.ca, "--format", "docker", "--at", "/etc/egressd-trust")
    assert "SSL_CERT_FILE=/etc/egressd-trust/bundle.crt\n" in result.stdout
    assert "read-only at /etc/egressd-trust" in result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["env", "--format", "xml"], "format"),
        (["env", "--at", "relative"], "no absolute path"),
        (["env", "--format", "docker", "--at", "/a\nb"], "no line breaks"),
    ],
)
def test_bad_input_is_status_2(place: CaPaths, args: list[str], words: str) -> None:
    result = run(*args, "--ca-dir", place.ca)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_a_bad_configuration_is_status_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EGRESSD_DNS_DENIED", "maybe")
    assert run("show").exit_code == 2


def test_rotate_has_both_trusted_until_it_is_finished(place: CaPaths) -> None:
    before = run("export", "--ca-dir", place.ca).stdout
    result = run("rotate", "--ca-dir", place.ca)
    both = run("export", "--ca-dir", place.ca).stdout
    assert result.exit_code == 0
    assert "also trusted" in result.stdout
    assert "until `egressd ca rotate --finish`" in result.stderr
    assert both.endswith(before)
    assert both.count("BEGIN CERTIFICATE") == 2
    assert (place.trust / "ca.crt").read_text() == both
    assert "also trusted" in run("show", "--ca-dir", place.ca).stdout
    assert run("rotate", "--ca-dir", place.ca).exit_code == 3
    result = run("rotate", "--finish", "--ca-dir", place.ca)
    assert result.exit_code == 0
    assert "also trusted" not in result.stdout
    assert run("export", "--ca-dir", place.ca).stdout == both.removesuffix(before)
    assert (place.trust / "ca.crt").read_text() == both.removesuffix(before)
    assert run("rotate", "--finish", "--ca-dir", place.ca).exit_code == 3


def test_an_overlap_is_a_time(place: CaPaths) -> None:
    assert run("rotate", "--overlap", "soon", "--ca-dir", place.ca).exit_code == 2
    run("export", "--ca-dir", place.ca)
    assert "also trusted" in run("rotate", "--overlap", "2h", "--ca-dir", place.ca).stdout


def test_rotate_without_an_overlap_replaces_authority_and_trust(place: CaPaths) -> None:
    before = run("export", "--ca-dir", place.ca).stdout
    result = run("rotate", "--overlap", "0", "--ca-dir", place.ca)
    after = run("export", "--ca-dir", place.ca).stdout
    assert result.exit_code == 0
    assert "restart sandboxes" in result.stderr
    assert after != before
    assert (place.trust / "ca.crt").read_text() == after


def test_a_key_that_others_can_read_is_refused(place: CaPaths) -> None:
    run("export", "--ca-dir", place.ca)
    os.chmod(place.key, 0o644)
    result = run("export", "--ca-dir", place.ca)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "can be read by others" in result.stderr
