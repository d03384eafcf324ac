"""TLS as an attacker writes it: hellos made and cut by hand; runs beside `inside.py`, on any Python 3, standard library alone."""

import os
import socket
import ssl
import struct
import time

from inside import WAIT, receive

ECH = 0xFE0D  # draft-ietf-tls-esni: encrypted_client_hello


def vector(data, width=2):
    """A TLS vector: the length in `width` bytes, then the data."""
    return len(data).to_bytes(width, "big") + data


def extension(kind, body):
    """One extension of a hello."""
    return struct.pack("!H", kind) + vector(body)


def server_name(name):
    """The server_name extension for text, or for bytes that are no name."""
    raw = name.encode("latin-1") if isinstance(name, str) else name
    return extension(0, vector(b"\0" + vector(raw)))


def crafted(name=None, extra=b"", share=True, session=b""):
    """The bytes of a ClientHello of TLS 1.3 with an x25519 share, or with none, so that the server must ask again for one.

    Nobody holds the share's key: what comes back in the clear is all that can be read.
    """
    key = vector(struct.pack("!H", 29) + vector(os.urandom(32))) if share else vector(b"")
    extensions = (
        (server_name(name) if name is not None else b"")
        + extension(10, vector(struct.pack("!H", 29)))
        + extension(13, vector(struct.pack("!3H", 0x0403, 0x0804, 0x0401)))
        + extension(43, vector(struct.pack("!H", 0x0304), 1))
        + extension(51, key)
        + extra
    )
    body = b"\x03\x03" + os.urandom(32) + vector(session, 1) + vector(struct.pack("!2H", 0x1301, 0x1303))
    return recorded(b"\x01" + vector(body + vector(b"\0", 1) + vector(extensions), 3))


def recorded(handshake, size=16384):
    """Handshake bytes in records of `size` bytes each."""
    return b"".join(b"\x16\x03\x01" + vector(handshake[n : n + size]) for n in range(0, len(handshake), size))


def handshake_of(records):
    """The handshake bytes that records carry."""
    joined = b""
    while len(records) >= 5:
        size = int.from_bytes(records[3:5], "big")
        joined, records = joined + records[5 : 5 + size], records[5 + size :]
    return joined


def with_extension(hello, kind, body):
    """A hello with one more extension at its end: the lengths above it grow by as much."""
    message = handshake_of(hello)
    at = 4 + 2 + 32
    at += 1 + message[at]
    at += 2 + int.from_bytes(message[at : at + 2], "big")
    at += 1 + message[at]
    extensions = message[at + 2 :] + extension(kind, body)
    return recorded(message[:1] + vector(message[4:at] + vector(extensions), 3))


def context_for(alpn=(), old=None, client=None):
    """A client's context that verifies nothing; `old` is the one TLS version that it speaks, `client` its certificate's file."""
    context = ssl._create_unverified_context()
    if alpn:
        context.set_alpn_protocols(list(alpn))
    if old is not None:
        context.set_ciphers("DEFAULT@SECLEVEL=0")
        context.minimum_version = context.maximum_version = old
    if client is not None:
        context.load_cert_chain(client)
    return context


def tls_by(host, port, data, name, change, alpn=(), pause=0.0, seconds=WAIT, context=None, via=None):
    """Speak TLS, the first flight in the pieces that `change` makes of it, with pauses; returns what comes, or why not."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = (context or context_for(alpn)).wrap_bio(incoming, outgoing, server_hostname=name)
    first = True
    try:
        with socket.create_connection(("127.0.0.1", 3128) if via else (host, port), seconds) as sock:
            sock.settimeout(seconds)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if via:
                sock.sendall(via)
                sock.recv(4096)
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    flight = outgoing.read()
                    for n, piece in enumerate(change(flight) if first else [flight]):
                        time.sleep(pause if n else 0)
                        sock.sendall(piece)
                    first = False
                    part = sock.recv(65536)
                    if not part:
                        return b"<EOF in the handshake>"
                    incoming.write(part)
            tls.write(data)
            sock.sendall(outgoing.read())
            return inside_of(tls, incoming, sock)
    except OSError as error:
        return f"{type(error).__name__}: {error}".encode()


def inside_of(tls, incoming, sock):
    """Read what comes in a session until it ends or nothing comes."""
    got = b""
    while True:
        try:
            part = tls.read(65536)
            if not part:
                return got + b"<EOF>"
            got += part
        except ssl.SSLWantReadError:
            try:
                more = sock.recv(65536)
            except OSError as error:
                return got + f"<{type(error).__name__}>".encode()
            if not more:
                return got + b"<EOF>"
            incoming.write(more)
        except ssl.SSLError as error:
            return got + f"<{error.reason}>".encode()


def answer(host, data, port=443, seconds=WAIT, rest=0.2):
    """Send a flight and return the one that comes back: what follows its first bytes within `rest` seconds."""
    try:
        with socket.create_connection((host, port), seconds) as sock:
            sock.settimeout(seconds)
            sock.sendall(data)
            first = sock.recv(65536)
            sock.settimeout(rest)
            return first + (receive(sock) if first else b"<EOF>")
    except OSError as error:
        return f"<{type(error).__name__}>".encode()


def raw_alert(data):
    """What a plaintext answer to a hello is: the alert's name, `ServerHello…`, or the bytes."""
    names = {40: "handshake_failure", 49: "access_denied", 70: "protocol_version", 80: "internal_error"}
    names |= {112: "unrecognized_name", 10: "unexpected_message", 47: "illegal_parameter", 50: "decode_error"}
    if data[:1] == b"\x15" and len(data) >= 7:
        return f"alert {names.get(data[6], data[6])}"
    return "ServerHello" if data[:1] == b"\x16" and data[5:6] == b"\x02" else repr(data[:60])


def leaf(host, port=443, name=None, seconds=WAIT):
    """The server's certificate, PEM."""
    try:
        with socket.create_connection((host, port), seconds) as raw:
            raw.settimeout(seconds)
            with context_for().wrap_socket(raw, server_hostname=name) as sock:
                return ssl.DER_cert_to_PEM_cert(sock.getpeercert(True))
    except OSError as error:
        return f"{type(error).__name__}: {error}"
