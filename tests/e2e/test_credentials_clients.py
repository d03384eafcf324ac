"""Real clients without a key, or with a dummy one, at real services that ask for one: git, aws, pip, npm, skopeo, model APIs."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from egressd.lab import Lab
from egressd.lab.guards import Guard
from egressd.lab.models import anthropic_events, openai_events
from egressd.lab.stand import HERE, Stand
from tests.e2e.conftest import SHIPPED, build
from tests.e2e.keyring import (
    BEARER,
    Holding,
    Inside,
    credentials,
    needles,
    profile,
    search,
    set_guards,
    uses,
)
from tests.e2e.peers import (
    BUCKET,
    BUCKET_HOST,
    REGION,
    REGISTRY_HOST,
    STS_HOST,
    TOKENS_HOST,
    Cloud,
    Registry,
    site_packages,
    skopeo,
)

pytestmark = pytest.mark.e2e

GITHUB = Holding(
    "github-acme-read",
    "{basic: x-access-token}",
    Guard("header", "authorization", user="x-access-token", issuer="github"),
    source=f"{{github_app: {{app_id: 12, installation_id: 34, private_key: {{file: {HERE}/secrets/app.pem}},"
    " repositories: [tools], permissions: {contents: read}}}",
    host="github.com",
    requests=("GET /acme/*/info/refs", "POST /acme/*/git-upload-pack"),
)
GITHUB_RULE = """  - service: github-clone
    with: {repos: ["acme/*"]}
    credential: github-acme-read
"""
MODELS = (
    Holding(
        "anthropic",
        "{header: x-api-key}",
        Guard("header", "x-api-key"),
        host="api.anthropic.com",
        path="/v1/messages",
        requests=("POST /v1/messages",),
    ),
    Holding(
        "openai",
        "{placeholder: {variable: OPENAI_API_KEY, prefix: sk-proj-, length: 80, headers: [authorization]}}",
        BEARER,
        ask='-H "Authorization: Bearer $OPENAI_API_KEY"',
        host="api.openai.com",
        path="/v1/chat/completions",
        requests=("POST /v1/chat/completions",),
    ),
)
INDEXES = (
    Holding(
        "pypi",
        "{basic: __token__}",
        Guard("header", "authorization", user="__token__"),
        requests=("GET,HEAD /**",),
    ),
    Holding("npm", "{bearer: true}", BEARER, requests=("GET,HEAD /**",)),
)
STREAMS = {"anthropic": b"".join(anthropic_events()), "openai": b"".join(openai_events())}
PIP = "/usr/bin/python3 -m pip install -q --no-input --no-cache-dir --retries 0 --target t"


def needs(*commands: str) -> pytest.MarkDecorator:
    missing = [command for command in commands if shutil.which(command) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {' '.join(missing)}")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """One lab, as root where we are root."""
    with build(os.geteuid() != 0) as lab:
        yield lab


@pytest.fixture(autouse=True)
def _empty_records(lab: Lab) -> None:
    lab.forget()


# git, model APIs, indexes


@pytest.fixture(scope="module")
def stand(lab: Lab) -> Iterator[Stand]:
    """An installation with what developers' clients need."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    lab.expect("github", public.decode())
    set_guards(lab, [*MODELS, *INDEXES])
    lab.guard("github.com", GITHUB.guard)
    rules = profile([*MODELS, *INDEXES], GITHUB_RULE)
    with Stand(lab, rules, shipped=SHIPPED, credentials=credentials([GITHUB, *MODELS, *INDEXES])) as stand:
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        stand.secret("app.pem", pem.decode())
        for holding in (*MODELS, *INDEXES):
            stand.secret(holding.name, holding.secret)
        yield stand


@pytest.fixture(scope="module")
def sandbox(stand: Stand) -> Iterator[Inside]:
    with Inside(stand) as inside:
        yield inside


def said_nothing_secret(lab: Lab, inside: Inside, *secrets: str) -> None:
    heard = "\n".join(inside.heard).encode("latin-1", "replace")
    assert search({"what came out of it": heard}, needles([*secrets, *lab.issued()])) == []


