"""The kinds of attempts, and how often each is made."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable

from .books import Load
from .http2 import fields_of, frame, read_streams
from .wire import (
    PATIENCE,
    RESOLVER,
    Reader,
    address_of,
    ask,
    connected,
    get,
    head,
    hello,
    question,
    reset,
    secured,
    tls,
)

API, PLAIN, READ_ONLY = "api.lab-origin.com", "www.lab-origin.com", "read-only.wild.lab-origin.com"
TUNNELLED, RELAYED, DENIED = "api.anthropic.com", "deb.debian.org", "evil-lab.com"
PROXY = "127.0.0.1", 3128

Kind = Callable[[Load, random.Random], None]


# HTTP that is allowed


def new_connection(load: Load, chance: random.Random) -> None:
    with secured(load, API) as stream:
        get(load, "allowed", stream, Reader(stream), API)


def kept_connection(load: Load, chance: random.Random) -> None:
    with secured(load, API) as stream:
        reader = Reader(stream)
        for _ in range(chance.randint(2, 9)):
            get(load, "allowed", stream, reader, API)


def plain_connection(load: Load, chance: random.Random) -> None:
    with connected(load, address_of(load, PLAIN), 80) as sock:
        reader = Reader(sock)
        for _ in range(chance.randint(1, 9)):
            get(load, "allowed", sock, reader, PLAIN)


def upload(load: Load, chance: random.Random) -> None:
    size = chance.choice([0, 1, 1000, 70_000, 300_000])
    with secured(load, API) as stream:
        number = load.serial("allowed")
        stream.sendall(head(number, API, "POST", "/upload", f"content-length: {size}") + bytes(size))
        Reader(stream).answer(load, number)


def slow_reader(load: Load, chance: random.Random) -> None:
    with secured(load, API) as stream:
        get(
            load,
            "allowed",
            stream,
            Reader(stream),
            API,
            "GET",
            "/big?bytes=200000",
            pause=chance.choice([0.0, 0.02, 0.1]),
        )


def by_proxy(load: Load, chance: random.Random) -> None:
    with connected(load, *PROXY) as sock:
        if chance.random() < 0.5:
            number = load.serial("allowed")
            sock.sendall(head(number, PLAIN, "GET", f"http://{PLAIN}/"))
            Reader(sock).answer(load, number)
            return
        host = chance.choice([API, DENIED])
        sock.sendall(f"CONNECT {host}:443 HTTP/1.1\r\nhost: {host}:443\r\n\r\n".encode())
        reader = Reader(sock)
        while reader.line():
            pass
        with tls(load, sock, host) as stream:
            get(load, "allowed" if host == API else "denied", stream, Reader(stream), host)


def http2(load: Load, chance: random.Random) -> None:
    """A client that prefers HTTP/2 and takes what it gets."""
    with secured(load, API, alpn=("h2", "http/1.1")) as stream:
        if stream.selected_alpn_protocol() != "h2":
            get(load, "allowed", stream, Reader(stream), API)
            return
        numbers = [load.serial("allowed") for _ in range(chance.randint(1, 5))]
        stream.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
        for stream_id, number in enumerate(numbers):
            stream.sendall(frame(1, 5, 2 * stream_id + 1, fields_of(API, f"/id{number}")))
        read_streams(load, stream, Reader(stream), numbers)


def tunnel(load: Load, chance: random.Random) -> None:
    with (
        connected(load, address_of(load, TUNNELLED), 443) as sock,
        load.inner.wrap_socket(sock, server_hostname=TUNNELLED) as stream,
    ):
        stream.sendall(f"GET /n HTTP/1.1\r\nhost: {TUNNELLED}\r\n\r\n".encode())
        stream.recv(4096)


def relay(load: Load, chance: random.Random) -> None:
    with connected(load, address_of(load, RELAYED), 22) as sock:
        sock.recv(100)
        time.sleep(chance.choice([0.0, 0.0, 1.0]))
        if chance.random() < 0.5:
            reset(sock)


# what is denied


def denied_name(load: Load, chance: random.Random) -> None:
    with secured(load, DENIED) as stream:
        get(load, "denied", stream, Reader(stream), DENIED)


def denied_name_plain(load: Load, chance: random.Random) -> None:
    with connected(load, address_of(load, DENIED), 80) as sock:
        get(load, "denied", sock, Reader(sock), DENIED)


def denied_requests(load: Load, chance: random.Random) -> None:
    with secured(load, READ_ONLY) as stream:
        reader = Reader(stream)
        for method, path in chance.sample(
            [("GET", "/open/"), ("GET", "/private/"), ("POST", "/open/"), ("DELETE", "/open/")], 3
        ):
            get(load, "any", stream, reader, READ_ONLY, method, path)


def other_host(load: Load, chance: random.Random) -> None:
    with connected(load, address_of(load, PLAIN), 80) as sock:
        get(load, "denied", sock, Reader(sock), DENIED)


def other_server_name(load: Load, chance: random.Random) -> None:
    with secured(load, API, sni=DENIED):
        pass


def metadata(load: Load, chance: random.Random) -> None:
    address = chance.choice(["169.254.169.254", "fd00:ec2::254", "198.18.40.1", "11.6.6.6", "10.20.0.7"])
    with connected(load, address, 80) as sock:
        get(load, "denied", sock, Reader(sock), address if "." in address else f"[{address}]")


def our_own_listener(load: Load, chance: random.Random) -> None:
    with connected(load, chance.choice(["127.0.0.1", "::1"]), 15001) as sock:
        sock.recv(1)


# what is no request, and what is broken off


def garbage(load: Load, chance: random.Random) -> None:
    where = chance.choice([(address_of(load, API), 443), (address_of(load, PLAIN), 80), PROXY])
    with connected(load, *where) as sock:
        sock.sendall(chance.randbytes(chance.randint(1, 300)))
        sock.shutdown(socket.SHUT_WR)
        sock.recv(100)


def half(load: Load, chance: random.Random) -> None:
    """The beginning of a hello or a head, and then no more, or a while of silence, or the rest byte by byte."""
    whole, port, name = chance.choice(
        [(hello(API), 443, API), (b"GET / HTTP/1.1\r\nhost: " + PLAIN.encode(), 80, PLAIN)]
    )
    with connected(load, address_of(load, name), port) as sock:
        cut = chance.randint(1, len(whole) - 1)
        sock.sendall(whole[:cut])
        how = chance.random()
        if how < 0.3:
            reset(sock)
        elif how < 0.6:
            time.sleep(0.3)
        elif how < 0.65:
            sock.recv(1)  # until the door has had enough of waiting


def gone_at_once(load: Load, chance: random.Random) -> None:
    address = chance.choice(
        [address_of(load, API), address_of(load, DENIED), address_of(load, RELAYED), PROXY[0]]
    )
    with connected(
        load, address, {PROXY[0]: PROXY[1], address_of(load, RELAYED): 22}.get(address, 443)
    ) as sock:
        if chance.random() < 0.7:
            reset(sock)


def gone_in_a_request(load: Load, chance: random.Random) -> None:
    with secured(load, API) as stream:
        whole = head(load.serial("broken off"), API, "POST", "/upload", "content-length: 90000") + bytes(
            90_000
        )
        stream.sendall(whole[: chance.randint(1, len(whole) - 1)])
        reset(stream)


def gone_before_the_response(load: Load, chance: random.Random) -> None:
    with secured(load, API) as stream:
        stream.sendall(head(load.serial("broken off"), API))
        reset(stream)


def gone_in_a_response(load: Load, chance: random.Random) -> None:
    with secured(load, API) as stream:
        stream.sendall(head(load.serial("broken off"), API, "GET", "/big?bytes=3000000"))
        stream.recv(chance.randint(1, 16384))
        reset(stream)


# names and packets


def some_name(chance: random.Random) -> str:
    return chance.choice(
        [
            API,
            PLAIN,
            DENIED,
            f"n{chance.randint(1, 300)}.wild.lab-origin.com",
            f"x{chance.randint(1, 999)}.evil-lab.com",
        ]
    )


def name_query(load: Load, chance: random.Random) -> None:
    server = chance.choice(
        [RESOLVER, RESOLVER, RESOLVER, ("8.8.8.8", 53), ("2001:4860:4860::8888", 53), ("127.0.0.1", 15053)]
    )
    ask(load, some_name(chance), chance.choice([1, 1, 1, 28, 16, 12, 255]), server)


def odd_datagram(load: Load, chance: random.Random) -> None:
    whole = question(some_name(chance))
    ask(
        load,
        "",
        message=chance.choice(
            [b"", chance.randbytes(40), whole[: chance.randint(1, len(whole))], whole + bytes(5000)]
        ),
    )


def names_over_tcp(load: Load, chance: random.Random) -> None:
    with socket.socket() as sock:
        sock.settimeout(PATIENCE)
        load.count("dns_tcp")
        sock.connect(chance.choice([RESOLVER, ("9.9.9.9", 53), ("127.0.0.1", 15053)]))
        messages = [
            question(some_name(chance), chance.choice([1, 28]), n) for n in range(chance.randint(0, 4))
        ]
        framed = b"".join(len(message).to_bytes(2, "big") + message for message in messages)
        sock.sendall(framed)
        if chance.random() < 0.2:
            sock.sendall(b"\0\x30half")
        if chance.random() < 0.2:
            reset(sock)
            return
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass


def packet(load: Load, chance: random.Random) -> None:
    """Anything that is neither TCP nor DNS; it is refused before it goes anywhere."""
    ping4, ping6 = (socket.AF_INET, socket.IPPROTO_ICMP), (socket.AF_INET6, socket.IPPROTO_ICMPV6)
    family, protocol = chance.choice([(socket.AF_INET, 0), (socket.AF_INET6, 0), ping4, ping6])
    address = chance.choice(
        ["8.8.8.8", "11.6.6.6", "192.0.2.9"]
        if family == socket.AF_INET
        else ["2600:6:6::6", "2606:4700::1111"]
    )
    data = b"\x80\0\0\0\0\0\0\1" if family == socket.AF_INET6 else b"\x08\0\0\0\0\0\0\1"
    with socket.socket(family, socket.SOCK_DGRAM, protocol) as sock:
        load.count("packets")
        sock.sendto(data, (address, 0 if protocol else chance.choice([123, 443, 5353])))


_WEIGHED: dict[Kind, int] = {
    name_query: 300, odd_datagram: 40, names_over_tcp: 40, packet: 120,
    new_connection: 40, kept_connection: 40, plain_connection: 60, upload: 25, slow_reader: 6, by_proxy: 25, http2: 20,
    tunnel: 15, relay: 20,
    denied_name: 15, denied_name_plain: 25, denied_requests: 15, other_host: 20, other_server_name: 10, metadata: 40,
    our_own_listener: 10,
    garbage: 40, half: 40, gone_at_once: 40, gone_in_a_request: 15, gone_before_the_response: 15, gone_in_a_response: 15,
}  # fmt: skip
KINDS, WEIGHTS = list(_WEIGHED), list(_WEIGHED.values())
