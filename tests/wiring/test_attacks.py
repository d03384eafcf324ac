"""Everything a command might try from inside a sandbox, tried once as root's sandbox and once as an ordinary user's.

The rows named NET-… are those of the catalogue of ways round an egress proxy.
"""

from typing import Any

import pytest

from egressd.wiring.identity import SANDBOX_UID

pytestmark = pytest.mark.e2e
Seen = dict[str, Any]


class TestNetwork:
    def test_the_namespace_has_loopback_and_nothing_else(self, attacked: Seen) -> None:
        assert attacked["inside"]["devices"] == ["lo"]
        assert attacked["inside"]["net_class"] == []

    @pytest.mark.parametrize(
        ("target", "address", "port", "source"),
        [
            ("8.8.8.8 443", "8.8.8.8", 443, "198.18.0.254"),
            ("10.0.0.1 22", "10.0.0.1", 22, "198.18.0.254"),
            ("169.254.169.254 80", "169.254.169.254", 80, "198.18.0.254"),
            ("198.18.0.254 1", "198.18.0.254", 1, "198.18.0.254"),
            ("::ffff:9.9.9.9 25", "9.9.9.9", 25, "198.18.0.254"),
            ("2606:4700::1111 443", "2606:4700::1111", 443, "2001:2::fe"),
            ("fd00::1 80", "fd00::1", 80, "2001:2::fe"),
        ],
    )
    def test_tcp_to_any_address_arrives_with_its_original_destination(
        self, attacked: Seen, target: str, address: str, port: int, source: str
    ) -> None:
        """NET-01, NET-03."""
        assert attacked["inside"]["connect"][target] == [[address, port], source]

    def test_a_direct_connection_to_the_listener_shows_the_listener_as_destination(
        self, attacked: Seen
    ) -> None:
        """NET-19: the gate can tell, because no real destination is one of its own sockets."""
        assert attacked["inside"]["direct"][0] == ["127.0.0.1", 15001]

    def test_the_sandbox_has_its_own_local_servers(self, attacked: Seen) -> None:
        assert attacked["inside"]["own"] == ["mine", "mine", "mine"]

    @pytest.mark.parametrize("server", ["198.18.0.1", "8.8.8.8", "127.0.0.53", "2001:4860:4860::8888", "::1"])
    def test_a_query_to_any_server_is_answered_by_ours_as_if_by_that_one(
        self, attacked: Seen, server: str
    ) -> None:
        assert attacked["inside"]["dns"][server] == [server, "198.18.1.0"]

    def test_dns_over_tcp_arrives_at_the_dns_socket(self, attacked: Seen) -> None:
        assert attacked["inside"]["tcp_53"][0] == ["8.8.4.4", 53]

    def test_libc_finds_a_network_and_asks(self, attacked: Seen) -> None:
        """AI_ADDRCONFIG needs an address that is not loopback."""
        assert attacked["inside"]["getaddrinfo"] == ["198.18.1.0"]

    @pytest.mark.parametrize("what", ["udp 443", "udp 443 v6", "udp broadcast", "udp-lite", "multicast"])
    def test_other_datagrams_are_refused_at_once(self, attacked: Seen, what: str) -> None:
        """NET-04, NET-06, NET-30."""
        answer, seconds = attacked["inside"]["refused"][what]
        assert answer == "EPERM"
        assert seconds < 1

    @pytest.mark.parametrize(
        ("what", "said"), [("ping", "Packet filtered"), ("ping v6", "Administratively prohibited")]
    )
    def test_a_ping_is_told_that_it_is_prohibited(self, attacked: Seen, what: str, said: str) -> None:
        """NET-05."""
        (status, output), seconds = attacked["inside"]["refused"][what]
        assert status != 0
        assert said in output
        assert seconds < 2  # ping itself waits for its next turn

    def test_every_refused_packet_is_logged_and_the_counters_agree(self, attacked: Seen) -> None:
        logged = {(p["protocol"], p["destination"], p["destination_port"]) for p in attacked["packets"]}
        assert logged == {
            (17, "8.8.8.8", 443), (17, "2606:4700::1111", 443), (17, "192.0.2.255", 123), (136, "8.8.8.8", 443),
            (1, "9.9.9.9", None), (58, "2620:fe::fe", None), (17, "224.0.0.251", 5353),
        }  # fmt: skip
        assert attacked["counted"]["packets"] == len(attacked["packets"]) == len(logged)
        assert {p["prefix"] for p in attacked["packets"]} == {"egressd"}

    def test_connections_made_are_connections_seen(self, attacked: Seen) -> None:
        assert (
            len(attacked["connections"]) == 1 + len(attacked["inside"]["connect"]) + 3
        )  # a probe; pause, direct, dns

    def test_the_kernel_counted_what_was_accepted_and_received(self, attacked: Seen) -> None:
        """To each listener, in both families, redirected or straight to it (law 8)."""
        counted = attacked["counted"]
        assert counted["dns_connections"] > 0
        assert counted["connections"] + counted["dns_connections"] == len(attacked["connections"])
        assert counted["dns_datagrams"] == len(attacked["queries"])

    def test_the_sockets_are_not_the_sandboxs_own(self, attacked: Seen) -> None:
        """An ordinary user has only one uid to give; root gives the sockets one that the sandbox cannot have."""
        theirs = {"root": 65534, "rootless": 1000}[attacked["ground"].mode]
        assert attacked["inside"]["socket owners"] == [theirs]

    def test_half_closed_connections_are_not_forgotten(self, attacked: Seen) -> None:
        assert attacked["inside"]["conntrack"] == [86400, 86400, 1]

    def test_no_port_of_ours_can_be_taken(self, attacked: Seen) -> None:
        assert set(attacked["inside"]["theft"].values()) == {"EADDRINUSE"}

    def test_the_rules_and_routes_cannot_be_touched(self, attacked: Seen) -> None:
        """NET-07, NET-09."""
        assert attacked["inside"]["flush"]
        assert attacked["inside"]["route"]

    def test_the_rules_were_as_wanted(self, attacked: Seen) -> None:
        assert attacked["missing"] == []


