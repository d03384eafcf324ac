"""Reading long-lived secrets: what is one, where it may lie, and that no complaint ever shows it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from egressd.credentials.lease import SECRET_LIMIT
from egressd.credentials.providers import base
from egressd.credentials.providers.base import SourceFailed, provider_of, read_secret, take_variables
from egressd.policy.credential import SecretRef, Source

CANARY = "canary-5c0ffee"
VARIABLE = "EGRESSD_TEST_SECRET"


def read(path: Path, *, lines: bool = False) -> str:
    return asyncio.run(read_secret(SecretRef(file=str(path)), lines=lines))


def secret(tmp_path: Path, content: bytes, mode: int = 0o600) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        pytest.param(b"abc", "abc", id="as it is"),
        pytest.param(b"abc\n", "abc", id="a newline at the end is taken off"),
        pytest.param(b"abc\r\n", "abc", id="so is one of Windows"),
        pytest.param("schlüssel".encode(), "schlüssel", id="letters of any language"),
        pytest.param(b"a b", "a b", id="a space inside"),
        pytest.param(b"x" * SECRET_LIMIT + b"\n", "x" * SECRET_LIMIT, id="as long as can be"),
    ],
)
def test_a_secret_is_what_stands_in_the_file(tmp_path: Path, content: bytes, wanted: str) -> None:
    assert read(secret(tmp_path, content)) == wanted


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(b"", "empty", id="nothing"),
        pytest.param(b"\n", "empty", id="a newline alone"),
        pytest.param(b"   \n", "empty", id="spaces alone"),
        pytest.param(f"{CANARY}\r\nX: b".encode(), "control character", id="a header of somebody's own"),
        pytest.param(f"{CANARY}\n\n".encode(), "control character", id="two newlines"),
        pytest.param(f"{CANARY}\0".encode(), "control character", id="NUL"),
        pytest.param(f"{CANARY}\x7f".encode(), "control character", id="DEL"),
        pytest.param(f"{CANARY}\u0085".encode(), "control character", id="a newline of C1"),
        pytest.param(f"{CANARY}\u2028".encode(), "control character", id="a line separator"),
        pytest.param(f"{CANARY} ".encode(), "space", id="a space behind, which a header's reader takes off"),
        pytest.param(f" {CANARY}".encode(), "space", id="a space before"),
        pytest.param(f"{CANARY}".encode() + b"\xff", "UTF-8", id="no text"),
        pytest.param(CANARY.encode() * 2000, "16 KiB", id="too long"),
    ],
)
def test_what_is_no_secret_is_refused_without_being_shown(tmp_path: Path, content: bytes, why: str) -> None:
    with pytest.raises(SourceFailed, match=why) as refused:
        read(secret(tmp_path, content))
    assert CANARY not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__ or refused.value.__context__ is None


def test_a_key_may_have_lines_where_its_reader_says_so(tmp_path: Path) -> None:
    pem = "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"
    path = secret(tmp_path, pem.encode())
    assert read(path, lines=True) == pem.rstrip("\n")
    with pytest.raises(SourceFailed, match="control character"):
        read(path)
    path.write_bytes(b"a\0b")
    with pytest.raises(SourceFailed, match="control character"):
        read(path, lines=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="gives files away")
@pytest.mark.parametrize(
    ("owner", "mode", "why"),
    [
        pytest.param(0, 0o600, None, id="root's own"),
        pytest.param(0, 0o444, None, id="root's, for everybody to read, as Docker mounts secrets"),
        pytest.param(4711, 0o600, None, id="another's, for the owner alone"),
        pytest.param(4711, 0o640, None, id="another's, for a group"),
        pytest.param(4711, 0o644, "everybody can read", id="another's, for everybody to read"),
        pytest.param(0, 0o602, "everybody can write", id="for everybody to write"),
    ],
)
def test_who_may_read_and_write_the_file_counts(
    tmp_path: Path, owner: int, mode: int, why: str | None
) -> None:
    path = secret(tmp_path, CANARY.encode(), mode)
    os.chown(path, owner, -1)
    if why is None:
        assert read(path) == CANARY
    else:
        with pytest.raises(SourceFailed, match=why):
            read(path)


def test_only_a_regular_file_is_read_and_nothing_is_waited_for(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for path in (fifo, tmp_path, Path("/dev/zero")):
        with pytest.raises(SourceFailed, match="no regular file"):
            read(path)
    with pytest.raises(SourceFailed, match="No such file"):
        read(tmp_path / "none")


def test_a_link_is_followed_as_mounted_secrets_have_them(tmp_path: Path) -> None:
    path = secret(tmp_path, b"abc")
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read(link) == "abc"


def test_a_variable_is_read_and_a_missing_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, CANARY)
    assert asyncio.run(read_secret(SecretRef(env=VARIABLE))) == CANARY
    monkeypatch.setenv(VARIABLE, f"{CANARY}\n\nx")
    with pytest.raises(SourceFailed, match=VARIABLE) as refused:
        asyncio.run(read_secret(SecretRef(env=VARIABLE)))
    assert CANARY not in str(refused.value)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(SourceFailed, match=f"{VARIABLE} is not set"):
        asyncio.run(read_secret(SecretRef(env=VARIABLE)))


_TAKING = f"""
import asyncio, os, subprocess, sys
from egressd.credentials.providers.base import read_secret, take_variables
from egressd.policy.credential import SecretRef
take_variables(["{VARIABLE}", "NOT_THERE"])
assert "{VARIABLE}" not in os.environ
assert b"{CANARY}" not in open("/proc/self/environ", "rb").read()
assert b"BESIDE=stays" in open("/proc/self/environ", "rb").read()
assert "{CANARY}" not in subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
print(asyncio.run(read_secret(SecretRef(env="{VARIABLE}"))))
"""


def test_a_variable_that_was_taken_is_nowhere_but_here() -> None:
    env = {"PATH": os.environ["PATH"], VARIABLE: CANARY, "BESIDE": "stays", "PYTHONPATH": os.getcwd()}
    ran = subprocess.run(
        [sys.executable, "-c", _TAKING], env=env, capture_output=True, text=True, check=False
    )
    assert (ran.stdout, ran.returncode) == (f"{CANARY}\n", 0), ran.stderr


def test_a_variable_is_taken_in_its_newest_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_taken", {})
    for value in ("one", "two"):
        monkeypatch.setenv(VARIABLE, value)
        take_variables([VARIABLE])
        assert asyncio.run(read_secret(SecretRef(env=VARIABLE))) == value
        assert VARIABLE not in os.environ
    assert "two" not in repr(base._taken)


def test_a_source_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> object:
        raise ImportError("no module named hvac")

    monkeypatch.setitem(base._MODULES, "env", missing)
    with pytest.raises(SourceFailed, match="not installed"):
        provider_of("x", Source(env="X"))
    monkeypatch.setattr(base, "_EXTRAS", {"env": "environment"})
    with pytest.raises(SourceFailed, match=r"needs egressd\[environment\]"):
        provider_of("x", Source(env="X"))


def test_every_source_has_a_module() -> None:
    assert base._MODULES.keys() == Source.model_fields.keys()
