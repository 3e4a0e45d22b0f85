"""``optimizer.step(closure)``: forward and backward run within the step, so its beginning is not
where weights change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["before_update", "closure_of", "with_closure"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def before_update(
    args: tuple[Any, ...], kwargs: dict[str, Any], work: Callable[[Any], None]
) -> Arguments | None:
    """Do ``work`` when gradients are complete and weights are not yet changed: now, or after the
    closure that ``step`` is given.

    Args:
        args, kwargs: as a pre-hook of ``Optimizer.step`` receives them (the optimizer is the first).
        work: called with what the closure returned; with None where there is no closure.
    Returns:
        What the pre-hook must return: arguments with the closure wrapped, or None to leave them as they are.
    """
    closure = closure_of(args, kwargs)
    if closure is None:
        work(None)
        return None

    def followed() -> Any:
        result = closure()
        work(result)
        return result

    return with_closure(args, kwargs, followed)


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of a step; None if there is none."""
    named = kwargs.get("closure")
    closure = named if named is not None else args[1] if len(args) > 1 else None
    return closure if callable(closure) else None


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Callable[[], Any]) -> Arguments:
    """The arguments of a step with another closure in the place of theirs."""
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs
