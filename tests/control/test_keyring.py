"""What credentials mean for one sandbox: its environment, its masks, its placeholders, and another file while it runs."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from egressd.control import secrecy
from egressd.control.keyring import Exposed, Keyring, make_placeholder
from egressd.control.secrecy import exposed_programs, leaks, secret_files, secret_variables
from egressd.credentials.providers.base import SourceFailed, read_secret
from egressd.policy.credential import CredentialsFile, Placeholder, SecretRef
from egressd.policy.effective import EffectiveEntry, EffectivePolicy
from egressd.wiring.launch import shown
from egressd.wiring.spec import Bind, SandboxSpec

CANARY = "canary-5c0ffee"
FOR = [{"hosts": ["api.example.com"], "requests": ["ANY /**"]}]
PLACEHOLDER = {"variable": "API_KEY", "prefix": "sk-", "length": 40, "headers": ["authorization"]}


def file(**sources: object) -> CredentialsFile:
    """Credentials by name: a source, or a whole definition."""
    credentials = {
        name: said
        if isinstance(said, dict) and "source" in said
        else {"for": FOR, "source": said, "attach": {"bearer": True}}
        for name, said in sources.items()
    }
    return CredentialsFile.model_validate({"schema": 1, "credentials": credentials})


def dummy(**changes: object) -> dict[str, object]:
    return {"for": FOR, "source": {"env": "KEY"}, "attach": {"placeholder": {**PLACEHOLDER, **changes}}}


def policy(*names: str) -> EffectivePolicy:
    entries = [
        EffectiveEntry(
            id=name,
            place="a.yaml:1",
            effect="allow",
            hosts=(f"{name}.example.com",),
            requests=("GET /**",),
            credential=name,
        )
        for name in names
    ]
    return EffectivePolicy(profile="p", entries=tuple(entries))


@pytest.fixture
def spec(tmp_path: Path) -> SandboxSpec:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    return SandboxSpec(workspace=str(workspace), env={}, home="/nowhere")


EVERYWHERE = file(
    a={"env": "A"},
    b={"file": "/s/b"},
    c={
        "oauth2": {
            "token_url": "https://id.example.com/t",
            "client_id": "x",
            "client_secret": {"file": "/s/c"},
        }
    },
    d={
        "vault": {
            "address": "https://v.example.com",
            "auth": {"approle": {"role_id": "r", "secret_id": {"env": "D"}}},
            "path": "secret/data/d",
            "ca": "/s/public-ca",
        }
    },
    e={
        "github_app": {
            "app_id": 1,
            "installation_id": 2,
            "private_key": {"file": "/s/e"},
            "repositories": ["r"],
            "permissions": {"contents": "read"},
        }
    },
    f={"exec": {"command": ["/bin/true"], "env": {"NO_SECRET": "x"}}},
)


def test_every_place_of_a_secret_is_found_however_deep() -> None:
    assert secret_files(EVERYWHERE) == ("/s/b", "/s/c", "/s/e")
    assert secret_variables(EVERYWHERE) == {"A", "D"}


def test_a_variable_that_holds_a_secret_never_reaches_the_sandbox() -> None:
    keyring = Keyring(EVERYWHERE, policy("a"))
    environ = {"A": CANARY, "D": "other-secret", "LC_ALL": "C"}
    assert keyring.environment({"LC_ALL": "C", "D": "other-secret"}, (), environ) == {"LC_ALL": "C"}
    with pytest.raises(Exposed, match="--env D: a credential's secret is read from this variable") as refused:
        keyring.environment({"D": "other-secret"}, ("D",), environ)
    assert "other-secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "env", "refused"),
    [
        pytest.param("A=dummy", {"A": "dummy"}, None, id="a dummy under the same name"),
        pytest.param(f"A={CANARY}", {"A": CANARY}, "--env A: its value", id="the secret itself"),
        pytest.param(
            f"X=Bearer {CANARY}", {"X": f"Bearer {CANARY}"}, "--env X: its value", id="inside another"
        ),
        pytest.param("X", {"X": f"u:{CANARY}@h"}, "X: its value", id="in another of the caller's variables"),
    ],
)
def test_nor_does_its_value_by_another_way(asked: str, env: dict[str, str], refused: str | None) -> None:
    keyring = Keyring(EVERYWHERE, policy("a"))
    environ = {"A": f"{CANARY}\n", "D": "no"}
    if refused is None:
        assert keyring.environment(env, (asked,), environ) == env
        return
    with pytest.raises(Exposed, match=refused) as told:
        keyring.environment(env, (asked,), environ)
    assert CANARY not in str(told.value)


def test_a_value_that_is_too_short_for_a_secret_hides_nothing() -> None:
    assert leaks({"LANG": "C.UTF-8"}, {"A": "C"}, ["A"]) == []


def test_without_a_file_nothing_is_hidden_and_nothing_lent(spec: SandboxSpec) -> None:
    keyring = Keyring(None, policy())
    assert keyring.environment({"A": "b"}, ("A",), {"A": "b"}) == {"A": "b"}
    assert keyring.masks(spec) == ()
    assert keyring.begin() is None
    assert not keyring.used
    keyring.check(spec)
    asyncio.run(keyring.close())


# placeholders


@pytest.mark.parametrize("charset", ["alnum", "hex", "base64url", "digits"])
def test_a_placeholder_has_the_shape_that_clients_accept(charset: str) -> None:
    shape = Placeholder.model_validate({**PLACEHOLDER, "charset": charset, "length": 64})
    made = {make_placeholder(shape) for _ in range(50)}
    wanted = {"alnum": "[A-Za-z0-9]", "hex": "[0-9a-f]", "base64url": "[A-Za-z0-9_-]", "digits": "[0-9]"}
    assert len(made) == 50
    assert all(re.fullmatch(rf"sk-{wanted[charset]}{{61}}", one) for one in made)


def test_a_sandbox_gets_those_that_its_profile_uses() -> None:
    said = file(used=dummy(), unused=dummy(variable="OTHER_KEY"), plain={"env": "X"})
    keyring = Keyring(said, policy("used", "plain"))
    assert keyring.placeholders.keys() == {"used"}
    assert keyring.environment({}, (), {}) == {"API_KEY": keyring.placeholders["used"]}
    assert Keyring(said, policy("used")).placeholders != keyring.placeholders, "each sandbox its own"


def test_a_placeholder_s_variable_is_nobody_else_s() -> None:
    keyring = Keyring(file(used=dummy()), policy("used"))
    with pytest.raises(Exposed, match="the placeholder of the credential used goes there"):
        keyring.environment({"API_KEY": "x"}, ("API_KEY=x",), {})
    assert keyring.environment({"API_KEY": "real"}, ("API_KEY",), {"API_KEY": "real"}) == {
        "API_KEY": keyring.placeholders["used"]
    }


# files and programs


def test_a_secret_s_folder_is_masked_with_it(tmp_path: Path, spec: SandboxSpec) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir()
    (folder / "key").write_text(CANARY)
    keyring = Keyring(file(a={"file": str(folder / "key")}), policy("a"))
    assert keyring.masks(spec) == (str(folder / "key"), str(folder))


def test_in_what_is_let_in_only_the_file_is_masked_and_the_operator_told(spec: SandboxSpec) -> None:
    path = Path(spec.workspace) / "key"
    path.write_text(CANARY)
    keyring = Keyring(file(a={"file": str(path)}), policy("a"))
    assert keyring.masks(spec) == (str(path),)
    (note,) = keyring.notes(spec)
    assert "what replaces it by renaming is not" in note


def _read(path: Path) -> str:
    return asyncio.run(read_secret(SecretRef(file=str(path))))


MOVES: dict[str, Callable[[Path, Path], None]] = {
    "a folder above it is moved away": lambda folder, _: _rename(folder, folder.with_name("away")),
    "a link to it leads to another secret": lambda folder, other: _relink(folder / "link", other),
    "a folder is a link now": lambda folder, other: _rename(folder, folder.with_name("away"), other.parent),
}


def _rename(folder: Path, to: Path, link: Path | None = None) -> None:
    folder.rename(to)
    if link is not None:
        folder.symlink_to(link)
        return
    folder.mkdir()
    for name in ("key", "link"):
        (folder / name).write_text("the-attackers")
        (folder / name).chmod(0o600)


def _relink(link: Path, other: Path) -> None:
    link.unlink()
    link.symlink_to(other)


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_where_the_sandbox_can_write_no_other_file_is_read_than_at_the_start(
    move: Callable[[Path, Path], None], spec: SandboxSpec, tmp_path: Path
) -> None:
    """Its own key would go out in the place of ours, or another secret of ours to the wrong host."""
    folder, other = Path(spec.workspace) / "sub", tmp_path / "others"
    folder.mkdir()
    other.mkdir()
    for place, text in ((folder / "key", CANARY), (other / "key", "of-another"), (tmp_path / "key", CANARY)):
        place.write_text(text)
        place.chmod(0o600)
    (other / "link").symlink_to(other / "key")
    (folder / "link").symlink_to(tmp_path / "key")
    (tmp_path / "outer").symlink_to(folder / "link")
    for path in (folder / "link", tmp_path / "outer", folder / "key"):
        masked = dataclasses.replace(spec, masks=(str(folder), str(tmp_path)))
        Keyring(file(a={"file": str(path)}), policy("a")).check(masked)
        assert _read(path) == CANARY
    (tmp_path / "key").write_text(f"{CANARY}-new")
    assert _read(folder / "link") == f"{CANARY}-new", "who writes into the file itself is not the sandbox"
    move(folder, other / "key")
    for path in (folder / "link", tmp_path / "outer"):
        with pytest.raises(SourceFailed, match="another file than at the start"):
            _read(path)


def test_elsewhere_a_file_may_be_replaced(spec: SandboxSpec, tmp_path: Path) -> None:
    path = tmp_path / "secrets" / "key"
    path.parent.mkdir()
    path.write_text(CANARY)
    masked = dataclasses.replace(spec, masks=(str(path.parent),))
    Keyring(file(a={"file": str(path)}), policy("a")).check(masked)
    new = tmp_path / "new"
    new.write_text(f"{CANARY}-new")
    new.rename(path)
    assert _read(path) == f"{CANARY}-new"


@pytest.mark.parametrize(
    ("command", "exposed"),
    [
        pytest.param(["/bin/cat", "/etc/hostname"], False, id="the system's"),
        pytest.param(["cat", "relative"], False, id="looked for in the system's folders"),
        pytest.param(["{workspace}/mint.sh"], True, id="a program in the workspace"),
        pytest.param(["/bin/sh", "{workspace}/mint.sh"], True, id="a script in the workspace"),
        pytest.param(["/bin/sh", "{link}"], True, id="a link into the workspace"),
        pytest.param(["{bound}/mint.sh"], True, id="in what is bound"),
        pytest.param(["{readonly}/mint.sh"], False, id="in what is bound to be read"),
    ],
)
def test_no_program_runs_that_the_sandbox_can_write(
    tmp_path: Path, spec: SandboxSpec, command: list[str], exposed: bool
) -> None:
    for name in ("bound", "readonly"):
        (tmp_path / name).mkdir()
    link = tmp_path / "link"
    link.symlink_to(Path(spec.workspace) / "mint.sh")
    binds = (Bind(str(tmp_path / "bound")), Bind(str(tmp_path / "readonly"), writable=False))
    made = SandboxSpec(workspace=spec.workspace, env={}, home=spec.home, binds=binds)
    places = {
        "workspace": spec.workspace,
        "link": link,
        "bound": tmp_path / "bound",
        "readonly": tmp_path / "readonly",
    }
    said = file(a={"exec": {"command": [word.format(**places) for word in command]}})
    assert bool(exposed_programs(said, made)) == exposed
    if exposed:
        with pytest.raises(Exposed, match="credential a: the sandbox can write"):
            Keyring(said, policy("a")).check(made)


def test_a_secret_that_is_not_there_yet_must_be_where_the_sandbox_cannot_look(spec: SandboxSpec) -> None:
    keyring = Keyring(file(a={"file": "/opt/no-such-folder/key"}), policy("a"))
    assert shown(spec, "/opt/no-such-folder/key")
    with pytest.raises(Exposed, match="the sandbox would see it"):
        keyring.check(spec)
    Keyring(file(a={"file": "/run/secrets/key"}), policy("a")).check(spec)


# another file while the sandbox runs


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Keyring:
    monkeypatch.setenv("KEY", CANARY)
    keyring = Keyring(file(a={"env": "KEY"}), policy("a"))
    assert keyring.begin() is keyring.lending
    assert "KEY" not in os.environ
    return keyring


def test_the_same_file_changes_nothing(running: Keyring, spec: SandboxSpec) -> None:
    assert running.adopt(file(a={"env": "KEY"}), policy("a", "b"), spec) is None
    assert running.policy == policy("a", "b")


def test_another_file_counts_from_now_on(running: Keyring, spec: SandboxSpec) -> None:
    async def test() -> None:
        said = file(a={"env": "KEY"}, b=dummy())
        told = running.adopt(said, policy("a", "b"), spec)
        assert told is not None
        assert told.ended == []
        assert told.notes == ["the sandbox has no placeholder for b: start it anew"]
        assert running.file == said

    asyncio.run(test())


@pytest.mark.parametrize(
    ("said", "rules", "why"),
    [
        pytest.param(None, policy("a"), "is gone", id="none, though the rules attach one"),
        pytest.param(
            file(a={"env": "HELD"}), policy("a"), "holds HELD", id="a variable that the sandbox holds"
        ),
        pytest.param(
            file(a={"file": "/etc/hostname"}), policy("a"), "would see it", id="a file that it sees"
        ),
        pytest.param(
            file(a={"exec": {"command": ["/{workspace}/x"]}}),
            policy("a"),
            "can write",
            id="a program that it writes",
        ),
    ],
)
def test_what_would_expose_a_secret_changes_nothing(
    running: Keyring, spec: SandboxSpec, said: CredentialsFile | None, rules: EffectivePolicy, why: str
) -> None:
    made = SandboxSpec(workspace=spec.workspace, env={"HELD": "x"}, home=spec.home)
    if said is not None and said.credentials["a"].source.exec is not None:
        said = file(a={"exec": {"command": [f"{spec.workspace}/x"]}})
    before = running.file, running.policy
    with pytest.raises(Exposed, match=why):
        running.adopt(said, rules, made)
    assert (running.file, running.policy) == before


def test_what_was_started_without_credentials_gets_none_later(spec: SandboxSpec) -> None:
    keyring = Keyring(None, policy())
    with pytest.raises(Exposed, match="start it anew"):
        keyring.adopt(file(a={"env": "KEY"}), policy("a"), spec)
    assert keyring.adopt(file(a={"env": "KEY"}), policy(), spec) is None, "but its other rules go on"


# the process

_CLOSED = """
import os, resource, sys
from egressd.control.secrecy import close_process, keep_from_swap
close_process()
import ctypes
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), resource.getrlimit(resource.RLIMIT_CORE))
"""


def test_control_leaves_no_core_and_is_closed_to_others_of_its_uid() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _CLOSED],
        env={"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == "0 (0, 0)\n", ran.stderr


def test_where_there_is_no_swap_nothing_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swaps = tmp_path / "swaps"
    swaps.write_text("Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n")
    monkeypatch.setattr(secrecy, "_SWAPS", swaps)
    monkeypatch.setattr("ctypes.CDLL", None)
    assert secrecy.keep_from_swap() is None


_LOCKED = """
import sys
from collections.abc import Callable
from pathlib import Path
from egressd.control import secrecy
secrecy._SWAPS = Path(sys.argv[1])
told = secrecy.keep_from_swap()
locked = next(line for line in open("/proc/self/status") if line.startswith("VmLck"))
print(told is None, int(locked.split()[1]) > 0, told)
"""


def test_where_there_is_swap_memory_is_locked_or_it_is_said_that_it_cannot_be(tmp_path: Path) -> None:
    swaps = tmp_path / "swaps"
    swaps.write_text("Filename\n/dev/sda2 partition 1 0 -2\n")
    ran = subprocess.run(
        [sys.executable, "-c", _LOCKED, str(swaps)],
        env={"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout in ("True True None\n",) or (
        ran.stdout.startswith("False False ") and "swap" in ran.stdout
    ), ran
