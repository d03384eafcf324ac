"""HTTP rows: which host a request is for, where it ends, what its method and path are, and what else can speak on its ports."""

from __future__ import annotations

import re
from typing import Any

import pytest

from egressd.lab import Lab, topology
from tests.bypass.arena import RULES as COMMON
from tests.bypass.arena import Arena, Row

pytestmark = pytest.mark.e2e

API = "api.lab-origin.com"
WWW = "www.lab-origin.com"
EVIL = "www.evil-lab.com"
PATHS = "paths.lab-paths.com"
SOCKETS = "sockets.lab-paths.com"
RULES = COMMON.replace(
    "deny:\n",
    f"""  - id: paths
    hosts: [{PATHS}]
    requests: ["GET /public/**"]
  - id: sockets
    hosts: [{SOCKETS}]
    requests: ["GET /n", "WEBSOCKET /ws"]
  - id: two
    hosts: [h2.lab-origin.com]
    requests: ["GET,HEAD /**", "POST /upload"]
deny:
""",
)


def prepare(lab: Lab) -> None:
    """Names that only these rows need."""
    for name in (PATHS, SOCKETS):
        lab.set_name(name, a=[topology.API])


def plain(data: bytes, host: str = WWW, port: int = 80, more: str = "") -> str:
    """Code that sends bytes in the clear."""
    return f"say(shown(tcp({host!r}, {port}, {data!r}{more})))"


def inside(data: bytes, host: str = API, seconds: int = 3) -> str:
    """Code that sends bytes by TLS."""
    return f"say(shown(tls({host!r}, 443, {data!r}, {host!r}, seconds={seconds})))"


def proxied(data: bytes, more: str = "") -> str:
    """Code that sends bytes to the explicit proxy."""
    return f"say(shown(proxy({data!r}{more})))"


def head(line: bytes, *fields: bytes, body: bytes = b"") -> bytes:
    """The bytes of a request that is the last one on its connection."""
    return b"\r\n".join((line, *fields, b"Connection: close", b"", body))


def denied(reason: str, status: int = 403) -> str:
    """What the client must see."""
    return rf"{status} egressd: denied: .*reason {reason}\)"


def request(
    id_: str,
    title: str,
    code: str,
    reason: str,
    status: int = 403,
    wins: str | None = "200 OK",
    **more: Any,
) -> Row:
    """A request that is refused as such."""
    return Row(
        id_,
        code,
        title=title,
        wins=wins,
        sees=denied(reason, status),
        records=(("request", "deny", reason),),
        **more,
    )


def at_door(
    id_: str,
    title: str,
    code: str,
    reason: str,
    status: int = 400,
    wins: str | None = "200 OK",
    **more: Any,
) -> Row:
    """A request that the explicit proxy refuses before it is one."""
    return Row(
        id_,
        code,
        title=title,
        wins=wins,
        sees=denied(reason, status),
        records=(("connection", "deny", reason),),
        **more,
    )


TO_WWW = b"GET http://www.lab-origin.com/n HTTP/1.1"
HOST_WWW, HOST_API, HOST_EVIL = (
    b"Host: www.lab-origin.com",
    b"Host: api.lab-origin.com",
    b"Host: www.evil-lab.com",
)
GET_API, POST_API = b"GET /echo HTTP/1.1", b"POST /echo HTTP/1.1"

HOSTS = [
    request(
        "HTTP-01",
        "target allowed, Host not",
        proxied(head(TO_WWW, HOST_EVIL)),
        "authority_mismatch",
        shows={"layer": "request", "host_raw": re.compile(EVIL)},
    ),
    request(
        "HTTP-01",
        "Host allowed, target not",
        proxied(head(b"GET http://www.evil-lab.com/ HTTP/1.1", HOST_WWW)),
        "authority_mismatch",
        wins="owned",
    ),
    request(
        "HTTP-01",
        "absolute target at an origin, Host not",
        plain(head(TO_WWW, HOST_EVIL)),
        "authority_mismatch",
    ),
    request(
        "HTTP-01",
        "Host allowed, absolute target at an origin not",
        plain(head(b"GET http://www.evil-lab.com/n HTTP/1.1", HOST_WWW)),
        "authority_mismatch",
    ),
    request(
        "HTTP-02",
        "two Hosts, the allowed one first",
        plain(head(b"GET /n HTTP/1.1", HOST_WWW, HOST_EVIL)),
        "duplicate_host",
        400,
        shows={"host_raw": f"{WWW}, {EVIL}"},
    ),
    request(
        "HTTP-02",
        "two Hosts, the allowed one last, in TLS",
        inside(head(b"GET /n HTTP/1.1", HOST_EVIL, HOST_API)),
        "duplicate_host",
        400,
    ),
    request(
        "HTTP-02",
        "the same Host twice",
        inside(head(b"GET /n HTTP/1.1", HOST_API, HOST_API)),
        "duplicate_host",
        400,
    ),
    at_door(
        "HTTP-03",
        "a request for the proxy itself whose Host is metadata",
        proxied(head(b"GET /latest/meta-data/ HTTP/1.1", b"Host: 169.254.169.254")),
        "bad_request",
    ),
    at_door(
        "HTTP-03",
        "a request for the proxy itself whose Host is allowed",
        proxied(head(b"GET /n HTTP/1.1", HOST_WWW)),
        "bad_request",
    ),
    *(
        request("HTTP-04", f"Host {raw!r}", plain(head(b"GET /n HTTP/1.1", b"Host: " + raw)), reason, 400)
        for raw, reason in (
            (b"www.lab-origin.com:80@www.evil-lab.com", "userinfo_in_authority"),
            (b"www.lab-origin.com, www.evil-lab.com", "bad_host"),
            (b"www.lab-origin.com www.evil-lab.com", "bad_host"),
            (b"[::1", "bad_host"),
            (b"", "bad_host"),
            (b"www.lab-origin.com:80:80", "bad_port"),
            (b"www.lab-origin.com/@www.evil-lab.com", "userinfo_in_authority"),
            (b"www.lab-origin.com%00.evil-lab.com", "bad_host"),
            (b"www.lab-origin.com:080", "bad_port"),
        )
    ),
    request("HTTP-04", "no Host", plain(head(b"GET /n HTTP/1.1")), "bad_host", 400),
    request("HTTP-04", "no Host in HTTP/1.0", plain(head(b"GET /n HTTP/1.0")), "bad_host", 400),
]

