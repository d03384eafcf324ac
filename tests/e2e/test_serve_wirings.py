"""`egressd serve` with the gateway and the sidecar wiring: made, watched over and ended by the command line."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator

import pytest

from egressd.lab import Lab
from egressd.lab.stand import Stand
from egressd.wiring import gateway_rules
from egressd.wiring.ruleset import Counted
from tests.e2e.conftest import RULES, SHIPPED, build, until
from tests.e2e.wired import API, BEHIND, BRIDGE, GATEWAY, Bridge, Pod, Served, bridge, counted, left, pod

pytestmark = [pytest.mark.e2e, pytest.mark.root]

ATTACKER = "11.6.6.6"
DENIED = "curl -sS -m 20 https://evil-lab.com/"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with build(rootless=False) as lab:
        yield lab


def flush(made: Bridge | Pod, *rules: str) -> None:
    for rule in rules:
        assert made.lab.run("host", rule.split()).returncode == 0, rule


def _accounts(stand: Stand, seen: dict[str, str], kernels: Counted) -> bool:
    """Whether records account for what the kernel counted, no less and no more."""
    records = stand.records()
    dns = {
        channel: counted(records, layer="dns", channel=channel, **seen) for channel in ("dns-tcp", "dns-udp")
    }
    return kernels == Counted(
        counted(records, layer="connection", **seen),
        dns["dns-tcp"],
        dns["dns-udp"],
        counted(records, layer="packet", **seen),
    )


def test_a_gateway_s_life(lab: Lab) -> None:
    more = f"gateway: {{interfaces: [{BRIDGE}]}}\n"
    with Stand(lab, RULES, shipped=SHIPPED, more=more) as stand, bridge(lab, stand, real=True) as made:
        served, a, b = made.daemon, made.sandboxes["a"], made.sandboxes["b"]
        assert isinstance(served, Served)
        for sandbox in (a, b):
            done = sandbox.run(f"curl -sS -m 20 {API}; {DENIED}")
            assert done.stdout[:1].isdigit(), done.stderr
            assert "(reason not_allowed)" in done.stdout
        assert "is bound already" in served.ask(f"create c {a.address} {b.mac} {b.port}")

        flush(made, f"iptables -t raw -F EGRESSD-{BRIDGE}", f"iptables -t nat -F EGRESSD-{BRIDGE}")
        until(lambda: made.wire("--check").returncode == 0, what="what was flushed is back")
        until(lambda: "wiring gateway: not in place" in served.log.read_text(), what=served.log.read_text())
        until(lambda: stand.records(event="sandbox", detail="wiring gateway: in place again"))
        until(served.ready, what="it is ready again")
        assert a.run(f"curl -sS -m 20 {API}").stdout.isdigit()

        # What the kernel counts is what is written, for each; what it counted and nobody wrote is told.
        a.inside("not_tcp")
        for name, sandbox in (("a", a), ("b", b)):
            seen = {"sandbox": made.ids[name]}
            counts = gateway_rules.counted(
                sandbox.address, BRIDGE, lab.run("host", ["iptables-save", "-c"]).stdout
            )
            assert counts is not None
            assert counts.packets == (7 if sandbox is a else 0)
            until(functools.partial(_accounts, stand, seen, counts), what=f"records of {counts}")
        flush(made, f"iptables -t mangle -R EGRESSD-SRC-{BRIDGE} 2 -s {b.address} -c 5 500")
        assert made.ids["b"] in served.ask("revoke b")
        (lost,) = stand.records(event="lost", sandbox=made.ids["b"])
        assert (lost["layer"], lost["count"]) == ("packet", 5)
        made.ids["b"] = b.create()

        old = made.ids["a"]
        assert old in served.ask("revoke a")
        assert stand.records(event="lost", sandbox=old) == []
        assert a.address not in "".join(rule for rule in made.rules() if "EGRESSD" in rule)
        assert a.run(f"curl -sS -m 3 {API}").returncode != 0
        until(lambda: counted(stand.records(), reason="unknown_sandbox", source=a.address) > 0)
        assert b.run(f"curl -sS -m 20 {API}").stdout.isdigit()
        assert a.create() != old
        assert a.run(f"curl -sS -m 20 {API}").stdout.isdigit()

        # As an operator does it, by the script that does it all.
        egressd = f"{sys.executable} -P -m egressd --config {stand.config}"
        told = made.containers.environment | {"EGRESSD": egressd, "EGRESSD_PROFILE": "lab"}
        argv = [
            str(BEHIND),
            BRIDGE,
            "10.90.0.8/24",
            GATEWAY,
            f"--state={made.containers.state}",
            "by-script",
            "--",
        ]
        done = lab.run(
            "host", [*argv, "sh", "-c", f"curl -sS -m 20 {API}; {DENIED}; exit 7"], env=told, cwd="/"
        )
        assert done.stdout[:1].isdigit(), done.stderr
        assert "(reason not_allowed)" in done.stdout
        assert done.returncode == 7
        assert "10.90.0.8" not in str(made.rules())

        served.process.kill()
        served.process.wait()
        assert a.run(f"curl -sS -m 3 http://{ATTACKER}/").returncode != 0
        made.start()
        assert a.run(f"curl -sS -m 3 {API}").returncode != 0
        assert isinstance(a.create(), str)
        assert a.run(f"curl -sS -m 20 {API}").stdout.isdigit()
        assert left(lab, ATTACKER) == []


def test_a_sidecar_s_life(lab: Lab) -> None:
    lab.forget()
    with Stand(lab, RULES, shipped=SHIPPED) as stand, pod(lab, stand, real=True) as made:
        served = made.daemon
        assert isinstance(served, Served)
        done = made.run(f"curl -sS -m 20 {API}; {DENIED}")
        assert done.stdout[:1].isdigit(), done.stderr
        assert "(reason not_allowed)" in done.stdout
        assert "a sidecar has one sandbox" in served.ask("create b")

        flush(made, "iptables -D OUTPUT -j EGRESSD")
        until(lambda: not served.ready(), what="it is no longer ready")
        until(lambda: "wiring sidecar: not in place" in served.log.read_text(), what="it says why")
        assert made.wire().returncode == 0
        until(served.ready)

        old = made.sandbox
        assert old in served.ask("revoke a")
        assert made.run(f"curl -sS -m 3 {API}").returncode != 0
        assert left(lab, ATTACKER) == []
        assert served.ask("create a") != old
        assert made.run(f"curl -sS -m 20 {API}").stdout.isdigit()
        # Nothing of the daemon's is to be had from the sandbox: its port tells whether it is ready, and nothing else.
        told = made.run(
            "for path in healthz readyz metrics v1/sandboxes; do curl -sS -m 3 http://127.0.0.1:15021/$path; done"
        )
        assert told.stdout == "ok\nok\nno\nno\n"
