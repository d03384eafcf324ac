"""tools/refresh-lists: a vendor's file becomes a dated list, or nothing; hostile files included."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.rulefiles.hosts import read_list
from egressd.rulefiles.problems import Findings

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "refresh-lists"


def _loaded() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("refresh_lists", str(TOOL))
    spec = importlib.util.spec_from_loader("refresh_lists", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = writes
    return module


refresh = _loaded()

META = {
    "domains": {
        "website": ["*.github.com"],
        "actions_inbound": {
            "full_domains": [
                "github.com",
                "productionresultssa10.blob.core.windows.net",
                "productionresultssa2.blob.core.windows.net",
                "productionresultssa2.blob.core.windows.net",
            ],
            "wildcard_domains": ["*.actions.githubusercontent.com"],
        },
    }
}
HUB = {
    "lfsDomains": ["cdn-lfs.hf.co"],
    "cdnDomains": ["us.aws.cdn.hf.co"],
    "hubDomains": ["huggingface.co"],
}


def run(tmp_path: Path, kind: str, content: object) -> tuple[int, str, str]:
    file = tmp_path / "file.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    done = subprocess.run(
        [sys.executable, str(TOOL), kind, str(file), "--date", "2026-12-01"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_accounts_come_out_once_each_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    status, out, err = run(tmp_path, "github-actions-results", META)
    assert (status, err) == (0, "")
    assert out == (
        "# Storage accounts of GitHub Actions, 2026-12-01. From https://api.github.com/meta"
        " by tools/refresh-lists github-actions-results.\n"
        "productionresultssa2.blob.core.windows.net\n"
        "productionresultssa10.blob.core.windows.net\n"
    )
    assert len(read_list(out.encode(), "lists/a.txt", Findings())) == 2


def test_content_hosts_come_out_and_the_hub_itself_does_not(tmp_path: Path) -> None:
    status, out, _ = run(tmp_path, "huggingface-content", HUB)
    assert status == 0
    assert out.splitlines()[1:] == ["cdn-lfs.hf.co", "us.aws.cdn.hf.co"]


@pytest.mark.parametrize(
    ("kind", "content", "says"),
    [
        ("github-actions-results", b"\xff\xfe", "no JSON"),
        ("github-actions-results", b"[" * 100_000, "nested too deeply"),
        ("github-actions-results", [], "another shape than https://"),
        ("github-actions-results", {"domains": {"actions_inbound": {"full_domains": []}}}, "no such host"),
        (
            "github-actions-results",
            {"domains": {"actions_inbound": {"full_domains": ["mallory.blob.core.windows.net"]}}},
            "no such host",
        ),
        ("github-actions-results", {"domains": {"actions_inbound": {"full_domains": [7]}}}, "no host: 7"),
        ("huggingface-content", {"lfsDomains": ["*.hf.co"], "cdnDomains": []}, "no exact host"),
        ("huggingface-content", {"lfsDomains": ["a.hf.co\nevil.com"], "cdnDomains": []}, "no exact host"),
        ("huggingface-content", {"lfsDomains": ["A.hf.co"], "cdnDomains": []}, "no exact host"),
        ("huggingface-content", {"lfsDomains": ["evilhf.co"], "cdnDomains": []}, "does not lie below"),
        ("huggingface-content", {"lfsDomains": ["pastebin.com"], "cdnDomains": []}, "does not lie below"),
        ("huggingface-content", {"lfsDomains": "abc", "cdnDomains": []}, "no exact host"),
    ],
)
def test_a_file_that_says_something_else_makes_no_list(
    kind: str, content: object, says: str, tmp_path: Path
) -> None:
    status, out, err = run(tmp_path, kind, content)
    assert (status, out) == (2, "")
    assert says in err


def test_a_file_that_is_not_there_makes_no_list(tmp_path: Path) -> None:
    done = subprocess.run(
        [TOOL, "huggingface-content", tmp_path / "none", "--date", "2026-12-01"],
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, b"")


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.text(),
        lambda x: (
            st.lists(x)
            | st.dictionaries(
                st.sampled_from(["domains", "actions_inbound", "full_domains", "lfsDomains", "cdnDomains"]), x
            )
        ),
    ).map(lambda made: json.dumps(made).encode())
)
def test_any_file_is_a_list_of_hosts_where_they_belong_or_unfit(content: bytes) -> None:
    for kind in refresh.KINDS.values():
        try:
            hosts = refresh.hosts_of(kind, content)
        except refresh.Unfit:
            continue
        assert hosts
        assert all(host.endswith(kind.below) for host in hosts)


@pytest.mark.parametrize("name", sorted(refresh.KINDS))
def test_the_list_that_we_ship_is_of_its_kind(name: str) -> None:
    """Every host of it would come out again; the first line says its day and where it is from."""
    kind = refresh.KINDS[name]
    lines = (ROOT / "rules" / "lists" / f"{name}.txt").read_text().splitlines()
    hosts = [line for line in lines if not line.startswith("#")]
    assert lines[0].startswith(f"# {kind.title}, 20")
    assert kind.url in lines[0]
    key = "full_domains" if "actions" in name else "lfsDomains"
    made = {"domains": {"actions_inbound": {key: hosts}}, "lfsDomains": hosts, "cdnDomains": []}
    assert set(refresh.hosts_of(kind, json.dumps(made).encode())) == set(hosts)
    assert all(kind.only is None or kind.only.fullmatch(host) for host in hosts)