class TestPower:
    def test_no_capability_is_left(self, attacked: Seen) -> None:
        status = attacked["inside"]["status"]
        assert {int(value, 16) for name, value in status.items() if name.startswith("Cap")} == {0}
        assert (status["NoNewPrivs"], status["Seccomp"], status["Groups"]) == ("1", "2", "")

    def test_the_host_sees_one_unprivileged_uid(self, attacked: Seen) -> None:
        expected = SANDBOX_UID if attacked["ground"].mode == "root" else attacked["ground"].owner
        assert attacked["command"]["uids"] == [expected]
        assert attacked["host_uid"] == expected

    def test_inside_there_is_one_uid_and_it_is_not_root(self, attacked: Seen) -> None:
        assert attacked["inside"]["ids"] == [1000, 1000, []]
        assert attacked["inside"]["uid_map"] == ["1000", "0", "1"]
        assert attacked["inside"]["account"] == [0, "sandbox\n"]

    def test_no_process_of_egressd_is_in_its_namespaces(self, attacked: Seen) -> None:
        assert attacked["command"]["neighbours"] == ["/usr/bin/python3", "bwrap"]
        assert attacked["inside"]["processes"] == ["1", "2"]

    def test_no_further_namespace_can_be_made_or_entered(self, attacked: Seen) -> None:
        """NET-26."""
        assert set(attacked["inside"]["unshare"].values()) == {"EPERM"}
        assert attacked["inside"]["unshare_program"]
        assert attacked["inside"]["setns"] == "EPERM"
        assert attacked["inside"]["mount"]

    def test_only_standard_streams_are_open(self, attacked: Seen) -> None:
        assert attacked["inside"]["fds"] == [0, 1, 2]

    def test_sockets_beside_the_network_namespace_do_not_exist(self, attacked: Seen) -> None:
        """NET-23 and raw sockets."""
        families = attacked["inside"]["families"]
        assert families.pop("route") == families.pop("unix") == "OPEN"
        assert "OPEN" not in families.values()

    def test_io_uring_does_not_exist(self, attacked: Seen) -> None:
        """NET-24."""
        assert attacked["inside"]["io_uring"] == ["ENOSYS"] * 3

    @pytest.mark.parametrize("way", ["chmod", "chmod g", "fchmod", "create", "create g", "mknod"])
    def test_no_set_uid_bit_reaches_the_disk(self, attacked: Seen, way: str) -> None:
        assert attacked["inside"]["setuid"][way] == "EPERM"
        assert attacked["inside"]["setuid"]["plain"] == "MADE"

    def test_kernel_settings_cannot_be_written(self, attacked: Seen) -> None:
        assert attacked["inside"]["core_pattern"] == "EACCES"

    def test_nothing_can_be_typed_into_a_terminal(self, attacked: Seen) -> None:
        assert attacked["inside"]["tiocsti"] == "EPERM"


