"""Variables that a step takes over from the one before: the loop's body, or a function that it calls, may
read them before it sets them.

A best loss, a count of bad epochs, the hidden state of a recurrent network, a batch that was fetched ahead:
nobody can set a variable of a running function, so no snapshot brings them back. Which ones there are follows
from the byte code: they are alive where the loop begins anew, and the body sets them.
"""

from __future__ import annotations

import dis
import operator
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

# Functions and classes that are looked at; they call each other.
_MOST_FUNCTIONS = 300

# Of a comprehension, whose variable gets back its value.
_KEEPS = "LOAD_FAST_AND_CLEAR"
_LOADS = ("LOAD_FAST", "LOAD_NAME", "LOAD_DEREF", "LOAD_GLOBAL", "LOAD_CLASSDEREF", "DELETE_")
_STORES = ("STORE_FAST", "STORE_NAME", "STORE_DEREF", "STORE_GLOBAL")
_ENDS = (
    "RETURN_VALUE",
    "RETURN_CONST",
    "RAISE_VARARGS",
    "RERAISE",
    "JUMP_FORWARD",
    "JUMP_BACKWARD",
    "JUMP_ABSOLUTE",
)


def carried_variables(code: types.CodeType, at: int) -> frozenset[str]:
    """The variables that the body of a ``for`` loop takes over from the iteration before.

    Args:
        at: offset of the instruction that asks for the next item; no loop has it: there are none.
    """
    found = [i for i in dis.get_instructions(code) if not i.opname.startswith("CACHE")]
    place = {i.offset: n for n, i in enumerate(found)}
    head = place.get(at)
    if head is None or found[head].opname != "FOR_ITER":
        return frozenset()
    after = _successors(found, place)
    # The end of the loop is reached from its head only; what comes after is no part of the body.
    after[head] = [head + 1]
    body = _reachable(after, head)
    before = defaultdict(list)
    for n in body:
        for follows in after[n]:
            before[follows].append(n)
    if head not in before:
        return frozenset()
    body &= _reachable(before, head)
    alive: dict[int, frozenset[str]] = dict.fromkeys(body, frozenset())
    todo = list(body)
    while todo:
        n = todo.pop()
        later = frozenset[str]().union(*(alive[f] for f in after[n] if f in body))
        reads, sets = _uses(found[n])
        now = reads | (later - sets)
        if now != alive[n]:
            alive[n] = now
            todo += [b for b in before[n] if b in body]
    stored = frozenset[str]().union(*(_uses(found[n])[1] for n in body))
    return alive[head] & stored


def _successors(found: list[dis.Instruction], place: dict[int, int]) -> dict[int, list[int]]:
    after: dict[int, list[int]] = {}
    for n, instruction in enumerate(found):
        follows = [] if instruction.opname.startswith(_ENDS) else [n + 1]
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            follows.append(place[instruction.argval])
        after[n] = [f for f in follows if f < len(found)]
    return after


def _reachable(edges: dict[int, list[int]], start: int) -> set[int]:
    """What is reached from ``start`` in one step or more, and itself."""
    seen, todo = {start}, [start]
    while todo:
        for n in edges[todo.pop()]:
            if n not in seen:
                seen.add(n)
                todo.append(n)
    return seen


def _uses(instruction: dis.Instruction) -> tuple[frozenset[str], frozenset[str]]:
    """The variables that an instruction reads before it sets any, and those that it sets."""
    name, names = instruction.opname, instruction.argval
    names = names if isinstance(names, tuple) else (names,)
    if name == "STORE_FAST_LOAD_FAST":
        return frozenset(names[1:]) - frozenset(names[:1]), frozenset(names[:1])
    if name.startswith(_STORES):
        return frozenset(), frozenset(n for n in names if isinstance(n, str))
    if name.startswith(_LOADS) and name != _KEEPS:
        return frozenset(n for n in names if isinstance(n, str)), frozenset()
    return frozenset(), frozenset()


class Kept(NamedTuple):
    """What a function keeps between two calls.

    Attributes:
        name: of the variable, as a person finds it.
        get: its value now; an error if there is none.
    """

    name: str
    get: Callable[[], Any]


def kept_by_functions(
    code: types.CodeType, scope: dict[str, Any], values: Iterable[Any], of_user: Callable[[Any], bool]
) -> Iterator[Kept]:
    """Variables of closures, globals, attributes of functions and of classes that a program's functions use.

    Args:
        code: of the function with the loop; ``scope``: its globals.
        values: of the loop's variables.
        of_user: True for functions and classes that are neither Python's nor a library's.
    """
    walk = _Walk(of_user)
    for value in values:
        walk.add(value)
    yield from walk.globals_of(code, scope)
    yield from walk.run()


class _Walk:
    """From function to function, as one names the other."""

    def __init__(self, of_user: Callable[[Any], bool]) -> None:
        self._of_user = of_user
        self._todo: list[Any] = []
        self._seen = set[int]()
        self._names = set[tuple[int, str]]()

    def add(self, value: Any) -> bool:
        """Look at a function or class; False if it is none."""
        value = getattr(value, "__func__", value)
        if not isinstance(value, types.FunctionType | type):
            return False
        if id(value) not in self._seen and len(self._seen) < _MOST_FUNCTIONS and self._of_user(value):
            self._seen.add(id(value))
            self._todo.append(value)
        return True

    def run(self) -> Iterator[Kept]:
        while self._todo:
            each = self._todo.pop()
            yield from self._of_class(each) if isinstance(each, type) else self._of_function(each)

    def globals_of(self, code: types.CodeType, scope: dict[str, Any]) -> Iterator[Kept]:
        """The globals that code names, that of functions in it included, each once."""
        for name in code.co_names:
            if name in scope and (id(scope), name) not in self._names:
                self._names.add((id(scope), name))
                if not self.add(scope[name]):
                    yield Kept(name, partial(operator.getitem, scope, name))
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                yield from self.globals_of(inner, scope)

    def _of_class(self, kind: type) -> Iterator[Kept]:
        for name, value in [*vars(kind).items()]:
            if not name.startswith("__") and not self.add(value) and not hasattr(value, "__get__"):
                yield Kept(f"{kind.__qualname__}.{name}", partial(getattr, kind, name))

    def _of_function(self, function: types.FunctionType) -> Iterator[Kept]:
        name = function.__name__
        for key, value in vars(function).items():
            if not self.add(value):
                yield Kept(f"{name}.{key}", partial(getattr, function, key))
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if not self.add(_value(cell)):
                yield Kept(f"{variable} of {name}()", partial(getattr, cell, "cell_contents"))
        yield from self.globals_of(function.__code__, function.__globals__)


def _value(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing has been assigned yet
        return None
