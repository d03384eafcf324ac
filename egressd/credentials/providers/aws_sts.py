"""Keys of AWS STS AssumeRole, by botocore: for one sandbox, under its name, no wider than the session policy.

The session is named for the sandbox, so that CloudTrail tells who did what; labels of the sandbox go along as session tags, and
a label that it does not have is a failure, for a policy that asks for a tag could mean something else without it. AWS takes
nothing back: the keys end with their time, which is why `duration` is as short as AWS allows if nothing is said.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import io
import json
import os
import re
import threading
from collections.abc import Mapping
from typing import Any, Final

import botocore.session
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.config import Config
from botocore.exceptions import ClientError, NoCredentialsError
from pydantic import SecretStr

from egressd.credentials.lease import SECRET_LIMIT, AwsKeys
from egressd.credentials.providers.base import For, Minted, SourceFailed, read_secret
from egressd.credentials.providers.library import Line, Lines, hush, run
from egressd.policy.credential import AwsStsSource

POLICY_MOST: Final = 2048
"""Characters of a session policy (AWS STS API reference, AssumeRole)."""

_ERRORS: Final = {
    "AccessDenied": "the role may not be assumed by whom egressd is, or not with these tags",
    "ExpiredToken": "egressd's own session has expired",
    "ExpiredTokenException": "egressd's own session has expired",
    "IncompleteSignature": "the signature is incomplete",
    "InvalidClientTokenId": "the access key id is not known",
    "MalformedPolicyDocument": "the session policy is malformed",
    "PackedPolicyTooLarge": "the session policy and tags are too large",
    "RegionDisabledException": "STS is not activated in this region",
    "RequestExpired": "the request came too late: compare the clocks",
    "SignatureDoesNotMatch": "the secret access key is wrong, or the clock",
    "Throttling": "too many requests",
    "ValidationError": "a parameter is not valid",
}
"""Codes of the STS API that are told, and what they mean; any other word could be an echo."""

_KEY_ID: Final = re.compile(r"[A-Za-z0-9._~+=@:$-]{1,256}")
_SECRET: Final = re.compile(r"[!-~]+")
_UNNAMEABLE: Final = re.compile(r"[^\w+=,.@-]", re.ASCII)
_TAG: Final = re.compile(r"[\w .:/=+@-]+")

hush("botocore")


class _AwsSts:
    def __init__(self, source: AwsStsSource, ca_bundle: str | None) -> None:
        self._source = source
        self._lines = Lines(ca_bundle)
        self._session: botocore.session.Session | None = None
        self._lock = threading.Lock()

    async def mint(self, for_: For) -> Minted:
        source = self._source
        if (source.access_key_id is None) != (source.secret_access_key is None):
            raise SourceFailed("`access_key_id` and `secret_access_key` go together")
        secret = await read_secret(source.secret_access_key) if source.secret_access_key is not None else None
        parameters = _parameters(source, for_)
        line = self._lines.line()
        answer = await run(
            lambda: self._assume(line, secret, parameters), lambda error: _trouble(error, line)
        )
        return _minted(answer, line)

    async def close(self) -> None:
        self._session = None

    def _assume(self, line: Line, secret: str | None, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """In a thread. A client is made each time: making one is cheap once its session knows the service."""
        source = self._source
        with self._lock:  # a session is not made for several threads
            session = self._session = self._session or _session(own_keys=secret is not None)
            client = session.create_client(
                "sts",
                region_name=source.region,
                endpoint_url=source.endpoint,
                aws_access_key_id=source.access_key_id,
                aws_secret_access_key=secret,
                config=_config(),
            )
        client.meta.events.register("before-send.sts", lambda request, **_: _send(line, request))
        answer = client.assume_role(**parameters)
        return answer if isinstance(answer, Mapping) else {}


def provider(name: str, source: AwsStsSource, ca_bundle: str | None) -> _AwsSts:  # noqa: ARG001 -- every source has it
    """Return the provider of one role."""
    return _AwsSts(source, ca_bundle)


def session_name(sandbox: str) -> str:
    """Return a RoleSessionName, which has 2 to 64 of certain characters: the sandbox's id, or two of one id never the same."""
    name = f"egressd-{_UNNAMEABLE.sub('-', sandbox)}"
    if name == f"egressd-{sandbox}" and len(name) <= 64:
        return name
    return f"{name[:51]}-{hashlib.sha256(sandbox.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"


