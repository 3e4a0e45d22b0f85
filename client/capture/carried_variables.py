"""Variables that a loop's body takes over from the step before: it may read them before it sets them.

A best loss, a count of bad epochs, the hidden state of a recurrent network, a batch that was fetched ahead:
nobody can set a variable of a running function, so no snapshot brings them back. Which ones there are follows
from the byte code: they are alive where the loop begins anew, and the body sets them.
"""

from __future__ import annotations

import dis
import types
from collections import defaultdict

__all__ = ["carried_variables"]

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