FRAMING = [
    *(
        request(
            "HTTP-05",
            title,
            inside(head(POST_API, HOST_API, *fields, body=body)),
            reason,
            400,
            wins="200 OK|X-Why",
        )
        for title, reason, body, fields in (
            (
                "a length and chunks",
                "bad_framing",
                b"0\r\n\r\n",
                (b"Content-Length: 5", b"Transfer-Encoding: chunked"),
            ),
            (
                "chunks and a length",
                "bad_framing",
                b"0\r\n\r\n",
                (b"Transfer-Encoding: chunked", b"Content-Length: 5"),
            ),
            ("two lengths", "bad_framing", b"hello", (b"Content-Length: 5", b"Content-Length: 0")),
            ("the same length twice", "bad_framing", b"hello", (b"Content-Length: 5", b"Content-Length: 5")),
            ("a list of lengths", "bad_framing", b"", (b"Content-Length: 5, 5",)),
            (
                "a coding whose name ends in a space",
                "bad_header",
                b"0\r\n\r\n",
                (b"Transfer-Encoding : chunked",),
            ),
            (
                "an unknown coding",
                "bad_framing",
                b"hello",
                (b"Transfer-Encoding: xchunked", b"Content-Length: 5"),
            ),
            ("chunks, then something else", "bad_framing", b"", (b"Transfer-Encoding: chunked, identity",)),
            (
                "a vertical tab before the coding",
                "bad_header",
                b"0\r\n\r\n",
                (b"Transfer-Encoding: \x0bchunked",),
            ),
            ("a signed length", "bad_framing", b"hello", (b"Content-Length: +5",)),
            ("a hexadecimal length", "bad_framing", b"hello", (b"Content-Length: 0x5",)),
            ("a negative length", "bad_framing", b"", (b"Content-Length: -1",)),
            ("a framing field with an underscore", "bad_framing", b"", (b"Transfer_Encoding: chunked",)),
        )
    ),
    *(
        request(
            "HTTP-05",
            title,
            inside(head(POST_API, HOST_API, b"Transfer-Encoding: chunked", body=body), seconds=1),
            "bad_framing",
            400,
            wins="200 OK|X-Why|SILENCE|EOF",
        )
        for title, body in (
            ("a chunk that is longer than it says", b"5\r\nhelloGET /n HTTP/1.1\r\n\r\n0\r\n\r\n"),
            ("a chunk size with a sign", b"-5\r\nhello\r\n0\r\n\r\n"),
            ("a chunk size by 0x", b"0x5\r\nhello\r\n0\r\n\r\n"),
            ("a chunk line that ends without CR", b"5\nhello\r\n0\r\n\r\n"),
            ("a chunk size that wraps", b"1" + b"0" * 16 + b"\r\nhello\r\n0\r\n\r\n"),
        )
    ),
    Row(
        "HTTP-05",
        f"with socket.create_connection(('{API}', 443), 3) as raw:\n"
        f"    sock = ssl._create_unverified_context().wrap_socket(raw, server_hostname='{API}')\n"
        f"    sock.settimeout(3)\n    sock.sendall({head(POST_API, HOST_API, b'Transfer-Encoding: chunked')!r})\n"
        "    time.sleep(0.3)\n    sock.sendall(b'5\\r\\nhelloGET /n HTTP/1.1\\r\\n\\r\\n')\n"
        "    say(shown(receive(sock)))",
        title="a broken chunk once the head is upstream",
        wins="200 OK|X-Why|EOF",
        sees=denied("bad_framing", 400),
        records=(("request", "allow", "rule"), ("request", "end", "bad_framing")),
        reaches=(API,),
        note="the head was allowed; the body breaks off, and the origin sees that it did",
    ),
    *(
        request("HTTP-07", title, inside(data), reason, 400, wins="200 OK|X-Why")
        for title, reason, data in (
            ("a folded Host", "bad_header", head(GET_API, HOST_API, b"X-A: b", b" Host: www.evil-lab.com")),
            ("a folded value", "bad_header", head(GET_API, HOST_API, b"X-A: b", b"\tc")),
            ("a fold before the first field", "bad_header", head(GET_API, b" X-A: b", HOST_API)),
            (
                "a line that ends in LF",
                "bad_header",
                head(GET_API, HOST_API, b"X-A: b\nHost: www.evil-lab.com"),
            ),
            (
                "a bare CR in a value",
                "bad_header",
                head(GET_API, HOST_API, b"X-A: b\rHost: www.evil-lab.com"),
            ),
            ("a NUL in a value", "bad_header", head(GET_API, HOST_API, b"X-A: b\0c")),
            ("a field without a colon", "bad_header", head(GET_API, HOST_API, b"X-A")),
            ("a field without a name", "bad_header", head(GET_API, HOST_API, b": b")),
            ("a space in a name", "bad_header", head(GET_API, HOST_API, b"Host www.evil-lab.com: b")),
        )
    ),
    request(
        "HTTP-05",
        "a length that no integer holds",
        inside(head(POST_API, HOST_API, b"Content-Length: " + b"9" * 40)),
        "bad_framing",
        400,
        wins=None,
        moot="the origin waits for the rest",
    ),
    request(
        "HTTP-07",
        "a request line that ends in LF",
        inside(b"GET /echo HTTP/1.1\n" + head(HOST_API)),
        "bad_request",
        400,
        wins="200 OK|X-Why",
    ),
]

