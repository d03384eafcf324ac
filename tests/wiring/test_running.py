"""A command in a sandbox, from its start to its end: statuses, signals, streams, and starts that must not happen."""

import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import HERE, Ground

pytestmark = pytest.mark.e2e
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
PAUSE = "import socket; s = socket.create_connection(('192.0.2.77', 1)); s.recv(1000); "
SLEEP = PAUSE + "import time; time.sleep(30)"


@pytest.fixture
def one_ground(ground: Ground) -> Ground:
    """Where it does not matter which of the two it is, one is enough."""
    if ground.mode != "root" and os.geteuid() == 0:
        pytest.skip("once is enough")
    return ground


@pytest.fixture
def root_ground(ground: Ground) -> Ground:
    """Where the machine must be made to lack something, or a uid be chosen."""
    if ground.mode != "root":
        pytest.skip("for root")
    return ground


@pytest.mark.parametrize(
    ("command", "status"),
    [
        pytest.param(["true"], 0, id="success"),
        pytest.param(["sh", "-c", "exit 7"], 7, id="a status"),
        pytest.param(["./no-such-command"], 127, id="not found"),
        pytest.param(["no-such-command"], 127, id="not found on the path"),
        pytest.param(["/etc/hosts"], 126, id="not executable"),
        pytest.param(["sh", "-c", "kill -TERM $$"], 143, id="ended by a signal"),
        pytest.param(["sh", "-c", "kill -KILL $$"], 137, id="killed"),
        pytest.param(["./a=b"], 5, id="a name that env would take for a variable"),
        pytest.param(["printf", "%s", ""], 0, id="an empty argument"),
    ],
)
def test_the_exit_status_is_what_a_shell_would_say(
    root_ground: Ground, command: list[str], status: int
) -> None:
    odd = root_ground.workspace / "a=b"
    odd.write_text("#!/bin/sh\nexit 5\n")
    odd.chmod(0o755)
    assert root_ground.run(*command).seen["status"] == status


def test_arguments_and_environment_arrive_unchanged(one_ground: Ground) -> None:
    code = "import json, os, sys; print(json.dumps([sys.argv[1:], os.environ['A b'], os.environ['EMPTY']]))"
    odd = ["", "a b", "\n", "é", "-x", "--"]
    done = one_ground.run("/usr/bin/python3", "-c", code, *odd, spec={"env": {"A b": "c\nd", "EMPTY": ""}})
    assert json.loads(done.out) == [odd, "c\nd", ""]


def test_the_callers_environment_stays_outside(ground: Ground) -> None:
    done = ground.run("sh", "-c", "env; tr '\\0' '\\n' < /proc/1/environ; tr '\\0' '\\n' < /proc/1/cmdline")
    assert "CALLER_SECRET" not in done.out
    assert "of the caller" not in done.out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_reaches_the_command(ground: Ground, number: signal.Signals) -> None:
    code = f"import signal, sys; signal.signal({int(number)}, lambda *_: sys.exit(42)); {SLEEP}"
    done = ground.run("/usr/bin/python3", "-c", code, signal_after_connection=int(number))
    assert done.seen["status"] == 42


def test_a_command_ended_by_a_forwarded_signal_says_so(one_ground: Ground) -> None:
    done = one_ground.run("/usr/bin/python3", "-c", SLEEP, signal_after_connection=int(signal.SIGTERM))
    assert done.seen["status"] == 128 + signal.SIGTERM


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def processes_with(mark: str) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
        except OSError:
            continue
    return found


def test_cancelling_kills_everything_inside(ground: Ground) -> None:
    mark = f"mark-{ground.top.name}"
    child = f"import subprocess; subprocess.Popen(['sleep', '300.{os.getpid()}']); {SLEEP}"
    ground.run("/usr/bin/python3", "-c", child, mark, cancel_after_connection=True)
    assert processes_with(mark) == processes_with(f"300.{os.getpid()}") == []


