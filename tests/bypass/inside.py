"""What attacks are made of: runs in the sandbox and outside of it, on any Python 3, standard library alone.

As a program it is a driver: one JSON line in is `{"code", "seconds"}`, one JSON line out `{"said", "status"}`; the code is run by
a process of its own with everything of this file in scope, and what it prints is what it said.
"""

import importlib
import json
import os
import re
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
from urllib.parse import unquote_to_bytes

WAIT = 3.0
RESOLVER = "198.18.0.1"
"""The sandbox's resolver."""
WITNESS = (2222, 443)
"""Ports of the witness: see `witness`."""


def say(*words):
    """Print one line."""
    print(*words, flush=True)


def shown(data):
    """Bytes as text that a test can match."""
    return data.decode("latin-1") if isinstance(data, bytes) else str(data)


def tcp(host, port, data=b"", read=65536, seconds=WAIT, family=0, pieces=0, pause=0.0, half_close=False):
    """Connect, send (`pieces` bytes at a time), return what comes until the end, `read` bytes or silence; OSError as text."""
    try:
        with socket.create_connection((host, port), seconds) as sock:
            sock.settimeout(seconds)
            parts = [data[n : n + pieces] for n in range(0, len(data), pieces)] if pieces else [data]
            for part in parts:
                if part:
                    sock.sendall(part)
                if pause:
                    time.sleep(pause)
            if half_close:
                sock.shutdown(socket.SHUT_WR)
            return receive(sock, read)
    except OSError as error:
        return f"{type(error).__name__}: {error}".encode()


def receive(sock, read=65536):
    """Read until the end, `read` bytes or a timeout, which is marked."""
    got = b""
    try:
        while len(got) < read:
            part = sock.recv(65536)
            if not part:
                return got + b"<EOF>"
            got += part
    except TimeoutError:
        return got + b"<SILENCE>"
    except OSError as error:
        return got + f"<{type(error).__name__}>".encode()
    return got


def udp(host, port, data=b"x", seconds=1.0, bind=None):
    """Send one datagram and return the answer, or why there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.settimeout(seconds)
            if bind is not None:
                sock.bind(bind)
            sock.connect((host, port))
            sock.send(data)
            return sock.recv(65536)
    except OSError as error:
        return f"{type(error).__name__}: {error}".encode()


def nameserver():
    """The resolver of this place: the sandbox's is egressd, outside it is the world's."""
    with open("/etc/resolv.conf") as lines:
        return next(line.split()[1] for line in lines if line.startswith("nameserver"))


def line(answer, most=300):
    """An answer in one line, cut: what tells of one of several tries."""
    return shown(answer).replace("\r", "").replace("\n", " | ")[:most]


def question(name, kind=1, ident=0x1234, flags=0x0100, klass=1, extra=b"", counts=(1, 0, 0, 0)):
    """A DNS query; `name` is text or, to be hostile, the wire bytes of the name."""
    if isinstance(name, str):
        labels = [label.encode("latin-1") for label in name.strip(".").split(".") if label]
        name = b"".join(bytes((len(label),)) + label for label in labels) + b"\0"
    return struct.pack("!6H", ident, flags, *counts) + name + struct.pack("!HH", kind, klass) + extra


def dns(name, kind=1, server=None, over="udp", seconds=WAIT, **more):
    """Ask (this place's resolver) and return `RCODE addresses…` as text (`NOERROR 198.18.1.0`), or what went wrong."""
    message = question(name, kind, **more)
    server = server or nameserver()
    if over == "udp":
        answer = udp(server, 53, message, seconds)
    else:
        answer = tcp(server, 53, struct.pack("!H", len(message)) + message, read=2, seconds=seconds)[2:]
    return read_dns(answer)


def read_dns(answer):
    """The response code and A records of a reply, loosely."""
    if len(answer) < 12 or b"Error: " in answer[:60]:
        return shown(answer)
    names = ("NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED")
    code = answer[3] & 15
    said = names[code] if code < len(names) else str(code)
    found = re.findall(rb"\x00\x01\x00\x01....\x00\x04(....)", answer, re.S)
    return " ".join([said, *(socket.inet_ntoa(address) for address in found)])


def hello(name="api.lab-origin.com", alpn=()):
    """The bytes of a real ClientHello."""
    outgoing = ssl.MemoryBIO()
    context = ssl._create_unverified_context()
    if alpn:
        context.set_alpn_protocols(list(alpn))
    try:
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name).do_handshake()
    except ssl.SSLWantReadError:
        pass
    return outgoing.read()


def tls(host, port=443, data=b"", name=None, alpn=(), via=None, seconds=WAIT, read=65536):
    """Speak TLS to host:port, or through the proxy, told `via` first, and return what comes; verified nowhere."""
    context = ssl._create_unverified_context()
    if alpn:
        context.set_alpn_protocols(list(alpn))
    try:
        with socket.create_connection(("127.0.0.1", 3128) if via else (host, port), seconds) as raw:
            raw.settimeout(seconds)
            if via:
                raw.sendall(via)
                first = raw.recv(4096)
                if b" 200" not in first.split(b"\r\n")[0]:
                    return first + receive(raw, read)
            with context.wrap_socket(raw, server_hostname=name, suppress_ragged_eofs=True) as sock:
                sock.sendall(data)
                return receive(sock, read)
    except OSError as error:
        return f"{type(error).__name__}: {error}".encode()


def get(path="/n", host="api.lab-origin.com", method="GET", head=b"", body=b"", close=True):
    """The bytes of a plain request."""
    end = b"Connection: close\r\n" if close else b""
    return f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n".encode("latin-1") + head + end + b"\r\n" + body


def proxy(data, **more):
    """Send bytes to the explicit proxy."""
    return tcp("127.0.0.1", 3128, data, **more)


