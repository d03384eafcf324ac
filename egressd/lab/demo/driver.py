"""The driver: makes one move after another with real clients and tells what the client saw.

Runs on whatever Python 3 the system has, standard library alone, in the sandbox and outside of it. Protocol: it says
`ready`; then one JSON line of standard input is a move, one JSON line of standard output its outcome; the end of the
input ends the program.

A move is `{"tool", "argv", "wants"}`: `wants` is text that only success shows. The outcome is `{"ok", "saw", "requests",
"packets"}`: `saw` is one line, `requests` how many HTTP requests the client itself says it sent, `packets` how many
datagrams and pings were sent.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile

READY = "ready"
SECONDS = 8.0
"""The longest that one client may take."""
_LONGEST = 160
_DENIED = "egressd: denied: "
_MADE = "made on purpose by the demo"

# No configuration of the machine or of its user, and nobody who could be asked for a password.
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_AUTHOR_NAME": "demo",
    "GIT_AUTHOR_EMAIL": "demo@lab-origin.com",
    "GIT_COMMITTER_NAME": "demo",
    "GIT_COMMITTER_EMAIL": "demo@lab-origin.com",
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_ROOT_USER_ACTION": "ignore",
}


class Outcome(dict[str, object]):
    """What came of a move, ready to be printed as JSON."""

    def __init__(self, ok: bool, saw: str, requests: int = 0, packets: int = 0) -> None:
        line = " ".join(saw.split())
        shown = line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
        super().__init__(ok=ok, saw=shown or "nothing", requests=requests, packets=packets)


def curl(argv: list[str], wants: str, folder: str) -> Outcome:
    """Runs curl; it succeeded if the last answer is a 2xx and holds `wants`.

    `wants` may also be `stream:SECONDS`, the least time between the first byte and the last, or `bytes:N`, the size.
    """
    body = os.path.join(folder, "body")
    written = "%{http_code} %{size_download} %{time_starttransfer} %{time_total}"
    ran = _run(["curl", "-qgsSv", "-m", str(SECONDS), "-o", body, "-w", written, *argv])
    methods = re.findall(r"^> ([A-Z]+) \S+ HTTP/", ran.stderr, re.M)
    tunnels = methods.count(
        "CONNECT"
    )  # asked of the proxy, which answers first; what is asked of the site comes after
    requests = len(methods) - tunnels
    problem = _last(re.findall(r"^curl: (\(\d+\) .*)", ran.stderr, re.M))
    if ran.returncode != 0 or problem:
        if "--unix-socket" in argv and not os.path.exists(argv[argv.index("--unix-socket") + 1]):
            problem = "there is no such socket"
        return Outcome(False, f"curl: {problem or ran.returncode}", requests)
    codes = re.findall(r"^< HTTP/\S+ (\d{3})", ran.stderr, re.M)[tunnels:]
    _, size, first, last = ran.stdout.split()
    text = _read(body)
    line = text.partition("\n")[0].replace(_DENIED, "")
    if wants.startswith("stream:"):
        came = float(last) - float(first)
        ok = came >= float(wants.partition(":")[2])
        line = f"{text.count('data:')} events as they came, over {came:.2f} s"
    elif wants.startswith("bytes:"):
        ok = size == wants.partition(":")[2]
        line = f"{int(size):,} bytes in {float(last):.2f} s"
    else:
        ok = wants in text
    return Outcome(ok and _last(codes).startswith("2"), f"{', then '.join(codes)} {line}", requests)


def git(argv: list[str], _wants: str, folder: str) -> Outcome:
    """Runs git in a fresh repository with one commit; it succeeded if it says so."""
    trace = os.path.join(folder, "trace")
    _run(["git", "init", "-q", "-b", "main", folder])
    _run(["git", "-C", folder, "commit", "-q", "--allow-empty", "-m", _MADE])
    traced = {"GIT_TRACE_CURL": trace, "GIT_TRACE_CURL_NO_DATA": "1"}
    ran = _run(["git", "-C", folder, *argv], traced)
    sent = re.findall(r"=> Send header: (?:[A-Z]+) \S+ HTTP/", _read(trace))
    told = [
        line for line in ran.stderr.splitlines() if line.startswith(("remote: egressd", "fatal:", "error:"))
    ]
    line = told[0] if told else _last(ran.stderr.splitlines())
    return Outcome(ran.returncode == 0, line.replace(_DENIED, ""), len(sent))


def pip(argv: list[str], wants: str, folder: str) -> Outcome:
    """Runs `pip install` into an empty folder; it succeeded if the module `wants` is there afterwards."""
    fixed = [
        "install",
        "-vvv",
        "--retries",
        "0",
        "--no-input",
        "--no-cache-dir",
        "--no-compile",
        "--target",
        folder,
    ]
    ran = _run([sys.executable, "-m", "pip", *fixed, *argv])
    said = ran.stdout + ran.stderr
    answers = re.findall(r'"[A-Z]+ \S+ HTTP/[\d.]+" (\d{3})', said)
    ok = ran.returncode == 0 and os.path.exists(os.path.join(folder, wants))
    told = re.findall(r"^\s*((?:Successfully installed|ERROR:).*)", said, re.M)
    denied = re.findall(r"(\d{3} Client Error: egressd.*?)(?: for url|$)", said, re.M)
    line = (told or [_last(said.splitlines())])[-1] if ok or not denied else denied[0].replace(_DENIED, "")
    return Outcome(ok, line, len(answers))


def dig(argv: list[str], wants: str, _folder: str) -> Outcome:
    """Runs dig once; it succeeded if the answer holds `wants`."""
    ran = _run(["dig", "+time=2", "+tries=1", "+nocmd", "+nostats", "+noauthority", *argv])
    answers = re.findall(r"^[^;\s]\S*\s+\d+\s+IN\s+\S+\s+(.*)", ran.stdout, re.M)
    status = _last(re.findall(r"status: (\w+)", ran.stdout)) or _last(ran.stdout.splitlines())
    why = re.findall(r"^; EDE: .*?\(egressd (.*)\)", ran.stdout, re.M)
    said = " ".join([status, *answers]) + (f": {why[0]}" if why else "")
    return Outcome(any(wants in answer for answer in answers), said)


def ping(argv: list[str], wants: str, _folder: str) -> Outcome:
    """Sends one echo request; it succeeded if the reply came."""
    ran = _run(["ping", "-c", "1", "-W", "1", *argv])
    sent = re.search(r"(\d+) packets transmitted", ran.stdout)
    lines = (ran.stdout + ran.stderr).splitlines()
    told = [
        line
        for line in lines
        if wants in line or "filtered" in line or "prohibited" in line or "ping:" in line
    ]
    return Outcome(wants in ran.stdout, (told or lines or [""])[0], 0, int(sent.group(1)) if sent else 0)


def udp(argv: list[str], wants: str, _folder: str) -> Outcome:
    """Sends one datagram to `[address, port]`; it succeeded if the reply holds `wants`."""
    family = socket.AF_INET6 if ":" in argv[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.settimeout(2)
        client.connect((argv[0], int(argv[1])))
        try:
            client.send(_MADE.encode())
            reply = client.recv(4096).decode("latin-1")
        except OSError as error:
            return Outcome(False, f"{type(error).__name__}: {error}", 0, 1)
    return Outcome(wants in reply, f"reply: {reply}", 0, 1)


def tcp(argv: list[str], wants: str, _folder: str) -> Outcome:
    """Connects to `[host, port]` and speaks first, like ssh; it succeeded if what comes back holds `wants`."""
    try:
        with socket.create_connection((argv[0], int(argv[1])), 5) as client:
            client.sendall(b"SSH-2.0-demo\r\n")
            reply = client.recv(4096).decode("latin-1")
    except OSError as error:
        return Outcome(False, f"{type(error).__name__}: {error}")
    return Outcome(wants in reply, f"greeted: {reply}" if reply else "closed without a word")


TOOLS = {each.__name__: each for each in (curl, git, pip, dig, ping, udp, tcp)}


def _run(argv: list[str], more: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **_ENVIRONMENT, **(more or {})}
    try:
        return subprocess.run(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=SECONDS + 2,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(argv, 127, "", f"{type(error).__name__}: {error}")


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="backslashreplace") as file:
            return file.read(1 << 20)
    except OSError:
        return ""


def _last(lines: list[str]) -> str:
    return lines[-1] if lines else ""


def main() -> None:
    """Serves standard input to its end."""
    _say(READY)
    for line in sys.stdin:
        move = json.loads(line)
        with tempfile.TemporaryDirectory() as folder:
            outcome = TOOLS[move["tool"]](move["argv"], move["wants"], folder)
        _say(json.dumps(outcome))


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