def test_when_control_is_killed_the_sandbox_dies_with_it(ground: Ground) -> None:
    """NET-14: no way out without control."""
    mark = f"mark-{ground.top.name}"
    with ground.started("/usr/bin/python3", "-c", "import time; time.sleep(60)", mark) as (process, _):
        wait_until(lambda: len(processes_with(mark)) >= 3, "the command runs")
        process.kill()
        process.wait()
        process.communicate()
        wait_until(lambda: processes_with(mark) == [], "the sandbox is gone")


class TestStreams:
    def test_pipes_pass_through(self, one_ground: Ground) -> None:
        streams = (subprocess.PIPE, subprocess.PIPE, subprocess.PIPE)
        with one_ground.started("sh", "-c", "cat; echo err >&2", streams=streams) as (process, _):
            assert process.communicate("in", timeout=20) == ("in", "err\n")

    def test_a_socket_is_relayed_and_not_given(self, one_ground: Ground) -> None:
        """A socket carries its own network: on descriptors 0 to 2 the command gets pipes."""
        ours, theirs = socket.socketpair()
        listing = "import os; print([os.readlink(f'/proc/self/fd/{n}').split(':')[0] for n in (0, 1, 2)]); print(input())"
        with (
            ours,
            one_ground.started("/usr/bin/python3", "-c", listing, streams=(theirs,) * 3) as (process, _),
        ):
            theirs.close()
            ours.sendall(b"hello\n")
            process.wait(timeout=20)
            assert ours.recv(4096) == b"['pipe', 'pipe', 'pipe']\nhello\n"

    def test_much_output_is_not_lost(self, one_ground: Ground) -> None:
        ours, theirs = socket.socketpair()
        got = bytearray()

        def read() -> None:
            while data := ours.recv(65536):
                got.extend(data)

        reader = threading.Thread(target=read)
        with ours:
            streams = (subprocess.DEVNULL, theirs, subprocess.PIPE)
            with one_ground.started("head", "-c", "3000000", "/dev/zero", streams=streams) as (process, _):
                theirs.close()
                reader.start()
                process.wait(timeout=30)
            reader.join(10)
        assert len(got) == 3_000_000


class TestTerminal:
    SIZE = (37, 91)

    def converse(self, ground: Ground, *command: str, talk: list[tuple[bytes, bytes]]) -> tuple[bytes, int]:
        """Run a command under a terminal of ours; `talk`: wait for this, then type that. Output and exit status."""
        outer, inner = pty.openpty()
        termios.tcsetwinsize(inner, self.SIZE)
        before = termios.tcgetattr(inner)
        shown = b""
        with ground.started(*command, streams=(inner, inner, inner)) as (process, answer):
            for expected, typed in talk:
                while expected not in shown:
                    shown += os.read(outer, 4096)
                os.write(outer, typed)
            process.wait(timeout=20)
            status = json.loads(answer.read_text())["status"]
        assert termios.tcgetattr(inner) == before, "the terminal is left as it was"
        os.set_blocking(outer, False)
        try:
            while True:
                shown += os.read(outer, 4096)
        except BlockingIOError:
            pass
        os.close(outer)
        os.close(inner)
        return shown, status

    def test_the_command_has_a_terminal_of_its_own(self, ground: Ground) -> None:
        code = "import os; print([os.isatty(n) for n in (0, 1, 2)], os.get_terminal_size()); open('/dev/tty').close()"
        shown, status = self.converse(ground, "/usr/bin/python3", "-c", code, talk=[])
        assert status == 0, shown
        assert b"[True, True, True] os.terminal_size(columns=91, lines=37)" in shown

    def test_what_is_typed_arrives(self, one_ground: Ground) -> None:
        shown, status = self.converse(one_ground, "sh", "-c", "read x; echo got-$x", talk=[(b"", b"abc\r")])
        assert status == 0
        assert b"got-abc" in shown

    def test_control_c_interrupts_the_command_and_nothing_around_it(self, ground: Ground) -> None:
        waiting = "try:\n print('ready', flush=True); time.sleep(30)\n"
        code = f"import time\n{waiting}except KeyboardInterrupt:\n print('caught'); exit(9)"
        shown, status = self.converse(ground, "/usr/bin/python3", "-c", code, talk=[(b"ready", b"\x03")])
        assert b"caught" in shown
        assert status == 9

    def test_control_c_ends_a_command_that_does_not_care(self, one_ground: Ground) -> None:
        _, status = self.converse(
            one_ground, "sh", "-c", "echo ready; exec sleep 30", talk=[(b"ready", b"\x03")]
        )
        assert status == 128 + signal.SIGINT

    def test_a_new_size_of_the_window_is_passed_on(self, one_ground: Ground) -> None:
        code = (
            "import os, signal, sys; signal.signal(signal.SIGWINCH, lambda *_: sys.exit(os.get_terminal_size().columns))\n"
            "print('ready', flush=True)\nimport time; time.sleep(30)"
        )
        outer, inner = pty.openpty()
        termios.tcsetwinsize(inner, self.SIZE)
        with one_ground.started("/usr/bin/python3", "-c", code, streams=(inner, inner, inner)) as (
            process,
            answer,
        ):
            shown = b""
            while b"ready" not in shown:
                shown += os.read(outer, 4096)
            termios.tcsetwinsize(inner, (20, 77))
            process.send_signal(signal.SIGWINCH)
            process.wait(timeout=20)
            assert json.loads(answer.read_text())["status"] == 77
        os.close(outer)
        os.close(inner)


