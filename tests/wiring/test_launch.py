"""From a sandbox's description to bubblewrap's arguments, and the descriptions that are refused."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import egressd
from egressd.wiring.errors import WiringError
from egressd.wiring.launch import covering, plan, shown, view, writable
from egressd.wiring.mounts import ancestors, within
from egressd.wiring.namespace import Bind, SandboxSpec


@pytest.fixture
def spec(tmp_path: Path) -> SandboxSpec:
    for name in ("work", "home", "other"):
        (tmp_path / name).mkdir()
    return SandboxSpec(workspace=str(tmp_path / "work"), env={"PATH": "/bin"}, home=str(tmp_path / "home"))


def words(spec: SandboxSpec, *command: str, terminal: bool = False) -> list[str]:
    arguments = plan(spec, view(spec), command or ("true",), terminal=terminal).arguments
    assert arguments.endswith(b"\0")
    return arguments.decode().split("\0")[:-1]


def values(arguments: list[str], option: str) -> list[str]:
    return [arguments[place + 1] for place, word in enumerate(arguments) if word == option]


def test_the_fence_is_whole(spec: SandboxSpec) -> None:
    arguments = words(spec)
    wanted = "--unshare-user --disable-userns --unshare-pid --unshare-ipc --unshare-uts --unshare-cgroup-try"
    assert set(wanted.split()) | {"--die-with-parent", "--clearenv"} <= set(arguments)
    assert "--unshare-net" not in arguments, "the namespace that was wired is the sandbox's network"
    assert values(arguments, "--cap-drop") == ["ALL"]
    assert values(arguments, "--uid") == ["1000"]


def test_everything_is_read_only_before_anything_is_writable(spec: SandboxSpec) -> None:
    arguments = words(spec)
    assert arguments.index("--ro-bind") < arguments.index("--tmpfs") < arguments.index("--bind")
    assert values(arguments, "--bind") == [spec.workspace]
    assert set(values(arguments, "--tmpfs")) >= {"/run", "/tmp", "/var/tmp", spec.home}


@pytest.mark.parametrize(
    ("let_in", "copied"),
    [
        pytest.param(None, True, id="into the empty home"),
        pytest.param(".pki", False, id="not over what is let in above it"),
        pytest.param(".pki/nssdb", False, id="not over what is let in at its place"),
        pytest.param("other", True, id="beside what is let in elsewhere"),
    ],
)
def test_seeds_are_copied_into_the_home_and_never_into_the_hosts_files(
    spec: SandboxSpec, let_in: str | None, copied: bool
) -> None:
    seed = Path(spec.home) / "seed"
    seed.write_text("content")
    binds: tuple[Bind, ...] = ()
    if let_in is not None:
        (Path(spec.home) / let_in).mkdir(parents=True)
        binds = (Bind(f"{spec.home}/{let_in}"),)
    seeded = replace(spec, binds=binds, seeds={".pki/nssdb/cert9.db": str(seed)})
    made = plan(seeded, view(seeded), ("true",), terminal=False)
    arguments = made.arguments.decode().split("\0")
    assert (f"{spec.home}/.pki/nssdb/cert9.db" in arguments) == copied
    assert (b"content" in made.files) == copied


def test_binds_come_outermost_first_so_that_none_hides_another(spec: SandboxSpec) -> None:
    inner = Path(spec.workspace) / "a" / "b"
    inner.mkdir(parents=True)
    arguments = words(replace(spec, binds=(Bind(str(inner), writable=False), Bind(str(inner.parent)))))
    assert arguments.index(spec.workspace) < arguments.index(str(inner.parent)) < arguments.index(str(inner))


def test_the_environment_is_set_word_by_word(spec: SandboxSpec) -> None:
    arguments = words(replace(spec, env={"A": "", "B": "c=d e"}))
    place = arguments.index("--clearenv")
    assert arguments[place + 4 :] == ["--setenv", "A", "", "--setenv", "B", "c=d e"]


@pytest.mark.parametrize("name", ["", "A=B", "A\0B"])
def test_a_name_that_is_none_is_refused(spec: SandboxSpec, name: str) -> None:
    with pytest.raises(WiringError):
        words(replace(spec, env={name: "x"}))


@pytest.mark.parametrize("command", [(), ("",), ("a\0b",)])
def test_a_command_that_is_none_is_refused(spec: SandboxSpec, command: tuple[str, ...]) -> None:
    with pytest.raises(WiringError):
        plan(spec, view(spec), command, terminal=False)


def test_the_command_gets_the_keyboards_signals_back_under_a_terminal(spec: SandboxSpec) -> None:
    started = plan(spec, view(spec), ["vi"], terminal=True).command
    assert started == ("/usr/bin/env", "--default-signal=INT", "--default-signal=QUIT", "--", "vi")


def test_bind_values_are_read_as_the_flag_says() -> None:
    assert Bind.parse("/a") == Bind("/a", writable=True)
    assert Bind.parse("/a:ro") == Bind("/a", writable=False)


Change = Callable[[SandboxSpec], SandboxSpec]
REFUSED: list[tuple[str, Change, str]] = [
    ("the whole system", lambda s: replace(s, workspace="/"), "is /"),
    ("the system's settings", lambda s: replace(s, workspace="/etc"), "is /etc"),
    ("below the system's settings", lambda s: replace(s, workspace="/etc/ssl"), "must not change"),
    ("all programs", lambda s: replace(s, workspace="/usr"), "is /usr"),
    ("everybody's temporary files", lambda s: replace(s, workspace="/tmp"), "is /tmp"),
    ("the kernel's files", lambda s: replace(s, workspace="/proc/self"), "must not change"),
    ("home itself", lambda s: replace(s, workspace=s.home), "home directory"),
    ("above home", lambda s: replace(s, workspace=str(Path(s.home).parent)), "home directory"),
    ("a relative path", lambda s: replace(s, workspace="work"), "absolute"),
    ("nothing", lambda s: replace(s, workspace=s.workspace + "/none"), "does not exist"),
    ("a writable bind of the system", lambda s: replace(s, binds=(Bind("/var"),)), "is /var"),
    ("a bind of everything", lambda s: replace(s, binds=(Bind("/", writable=False),)), "is /"),
    ("a bind of nothing", lambda s: replace(s, binds=(Bind("/none"),)), "does not exist"),
    ("a socket that is not there", lambda s: replace(s, sockets=("/none.sock",)), "does not exist"),
    ("a mask over the workspace", lambda s: replace(s, masks=(s.workspace,)), "must stay hidden"),
    ("a mask above the workspace", lambda s: replace(s, masks=(str(Path(s.workspace).parent),)), "must stay hidden"),
    ("a mask that the sandbox could create", lambda s: replace(s, masks=(s.workspace + "/key",)), "could create it"),
    ("egressd's own code", lambda s: replace(s, workspace=str(Path(egressd.__file__).parent / "wiring")), "installation"),
    ("a trust file for a place that is not there", lambda s: replace(s, trust={"/none/x": "/etc/hosts"}), "does not exist"),
    ("a trust file that is not there", lambda s: replace(s, trust={"/run/x": "/none"}), "No such file"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_cannot_be_safe_is_refused(spec: SandboxSpec, change: Change, said: str) -> None:
    with pytest.raises(WiringError, match=said):
        words(change(spec))


def test_a_mask_reached_through_a_link_in_the_workspace_is_refused(spec: SandboxSpec, tmp_path: Path) -> None:
    """The sandbox could turn the link to another place, and egressd would read what is there."""
    (tmp_path / "other" / "key").touch()
    (Path(spec.workspace) / "link").symlink_to(tmp_path / "other")
    with pytest.raises(WiringError, match="link that the sandbox could change"):
        view(replace(spec, masks=(spec.workspace + "/link/key",)))


def test_a_workspace_that_is_a_link_is_taken_for_what_it_leads_to(spec: SandboxSpec, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(WiringError, match="is /etc"):
        view(replace(spec, workspace=str(tmp_path / "link")))


def test_a_path_is_writable_if_it_or_what_is_above_or_below_it_is(spec: SandboxSpec, tmp_path: Path) -> None:
    spec = replace(spec, binds=(Bind(str(tmp_path / "other" / "deep"), writable=False),))
    assert writable(spec, spec.workspace + "/rules")
    assert writable(spec, spec.workspace)
    assert writable(spec, str(tmp_path)), "rules above the workspace include what is written in it"
    assert not writable(spec, str(tmp_path / "other"))
    assert not writable(spec, spec.workspace + "-rules")


def test_a_link_to_the_workspace_is_writable_too(spec: SandboxSpec, tmp_path: Path) -> None:
    (tmp_path / "rules").symlink_to(spec.workspace)
    assert writable(spec, str(tmp_path / "rules"))


def test_accounts_gain_the_sandboxs_line_and_lose_none(spec: SandboxSpec) -> None:
    contents = plan(spec, view(spec), ["true"], terminal=False).files
    accounts = next(content for content in contents if b"root:x:0:0" in content).decode().splitlines()
    assert accounts[-1] == f"sandbox:x:1000:1000::{spec.home}:/bin/sh"
    assert len([line for line in accounts if ":1000:" in line]) == 1


def test_the_interpreter_and_the_package_are_protected(spec: SandboxSpec) -> None:
    protected = view(spec).protected
    assert os.path.realpath(Path(egressd.__file__).parent) in protected
    assert any(within(os.path.realpath(os.__file__), path) for path in protected)
    if sys.prefix != sys.base_prefix:
        assert os.path.realpath(sys.prefix) in protected


@pytest.mark.parametrize(
    ("path", "directory", "answer"),
    [
        ("/a", "/a", True),
        ("/a/b", "/a", True),
        ("/ab", "/a", False),
        ("/a", "/", True),
        ("/a", "/a/b", False),
    ],
)
def test_within_goes_by_whole_names(path: str, directory: str, *, answer: bool) -> None:
    assert within(path, directory) is answer


def test_ancestors_begin_at_the_root() -> None:
    assert list(ancestors("/a/b/c")) == ["/", "/a", "/a/b"]


@pytest.mark.parametrize(
    ("path", "masked", "seen"),
    [
        pytest.param("{work}/key", ["{work}/key"], True, id="in the workspace: the file alone"),
        pytest.param(
            "{work}/sub/key", ["{work}/sub/key"], True, id="below it: what stands there is the sandbox's"
        ),
        pytest.param("{other}/key", ["{other}/key", "{other}"], False, id="in a folder of its own"),
        pytest.param("{top}/key", ["{top}/key"], False, id="in a folder above the workspace"),
        pytest.param(
            "{link}/key", ["{link}/key", "{link}", "{other}"], False, id="behind a link, in both folders"
        ),
        pytest.param("/etc/hostname", ["/etc/hostname"], True, id="in a folder of the system"),
        pytest.param("/usr/share/x/key", ["/usr/share/x/key"], True, id="among programs"),
        pytest.param("/run/secrets/key", ["/run/secrets/key"], False, id="where nothing of the host is seen"),
    ],
)
def test_a_secret_is_covered_with_its_folder_where_that_is_its_own(
    tmp_path: Path, spec: SandboxSpec, path: str, masked: list[str], seen: bool
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "other")
    (tmp_path / "work" / "sub").mkdir()
    for folder in ("work", "work/sub", "other", "."):
        (tmp_path / folder / "key").write_text("secret")
    places = {"work": spec.workspace, "other": tmp_path / "other", "top": tmp_path, "link": tmp_path / "link"}
    given = path.format(**places)
    assert list(covering(spec, given)) == [place.format(**places) for place in masked]
    assert shown(spec, given) == seen


def test_a_masked_file_is_not_seen_and_one_that_is_not_there_yet_would_be(spec: SandboxSpec) -> None:
    key = Path(spec.workspace) / "key"
    masked = replace(spec, masks=(str(key),))
    assert shown(masked, str(key)), "a mask lies over what is there"
    key.write_text("secret")
    assert not shown(masked, str(key))
    assert shown(masked, f"{spec.workspace}/another")
