"""Which variables look like credentials, and which do not."""

from __future__ import annotations

import pytest

from egressd.control.trust import trust_environment
from egressd.verify.environment import environment_secrets
from egressd.verify.scene import Scene

SCENE = Scene({})
PLAIN = {
    "PATH": "/usr/bin", "HOME": "/home/a", "USER": "a", "SHELL": "/bin/sh", "TERM": "xterm", "LANG": "C.UTF-8", "TZ": "UTC",
    "EGRESSD_SANDBOX": "sbx-00112233445566778899", "XDG_RUNTIME_DIR": "/run/user/1000", "PWD": "/w", "OLDPWD": "/",
    "SSH_ASKPASS": "/usr/bin/ssh-askpass", "KEYBOARD": "us", "AUTHOR": "me", "TOKENIZERS_PARALLELISM": "false", "EMPTY_TOKEN": "",
    "MONKEY": "1", "COMPASS": "north", "PATH_INFO": "/a", "NO_PROXY": "localhost",
    **trust_environment("/run/egressd-trust"),
}  # fmt: skip


def said(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> str:
    monkeypatch.setattr("os.environ", {**PLAIN, **variables})
    outcome = environment_secrets.attempt(SCENE)
    assert outcome.verdict == "open", outcome
    return outcome.detail


def test_what_a_sandbox_is_given_looks_like_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", PLAIN)
    assert environment_secrets.attempt(SCENE).verdict == "held"


@pytest.mark.parametrize(
    "name",
    [
        "ANTHROPIC_API_KEY", "OPENAI_API_KEY", "GITHUB_TOKEN", "GH_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID",
        "AWS_SESSION_TOKEN", "NPM_TOKEN", "PYPI_PASSWORD", "DATABASE_PASSWORD", "PGPASSWORD", "MY_SECRET", "SECRET_KEY",
        "DJANGO_SECRET_KEY", "CLIENT_SECRET", "STRIPE_KEY", "HTTP_AUTHORIZATION", "SENTRY_DSN", "APIKEY", "github_token",
        "GOOGLE_APPLICATION_CREDENTIALS", "VAULT_TOKEN", "AZURE_CLIENT_SECRET",
    ],
)  # fmt: skip
def test_a_credential_is_known_by_its_name_and_its_value_is_never_shown(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    detail = said(monkeypatch, {name: "the-value-itself"})
    assert detail.startswith(f"{name} (")
    assert "the-value-itself" not in detail


@pytest.mark.parametrize(
    "value",
    [
        "ghp_" + "a" * 36,
        "sk-ant-api03-" + "a" * 20,
        "AKIA" + "A" * 16,
        "xoxb-1234567890-abc",
        "postgres://user:hunter2@db/x",
        "-----BEGIN OPENSSH PRIVATE KEY-----",
        "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.c2lnbmF0dXJlaGVyZQ",
    ],
)
def test_a_credential_is_known_by_its_shape(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    assert said(monkeypatch, {"HARMLESS": value}) == "HARMLESS (by its value)"


@pytest.mark.parametrize("name", ["SSH_AUTH_SOCK", "DOCKER_HOST", "KUBECONFIG", "KUBERNETES_SERVICE_HOST"])
def test_what_leads_to_a_credential_is_one(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert said(monkeypatch, {name: "/run/x"}) == f"{name} (it leads to one)"
