"""Where a process can be hurt: every store to shared memory, lock, file operation, rename, message and request
of the product, found in its source.

A *point* is one call (or one assignment to a slice of memory) in one function; it is reached before and after. Its
name is the function's, and what is called there: ``ckptd.memory.locks.try_lock/fcntl.fcntl``. There is no
list of points to keep: code that is written tomorrow has its points tomorrow.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import CodeType

__all__ = ["Kind", "Point", "all_points", "compiled", "in_scope", "points_of"]

ROOT = Path(__file__).resolve().parents[2]
# What a trainer, a daemon and its store keeper run; neither `ckptctl` nor exports, pages and demos.
_SCOPE = (
    *(f"ckptd.{name}" for name in ("core.slots", "holdings", "memory", "node", "peers", "persistence")),
    *(
        f"ckptd.{name}"
        for name in ("private_files", "recompute", "restore", "storage", "transport", "cuda.engine")
    ),
    *(f"ckptd.client.{name}" for name in ("capture", "daemon_link", "parking", "ranks", "recovery")),
)
CALL, REACH = "__failpoint_call__", "__failpoint_reach__"


class Kind(StrEnum):
    """What a point does."""

    STORE = "store"
    LOCK = "lock"
    FILE = "file"
    RENAME = "rename"
    MESSAGE = "message"
    REQUEST = "request"


_BY_NAME = {
    **dict.fromkeys(["fcntl.fcntl", "fcntl.flock", "lock_file"], Kind.LOCK),
    **dict.fromkeys(
        ["os.open", "os.ftruncate", "os.posix_fallocate", "os.fsync", "os.write", "os.pwrite", "os.pwritev"],
        Kind.FILE,
    ),
    **dict.fromkeys(["os.pread", "os.preadv", "mmap.mmap", "os.memfd_create", "os.fchmod"], Kind.FILE),
    **dict.fromkeys(["os.rename", "os.replace", "os.link", "os.unlink", "os.mkdir", "os.rmdir"], Kind.RENAME),
    **dict.fromkeys(["write_slot_header", "set_slot_state", "write_ring_hint", "write_image"], Kind.STORE),
}
_BY_METHOD = {
    **dict.fromkeys(
        ["send", "send_multipart", "sendmsg", "sendall", "send_fds", "recv_multipart", "recv_into"],
        Kind.MESSAGE,
    ),
    **dict.fromkeys(["ask", "tell"], Kind.REQUEST),
    **dict.fromkeys(["rename", "unlink"], Kind.RENAME),
    **dict.fromkeys(["copy_", "pack_into", "write_header", "keep_digest"], Kind.STORE),
}
# Assignments to slices of what these names refer to are stores to memory that others read.
_MEMORY = ("buf", "buffer", "cast", "data", "digest_bytes", "mapped", "memory", "slot", "view")


@dataclass(frozen=True, slots=True)
class Point:
    """Where, and what."""

    name: str
    kind: Kind


def in_scope(module: str) -> bool:
    """Whether the points of a module are compiled in."""
    return any(module == prefix or module.startswith(prefix + ".") for prefix in _SCOPE)


def points_of(source: str, module: str) -> list[Point]:
    """The points of a module, in the order of its source."""
    return _Instrument(module).instrumented(source)[1]


def compiled(source: str, module: str, path: str) -> CodeType:
    """The module with its points compiled in: each calls what `tests.failpoints.runtime` has put into builtins."""
    code: CodeType = compile(_Instrument(module).instrumented(source)[0], path, "exec", dont_inherit=True)
    return code


@cache
def all_points() -> dict[str, Point]:
    """Every point of the product, by name."""
    return {point.name: point for module, path in _modules() for point in points_of(path.read_text(), module)}


def _modules() -> Iterator[tuple[str, Path]]:
    for package, folder in (
        ("ckptd.client", "client"),
        ("ckptd.cuda", "cuda"),
        ("ckptd.storage", "storage"),
        ("ckptd.transport", "transport"),
        ("ckptd", "ckptd"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder).with_suffix("").parts
            module = ".".join((package, *inner)).removesuffix(".__init__")
            is_link = folder == "ckptd" and inner[0] in ("client", "cuda", "storage", "transport")
            if in_scope(module) and not is_link:
                yield module, path


class _Instrument(ast.NodeTransformer):
    def __init__(self, module: str) -> None:
        self._module, self._scope = module, [module]
        self._counts: Counter[str] = Counter()
        self._points: list[Point] = []

    def instrumented(self, source: str) -> tuple[ast.Module, list[Point]]:
        tree = self.visit(ast.parse(source))
        return ast.fix_missing_locations(tree), self._points

    def _named(self, called: str, kind: Kind) -> ast.Constant:
        name = f"{'.'.join(self._scope)}/{called}"
        self._counts[name] += 1
        if self._counts[name] > 1:
            name += f"#{self._counts[name]}"
        self._points.append(Point(name, kind))
        return ast.Constant(name)

    def _inside(self, node: ast.AST) -> ast.AST:
        self._scope.append(node.name)  # type: ignore[attr-defined]
        self.generic_visit(node)
        self._scope.pop()
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._inside(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._inside(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._inside(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = ast.unparse(node.func)
        kind = _BY_NAME.get(called)
        if kind is None and isinstance(node.func, ast.Attribute):
            kind = _BY_METHOD.get(node.func.attr)
            called = node.func.attr
            # `Path.replace` and a file's `replace` have one argument; those of str and of structs others.
            if called == "replace" and len(node.args) == 1 and not node.keywords:
                kind = Kind.RENAME
        if kind is Kind.REQUEST and not node.args:
            kind = None  # `tell` of a file
        if (
            kind is None or len(self._scope) == 1
        ):  # of a module's own lines: they run before anything can be lost
            return node
        arguments = [self._named(called, kind), node.func, *node.args]
        wrapped = ast.Call(ast.Name(CALL, ast.Load()), arguments, node.keywords)
        return ast.copy_location(wrapped, node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        target = node.targets[0]
        if len(self._scope) == 1 or not isinstance(target, ast.Subscript) or not _is_memory(target.value):
            return node
        name = self._named("=", Kind.STORE)
        return [_reach(name, "before", node), node, _reach(name, "after", node)]


def _is_memory(node: ast.expr) -> bool:
    last = node.func if isinstance(node, ast.Call) else node
    name = last.attr if isinstance(last, ast.Attribute) else last.id if isinstance(last, ast.Name) else ""
    return name.lstrip("_") in _MEMORY


def _reach(name: ast.Constant, when: str, node: ast.stmt) -> ast.stmt:
    call = ast.Call(ast.Name(REACH, ast.Load()), [name, ast.Constant(when)], [])
    return ast.copy_location(ast.Expr(call), node)