class TestFiles:
    @pytest.mark.parametrize("path", ["/x", "/etc/x", "/usr/x", "/etc/resolv.conf", "/etc/hosts"])
    def test_the_system_is_read_only(self, attacked: Seen, path: str) -> None:
        assert attacked["inside"]["write"][path] in ("EROFS", "EACCES")

    @pytest.mark.parametrize("path", ["made-by-sandbox", "/tmp/x", "/run/x", "/dev/shm/x", "/var/tmp/x"])
    def test_the_workspace_and_temporary_places_are_writable(self, attacked: Seen, path: str) -> None:
        assert attacked["inside"]["write"][path] == "WROTE"

    def test_what_it_wrote_belongs_to_the_owner_of_the_workspace(self, attacked: Seen) -> None:
        ground = attacked["ground"]
        written = (ground.workspace / "made-by-sandbox").stat()
        assert (written.st_uid, written.st_gid) == (ground.owner, ground.owner)

    def test_the_callers_home_is_an_empty_one(self, attacked: Seen) -> None:
        assert attacked["inside"]["home"] == ["x"]  # what it made itself
        assert [path.name for path in attacked["ground"].home.iterdir()] == ["secret"]

    def test_host_sockets_are_out_of_sight(self, attacked: Seen) -> None:
        """NET-22."""
        assert set(attacked["inside"]["run"]) <= {"mount", "user", "x"}

    def test_devices_are_few(self, attacked: Seen) -> None:
        few = "core fd full null ptmx pts random shm stderr stdin stdout tty urandom zero"
        assert attacked["inside"]["dev"] == few.split()

    def test_the_environment_is_exactly_what_was_given(self, attacked: Seen) -> None:
        given = {"PATH", "LANG", "HOME", "PATHS", "XDG_RUNTIME_DIR", "PWD"}
        assert set(attacked["inside"]["environ"]) == given

    def test_the_first_process_shows_nothing_of_the_host(self, attacked: Seen) -> None:
        assert [entry.split("=")[0] for entry in attacked["inside"]["first_environ"]] == ["PATH", ""]
        assert attacked["inside"]["first_cmdline"][:6] == [
            "bwrap",
            "--args",
            "10",
            "--",
            "/usr/bin/env",
            "--",
        ]

    def test_the_resolver_and_the_name_are_the_sandboxs(self, attacked: Seen) -> None:
        assert attacked["inside"]["resolv"] == "nameserver 198.18.0.1\n"
        assert attacked["inside"]["hostname"] == ["sandbox", "127.0.0.1"]

    def test_a_masked_directory_is_empty_and_stays_where_it_is(self, attacked: Seen) -> None:
        masked = attacked["inside"]["masked directory"]
        assert masked["list"] == []
        assert masked["write"] in ("EROFS", "EACCES")
        assert (masked["rename"], masked["rename above"]) == ("EBUSY", "EBUSY")

    def test_a_masked_file_cannot_be_read_or_replaced(self, attacked: Seen) -> None:
        masked = attacked["inside"]["masked file"]
        assert (masked["list"], masked["write"]) == ("EACCES", "EACCES")
        assert (masked["rename"], masked["rename above"]) == ("EBUSY", "EBUSY")
        assert (attacked["ground"].workspace / "deep" / "key").read_text() == "CA"

    def test_a_read_only_bind_is_seen_and_not_changed(self, attacked: Seen) -> None:
        bind = attacked["inside"]["read-only bind"]
        assert (bind["list"], bind["write"], bind["rename"]) == (["read"], "EROFS", "EBUSY")


def test_probes_from_inside_see_what_the_command_will_see(attacked: Seen) -> None:
    answer = {"rcode": 0, "addresses": ["198.18.1.0"], "error": None}
    assert attacked["probes"] == [answer, answer, '[["203.0.113.9", 8443], "198.18.0.254"]']


def test_nothing_needs_to_be_told_to_the_operator(attacked: Seen) -> None:
    assert attacked["notes"] == []


def test_no_descriptor_is_left_behind(attacked: Seen) -> None:
    assert attacked["left"] == attacked["began"]
