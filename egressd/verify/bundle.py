"""The inside half as one program: every module of this folder, and what makes them importable where there is no egressd."""

from __future__ import annotations

import zlib
from importlib.resources import files

_LOADER = '''\
import sys
from importlib.machinery import ModuleSpec

class Finder:
    """Finds the modules that came along with this program."""
    def find_spec(self, name, path=None, target=None):
        if name in SOURCES:
            return ModuleSpec(name, self, is_package=name in PACKAGES)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        name = module.__name__
        exec(compile(SOURCES[name], "<verify>/" + name, "exec"), module.__dict__)

sys.dont_write_bytecode = True
sys.meta_path.insert(0, Finder())
'''
LAUNCHER = (
    "import sys, zlib; read = sys.stdin.buffer; program = zlib.decompress(read.read(int(read.readline()))); "
    "exec(compile(program, '<verify>', 'exec'))"
)
"""What Python is started with (`python3 -I -S -c LAUNCHER`): reads the program's length, a newline, and the program, deflated."""

_PACKAGE = "egressd.verify"
_OUTSIDE = frozenset({"bundle.py"})


def modules() -> dict[str, str]:
    """The source of every module of the inside half by its full name."""
    found = {"egressd": "", _PACKAGE: ""}
    for file in sorted(files(_PACKAGE).iterdir(), key=lambda each: each.name):
        if file.name.endswith(".py") and file.name not in {*_OUTSIDE, "__init__.py"}:
            found[f"{_PACKAGE}.{file.name[:-3]}"] = file.read_text(encoding="utf-8")
    return found


def bundle(entry: str = "inside") -> bytes:
    """The program that runs `main` of a module of this folder, deflated: so it fits into a pipe that nobody reads yet."""
    text = (
        f"SOURCES = {modules()!r}\nPACKAGES = {{'egressd', {_PACKAGE!r}}}\n{_LOADER}"
        f"from {_PACKAGE} import {entry}\n{entry}.main()\n"
    )
    return zlib.compress(text.encode(), 9)
