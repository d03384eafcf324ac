"""How a verb speaks to the daemon: HTTP on its control socket, and what went wrong as an exit status."""

from __future__ import annotations

import http.client
import json
import socket
import sys
from typing import Any, NoReturn

import typer

NO = 1
BAD_INPUT = 2
COULD_NOT_RUN = 3
_SECONDS = 60.0


class OverUnix(http.client.HTTPConnection):
    """A connection to a control socket."""

    def __init__(self, path: str) -> None:
        super().__init__("egressd", timeout=_SECONDS)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_SECONDS)
        self.sock.connect(self._path)


def is_there() -> bool:
    """Say whether a daemon listens; exits with 2 where the configuration that says where cannot be used."""
    from egressd.cli.options import given_config
    from egressd.control.config import ConfigError

    try:
        place = given_config().control_socket
    except ConfigError as error:
        fail(str(error), BAD_INPUT)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_SECONDS)
        try:
            sock.connect(str(place))
        except OSError:
            return False
    return True


def ask(method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the daemon's answer; exits with 1 for what is not there, 2 for bad input, 3 where nobody could be asked."""
    from egressd.cli.options import given_config
    from egressd.control.config import ConfigError

    try:
        place = given_config().control_socket
    except ConfigError as error:
        fail(str(error), BAD_INPUT)
    connection = OverUnix(str(place))
    try:
        content = json.dumps(body) if body is not None else None
        connection.request(method, path, content, {"Content-Type": "application/json"} if content else {})
        response = connection.getresponse()
        answer = json.loads(response.read())
    except (FileNotFoundError, ConnectionRefusedError):
        fail(f"no daemon listens at {place}\nhint: `egressd serve` is one", COULD_NOT_RUN)
    except (OSError, http.client.HTTPException, ValueError) as error:
        fail(f"{place}: {str(error) or type(error).__name__}", COULD_NOT_RUN)
    finally:
        connection.close()
    if response.status >= 400:
        said = (
            f"{answer.get('detail')}{chr(10)}hint: {answer['hint']}"
            if answer.get("hint")
            else answer.get("detail")
        )
        fail(str(said), _STATUS.get(response.status, COULD_NOT_RUN))
    return dict(answer)


_STATUS = {400: BAD_INPUT, 404: NO, 409: NO, 413: BAD_INPUT, 422: BAD_INPUT, 429: NO}


def fail(text: str, status: int) -> NoReturn:
    """Say why, and exit."""
    print(f"egressd: {text}", file=sys.stderr)
    raise typer.Exit(status)
