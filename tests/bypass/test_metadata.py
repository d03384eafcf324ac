"""META rows: metadata endpoints and control planes.

The rules here are as broad as rules can be: they hold whole /8 that metadata endpoints lie in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from egressd.lab import Lab, topology
from tests.bypass.arena import RULES, Arena, Row, arena
from tests.bypass.script import each, refusals, refused, tries

pytestmark = pytest.mark.e2e

BROAD = """  - id: broad
    addresses: [11.0.0.0/8, 100.0.0.0/8, 168.0.0.0/8, 169.0.0.0/8, 192.0.0.0/8, "fd00::/8"]
    ports: [80, 8080]
    schemes: [http]
  - id: internal
    hosts: ["*.google.internal", "*.c.internal"]
    schemes: [http]
deny:
"""
METADATA = (("connection", "deny", "floor_metadata"), ("request", "deny", "floor_metadata"))
TOKEN = "b'X-aws-ec2-metadata-token-ttl-seconds: 21600\\r\\n'"
CONNECTED = "say(line(proxy(b'CONNECT ' + it.encode() + b' HTTP/1.1\\r\\n\\r\\n' + get(host=it))))"
UDP = "PermissionError"
"""How a packet's refusal looks to who sent it: at once, by ICMP."""


def all_ways(*addresses: str) -> str:
    """Code that asks each address by itself, by the proxy in absolute form, and through the proxy: three lines for each."""
    hosts = [(address, f"[{address}]" if ":" in address else address) for address in addresses]
    return (
        f"for address, it in {hosts!r}:\n"
        "    say(line(tcp(address, 80, get('/latest/meta-data/', it))))\n"
        "    say(line(absolute('http://' + it + '/v1/credentials')))\n"
        "    it += ':80'\n"
        f"    {CONNECTED}\n"
    )


def endpoint(row: str, title: str, *addresses: str) -> Row:
    """A row about metadata endpoints, asked in all ways."""
    return Row(
        row,
        all_ways(*addresses),
        title=title,
        wins=each("access_token|iam/", 3 * len(addresses)),
        sees=each(
            r"metadata endpoints are never reachable[^|]*\(reason floor_metadata\)", 3 * len(addresses)
        ),
        records=METADATA,
        decisions=6 * len(addresses),
    )


def names(row: str, title: str, reason: str, zone: dict[str, str], wins: str, port: int = 80) -> Row:
    """A row about names that are never resolved, asked of DNS, by themselves and of the proxy."""
    return Row(
        row,
        f"for it in {list(zone)!r}:\n"
        "    say(dns(it))\n"
        f"    say(line(tcp(it, {port}, get(host=it, head=b'Metadata-Flavor: Google\\r\\n'))))\n"
        f"    say(line(absolute('http://' + it + ':{port}/', head=b'Metadata-Flavor: Google\\r\\n')))\n",
        title=title,
        zone={name: {"a": [address]} for name, address in zone.items()},
        wins=rf"\A(?:NOERROR [^\n]*\n[^\n]*{wins}[^\n]*\n[^\n]*{wins}[^\n]*\n){{{len(zone)}}}\Z",
        sees=rf"\A(?:NXDOMAIN\ngaierror[^\n]*\n[^\n]*{refused(reason)}[^\n]*\n){{{len(zone)}}}\Z",
        records=(("dns", "deny", reason), ("connection", "deny", reason), ("request", "deny", reason)),
        note="NXDOMAIN under both ways of denying names (DESIGN: floor names are never explained)",
    )


