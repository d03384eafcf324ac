"""NAME rows: how host names are parsed and matched.

The parsers are the same code in every wiring and for every user, so one arena is enough (`once`).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from egressd.lab import topology
from tests.bypass.arena import Arena, Outcome, Row
from tests.bypass.script import CRAFTED, each, refusals, refused, tries

pytestmark = pytest.mark.e2e

API, EVIL = "api.lab-origin.com", {"a": [topology.ATTACKER]}
LONG = ".".join(["a" * 49] * 5)  # 249 characters, so that a label more makes 254
NO_WIN = "no resolver takes such a name: the row is about who fails closed"
ALLOWED = "the rules allow it: the row is about who would break it"
LEGAL_ODD = ("_x.wild-lab.com", "-a.wild-lab.com", "my_bucket.wild-lab.com", "9.wild-lab.com")


def asked_in_normal_form(outcome: Outcome) -> None:
    """What went upstream spells the name without its dot and in lower case."""
    seen = outcome.lab.requests(host=API)
    assert seen
    assert {(request.header("host"), request.sni) for request in seen} == {(API, API)}


def no_password_was_written(outcome: Outcome) -> None:
    assert "hunter2" not in str(outcome.records)


def every_layer_agrees(outcome: Outcome) -> None:
    """DNS, the two kinds of connection and their requests came to one verdict on one name."""
    decided = [record for record in outcome.records if record["event"] == "decision"]
    assert {(record["layer"], record.get("channel")) for record in decided} == {
        ("dns", "dns-udp"),
        ("connection", "transparent"),
        ("connection", "connect"),
        ("request", "transparent"),
        ("request", "connect"),
    }
    assert len({(record["verdict"], record["reason"], record.get("rule")) for record in decided}) == 1


EVERY_LAYER = "say(dns(it)); say(line(tls(it, 443, get(host=it), it))); say(line(connect(it + ':443', get(host=it), it)))\n"

ROWS = [
    Row(
        "NAME-01",
        tries("connect(it + ':443', get(host=it), it)", "evil-lab.com.", "x.wild-lab.com."),
        title="denied names with a dot behind, to the proxy",
        wins=each("200 OK", 2),
        sees=refused("not_allowed") + r".*\n" + refused("denied_by_rule"),
        records=(
            ("connection", "deny", "not_allowed"),
            ("request", "deny", "not_allowed"),
            ("connection", "deny", "denied_by_rule"),
            ("request", "deny", "denied_by_rule"),
        ),
        rule="never-x",
        shows={"host": "evil-lab.com", "host_raw": "evil-lab.com."},
        decisions=4,
    ),
    Row(
        "NAME-01",
        tries("tls(it, 443, get(host=it), it)", "evil-lab.com."),
        title="the dot in SNI and Host",
        wins="owned",
        sees=refused("not_allowed"),
        records=(("dns", "deny", "not_allowed"), ("connection", "deny", "not_allowed")),
        shows={"host": "evil-lab.com", "sni": "evil-lab.com."},
        decisions=4,
    ),
    Row(
        "NAME-01",
        tries("tls(it, 443, get(host=it), it)", API + ".")
        + tries("connect(it + ':443', get(host=it), it)", API + "."),
        title="an allowed name with a dot",
        moot=ALLOWED,
        sees=each("200 OK", 2),
        records=(("connection", "allow", "rule"), ("request", "allow", "rule")),
        rule="api",
        reaches=(API,),
        also=asked_in_normal_form,
    ),
    Row(
        "NAME-01",
        tries("connect(it + ':443')", "evil-lab.com..", API + ".."),
        title="two dots, to the proxy",
        moot=NO_WIN,
        sees=each(refused("bad_host"), 2),
        records=(("connection", "deny", "bad_host"),),
        shows={"host_raw": "evil-lab.com..:443"},
        decisions=2,
    ),
    Row(
        "NAME-01",
        CRAFTED + "say(raw_alert(tcp('evil-lab.com', 443, crafted('evil-lab.com..'), read=7)))",
        title="two dots, in SNI",
        wins="ServerHello",
        sees="alert unrecognized_name",
        records=(("connection", "deny", "bad_host"),),
        shows={"sni": "evil-lab.com.."},
    ),
    Row(
        "NAME-02",
        tries("connect(it)", "[evil-lab.com]:443") + tries("absolute(it)", "http://[evil-lab.com]/"),
        title="brackets round a name",
        wins=each("owned", 2),
        sees=each(refused("bad_host"), 2),
        records=(("connection", "deny", "bad_host"),),
        shows={"host_raw": "[evil-lab.com]:443"},
        decisions=2,
    ),
    Row(
        "NAME-02",
        tries(f"tls({API!r}, 443, get(host=it), {API!r})", f"[{API}]"),
        title="brackets in Host",
        wins="200 OK",
        sees=refused("bad_host"),
        records=(("request", "deny", "bad_host"),),
        shows={"host_raw": f"[{API}]"},
    ),
    Row(
        "NAME-03",
        tries("connect(it + ':443', get(host='Api.Lab-Origin.com'), 'aPi.laB-origin.com')", API.upper()),
        title="an allowed name in capitals",
        moot=ALLOWED,
        sees="200 OK",
        records=(("connection", "allow", "rule"), ("request", "allow", "rule")),
        reaches=(API,),
        also=asked_in_normal_form,
    ),
    Row(
        "NAME-03",
        tries("connect(it + ':443', get(host=it), it)", "X.WILD-LAB.COM", "x.Wild-Lab.com"),
        title="a denied name in capitals",
        wins=each("200 OK", 2),
        sees=each(refused("denied_by_rule"), 2),
        records=(("connection", "deny", "denied_by_rule"), ("request", "deny", "denied_by_rule")),
        rule="never-x",
        decisions=4,
    ),
    Row(
        "NAME-03",
        tries("connect((it + ':443').encode())", "\u212aernel.wild-lab.com", "pa\u017ftebin.com"),
        title="letters that fold into ASCII, to the proxy",
        wins=each("200 OK", 2),
        sees=each(refused("non_ascii_host"), 2),
        records=(("connection", "deny", "non_ascii_host"),),
        shows={"host_raw": "\u212aernel.wild-lab.com:443"},
        decisions=2,
    ),
    Row(
        "NAME-03",
        f"{CRAFTED}name = '\u212aernel.wild-lab.com'.encode()\n"
        "say(dns(b'\\x08' + name[:8] + b'\\x08wild-lab\\x03com\\0'))\n"
        "say(raw_alert(tcp('a.wild-lab.com', 443, crafted(name), read=7)))\n"
        "say(line(tls('a.wild-lab.com', 443, get(host=name.decode('latin-1')), 'a.wild-lab.com')))",
        title="letters that fold into ASCII, in DNS, SNI and Host",
        wins=r"NOERROR 11\.0\.0\.20\n.*200 OK",
        sees=r"NXDOMAIN\nalert unrecognized_name\n" + refused("non_ascii_host"),
        records=(
            ("dns", "deny", "non_ascii_host"),
            ("connection", "deny", "non_ascii_host"),
            ("request", "deny", "non_ascii_host"),
        ),
    ),
    Row(
        "NAME-04",
        tries(
            "connect(it + ':443', get(host=it), it)",
            *(suffixed := ("evilwild-lab.com", "xregistry.npmjs.org", "evilpypi.org")),
        )
        + tries("tls(it, 443, get(host=it), it)", *suffixed),
        title="an allowed name is only the end of the label",
        zone=dict.fromkeys(suffixed, EVIL),
        wins=each("owned", 6),
        sees=each(refused("not_allowed"), 6),
        records=(
            ("dns", "deny", "not_allowed"),
            ("connection", "deny", "not_allowed"),
            ("request", "deny", "not_allowed"),
        ),
        decisions=18,
    ),
    Row(
        "NAME-05",
        tries(
            "connect(it + ':443', get(host=it), it)",
            *(prefixed := ("registry.npmjs.org.evil-lab.com", "pypi.org.evil-lab.com")),
        )
        + tries("tls(it, 443, get(host=it), it)", *prefixed),
        title="an allowed name is only the beginning",
        wins=each("owned", 4),
        sees=each(refused("not_allowed"), 4),
        records=(
            ("dns", "deny", "not_allowed"),
            ("connection", "deny", "not_allowed"),
            ("request", "deny", "not_allowed"),
        ),
        decisions=12,
    ),
    Row(
        "NAME-05",
        tries("absolute(it)", f"http://{API}@evil-lab.com/"),
        title="an allowed name is only the user",
        wins="owned",
        sees=refused("userinfo_in_authority"),
        records=(("connection", "deny", "userinfo_in_authority"),),
        shows={"host_raw": "***@evil-lab.com"},
        decisions=1,
    ),
    Row(
        "NAME-06",
        tries("connect(it)", f"{API}:443@evil-lab.com:443", "user:hunter2@evil-lab.com:443")
        + tries("absolute(it)", f"http://{API}:443@evil-lab.com/", "http://user:hunter2@evil-lab.com/"),
        title="userinfo hides the host",
        wins=each("owned", 4),
        sees=each(refused("userinfo_in_authority"), 4),
        records=(("connection", "deny", "userinfo_in_authority"),),
        shows={"host_raw": "***@evil-lab.com:443"},
        decisions=4,
        also=no_password_was_written,
    ),
    Row(
        "NAME-06",
        tries(f"tls({API!r}, 443, get(host=it), {API!r})", f"user:hunter2@{API}"),
        title="userinfo in Host",
        wins="200 OK",
        sees=refused("userinfo_in_authority"),
        records=(("request", "deny", "userinfo_in_authority"),),
        shows={"host_raw": f"***@{API}"},
        also=no_password_was_written,
    ),
    Row(
        "NAME-07",
        tries("connect(it)", b"evil-lab.com\0.lab-origin.com:443")
        + tries("absolute(it)", b"http://evil-lab.com\0.lab-origin.com/"),
        title="a resolver that stops at NUL",
        wins=each("owned", 2),
        sees=each(refused("bad_host"), 2),
        records=(("connection", "deny", "bad_host"),),
        shows={"host_raw": "evil-lab.com\0.lab-origin.com:443"},
        decisions=2,
        note="the SOCKS5 door, with its own domain type, comes with the explicit wiring",
    ),
    Row(
        "NAME-07",
        CRAFTED
        + "say(raw_alert(tcp('a.wild-lab.com', 443, crafted(b'evil-lab.com\\0.wild-lab.com'), read=7)))\n"
        "say(dns(b'\\x0aevil\\0pypix\\x08wild-lab\\x03com\\0'))",
        title="NUL in SNI and DNS",
        wins=r"NOERROR 11\.0\.0\.20",
        sees=r"alert unrecognized_name\nNXDOMAIN",
        records=(("connection", "deny", "bad_host"), ("dns", "deny", "bad_host")),
        shows={"host_raw": "evil\\000pypix.wild-lab.com"},
    ),
    Row(
        "NAME-08",
        tries("connect(it)", "evil%2dlab.com:443", "evil-lab.com%00.lab-origin.com:443")
        + tries("absolute(it)", "http://evil%2dlab.com/", "http://evil-lab.com%00.lab-origin.com/"),
        title="percent signs",
        wins=each("owned", 4),
        sees=each(refused("bad_host"), 4),
        records=(("connection", "deny", "bad_host"),),
        shows={"host_raw": "evil%2dlab.com:443"},
        decisions=4,
    ),
    Row(
        "NAME-08",
        tries("connect(it)", f"{API}%2f@evil-lab.com:443"),
        title="percent signs in userinfo",
        wins="owned",
        sees=refused("userinfo_in_authority"),
        records=(("connection", "deny", "userinfo_in_authority"),),
        decisions=1,
    ),
    Row(
        "NAME-09",
        tries("absolute(it)", "http://evil-lab.com\\/", "http://evil-lab.com\\.lab-origin.com/")
        + tries("connect(it)", "evil-lab.com/x:443", "evil-lab.com#x:443", "evil-lab.com?x:443"),
        title="slashes, backslashes, marks",
        wins="owned",
        sees=each(refused("bad_host"), 5),
        records=(("connection", "deny", "bad_host"),),
        shows={"host_raw": "evil-lab.com\\"},
        decisions=5,
    ),
    Row(
        "NAME-09",
        tries("absolute(it)", f"http://evil-lab.com\\@{API}/"),
        title="a backslash before an at",
        wins="owned",
        sees=refused("userinfo_in_authority"),
        records=(("connection", "deny", "userinfo_in_authority"),),
        decisions=1,
    ),
    Row(
        "NAME-09",
        tries("absolute(it)", f"http://evil-lab.com#@{API}/"),
        title="a fragment before an at",
        wins="owned",
        sees=refused("bad_request"),
        records=(("connection", "deny", "not_allowed"), ("request", "deny", "bad_request")),
        shows={"host": "evil-lab.com"},
    ),
    Row(
        "NAME-10",
        tries("connect(it)", b"evil-lab.com\t.lab-origin.com:443", b"evil-lab.com\x0b.lab-origin.com:443"),
        title="tabs in the target",
        wins=each("owned", 2),
        sees=each(refused("bad_host"), 2),
        records=(("connection", "deny", "bad_host"),),
        shows={"host_raw": "evil-lab.com\t.lab-origin.com:443"},
        decisions=2,
    ),
    Row(
        "NAME-10",
        tries(
            "connect(it)",
            b"evil-lab.com :443",
            b"evil-lab.com:443\nX-Log: ok",
            b"evil-lab.com:443\r\nX-Log: ok",
        ),
        title="spaces and line ends in the target",
        wins=each("owned", 3),
        sees=each(refused("bad_request"), 3),
        records=(("connection", "deny", "bad_request"),),
        decisions=3,
    ),
    Row(
        "NAME-11",
        tries(
            "absolute(it.encode())",
            *(f"http://evil-lab{stop}com/" for stop in "\u3002\uff0e\uff61"),
        )
        + tries("connect(it.encode())", "evil-lab\u3002com:443"),
        title="other full stops",
        wins=each("owned", 4),
        sees=each(refused("non_ascii_host"), 4),
        records=(("connection", "deny", "non_ascii_host"),),
        shows={"host_raw": "evil-lab\u3002com:443"},
        decisions=4,
    ),
    Row(
        "NAME-13",
        tries("absolute(it.encode())", "http://\u2460\u2461\u2466.0.0.\u2460:2222/")
        + tries("connect(it.encode())", "\uff11\uff12\uff17.0.0.1:2222"),
        title="digits that become an address",
        wins=r"owned.*\n.*",
        sees=each(refused("non_ascii_host"), 2),
        records=(("connection", "deny", "non_ascii_host"),),
        decisions=2,
    ),
    Row(
        "NAME-14",
        tries(
            "connect(it.encode())", *(f"evil{nothing}-lab.com:443" for nothing in "\u200b\u00ad\u2060\ufeff")
        ),
        title="letters without width",
        wins=each("owned", 4),
        sees=each(refused("non_ascii_host"), 4),
        records=(("connection", "deny", "non_ascii_host"),),
        decisions=4,
    ),
    Row(
        "NAME-15",
        tries("connect(it + ':443', get(host=it), it)", "xn--ypi-zed.org")
        + tries("connect((it + ':443').encode())", "\u0440ypi.org"),
        title="a name that looks like an allowed one",
        zone={"xn--ypi-zed.org": EVIL},
        wins=each("owned", 2),
        sees=refused("not_allowed") + r".*\n" + refused("non_ascii_host"),
        records=(("connection", "deny", "not_allowed"), ("connection", "deny", "non_ascii_host")),
        shows={"host": "xn--ypi-zed.org"},
        decisions=3,
    ),
    Row(
        "NAME-16",
        tries(
            "connect(it)",
            "xn--a.wild-lab.com:443",
            "a.xn--.wild-lab.com:443",
            b"xn--\xc2\x80.wild-lab.com:443",
        ),
        title="punycode that decodes to nothing, to the proxy",
        wins="200 OK",
        sees=refused("bad_host") + r".*\n" + refused("bad_host") + r".*\n" + refused("non_ascii_host"),
        records=(("connection", "deny", "bad_host"), ("connection", "deny", "non_ascii_host")),
        decisions=3,
        note="that any exception in judging is a denial, internal_error, is driven by making hooks raise in tests/gate",
    ),
    Row(
        "NAME-16",
        f"{CRAFTED}say(dns('xn--a.wild-lab.com'))\n"
        "for it in ('xn--a.wild-lab.com', 'x' * 300):\n"
        "    say(raw_alert(tcp('a.wild-lab.com', 443, crafted(it), read=7)))\n"
        "say(line(tls('a.wild-lab.com', 443, get(host='xn--a.wild-lab.com'), 'a.wild-lab.com')))",
        title="punycode that decodes to nothing, in DNS, SNI and Host",
        wins=r"NOERROR 11\.0\.0\.20.*200 OK",
        sees=r"NXDOMAIN\nalert unrecognized_name\nalert unrecognized_name\n" + refused("bad_host"),
        records=(
            ("dns", "deny", "bad_host"),
            ("connection", "deny", "bad_host"),
            ("request", "deny", "bad_host"),
        ),
    ),
    Row(
        "NAME-17",
        f"it = 'wild-lab.com'\n{EVERY_LAYER}",
        title="the apex of a wildcard",
        wins=r"NOERROR 11\.0\.0\.20\n.*200 OK.*\n.*200 OK",
        sees=r"NOERROR 198\.18\.0\.2\n" + refused("not_allowed") + r".*\n" + refused("not_allowed"),
        records=(("dns", "deny", "not_allowed"), ("request", "deny", "not_allowed")),
        note="198.18.0.2 is where a denied name is explained; nxdomain mode is tried with the DNS rows",
        also=every_layer_agrees,
    ),
    Row(
        "NAME-17",
        f"{CRAFTED}say(raw_alert(tcp('a.wild-lab.com', 443, crafted('wild-lab.com'), read=7)))\n"
        "say(line(tls('a.wild-lab.com', 443, get(host='wild-lab.com'), 'a.wild-lab.com')))",
        title="the apex on a sub-name's connection",
        wins="ServerHello\n.*200 OK",
        sees="alert unrecognized_name\n" + refused("authority_mismatch"),
        records=(("connection", "deny", "sni_mismatch"), ("request", "deny", "authority_mismatch")),
    ),
    Row(
        "NAME-17",
        tries("connect(it)", ".wild-lab.com:443", "*.wild-lab.com:443"),
        title="a leading dot or star",
        moot=NO_WIN,
        sees=each(refused("bad_host"), 2),
        records=(("connection", "deny", "bad_host"),),
        decisions=2,
    ),
    Row(
        "NAME-18",
        f"for it in ('sub.wild-lab.com', 'a.b.wild-lab.com', 'a.b.c.d.e.wild-lab.com'):\n    {EVERY_LAYER}",
        title="a wildcard is as deep everywhere",
        moot=ALLOWED,
        sees=r"\A(?:NOERROR 198\.18\.[^\n]*\n(?:[^\n]*200 OK[^\n]*\n){2}){3}\Z",
        records=(("dns", "allow", "rule"), ("connection", "allow", "rule"), ("request", "allow", "rule")),
        rule="wild",
        reaches=("sub.wild-lab.com", "a.b.wild-lab.com", "a.b.c.d.e.wild-lab.com"),
        also=every_layer_agrees,
    ),
    Row(
        "NAME-20",
        tries(
            "connect(it + ':443', get(host=it), it)",
            "api-x.lab-origin.com.evil-lab.com",
            "apiXlab-origin.com",
        ),
        title="no star spans dots in the middle",
        zone={"apixlab-origin.com": EVIL},
        wins=each("owned", 2),
        sees=each(refused("not_allowed"), 2),
        records=(("connection", "deny", "not_allowed"),),
        decisions=4,
    ),
    Row(
        "NAME-21",
        tries(
            "connect(it + ':443', get(host=it), it)",
            "registryXnpmjs.org",
            "registry.npmjsXorg.evil-lab.com",
            "pypi-org.evil-lab.com",
        ),
        title="a dot in a rule is a dot",
        zone={"registryxnpmjs.org": EVIL},
        wins=each("owned", 3),
        sees=each(refused("not_allowed"), 3),
        records=(("connection", "deny", "not_allowed"), ("request", "deny", "not_allowed")),
        decisions=6,
    ),
    Row(
        "NAME-22",
        tries("tls(it, 443, get(host=it), it)", *(name for name in LEGAL_ODD if name[0] != "-"))
        + tries("connect(it + ':443', get(host=it), it)", *LEGAL_ODD),
        title="odd names that are legal",
        note="the C library itself looks up no name with a leading hyphen",
        moot=ALLOWED,
        sees=each("200 OK", 7),
        records=(("dns", "allow", "rule"), ("connection", "allow", "rule"), ("request", "allow", "rule")),
        rule="wild",
        reaches=LEGAL_ODD,
    ),
    Row(
        "NAME-23",
        tries(
            "connect(it + ':443')",
            "a..wild-lab.com",
            "a" * 64 + ".wild-lab.com",
            LONG + ".aaaa",
            "a" * 5000 + ".wild-lab.com",
            "",
            ".",
        ),
        title="empty and over-long labels and names",
        moot=NO_WIN,
        sees=each(refused("bad_host"), 6),
        records=(("connection", "deny", "bad_host"),),
        shows={"host_raw": re.compile(r"\Aa{256}…\[5017 bytes, sha256 [0-9a-f]{16}\]\Z")},
        decisions=6,
    ),
    Row(
        "NAME-24",
        tries(
            "connect(it)",
            *(
                f"evil-lab.com{port}"
                for port in ("", ":", ":0", ":65536", ":443:22", ":+22", ":-1", ":0443", ":0x1bb", ":4_43")
            ),
            "evil-lab.com:\uff14\uff14\uff13",
        ),
        title="odd ports",
        wins="owned",
        sees=each(refused("bad_port"), 11),
        records=(("connection", "deny", "bad_port"),),
        shows={"host_raw": "evil-lab.com:443:22"},
        decisions=11,
    ),
    Row(
        "NAME-24",
        tries("connect(it)", "evil-lab.com: 443", "evil-lab.com :443")
        + tries("absolute(it)", "http://evil-lab.com: 80/"),
        title="a space before the port",
        wins="owned",
        sees=each(refused("bad_request"), 3),
        records=(("connection", "deny", "bad_request"),),
        decisions=3,
    ),
    Row(
        "NAME-25",
        f"for port in (22, 25, 6379):\n"
        f"    say(line(proxy(b'CONNECT {API}:%d HTTP/1.1\\r\\n\\r\\nSSH-2.0-x\\r\\n' % port)))\n"
        f"say(line(tls({API!r}, 22, get(), {API!r})))",
        title="other ports of an allowed host",
        wins="200 naive.*SSH-2",
        sees=r"port of the host is not allowed.*" + refused("port_not_allowed"),
        records=(("connection", "deny", "port_not_allowed"), ("request", "deny", "port_not_allowed")),
        decisions=7,
    ),
    Row(
        "NAME-26",
        tries("absolute(it)", "http://metadata/", "http://localhost:2222/", "http://intranet/")
        + "for it in ('metadata', 'localhost', 'intranet'): say(dns(it))",
        title="single labels",
        zone={"metadata": {"a": [topology.METADATA]}, "intranet": EVIL, "localhost": {"a": ["127.0.0.1"]}},
        wins=r"200 OK.*owned.*owned.*NOERROR 169.*NOERROR 11\.6\.6\.6",
        sees=refused("floor_metadata")
        + ".*"
        + refused("floor_name")
        + ".*"
        + refused("floor_name")
        + r".*\nNXDOMAIN\nNXDOMAIN\nNXDOMAIN\n\Z",
        records=(
            ("connection", "deny", "floor_metadata"),
            ("connection", "deny", "floor_name"),
            ("dns", "deny", "floor_name"),
            ("dns", "deny", "floor_metadata"),
        ),
        decisions=9,
    ),
    Row(
        "NAME-27",
        tries("absolute(it)", *(f"http://{it}/" for it in ("foo.0x4", "1.2.3.4.5", "a.256")))
        + tries("connect(it)", "127.0.0.1.:2222", "0x7f.1.:2222", "foo.0x4:443")
        + "for it in ('foo.0x4', '1.2.3.4.5', '127.0.0.1'): say(dns(it))",
        title="names that end in a number",
        zone=dict.fromkeys(("foo.0x4", "1.2.3.4.5", "a.256", "127.0.0.1"), EVIL),
        wins=r"owned.*owned.*owned.*NOERROR 11\.6\.6\.6\nNOERROR 11\.6\.6\.6\nNOERROR 11\.6\.6\.6",
        sees=rf"\A(?:[^\n]*{refused('bad_host')}[^\n]*\n){{6}}NXDOMAIN\nNXDOMAIN\nNXDOMAIN\n\Z",
        records=(("connection", "deny", "bad_host"), ("dns", "deny", "bad_host")),
        decisions=9,
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_no_spelling_gets_past_the_one_parser(once: Arena, row: Row) -> None:
    once.holds(row)


@pytest.mark.parametrize(
    ("entry", "code"),
    [
        pytest.param('hosts: ["a\u3002example.com"]', "not_normal", id="NAME-11 another full stop in a rule"),
        pytest.param('hosts: ["\u2460\u2461\u2466.0.0.\u2460"]', "not_normal", id="NAME-13 digits in a rule"),
        pytest.param('hosts: ["al\\u200blowed.example.com"]', "not_normal", id="NAME-14 no width in a rule"),
        pytest.param('hosts: ["\u0440ypi.org"]', "not_normal", id="NAME-15 a homograph in a rule"),
        pytest.param('hosts: ["xn--a.example.com"]', "bad_host", id="NAME-16 bad punycode in a rule"),
        pytest.param('hosts: [".wild-lab.com"]', "not_normal", id="NAME-17 a leading dot in a rule"),
        pytest.param('hosts: ["*"]', "bad_wildcard", id="NAME-19 everything"),
        pytest.param('hosts: ["*.com"]', "public_suffix", id="NAME-19 a top-level domain"),
        pytest.param('hosts: ["*.co.uk"]', "public_suffix", id="NAME-19 a registry's suffix"),
        pytest.param('hosts: ["*.github.io"]', "warning: shared_suffix", id="NAME-19 anybody's pages"),
        pytest.param(
            'hosts: ["*.s3.amazonaws.com"]', "warning: shared_suffix", id="NAME-19 anybody's buckets"
        ),
        pytest.param('hosts: ["*.workers.dev"]', "warning: shared_suffix", id="NAME-19 anybody's workers"),
        pytest.param('hosts: ["api-*.example.com"]', "bad_wildcard", id="NAME-20 a star in a label"),
        pytest.param('hosts: ["api.*.example.com"]', "bad_wildcard", id="NAME-20 a star in the middle"),
        pytest.param('hosts: ["api.[ab]llowed.com"]', "bad_host", id="NAME-20 a class of letters"),
        pytest.param('hosts: ["api.?.com"]', "bad_host", id="NAME-20 a question mark"),
        pytest.param('hosts: ["^api.example.com$"]', "bad_host", id="NAME-21 a regular expression"),
        pytest.param('hosts: ["api\\\\.example\\\\.com"]', "bad_host", id="NAME-21 an escaped dot"),
        pytest.param('hosts: ["1.2.3.4.5"]', "bad_host", id="NAME-27 a number at the end"),
        pytest.param("hosts: [intranet]", "bad_host", id="NAME-26 a single label"),
    ],
)
def test_a_rule_that_could_be_read_otherwise_is_refused_where_it_stands(
    tmp_path: Path, entry: str, code: str
) -> None:
    assert refusals(tmp_path, "hosts: [first.example.org]", entry) == [f"6 {code}"]
