"""AssumeRole: keys that a service which checks signatures takes, asked for with all that was said, and no secret shown."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from egressd.credentials.lease import AwsKeys
from egressd.credentials.providers.aws_sts import POLICY_MOST, provider, session_name
from egressd.credentials.providers.base import For, Minted, SourceFailed
from egressd.credentials.sigv4 import Signed, sign
from egressd.policy.credential import AwsStsSource
from tests.credentials.cloud import BUCKET, REGION, Cloud, cloud
from tests.credentials.providers.loopback import (
    assert_secret_free,
    failure,
    kept,
    minted,
    response,
    run,
    serving,
    shown,
)

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
ROLE = "arn:aws:iam::123456789012:role/agent"
GIVEN = ("ASIAGIVENEXAMPLE", "g" * 40, "t" * 200)


@pytest.fixture(scope="module")
def aws() -> Iterator[Cloud]:
    with cloud() as running:
        yield running


def of_cloud(aws: Cloud, folder: Path, **more: Any) -> AwsStsSource:
    secret = kept(folder, "secret", aws.keys.secret_access_key.get_secret_value())
    said = {"role_arn": aws.role, "region": REGION, "access_key_id": aws.keys.access_key_id}
    return AwsStsSource.model_validate({**said, "secret_access_key": secret, "endpoint": aws.url, **more})


def test_keys_of_a_role_sign_for_the_sandbox_s_session(aws: Cloud, tmp_path: Path) -> None:
    source = of_cloud(aws, tmp_path, duration=1200, session_policy={"Version": "2012-10-17", "Statement": []})
    given = run(minted(provider("c", source, None)))
    assert isinstance(given.material, AwsKeys)
    assert given.expires is not None
    assert 1180 < given.expires - time.time() <= 1201
    form = b"Action=GetCallerIdentity&Version=2011-06-15"
    kind = ((b"Content-Type", b"application/x-www-form-urlencoded"),)
    assert b":assumed-role/agent/egressd-s-1<" in call(aws, given.material, "sts", "POST", "/", kind, form)[1]
    assert call(aws, given.material, "s3", "PUT", f"/{BUCKET}/by-role", (), b"x")[0] == 200
    assert call(aws, given.material, "s3", "GET", f"/{BUCKET}/by-role")[1] == b"x"
    token = given.material.model_copy(update={"session_token": None})
    assert call(aws, token, "s3", "GET", f"/{BUCKET}/by-role")[0] == 403
    assert_secret_free(repr(given), (given.material.secret_access_key.get_secret_value(),))


def call(
    aws: Cloud, keys: AwsKeys, service: str, method: str, target: str, fields: Any = (), body: bytes = b""
) -> tuple[int, bytes]:
    found = sign(
        keys,
        service,
        REGION,
        method=method,
        host=aws.host,
        target=target,
        fields=fields,
        now=time.time(),
        body=body,
    )
    assert isinstance(found, Signed)
    return aws.ask(method, found.target, found.fields, body)


def test_two_sandboxes_have_two_sessions(aws: Cloud, tmp_path: Path) -> None:
    async def scene() -> list[Minted]:
        asked = provider("c", of_cloud(aws, tmp_path), None)
        try:
            return await asyncio.gather(*(asked.mint(For(name, {})) for name in ("a-1", "b-2")))
        finally:
            await asked.close()

    first, second = run(scene())
    assert isinstance(first.material, AwsKeys)
    assert isinstance(second.material, AwsKeys)
    assert first.material.access_key_id != second.material.access_key_id


def test_a_wrong_secret_is_told_without_it(aws: Cloud, tmp_path: Path) -> None:
    source = of_cloud(aws, tmp_path, secret_access_key=kept(tmp_path, "wrong", SECRET))
    error = run(failure(provider("c", source, None)))
    assert "answered 403" in str(error)
    assert "SignatureDoesNotMatch" in str(error)
    assert_secret_free(shown(error), (SECRET,))


def test_a_key_that_nobody_knows_is_told(aws: Cloud, tmp_path: Path) -> None:
    error = run(failure(provider("c", of_cloud(aws, tmp_path, access_key_id="AKIANOBODY"), None)))
    assert "InvalidClientTokenId" in str(error)


# A server of our own shows what is asked, and answers what moto never would.


def answer_of(expiration: str, given: tuple[str, ...] = GIVEN) -> bytes:
    names = ("AccessKeyId", "SecretAccessKey", "SessionToken")
    told = "".join(f"<{name}>{value}</{name}>" for name, value in zip(names, given, strict=True))
    return (
        '<AssumeRoleResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><AssumeRoleResult><Credentials>'
        f"{told}<Expiration>{expiration}</Expiration></Credentials></AssumeRoleResult></AssumeRoleResponse>"
    ).encode()


def stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))


def made(folder: Path, url: str, **more: Any) -> AwsStsSource:
    secret = kept(folder, "secret", SECRET)
    said = {"role_arn": ROLE, "region": REGION, "access_key_id": "AKIAOWN", "secret_access_key": secret}
    return AwsStsSource.model_validate({**said, "endpoint": url, **more})


def asked(folder: Path, for_: For, **more: Any) -> dict[str, list[str]]:
    """The form that a source asks with."""
    forms: list[bytes] = []

    async def respond(_line: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        forms.append(body)
        writer.write(response(200, answer_of(stamp(900)), "Content-Type: text/xml"))

    async def scene() -> None:
        async with serving(respond) as server:
            source = provider("c", made(folder, server.url, **more), None)
            await source.mint(for_)
            await source.close()

    run(scene())
    return parse_qs(forms[0].decode(), strict_parsing=True)


def test_all_that_was_said_is_asked_for(tmp_path: Path) -> None:
    policy = {
        "Version": "2012-10-17",
        "Statement": [{"Effect": "Allow", "Action": "s3:GetObject", "Resource": "*"}],
    }
    form = asked(
        tmp_path,
        For("s-1", {"task": "build 7", "team": "a", "other": "b"}),
        external_id="ext-1",
        session_policy=policy,
        policy_arns=["arn:aws:iam::aws:policy/ReadOnlyAccess"],
        tags=["task", "team"],
        duration=3600,
    )
    assert json.loads(form.pop("Policy")[0]) == policy
    assert form == {
        "Action": ["AssumeRole"],
        "Version": ["2011-06-15"],
        "RoleArn": [ROLE],
        "RoleSessionName": ["egressd-s-1"],
        "ExternalId": ["ext-1"],
        "PolicyArns.member.1.arn": ["arn:aws:iam::aws:policy/ReadOnlyAccess"],
        "Tags.member.1.Key": ["task"],
        "Tags.member.1.Value": ["build 7"],
        "Tags.member.2.Key": ["team"],
        "Tags.member.2.Value": ["a"],
        "DurationSeconds": ["3600"],
    }


def test_what_was_not_said_is_not_asked_for(tmp_path: Path) -> None:
    form = asked(tmp_path, For("s-1", {"task": "7"}))
    assert form.keys() == {"Action", "Version", "RoleArn", "RoleSessionName", "DurationSeconds"}
    assert form["DurationSeconds"] == ["900"]


UNASKED: list[tuple[str, dict[str, Any], dict[str, str], str]] = [
    ("a label that is missing", {"tags": ["task"]}, {}, "no label task"),
    ("a label that is no tag", {"tags": ["task"]}, {"task": "a\nb"}, "cannot be a session tag"),
    (
        "a label in letters that AWS does not take",
        {"tags": ["task"]},
        {"task": "a;b"},
        "cannot be a session tag",
    ),
    ("a label that is too long", {"tags": ["task"]}, {"task": "a" * 257}, "cannot be a session tag"),
    ("an empty label", {"tags": ["task"]}, {"task": ""}, "cannot be a session tag"),
    (
        "a policy that is too long",
        {"session_policy": {"a": "b" * POLICY_MOST}},
        {},
        "more than 2048 characters",
    ),
    ("a key id alone", {"secret_access_key": None}, {}, "go together"),
    ("a secret alone", {"access_key_id": None}, {}, "go together"),
    ("a secret that is not there", {"secret_access_key": {"file": "/nonexistent/x"}}, {}, "No such file"),
]


@pytest.mark.parametrize("row", UNASKED, ids=[row[0] for row in UNASKED])
def test_what_cannot_be_asked_for_is_not_asked_for(
    row: tuple[str, dict[str, Any], dict[str, str], str], tmp_path: Path
) -> None:
    _, more, labels, expected = row

    async def scene() -> tuple[Exception, list[str]]:
        async with serving(lambda *_: asyncio.sleep(0)) as server:
            source = provider("c", made(tmp_path, server.url, **more), None)
            with pytest.raises(SourceFailed) as caught:
                await source.mint(For("s-1", labels))
            return caught.value, server.lines

    error, lines = run(scene())
    assert expected in str(error)
    assert lines == []


ANSWERS: list[tuple[str, int, bytes, str]] = [
    (
        "a code of STS, without its words",
        403,
        b"<ErrorResponse><Error><Code>AccessDenied</Code><Message>"
        + SECRET.encode()
        + b"</Message></Error></ErrorResponse>",
        "answered 403: AccessDenied, the role may not be assumed",
    ),
    (
        "a code of its own is not told",
        400,
        b"<ErrorResponse><Error><Code>" + SECRET.encode() + b"</Code></Error></ErrorResponse>",
        "answered 400",
    ),
    ("an error in HTML", 502, b"<html>" + SECRET.encode(), "answered 502"),
    ("an error in nothing", 500, b"", "answered 500"),
    ("no XML", 200, b"{}" + SECRET.encode(), "not one of STS"),
    ("XML of entities", 200, b'<!DOCTYPE a [<!ENTITY b "' + SECRET.encode() * 9 + b'">]><a>&b;&b;</a>', ""),
    ("another answer", 200, b"<a><b/></a>", "not one of STS"),
    ("nothing", 200, b"", ""),
    ("an hour ago", 200, answer_of(stamp(-3600)), "expired already"),
    ("no time", 200, answer_of(SECRET), ""),
    ("an empty secret", 200, answer_of(stamp(900), ("ASIA", "", "t")), "holds no keys"),
    ("a secret of two lines", 200, answer_of(stamp(900), ("ASIA", "a\nb", "t")), "holds no keys"),
    ("a token with a space", 200, answer_of(stamp(900), ("ASIA", "a", "t t")), "holds no keys"),
    ("a token without end", 200, answer_of(stamp(900), ("ASIA", "a", "t" * 16385)), "holds no keys"),
    ("a key id that ends the header", 200, answer_of(stamp(900), ("A,B", "a", "t")), "no access key id"),
]


@pytest.mark.parametrize("row", ANSWERS, ids=[row[0] for row in ANSWERS])
def test_answers_that_are_none(
    row: tuple[str, int, bytes, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, status, body, expected = row

    async def respond(_line: str, _body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(response(status, body, "Content-Type: text/xml"))

    async def scene() -> tuple[Exception, list[str]]:
        async with serving(respond) as server:
            return await failure(provider("c", made(tmp_path, server.url), None)), server.lines

    with caplog.at_level(logging.DEBUG):
        error, lines = run(scene())
    assert expected in str(error)
    assert len(lines) == 1, "nothing is tried again"
    assert_secret_free(shown(error) + caplog.text, (SECRET, *GIVEN[1:]))


def test_clocks_that_differ_are_told_and_do_not_shorten_what_was_given(tmp_path: Path) -> None:
    ahead = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 7200))
    answers = [
        response(200, answer_of(stamp(7200 + 900)), f"Date: {ahead}"),
        response(
            403,
            b"<ErrorResponse><Error><Code>RequestExpired</Code></Error></ErrorResponse>",
            f"Date: {ahead}",
        ),
    ]

    async def respond(_line: str, _body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop(0))

    async def scene() -> tuple[Minted, Exception]:
        async with serving(respond) as server:
            source = provider("c", made(tmp_path, server.url), None)
            return await source.mint(For("s-1", {})), await failure(source)

    given, error = run(scene())
    assert given.expires is not None
    assert 890 < given.expires - time.time() < 902
    assert re.search(r"this host's clock is 7\d{3} s behind the server's", str(error))


def test_at_its_most_talkative_nothing_logs_a_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        asked(tmp_path, For("s-1", {}))
    assert_secret_free(caplog.text, (SECRET, *GIVEN[1:]))


@pytest.mark.parametrize(
    "variable", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_STS", "HTTP_PROXY", "http_proxy", "AWS_PROFILE"]
)
def test_the_environment_leads_nowhere_else(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:1")
    assert asked(tmp_path, For("s-1", {}))["Action"] == ["AssumeRole"]


def test_without_keys_of_its_own_botocore_s_chain_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    heads: list[str] = []

    async def respond(_line: str, _body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(response(200, answer_of(stamp(900))))

    async def scene() -> None:
        async with serving(respond) as server:
            source = made(tmp_path, server.url, access_key_id=None, secret_access_key=None)
            await minted(provider("c", source, None))
            heads.extend(server.heads)

    run(scene())
    assert "Credential=AKIAENVIRONMENT/" in heads[0]


SESSIONS = ["s-1", "a" * 56, "a" * 57, "a" * 58, "a" * 200, "a b", "a-b", "a/b", "\u00e9", "", "egressd-s-1"]


def test_sessions_are_named_for_their_sandbox_and_each_has_its_own() -> None:
    found = {sandbox: session_name(sandbox) for sandbox in SESSIONS}
    assert found["s-1"] == "egressd-s-1"
    assert found["a" * 56] == "egressd-" + "a" * 56
    assert all(re.fullmatch(r"[\w+=,.@-]{2,64}", name, re.ASCII) for name in found.values())
    assert len(set(found.values())) == len(SESSIONS)


CLEAN = """
import sys
import egressd.gate.worker, egressd.credentials.attach, egressd.credentials.sigv4_chunks
import egressd.credentials.broker, egressd.control.supervisor
from egressd.credentials.providers.base import provider_of
from egressd.policy.credential import Source
provider_of("c", Source(env="X"))
loaded = {"botocore", "google.auth", "azure.identity", "msal", "hvac", "requests"} & set(sys.modules)
sys.exit(f"loaded: {loaded}" if loaded else 0)
"""


def test_whoever_uses_no_cloud_loads_no_library_of_one() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CLEAN], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
