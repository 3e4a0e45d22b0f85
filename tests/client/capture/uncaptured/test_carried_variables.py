"""Which variables a loop's body takes over from the step before."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ckptd.client.capture.uncaptured.carried_variables import carried_variables, kept_by_functions


def carried(found: list[frozenset[str]]) -> Iterator[int]:
    frame = sys._getframe(1)
    found.append(carried_variables(frame.f_code, frame.f_lasti))
    yield from range(2)


def test_what_is_read_before_it_is_set() -> None:
    found: list[frozenset[str]] = []
    best, bad, hidden, batch, epoch, fixed = 9.0, 0, None, 1, 0, 2
    for step in carried(found):
        loss = batch * fixed * 0.5
        batch = step
        hidden = loss if hidden is None else hidden + loss
        if loss < best:
            best, bad = loss, 0
        else:
            bad += 1
        if step % 2:
            epoch += 1
    assert found == [{"best", "bad", "hidden", "batch", "epoch"}]


def test_what_each_step_sets_is_not_carried() -> None:
    """Nor what is read after the loop alone, nor the variable of a comprehension."""
    found: list[frozenset[str]] = []
    last = None
    for step in carried(found):
        squares = [n * n for n in range(step)]
        with contextlib.nullcontext() as nothing:
            value = (squares, nothing)
        last = value
        if step:
            continue
        for inner in squares:
            value = ([inner], None)
    assert last is not None
    assert found == [frozenset()]


def test_variables_of_a_module_and_of_closures() -> None:
    found: list[frozenset[str]] = []
    scope = {"carried": carried, "found": found}
    exec("count = 0\nfor step in carried(found):\n    count += step\n    twice = 2 * count", scope)  # noqa: S102
    total = 0

    def add() -> int:
        return total

    for step in carried(found):
        total += step + add()
    assert found == [{"count"}, {"total"}]


def test_no_loop() -> None:
    found: list[frozenset[str]] = []
    steps = carried(found)
    next(steps)
    assert found == [frozenset()]


CALLS = 0
SEEN: list[float] = []
FIXED = 3


class Scale:
    used = 0

    @staticmethod
    def of(value: float) -> float:
        Scale.used += 1
        return value * FIXED


def warming() -> Callable[[], float]:
    steps = 0

    def warm() -> float:
        nonlocal steps
        steps += 1
        return Scale.of(steps)

    return warm


def loss() -> float:
    global CALLS
    CALLS += 1
    SEEN.append(CALLS)
    loss.last = CALLS  # type: ignore[attr-defined]
    return CALLS


def loop(warm: Callable[[], float]) -> float:
    return warm() + loss()


def test_what_functions_keep() -> None:
    """Of closures, of the module, of classes and of functions themselves, wherever one calls the other."""
    warm = warming()
    loop(warm)
    found = {
        kept.name: kept.get
        for kept in kept_by_functions(loop.__code__, globals(), [warm, 5], lambda f: f.__module__ == __name__)
    }
    assert found.keys() == {"steps of warm()", "CALLS", "SEEN", "Scale.used", "FIXED", "loss.last"}

    def values() -> dict[str, Any]:
        return {name: get() for name, get in found.items()}

    before = values() | {"SEEN": list(SEEN)}
    loop(warm)
    after = values()
    assert {name for name in after if after[name] != before[name]} == found.keys() - {"FIXED"}
