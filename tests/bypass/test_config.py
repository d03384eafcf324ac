"""CFG rows: the rules themselves, as files that are broken or hostile. Changes under load are in test_reload.py."""

from __future__ import annotations

import shutil
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.bypass.arena import Arena
from tests.bypass.reload import ASK, adopt, in_force, policies

pytestmark = pytest.mark.e2e


_LIST = "allow:\n  - hosts: {0}\n"
HEAD = "schema: 1\nprofile: lab\nowner: bypass\n"

REFUSED = [
    pytest.param("allow: [nonsense\n", "bad_yaml", id="CFG-01 broken YAML"),
    pytest.param("", "empty_file", id="CFG-02 an empty file"),
    pytest.param("# allow everything\n", "empty_file", id="CFG-02 only comments"),
    pytest.param(HEAD + "allow: []\n", "empty_list", id="CFG-02 an empty list"),
    pytest.param(HEAD + "allow:\n", "empty_value", id="CFG-02 a key without a value"),
    pytest.param(HEAD + _LIST.format("[]"), "empty_list", id="CFG-02 a rule without hosts"),
    pytest.param(HEAD + "allow:\n  - requests: ['GET /**']\n", "entry_selector", id="CFG-02 a rule for nothing"),
    pytest.param(HEAD + "alow:\n  - hosts: [evil-lab.com]\n", "unknown_key", id="CFG-03 a misspelt key"),
    pytest.param(HEAD + _LIST.format("[a.com]") + "    port: [22]\n", "unknown_key", id="CFG-03 a misspelt key of a rule"),
    pytest.param(
        HEAD + "deny:\n  - hosts: [a.com]\nallow:\n  - hosts: [b.com]\ndeny:\n  - hosts: [c.com]\n",
        "duplicate_key",
        id="CFG-03 deny twice",
    ),
    pytest.param(HEAD + _LIST.format("[a.com]") + '    ports: "443"\n', "wrong_type", id="CFG-03 a text for a list"),
    pytest.param(HEAD + _LIST.format("[no]"), "", id="CFG-03 no is no host"),
    pytest.param(HEAD + _LIST.format("[a.com]") + "    ports: [22:22]\n", "ambiguous_value", id="CFG-03 22:22"),
    pytest.param(HEAD + _LIST.format("[1.10]"), "", id="CFG-03 1.10"),
    pytest.param(HEAD.replace("1", "2") + _LIST.format("[a.com]"), "bad_schema", id="CFG-03 another schema"),
    pytest.param(
        HEAD + "a: &a [x, x]\n" + "".join(f"{c}: &{c} [*{p}, *{p}, *{p}]\n" for p, c in pairwise("abcdefghi")),
        "alias",
        id="CFG-04 nine levels of aliases",
    ),
    pytest.param(HEAD + "allow: !!python/object/apply:os.system ['touch /tmp/owned']\n", "tag", id="CFG-04 a tag"),
    pytest.param(HEAD + "allow: " + "[" * 100_000 + "\n", "bad_yaml", id="CFG-04 a hundred thousand brackets"),
    pytest.param(HEAD + "allow: " + "{a: " * 1000 + "\n", "too_deep", id="CFG-04 a thousand braces"),
    pytest.param(HEAD + "#" + "x" * (10 << 20) + "\n", "too_large", id="CFG-04 ten megabytes"),
    pytest.param(HEAD + "<<: {a: 1}\n", "", id="CFG-04 a merge key"),
    pytest.param(HEAD + _LIST.format("['^(a+)+$']"), "bad_host", id="CFG-05 a regular expression"),
    pytest.param(HEAD + _LIST.format('["x.test\\nallow all"]'), "bad_host", id="CFG-06 a second line"),
    pytest.param(HEAD + _LIST.format("""['"; iptables -F; "']"""), "bad_host", id="CFG-06 shell"),
    pytest.param(HEAD + _LIST.format("['{ type filter }']"), "bad_host", id="CFG-06 nft"),
    pytest.param(HEAD + _LIST.format("[a.com]") + "    id: 'x\\n-A OUTPUT -j ACCEPT'\n", "bad_id", id="CFG-06 an id"),
    pytest.param(HEAD + _LIST.format("['https://API.allowed.test/v1']"), "", id="CFG-11 a URL"),
    pytest.param(HEAD + _LIST.format("[' api.allowed.test. ']"), "", id="CFG-11 spaces and a final dot"),
    pytest.param(HEAD + _LIST.format("[API.allowed.test]"), "", id="CFG-11 capitals"),
    pytest.param(HEAD + _LIST.format("['api.allowed.test:8443']"), "", id="CFG-11 a port"),
    pytest.param(HEAD + _LIST.format("[10.0.0.0/8]"), "", id="CFG-11 a range where hosts belong"),
    pytest.param(
        HEAD + "allow:\n  - addresses: [169.254.0.0/16]\n    ports: [80]\n", "floor_network", id="CFG-12 the floor in a rule"
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "code"), REFUSED)
def test_a_bad_file_changes_nothing_and_says_where(live: Arena, text: str, code: str) -> None:
    stand = live.stand
    digests, mark = in_force(stand), len(stand.records())
    began = time.monotonic()
    stand.profile.write_text(text)
    said = policies(stand, mark)
    assert time.monotonic() - began < 3
    for record in said:
        place, _, problem = record["detail"].removeprefix("refused: ").partition(": ")
        assert record["detail"].startswith("refused: "), record
        assert place.startswith(f"{stand.profile}:"), record
        assert all(part.isdigit() for part in place.rsplit(":", 2)[1:]), "line and column"
        assert problem.startswith(f"{code}:") if code else problem, record
    assert in_force(stand) == digests
    assert not Path("/tmp/owned").exists()
    live.life_goes_on()


