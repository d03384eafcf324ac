"""CFG rows: rules that come half written, renamed, swapped or not at all while sandboxes live by them."""

from __future__ import annotations

import shutil
import threading
import time

import pytest

from egressd.lab.stand import Stand
from egressd.rulefiles.load import Rules, load_rules
from tests.bypass.arena import RULES, Arena
from tests.bypass.reload import ASK, adopt, in_force, policies

pytestmark = pytest.mark.e2e


def test_after_a_bad_file_the_next_good_one_is_taken(live: Arena) -> None:
    """CFG-01: and what the old rules denied stays denied meanwhile."""
    name = "x.wild-lab.com"
    mark = len(live.stand.records())
    live.stand.profile.write_text("schema: 1\nprofile: lab\nallow: [{hosts: [x.wild-lab.com]}, nonsense\n")
    policies(live.stand, mark)
    assert "(reason denied_by_rule)" in live.a.run(ASK.format(name))
    adopt(live, RULES.replace("wild-lab.com", "wilder-lab.com"))
    assert "(reason not_allowed)" in live.a.run(ASK.format(name))


@pytest.mark.parametrize("what", ["profile", "organisation.yaml", "folder"])
def test_what_is_deleted_keeps_its_last_word_and_may_come_back(live: Arena, what: str) -> None:
    """CFG-02: a file that is gone is no empty list; nothing is let through for it."""
    stand = live.stand
    path = {"profile": stand.profile, "folder": stand.rules}.get(what, stand.rules / what)
    digests, mark = in_force(stand), len(stand.records())
    path.rename(stand.directory / "away")
    assert all(record["detail"].startswith("refused: ") for record in policies(stand, mark))
    assert in_force(stand) == digests
    assert "(reason not_allowed)" in live.a.run(ASK.format("evil-lab.com"))
    live.life_goes_on()
    (stand.directory / "away").rename(path)
    adopt(live, RULES.replace("*.wild-lab.com", "*.wilder-lab.com"))


HALVES = [
    pytest.param("slowly", id="CFG-07 written slowly, whole after every pause"),
    pytest.param("rename", id="CFG-07 renamed over"),
    pytest.param("link", id="CFG-07 a link that is swapped"),
    pytest.param("mounted", id="CFG-07 the whole folder a link that is swapped"),
    pytest.param("copy", id="CFG-07 copied over"),
    pytest.param("folder", id="CFG-07 the folder renamed away and a new one in its place"),
]


@pytest.mark.parametrize("way", HALVES)
def test_a_change_is_taken_whole_however_it_comes(live: Arena, way: str) -> None:
    """Never a moment in which half of the file is in force: here the half without its denials, which reads well alone."""
    stand = live.stand
    wanted = RULES.replace("  - id: wild\n", "  - id: sinks\n    hosts: ['*.pastebin.com']\n  - id: wild\n")
    mark = len(stand.records())
    _change(stand, way, wanted)
    said = policies(stand, mark)
    assert [record["detail"] for record in said] == ["adopted"] * 2, said
    assert len({record["policy"] for record in said}) == 1
    assert "(reason denied_by" in live.a.run(ASK.format("x.pastebin.com")), "allowed by a half"
    for record in said:
        assert record["policy"] == _loaded(stand).effective("lab").digest(), "the record names the content"


def _loaded(stand: Stand) -> Rules:
    loaded = load_rules(stand.rules)
    assert isinstance(loaded, Rules)
    return loaded


def _change(stand: Stand, way: str, text: str) -> None:
    fresh = stand.directory / "fresh.yaml"
    if way == "slowly":
        whole = text.index("deny:")
        with stand.profile.open("w") as file:
            for part in (text[:whole], *(text[whole:].splitlines(keepends=True))):
                file.write(part)
                file.flush()
                time.sleep(0.1)
        return
    if way in ("folder", "mounted"):
        new = stand.directory / f"new-{way}"
        shutil.copytree(stand.rules, new)
        (new / "profiles" / "lab.yaml").write_text(text)
        if way == "mounted":
            stand.rules.rename(stand.directory / "old-mounted")
            (stand.directory / "next").symlink_to(new)
            (stand.directory / "next").rename(stand.rules)
        else:
            stand.rules.rename(stand.directory / "old-folder")
            new.rename(stand.rules)
        return
    fresh.write_text(text)
    if way == "rename":
        fresh.rename(stand.profile)
    elif way == "link":
        link = stand.directory / "link"
        link.symlink_to(fresh)
        link.rename(stand.profile)
    else:
        shutil.copyfile(fresh, stand.profile)


def test_both_layers_change_their_rules_at_once(live: Arena) -> None:
    """CFG-13: under load, every record names the policy it was judged by, and none an old one after a new one."""
    stand = live.stand
    live.lab.set_name("*.swap-lab.com", a=["11.0.0.20"])
    without = RULES.replace("  - id: wild\n", "  - id: swap\n    hosts: [other-lab.com]\n  - id: wild\n")
    with_it = RULES.replace("  - id: wild\n", "  - id: swap\n    hosts: ['*.swap-lab.com']\n  - id: wild\n")
    code = (
        "end = time.monotonic() + 4\n"
        "n = 0\n"
        "while time.monotonic() < end:\n"
        " n += 1; dns(f'n{n}.swap-lab.com'); tls(f'n{n}.swap-lab.com', 443, get('/n', f'n{n}.swap-lab.com'), "
        "f'n{n}.swap-lab.com')\n"
        "say(n)"
    )
    adopt(live, without)
    mark = len(stand.records())
    counted: list[str] = []
    loads = [
        threading.Thread(target=lambda d=driver: counted.append(d.run(code, 20)))
        for driver in (live.a, live.b)
    ]
    for load in loads:
        load.start()
    for text in (with_it, without, with_it):
        adopt(live, text)
        time.sleep(0.3)
    for load in loads:
        load.join()
    assert all(int(count) > 10 for count in counted)
    for sandbox in {record["sandbox"] for record in stand.records()[mark:] if record["event"] == "decision"}:
        own = [r for r in stand.records()[mark:] if r["sandbox"] == sandbox]
        judged = [r for r in own if r["event"] == "decision"]
        assert all(r["policy"] for r in judged)
        order = [
            r["policy"] for n, r in enumerate(judged) if n == 0 or r["policy"] != judged[n - 1]["policy"]
        ]
        assert len(order) == 4, f"the policies of {sandbox} alternate: {order}"
        verdicts = {
            (r["policy"], r["verdict"]) for r in judged if str(r.get("host", "")).endswith("swap-lab.com")
        }
        allowing = {policy for policy, verdict in verdicts if verdict == "allow"}
        denying = {policy for policy, verdict in verdicts if verdict == "deny"}
        assert len(allowing) == 1
        # a name that was denied leads to 198.18.0.2 a moment longer than its denial: it must be looked up again
        # (what the request in a refused connection is told is what the connection was)
        late = {
            r["reason"]
            for r in judged
            if r["policy"] in allowing and r["verdict"] == "deny" and r["layer"] == "connection"
        }
        assert late <= {"synthetic_unmapped"}, late
        assert len(denying - allowing) == 1
