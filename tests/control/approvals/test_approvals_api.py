"""Approvals over the control socket: what is asked for is listed, approved, granted, taken back; and the CLI that does it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from egressd.cli.main import app
from egressd.control import peers
from egressd.control.api_server import ApiServer
from egressd.control.approvals.window import place_of
from egressd.control.estate import StateError
from tests.control.household import House

ME = f"uid {os.geteuid()} pid {os.getpid()}"


class Desk:
    """A house whose API is served, with one sandbox."""

    def __init__(self, house: House, path: Path) -> None:
        self.house, self.path = house, path
        self.sandbox = ""

    async def ask(self, method: str, path: str, body: Any = None, **fields: str) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self.path))) as session,
            session.request(method, f"http://egressd{path}", json=body, headers=fields) as response,
        ):
            return response.status, await response.json()

    async def cli(self, *arguments: str) -> tuple[int, str, str]:
        environ = {"EGRESSD_CONTROL_SOCKET": str(self.path)}
        result = await asyncio.to_thread(CliRunner().invoke, app, ["approvals", *arguments], env=environ)
        return result.exit_code, result.stdout, result.stderr


def play(folder: Path, scene: Callable[[Desk], Awaitable[None]], *, alone: bool = False) -> None:
    async def run() -> None:
        house = House(folder)
        control = folder / "run" / "control.sock"
        path = place_of(control, "sbx-0") if alone else control
        server = ApiServer()
        sock = peers.listen(path, socket.SOCK_STREAM)
        if alone:
            await server.start_alone(house.approvals, sock)
        else:
            await server.start_unix(house, sock)
        desk = Desk(house, control)
        try:
            from egressd.control.roster import Wanted

            desk.sandbox = (await house.roster.create(Wanted("lab", "explicit"))).id
            await scene(desk)
        finally:
            await server.stop()
            await house.roster.end_all("drained")
            house.estate.close()

    asyncio.run(run())


def test_from_the_question_to_its_end(tmp_path: Path) -> None:
    async def scene(desk: Desk) -> None:
        wanted = {"sandbox": desk.sandbox, "request": "GET https://new.example.com/page/4711"}
        status, made = await desk.ask("POST", "/v1/approvals", wanted)
        assert (status, made["state"], made["verdict"], made["reason"]) == (
            201,
            "waiting",
            "deny",
            "not_allowed",
        )
        assert [option["scope"] for option in made["options"]] == ["request", "template", "host"]
        place = f"/v1/approvals/{made['id']}"
        assert (await desk.ask("GET", place))[1] == made
        status, listed = await desk.ask("GET", "/v1/approvals")
        assert (listed["waiting"], listed["approvals"]) == (1, [made])
        body = {"scope": "request", "length": "15m", "policy": made["policy"], "because": "ticket 9"}
        assert (await desk.ask("POST", f"{place}/approve", body | {"policy": "0" * 16}))[0] == 409
        assert (await desk.ask("POST", f"{place}/approve", body | {"scope": "all"}))[0] == 400
        status, approved = await desk.ask("POST", f"{place}/approve", body)
        assert (status, approved["state"], approved["by"]) == (200, "approved", ME)
        assert (await desk.ask("POST", f"{place}/approve", body))[0] == 409
        [grant] = (await desk.ask("GET", "/v1/grants"))[1]["grants"]
        assert (grant["id"], grant["state"], grant["because"]) == (approved["grant"], "live", "ticket 9")
        assert desk.house.carrier.carried[desk.sandbox].standing.grants[0].id == grant["id"]
        assert (await desk.ask("DELETE", f"/v1/grants/{grant['id']}"))[1]["state"] == "revoked"
        assert (await desk.ask("DELETE", f"/v1/grants/{grant['id']}"))[0] == 409
        assert desk.house.carrier.carried[desk.sandbox].standing.grants == ()
        details = [
            record["detail"].split(" ")[0]
            for record in desk.house.carrier.records
            if record["event"] == "approval"
        ]
        assert details == ["asked", "approved", "revoked"]

    play(tmp_path, scene)


def test_a_full_journal_grants_nothing(tmp_path: Path) -> None:
    async def scene(desk: Desk) -> None:
        made = (
            await desk.ask(
                "POST", "/v1/approvals", {"sandbox": desk.sandbox, "request": "GET https://a.example.com/"}
            )
        )[1]
        desk.house.carrier.full = True
        body = {"scope": "request", "length": "once", "policy": made["policy"]}
        status, problem = await desk.ask("POST", f"/v1/approvals/{made['id']}/approve", body)
        assert (status, problem["error"]) == (503, "could_not_run")
        assert (await desk.ask("GET", "/v1/grants"))[1]["grants"] == []

    play(tmp_path, scene)


def test_a_token_of_nobodys_is_no_approver(tmp_path: Path) -> None:
    async def scene(desk: Desk) -> None:
        made = (
            await desk.ask(
                "POST", "/v1/approvals", {"sandbox": desk.sandbox, "request": "GET https://a.example.com/"}
            )
        )[1]
        body = {"scope": "request", "length": "once", "policy": made["policy"]}
        fields = {"x-egressd-approver-token": "guess"}
        status, problem = await desk.ask("POST", f"/v1/approvals/{made['id']}/approve", body, **fields)
        assert (status, problem["error"]) == (403, "forbidden")

    play(tmp_path, scene)


@pytest.mark.parametrize(
    "path", ["/v1/approvals/apr-0000000000000000", "/v1/approvals/apr-0000000000000000/proposal?scope=host"]
)
def test_what_is_not_there_is_not_found(tmp_path: Path, path: str) -> None:
    async def scene(desk: Desk) -> None:
        assert (await desk.ask("GET", path))[0] == 404
        assert (await desk.ask("GET", "/v1/approvals?state=some"))[0] == 400
        status, problem = await desk.ask(
            "POST", "/v1/approvals", {"sandbox": desk.sandbox, "request": "GET http://169.254.169.254/"}
        )
        assert (status, problem["error"]) == (409, "conflict")

    play(tmp_path, scene)


@pytest.mark.parametrize("alone", [False, True], ids=["a daemon", "a run that stands alone"])
def test_the_verbs(tmp_path: Path, *, alone: bool) -> None:
    async def scene(desk: Desk) -> None:
        item = await desk.house.approvals.ask(
            desk.sandbox, "POST https://new.example.com/page/4711", _caller()
        )
        item.words = "please\x1b[2J\nAPPROVED"
        code, out, _ = await desk.cli("ls")
        assert (code, out.split("\t")[0], out.count("\n")) == (0, item.id, 1)
        code, out, _ = await desk.cli("show", item.id)
        assert code == 0
        assert "may be false" in out
        assert "\x1b" not in out
        assert "\nAPPROVED" not in out
        assert (
            f"egressd approvals approve {item.id} --scope request --for once --policy {item.case.policy}"
            in out
        )
        code, out, _ = await desk.cli("propose", item.id, "--scope", "template")
        assert code == 0
        assert out.startswith("--- a/profiles/lab.yaml")
        code, out, err = await desk.cli("approve", item.id, "--policy", "0" * 16)
        assert (code, out) == (1, "")
        assert "rules have changed" in err
        code, out, _ = await desk.cli("approve", item.id, "--because", "ticket 9")
        assert code == 0
        code, out, _ = await desk.cli("grants", "--json")
        [grant] = json.loads(out)
        assert (grant["length"], grant["scope"], grant["because"]) == ("once", "request", "ticket 9")
        assert (await desk.cli("revoke", grant["id"]))[0] == 0
        assert (await desk.cli("revoke", grant["id"]))[0] == 1
        assert (await desk.cli("grants"))[1] == ""
        code, out, _ = await desk.cli("ask", desk.sandbox, "GET https://other.example.com/")
        asked = out.split(" ")[0]
        assert (await desk.cli("deny", asked))[1] == f"{asked}\tdenied\n"
        assert (await desk.cli("ask", desk.sandbox, "GET https://localhost/"))[0] == 1

    play(tmp_path, scene, alone=alone)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("show", "../../etc"), 2),
        (("approve", "apr-zz"), 2),
        (("revoke", "gnt-1"), 2),
        (("ask", "sbx-1", "GET https://a.example.com/"), 2),
        (("show", "apr-0000000000000000"), 1),
        (("revoke", "gnt-0000000000000000"), 1),
    ],
)
def test_what_is_no_id_is_not_asked_for(tmp_path: Path, arguments: tuple[str, ...], status: int) -> None:
    async def scene(desk: Desk) -> None:
        assert (await desk.cli(*arguments))[0] == status

    play(tmp_path, scene)


def test_where_nobody_listens_nothing_can_be_asked(tmp_path: Path) -> None:
    environ = {"EGRESSD_CONTROL_SOCKET": str(tmp_path / "run/control.sock")}
    result = CliRunner().invoke(app, ["approvals", "ls"], env=environ)
    assert (result.exit_code, result.stdout) == (3, "")


def test_a_run_without_a_place_for_its_socket_says_so_where_rules_ask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from egressd.control.approvals.office import Office
    from egressd.control.approvals.window import serve_alone
    from egressd.control.config import load_config

    (tmp_path / "run").write_text("a file")
    config = load_config(
        {}, {"HOME": str(tmp_path), "EGRESSD_CONTROL_SOCKET": str(tmp_path / "run/control.sock")}
    )
    for asks, said in ((True, "nobody can approve"), (False, "")):
        asyncio.run(serve_alone(config, "sbx-00000000000000000001", Office(), asks=asks))
        err = capsys.readouterr().err
        assert (said in err) if said else err == ""
    with pytest.raises(StateError):
        peers.listen(tmp_path / "run/control.sock", socket.SOCK_STREAM)


def _caller() -> Any:
    from egressd.control.approvals.people import Caller

    return Caller("uid 0 pid 1", uid=0)
