"""Variables that a program only shows: nothing depends on them but what it prints, logs or plots.

A running loss begins anew after a failure, and only the numbers on the screen differ. Which variables are of
this kind follows from the source: into what each one goes, and what is called with it.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import linecache
import os
import textwrap
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator

# Names of functions and methods. What they are given goes to a person, and to nobody else.
_SHOWS = frozenset(
    [
        "print",
        "write",
        "display",
        "log",
        "log_metrics",
        "add_scalar",
        "add_scalars",
        "set_postfix",
        "set_postfix_str",
        "set_description",
        "set_description_str",
        "debug",
        "info",
        "warning",
        "error",
    ]
)
# What they are given goes into the object.
_ADDS = frozenset({"append", "appendleft", "add", "extend", "update", "reset", "clear"})
# Their result depends on what they are given, and nothing else happens.
_COMPUTES = frozenset(
    [
        "sum",
        "len",
        "float",
        "int",
        "str",
        "round",
        "min",
        "max",
        "abs",
        "mean",
        "std",
        "median",
        "stack",
        "tensor",
        "item",
        "tolist",
        "cpu",
        "detach",
        "format",
        "join",
        "sqrt",
        "exp",
        "log10",
        "perf_counter",
        "time",
    ]
)

_MAKES = frozenset({"list", "dict", "set", "deque", "defaultdict", "Counter", "zeros", "zeros_like"})


def only_shown(code: types.CodeType, names: Iterable[str]) -> frozenset[str]:
    """Those of ``names`` on which nothing depends but what the program shows; none without its source.

    Args:
        code: the function with the loop, or the module.
    """
    if code.co_name != "<module>":
        given = code.co_argcount + code.co_kwonlyargcount  # and the caller has what it gives
        own = {*code.co_varnames[given:], *code.co_cellvars} - {*code.co_varnames[:given]}
        names = own.intersection(names)  # others are used elsewhere, too
    elif not os.path.isfile(code.co_filename):  # a notebook's cell: others may use its variables
        return frozenset()
    try:
        tree = ast.parse(_source_of(code))
    except (OSError, TypeError, SyntaxError, ValueError):
        return frozenset()
    found = _Flows()
    found.visit(tree)
    used = set(found.used)
    while more := {name for name, into in found.flows.items() if into & used} - used:
        used |= more
    return frozenset(name for name in names if name in found.seen and name not in used)


def _source_of(code: types.CodeType) -> str:
    if code.co_name == "<module>":  # of which `inspect` gives the first statement
        return "".join(linecache.getlines(code.co_filename))
    return textwrap.dedent(inspect.getsource(code))


class _Flows(ast.NodeVisitor):
    """Attributes: ``flows``: from a variable into others; ``used``: those that something else depends on."""

    def __init__(self) -> None:
        self.flows: defaultdict[str, set[str]] = defaultdict(set)
        self.used: set[str] = set()
        self.seen: set[str] = set()
        self._into: frozenset[str] | None = None  # where what is read goes; None: anywhere

    @contextlib.contextmanager
    def _going(self, into: Iterable[str] | None) -> Iterator[None]:
        before, self._into = self._into, None if into is None else frozenset(into)
        yield
        self._into = before

    def visit_Name(self, node: ast.Name) -> None:
        self.seen.add(node.id)
        if not isinstance(node.ctx, ast.Load):
            return
        if self._into is None:
            self.used.add(node.id)
        else:
            self.flows[node.id] |= self._into

    def visit_Assign(self, node: ast.Assign) -> None:
        self._assigned(node.targets, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assigned([node.target], node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._assigned([node.target], node.value)

    def _assigned(self, targets: list[ast.expr], value: ast.expr) -> None:
        match targets, value:
            case [ast.Tuple(elts=left)], ast.Tuple(elts=right) if len(left) == len(right):
                for target, part in zip(left, right, strict=True):
                    self._assigned([target], part)
                return
        inside = [part.id for each in targets for part in ast.walk(each) if isinstance(part, ast.Name)]
        names = [each.id for each in targets if isinstance(each, ast.Name)]
        self.seen.update(names)
        self.used.update(set(inside) - set(names))  # each is a part of something
        if not _is_new(value):  # somebody else may have the object, too
            self.used.update(names)
        plain = len(names) == len(targets)
        for target in targets:
            self.visit(target)
        with self._going(names if plain else None):
            self.visit(value)

    def visit_Expr(self, node: ast.Expr) -> None:
        match node.value:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)) if attr in _ADDS:
                self.seen.add(name)
                with self._going([name]):
                    self._arguments(node.value)
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)) if called in _SHOWS:
                with self._going([]):
                    self.visit(node.value.func)
                    self._arguments(node.value)
            case _:
                self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        match node.func:
            case ast.Name(id=called) | ast.Attribute(attr=called) if called in _COMPUTES:
                self.generic_visit(node)
            case _:
                with self._going(None):
                    self.generic_visit(node)

    def _arguments(self, call: ast.Call) -> None:
        for each in (*call.args, *call.keywords):
            self.visit(each)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        with self._going(None):
            self.generic_visit(node)


def _is_new(value: ast.expr) -> bool:
    """True if an expression makes an object that nobody else has; a number counts as one."""
    match value:
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called)):
            return called in _COMPUTES or called in _MAKES
        case ast.Call(func=ast.Subscript(value=ast.Name(id=called))):  # list[float]()
            return called in _MAKES
        case ast.IfExp():
            return _is_new(value.body) and _is_new(value.orelse)
        case ast.BoolOp():
            return all(map(_is_new, value.values))
    return not isinstance(
        value, ast.Name | ast.Attribute | ast.Subscript | ast.Call | ast.Await | ast.NamedExpr
    )
