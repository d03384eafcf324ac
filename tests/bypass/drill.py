"""What every drill does: rules, tries, and the account of what got out."""

from __future__ import annotations

import collections

from egressd.lab import Lab, topology
from egressd.lab.stand import Stand
from tests.bypass import arena as ground
from tests.bypass.arena import Driver
from tests.e2e.conftest import until

RULES = ground.RULES.replace(
    "  - id: wild\n",
    "  - id: raw\n    hosts: [deb.debian.org]\n    treatment: relay\n    ports: [22]\n  - id: wild\n",
)
OK = "say(shown(tls('api.lab-origin.com', 443, get(), 'api.lab-origin.com', seconds={0})))"
TRIES = (
    "import threading\nfrom inside_frames import *\n"
    "tries = dict(\n"
    " api=lambda: tls('api.lab-origin.com', 443, get(), 'api.lab-origin.com', seconds=0.8),\n"
    " mirrored=lambda: tls('api.lab-origin.com', 443, get(), 'api.lab-origin.com', alpn=('h2', 'http/1.1'), seconds=0.8),\n"
    " upload=lambda: tls('api.lab-origin.com', 443, get('/upload', method='POST', head=b'Content-Length: 4\\r\\n', "
    "body=b'data'),"
    " 'api.lab-origin.com', seconds=0.8),\n"
    " plain=lambda: tcp('www.lab-origin.com', 80, get('/n', 'www.lab-origin.com'), seconds=0.8),\n"
    " proxied=lambda: connect('api.lab-origin.com:443', get(), 'api.lab-origin.com', seconds=0.8),\n"
    " tunnel=lambda: tls('api.anthropic.com', 443, get('/n', 'api.anthropic.com'), 'api.anthropic.com', seconds=0.8),\n"
    " relay=lambda: tcp('deb.debian.org', 22, b'x', seconds=0.8),\n"
    " evil=lambda: tls('evil-lab.com', 443, get('/', 'evil-lab.com'), 'evil-lab.com', seconds=0.8),\n"
    " literal=lambda: tcp('11.6.6.6', 80, get('/', 'x'), seconds=0.8),\n"
    " metadata=lambda: tcp('169.254.169.254', 80, get('/', 'x'), seconds=0.8),\n"
    " datagram=lambda: udp('11.6.6.6', 443),\n"
    " name=lambda: dns('evil-lab.com', seconds=0.8),\n"
    " two=lambda: str(http2([frame(1, 5, 1, asking())], seconds=0.8)).encode(),\n"
    " fresh=lambda: dns('fresh%d.lab-origin.com' % os.getpid(), seconds=0.8),\n"
    ")\n"
    "def make(name):\n"
    " try:\n  said = shown(tries[name]())\n except OSError as error:\n  said = type(error).__name__\n"
    " say(name + ' ' + ' '.join(said.split())[:150])\n"
    "tasks = [threading.Thread(target=make, args=(name,)) for name in tries]\n"
    "for task in tasks: task.start()\n"
    "for task in tasks: task.join()"
)
"""Everything once, at the same time: what is allowed in each treatment, and what is denied in each layer."""


ALONE = (
    "say(dns('api.lab-origin.com', seconds=0.5), shown(tcp('11.6.6.6', 80, get('/', 'x'), seconds=0.5)))\n"
    "say(shown(tls('198.18.1.0', 443, get(), 'api.lab-origin.com', seconds=1)))"
)
"""What can be tried where nobody answers: without the library's patience with names. The address is the first name's."""


def works(driver: Driver, seconds: float = 10.0) -> None:
    """An allowed request gets through, before long."""
    until(lambda: "200 OK" in driver.run(OK.format(3)), seconds, "an allowed request works again")


def accounted(lab: Lab, stand: Stand, mark: int) -> None:
    """No request arrived and no connection left without an allow in the journal; nothing that is denied arrived at all."""
    records = stand.records()[mark:]
    allows = collections.Counter(
        record["layer"]
        for record in records
        if record["event"] == "decision" and record["verdict"] == "allow"
    )
    seen = [request for request in lab.requests() if request.host != "api.anthropic.com"]  # in a tunnel
    assert len(seen) <= allows["request"], (len(seen), allows)
    names = (topology.DNS, topology.DNS_V6)
    flows = [flow for flow in lab.packets("host") if flow.protocol == "tcp" and flow.address not in names]
    opened = sum(flow.openings for flow in flows)
    assert opened <= 2 * (allows["connection"] + allows["request"]), (flows, allows)
    assert lab.attacker_hits() == []
    assert lab.metadata_hits() == []
    assert lab.packets_lost() == 0