class TestHostSockets:
    def serving(self, path: Path) -> socket.socket:
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        server.listen()
        path.chmod(0o777)
        return server

    CONNECT = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); print('connected')"
    )

    def test_a_socket_in_the_workspace_stops_the_start(self, ground: Ground) -> None:
        path = ground.workspace / "deep" / "agent.sock"
        path.parent.mkdir()
        with self.serving(path):
            done = ground.run("true")
        assert str(path) in done.seen["error"][1]
        assert f"--socket {path}" in done.seen["error"][2]

    @pytest.mark.parametrize("bind", ["{0}/agent.sock", "{0}:ro", "{0}/agent.sock:ro"])
    def test_a_bind_does_not_let_a_socket_in_by_the_way(self, one_ground: Ground, bind: str) -> None:
        place = one_ground.top / "services"
        place.mkdir()
        with self.serving(place / "agent.sock"):
            done = one_ground.run("true", spec={"binds": [bind.format(place)]})
        assert "agent.sock is a Unix socket" in done.seen["error"][1]

    def test_a_socket_let_in_by_name_works(self, ground: Ground) -> None:
        path = ground.top / "agent.sock"
        with self.serving(path):
            ground.own(path)
            path.chmod(0o600)
            done = ground.run(
                "/usr/bin/python3", "-c", self.CONNECT, str(path), spec={"sockets": [str(path)]}
            )
        assert done.out == "connected\n", done.err

    def test_a_live_socket_elsewhere_on_the_system_is_masked(self, root_ground: Ground) -> None:
        """A read-only mount does not keep anyone from connecting."""
        place = Path("/var/lib") / f"egressd-test-{root_ground.top.name}"
        place.mkdir()
        try:
            with self.serving(place / "service.sock"):
                done = root_ground.run("/usr/bin/python3", "-c", self.CONNECT, str(place / "service.sock"))
            assert done.seen["status"] == 1
            assert "Refused" in done.err or "Permission" in done.err
        finally:
            shutil.rmtree(place)