def test_a_profile_without_entries_lets_nothing_out(live: Arena) -> None:
    """CFG-02."""
    adopt(live, HEAD)
    live.lab.forget()
    for name in ("api.lab-origin.com", "evil-lab.com", "pypi.org"):
        assert "(reason not_allowed)" in live.a.run(ASK.format(name))
    live.nothing_reached()


@pytest.mark.parametrize(
    "text", [pytest.param(p.values[0], id=str(p.id)) for p in REFUSED if "CFG-04" in str(p.id)]
)
def test_a_hostile_file_costs_little(live: Arena, text: str) -> None:
    """CFG-04: read by a process of its own, within a second and 200 MB."""
    stand = live.stand
    stand.profile.write_text(str(text))
    program = (
        "import sys, pathlib, time\nfrom egressd.rulefiles.load import load_rules\nbegan = time.monotonic()\n"
        "problems, seconds = len(load_rules(pathlib.Path(sys.argv[1]))), time.monotonic() - began\n"
        # not ru_maxrss, which begins with that of the process that forked this one
        "peak = pathlib.Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]\n"
        "print(problems, seconds, peak)"
    )
    argv = stand.egressd()
    ran = subprocess.run(
        [argv[0], "-c", program, str(stand.rules)], capture_output=True, text=True, timeout=30
    )
    problems, seconds, memory = ran.stdout.split()
    assert int(problems) >= 1
    assert float(seconds) < 2, "a second on a machine of its own"
    assert int(memory) < 200_000


def test_a_pattern_costs_no_more_than_its_length(live: Arena) -> None:
    """CFG-05: many stars in a path, and paths made to try them all."""
    adopt(
        live,
        HEAD
        + "allow:\n  - id: api\n    hosts: [api.lab-origin.com]\n    requests:\n"
        + "".join(f"      - 'GET /{'*a' * n}*b'\n      - 'GET /**/{'x/**/' * n}y'\n" for n in (1, 5, 15))
        + "      - 'GET /n'\n",
    )
    code = (
        "def took(path):\n began = time.monotonic()\n said = tls('api.lab-origin.com', 443, get(path), 'api.lab-origin.com')\n"
        " return round(time.monotonic() - began, 3), said[:12]\n"
        "took('/n')\n"
        "say(max(took(path) for path in ('/' + 'a' * 8000 + '!', '/x' * 4000, '/a*' * 2000 + 'c', '/x/' + 'y/x/' * 1900)))"
    )
    live.lab.forget()
    seconds, status = eval(live.a.run(code))
    assert status == b"HTTP/1.1 403"
    assert seconds < 0.5, "50 ms and a handshake on a busy machine"


def test_the_sandbox_writes_no_rule_and_finds_no_control(live: Arena) -> None:
    """CFG-09."""
    stand = live.stand
    paths = [
        stand.rules,
        stand.profile,
        stand.config,
        stand.directory / "control.sock",
        stand.directory / "ca",
        stand.journal,
    ]
    code = (
        f"for path in {[str(path) for path in paths]}:\n"
        " try:\n  with open(path) as file:\n   say('READ', path, file.read(40))\n except OSError:\n  pass\n"
        " for how in (lambda: open(path, 'a').write('allow: all'), lambda: os.rename(path, path + '.x'),"
        " lambda: os.mkdir(path), lambda: os.symlink('/tmp', path)):\n"
        "  try:\n   how()\n  except OSError:\n   pass\n"
        "for method in ('POST', 'PUT', 'DELETE', 'PATCH'):\n"
        " for path in ('/', '/policy', '/rules', '/reload', '/sandboxes', '/admin'):\n"
        "  said = shown(tcp('egressd.internal', 80, get(path, 'egressd.internal', method, b'Content-Length: 0\\r\\n')))\n"
        "  if ' 200 ' in said[:16]: say('TAKEN', method, path)\n"
        "for port in (15021, 15090, 8080, 9000):\n"
        " for host in ('127.0.0.1', '198.18.0.3', '198.18.0.254'):\n"
        "  said = shown(tcp(host, port, get('/rules', host, 'POST'), seconds=2.5))\n"
        "  if ' 200 ' in said[:16]: say('OPEN', host, port)\n"
        "say('end')"
    )
    before = stand.profile.read_bytes(), in_force(stand)
    assert live.a.run(code, 30) == "end\n", "it may make what it likes in its own /tmp; none of it is ours"
    assert (stand.profile.read_bytes(), in_force(stand)) == before
    live.life_goes_on()


