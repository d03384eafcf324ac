"""Finding clients without installing any."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.cache import Cache, folder


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    (tmp_path / "python/bin").mkdir(parents=True)
    (tmp_path / "python/lib/python3.11/site-packages/requests").mkdir(parents=True)
    tool = tmp_path / "python/bin/some-tool"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    return Cache(tmp_path)


@pytest.mark.parametrize(
    ("need", "lacks"),
    [
        pytest.param("sh", None, id="a command of the system"),
        pytest.param("some-tool", None, id="a command of the folder"),
        pytest.param("python:requests", None, id="a package of the folder"),
        pytest.param("no-such-tool", "no-such-tool is not installed", id="no command"),
        pytest.param("python:nothing", "the Python package nothing is not installed", id="no package"),
    ],
)
def test_a_need_is_met_or_the_reason_said(cache: Cache, need: str, lacks: str | None) -> None:
    assert cache.lacks(need) == lacks


def test_a_sandbox_is_shown_what_exists(cache: Cache, tmp_path: Path) -> None:
    assert str(tmp_path) in cache.binds
    assert str(tmp_path / "none") not in Cache(tmp_path / "none").binds


def test_the_folder_is_where_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder() == tmp_path / "egressd-clients"
