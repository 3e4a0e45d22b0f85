"""``Checkpointer.steps`` as a loop that is not ours goes through it: it says where a step begins,
and when there is none left.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ckptd.client.checkpointer import Checkpointer
from ckptd.client.identity import identify

__all__ = ["StepDriver", "check_checkpointer_options", "name_of_this_training"]

# Trainings that this process has begun, by job and run.
_begun: Counter[tuple[str, str]] = Counter()

_SET_BY_THE_LOOP = frozenset({"self", "model", "optimizer", "state"})


class StepDriver:
    """Advances the loop of ``checkpointer`` step by step.

    Args:
        total: the number of steps of the whole training; a very large number where it is not known.
        start: the first one, where the library begins at a checkpoint of its own.
    """

    def __init__(self, checkpointer: Checkpointer, total: int, *, start: int = 0) -> None:
        self.checkpointer = checkpointer
        self._steps = checkpointer.steps(total, start=start)
        self._running = -1
        self._over = False

    def top(self, step: int) -> None:
        """Step ``step`` begins here: everything before it is over. Said again for the same step, it
        does nothing.

        Raises:
            ReplayMismatch: a replayed step did not reproduce what was recorded.
        """
        if self._over or step == self._running:
            return
        if next(self._steps, None) is None:
            self._over = True
        self._running = step

    def finish(self, step: int) -> None:
        """The training ended before ``step``: take the last snapshot and let go of the daemon,
        which keeps them.
        """
        self.top(step)
        self.close()

    def close(self) -> None:
        """Let go in the middle; what was captured stays."""
        self._over = True
        self._steps.close()
        self.checkpointer.close()


def name_of_this_training(job: str | None, run: str | None) -> tuple[str, str]:
    """Job and run of one training of this process.

    A script may train several models, or one model several times. A successor does the same in the
    same order, so the second training under a name is told from the first by its number.
    """
    who = identify(job, run, 0, 1)
    _begun[who.job, who.run] += 1
    number = _begun[who.job, who.run]
    return who.job, who.run if number == 1 else f"{who.run[:58]}.{number}"


def check_checkpointer_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError at what ``Checkpointer`` does not take, or what the loop gives it."""
    known = inspect.signature(Checkpointer.__init__).parameters.keys() - _SET_BY_THE_LOOP
    unknown = sorted(options.keys() - known)
    if unknown:
        raise ValueError(
            f"CkptdCallback: unknown {', '.join(unknown)}; it takes {', '.join(sorted(known))} (see Checkpointer), and state="
        )