def connect(authority, data=None, name=None, **more):
    """TLS with a request in it, through the explicit proxy; `authority` is text or bytes of the CONNECT."""
    target = authority if isinstance(authority, bytes) else authority.encode()
    return tls(
        "",
        data=get() if data is None else data,
        name=name,
        via=b"CONNECT " + target + b" HTTP/1.1\r\n\r\n",
        **more,
    )


def absolute(url, host=None, method="GET", head=b""):
    """A request in absolute form, to the explicit proxy; `url` is text or bytes."""
    target = url if isinstance(url, bytes) else url.encode()
    named = re.split(rb"[/?#]", target.split(b"://", 1)[-1])[0] if host is None else host.encode()
    parts = (
        method.encode(),
        b" ",
        target,
        b" HTTP/1.1\r\nHost: ",
        named,
        b"\r\n",
        head,
        b"Connection: close\r\n\r\n",
    )
    return proxy(b"".join(parts))


def run(*argv, seconds=8.0, text=None):
    """Run a program and return everything it said and its status."""
    ran = subprocess.run(argv, capture_output=True, timeout=seconds, input=text, text=True, errors="replace")
    return f"{ran.stdout}{ran.stderr}[{ran.returncode}]"


def named_host(data):
    """The Host of a request."""
    return (re.search(rb"(?i)\nhost: *([^\r\n]*)", data) or [b"", b""])[1]


def naive_proxy():
    """Serve on 127.0.0.1:3128 the proxy that many write first: it dials what is asked, as a browser's parser and the C
    library read it.
    """

    def pump(source, sink):
        try:
            while part := source.recv(65536):
                sink.sendall(part)
        except OSError:
            pass
        try:
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def serve(client):
        with client:
            client.settimeout(10)
            data = b""
            try:
                while b"\r\n\r\n" not in data:
                    part = client.recv(65536)
                    if not part:
                        return
                    data += part
                method, target = data.split(None, 2)[:2]
                rest = (
                    target
                    if method.upper() == b"CONNECT"
                    else re.split(rb"[/?#\\]", target.split(b"://", 1)[-1], maxsplit=1)[0]
                )
                rest = rest or named_host(data)  # origin form: some go where Host says
                rest = rest.rsplit(b"@", 1)[-1]
                host, _, port = (
                    rest.rpartition(b":") if b":" in rest and not rest.endswith(b"]") else (rest, b"", b"80")
                )
                name = (
                    unquote_to_bytes(host.strip(b"[]"))
                    .split(b"\0")[0]
                    .decode("utf-8", "replace")
                    .split("%")[0]
                )
                upstream = socket.create_connection((name, int(port.strip() or b"80")), 5)
            except (OSError, ValueError, UnicodeError) as error:
                client.sendall(b"HTTP/1.1 502 naive\r\n\r\n" + repr(error).encode())
                return
            with upstream:
                if method.upper() == b"CONNECT":
                    client.sendall(b"HTTP/1.1 200 naive\r\n\r\n")
                    left = data.split(b"\r\n\r\n", 1)[1]
                else:
                    left = data
                upstream.sendall(left)
                threading.Thread(target=pump, args=(client, upstream), daemon=True).start()
                pump(upstream, client)

    # Where a lab has two arenas, either proxy will do.
    listener = socket.create_server(("127.0.0.1", 3128), reuse_port=True)

    def accept():
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def witness(path):
    """Listen on every address of this place on the ports WITNESS, say `owned` to whom connects, and write it down in a file."""

    def accept(listener):
        while True:
            client, _ = listener.accept()
            with client, open(path, "a") as book:
                print(*client.getsockname()[:2], file=book, flush=True)
                client.sendall(b"owned\n")

    for port in WITNESS:
        listener = socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, reuse_port=True
        )
        threading.Thread(target=accept, args=(listener,), daemon=True).start()


def attempt(code, seconds):
    """Run code in a child of this process (a new Python costs more than most attacks) and return what it said and its status."""
    pipes = [os.pipe(), os.pipe()]
    child = os.fork()
    if child == 0:
        perform(code, [write for _, write in pipes])
    for _, write in pipes:
        os.close(write)
    said, reading, end = (
        {read: b"" for read, _ in pipes},
        [read for read, _ in pipes],
        time.monotonic() + seconds,
    )
    while reading:
        ready = select.select(reading, [], [], max(0, end - time.monotonic()))[0]
        for read in ready:
            part = os.read(read, 65536)
            said[read] += part
            if not part:
                reading.remove(read)
        if not ready:
            os.kill(child, signal.SIGKILL)
            said[pipes[1][0]] += b"<TOO LATE>"
            break
    for read, _ in pipes:
        os.close(read)
    return b"".join(said.values()), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def perform(code, outputs):
    """Be the child: its output goes to the two pipes, nothing else of the parent is open; never returns."""
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, output in enumerate(outputs, 1):
            os.dup2(output, number)
        os.closerange(3, 1024)
        exec(compile(code, "<attack>", "exec"), {"__name__": "__main__"})
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        status = 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:  # noqa: BLE001 # whatever it raised, it is said
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main():
    """Drive: run one piece of code after another."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path.insert(0, here)
    importlib.import_module("inside")  # which the children then have
    warnings.simplefilter("ignore")
    if "--proxy" in sys.argv:
        naive_proxy()
    if "--witness" in sys.argv:
        witness(sys.argv[sys.argv.index("--witness") + 1])
    say("ready")
    for line in sys.stdin:
        asked = json.loads(line)
        said, status = attempt(f"from inside import *\n{asked['code']}", asked["seconds"])
        say(json.dumps({"said": said.decode("latin-1")[-20000:], "status": status}))


_USED = (select,)  # for attacks

if __name__ == "__main__":
    main()
