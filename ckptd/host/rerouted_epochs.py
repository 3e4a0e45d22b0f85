"""The epochs of a job that goes on without those that fail (``--reroute``); without I/O and without a clock.

The trainers of such a job do each other's work (`ckptd.core.reroute`). If one fails, the next epoch is that
of all others, which stay. The host of the failed one starts another trainer meanwhile; once that is *ready*,
one more epoch begins, at a boundary of iterations. A host that is lost comes back the same way: another one
is started in its place.

What a host says of a trainer arrives in the order in which it happened, so no word of a rank needs the
epoch's number to be told from those of the process before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ckptd.core.state_machine import validated
from ckptd.host.epochs import (
    STORE_LOST,
    AbandonJob,
    BeginEpoch,
    EndLoops,
    JobEpochs,
    Order,
    ReleaseHosts,
    StopJob,
)


class ReroutedEpochs(JobEpochs):
    """As `JobEpochs`, whose limit of failures counts those of trainers that are absent, too.

    The job does not go on without the host of rank 0, and ends for a new start beyond the limit.

    Attributes:
        absent: ranks without which the current epoch goes on.
    """

    def __init__(self, world_size: int, *, max_restarts: int, steady_s: float) -> None:
        self.absent: set[int] = set()
        self._finished: set[int] = set()
        self._over = False
        super().__init__(world_size, max_restarts=max_restarts, steady_s=steady_s)

    @validated
    def failed(self, rank: int, epoch: int, why: str, now_s: float) -> Order | None:
        """A trainer has failed. Nobody waits for one that was absent: the others go on to their boundary."""
        if self.closed:
            return None
        if self._over:  # the others need it no more, and nobody will restart it
            return self._give(AbandonJob(why))
        return self._without_some({rank}, why, now_s)

    @validated
    def lost(self, ranks: Collection[int], why: str, now_s: float) -> Order | None:
        """Hosts have gone, and their trainers with them."""
        if self.closed or (ranks and self.absent.issuperset(ranks)):
            return None
        if self._over:
            return self._give(AbandonJob(why))
        if not ranks or 0 in ranks:
            return self._give(StopJob(why))
        return self._without_some(ranks, why, now_s)

    @validated
    def left(self, ranks: Collection[int], why: str) -> Order | None:
        """Hosts were told to end: the others need not wait for that."""
        if self.closed or self._over or self.absent.issuperset(ranks):
            return None
        if 0 in ranks:
            return self._give(AbandonJob(why))
        return self._without_some(ranks, why, self._begun_s or 0.0)

    @validated
    def hung(self, step: int, why: str, now_s: float) -> Order | None:
        """Who hangs is not known, so nobody has a state to go on from."""
        return None if self.closed else self._give(StopJob(why))

    @validated
    def store_lost(self, epoch: int, now_s: float) -> Order | None:
        """Nobody is missed for that, and those that have met go on to their boundary."""
        if self.closed or self._over or epoch != self.epoch:
            return None
        order = self._stopped_if_abandoned(self._next(STORE_LOST, now_s, staying=True))
        return self._announced(order, at_boundary=True)

    @validated
    def ready(self, rank: int, epoch: int) -> Order | None:
        """A trainer that was absent could take its place again. That is no failure."""
        if self.closed or self._over or rank not in self.absent:
            return None
        self.absent.discard(rank)
        return self._announced(self._begin(f"rank {rank} is back", staying=True), at_boundary=True)

    @validated
    def finished(self, rank: int, epoch: int) -> Order | None:
        """A trainer has done all iterations of the epoch; it may be asked to do the last one again."""
        if self.closed or self._over or epoch != self.epoch or rank in self.absent:
            return None
        self._finished.add(rank)
        if self._finished < self._present:
            return None
        self._over = True
        return self._give(EndLoops(tuple(sorted(self.absent))))

    @validated
    def cannot_go_on(self, epoch: int, why: str) -> Order | None:
        """Those that are left lack what nobody has: the job must come back from snapshots."""
        if self.closed or self._over or epoch != self.epoch:
            return None
        return self._give(StopJob(why))

    @validated
    def completed(self, rank: int, epoch: int) -> Order | None:
        """A trainer has succeeded; those that are absent have nothing left to do."""
        if self.closed or epoch != self.epoch or rank in self.absent:
            return None
        self._completed.add(rank)
        return self._give(ReleaseHosts()) if self._completed == self._present else None

    @property
    def _present(self) -> set[int]:
        return set(self.ranks) - self.absent

    def _without_some(self, gone: Collection[int], why: str, now_s: float) -> Order:
        waited_for = not self.absent.issuperset(gone)
        self.absent.update(gone)
        if not self._present:
            return self._give(StopJob(f"no trainer is left; last: {why}"))
        order = self._stopped_if_abandoned(self._next(why, now_s, staying=True))
        return self._announced(order, at_boundary=not waited_for)

    def _announced(self, order: Order, *, at_boundary: bool) -> Order:
        if not isinstance(order, BeginEpoch):
            return order
        self._finished.clear()
        return self._give(replace(order, absent=tuple(sorted(self.absent)), at_boundary=at_boundary))

    def _validate(self) -> None:
        super()._validate()
        assert self.absent <= set(self.ranks)
        assert self._finished <= self._present
        assert not self.departing
