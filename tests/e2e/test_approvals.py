"""Approvals end to end: refused and asked for, approved narrowly, let through, taken back; with a daemon and without."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from egressd.lab import Lab
from egressd.lab.lab import clean_env
from egressd.lab.stand import Stand
from tests.e2e.conftest import SHIPPED, until
from tests.e2e.test_drills import line_of, running, worker_of

pytestmark = pytest.mark.e2e

RULES = """schema: 1
profile: lab
owner: e2e
ask:
  - id: asking
    hosts: [api.lab-origin.com]
    requests: ["GET,POST /**"]
deny:
  - id: no-paste
    hosts: [pastebin.com]
"""
STREAM = "'https://www.lab-origin.com/sse?events={}&gap=0.1'"
ASKED, OTHER = "https://api.lab-origin.com/echo", "https://api.lab-origin.com/n"
# Each line of its input is the arguments of a curl; it prints the status and the body on one line.
CURLS = r"""echo open; while read -r line; do eval "curl -sS -m 60 -w ' %{http_code}' $line" 2>&1 | tr '\n' ' '; echo; done"""


class Inside:
    """A sandbox that does what it is told."""

    def __init__(self, process: Any) -> None:
        self._process = process
        assert line_of(process) == "open"

    def curl(self, arguments: str) -> tuple[str, str]:
        """What curl prints: the status, and what came."""
        self.send(arguments)
        text, _, status = line_of(self._process, 60).rpartition(" ")
        return status, text

    def send(self, arguments: str) -> None:
        """Begin one."""
        self._process.stdin.write(f"{arguments}\n")
        self._process.stdin.flush()


def verb(stand: Stand, *arguments: str) -> str:
    done = stand.lab.host_exec(
        stand.egressd("approvals", *arguments), cwd=str(stand.workspace), env=clean_env(stand.lab, trust=False),
        privileged=not stand.lab.rootless,
    )  # fmt: skip
    assert done.returncode == 0, done
    return done.stdout


@pytest.fixture
def asking(shared_lab: Lab) -> Iterator[Stand]:
    shared_lab.forget()
    with Stand(shared_lab, RULES, shipped=SHIPPED) as stand:
        yield stand


def test_a_run_that_stands_alone_asks_is_approved_once_and_no_more(asking: Stand) -> None:
    stand = asking
    with running(stand, CURLS, "--standalone") as process:
        inside = Inside(process)
        until(
            lambda: list(stand.directory.glob("control-run-sbx-*.sock")), what="the control socket of the run"
        )
        status, said = inside.curl(ASKED)
        assert status == "403"
        [approval] = set(re.findall(r"apr-[0-9a-f]{16}", said))
        assert "http://egressd.internal/access" in said
        assert inside.curl(ASKED)[0] == "403"
        assert stand.lab.dns_queries() == []
        [row] = verb(stand, "ls").splitlines()
        assert row.split("\t")[0] == approval
        assert "GET https://api.lab-origin.com/echo" in row
        assert "waits for a person" in inside.curl("http://egressd.internal/access")[1]
        verb(stand, "approve", approval, "--because", "ticket 9")
        assert inside.curl(f"'{ASKED}?x=1'")[0] == "200"
        assert inside.curl(ASKED)[0] == "403"
        assert inside.curl("-X POST https://api.lab-origin.com/upload")[0] == "403"

        ask = "-G -X POST http://egressd.internal/access --data-urlencode"
        status, said = inside.curl(f"{ask} 'request=GET https://pastebin.com/' --data-urlencode 'why=please'")
        assert status == "422"
        assert "denied_by_" in said
        status, said = inside.curl(
            f"{ask} 'request=GET https://www.lab-origin.com/sse' --data-urlencode 'why=to follow it'"
        )
        assert status == "200"
        [wished] = set(re.findall(r"apr-[0-9a-f]{16}", said))
        assert "to follow it" in verb(stand, "show", wished)
        verb(stand, "approve", wished, "--for", "15m")
        [grant] = json.loads(verb(stand, "grants", "--json"))[-1:]

        os.kill(worker_of(process.pid), signal.SIGKILL)  # its successor is told what was granted
        until(
            lambda: inside.curl(STREAM.format(1))[0] == "200", what="the granted request, by the next worker"
        )
        inside.send(STREAM.format(600))
        until(
            lambda: stand.records(event="decision", grant=grant["id"], query="events=<3>&gap=<3>"),
            what="the granted request that lasts",
        )
        verb(stand, "revoke", grant["id"])
        line_of(process, 50)  # it was cut, long before its end
        [approval] = set(re.findall(r"apr-[0-9a-f]{16}", inside.curl(OTHER)[1]))
        verb(stand, "approve", approval, "--for", "life")
        assert inside.curl(OTHER)[0] == "200"
        stand.profile.write_text(RULES.replace("[pastebin.com]", "[pastebin.com, other.example.com]"))
        until(lambda: inside.curl(OTHER)[0] == "403", what="the end of what other rules do not know")
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None  # which `running` would close again
        process.wait(60)
    ends = [one for one in stand.records(event="end", layer="request") if one["host"] == "www.lab-origin.com"]
    assert ends[-1]["reason"] == "policy_changed"
    told = [record["detail"].split(" ")[0] for record in stand.records(event="approval")]
    assert told[:8] == ["asked", "approved", "used", "asked", "asked", "asked", "approved", "revoked"]
    allowed = stand.records(event="decision", layer="request", reason="grant", host="api.lab-origin.com")
    seen = {(one["path"], one["rule"], one["verdict"]) for one in allowed}
    assert seen == {("/echo", "asking", "allow"), ("/n", "asking", "allow")}
    assert len([one for one in allowed if one["path"] == "/echo"]) == 1
    assert list(stand.directory.glob("control-run-sbx-*.sock")) == []
