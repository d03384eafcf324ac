"""Run by the system's Python inside a sandbox, as the command: tries everything, prints what happened as JSON."""

# Dicts of whatever came, written for whatever Python the system has: types would say nothing here.
# mypy: ignore-errors
import ctypes
import errno
import json
import os
import platform
import socket
import stat
import subprocess
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
results = {}


def code(number):
    return errno.errorcode.get(number, str(number))


def tried(function, *arguments):
    """What a call gave: its value, or the name of its error."""
    try:
        return function(*arguments)
    except OSError as error:
        return code(error.errno) if error.errno else type(error).__name__


def timed(function, *arguments):
    began = time.monotonic()
    return [tried(function, *arguments), time.monotonic() - began]


def syscall(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) for a in arguments])
    return result if result >= 0 else code(ctypes.get_errno())


def connect(family, address, port):
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(5)
        connection.connect((address, port))
        return json.loads(connection.recv(4096))


def datagram(family, address, port, protocol=0):
    with socket.socket(family, socket.SOCK_DGRAM, protocol) as sender:
        sender.settimeout(2)
        sender.connect((address, port))
        sender.send(b"x")
        return sender.recv(100).hex()


def resolve(family, server, tcp=False):
    query = b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\x04test\x00\x00\x01\x00\x01"
    with socket.socket(family, socket.SOCK_DGRAM) as asker:
        asker.settimeout(2)
        asker.sendto(query, (server, 53))
        answer, sender = asker.recvfrom(4096)
        return [sender[0], socket.inet_ntoa(answer[-4:])]


def own_server(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind((address, 0))
        server.listen()
        with socket.create_connection(server.getsockname()[:2], timeout=2) as client:
            accepted, _ = server.accept()
            with accepted:
                accepted.sendall(b"mine")
            return client.recv(10).decode()


def steal(family, kind, address, port, option):
    with socket.socket(family, kind) as thief:
        if option:
            thief.setsockopt(socket.SOL_SOCKET, option, 1)
        thief.bind((address, port))
        return "STOLEN"


def made_with(mode):
    path = "made"
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, mode)
    os.close(descriptor)
    os.unlink(path)
    return "MADE"


def program(*argv):
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=10)
    return [done.returncode, done.stdout.decode(errors="replace")]


def read(path):
    with open(path) as source:
        return source.read()


def write(path, mode="w"):
    with open(path, mode):
        return "WROTE"


def move(path):
    os.rename(path, path + ".old")
    return "MOVED"


def place(path):
    """What can be done with a path that is masked or read-only."""
    folder = os.path.isdir(path)
    return {
        "list": tried(lambda: sorted(os.listdir(path)) if folder else read(path)),
        "write": tried(write, path + "/x" if folder else path, "a"),
        "rename": tried(move, path),
        "rename above": tried(move, os.path.dirname(path)),
        "connect": tried(lambda: socket.socket(socket.AF_UNIX).connect(path) or "CONNECTED"),
    }


def network():
    results["devices"] = sorted(
        line.split(":")[0].strip() for line in read("/proc/net/dev").splitlines() if ":" in line
    )
    v4, v6 = socket.AF_INET, socket.AF_INET6
    targets = [
        (v4, "8.8.8.8", 443),
        (v4, "10.0.0.1", 22),
        (v4, "169.254.169.254", 80),
        (v4, "198.18.0.254", 1),
    ]
    targets += [(v6, "2606:4700::1111", 443), (v6, "fd00::1", 80), (v6, "::ffff:9.9.9.9", 25)]
    results["connect"] = {f"{a} {p}": tried(connect, f, a, p) for f, a, p in targets}
    settings = ("tcp_timeout_close_wait", "tcp_timeout_fin_wait", "tcp_be_liberal")
    results["conntrack"] = [int(read("/proc/sys/net/netfilter/nf_conntrack_" + name)) for name in settings]
    owners = (line.split() for line in read("/proc/net/tcp").splitlines()[1:])
    ours = (":3A99", ":3ACD", ":0C38")
    results["socket owners"] = sorted(
        {int(row[7]) for row in owners if row[3] == "0A" and row[1].endswith(ours)}
    )
    results["pause"] = tried(connect, v4, "192.0.2.77", 1)
    results["direct"] = tried(connect, v4, "127.0.0.1", 15001)
    results["tcp_53"] = tried(connect, v4, "8.8.4.4", 53)
    results["own"] = [
        tried(own_server, v4, "127.0.0.1"),
        tried(own_server, v6, "::1"),
        tried(own_server, v4, "127.9.9.9"),
    ]
    results["dns"] = {
        s: tried(resolve, f, s)
        for f, s in [
            (v4, "198.18.0.1"),
            (v4, "8.8.8.8"),
            (v4, "127.0.0.53"),
            (v6, "2001:4860:4860::8888"),
            (v6, "::1"),
        ]
    }
    results["getaddrinfo"] = tried(
        lambda: sorted({a[4][0] for a in socket.getaddrinfo("a.test", 80, flags=socket.AI_ADDRCONFIG)})
    )
    results["refused"] = {
        "udp 443": timed(datagram, v4, "8.8.8.8", 443),
        "udp 443 v6": timed(datagram, v6, "2606:4700::1111", 443),
        "udp broadcast": timed(datagram, v4, "192.0.2.255", 123),
        "udp-lite": timed(datagram, v4, "8.8.8.8", 443, 136),
        "ping": timed(lambda: program("ping", "-n", "-c1", "-W2", "9.9.9.9")),
        "ping v6": timed(lambda: program("ping", "-n", "-6", "-c1", "-W2", "2620:fe::fe")),
        "multicast": timed(datagram, v4, "224.0.0.251", 5353),
    }


