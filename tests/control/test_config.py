"""The configuration: who wins, what is refused, and what a worker is told of it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from egressd.control.ca import CaPaths
from egressd.control.config import Config, ConfigError, LimitsSection, keys, load_config
from egressd.gate.settings import Settings, UpstreamProxy

HOME = {"HOME": "/home/ann"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "egressd.yaml"


def load(
    file: Path | None, text: str | None = None, flags: Mapping[str, str | None] | None = None, /, **env: str
) -> Config:
    if file is not None and text is not None:
        file.write_text(text)
    return load_config(flags or {}, HOME | env, file=file, euid=1000)


def problems(file: Path | None, text: str | None = None, /, **env: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(file, text, **env)
    return [str(problem) for problem in caught.value.problems]


EVERYTHING = """\
schema: 1
rules: policy/rules
credentials: /etc/egressd/credentials.yaml
ca_dir: ~/ca
journal: "-"
state_dir: ../state
control_socket: /run/e.sock
dns:
  upstream: udp://192.0.2.53
  denied: nxdomain
upstream:
  ca_bundle: bundle.pem
inspect:
  addons: [inspection.py, ~/more.py]
limits:
  dns_timeout: 1
  dns_names: 2
  dns_queries_per_minute: 3
  first_bytes_timeout: 4.5
  head_timeout: 5
  head_bytes: 6
  handshake_timeout: 7
  connect_timeout: 8
  idle_timeout: 9
  connections: 10