class TestStartsThatMustNotHappen:
    def instead(self, ground: Ground, tool: str, script: str = "") -> str:
        """Shell words that put a script in a tool's place, or nothing, for one process and its children."""
        place = ground.top / "alternatives"
        shutil.copytree("/etc/alternatives", place, symlinks=True)
        (place / tool).unlink()
        if script:
            (place / tool).write_text(f"#!/bin/sh\n{script}\n")
            (place / tool).chmod(0o755)
        return f"mount --bind {place} /etc/alternatives"

    @pytest.mark.parametrize(
        "tool", ["iptables-restore", "ip6tables-restore", "iptables-save", "ip6tables-save"]
    )
    def test_a_missing_tool_is_named_with_a_hint(self, root_ground: Ground, tool: str) -> None:
        """NET-03, NET-32: without the rules of both families, read back, nothing starts."""
        command, said, hint = root_ground.run("true", shell=self.instead(root_ground, tool)).seen["error"]
        assert (command, said) == (tool, "No such file or directory")
        assert "apt-get install iptables" in hint

    def test_a_missing_iproute2_is_named(self, root_ground: Ground) -> None:
        shell = "mount --bind /dev/null $(readlink -f /usr/sbin/ip)"
        assert root_ground.run("true", shell=shell).seen["error"][0] == "ip -batch -"

    def test_a_rule_that_the_kernel_refuses_stops_the_start(self, root_ground: Ground) -> None:
        shell = self.instead(
            root_ground, "iptables-restore", "echo 'Extension NFLOG not supported' >&2; exit 2"
        )
        command, said, hint = root_ground.run("true", shell=shell).seen["error"]
        assert (command, said) == ("iptables-restore", "Extension NFLOG not supported")
        assert "modprobe" in hint

    def test_rules_that_were_not_really_set_stop_the_start(self, root_ground: Ground) -> None:
        shell = self.instead(root_ground, "ip6tables-restore", "exit 0")
        said = root_ground.run("true", shell=shell).seen["error"][1]
        assert said == "IPv6: *filter: table missing; IPv6: *nat: table missing"

    def test_a_missing_bubblewrap_is_named(self, root_ground: Ground) -> None:
        done = root_ground.run("true", shell="mount --bind /dev/null /usr/bin/bwrap")
        assert done.seen["error"][0] == "bwrap"
        assert "apt-get install bubblewrap" in done.seen["error"][2]

    def test_a_file_system_without_idmapped_mounts_is_explained(self, root_ground: Ground) -> None:
        work = root_ground.workspace
        done = root_ground.run("true", shell=f"mount -t ramfs none {work}")
        assert f"idmap {work}" in done.seen["error"][0]
        assert "--uid" in done.seen["error"][2]

    def test_there_the_owners_own_uid_is_the_way(self, root_ground: Ground) -> None:
        work = root_ground.workspace
        shell = f"mount -t ramfs -o mode=0755 none {work}; chown 47200:47200 {work}"
        done = root_ground.run("sh", "-c", "touch x && stat -c %u x", shell=shell, spec={"uid": 47200})
        assert (done.seen["status"], done.out, done.seen["host_uid"]) == (0, "1000\n", 47200)

    @pytest.mark.parametrize("uid", [0, 1337, 59138])
    def test_uids_that_mean_something_are_refused(self, root_ground: Ground, uid: int) -> None:
        assert "not for sandboxes" in root_ground.run("true", spec={"uid": uid}).seen["error"][1]