_ROWS = [
    endpoint("META-01", "IMDSv1", topology.METADATA),
    Row(
        "META-01",
        f"say(line(tcp('169.254.169.254', 80, get('/latest/api/token', '169.254.169.254', 'PUT', {TOKEN}))))\n"
        f"say(line(absolute('http://169.254.169.254/latest/api/token', method='PUT', head={TOKEN})))",
        title="IMDSv2",
        wins=each("lab-imds-token", 2),
        sees=each(refused("floor_metadata"), 2),
        records=METADATA,
        shows={"method": "PUT", "path": "/latest/api/token"},
        decisions=4,
    ),
    endpoint("META-02", "IMDS over IPv6", topology.METADATA_V6),
    endpoint("META-03", "ECS task credentials", topology.METADATA_ECS),
    endpoint("META-04", "EKS Pod Identity", "169.254.170.23", "fd00:ec2::23"),
    names(
        "META-05",
        "GCP by name",
        "floor_metadata",
        dict.fromkeys(
            ("metadata.google.internal", "metadata", "metadata.goog", "metadata.c.internal"),
            topology.METADATA,
        ),
        "access_token",
    ),
    endpoint("META-05", "GCP by address over IPv6", "fd20:ce::254"),
    endpoint("META-06", "WireServer", topology.METADATA_AZURE),
    Row(
        "META-06",
        "say(line(tcp('168.63.129.16', 32526, get('/vmSettings', '168.63.129.16'))))\n"
        "say(line(tcp('168.63.129.16', 8080, get('/?comp=versions', '168.63.129.16:8080'))))\n"
        "say(line(udp('168.63.129.16', 32526)))\n"
        "say(run('ping', '-c1', '-W1', '168.63.129.16')[-4:])\n"
        "say(dns('a.evil-lab.com', server='168.63.129.16'))\n"
        "say(dns('b.evil-lab.com', server='168.63.129.16', over='tcp'))",
        title="WireServer on every port and protocol",
        wins=r"\n.*hostname.*\[0\]",
        sees=rf"{refused('floor_metadata')}.*\n.*{refused('floor_metadata')}.*\n{UDP}.*\[[12]\]\n"
        r"NOERROR 198\.18\.0\.2\nNOERROR 198\.18\.0\.2\n",
        records=(*METADATA, ("packet", "deny", "floor_metadata"), ("dns", "deny", "not_allowed")),
        note="port 53 of any address is egressd's own resolver",
    ),
    endpoint("META-07", "other clouds", topology.METADATA_ALIBABA, *topology.METADATAS_OF_OTHERS),
    names(
        "META-07",
        "other clouds by name",
        "floor_metadata",
        dict.fromkeys(("metadata.tencentyun.com", "metadata.platformequinix.com"), topology.METADATA),
        "access_token",
    ),
    names(
        "META-08",
        "Kubernetes by name",
        "floor_name",
        dict.fromkeys(
            ("kubernetes.default.svc", "kubernetes.default", "kubernetes.default.svc.cluster.local"),
            topology.ATTACKER,
        ),
        "owned",
    ),
    Row(
        "META-08",
        "for it in ('10.96.0.1:443', '11.0.0.2:10250'):\n    " + CONNECTED,
        title="Kubernetes by address",
        moot="the lab has no cluster; that such addresses are reached where nothing holds is seen with the IP rows",
        sees=r"ip_literal.*\n.*port_not_allowed",
        records=(("connection", "deny", "ip_literal"), ("connection", "deny", "port_not_allowed")),
        decisions=4,
    ),
    names(
        "META-09",
        "the container's host by name",
        "floor_name",
        dict.fromkeys(
            (
                "host.docker.internal",
                "gateway.docker.internal",
                "host.containers.internal",
                "host.minikube.internal",
                "host.lima.internal",
            ),
            "11.0.0.3",
        ),
        "owned",
        port=2222,
    ),
    Row(
        "META-10",
        "say(run('curl', '-gksS', '-m', '5', '-L', 'https://api.lab-origin.com/redirect?to=http://169.254.169.254/latest'))\n"
        "say(line(tls('api.lab-origin.com', 443, get('/redirect?to=http://169.254.169.254/x'), 'api.lab-origin.com')))",
        title="a redirect",
        wins="access_token",
        sees=r"reason floor_metadata.*302.*http://169\.254\.169\.254/x",
        records=(("request", "allow", "rule"), *METADATA),
        reaches=("api.lab-origin.com",),
    ),
    Row(
        "META-11",
        "say(run('env', '-i', 'curl', '-sS', '-m', '3', '--noproxy', '*', 'http://169.254.169.254/latest/meta-data/'))\n"
        "say(line(udp('169.254.169.254', 123)))\n"
        "say(line(udp('169.254.170.2', 80)))",
        title="past the proxy's variables",
        wins="hostname",
        sees=rf"reason floor_metadata.*\n{UDP}[^\n]*\n{UDP}",
        records=(*METADATA, ("packet", "deny", "floor_metadata")),
        note="DESIGN: TCP is taken and told why; what is no TCP is refused at once and counted",
    ),
    Row(
        "META-12",
        tries(
            "absolute(it)", *(f"http://{address}:8080/" for address in ("169.254.169.254", "168.63.129.16"))
        )
        + tries("tcp(it, 8080, get(host=it + ':8080'))", "100.100.100.200", "192.0.0.192")
        + "say(line(tcp('fd00:ec2::254', 8080, get(host='[fd00:ec2::254]:8080'))))\n"
        "say(line(absolute('http://11.0.0.20:8080/n')))",
        title="a broad rule",
        wins=r"(?:access_token.*){5}200 OK",
        sees=rf"\A(?:[^\n]*{refused('floor_metadata')}[^\n]*\n){{5}}[^\n]*200 OK[^\n]*\n\Z",
        records=(*METADATA, ("request", "allow", "rule")),
        rule="broad",
        reaches=("11.0.0.20",),
        note="what else the rule holds it does allow, which is the last line",
    ),
    Row(
        "META-13",
        "say(line(tcp('www.lab-origin.com', 80, get(host='169.254.169.254'))))\n"
        "say(line(absolute('http://www.lab-origin.com/n', host='169.254.169.254')))\n"
        "say(line(tls('api.lab-origin.com', 443, get(host='metadata.google.internal'), 'api.lab-origin.com')))",
        title="Host names metadata",
        wins=each("200 OK", 3),
        sees=each(refused("authority_mismatch"), 3),
        records=(("connection", "allow", "rule"), ("request", "deny", "authority_mismatch")),
        shows={"host": "www.lab-origin.com", "host_raw": "169.254.169.254"},
    ),
    Row(
        "META-13",
        "say(line(tcp('169.254.169.254', 80, get(host='www.lab-origin.com'))))\n"
        "say(line(absolute('http://169.254.169.254/', host='www.lab-origin.com')))",
        title="Host names an allowed host",
        wins=each("access_token", 2),
        sees=refused("floor_metadata") + r".*\n" + refused("authority_mismatch|floor_metadata"),
        records=METADATA,
        decisions=4,
    ),
]