def test_git_clones_a_private_repository_with_a_token_that_ends_with_the_sandbox(
    lab: Lab, stand: Stand
) -> None:
    bare = lab.open_exec(["git", "clone", "-q", "https://github.com/acme/tools", "bare"])
    assert bare.returncode == 128, "the origin asks for a token"
    lab.forget()
    with Inside(stand) as inside:
        ran = inside.run(
            "git clone -q https://github.com/acme/tools a && git -C a fetch && ls a && cat a/.git/config"
        )
        assert (ran.returncode, ran.stdout.split()[:2]) == (0, ["README.md", "tool.sh"]), (
            ran,
            inside.errors(),
        )
        asked = [ask for ask in lab.asked_of_issuers() if ask["issuer"] == "github"]
        assert [(ask["repositories"], ask["permissions"]) for ask in asked] == [
            (["tools"], {"contents": "read"})
        ]
        assert asked[0]["claims"]["iss"] in {"12", 12}
        assert {seen.status for seen in lab.requests(host="github.com")} == {200}
        assert uses(stand, "github-acme-read")
        said_nothing_secret(lab, inside)
    given_back = lab.requests(host="api.github.com", path="/installation/token")
    assert [(seen.method, seen.status) for seen in given_back] == [("DELETE", 204)]


def test_git_does_not_push_with_it(lab: Lab, sandbox: Inside) -> None:
    ran = sandbox.run("git clone -q https://github.com/acme/tools p && git -C p push origin HEAD:stolen")
    assert "(reason query_not_allowed" in ran.stderr, ran
    assert not [seen for seen in lab.requests(host="github.com") if "receive-pack" in seen.target]


READER = r"""
import hashlib, http.client, json, os, ssl, sys, time
host, path, fields = sys.argv[1], sys.argv[2], json.loads(os.path.expandvars(sys.argv[3]))
link = http.client.HTTPSConnection(host, timeout=15, context=ssl.create_default_context())
began = time.monotonic()
link.request("POST", path, json.dumps({"model": "lab-model", "stream": True}), {"content-type": "application/json", **fields})
answer = link.getresponse()
whole, times = b"", []
while part := answer.read1(65536):
    times.append(time.monotonic() - began)
    whole += part
print(answer.status, times[0], times[-1], len(times), hashlib.sha256(whole).hexdigest())
"""


@pytest.mark.parametrize("model", MODELS, ids=[model.name for model in MODELS])
@pytest.mark.parametrize("dummy", [False, True], ids=["as it is told to", "with a key of its own"])
def test_a_model_answers_in_a_stream(
    lab: Lab, stand: Stand, sandbox: Inside, model: Holding, dummy: bool
) -> None:
    (stand.workspace / "reader.py").write_text(READER)
    own = {
        "anthropic": '{"x-api-key": "sk-ant-dummy"}',
        "openai": '{"authorization": "Bearer $OPENAI_API_KEY"}',
    }
    fields = own[model.name] if dummy or model.name == "openai" else "{}"
    ran = sandbox.run(f"/usr/bin/python3 -I reader.py {model.at} {model.path} '{fields}'")
    assert ran.returncode == 0, ran
    status, first, last, parts, digest = ran.stdout.split()
    assert status == "200"
    assert float(first) < 1
    assert float(last) - float(first) > 0.5
    assert int(parts) >= 5
    assert digest == hashlib.sha256(STREAMS[model.name]).hexdigest()
    said_nothing_secret(lab, sandbox, model.secret)


def test_pip_installs_from_a_private_index(lab: Lab, sandbox: Inside) -> None:
    index = "--index-url https://pypi.lab-origin.com/simple"
    ran = sandbox.run(f"{PIP} {index} lab-hello && ls t")
    assert "lab_greeting.py" in ran.stdout, ran
    assert {seen.status for seen in lab.requests(host="pypi.lab-origin.com")} == {200}
    ran = sandbox.run(f"rm -r t; {PIP} {index.replace('//', '//me:sk-attacker@', 1)} lab-greeting && ls t")
    assert "lab_greeting.py" in ran.stdout, ran
    told = str([seen.headers for seen in lab.requests(host="pypi.lab-origin.com")])
    assert search({"pypi": told.encode()}, needles(["sk-attacker"], ["me"])) == []
    said_nothing_secret(lab, sandbox, INDEXES[0].secret)


@needs("npm")
def test_npm_installs_from_a_private_registry(lab: Lab, sandbox: Inside) -> None:
    script = (
        "mkdir n && cd n && echo '{}' > package.json && npm install --no-audit --no-fund"
        " --registry https://npm.lab-origin.com/ lab-greeting && ls node_modules"
    )
    ran = sandbox.run(f"export npm_config_cache=$PWD/cache NPM_CONFIG_USERCONFIG=/dev/null; {script}")
    assert ran.stdout.rstrip().endswith("lab-greeting"), ran
    seen = {seen.path: seen.status for seen in lab.requests(host="npm.lab-origin.com")}
    assert [status for path, status in seen.items() if path.startswith("/lab-greeting")] == [200, 200]
    assert 401 not in seen.values()
    said_nothing_secret(lab, sandbox, INDEXES[1].secret)


# aws