ONE_AFTER_ANOTHER = [
    Row(
        "HTTP-08",
        proxied(
            b"GET http://www.lab-origin.com/n HTTP/1.1\r\nHost: www.lab-origin.com\r\n\r\n"
            b"GET http://www.evil-lab.com/n HTTP/1.1\r\nHost: www.evil-lab.com\r\nConnection: close\r\n\r\n"
        ),
        title="two requests in one segment to the proxy",
        wins="200 OK.*200 OK",
        sees="200 OK.*" + denied("not_allowed"),
        records=(("request", "allow", "rule"), ("request", "deny", "not_allowed")),
        reaches=(WWW,),
        shows={"layer": "request", "verdict": "deny", "host": EVIL},
    ),
    Row(
        "HTTP-08",
        inside(
            b"GET /n HTTP/1.1\r\nHost: api.lab-origin.com\r\n\r\n" + head(b"DELETE /n HTTP/1.1", HOST_API)
        ),
        title="a forbidden method behind an allowed one",
        wins="200 OK.*200 OK",
        sees="200 OK.*" + denied("method_not_allowed"),
        records=(("request", "allow", "rule"), ("request", "deny", "method_not_allowed")),
        reaches=(API,),
    ),
    Row(
        "HTTP-08",
        inside(
            b"POST /echo HTTP/1.1\r\nHost: api.lab-origin.com\r\nContent-Length: 5\r\n\r\nhello"
            + head(b"GET /n HTTP/1.1", HOST_EVIL)
        ),
        title="another host behind a body",
        wins="200 OK.*200 OK",
        sees="200 OK.*" + denied("authority_mismatch"),
        records=(("request", "allow", "rule"), ("request", "deny", "authority_mismatch")),
        reaches=(API,),
    ),
    Row(
        "HTTP-09",
        "sock = socket.create_connection(('www.lab-origin.com', 80), 3)\n"
        "sock.settimeout(3)\n"
        "sock.sendall(get(host='www.lab-origin.com', close=False))\n"
        "say(shown(sock.recv(4096)))\n"
        "sock.sendall(get(host='www.evil-lab.com'))\n"
        "say(shown(receive(sock)))",
        title="a later request on a kept connection names another host",
        wins="200 OK.*200 OK",
        sees="200 OK.*" + denied("authority_mismatch") + ".*<EOF>",
        records=(("request", "allow", "rule"), ("request", "deny", "authority_mismatch")),
        reaches=(WWW,),
    ),
]

