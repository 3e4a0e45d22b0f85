"""Values that all ranks compute together in a step, such as a gradient norm over all stages: computed
once, then recorded.

In a replay, and while not all ranks run an iteration, the value cannot be computed. It then comes from
this rank's own record of the step, or, because it is the same on all ranks, from another rank's log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptd.client import values
from ckptd.client.model.freezing import Tape
from ckptd.client.pipeline.boundary_log import BoundaryLog

__all__ = ["shared_value"]


def shared_value(name: str, compute: Callable[[], Any], tape: Tape, log: BoundaryLog | None) -> Any:
    """The result of ``compute``, or its recorded result from the first run of this step.

    Raises:
        ValueError: the value has a type that cannot be recorded.
        CorruptionError: not all ranks run this iteration, and no log that is read contains the value.
    """
    found = tape.recorded(name)
    if found is None and log is not None:
        found = log.isolated_value(name)
    if found is not None:
        value = found[0]
    else:
        value = _computed(compute, log)
        tape.record(name, value)
    if log is not None:
        log.value(values.pack([name, _detached(value)], f"shared value {name!r}"))
    return value


def _computed(compute: Callable[[], Any], log: BoundaryLog | None) -> Any:
    if log is None:
        return compute()
    with log.aside():
        return compute()


def _detached(value: Any) -> Any:
    """A tensor without its autograd history."""
    return value.detach() if hasattr(value, "detach") else value
