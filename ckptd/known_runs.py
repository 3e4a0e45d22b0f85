"""What this node knows of each run without taking part: its epochs, and what it promised, as peers tell (pure)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptd.replicas import Promise

__all__ = ["KnownRuns"]

RunName = tuple[str, str]  # job, run
_NOTHING = (-1, Promise(), 1)


class KnownRuns:
    """Epochs and promises by run.

    Args:
        promise_of: what this node's own ranks agreed on: in which epoch, the promise, and the span.
    """

    def __init__(self, promise_of: Callable[[str, str], tuple[int, Promise, int]]) -> None:
        self._promise_of = promise_of
        self._epochs: dict[RunName, dict[int, int]] = {}
        self._told: dict[RunName, tuple[int, Promise, int]] = {}

    def note_epoch(self, job: str, run: str, epoch: int, start: int) -> bool:
        """A recovery began this epoch; whether that is news."""
        known = self._epochs.setdefault((job, run), {})
        if known.get(epoch) == start:
            return False
        known[epoch] = start
        return True

    def epochs(self, job: str, run: str) -> Mapping[int, int]:
        """The known epochs and their starts."""
        return self._epochs.get((job, run), {})

    def newest_epoch(self, job: str, run: str) -> int:
        """The highest known; -1: none."""
        return max(self.epochs(job, run), default=-1)

    def learn(self, job: str, run: str, epoch: int, told: Promise, span: int) -> None:
        """What a sender knows of the promise; what an older epoch agreed on says nothing of this one."""
        known_epoch, known, known_span = self._told.get((job, run), _NOTHING)
        if epoch > known_epoch:
            known, known_span = Promise(), 1
        elif epoch < known_epoch:
            return
        self._told[job, run] = (epoch, _newer(known, told), max(known_span, span))

    def promise(self, job: str, run: str) -> tuple[Promise, int]:
        """What is promised, as far as it is known here, and the span; of two epochs the later one counts."""
        epoch, own, span = self._promise_of(job, run)
        told_epoch, told, told_span = self._told.get((job, run), _NOTHING)
        if epoch > told_epoch:
            return own, span
        if told_epoch > epoch:
            return told, told_span
        return _newer(own, told), max(span, told_span)

    def forget_promises(self, of: Callable[[str, str], bool]) -> None:
        """Drop what was told of these runs: nothing of them is here."""
        self._told = {run: told for run, told in self._told.items() if not of(*run)}


def _newer(a: Promise, b: Promise) -> Promise:
    return Promise(max(a.floor, b.floor), max(a.horizon, b.horizon))
