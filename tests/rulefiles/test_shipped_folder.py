"""Where the shipped rules are found: in the package when it was built as a wheel, else in the checkout."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from egressd.rulefiles import shipped

ROOT = Path(__file__).resolve().parents[2]


def test_a_checkout_has_them_at_its_top() -> None:
    with shipped.shipped_rules() as folder:
        assert folder.samefile(ROOT / "rules")


def test_a_wheel_carries_them_where_they_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    included = targets["wheel"]["force-include"]["rules"]
    package = tmp_path / "egressd"
    (tmp_path / included / "services").mkdir(parents=True)
    monkeypatch.setattr(shipped, "files", lambda _name: package)
    with shipped.shipped_rules() as folder:
        assert folder == tmp_path / included


def test_an_installation_without_any_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped, "files", lambda _name: tmp_path / "egressd")
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "rules")), shipped.shipped_rules():
        pass
