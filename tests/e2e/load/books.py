"""The books of the sender: what was sent, and what became of each HTTP request."""

from __future__ import annotations

import ssl
import threading
from collections import Counter
from typing import Any


class Load:
    """The books of the sender, and what its attempts share."""

    def __init__(self, tunnel_ca: str) -> None:
        self.sent: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.requests: dict[int, list[Any]] = {}
        """By serial number: what it was, and the status that came back or None."""
        self.trusting = ssl.create_default_context()
        self.inner = ssl.create_default_context(cafile=tunnel_ca)
        self.addresses: dict[str, str] = {}
        self.lock = threading.Lock()

    def count(self, what: str) -> None:
        """Count one attempt that is about to be sent."""
        with self.lock:
            self.sent[what] += 1

    def total(self) -> int:
        """How many attempts were sent."""
        return sum(self.sent.values()) + len(self.requests)

    def serial(self, kind: str) -> int:
        """Return the number of a new request."""
        with self.lock:
            number = len(self.requests) + 1
            self.requests[number] = [kind, None]
            return number
