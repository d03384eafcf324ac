"""A load balancer in miniature: `by_hop.py ADDRESS PORT SOURCE|none USER TOKEN` sends a PROXY header, then a CONNECT."""

from __future__ import annotations

import base64
import socket
import struct
import sys


def main(address: str, port: str, source: str, user: str, token: str) -> str:
    with socket.create_connection((address, int(port)), 10) as sock:
        said = b""
        if source != "none":
            ends = (
                socket.inet_aton(source) + socket.inet_aton(address) + struct.pack("!HH", 40_000, int(port))
            )
            said = b"\r\n\r\n\0\r\nQUIT\n\x21\x11" + struct.pack("!H", len(ends)) + ends
        basic = base64.b64encode(f"{user}:{token}".encode())
        said += (
            b"CONNECT api.lab-origin.com:443 HTTP/1.1\r\nProxy-Authorization: Basic " + basic + b"\r\n\r\n"
        )
        sock.sendall(said)
        try:
            return sock.recv(100).decode("latin-1")
        except ConnectionResetError:
            return "reset"


if __name__ == "__main__":
    sys.stdout.write(main(*sys.argv[1:]))
