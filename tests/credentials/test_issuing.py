"""Requests that issue credentials are known where the field's APIs have them, and what only looks like one is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from egressd.credentials.issuing import body_issues, issues

ISSUE = [
    ("POST", "/?Action=AssumeRole&Version=2011-06-15", ()),
    ("GET", "/?Version=2011-06-15&action=GetSessionToken", ()),
    ("GET", "/?Action=GetFederation%54oken", ()),
    ("POST", "/?x=1;Action=CreateAccessKey", ()),
    ("POST", "/", ((b"X-Amz-Target", b"AWSCognitoIdentityService.GetCredentialsForIdentity"),)),
    ("POST", "/", ((b"x_amz_target", b"AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken"),)),
    ("POST", "/service/Sts/operation/AssumeRole", ()),
    ("GET", "/?session", ()),
    ("GET", "/bucket?session&x=1", ()),
    ("POST", "/oauth/token", ()),
    ("POST", "/oauth2/v2.0/tok%65n", ()),
    ("POST", "/login/oauth/access_token", ()),
    ("POST", "/app/installations/7/access_tokens", ()),
    ("POST", "/api/v1/namespaces/a/serviceaccounts/b/token", ()),
    ("POST", "/-/npm/v1/tokens", ()),
    ("GET", "/token?service=registry.docker.io&scope=repository:a/b:pull", ()),
    ("POST", "/v1/projects/-/serviceAccounts/a@b:generateAccessToken", ()),
    ("PUT", "/v1/auth/approle/login", ()),
    ("POST", "/v1/auth/token/create", ()),
    ("POST", "/v1/realtime/client_secrets", ()),
    ("POST", "/v1/authorization-token?domain=d", ()),
]


@pytest.mark.parametrize(("method", "target", "fields"), ISSUE, ids=[f"{one[0]} {one[1]}" for one in ISSUE])
def test_it_asks_for_a_credential(method: str, target: str, fields: tuple[tuple[bytes, bytes], ...]) -> None:
    assert issues(method, target, fields) is not None


OTHERS = [
    ("POST", "/v1/messages", ()),
    ("POST", "/v1/messages/count_tokens", ()),
    ("GET", "/-/npm/v1/tokens", ()),
    ("GET", "/acme/repo/main/token", ()),
    ("POST", "/?Action=GetCallerIdentity", ()),
    ("GET", "/bucket?list-type=2&prefix=AssumeRole", ()),
    ("POST", "/", ((b"X-Amz-Target", b"DynamoDB_20120810.PutItem"),)),
    ("GET", "/a/b/c?session", ()),
    ("POST", "/v1/auth", ()),
    ("GET", "/simple/token/", ()),
]


@pytest.mark.parametrize(("method", "target", "fields"), OTHERS, ids=[f"{one[0]} {one[1]}" for one in OTHERS])
def test_it_asks_for_something_else(
    method: str, target: str, fields: tuple[tuple[bytes, bytes], ...]
) -> None:
    assert issues(method, target, fields) is None


@pytest.mark.parametrize(
    ("body", "asks"),
    [
        pytest.param(b"Action=AssumeRole&RoleArn=x", True, id="AssumeRole"),
        pytest.param(b"Version=1&Action=Get%53essionToken", True, id="an escaped action"),
        pytest.param(b"Action=GetCallerIdentity&Action=AssumeRole", True, id="the second of two actions"),
        pytest.param(b"grant_type=client_credentials", True, id="OAuth 2.0"),
        pytest.param(b"Action=GetCallerIdentity", False, id="another action"),
        pytest.param(b'{"prompt": "what is Action=AssumeRole&x?"}', False, id="JSON that speaks of one"),
        pytest.param(b"\xff\xfe\x00", False, id="bytes"),
        pytest.param(b"", False, id="nothing"),
    ],
)
def test_a_form_that_asks_for_a_credential(body: bytes, asks: bool) -> None:
    assert (body_issues(body) is not None) is asks


@given(st.text(), st.text(), st.binary())
def test_it_is_total(method: str, target: str, body: bytes) -> None:
    issues(method, target, ((body, body),))
    body_issues(body)
