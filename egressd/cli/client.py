"""How a verb speaks to the daemon: HTTP on its control socket, and what went wrong as an exit status."""

from __future__ import annotations

import http.client
import json
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
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
    return at(place, method, path, body)


def at(
    place: Path,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    fields: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Do the same at one control socket."""
    said = reach(place, method, path, body, fields)
    if said is None:
        fail(f"no daemon listens at {place}\nhint: `egressd serve` is one", COULD_NOT_RUN)
    return fit(said)


def reach(
    place: Path,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    fields: Mapping[str, str] | None = None,
) -> tuple[int, dict[str, Any]] | None:
    """Return the status and what whoever listens there says, None where nobody listens; exits with 3 where he cannot be heard."""
    connection = OverUnix(str(place))
    try:
        content = json.dumps(body) if body is not None else None
        said = dict(fields or {}) | ({"Content-Type": "application/json"} if content else {})
        connection.request(method, path, content, said)
        response = connection.getresponse()
        return response.status, dict(json.loads(response.read()))
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    except (OSError, http.client.HTTPException, ValueError, TypeError) as error:
        fail(f"{place}: {str(error) or type(error).__name__}", COULD_NOT_RUN)
    finally:
        connection.close()


def fit(said: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    """Return an answer that is one; exits with what a problem says."""
    status, answer = said
    if status >= 400:
        hint = f"\nhint: {answer['hint']}" if answer.get("hint") else ""
        fail(f"{answer.get('detail')}{hint}", _STATUS.get(status, COULD_NOT_RUN))
    return answer


_STATUS = {400: BAD_INPUT, 403: NO, 404: NO, 409: NO, 413: BAD_INPUT, 422: BAD_INPUT, 429: NO}


def fail(text: str, status: int) -> NoReturn:
    """Say why, and exit."""
    print(f"egressd: {text}", file=sys.stderr)
    raise typer.Exit(status)