def _session(*, own_keys: bool) -> botocore.session.Session:
    """With keys of its own a credential does not hang on the files and profiles of whoever runs egressd."""
    if not own_keys:
        return botocore.session.Session()
    nowhere: tuple[None, list[str], str, None] = (None, [], os.devnull, None)
    return botocore.session.Session(
        {"profile": (None, [], None, None), "config_file": nowhere, "credentials_file": nowhere}
    )


def _config() -> Config:
    """No second try, no endpoint and no proxy of the environment. The network is a `Line`; the times are for what is not."""
    return Config(
        retries={"total_max_attempts": 1},
        ignore_configured_endpoint_urls=True,
        proxies={},
        connect_timeout=3,
        read_timeout=5,
    )


def _send(line: Line, request: AWSPreparedRequest) -> AWSResponse:
    body = request.body.encode() if isinstance(request.body, str) else request.body
    answer = line.ask_blocking(request.method, request.url, dict(request.headers), body)
    return AWSResponse(request.url, answer.status, dict(answer.fields), _Raw(answer.body))


class _Raw(io.BytesIO):
    """An answer's body, as botocore wants to read it."""

    def stream(self, **_: object) -> list[bytes]:
        return [self.read()]


def _parameters(source: AwsStsSource, for_: For) -> dict[str, Any]:
    found: dict[str, Any] = {
        "RoleArn": source.role_arn,
        "RoleSessionName": session_name(for_.sandbox),
        "DurationSeconds": source.duration,
    }
    if source.external_id is not None:
        found["ExternalId"] = source.external_id
    if source.session_policy is not None:
        policy = json.dumps(source.session_policy, separators=(",", ":"))
        if len(policy) > POLICY_MOST:
            raise SourceFailed(f"the session policy has more than {POLICY_MOST} characters")
        found["Policy"] = policy
    if source.policy_arns is not None:
        found["PolicyArns"] = [{"arn": arn} for arn in source.policy_arns]
    if source.tags is not None:
        found["Tags"] = [{"Key": key, "Value": _tag(key, for_.labels)} for key in source.tags]
    return found


def _tag(key: str, labels: Mapping[str, str]) -> str:
    value = labels.get(key)
    if value is None:
        raise SourceFailed(f"the sandbox has no label {key}, which is to be a session tag")
    if not (_TAG.fullmatch(value) and len(value) <= 256 and len(key) <= 128):
        raise SourceFailed(f"the sandbox's label {key} cannot be a session tag")
    return value


def _trouble(error: Exception, line: Line) -> str:
    """What went wrong, in our words."""
    told = line.answer
    if isinstance(error, ClientError) and told is not None:
        code = error.response.get("Error", {}).get("Code")
        said = _ERRORS.get(code) if isinstance(code, str) else None
        refused = str(told.refused())
        return refused if said is None else f"{refused}: {code}, {said}"
    if line.trouble:
        return line.trouble
    if told is not None:
        return str(told.refused()) if told.status != 200 else f"{told.origin}: the answer is not one of STS"
    if isinstance(error, NoCredentialsError):
        return "egressd has no AWS credentials of its own in its environment"
    return f"botocore gave up ({type(error).__name__})"


def _minted(answer: Mapping[str, Any], line: Line) -> Minted:
    told = line.answer
    found = answer.get("Credentials")
    if told is None or not isinstance(found, Mapping):
        raise SourceFailed("the answer holds no credentials")
    key_id, secret, token = (found.get(name) for name in ("AccessKeyId", "SecretAccessKey", "SessionToken"))
    end = found.get("Expiration")
    if not (isinstance(key_id, str) and _KEY_ID.fullmatch(key_id)):
        raise SourceFailed(f"{told.origin}: the answer holds no access key id")
    if not all(
        isinstance(text, str) and len(text) <= SECRET_LIMIT and _SECRET.fullmatch(text)
        for text in (secret, token)
    ):
        raise SourceFailed(f"{told.origin}: the answer holds no keys")
    if not isinstance(end, dt.datetime) or end.tzinfo is None:
        raise SourceFailed(f"{told.origin}: the answer's expiry is no time")
    keys = AwsKeys(
        access_key_id=key_id, secret_access_key=SecretStr(str(secret)), session_token=SecretStr(str(token))
    )
    return Minted(keys, told.at(end.isoformat()))