_NESTED = head(b"CONNECT www.evil-lab.com:443 HTTP/1.1", b"Host: www.evil-lab.com:443")
NESTED = [
    request("HTTP-10", "CONNECT inside TLS", inside(_NESTED), "nested_connect"),
    request("HTTP-10", "CONNECT in the clear to an origin", plain(_NESTED), "nested_connect"),
    request(
        "HTTP-10",
        "CONNECT inside a tunnel",
        "say(shown(proxy(b'CONNECT www.lab-origin.com:80 HTTP/1.1\\r\\n\\r\\n' + " + repr(_NESTED) + ")))",
        "nested_connect",
    ),
    request(
        "HTTP-10",
        "an absolute target inside TLS names another host",
        inside(head(b"GET https://www.evil-lab.com/n HTTP/1.1", HOST_API)),
        "authority_mismatch",
    ),
    request(
        "HTTP-10",
        "an absolute target inside TLS has another scheme",
        inside(head(b"GET http://api.lab-origin.com/n HTTP/1.1", HOST_API)),
        "authority_mismatch",
    ),
    Row(
        "HTTP-10",
        inside(head(b"GET https://api.lab-origin.com/n HTTP/1.1", HOST_API)),
        title="an absolute target inside TLS that names the judged host",
        wins="200 OK",
        sees="200 OK",
        records=(("request", "allow", "rule"),),
        reaches=(API,),
    ),
    Row(
        "HTTP-11",
        plain(head(b"GET /headers HTTP/1.1", HOST_WWW, b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAAP__")),
        title="an offer of HTTP/2 in the clear is taken out",
        wins='200 OK.*"upgrade"',
        sees='200 OK(?!.*"upgrade")(?!.*http2-settings)',
        records=(("request", "allow", "rule"),),
        reaches=(WWW,),
    ),
    request(
        "HTTP-11",
        "an offer of HTTP/2 and of something else",
        plain(head(b"GET /headers HTTP/1.1", HOST_WWW, b"Upgrade: h2c, tls/1.0")),
        "upgrade_not_allowed",
        wins='200 OK.*"upgrade"',
    ),
]

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"
PRIOR = [
    request("HTTP-12", "HTTP/2 unasked in the clear", plain(_PREFACE), "bad_request", 400, wins="X-Why"),
    request("HTTP-12", "HTTP/2 unasked in TLS", inside(_PREFACE), "bad_request", 400, wins="X-Why"),
    request(
        "HTTP-12",
        "HTTP/2 unasked in a tunnel",
        "say(shown(proxy(b'CONNECT www.lab-origin.com:80 HTTP/1.1\\r\\n\\r\\n' + " + repr(_PREFACE) + ")))",
        "bad_request",
        400,
        wins="X-Why",
    ),
    at_door(
        "HTTP-12",
        "HTTP/2 unasked to the proxy",
        proxied(_PREFACE),
        "bad_request",
        wins=None,
        moot="the naive proxy knows none",
    ),
]

METHODS = [
    request(
        "HTTP-15",
        "a method in lower case",
        inside(head(b"post /echo HTTP/1.1", HOST_API)),
        "bad_request",
        400,
    ),
    request(
        "HTTP-15", "a method of our own", inside(head(b"GETT /n HTTP/1.1", HOST_API)), "method_not_allowed"
    ),
    request(
        "HTTP-15",
        "a method that is GET with something behind",
        inside(head(b"GET! /n HTTP/1.1", HOST_API)),
        "method_not_allowed",
    ),
    request("HTTP-15", "DELETE", inside(head(b"DELETE /n HTTP/1.1", HOST_API)), "method_not_allowed"),
    request(
        "HTTP-15",
        "POST where GET is allowed",
        inside(head(b"POST /n HTTP/1.1", HOST_API, b"Content-Length: 0")),
        "method_not_allowed",
    ),
    request(
        "HTTP-15",
        "connect in lower case",
        inside(head(b"connect www.evil-lab.com:443 HTTP/1.1", HOST_API)),
        "bad_request",
        400,
    ),
    at_door(
        "HTTP-15",
        "connect in lower case to the proxy",
        proxied(b"connect www.evil-lab.com:80 HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n"),
        "bad_request",
        wins="owned",
    ),
    Row(
        "HTTP-15",
        inside(
            head(
                POST_API,
                HOST_API,
                b"X-HTTP-Method-Override: DELETE",
                b"X-HTTP-Method: PUT",
                b"X_Method_Override: DELETE",
                b"Content-Length: 0",
            )
        ),
        title="fields that make it another method are taken out",
        wins="200 OK.*method-override",
        sees="200 OK(?!.*(?i:method.override|x-http-method))",
        records=(("request", "allow", "rule"),),
        reaches=(API,),
    ),
]

PATH = [
    request(
        "HTTP-16",
        raw.decode("latin-1"),
        inside(head(b"GET " + raw + b" HTTP/1.1", b"Host: " + PATHS.encode()), PATHS),
        reason,
        status,
    )
    for raw, reason, status in (
        (b"/secret", "path_not_allowed", 403),
        (b"/public", "path_not_allowed", 403),
        (b"/PUBLIC/x", "path_not_allowed", 403),
        (b"/publicx/y", "path_not_allowed", 403),
        (b"/public/../secret", "path_ambiguous", 403),
        (b"/public/%2e%2e/secret", "path_ambiguous", 403),
        (b"/public/.%2E/secret", "path_ambiguous", 403),
        (b"/public/..;/secret", "path_ambiguous", 403),
        (b"/public//../secret", "path_ambiguous", 403),
        (b"/public%2f..%2fsecret", "path_ambiguous", 403),
        (b"/public/\\..\\secret", "path_ambiguous", 403),
        (b"/public/..%5csecret", "path_ambiguous", 403),
        (b"/public/%252e%252e/secret", "path_ambiguous", 403),
        (b"/public/./x", "path_ambiguous", 403),
        (b"/public/..", "path_ambiguous", 403),
        (b"/public/%70rivate", "path_ambiguous", 403),
        (b"/public/a%00", "path_ambiguous", 403),
        (b"/public/a%zz", "path_ambiguous", 403),
        (b"/public/..#/x", "bad_request", 400),
        (b"/public/\xc0\xae\xc0\xae/secret", "bad_request", 400),
    )
]

TRAILERS = [
    Row(
        "HTTP-19",
        inside(
            head(
                POST_API,
                HOST_API,
                b"Transfer-Encoding: chunked",
                b"Trailer: Authorization",
                body=b"5\r\nhello\r\n0\r\nAuthorization: Bearer trailing\r\nHost: www.evil-lab.com\r\n\r\n",
            )
        ),
        title="trailers of a request go no further",
        wins='"trailers": .."authorization"',
        sees='200 OK.*"trailers": \\[\\](?!.*trailing)(?!.*evil)',
        records=(("request", "allow", "rule"),),
        reaches=(API,),
        shows={"event": "end", "detail": "request trailers dropped"},
    ),
    Row(
        "HTTP-19",
        inside(head(b"GET /trailers HTTP/1.1", HOST_API, b"TE: trailers")),
        title="trailers of a response are kept",
        wins="X-Sum: 1234",
        sees="X-Sum: 1234",
        records=(("request", "allow", "rule"),),
        reaches=(API,),
    ),
]

VERSIONS = [
    request("HTTP-20", "HTTP/0.9", plain(b"GET /\r\n\r\n"), "bad_request", 400, wins="X-Why"),
    request(
        "HTTP-20", "HTTP/9.9", plain(head(b"GET /n HTTP/9.9", HOST_WWW)), "bad_request", 400, wins="X-Why"
    ),
    request("HTTP-20", "HTTP/1.10", plain(head(b"GET /n HTTP/1.10", HOST_WWW)), "bad_request", 400),
    request("HTTP-20", "HTTP/1.2", plain(head(b"GET /n HTTP/1.2", HOST_WWW)), "bad_request", 400),
    request(
        "HTTP-20",
        "tabs inside TLS",
        inside(head(b"GET\t/n\tHTTP/1.1", HOST_API)),
        "bad_request",
        400,
        wins="X-Why",
    ),
    request(
        "HTTP-20", "two spaces", plain(head(b"GET /n  HTTP/1.1", HOST_WWW)), "bad_request", 400, wins="X-Why"
    ),
    request(
        "HTTP-20",
        "two slashes",
        plain(head(b"GET //www.evil-lab.com/ HTTP/1.1", HOST_WWW)),
        "bad_request",
        400,
    ),
    request("HTTP-20", "an asterisk for GET", plain(head(b"GET * HTTP/1.1", HOST_WWW)), "bad_request", 400),
    request(
        "HTTP-20",
        "a target that is a query",
        inside(head(b"GET ?x=1 HTTP/1.1", HOST_API)),
        "bad_request",
        400,
    ),
    request(
        "HTTP-20",
        "another scheme inside TLS",
        inside(head(b"GET ftp://api.lab-origin.com/n HTTP/1.1", HOST_API)),
        "bad_request",
        400,
    ),
    Row(
        "HTTP-20",
        plain(head(b"GET\t/n\tHTTP/1.1", HOST_WWW)),
        title="tabs in the clear",
        wins="X-Why",
        sees="EOF|Error",
        records=(("connection", "deny", "unknown_protocol"),),
    ),
    *(
        at_door(
            "HTTP-20",
            f"{raw.decode()} to the proxy",
            proxied(head(raw, HOST_WWW)),
            "bad_request",
            wins=wins,
            moot="no such file or name",
        )
        for raw, wins in (
            (b"GET http://www.lab-origin.com/n", "X-Why"),
            (b"GET http://www.lab-origin.com/n HTTP/9.9", "X-Why"),
            (b"GET ftp://www.lab-origin.com/n HTTP/1.1", "200 OK"),
            (b"GET file:///etc/passwd HTTP/1.1", None),
            (b"GET gopher://www.lab-origin.com/n HTTP/1.1", "200 OK"),
            (b"GET http:www.lab-origin.com/n HTTP/1.1", None),
            (b"GET * HTTP/1.1", None),
        )
    ),
    Row(
        "HTTP-20",
        proxied(head(b"GET HTTP://WWW.LAB-ORIGIN.COM/n HTTP/1.1", HOST_WWW)),
        title="HTTP:// in capitals works",
        wins="200 OK",
        sees="200 OK",
        records=(("request", "allow", "rule"),),
        reaches=(WWW,),
    ),
    at_door(
        "HTTP-21",
        "an https target in the clear to the proxy",
        proxied(head(b"GET https://api.lab-origin.com/n HTTP/1.1", HOST_API)),
        "bad_request",
    ),
    at_door(
        "HTTP-21",
        "an https target with port 80",
        proxied(head(b"GET https://api.lab-origin.com:80/n HTTP/1.1", HOST_API)),
        "bad_request",
    ),
    *(
        Row(
            "HTTP-22",
            f"began = time.monotonic()\n{proxied(data)}\nsay('soon' if time.monotonic() - began < 2 else 'late')",
            title=title,
            moot="the naive proxy speaks HTTP alone",
            sees="<EOF>.*soon",
            records=(("connection", "deny", reason),),
            shows=shows,
        )
        for title, data, reason, shows in (
            ("SOCKS 5", b"\x05\x01\x00", "unknown_protocol", {"detail": "first bytes 050100"}),
            ("SOCKS 4a", b"\x04\x01\x01\xbb\0\0\0\1u\0www.evil-lab.com\0", "unknown_protocol", {}),
            ("TLS", b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03", "unknown_protocol", {}),
            ("SMTP", b"EHLO x\r\n", "bad_request", {}),
            ("FTP", b"USER anonymous\r\n", "bad_request", {}),
        )
    ),
    Row(
        "HTTP-22",
        plain(b"EHLO x\r\nMAIL FROM:<a@b>\r\n"),
        title="SMTP to an origin in the clear",
        wins="X-Why|SILENCE",
        sees="EOF|Error",
        records=(("connection", "deny", "unknown_protocol"),),
        shows={"detail": re.compile("^first bytes 45484c4f")},
    ),
]

_GO_ROUND = (
    b'HTTP/1.1 200 OK\r\nAlt-Svc: clear\r\nAlt-Svc: h2="www.evil-lab.com:443"\r\n'
    b"Connection: x-next, close\r\nX-Next: 1\r\n\r\nok"
)
RESPONSES = [
    Row(
        "HTTP-24",
        inside(head(b"GET /raw?hex=" + _GO_ROUND.hex().encode() + b" HTTP/1.1", HOST_API)),
        title="a response's ways round are taken out",
        wins="(?i)alt-svc",
        sees="200 OK(?!.*(?i:alt-svc|x-next))",
        records=(("request", "allow", "rule"),),
        reaches=(API,),
    ),
    Row(
        "HTTP-24",
        "say(run('curl', '-sSkL', '--max-time', '6', 'https://api.lab-origin.com/redirect'))",
        title="a redirect to metadata is a request of its own",
        wins="hostname",
        sees="denied: metadata endpoints",
        records=(
            ("request", "allow", "rule"),
            ("connection", "deny", "floor_metadata"),
            ("request", "deny", "floor_metadata"),
        ),
        reaches=(API,),
    ),
    Row(
        "HTTP-24",
        "say(run('curl', '-sSkL', '--max-time', '6', 'https://api.lab-origin.com/redirect?to=https://11.6.6.6/'))",
        title="a redirect to an address is a request of its own",
        wins="owned",
        sees="denied: connections to bare addresses|tlsv1 alert|alert",
        records=(("request", "allow", "rule"), ("connection", "deny", "ip_literal")),
        reaches=(API,),
    ),
]

_BIG = "b'x' * 300000"
BODIES = [
    request(
        "HTTP-25",
        "GET with a body",
        inside(head(GET_API, HOST_API, b"Content-Length: 5", body=b"hello")),
        "body_not_allowed",
    ),
    request(
        "HTTP-25",
        "GET with a body in chunks",
        inside(head(GET_API, HOST_API, b"Transfer-Encoding: chunked", body=b"5\r\nhello\r\n0\r\n\r\n")),
        "body_not_allowed",
    ),
    request(
        "HTTP-25",
        "GET with 300 kB",
        f"say(shown(tls('{API}', 443, get('/echo', head=b'Content-Length: 300000\\r\\n', body={_BIG}), '{API}')))",
        "body_not_allowed",
    ),
    request(
        "HTTP-25",
        "HEAD with a body",
        inside(head(b"HEAD /n HTTP/1.1", HOST_API, b"Content-Length: 5", body=b"hello")),
        "body_not_allowed",
    ),
    request(
        "HTTP-25",
        "DELETE with a body",
        inside(head(b"DELETE /n HTTP/1.1", HOST_API, b"Content-Length: 5", body=b"hello")),
        "method_not_allowed",
    ),
    request(
        "HTTP-25",
        "a query of 60 kB",
        f"say(shown(tls('{API}', 443, get('/n?' + 'x' * 60000), '{API}')))",
        "target_too_long",
        414,
    ),
    request(
        "HTTP-25",
        "a head of 100 kB",
        f"say(shown(tls('{API}', 443, get('/n', head=b'X-Data: ' + b'x' * 100000 + b'\\r\\n'), '{API}')))",
        "head_too_large",
        431,
    ),
    Row(
        "HTTP-25",
        f"data = get('/upload', method='POST', head=b'Content-Length: 300000\\r\\n', body={_BIG})\n"
        f"say(shown(tls('{API}', 443, data, '{API}')))",
        title="what is uploaded is counted",
        wins='"n": 300000',
        sees='"n": 300000',
        records=(("request", "allow", "rule"),),
        shows={"event": "end", "layer": "request", "bytes_up": re.compile(r"^3000\d\d|^3001\d\d")},
        reaches=(API,),
    ),
    at_door(
        "HTTP-26",
        "a page does not reflect the host",
        proxied(head(b"GET http://<script>alert(1)</script>.evil-lab.com/ HTTP/1.1", HOST_WWW)),
        "bad_host",
        wins=None,
        moot="there is nobody to say no",
    ),
    Row(
        "HTTP-26",
        proxied(
            head(b"GET http://www.evil-lab.com/<script>?<script> HTTP/1.1", HOST_EVIL, b"Accept: text/html")
        ),
        title="a page reflects neither path nor query and is no HTML",
        wins="owned",
        sees=r"403 egressd(?!.*script).*content-type: text/plain.*nosniff.*x-egressd-reason: not_allowed(?!.*script).*hint: ",
        records=(("request", "deny", "not_allowed"),),
    ),
    Row(
        "HTTP-26",
        proxied(
            head(b"GET http://www.evil-lab.com/<script> HTTP/1.1", HOST_EVIL, b"Accept: application/json")
        ),
        title="a page in JSON where it is asked for",
        wins="owned",
        sees=r'403 egressd.*content-type: application/json.*"reason": "not_allowed"(?!.*script).*"hint": ',
        records=(("request", "deny", "not_allowed"),),
    ),
    at_door(
        "HTTP-26",
        "a bad head in JSON where it is asked for",
        proxied(head(b"GET http://<script>/ HTTP/1.1", HOST_WWW, b"Accept: application/json")) + "\n",
        "bad_host",
        wins=None,
        moot="there is nobody to say no",
        shows={"host_raw": "<script>"},
    ),
    request(
        "HTTP-26",
        "a Host with markup",
        plain(head(b"GET / HTTP/1.1", b"Host: <script>alert(1)</script>")),
        "bad_host",
        400,
    ),
]


TWO = "h2.lab-origin.com"


def streams(*frames: str, more: str = "") -> str:
    """Code that sends HTTP/2 frames and says what came of them."""
    return f"from inside_frames import *\n{more}say(told(http2([{', '.join(frames)}], quiet=0.3)))"


def opening(stream: int, *pairs: tuple[str, str], end: bool = True) -> str:
    """Code of a HEADERS frame with these fields."""
    return f"frame(HEADERS, {4 + end}, {stream}, fields(*{list(pairs)!r}))"


def asked(stream: int, *more: tuple[str, str], end: bool = True, **other: str) -> str:
    """Code of a HEADERS frame of a usual request, with some of it otherwise."""
    usual = {"method": "GET", "scheme": "https", "authority": TWO, "path": "/echo"} | other
    return opening(stream, *((f":{name}", value) for name, value in usual.items()), *more, end=end)


def smuggled(title: str, code: str, reason: str, sees: str = "", **more: Any) -> Row:
    """A request on HTTP/2 that could be another one in HTTP/1."""
    return Row(
        "HTTP-06",
        code,
        title=title,
        moot="the origin speaks HTTP/2 strictly; it is a proxy in between that would make two of it",
        sees=sees or rf"1: egressd: denied: .*reason {reason}\)",
        records=(("request", "deny", reason),),
        asks=(TWO,),
        **more,
    )


DOWNGRADES = [
    smuggled("CRLF in a value", streams(asked(1, ("x", "b\r\nHost: www.evil-lab.com"))), "bad_header"),
    smuggled("LF in a value", streams(asked(1, ("x", "b\nHost: www.evil-lab.com"))), "bad_header"),
    smuggled("NUL in a value", streams(asked(1, ("x", "b\0c"))), "bad_header"),
    smuggled("CRLF in a name", streams(asked(1, ("x: b\r\nhost", "www.evil-lab.com"))), "bad_header"),
    smuggled("a colon in a name", streams(asked(1, ("host: www.evil-lab.com", "x"))), "bad_header"),
    smuggled("a name in capitals", streams(asked(1, ("Host", "www.evil-lab.com"))), "bad_header"),
    smuggled(
        "transfer-encoding", streams(asked(1, ("transfer-encoding", "chunked"), method="POST")), "bad_header"
    ),
    smuggled("connection", streams(asked(1, ("connection", "host"))), "bad_header"),
    smuggled("upgrade", streams(asked(1, ("upgrade", "h2c"))), "bad_header"),
    smuggled(
        "a space in the path",
        streams(asked(1, path="/echo HTTP/1.1\r\nHost: www.evil-lab.com")),
        "bad_header",
    ),
    smuggled("a bare space in the path", streams(asked(1, path="/echo x")), "bad_request"),
    smuggled("an absolute path", streams(asked(1, path="https://www.evil-lab.com/")), "bad_request"),
    smuggled("an empty path", streams(asked(1, path="")), "bad_request"),
    smuggled("a space in the method", streams(asked(1, method="GET /x")), "bad_request"),
    smuggled("another scheme", streams(asked(1, scheme="http")), "authority_mismatch"),
    smuggled("two paths", streams(asked(1, (":path", "/other"))), "bad_header"),
    smuggled(
        "a pseudo-field behind the others",
        streams(
            opening(
                1, (":method", "GET"), (":scheme", "https"), ("x", "y"), (":authority", TWO), (":path", "/")
            )
        ),
        "bad_header",
    ),
    smuggled("an unknown pseudo-field", streams(asked(1, (":status", "200"))), "bad_header"),
    smuggled(
        "two lengths",
        streams(asked(1, ("content-length", "1"), ("content-length", "2"), end=False, method="POST")),
        "bad_framing",
    ),
    smuggled(
        "CONNECT",
        streams(opening(1, (":method", "CONNECT"), (":authority", "www.evil-lab.com:443"))),
        "nested_connect",
    ),
    smuggled(
        "extended CONNECT",
        streams(asked(1, (":protocol", "websocket"), method="CONNECT")),
        "upgrade_not_allowed",
    ),
    smuggled(
        "host and authority differ", streams(asked(1, ("host", "www.evil-lab.com"))), "authority_mismatch"
    ),
    smuggled(
        "user information in the authority",
        streams(asked(1, authority=f"{TWO}@www.evil-lab.com")),
        "userinfo_in_authority",
    ),
    *(
        Row(
            "HTTP-06",
            streams(
                asked(1, ("content-length", length), method="POST", path="/upload", end=False),
                f"frame(DATA, 1, 1, b'{body}')",
            ),
            title=title,
            moot="the origin speaks HTTP/2 strictly",
            sees=r"1: .*(reason bad_framing|<reset \d+>)",
            records=(("request", "end", "bad_framing"),),
            reaches=(TWO,),
        )
        for title, length, body in (
            ("less data than the length", "9", "hello"),
            ("more data than the length", "3", "hello"),
        )
    ),
    Row(
        "HTTP-06",
        f"from inside_frames import *\nsay(told(http2([frame(HEADERS, 5, 1, asking('/n', '{API}'))], '{API}', quiet=0.3)))",
        title="to an origin without HTTP/2 there is no downgrade: the client is told to speak HTTP/1.1",
        moot="the origin agrees to HTTP/1.1 alone",
        sees=r"reason upstream_no_http2\)",
        records=(("request", "allow", "rule"), ("request", "end", "upstream_no_http2")),
        asks=(API,),
    ),
]

REUSED = [
    Row(
        "TLS-17",
        streams(asked(1), asked(3, authority=API), asked(5, authority="www.evil-lab.com"), asked(7)),
        title="streams for other names on one connection",
        wins=f'1: .*"host": "{TWO}".*3: .*"host": "{API}".*5: .*"host": "www.evil',
        sees=rf'(?=.*1: [^\n]*"host": "{TWO}")(?=.*3: [^\n]*reason misdirected_request)'
        rf'(?=.*5: [^\n]*reason authority_mismatch)(?=.*7: [^\n]*"host": "{TWO}")',
        records=(
            ("request", "allow", "rule"),
            ("request", "deny", "misdirected_request"),
            ("request", "deny", "authority_mismatch"),
        ),
        shows={"event": "decision", "reason": "misdirected_request", "status": 421, "host_raw": API},
        reaches=(TWO,),
    ),
    Row(
        "TLS-17",
        streams(asked(1, method="DELETE"), asked(3)),
        title="a refused stream leaves the others alone",
        wins='"method": "DELETE"',
        sees=rf'(?=.*1: [^\n]*reason method_not_allowed)(?=.*3: [^\n]*"host": "{TWO}")',
        records=(("request", "allow", "rule"), ("request", "deny", "method_not_allowed")),
        reaches=(TWO,),
    ),
]


def socket_row(
    title: str,
    code: str,
    sees: str,
    records: tuple[tuple[str, str, str], ...],
    wins: str | None = "101",
    **more: Any,
) -> Row:
    """A WebSocket's way."""
    return Row(
        "HTTP-14",
        f"from inside_frames import *\n{code}",
        title=title,
        wins=wins,
        sees=sees,
        records=records,
        **more,
    )


SOCKET_ROWS = [
    socket_row(
        "to a denied host",
        "say(shown(websocket('www.evil-lab.com')[1]))",
        r"403 egressd: denied: no rule",
        (("connection", "deny", "not_allowed"), ("request", "deny", "not_allowed")),
        wins="200 OK",
    ),
    socket_row(
        "to a path where none is allowed",
        f"say(shown(websocket('{SOCKETS}', '/ws/')[1]), shown(websocket('{SOCKETS}', '/n')[1]))",
        r"403 egressd.*reason upgrade_not_allowed",
        (("request", "deny", "upgrade_not_allowed"),),
        wins="101|426|200",
    ),
    socket_row(
        "to a host that may be read",
        f"say(shown(websocket('{API}')[1]))",
        r"403 egressd: denied: .*reason upgrade_not_allowed",
        (("request", "deny", "upgrade_not_allowed"),),
    ),
    socket_row(
        "to another host than the connection's",
        f"sock, first = websocket('{SOCKETS}', '/ws', b'Host: www.evil-lab.com\\r\\n')\nsay(shown(first))",
        r"400 egressd: denied: .*duplicate_host",
        (("request", "deny", "duplicate_host"),),
    ),
    socket_row(
        "whose handshake is a POST",
        f"data = get('/ws', '{SOCKETS}', 'POST', head=b'Upgrade: websocket\\r\\nSec-WebSocket-Version: 13\\r\\n"
        f"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\\r\\n')\nsay(shown(tls('{SOCKETS}', 443, data, '{SOCKETS}', seconds=1)))",
        r"40[03] egressd: denied",
        (("request", "deny", "method_not_allowed"),),
        wins="101|426|200",
    ),
    socket_row(
        "what goes through an allowed one is counted, and its end told",
        f"sock, first = websocket('{SOCKETS}', '/ws')\nsock.settimeout(3)\nsay(shown(first))\n"
        "sock.sendall(message(2, b'x' * 120) * 500 + message(8, b'\\x03\\xe8'))\nsay(len(receive(sock)) // 1000)",
        r"101 Switching Protocols\n6[01]\n",
        (("request", "allow", "rule"), ("request", "end", "completed")),
        reaches=(SOCKETS,),
        rule="sockets",
        shows={"event": "end", "layer": "request", "status": 101, "bytes_up": re.compile(r"^6[0-9]{4}$")},
    ),
    socket_row(
        "in which something else than frames is spoken",
        f"sock, first = websocket('{SOCKETS}', '/ws')\nsock.settimeout(1)\nsay(shown(first))\n"
        "sock.sendall(b'GET / HTTP/1.1\\r\\nHost: www.evil-lab.com\\r\\n\\r\\n')\nsay(shown(receive(sock)))",
        "101 Switching Protocols",
        (("request", "allow", "rule"), ("request", "end", "bad_framing")),
        reaches=(SOCKETS,),
    ),
]


@pytest.mark.parametrize("row", [*DOWNGRADES, *REUSED, *SOCKET_ROWS], ids=str)
def test_other_framings_are_held_to_the_same(once: Arena, row: Row) -> None:
    once.holds(row)


@pytest.mark.parametrize(
    "row",
    [
        *HOSTS,
        *FRAMING,
        *ONE_AFTER_ANOTHER,
        *NESTED,
        *PRIOR,
        *METHODS,
        *PATH,
        *TRAILERS,
        *VERSIONS,
        *RESPONSES,
        *BODIES,
    ],
    ids=str,
)
def test_a_request_is_what_was_judged(once: Arena, row: Row) -> None:
    once.holds(row)