def test_rules_that_the_sandbox_could_write_are_read_once(live: Arena) -> None:
    """CFG-09: a rules folder in the workspace is hidden, and no longer followed."""
    stand = live.stand
    inside = stand.workspace / "rules"
    shutil.copytree(stand.rules, inside)
    code = (
        f"import os, subprocess\n"
        f"for path in ({str(inside / 'profiles' / 'lab.yaml')!r}, {str(inside)!r} + '/x'):\n"
        " try: open(path, 'w').write('schema: 1'); print('WROTE')\n except OSError as error: print(type(error).__name__)\n"
        f"try: os.rename({str(inside)!r}, {str(inside)!r} + '.x'); print('MOVED')\nexcept OSError as error: "
        f"print(type(error).__name__)\n"
        "print(subprocess.run(['curl', '-sS', '-m', '5', 'https://evil-lab.com/'], capture_output=True, text=True).stdout)"
    )
    try:
        argv = stand.egressd(
            "--rules", str(inside), "run", "--profile", "lab", "--", "/usr/bin/python3", "-c", code
        )
        ran = stand.lab.host_exec(argv, cwd=str(stand.workspace), privileged=not stand.lab.rootless)
    finally:
        shutil.rmtree(inside)
    assert "WROTE" not in ran.stdout
    assert "MOVED" not in ran.stdout
    assert "(reason not_allowed)" in ran.stdout
    assert "read once and are not reloaded" in ran.stderr


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], id="CFG-10 no profile is named"),
        pytest.param(["--profile", "nobody"], id="CFG-10 a profile that does not exist"),
        pytest.param(["--profile", ""], id="CFG-10 an empty name"),
        pytest.param(["--profile", "../profiles/lab"], id="CFG-10 a path for a name"),
    ],
)
def test_no_sandbox_starts_under_a_default(live: Arena, flags: list[str]) -> None:
    """Nor is there any other source of traffic: a listener belongs to one sandbox, and control knows each (tests/journal)."""
    stand = live.stand
    mark = len(stand.records())
    ran = stand.lab.host_exec(
        stand.egressd("run", *flags, "--", "touch", "started"), cwd=str(stand.workspace)
    )
    assert ran.returncode in (2, 125), ran
    assert "profile" in ran.stderr
    assert not (stand.workspace / "started").exists()
    assert stand.records()[mark:] == []


_WIDE = "  - id: wide\n    hosts: ['*.order-lab.com']\n"
_NARROW = "  - id: narrow\n    hosts: [x.order-lab.com]\n"
ORDERS = [
    pytest.param("allow:\n" + _WIDE + "deny:\n" + _NARROW, "x", "y", id="CFG-12 allow wide, deny narrow"),
    pytest.param("deny:\n" + _NARROW + "allow:\n" + _WIDE, "x", "y", id="CFG-12 deny narrow, allow wide"),
    pytest.param("allow:\n" + _NARROW + "deny:\n" + _WIDE, "x", None, id="CFG-12 allow narrow, deny wide"),
    pytest.param("deny:\n" + _WIDE + "allow:\n" + _NARROW, "x", None, id="CFG-12 deny wide, allow narrow"),
    pytest.param(
        "allow:\n" + _NARROW + "deny:\n" + _NARROW.replace("narrow", "same"),
        "x",
        None,
        id="CFG-12 both exactly",
    ),
]


@pytest.mark.parametrize(("entries", "denied", "allowed"), ORDERS)
def test_a_denial_wins_in_every_layer(live: Arena, entries: str, denied: str, allowed: str | None) -> None:
    """The same verdict for a look-up, a CONNECT, a hello's name and a Host, whatever the order of the file."""
    live.lab.set_name("*.order-lab.com", a=["11.0.0.20"])
    keep = "  - hosts: [api.lab-origin.com]\n"
    text = (
        entries.replace("allow:\n", "allow:\n" + keep) if "allow:" in entries else entries + "allow:\n" + keep
    )
    adopt(live, HEAD + text)
    code = (
        "def four(name):\n"
        " head = b'CONNECT %s:443 HTTP/1.1\\r\\n\\r\\n' % name.encode()\n"
        " return [dns(name), tls('', 443, get('/n', name), name, via=head), tls(name, 443, get('/n', name), name),"
        " proxy(b'GET http://%s/n HTTP/1.1\\r\\nHost: %s\\r\\n\\r\\n' % ((name.encode(),) * 2))]\n"
        "for what in four({0!r}):\n say(' '.join(shown(what).split())[:400])"
    )
    live.lab.forget()
    looked, connected, hello, host = live.a.run(code.format(f"{denied}.order-lab.com"), 20).splitlines()
    assert looked == "NOERROR 198.18.0.2"
    assert all("reason denied_by_rule" in said for said in (connected, hello, host)), (connected, hello, host)
    live.nothing_reached()
    if allowed is not None:
        looked, connected, hello, host = live.a.run(code.format(f"{allowed}.order-lab.com"), 20).splitlines()
        assert looked.startswith("NOERROR 198.18.1.")
        assert "200 OK" in connected
        assert "200 OK" in hello
        assert "reason scheme_not_allowed" in host