WIRED = ("IMDSv1", "IMDS over IPv6", "WireServer on every port and protocol", "past the proxy's variables")
ROWS = [dataclasses.replace(row, wired=row.title in WIRED) for row in _ROWS]


@pytest.fixture(scope="module")
def broad(shared_lab: Lab) -> Iterator[Arena]:
    """An arena whose rules are as broad as they may be."""
    with arena(shared_lab, rules=RULES.replace("deny:\n", BROAD, 1)) as made:
        yield made


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_metadata_stays_out_of_reach(broad: Arena, row: Row) -> None:
    broad.holds(row)


HANDED_DOWN = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_PORT": "tcp://10.96.0.1:443",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/credentials/x",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://169.254.170.23/v1/credentials",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN": "hunter2",
    "IDENTITY_ENDPOINT": "http://169.254.169.254/metadata/identity",
    "GCE_METADATA_HOST": "169.254.169.254",
}


def test_no_variable_or_mount_leads_to_a_control_plane(broad: Arena) -> None:
    """META-03, META-08: what tells a process where its credentials are does not get into the sandbox."""
    listing = "env; ls -a /run /var/run /var/run/secrets/kubernetes.io/serviceaccount 2>&1"
    outside = broad.lab.host_exec(["sh", "-c", listing], env=HANDED_DOWN | {"PATH": "/usr/bin:/bin"}).stdout
    assert all(f"{name}={value}" in outside for name, value in HANDED_DOWN.items())
    inside = broad.stand.run(["sh", "-c", listing], env=HANDED_DOWN).stdout
    assert "EGRESSD_SANDBOX=" in inside
    assert not [line for line in inside.splitlines() if line.partition("=")[0] in HANDED_DOWN]
    assert "hunter2" not in inside
    seen = inside.partition("/run:\n")[2].partition("\n\n")[0].split()
    assert set(seen) == {".", "..", "egressd-trust", "user"}


@pytest.mark.parametrize(
    ("hosts", "code"),
    [
        pytest.param("metadata.google.internal", "floor_name", id="META-05 the name in a rule"),
        pytest.param("metadata.goog", "floor_name", id="META-05 the short name in a rule"),
        pytest.param("kubernetes.default.svc", "floor_name", id="META-08 the API in a rule"),
        pytest.param("host.docker.internal", "floor_name", id="META-09 the host in a rule"),
        pytest.param('"*.docker.internal"', "floor_name", id="META-09 the host by a wildcard"),
        pytest.param('"*"', "bad_wildcard", id="META-12 everything"),
        pytest.param('"*.internal"', "public_suffix", id="META-12 everything internal"),
    ],
)
def test_a_name_below_the_floor_is_refused_in_a_rule(tmp_path: Path, hosts: str, code: str) -> None:
    assert set(refusals(tmp_path, "hosts: [first.example.org]", f"hosts: [{hosts}]")) == {f"6 {code}"}
