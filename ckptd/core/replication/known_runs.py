"""What this node knows of each run without taking part: its epochs, and what it promised, as peers
tell (pure).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptd.core.replication.replicas import Promise

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
        before, promise, span = self._in_force(job, run)
        if epoch > before:
            carried = self._carried(job, run, before, promise)
            self._told[job, run] = (epoch, carried, span if carried.floor >= 0 else 1)
        return True

    def epochs(self, job: str, run: str) -> Mapping[int, int]:
        """The known epochs and their starts."""
        return self._epochs.get((job, run), {})

    def newest_epoch(self, job: str, run: str) -> int:
        """The highest known; -1: none."""
        return max(self.epochs(job, run), default=-1)

    def learn(self, job: str, run: str, epoch: int, told: Promise, span: int) -> None:
        """What a sender knows of the promise of this epoch; an older epoch's says nothing of a
        newer one but its floor.
        """
        known_epoch, known, known_span = self._told.get((job, run), _NOTHING)
        if epoch > known_epoch:
            known, known_span = Promise(), 1
        elif epoch < known_epoch:
            told = self._carried(job, run, epoch, told)
            if told.floor < 0:
                return
        latest = max(epoch, known_epoch)
        self._told[job, run] = (latest, _newer(known, told), max(known_span, span))

    def promise(self, job: str, run: str) -> tuple[Promise, int]:
        """What is promised, as far as it is known here, and the span; of two epochs the later one counts."""
        _, promise, span = self._in_force(job, run)
        return promise, span

    def forget_promises(self, of: Callable[[str, str], bool]) -> None:
        """Drop what was told of these runs: nothing of them is here."""
        self._told = {run: told for run, told in self._told.items() if not of(*run)}

    def _in_force(self, job: str, run: str) -> tuple[int, Promise, int]:
        """The latest epoch in which something was promised, the promise, and the span."""
        epoch, own, span = self._promise_of(job, run)
        told_epoch, told, told_span = self._told.get((job, run), _NOTHING)
        if epoch > told_epoch:
            return epoch, own, span
        if told_epoch > epoch:
            return told_epoch, told, told_span
        return epoch, _newer(own, told), max(span, told_span)

    def _carried(self, job: str, run: str, epoch: int, promise: Promise) -> Promise:
        """What of an older epoch's promise holds in the later ones: a floor that none of them was
        begun before.

        Its horizon does not: it would give away what a later floor needs.
        """
        starts = [start for later, start in self.epochs(job, run).items() if later > epoch]
        holds = bool(starts) and promise.floor <= min(starts)
        return Promise(promise.floor) if holds else Promise()


def _newer(a: Promise, b: Promise) -> Promise:
    return Promise(max(a.floor, b.floor), max(a.horizon, b.horizon))
