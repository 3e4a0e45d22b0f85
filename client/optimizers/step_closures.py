"""``optimizer.step(closure)``: forward and backward run within the step, so its beginning is not
where weights change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["before_update"]


def before_update(
    args: tuple[Any, ...], kwargs: dict[str, Any], work: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Do ``work`` when gradients are complete and weights are not yet changed: now, or after the
    closure that ``step`` is given.

    Args:
        args, kwargs: as a pre-hook of ``Optimizer.step`` receives them (the optimizer is the first).
    Returns:
        What the pre-hook must return: arguments with the closure wrapped, or None to leave them as they are.
    """
    named = kwargs.get("closure")
    closure = named if named is not None else args[1] if len(args) > 1 else None
    if not callable(closure):
        work()
        return None

    def followed() -> Any:
        result = closure()
        work()
        return result

    if named is not None:
        return args, {**kwargs, "closure": followed}
    return (args[0], followed, *args[2:]), kwargs
