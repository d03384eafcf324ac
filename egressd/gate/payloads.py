"""What comes to a worker in sealed payloads, beside messages: names, levels, issuers. Control made them all."""

from __future__ import annotations

import json
from ipaddress import IPv4Address

from pydantic import TypeAdapter

from egressd.gate.limits import Level
from egressd.gate.tls.leaves import Issuer
from egressd.policy.attempt import Name
from egressd.policy.names import parse_name

_LEVELS = TypeAdapter(list[Level])


def read_pairs(payload: bytes) -> list[tuple[Name, IPv4Address]]:
    """Return the synthetic pairs of a JSON list of [name, address]; raises ValueError."""
    pairs = []
    for text, address in json.loads(payload):
        name = parse_name(text)
        if not isinstance(name, tuple):
            raise ValueError("synthetic pair")
        pairs.append((name, IPv4Address(address)))
    return pairs


def read_levels(payload: bytes) -> list[Level]:
    """Return the levels of a JSON list of [owner, kind, tokens, age]; raises ValueError."""
    return _LEVELS.validate_json(payload)


def read_issuer(payload: bytes) -> Issuer:
    """Return the issuer of a JSON object of PEM texts `chain` and `key`; raises ValueError."""
    fields = json.loads(payload)
    return Issuer.from_pem(fields["chain"].encode(), fields["key"].encode())
