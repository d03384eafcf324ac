"""HTTP/2 and WebSocket by hand, for attacks that no library would make: RFC 9113, RFC 7541 without its compression, RFC 6455."""

import base64
import os
import socket
import ssl
import time

from inside import WAIT, get

DATA, HEADERS, RST, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind, flags=0, stream=0, payload=b""):
    """One HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def fields(*pairs):
    """A block of literal fields, each name and value under 127 bytes."""
    return b"".join(
        b"\0" + b"".join(bytes((len(text),)) + text for text in (name.encode(), value.encode()))
        for name, value in pairs
    )


def asking(path="/n", host="h2.lab-origin.com", method="GET"):
    """The block of a request's head."""
    return fields((":method", method), (":scheme", "https"), (":authority", host), (":path", path))


def http2(frames, host="h2.lab-origin.com", seconds=WAIT, rest=0.0, quiet=None):
    """Send a preface and frames (an iterable of bytes) over HTTP/2; return what came as a list of (kind, flags, stream, payload),
    ended by `("end", reason)`. It is over when nothing came for `quiet` seconds (else `seconds`) once an answer has begun."""
    context = ssl._create_unverified_context()
    context.set_alpn_protocols(["h2"])
    got, ended = b"", "silence"
    try:
        with socket.create_connection((host, 443), seconds) as raw:  # noqa: SIM117 (one needs the other)
            with context.wrap_socket(raw, server_hostname=host, suppress_ragged_eofs=True) as sock:
                if sock.selected_alpn_protocol() != "h2":
                    return [("end", "no HTTP/2")]
                sock.settimeout(seconds)
                try:
                    sock.sendall(PREFACE + frame(SETTINGS))
                    for each in frames:
                        sock.sendall(each)
                        if rest:
                            time.sleep(rest)
                except OSError:
                    ended = "cut while sending"
                sock.settimeout(seconds)
                while True:
                    part = sock.recv(65536)
                    if not part:
                        ended = "closed"
                        break
                    got += part
                    if quiet is not None and any(each[0] in (DATA, RST, GOAWAY) for each in split(got)):
                        sock.settimeout(quiet)
    except TimeoutError:
        pass
    except OSError as error:
        ended = type(error).__name__
    return [*split(got), ("end", ended)]


def split(data):
    """The whole frames in some bytes."""
    found = []
    while len(data) >= 9:
        size = int.from_bytes(data[:3], "big")
        if len(data) < 9 + size:
            break
        found.append((data[3], data[4], int.from_bytes(data[5:9], "big"), data[9 : 9 + size]))
        data = data[9 + size :]
    return found


def told(frames):
    """What frames say, as text: by stream what came of a body, and how streams and the connection end."""
    said = {}
    for each in frames:
        if each[0] == DATA:
            said[each[2]] = said.get(each[2], "") + each[3].decode("latin-1")
        elif each[0] == RST:
            said[each[2]] = said.get(each[2], "") + f"<reset {int.from_bytes(each[3], 'big')}>"
        elif each[0] == GOAWAY:
            said["goaway"] = int.from_bytes(each[3][4:8], "big")
        elif each[0] == "end":
            said["end"] = each[1]
    return "\n".join(f"{stream}: {text}" for stream, text in said.items())


def websocket(host="api.lab-origin.com", path="/ws", head=b""):
    """Open a WebSocket; returns the TLS socket and the first line of the answer."""
    context = ssl._create_unverified_context()
    raw = socket.create_connection((host, 443), WAIT)
    sock = context.wrap_socket(raw, server_hostname=host, suppress_ragged_eofs=True)
    key = base64.b64encode(os.urandom(16))
    upgrade = (
        b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + key
    )
    sock.sendall(get(path, host, head=upgrade + b"\r\n" + head, close=False))
    got = b""
    while b"\r\n\r\n" not in got:
        part = sock.recv(1)
        if not part:
            break
        got += part
    return sock, got.split(b"\r\n")[0]


def message(opcode, payload=b"", final=True, length=None, masked=True, reserved=0):
    """One WebSocket frame; `length` is what its head claims."""
    size = len(payload) if length is None else length
    head = bytes((opcode | 128 * final | reserved << 4,))
    bit = 128 * masked
    if size < 126:
        head += bytes((bit | size,))
    elif size < 65536:
        head += bytes((bit | 126,)) + size.to_bytes(2, "big")
    else:
        head += bytes((bit | 127,)) + size.to_bytes(8, "big")
    return head + (b"\0\0\0\0" if masked else b"") + payload
