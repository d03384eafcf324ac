"""Where a path says whose it is, on hosts that many share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.rulefiles.tenancy import names_owner, shares_paths


@pytest.mark.parametrize(
    ("host", "path"),
    [
        ("github.com", "/{repo}/info/refs"),
        ("github.com", "/acme/**"),
        ("api.github.com", "/repos/{repo}/**"),
        ("api.github.com", "/user"),
        ("api.github.com", "/copilot_internal/**"),
        ("ghcr.io", "/v2/{image}/manifests/*"),
        ("ghcr.io", "/v2/homebrew/**"),
        ("ghcr.io", "/v2/"),
        ("ghcr.io", "/token"),
        ("huggingface.co", "/api/models/{repo}/**"),
        ("huggingface.co", "/{repo}/resolve/**"),
        ("storage.googleapis.com", "/pub-packages/**"),
        ("docs.python.org", "/**"),
    ],
)
def test_it_says_whose(host: str, path: str) -> None:
    assert names_owner(host, path)


@pytest.mark.parametrize(
    ("host", "path"),
    [
        ("github.com", "/**"),
        ("github.com", "/*/*/info/refs"),
        ("github.com", "/acme-*/tools/**"),  # anybody may begin a name like that
        ("api.github.com", "/**"),
        ("api.github.com", "/repos/**"),
        ("api.github.com", "/repos/*/zipball/**"),
        ("api.github.com", "/gists/**"),
        ("api.github.com", "/*/acme/**"),
        ("ghcr.io", "/v2/**"),
        ("huggingface.co", "/api/**"),
        ("huggingface.co", "/api/models/**"),
        ("huggingface.co", "/datasets/*/rows/**"),
        ("storage.googleapis.com", "/upload/storage/v1/b/*/o"),
        ("*.github.com", "/acme/**"),  # of api, of codeload or of gist?
    ],
)
def test_it_does_not_say_whose(host: str, path: str) -> None:
    assert shares_paths(host)
    assert not names_owner(host, path)


@given(st.text(), st.text())
def test_it_is_total(host: str, path: str) -> None:
    assert names_owner(host, path) in (True, False)
