"""`egressd verify` under each wiring: clean where all is in place, open where a part is broken on purpose."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import pytest

from egressd.cli.verify_ground import Options
from egressd.cli.verify_run import Verification
from egressd.cli.verify_table import VerifyTable
from egressd.cli.verify_wirings import names_of
from egressd.control.config import load_config
from tests.e2e import test_verify
from tests.e2e.test_verify import ROOT, Installation, verdicts
from tests.e2e.wired import CONTAINER

pytestmark = [pytest.mark.e2e, pytest.mark.root]
roots, shared = test_verify.roots, test_verify.shared

BLIND = (sys.executable, "-P", str(ROOT / "tests/verify/mutated.py"), "blind")


def document(made: Installation, wiring: str, **options: Any) -> dict[str, Any]:
    config = load_config({}, {"HOME": str(made.home)}, file=made.config)
    return Verification(config, Options("lab", wiring=wiring, **options), VerifyTable(silent=True)).run()


def runc(*options: str, network: bool = True) -> tuple[str, ...]:
    """What runs a command in a container of runc's."""
    joined = ["--network={network}"] if network else []
    binds = ["--bind={public}:ro", "--resolver=198.18.0.1", "--state={public}/../runc"]
    return ("/usr/bin/python3", str(CONTAINER), *binds, *joined, *options, "{name}", "--")


@pytest.mark.parametrize(
    ("wiring", "container"),
    [
        pytest.param("attached", runc(), id="attached to a container of runc's"),
        pytest.param("gateway", runc(), id="gateway, with a container of runc's"),
        pytest.param("sidecar", runc(network=False), id="sidecar, with a container of runc's"),
        pytest.param("explicit", (), id="explicit"),
    ],
)
def test_everything_holds(roots: Installation, wiring: str, container: tuple[str, ...]) -> None:
    found = document(roots, wiring, container=container if shutil.which("runc") else ())
    assert (found["status"], verdicts(found, "open"), verdicts(found, "not tried")) == (0, {}, {})
    assert [row["name"] for row in found["probes"]] == names_of(wiring)
    assert found["left"] == {"packets": [], "questions": [], "requests": [], "lost": 0}


def commands(*lines: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(line.split()) for line in lines)


INSIDE = "nsenter --net=/proc/{holder}/ns/net -- "
BROKEN: list[tuple[str, str, tuple[tuple[str, ...], ...], set[str]]] = [
    ("attached, without rules", "attached", commands(
        *(f"{INSIDE}{tool} {words}" for tool in ("iptables", "ip6tables") for words in ("-P OUTPUT ACCEPT", "-F", "-t nat -F")),
    ), {"wiring-rules", "udp"}),
    ("gateway, forwarding and without rules", "gateway", commands(
        "sysctl -qw net.ipv4.ip_forward=1", "iptables -t nat -F EGRESSD-vfy0", "iptables -F EGRESSD-F-vfy0",
        "iptables -t nat -A POSTROUTING -s 10.90.77.0/24 -j MASQUERADE",
    ), {"wiring-rules", "direct-tcp", "nothing-left"}),
    ("explicit, with a route", "explicit", commands(
        f"{INSIDE}ip route add default via 10.90.77.1", "sysctl -qw net.ipv4.ip_forward=1",
        "iptables -t nat -A POSTROUTING -s 10.90.77.0/24 -j MASQUERADE",
    ), {"routes", "direct-tcp", "udp", "nothing-left"}),
    ("sidecar, without the redirection", "sidecar", commands(
        "iptables -t nat -D EGRESSD -p tcp -j REDIRECT --to-ports 15001",
    ), {"wiring-rules"}),
    ("sidecar, without the filter", "sidecar", commands("iptables -D OUTPUT -j EGRESSD"), {"udp", "nothing-left"}),
]  # fmt: skip
TRIED = frozenset({"wiring-rules", "direct-tcp", "udp", "routes"})


@pytest.mark.parametrize(
    ("wiring", "harm", "expected"), [pytest.param(*row[1:], id=row[0]) for row in BROKEN]
)
def test_what_is_broken_shows_as_open(
    roots: Installation,
    wiring: str,
    harm: tuple[tuple[str, ...], ...],
    expected: set[str],
) -> None:
    stand = BLIND if wiring == "gateway" else Options("lab").stand
    found = document(roots, wiring, harm=harm, only=TRIED, stand=stand)
    assert found["status"] == 1
    assert expected <= verdicts(found, "open").keys(), found["probes"]


@pytest.mark.skipif(shutil.which("runc") is None, reason="runc is not installed")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param(
            ["--uid=0", *(f"--capability=CAP_{power}" for power in ("NET_RAW", "NET_ADMIN", "SETUID"))],
            {"capabilities", "raw-sockets", "packet-sockets", "other-ids", "packet-rules", "network-administration"},
            id="capabilities",
        ),
        pytest.param(["--uid=1337"], {"direct-tcp", "nothing-left"}, id="egressd's uid"),
    ],
)  # fmt: skip
def test_a_sidecar_s_container_that_was_given_too_much_shows_as_open(
    roots: Installation,
    options: list[str],
    expected: set[str],
) -> None:
    found = document(
        roots,
        "sidecar",
        container=runc(*options, network=False),
        only=frozenset(expected),
        stand=Options("lab").stand,
    )
    assert expected <= verdicts(found, "open").keys(), found["probes"]


def test_what_only_run_knows_and_what_is_no_wiring_is_refused(roots: Installation) -> None:
    for arguments, said in (
        (["--wiring", "bridge"], "there is no wiring 'bridge'\nhint: one of namespace, attached"),
        (["--wiring", "gateway", "--bind", "/tmp"], "are for the wiring namespace alone"),
    ):
        ran = roots.run(*arguments)
        assert (ran.returncode, said in ran.stderr) == (2, True), ran.stderr