def theft():
    v4, v6 = socket.AF_INET, socket.AF_INET6
    tcp, udp = socket.SOCK_STREAM, socket.SOCK_DGRAM
    options = {"plain": 0, "reuseaddr": socket.SO_REUSEADDR, "reuseport": socket.SO_REUSEPORT}
    places = [
        (v4, tcp, "127.0.0.1", 15001),
        (v4, tcp, "0.0.0.0", 15001),
        (v6, tcp, "::1", 15001),
        (v6, tcp, "::", 15001),
    ]
    places += [
        (v4, udp, "127.0.0.1", 15053),
        (v4, udp, "0.0.0.0", 15053),
        (v6, udp, "::1", 15053),
        (v6, udp, "::", 15053),
    ]
    places += [(v6, udp, "::ffff:127.0.0.1", 15053), (v4, tcp, "127.0.0.1", 3128)]
    results["theft"] = {
        f"{'tcp' if k == tcp else 'udp'} {a} {p} {name}": tried(steal, f, k, a, p, option)
        for f, k, a, p in places
        for name, option in options.items()
    }


def power():
    x86 = platform.machine() == "x86_64"
    results["status"] = {
        line.split(":")[0]: line.split(":")[1].strip()
        for line in read("/proc/self/status").splitlines()
        if line.startswith(("Cap", "NoNew", "Seccomp:", "Groups"))
    }
    results["ids"] = [os.getuid(), os.getgid(), os.getgroups()]
    results["uid_map"] = read("/proc/self/uid_map").split()
    results["fds"] = sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1]
    results["unshare"] = {
        hex(flag): syscall(272 if x86 else 97, flag)
        for flag in (0x10000000, 0x40000000, 0x00020000, 0x20000000, 0x10000000 | 0x40000000, 0x80)
    }
    results["unshare_program"] = program("unshare", "-r", "true")[0] != 0
    results["setns"] = syscall(308 if x86 else 268, 0, 0)
    results["io_uring"] = [syscall(n, 0, 0, 0, 0) for n in (425, 426, 427)]
    results["openat2"] = syscall(437, 0, 0, 0, 0)
    results["bpf"] = syscall(321 if x86 else 280, 0, 0, 0)
    results["families"] = {
        name: tried(lambda f, k, p: socket.socket(f, k, p).close() or "OPEN", *args)
        for name, args in {
            "vsock": (40, 1, 0),
            "packet": (17, 3, 0),
            "alg": (38, 5, 0),
            "netfilter": (16, 3, 12),
            "route": (16, 3, 0),
            "audit": (16, 3, 9),
            "raw": (2, 3, 1),
            "raw6": (10, 3, 58),
            "bluetooth": (31, 3, 0),
            "unix": (1, 1, 0),
            "can": (29, 3, 1),
            "xdp": (44, 3, 0),
        }.items()
    }
    results["flush"] = program("/usr/sbin/iptables", "-F")[0] != 0
    results["route"] = program("/usr/sbin/ip", "route", "add", "1.1.1.1", "dev", "lo")[0] != 0
    results["mount"] = program("mount", "-t", "tmpfs", "none", "/tmp")[0] != 0
    results["setuid"] = {
        "chmod": tried(lambda: os.chmod("mine", 0o4755) or "SET"),
        "chmod g": tried(lambda: os.chmod("mine", 0o2755) or "SET"),
        "fchmod": tried(lambda: os.fchmod(os.open("mine", os.O_RDONLY), 0o4755) or "SET"),
        "create": tried(made_with, 0o4755),
        "create g": tried(made_with, 0o2711),
        "plain": tried(made_with, 0o755),
        "mknod": tried(lambda: os.mknod("node", stat.S_IFREG | 0o4755) or "SET"),
        "shell": program("chmod", "u+s", "mine")[0] != 0,
    }
    results["core_pattern"] = tried(write, "/proc/sys/kernel/core_pattern")
    results["tiocsti"] = syscall(16 if x86 else 29, 0, 0x5412, 0)


def files():
    results["write"] = {
        path: tried(write, path)
        for path in (
            "/x",
            "/etc/x",
            "/usr/x",
            "/etc/resolv.conf",
            "/etc/hosts",
            "made-by-sandbox",
            "/tmp/x",
            "/run/x",
            os.environ["HOME"] + "/x",
            "/dev/shm/x",
            "/var/tmp/x",
        )
    }
    results["run"] = sorted(os.listdir("/run")) + sorted(os.listdir(os.environ["XDG_RUNTIME_DIR"]))
    results["home"] = sorted(os.listdir(os.environ["HOME"]))
    results["dev"] = sorted(os.listdir("/dev"))
    results["net_class"] = os.listdir("/sys/class/net") if os.path.isdir("/sys/class/net") else []
    results["environ"] = dict(os.environ)
    results["first_environ"] = read("/proc/1/environ").split("\0")
    results["first_cmdline"] = read("/proc/1/cmdline").split("\0")
    results["processes"] = sorted(p for p in os.listdir("/proc") if p.isdigit())
    results["resolv"] = read("/etc/resolv.conf")
    results["hostname"] = [socket.gethostname(), tried(lambda: socket.gethostbyname(socket.gethostname()))]
    results["account"] = program("id", "-un")
    paths = json.loads(os.environ.get("PATHS", "{}"))
    results.update({key: place(path) for key, path in paths.items()})


write("mine")
network()
theft()
power()
files()
json.dump(results, sys.stdout)
