"""A stand-in for a container engine on the host: whoever reaches its socket commands the machine.

`python -m egressd.lab.demo.daemon PATH` listens on a Unix socket that everybody may use, until it is killed.
"""

from __future__ import annotations

import os
import socketserver
import sys
from http.server import BaseHTTPRequestHandler

CONTAINERS = b'[{"Id": "0123456789ab", "Names": ["/production-database"]}]\n'


class _Answer(BaseHTTPRequestHandler):
    def address_string(self) -> str:
        """A peer on a Unix socket has no address."""
        return "unix"

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        """Lists the containers, whatever is asked."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTAINERS)))
        self.end_headers()
        self.wfile.write(CONTAINERS)


def main(path: str) -> None:
    """Serves until killed; a line on stdout says that it listens."""
    with socketserver.ThreadingUnixStreamServer(path, _Answer) as server:
        os.chmod(path, 0o666)  # noqa: S103 (a socket that everybody may use is the point)
        sys.stdout.write("listening\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
