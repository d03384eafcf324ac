"""credentials.yaml in a real run: what it must say before a command starts, and what a change of it does to one that runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from egressd.lab import Lab
from egressd.lab.guards import Guard
from egressd.lab.stand import HERE, Stand, write_private
from tests.e2e.conftest import SHIPPED, until
from tests.e2e.keyring import BEARER, Holding, Inside, credentials, profile, set_guards, uses

pytestmark = pytest.mark.e2e

VARIABLE = "LAB_LENDING_SECRET"
FROM_ENV = Holding("from-env", "{bearer: true}", BEARER, source=f"{{env: {VARIABLE}}}")
FROM_FILE = Holding("from-file", "{header: x-api-key}", Guard("header", "x-api-key"))
DUMMY = Holding(
    "dummy",
    "{placeholder: {variable: LAB_KEY, prefix: sk-lab-, length: 48, headers: [authorization]}}",
    BEARER,
    ask='-H "Authorization: Bearer $LAB_KEY"',
)
HOLDINGS = (FROM_ENV, FROM_FILE, DUMMY)


@pytest.fixture
def vault(shared_lab: Lab) -> Iterator[Stand]:
    set_guards(shared_lab, HOLDINGS, ("h2", "http/1.1"))
    shared_lab.forget()
    with Stand(shared_lab, profile(HOLDINGS), shipped=SHIPPED, credentials=credentials(HOLDINGS)) as stand:
        for holding in (FROM_FILE, DUMMY):
            stand.secret(holding.name, holding.secret)
        yield stand


ENV = {VARIABLE: FROM_ENV.secret}


def define(stand: Stand, text: str) -> None:
    """Puts another credentials.yaml in the place of the one that is there, as an editor does."""
    new = stand.directory / "credentials.new"
    write_private(new, text.replace(HERE, str(stand.directory)))
    new.replace(stand.credentials)


def call(inside: Inside, holding: Holding) -> tuple[str, str]:
    ran = inside.run(f"curl -gsS -m 15 -w '\\n%{{http_code}}' {holding.ask} '{holding.url}'")
    body, _, status = ran.stdout.rpartition("\n")
    return status, body


# before a command starts


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        pytest.param(
            ["--env", VARIABLE], ENV, f"--env {VARIABLE}: a credential's secret is read", id="by name"
        ),
        pytest.param(
            ["--env", f"OTHER={FROM_ENV.secret}"],
            ENV,
            "--env OTHER: its value holds",
            id="by value under another",
        ),
        pytest.param(
            ["--env", "LAB_KEY=x"],
            ENV,
            "--env LAB_KEY: the placeholder of the credential dummy",
            id="a dummy's",
        ),
    ],
)
def test_a_variable_that_would_hold_a_secret_stops_the_start(
    vault: Stand, flags: list[str], env: dict[str, str], said: str
) -> None:
    ran = vault.run(["true"], flags=flags, env=env)
    assert ran.returncode == 125
    assert said in ran.stderr
    assert FROM_ENV.secret not in ran.stderr


def test_a_bad_file_stops_the_start_and_says_where(vault: Stand) -> None:
    define(vault, credentials(HOLDINGS).replace("bearer: true", "bearr: true"))
    ran = vault.run(["true"], env=ENV)
    assert ran.returncode == 125
    assert re.search(r"credentials\.yaml:\d+:\d+: unknown_key", ran.stderr), ran.stderr
    vault.credentials.unlink()
    ran = vault.run(["true"], env=ENV)
    assert ran.returncode == 125
    assert "credentials.yaml" in ran.stderr


def test_rules_without_credentials_need_no_file(shared_lab: Lab) -> None:
    rules = "schema: 1\nprofile: lab\nowner: e2e\nallow:\n  - hosts: [api.lab-origin.com]\n"
    with Stand(shared_lab, rules, shipped=SHIPPED) as stand:
        assert stand.run(["true"]).returncode == 0


def test_a_file_is_named_by_a_flag_too(vault: Stand) -> None:
    other = vault.directory / "other.yaml"
    vault.credentials.rename(other)
    assert vault.run(["true"], env=ENV).returncode == 125
    ran = vault.run(["true"], flags=["--credentials", str(other)], env=ENV)
    assert ran.returncode == 0, ran.stderr


# while it runs


def test_the_sandbox_holds_a_dummy_and_nothing_that_is_real(vault: Stand) -> None:
    with Inside(vault, env=ENV, flags=["--env", f"{VARIABLE}=a-dummy"]) as inside:
        shown = inside.run(
            f"echo $LAB_KEY ${VARIABLE}; cat {vault.directory}/secrets/* {vault.credentials}; ls {vault.directory}/secrets"
        )
        assert re.fullmatch(r"sk-lab-[A-Za-z0-9]{41} a-dummy\n", shown.stdout), shown
        assert call(inside, FROM_ENV)[0] == "200"
        pid = inside.process.pid
        assert FROM_ENV.secret.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert re.search(r"Max core file size\s+0\s+0", limits)


def test_a_changed_definition_counts_at_once_and_a_bad_one_not_at_all(vault: Stand, shared_lab: Lab) -> None:
    with Inside(vault, env=ENV) as inside:
        assert [call(inside, holding)[0] for holding in HOLDINGS] == ["200"] * 3
        (before,) = uses(vault, FROM_FILE.name)
        define(vault, credentials(HOLDINGS).replace("x-api-key", "x api key"))
        until(lambda: "rules not reloaded, the old ones stay in force" in inside.errors(), 15, "it is told")
        assert call(inside, FROM_FILE)[0] == "200"
        assert uses(vault, FROM_FILE.name)[-1]["lease"] == before["lease"]
        define(
            vault,
            credentials(HOLDINGS).replace(
                "{header: x-api-key}", "{header: x-api-key}\n    client_credentials: deny"
            ),
        )
        until(lambda: "credentials reloaded" in inside.errors(), 15, "it is reloaded")
        assert call(inside, FROM_FILE)[0] == "200"
        assert uses(vault, FROM_FILE.name)[-1]["lease"] != before["lease"]
        ran = inside.run(f"curl -gsS -o /dev/null -w '%{{http_code}}' -H 'x-api-key: mine' {FROM_FILE.url}")
        assert ran.stdout == "403", "and judged by the new one"


def test_a_stream_ends_when_its_lease_is_taken_back(vault: Stand) -> None:
    with Inside(vault, env=ENV) as inside:
        started = (
            f"curl -gsSN -m 60 'https://{FROM_FILE.at}/sse?events=600&gap=0.1' > told 2>&1; echo $? > status"
        )
        inside.run(f"({started}) > /dev/null 2>&1 & until grep -q data told; do sleep 0.05; done")
        narrowed = Holding(
            FROM_FILE.name,
            FROM_FILE.attach,
            FROM_FILE.guard,
            secret=FROM_FILE.secret,
            options=("range: true",),
        )
        define(vault, credentials((FROM_ENV, narrowed, DUMMY)))
        until(lambda: inside.run("cat status").stdout.strip(), 15, "the stream has ended")
        assert inside.run("cat status").stdout.strip() != "0"
        assert call(inside, FROM_FILE)[0] == "200", "the next request has a lease of the new definition"


def test_a_file_that_the_sandbox_would_see_is_not_taken(vault: Stand) -> None:
    with Inside(vault, env=ENV) as inside:
        seen = vault.workspace / "seen"
        seen.write_text(FROM_FILE.secret)
        seen.chmod(0o600)
        define(vault, credentials(HOLDINGS).replace(f"{HERE}/secrets/from-file", str(seen)))
        until(lambda: "the sandbox would see it" in inside.errors(), 15, "it is told")
        assert call(inside, FROM_FILE)[0] == "200"
        assert FROM_FILE.secret not in inside.errors()
