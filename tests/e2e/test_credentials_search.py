"""A search for every secret, in every form, over all that a sandbox can see and all that egressd leaves behind: none is found.

The same search finds one that is planted.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from egressd.lab import Lab
from egressd.lab.stand import HERE, Stand
from tests.e2e.conftest import SHIPPED
from tests.e2e.keyring import (
    BEARER,
    Holding,
    Inside,
    answers,
    credentials,
    fresh,
    needles,
    profile,
    search,
    set_guards,
)
from tests.e2e.test_credentials import (
    BY_NAME,
    HOLDINGS,
    SHAPES,
    VARIABLE,
    WAYS,
    set_secrets,
)

pytestmark = pytest.mark.e2e

NOISY = Holding(
    "noisy",
    "{bearer: true}",
    BEARER,
    source=f"{{exec: {{command: [/bin/sh, -c, 'cat {HERE}/secrets/noisy >&2; cat {HERE}/secrets/noisy; exit 1']}}}}",
)
BROKEN = Holding("broken", "{bearer: true}", BEARER, secret=fresh() + "\r\nX-Injected: 1")
INSIDE = Holding("inside", "{bearer: true}", BEARER, source=f"{{file: {HERE}/workspace/key.txt}}")
ALL = (*HOLDINGS, NOISY, BROKEN, INSIDE)
SEEN_FOLDERS = "/tmp /run /home /root /etc /dev/shm /var/tmp /var/log"


@pytest.fixture(scope="module")
def used(shared_lab: Lab) -> Iterator[tuple[Stand, Inside]]:
    """A sandbox that has called everything in every way, and what egressd keeps."""
    set_guards(shared_lab, ALL, ("h2", "http/1.1"))
    with Stand(shared_lab, profile(ALL), shipped=SHIPPED, credentials=credentials(ALL)) as stand:
        set_secrets(stand)
        for holding in (NOISY, BROKEN):
            stand.secret(holding.name, holding.secret)
        key = stand.workspace / "key.txt"
        key.write_text(INSIDE.secret)
        key.chmod(0o600)
        with Inside(stand, env={VARIABLE: BY_NAME["bearer"].secret}) as inside:
            for holding in ALL:
                inside.run(f'curl -gsSiv -m 15 {holding.ask} "{holding.url}"')
            for holding in WAYS:
                urls = [
                    holding.url.replace("/echo", f"/mirror?as={shape}&").replace("&?", "&")
                    for shape in SHAPES
                ]
                assert len(answers(inside, urls, holding.ask)) == len(SHAPES)
            yield stand, inside


def found_in_the_sandbox(inside: Inside, stand: Stand) -> dict[str, bytes]:
    """What a thief in the sandbox would take: environments, command lines, every file that is not the system's own."""
    ran = inside.run("cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline; env; set")
    files = inside.run(f"tar -cf - --ignore-failed-read {stand.workspace} {SEEN_FOLDERS} 2>/dev/null")
    assert len(files.stdout) > 20_000
    return {
        "processes": (ran.stdout + ran.stderr).encode("latin-1"),
        "files": files.stdout.encode("latin-1"),
    }


def left_by_egressd(inside: Inside, stand: Stand) -> dict[str, bytes]:
    """What egressd wrote and said, and what its processes show of themselves."""
    places = {
        str(path): path.read_bytes()
        for path in stand.directory.rglob("*")
        if path.is_file() and path.parent.name != "secrets" and path != stand.workspace / "key.txt"
    }
    assert any(path.endswith("journal.jsonl") for path in places)
    places["standard error"] = inside.errors().encode()
    pids = [inside.process.pid, *descendants(inside.process.pid)]
    assert len(pids) >= 3
    for pid in pids:
        for name in ("environ", "cmdline"):
            with contextlib.suppress(OSError):
                places[f"/proc/{pid}/{name}"] = Path(f"/proc/{pid}/{name}").read_bytes()
    return places


def descendants(pid: int) -> list[int]:
    """Every process below one."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


SECRETS = needles([holding.secret.partition("\r")[0] for holding in ALL])


def test_a_sandbox_has_nothing_to_steal(used: tuple[Stand, Inside]) -> None:
    stand, inside = used
    assert search(found_in_the_sandbox(inside, stand), SECRETS) == []


def test_no_answer_held_one(used: tuple[Stand, Inside]) -> None:
    _, inside = used
    heard = "\n".join(inside.heard)
    assert heard.count("HTTP/") > len(WAYS) * len(SHAPES)
    assert search({"answers": heard.encode("latin-1", "replace")}, SECRETS) == []


def test_egressd_leaves_none_behind(used: tuple[Stand, Inside]) -> None:
    stand, inside = used
    assert search(left_by_egressd(inside, stand), SECRETS) == []


def test_a_source_file_in_the_workspace_is_hidden(used: tuple[Stand, Inside], shared_lab: Lab) -> None:
    stand, inside = used
    ran = inside.run(f"cat {stand.workspace}/key.txt; cat key.txt; cp key.txt taken; cat taken")
    assert INSIDE.secret not in ran.stdout
    assert {seen.status for seen in shared_lab.requests(host=INSIDE.at)} == {200}, "and it is in use"


def test_a_secret_that_would_end_a_header_is_none(used: tuple[Stand, Inside], shared_lab: Lab) -> None:
    assert shared_lab.requests(host=BROKEN.at) == []
    assert shared_lab.requests(host=NOISY.at) == []
    assert all("x-injected" not in str(seen.headers) for seen in shared_lab.requests())


FORMS: dict[str, Callable[[str], str]] = {
    "as it is": lambda secret: secret,
    "in base64": lambda secret: base64.b64encode(secret.encode()).decode(),
    "as a password": lambda secret: base64.b64encode(f"x-access-token:{secret}".encode()).decode(),
    "in the midst of base64": lambda secret: base64.b64encode(f"xx{secret}yy".encode()).decode(),
    "in a URL": lambda secret: (
        secret.replace("+", "%2B").replace("/", "%2F").replace("&", "%26").replace("=", "%3D")
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_search_finds_what_is_planted(used: tuple[Stand, Inside], form: str) -> None:
    stand, inside = used
    planted = FORMS[form](BY_NAME["header"].secret)
    inside.run(f"printf %s '{planted}' > planted; A='{planted}' sleep 9 > /dev/null 2>&1 &")
    (stand.directory / "planted.log").write_text(f"noise {planted} noise")
    try:
        hits = {hit.partition(":")[0] for hit in search(found_in_the_sandbox(inside, stand), SECRETS)}
        assert hits == {"files", "processes"}
        assert search(left_by_egressd(inside, stand), SECRETS)
    finally:
        inside.run("rm planted")
        (stand.directory / "planted.log").unlink()
        inside.heard.clear()
