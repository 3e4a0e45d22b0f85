"""Copy beside training, or in the training thread? Decided by measurement (pure: fed with iteration times).

With a spare core a copying thread is free; where training keeps every core busy it delays each
parallel region by a scheduler's slice, and copying at the top of the loop is cheaper. Which of the
two holds cannot be known in advance: both are tried in turn, in short blocks so that drift cancels,
and looked at again now and then.
"""

from __future__ import annotations

import statistics

__all__ = ["CopyModeChooser"]

_BLOCK = 6
_BLOCKS_EACH = 3
# Inline stalls the trainer visibly, so it must win clearly.
_MARGIN = 0.99


class CopyModeChooser:
    """Alternates threaded and inline copies for ``2 * _BLOCKS_EACH`` blocks, then keeps the faster.

    Args:
        again_after: how many iterations a decision holds.
    """

    def __init__(self, *, again_after: int = 2000) -> None:
        self._again_after = again_after
        self._restart()
        self.inline = False

    def _restart(self) -> None:
        self._times: dict[bool, list[float]] = {False: [], True: []}
        self._count = 0
        self.decided = False

    def note(self, iteration_s: float) -> bool:
        """An iteration under the current mode took this long; returns whether the next one copies inline."""
        position = self._count % _BLOCK
        if not self.decided and position:  # the first of a block still carries the other mode's copy
            self._times[self.inline].append(iteration_s)
        self._count += 1
        if self.decided:
            if self._count >= self._again_after:
                self._restart()
        elif self._count >= 2 * _BLOCKS_EACH * _BLOCK:
            threaded, inline = (statistics.median(self._times[mode]) for mode in (False, True))
            self.inline = inline < _MARGIN * threaded
            self.decided, self._count = True, 0
            self.reason = f"threaded {threaded * 1e3:.2f} ms, inline {inline * 1e3:.2f} ms per iteration"
        elif self._count % _BLOCK == 0:
            self.inline = not self.inline
        return self.inline

    reason = "not measured yet"