def test_egressds_own_code_is_read_only_even_in_the_workspace(ground: Ground) -> None:
    """A worker is started from it again and again: a sandbox that could write there would be outside."""
    copy = ground.workspace / "src" / "checkout"
    (copy / "tests" / "wiring").mkdir(parents=True)
    shutil.copytree(
        HERE.parents[1] / "egressd", copy / "egressd", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(HERE / "driver.py", copy / "tests" / "wiring")
    ground.own(ground.workspace)
    script = (
        "touch src/checkout/ok && ! touch src/checkout/egressd/x && ! mv src/checkout/egressd y && ! mv src/checkout z && "
        "! mv src z && ! touch src/checkout/egressd/wiring/maker.py"
    )
    done = ground.run("sh", "-c", script, driver=copy / "tests" / "wiring" / "driver.py")
    assert done.seen.get("status") == 0, (done.seen, done.err)


def test_a_project_in_the_home_directory_comes_without_the_rest_of_it(ground: Ground) -> None:
    ground.home.chmod(0o700)
    project = ground.home / "src" / "project"
    project.mkdir(parents=True)
    (ground.home / "settings").write_text("let in")
    (ground.home / "settings").chmod(0o600)
    ground.own(ground.home)
    spec = {"workspace": str(project), "binds": [f"{ground.home}/settings:ro"]}
    script = (
        "pwd; touch made; ls -A ~ ~/src ~/src/project; cat ~/settings; ! touch ~/settings; touch ~/scratch"
    )
    done = ground.run("sh", "-c", script, spec=spec)
    home = str(ground.home)
    shown = f"{project}\n{home}:\nsettings\nsrc\n\n{home}/src:\nproject\n\n{project}:\nmade\nlet in"
    assert (done.seen.get("status"), done.out) == (0, shown), (done.seen, done.err)
    assert not (ground.home / "scratch").exists()
    assert (project / "made").stat().st_uid == ground.owner


def test_seeds_are_the_commands_own_to_change(ground: Ground) -> None:
    seed = ground.top / "seed"
    seed.write_text("from the host\n")
    script = 'cd "$HOME/.a/b"; cat c; echo changed > c; cat c; stat -c %a c; touch d'
    done = ground.run("sh", "-ec", script, spec={"seeds": {".a/b/c": str(seed)}})
    assert done.out == "from the host\nchanged\n600\n", (done.seen, done.err)
    assert seed.read_text() == "from the host\n"


def test_files_that_are_trusted_are_put_in_their_place(ground: Ground) -> None:
    bundle = ground.top / "bundle.crt"
    bundle.write_text("the bundle")
    bundle.chmod(0o600)
    trust = {"/etc/ssl/certs/ca-certificates.crt": str(bundle), "/run/egressd/bundle.crt": str(bundle)}
    ground.own(bundle)
    done = ground.run("cat", *trust, spec={"trust": trust})
    assert done.out == "the bundle" * 2, done.err


def test_a_resolv_conf_that_is_a_link_into_run_still_says_our_resolver(root_ground: Ground) -> None:
    target = f"/run/egressd-test-{root_ground.top.name}/stub.conf"
    shell = (
        f"mkdir -p {root_ground.top}/etc $(dirname {target}); cp -a /etc/. {root_ground.top}/etc; "
        f"echo nameserver 9.9.9.9 > {target}; rm {root_ground.top}/etc/resolv.conf; "
        f"ln -s {target} {root_ground.top}/etc/resolv.conf; mount --bind {root_ground.top}/etc /etc"
    )
    try:
        done = root_ground.run("cat", "/etc/resolv.conf", shell=shell)
        assert done.out == "nameserver 198.18.0.1\n", (done.seen, done.err)
    finally:
        shutil.rmtree(Path(target).parent)


def test_it_works_where_a_container_covers_parts_of_proc(root_ground: Ground) -> None:
    shell = "mount --bind /proc/sys /proc/sys; mount -o remount,ro,bind /proc/sys; mount --bind /dev/null /proc/keys"
    done = root_ground.run(
        "sh", "-c", "ls /proc | grep -c '^[0-9]'; cat /proc/sys/kernel/ostype", shell=shell
    )
    assert (done.seen.get("status"), done.seen.get("notes")) == (0, []), (done.seen, done.err)


def test_it_works_for_root_of_a_user_namespace_with_one_uid(ground: Ground) -> None:
    """Inside rootless containers: root there, an ordinary user outside."""
    if ground.mode != "rootless":
        pytest.skip("once is enough")
    done = ground.run("sh", "-c", "touch made; id -u", nested=True)
    assert (done.seen.get("status"), done.out) == (0, "1000\n"), (done.seen, done.err)
    assert (ground.workspace / "made").stat().st_uid == ground.owner


def test_many_starts_leave_nothing_behind(root_ground: Ground) -> None:
    """NET-31: everything is the namespace's, and goes with it."""
    mounts = Path("/proc/self/mountinfo").read_text()
    rules = subprocess.run(
        ["iptables-save"], capture_output=True, text=True, check=True, env={"PATH": "/usr/sbin"}
    ).stdout
    for _ in range(3):
        assert root_ground.run("true").seen["status"] == 0
    assert Path("/proc/self/mountinfo").read_text() == mounts
    after = subprocess.run(
        ["iptables-save"], capture_output=True, text=True, check=True, env={"PATH": "/usr/sbin"}
    ).stdout
    assert after == rules
