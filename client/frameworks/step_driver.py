"""The parts that the adapters share: `StepDriver` drives ``Checkpointer.steps`` from the loop of another
library, which reports the start of each step and the end of training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ckptd.client.capture.step_state import Stateful
from ckptd.client.checkpointer import Checkpointer
from ckptd.client.identity import identify
from ckptd.client.options import RunOptions

# Creates the Checkpointer when all its arguments exist: model, optimizer, state.
Make = Callable[[Any, Any, dict[str, Stateful]], Checkpointer]
SKIPS = "CkptdCallback(refetch=False)"

# The number of trainings started in this process, by job and run.
_begun: Counter[tuple[str, str]] = Counter()


class StepDriver:
    """Advances the loop of ``checkpointer`` step by step.

    Args:
        total: the number of steps of the whole training; a very large number if it is not known.
        start: the first step, if the library starts from its own checkpoint.
    """

    def __init__(self, checkpointer: Checkpointer, total: int, *, start: int = 0) -> None:
        self.checkpointer = checkpointer
        self._steps = checkpointer.steps(total, start=start)
        self._running = -1
        self._over = False

    def top(self, step: int) -> None:
        """Mark the top of step ``step``: all earlier work is complete. A second call for the same step does
        nothing.

        Raises:
            ReplayMismatch: a replayed step did not reproduce what was recorded.
        """
        if self._over or step == self._running:
            return
        if next(self._steps, None) is None:
            self._over = True
        self._running = step

    def finish(self, step: int) -> None:
        """The training ended before ``step``: take the last snapshot and detach from the daemon, which keeps
        the snapshots.
        """
        self.top(step)
        self.close()

    def close(self) -> None:
        """Detach before the end of training; the daemon keeps the snapshots."""
        self._over = True
        self._steps.close()
        self.checkpointer.close()


def name_of_this_training(run: RunOptions) -> RunOptions:
    """The job and run of one training of this process.

    A script may train several models, or one model several times. A restarted script does the same in the
    same order, so a number distinguishes the second training under a name from the first.
    """
    who = identify(run.job, run.name, 0, 1)
    _begun[who.job, who.run] += 1
    number = _begun[who.job, who.run]
    name = who.run if number == 1 else f"{who.run[:58]}.{number}"
    return replace(run, job=who.job, name=name)


def whole_state(own: Mapping[str, Stateful], given: Mapping[str, Stateful]) -> dict[str, Stateful]:
    """The objects of the library that ckptd captures itself, and those of the user.

    Raises:
        ValueError: two have the same name.
    """
    twice = sorted(own.keys() & given.keys())
    if twice:
        raise ValueError(
            f"state= contains {', '.join(twice)}, which ckptd captures itself: remove it, or choose another "
            "name"
        )
    return {**own, **given}


def check_shape(recorded: dict[str, int], now: dict[str, int]) -> None:
    """Compare the settings that determine the batches with those of the recording, by their user-visible
    names.

    Raises:
        ValueError: this training has other batches.
    """
    for name, before in recorded.items():
        if now.get(name) != before:
            raise ValueError(
                f"{name} was {before} when this run was recorded and is {now.get(name)} now, so the batches "
                f"would differ. Set it to {before}, or pass a new name to CkptdCallback(run=...)"
            )