"""


def test_every_key_reaches_its_place(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    config = load(file, EVERYTHING)
    assert config.file == file
    assert config.rules == file.parent / "policy/rules"
    assert config.credentials == Path("/etc/egressd/credentials.yaml")
    assert config.ca == CaPaths.at(Path("/home/ann/ca"))
    assert config.journal == "-"
    assert config.state_dir == file.parent.parent / "state"
    assert config.control_socket == Path("/run/e.sock")
    assert config.settings() == Settings(
        dns_denied="nxdomain",
        dns_upstream="udp://192.0.2.53",
        dns_timeout=1,
        dns_names=2,
        dns_queries_per_minute=3,
        first_bytes_timeout=4.5,
        head_timeout=5,
        head_bytes=6,
        handshake_timeout=7,
        connect_timeout=8,
        idle_timeout=9,
        connections=10,
        upstream_ca=str(file.parent / "bundle.pem"),
        inspect_addons=(str(file.parent / "inspection.py"), "/home/ann/more.py"),
    )
    assert {file.parent / "inspection.py", Path("/home/ann/more.py")} <= set(config.private_paths())


def test_without_anything_said_the_defaults_hold_and_no_file_is_needed() -> None:
    config = load(None)
    assert config.file is None
    assert config.journal == Path("/home/ann/.local/state/egressd/journal.jsonl")
    assert config.settings() == Settings()


def test_the_limits_are_those_that_a_worker_knows() -> None:
    assert set(LimitsSection.model_fields) == set(Settings.model_fields) - {
        "dns_denied",
        "dns_upstream",
        "upstream_ca",
        "upstream_proxy",
        "inspect_addons",
        "approval_hold",
    }


@pytest.mark.parametrize("name", sorted(LimitsSection.model_fields))
def test_a_limit_refuses_what_a_worker_would_refuse(file: Path, name: str) -> None:
    assert problems(file, f"limits:\n  {name}: 0\n")[0].startswith(f"{file}:2:")
    assert problems(None, **{f"EGRESSD_LIMITS_{name.upper()}": "nan"})


def test_flag_wins_over_variable_over_file_over_default(file: Path) -> None:
    text = "dns: {upstream: 'udp://192.0.2.1', denied: nxdomain}\nlimits: {connections: 7}\n"
    config = load(
        file,
        text,
        {"dns.upstream": "tcp://192.0.2.3", "journal": None},
        EGRESSD_DNS_UPSTREAM="udp://192.0.2.2",
        EGRESSD_LIMITS_CONNECTIONS="8",
    )
    assert config.dns.upstream == "tcp://192.0.2.3"
    assert config.dns.denied == "nxdomain"
    assert config.limits.connections == 8


def test_the_file_may_be_named_by_a_variable_and_the_flag_wins(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("journal: /other\n")
    assert load(None, EGRESSD_CONFIG=str(other)).journal == Path("/other")
    assert load(file, "journal: /file\n", EGRESSD_CONFIG=str(other)).journal == Path("/file")


def test_the_default_file_is_read_where_it_exists(tmp_path: Path) -> None:
    place = tmp_path / "egressd" / "egressd.yaml"
    place.parent.mkdir()
    place.write_text("journal: j.jsonl\n")
    assert load(None, XDG_CONFIG_HOME=str(tmp_path)).journal == place.parent / "j.jsonl"


def test_relative_paths_in_variables_and_flags_are_below_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(None, None, {"ca_dir": "ca"}, EGRESSD_JOURNAL="./j.jsonl")
    assert (config.ca.ca, config.journal) == (tmp_path / "ca", tmp_path / "j.jsonl")


def test_naming_the_default_authority_keeps_its_trust_directory() -> None:
    default = load(None).ca
    assert load(None, EGRESSD_CA_DIR=str(default.ca)).ca == default


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "jornal: x\n", ":1:1: unknown_key: 'jornal' (did you mean 'journal'?)", id="a mistyped key"
        ),
        pytest.param("dns:\n  denyed: nxdomain\n", ":2:3: unknown_key: 'denyed'", id="a mistyped inner key"),
        pytest.param("dns: {denied: maybe}\n", ":1:15: bad_value: 'maybe'", id="a value that is none"),
        pytest.param("limits: {connections: '5'}\n", ":1:23: wrong_type: ", id="a number in quotes"),
        pytest.param("limits: {idle_timeout: .inf}\n", ":1:24: ", id="an endless deadline"),
        pytest.param("journal: \n", ":1:", id="a key without a value"),
        pytest.param('journal: ""\n', ":1:10: ", id="an empty path"),
        pytest.param('journal: "a\\0b"\n', ":1:10: ", id="a path that no kernel takes"),
        pytest.param("schema: 2\n", ":1:9: ", id="another schema"),
        pytest.param("rules: a\nrules: b\n", ":2:1: duplicate_key", id="a key twice"),
        pytest.param(
            "dns: {upstream: 'https://dns.example'}\n", ":1:1: bad_value: dns.upstream", id="an upstream"
        ),
    ],
)
def test_what_is_wrong_in_the_file_is_said_with_its_place(file: Path, text: str, expected: str) -> None:
    assert problems(file, text)[0].startswith(f"{file}{expected}")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("EGRESSD_DNS_DENIED", "maybe", "EGRESSD_DNS_DENIED:1:1: bad_value: 'maybe'"),
        ("EGRESSD_LIMITS_CONNECTIONS", "many", "EGRESSD_LIMITS_CONNECTIONS:1:1: wrong_type"),
        ("EGRESSD_LIMITS_CONNECTIONS", "0", "EGRESSD_LIMITS_CONNECTIONS:1:1: bad_value"),
        ("EGRESSD_JOURNAL", "", "EGRESSD_JOURNAL:1:1: "),
        (
            "EGRESSD_JORNAL",
            "x",
            "EGRESSD_JORNAL:1:1: unknown_key: no such variable (did you mean EGRESSD_JOURNAL?)",
        ),
        ("EGRESSD_DNS_UPSTREAM", "udp://dns.example", "configuration:1:1: bad_value: dns.upstream"),
    ],
)
def test_what_is_wrong_in_a_variable_is_said_by_its_name(name: str, value: str, expected: str) -> None:
    assert problems(None, **{name: value})[0].startswith(expected)


@pytest.mark.parametrize(
    "name",
    [
        "EGRESSD_SANDBOX",
        "EGRESSD_PROFILE",
        "EGRESSD_SERVICE_HOST",
        "EGRESSD_SERVICE_PORT_HTTPS",
        "EGRESSD_PORT",
        "EGRESSD_PORT_3128_TCP_ADDR",
        "EGRESSD_TEST_SPEED",
        "EGRESS_JOURNAL",
    ],
)
def test_variables_that_are_no_keys_are_let_be(name: str) -> None:
    assert load(None, **{name: "tcp://10.0.0.1:3128"}) == load(None)


def test_a_file_that_was_named_must_exist(tmp_path: Path) -> None:
    assert "there is no such file" in problems(tmp_path / "none.yaml")[0]


def test_all_problems_come_at_once() -> None:
    assert len(problems(None, EGRESSD_DNS_DENIED="maybe", EGRESSD_LIMITS_CONNECTIONS="0")) == 2


def test_interfaces_are_named_each_once() -> None:
    assert load(None, EGRESSD_GATEWAY_INTERFACES="br0,br1").gateway.interfaces == ["br0", "br1"]
    for text, said in (("br0,br0", "twice"), ("eth+", "no name of an interface"), ("../x", "no name")):
        [problem] = problems(None, EGRESSD_GATEWAY_INTERFACES=text)
        assert said in problem


def test_every_key_has_its_variable() -> None:
    assert keys()["EGRESSD_DNS_UPSTREAM"] == "dns.upstream"
    assert keys()["EGRESSD_UPSTREAM_CA_BUNDLE"] == "upstream.ca_bundle"
    assert keys()["EGRESSD_CA_DIR"] == "ca_dir"
    assert keys()["EGRESSD_UPSTREAM_PROXY_URL"] == "upstream.proxy.url"
    assert keys()["EGRESSD_UPSTREAM_PROXY_CREDENTIALS_FILE"] == "upstream.proxy.credentials.file"
    assert keys()["EGRESSD_SERVE_API_TOKEN_FILE"] == "serve.api.token.file"
    assert len(keys()) == 6 + 3 + 4 + 1 + len(LimitsSection.model_fields) + 9 + 1 + 8 + 6 + 4 + 7


def test_a_proxy_is_what_file_and_variables_say_together(file: Path) -> None:
    text = "upstream: {proxy: {url: 'http://[fd00::1]:3128/', credentials: {file: secret}}}\n"
    config = load(file, text, EGRESSD_UPSTREAM_PROXY_CONNECT="name")
    assert config.settings().upstream_proxy == UpstreamProxy(host="fd00::1", port=3128, connect="name")
    assert config.proxy_credentials == file.parent / "secret"
    assert file.parent / "secret" in config.private_paths()
    assert load(file, "schema: 1\n").settings().upstream_proxy is None


@pytest.mark.parametrize(
    ("proxy", "expected"),
    [
        pytest.param("{connect: name}", "there is no url", id="no url"),
        pytest.param("{url: 'https://proxy.test:3128'}", "TLS to the proxy itself is not spoken", id="https"),
        pytest.param("{url: 'socks5://proxy.test:1080'}", "http://HOST:PORT", id="another scheme"),
        pytest.param("{url: 'http://proxy.test'}", "the port is missing", id="no port"),
        pytest.param("{url: 'http://proxy.test:3128/path'}", "the port is not a number", id="a path"),
        pytest.param("{url: 'http://ann:s3cret@proxy.test:3128'}", "go into a file", id="credentials in the URL"),
    ],
)  # fmt: skip
def test_a_proxy_that_cannot_be_used_is_told_without_its_secrets(
    file: Path, proxy: str, expected: str
) -> None:
    [problem] = problems(file, f"upstream: {{proxy: {proxy}}}\n")
    assert expected in problem
    assert "s3cret" not in problem


def test_a_list_of_paths_is_joined_by_colons_in_a_variable(file: Path) -> None:
    config = load(file, "inspect: {addons: [one.py]}\n", EGRESSD_INSPECT_ADDONS="/a/b.py:c.py:")
    assert config.inspect.addons == ["/a/b.py", str(Path.cwd() / "c.py")]
    assert problems(file, "inspect: {addons: one.py}\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("explicit: {http: 3128}\n", None, id="what holds anyway"),
        pytest.param("explicit: {http: 3129}\n", "explicit: there are no addresses", id="ports without addresses"),
        pytest.param("explicit: {addresses: [x]}\n", "explicit: 'x' does not appear", id="no address"),
        pytest.param("explicit: {addresses: ['::1'], socks: 3128}\n", "two listeners on one port", id="a port twice"),
        pytest.param("explicit: {addresses: ['::1'], dns: 53}\n", "dns: {answers: self}", id="DNS of another kind"),
        pytest.param("dns: {answers: self}\nexplicit: {addresses: ['::1'], dns: 53}\n", None, id="DNS"),
        pytest.param("explicit: {addresses: [0.0.0.0]}\n", "host must say", id="all addresses, and none to tell"),
        pytest.param("serve: {health: 'localhost:80'}\n", "serve.health: 'localhost:80'", id="a name"),
        pytest.param("serve: {health: '::1:80'}\n", "in brackets", id="IPv6 without brackets"),
        pytest.param("serve: {health: '[::1]:80'}\n", None, id="IPv6"),
        pytest.param("serve: {health: '127.0.0.1:0'}\n", "between 1 and 65535", id="port 0"),
        pytest.param("serve: {health: ''}\n", None, id="no health"),
        pytest.param("serve: {api: {key: k}}\n", "there is no listen", id="an API that listens nowhere"),
        pytest.param("serve: {api: {listen: '10.0.0.1:1', token: {file: t}}}\n", "without TLS", id="no TLS"),
        pytest.param("serve: {api: {listen: '10.0.0.1:1', certificate: c, key: k}}\n", "neither is set", id="nobody known"),
        pytest.param("serve: {api: {listen: '10.0.0.1:1', certificate: c, key: k, client_ca: a}}\n", None, id="mTLS"),
        pytest.param(
            "explicit: {addresses: [10.0.0.1]}\nserve: {api: {listen: '10.0.0.1:1', certificate: c, key: k, client_ca: a}}\n",
            "must be at another address", id="the API where sandboxes are",
        ),
        pytest.param(
            "explicit: {addresses: [0.0.0.0], host: egressd}\n"
            "serve: {api: {listen: '10.0.0.1:1', certificate: c, key: k, client_ca: a}}\n",
            "must be at another address", id="sandboxes everywhere",
        ),
    ],
)  # fmt: skip
def test_keys_of_a_daemon_are_held_against_each_other(file: Path, text: str, expected: str | None) -> None:
    if expected is None:
        load(file, text)
    else:
        [problem] = problems(file, text)
        assert expected in problem


def test_lists_of_addresses_are_joined_by_commas_in_a_variable() -> None:
    config = load(None, EGRESSD_EXPLICIT_ADDRESSES="172.30.0.2, fd00::2", EGRESSD_SERVE_SANDBOXES="7")
    assert config.explicit.addresses == ["172.30.0.2", "fd00::2"]
    assert config.serve.sandboxes == 7


def test_private_paths_are_the_outermost_and_hold_no_standard_output(file: Path) -> None:
    text = "state_dir: state\njournal: state/journal.jsonl\nrules: rules\nca_dir: /x/ca\n"
    config = load(file, text, XDG_RUNTIME_DIR="/run/user/1000")
    assert set(config.private_paths()) == {
        file,
        file.parent / "rules",
        file.parent / "state",
        Path("/x/ca"),
        Path("/home/ann/.config/egressd/credentials.yaml"),
        Path("/run/user/1000/egressd/control.sock"),
        Path("/run/user/1000/egressd/control-attach.sock"),
    }
    assert all(isinstance(path, os.PathLike) for path in load(file, 'journal: "-"\n').private_paths())


_DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```yaml\n# egressd\.yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["dns.md", "serve.md", "wirings.md"])
def test_what_the_pages_show_loads(file: Path, page: str) -> None:
    shown = _BLOCK.findall((_DOCS / page).read_text(encoding="utf-8"))
    assert shown
    for text in shown:
        load(file, f"schema: 1\n{text}")
