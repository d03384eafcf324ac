"""The sender's side of the books: what a sandbox sent, counted on its own loopback by packet capture.

In a sandbox every connection and every query is redirected to a port on `lo`, so each of them crosses `lo` once; what is refused
there is answered on `lo` by one ICMP error for each packet. Nothing of egressd takes part in the count.

`python -m egressd.lab.demo.tally` counts in the network namespace it is started in, until its input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from egressd.lab.capture import Capture
from egressd.lab.lab import Lab, clean_env
from egressd.lab.sightings import Flow

CONNECTION_PORTS = frozenset({15001, 3128})
DNS_PORT = 15053
_PROHIBITED = {
    ("icmp", 3): 13,
    ("icmp6", 1): 1,
}  # (protocol, type): code; RFC 1812 section 5.2.7.1, RFC 4443 section 3.1
_HEADERS = {"icmp": 20, "icmp6": 40}
_SECONDS = 10.0


@dataclass
class Sent:
    """What was counted: TCP openings, DNS datagrams, DNS connections, refusals of packets, packets that the count missed."""

    connections: int = 0
    dns_udp: int = 0
    dns_tcp: int = 0
    refused_packets: int = 0
    missed: int = 0


class Counter:
    """Counts packets as `Capture` shows them; an opening that is sent again is one opening."""

    def __init__(self) -> None:
        self._openings: dict[int, set[bytes]] = {}
        self._counted = Sent()

    def see(self, flow: Flow, packet: bytes) -> None:
        """Counts one packet, given from its IP header on."""
        if flow.protocol == "tcp":
            segment = packet[40 if packet[0] >> 4 == 6 else (packet[0] & 15) * 4 :]
            if (
                len(segment) >= 14 and segment[13] & 0x12 == 0x02
            ):  # SYN without ACK: ports and number tell it apart
                self._openings.setdefault(flow.port, set()).add(flow.source.encode() + segment[:8])
        elif (flow.protocol, flow.port) == ("udp", DNS_PORT):
            self._counted.dns_udp += 1
        elif (code := _PROHIBITED.get((flow.protocol, flow.port))) is not None:
            header = 40 if flow.protocol == "icmp6" else (packet[0] & 15) * 4
            self._counted.refused_packets += packet[header + 1 : header + 2] == bytes((code,))

    def sent(self, missed: int) -> Sent:
        """Returns what was counted so far."""
        openings = {port: len(seen) for port, seen in self._openings.items()}
        self._counted.connections = sum(openings.get(port, 0) for port in CONNECTION_PORTS)
        self._counted.dns_tcp = openings.get(DNS_PORT, 0)
        self._counted.missed = missed
        return self._counted


class Tally:
    """A count that runs in the network namespace of a sandbox; `stop` ends it and returns what was counted."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self._process = process

    @classmethod
    def start(cls, lab: Lab, run_pid: int) -> Self:
        """Starts to count in the sandbox of an `egressd run` process. Raises LookupError where there is none."""
        inside = sandbox_process(run_pid, lab.netns_inode("host"))
        enter = ["nsenter", f"--net=/proc/{inside}/ns/net"]
        if lab.rootless:
            # Only its owner has power over the namespace, and only from within the user namespace that owns it.
            enter += [f"--user=/proc/{inside}/ns/user", "--preserve-credentials"]
        package = str(Path(__file__).resolve().parents[3])
        process = lab.popen_host(
            [*enter, "--", sys.executable, "-P", "-m", __name__],
            env=clean_env(lab) | {"PYTHONPATH": package},
            stdin=subprocess.PIPE,
        )
        assert process.stdout is not None
        if process.stdout.readline() != "counting\n":
            _, said = process.communicate(timeout=_SECONDS)
            raise LookupError(f"could not count in the sandbox's network: {said.strip()}")
        return cls(process)

    def stop(self) -> Sent:
        """Ends the count; may be called once."""
        output, said = self._process.communicate(timeout=_SECONDS)
        if self._process.returncode != 0:
            raise LookupError(f"the count in the sandbox's network broke off: {said.strip()}")
        return Sent(**json.loads(output))


def sandbox_process(run_pid: int, outside: int) -> int:
    """Returns a process of the sandbox below `run_pid`: its network namespace is not the one with inode `outside`."""
    for child in _children(run_pid):
        with contextlib.suppress(OSError):  # ended, or one that nobody may look into: none of the sandbox's
            if os.stat(f"/proc/{child}/ns/net").st_ino != outside:
                return child
    raise LookupError(f"process {run_pid} has no child in another network namespace")


def _children(pid: int) -> Iterator[int]:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            yield from map(int, (thread / "children").read_text().split())


def main() -> None:
    """Counts until standard input ends, then prints what was counted as one JSON line."""
    counter = Counter()
    capture = Capture("sandbox", "lo", counter.see)
    with selectors.DefaultSelector() as selector:
        selector.register(capture, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        sys.stdout.write("counting\n")
        sys.stdout.flush()
        while not any(key.fileobj is sys.stdin for key, _ in selector.select()):
            capture.drain()
    capture.drain()
    sys.stdout.write(json.dumps(asdict(counter.sent(capture.lost()))) + "\n")


if __name__ == "__main__":
    main()