@pytest.fixture(scope="module")
def cloud(lab: Lab) -> Cloud:
    pytest.importorskip("moto")
    return Cloud(lab)


@pytest.fixture
def bucket(lab: Lab, cloud: Cloud) -> Iterator[tuple[Stand, Inside]]:
    """A sandbox with dummy keys, and an installation that assumes a role for it."""
    source = (
        f"{{aws_sts: {{role_arn: '{cloud.role}', region: {REGION}, access_key_id: {cloud.id},"
        f" secret_access_key: {{file: {HERE}/secrets/aws}}, endpoint: 'https://{STS_HOST}', tags: [task]}}}}"
    )
    holding = Holding(
        "bucket",
        f"{{sigv4: {{service: s3, region: {REGION}}}}}",
        None,
        source=source,
        host=BUCKET_HOST,
        requests=("GET,HEAD,PUT,POST,DELETE /**",),
        secret=cloud.secret,
    )
    packages = site_packages("awscli", "botocore")
    env = {
        "PYTHONPATH": packages,
        "AWS_ACCESS_KEY_ID": "AKIADUMMYDUMMYDUMMY0",
        "AWS_SECRET_ACCESS_KEY": "dummy",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "aws.ini",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    flags = ["--bind", f"{packages}:ro", "--label", "task=e2e"]
    for name, value in env.items():
        flags += ["--env", f"{name}={value}"]
    with Stand(lab, profile([holding]), shipped=SHIPPED, credentials=credentials([holding])) as stand:
        stand.secret("aws", cloud.secret)
        with Inside(stand, flags=flags) as inside:
            yield stand, inside


AWS = "/usr/bin/python3 -m awscli s3 cp --no-progress"


@pytest.mark.parametrize("signed", [False, True], ids=["as the client does it", "with its payload signed"])
def test_aws_copies_up_and_down_with_dummy_keys(
    lab: Lab, cloud: Cloud, bucket: tuple[Stand, Inside], signed: bool
) -> None:
    stand, inside = bucket
    (stand.workspace / "aws.ini").write_text(
        f"[default]\ns3 =\n  addressing_style = virtual\n  payload_signing_enabled = {str(signed).lower()}\n"
    )
    ran = inside.run(
        "umask 0; head -c 6000000 /dev/urandom > up"
        f" && {AWS} up s3://{BUCKET}/up && {AWS} s3://{BUCKET}/up down && cmp up down && echo same"
    )
    assert ran.stdout.splitlines()[-1:] == ["same"], ran
    seen = [request for request in lab.requests(host=BUCKET_HOST) if request.status in {200, 206}]
    assert {"PUT", "GET"} <= {request.method for request in seen}
    keys = {
        (request.header("authorization") or "").partition("Credential=")[2].split("/")[0] for request in seen
    }
    assert len(keys) == 1
    assert keys.pop().startswith("ASIA")
    assert all(request.header("x-amz-security-token") for request in seen)
    assert uses(stand, "bucket")
    assert search({"what came out": "\n".join(inside.heard).encode()}, needles([cloud.secret])) == []


def test_and_without_egressd_the_dummy_keys_are_refused(lab: Lab, cloud: Cloud) -> None:
    sign = (
        f"curl -sS --aws-sigv4 aws:amz:{REGION}:s3 --user AKIADUMMYDUMMYDUMMY0:dummy https://{BUCKET_HOST}/up"
    )
    assert "InvalidAccessKeyId" in lab.open_exec(["sh", "-c", sign]).stdout


# skopeo


def test_skopeo_gets_its_token_by_a_password_that_it_does_not_have(lab: Lab) -> None:
    registry = Registry(lab)
    user, _, password = registry.account.partition(":")
    holding = Holding(
        "registry",
        f"{{basic: {user}}}",
        None,
        host=TOKENS_HOST,
        requests=("GET /token",),
        options=("token_requests: true",),
        secret=password,
    )
    pull = f"  - id: pull\n    hosts: [{REGISTRY_HOST}]\n    requests: ['GET,HEAD /v2/**']\n"
    image = f"docker://{REGISTRY_HOST}/acme/app:1"
    bare = lab.open_exec(skopeo("inspect", image))
    assert "unauthorized" in bare.stderr
    with Stand(lab, profile([holding], pull), shipped=SHIPPED, credentials=credentials([holding])) as stand:
        stand.secret("registry", password)
        with Inside(stand) as inside:
            copy = " ".join(skopeo("copy", image, "dir:image"))
            ran = inside.run(f"umask 0; {copy} && ls image")
            assert "manifest.json" in ran.stdout, ran
            assert uses(stand, "registry")
            said_nothing_secret(lab, inside, password)
