"""What a host does, and what the job does, as events come: two machines without I/O and without a clock.

An *epoch* is one life of all trainers of a job: when one of them fails, all end, and the next epoch begins. A
trainer that can restart in its process does not end, but comes to the next epoch.
`HostLife` is the machine of one host. `JobEpochs` is the coordinator, in the host of rank 0: it alone decides
that an epoch is over, so that two failures at once, and failures that follow from a failure, are one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from ckptd.core.state_machine import MachineState, Transitions, validated


class HostState(MachineState):
    """States of one host."""

    STARTING = "starting", "no trainer; one of the current epoch is to be started"
    RUNNING = "running", "a trainer of the current epoch runs"
    STOPPING = "stopping", "a trainer of an earlier epoch was told to end, or to come to this one"
    FAILED = "failed", "the trainer has failed; the coordinator decides what follows"
    COMPLETED = "completed", "the trainer has succeeded, or is not needed; those of other ranks still run"
    DISMISSED = "dismissed", "all iterations are done without this trainer, which was told to end"
    ALONE = "alone", "no further epoch: the end of the trainer is the end of the host"
    ENDING = "ending", "a host was lost: the trainer was told to end, and its end is that of the host"
    OVER = "over", "the host ends"


class HostEvent(StrEnum):
    """What happens to one host."""

    START = "start"  # a trainer was started
    FAIL = "fail"  # the trainer ended, and not with exit code 0
    COMPLETE = "complete"  # the trainer ended with exit code 0
    BEGIN = "begin"  # the coordinator begins another epoch
    RELEASE = "release"  # all trainers of the job have succeeded
    ABANDON = "abandon"  # there will be no further epoch, or this host shall end
    STAY = "stay"  # a trainer of an earlier epoch has come to the current one, in its process
    STOP = "stop"  # a host was lost, so this epoch cannot go on, and there will be no further one
    DISMISS = "dismiss"  # in a job that re-routes, all others have done all iterations


_S, _E = HostState, HostEvent

TRANSITIONS = Transitions(
    "host",
    {
        (_S.STARTING, _E.START): _S.RUNNING,
        (_S.STARTING, _E.BEGIN): _S.STARTING,
        (_S.STARTING, _E.ABANDON): _S.OVER,
        (_S.STARTING, _E.STOP): _S.OVER,
        (_S.STARTING, _E.DISMISS): _S.COMPLETED,
        (_S.RUNNING, _E.FAIL): _S.FAILED,
        (_S.RUNNING, _E.COMPLETE): _S.COMPLETED,
        (_S.RUNNING, _E.BEGIN): _S.STOPPING,
        (_S.RUNNING, _E.ABANDON): _S.ALONE,
        (_S.RUNNING, _E.STOP): _S.ENDING,
        (_S.RUNNING, _E.DISMISS): _S.DISMISSED,
        (_S.STOPPING, _E.FAIL): _S.STARTING,
        (_S.STOPPING, _E.COMPLETE): _S.STARTING,
        (_S.STOPPING, _E.STAY): _S.RUNNING,
        (_S.STOPPING, _E.BEGIN): _S.STOPPING,
        (_S.STOPPING, _E.ABANDON): _S.ALONE,
        (_S.STOPPING, _E.STOP): _S.ENDING,
        (_S.STOPPING, _E.DISMISS): _S.DISMISSED,
        (_S.FAILED, _E.BEGIN): _S.STARTING,
        (_S.FAILED, _E.ABANDON): _S.OVER,
        (_S.FAILED, _E.STOP): _S.OVER,
        (_S.FAILED, _E.DISMISS): _S.COMPLETED,
        (_S.COMPLETED, _E.BEGIN): _S.STARTING,
        (_S.COMPLETED, _E.RELEASE): _S.OVER,
        (_S.COMPLETED, _E.ABANDON): _S.OVER,
        (_S.COMPLETED, _E.STOP): _S.OVER,
        (_S.COMPLETED, _E.DISMISS): _S.COMPLETED,
        (_S.DISMISSED, _E.FAIL): _S.COMPLETED,
        (_S.DISMISSED, _E.COMPLETE): _S.COMPLETED,
        (_S.DISMISSED, _E.RELEASE): _S.ALONE,
        (_S.DISMISSED, _E.ABANDON): _S.ALONE,
        (_S.DISMISSED, _E.STOP): _S.ENDING,
        (_S.ALONE, _E.FAIL): _S.OVER,
        (_S.ALONE, _E.COMPLETE): _S.OVER,
        (_S.ALONE, _E.ABANDON): _S.ALONE,
        (_S.ALONE, _E.STOP): _S.ALONE,
        (_S.ALONE, _E.DISMISS): _S.ALONE,
        (_S.ENDING, _E.FAIL): _S.OVER,
        (_S.ENDING, _E.COMPLETE): _S.OVER,
        (_S.ENDING, _E.ABANDON): _S.ENDING,
        (_S.ENDING, _E.STOP): _S.ENDING,
        (_S.ENDING, _E.DISMISS): _S.ENDING,
        (_S.OVER, _E.ABANDON): _S.OVER,
        (_S.OVER, _E.STOP): _S.OVER,
        (_S.OVER, _E.DISMISS): _S.OVER,
    },
)


class HostLife:
    """The state of one host, and the epoch that it is in.

    Attributes:
        stopped: it ends because a host was lost, however its trainer ends.
    """

    def __init__(self) -> None:
        self.state = HostState.STARTING
        self.epoch = 0
        self.stopped = False

    @validated
    def handle(self, event: HostEvent) -> HostState:
        """The state after an event that has no epoch."""
        assert event is not HostEvent.BEGIN, "an epoch begins with its number"
        before = self.state
        self.state = TRANSITIONS.after(self.state, event, epoch=self.epoch)
        if event is HostEvent.STOP and before not in (HostState.ALONE, HostState.OVER):
            self.stopped = True
        return self.state

    @validated
    def begin(self, epoch: int) -> HostState:
        """The coordinator begins an epoch. Orders of the past, or that come too late, change nothing."""
        closed = (HostState.DISMISSED, HostState.ALONE, HostState.ENDING, HostState.OVER)
        if epoch > self.epoch and self.state not in closed:
            self.epoch = epoch
            self.state = TRANSITIONS.after(self.state, HostEvent.BEGIN, epoch=epoch)
        return self.state

    def _validate(self) -> None:
        assert self.epoch >= 0
        assert self.state is not HostState.STOPPING or self.epoch > 0, "told to end, and no epoch follows"
        assert self.state is not HostState.ENDING or self.stopped


@dataclass(frozen=True, slots=True)
class BeginEpoch:
    """All hosts end their trainers of earlier epochs and start those of this one.

    Attributes:
        patience: deadlines of steps count so many times.
        without: ranks (of the start) whose hosts were lost. Those that are left close up in their order.
        staying: a trainer that can restart in its process need not end. Not where a trainer hangs (it may be
            this one), or the ranks have changed.
        absent: ranks whose work others do until they are back, in a job that re-routes.
        at_boundary: nobody has failed, so the iteration that runs may end before.
    """

    epoch: int
    because: str
    patience: int = 1
    without: tuple[int, ...] = ()
    staying: bool = True
    absent: tuple[int, ...] = ()
    at_boundary: bool = False


@dataclass(frozen=True, slots=True)
class EndLoops:
    """All trainers of a job that re-routes have done all iterations: none waits for another any more."""

    absent: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReleaseHosts:
    """All trainers have succeeded: the hosts end."""


@dataclass(frozen=True, slots=True)
class AbandonJob:
    """No further epoch: each host ends with its trainer, and the launcher decides what follows."""

    because: str


@dataclass(frozen=True, slots=True)
class StopJob:
    """No further epoch, nor can this one go on: each host ends its trainer, and then itself as a failure."""

    because: str


STORE_LOST = "the server of stores has ended"
_PATIENCE_FACTOR = 4
_PATIENCE_MAX = 4**5

Order = BeginEpoch | EndLoops | ReleaseHosts | AbandonJob | StopJob


class JobEpochs:
    """The epochs of a job, in the order in which its coordinator hears of failures.

    Ranks are those of the start.

    Args:
        world_size: number of ranks.
        max_restarts: failures after which there is no further epoch; failures before an epoch that lasted
            ``steady_s`` do not count.
        steady_s: an epoch that lasts this long shows that the job can run.
        min_ranks: the job can go on with so many ranks once all have joined; ``world_size`` if it needs all.

    Attributes:
        ranks: those of the current epoch.
        departing: those of them whose hosts were told to end; the next epoch is without them.
    """

    def __init__(
        self, world_size: int, *, max_restarts: int, steady_s: float, min_ranks: int | None = None
    ) -> None:
        self._world_size, self._max_restarts, self._steady_s = world_size, max_restarts, steady_s
        self._min_ranks = self._min_ranks_joined = world_size
        if min_ranks is not None:
            self._min_ranks_joined = min_ranks
        self.ranks = tuple(range(world_size))
        self.departing: set[int] = set()
        self.epoch = 0
        self.failures = 0
        self._begun_s: float | None = None
        self._completed: set[int] = set()
        self._hung_at, self._patience = -1, 1
        self.last: Order | None = None

    @validated
    def joined(self) -> None:
        """All hosts have joined."""
        self._min_ranks = self._min_ranks_joined

    @validated
    def started(self, rank: int, epoch: int, now_s: float) -> None:
        """A trainer of an epoch has started."""
        if epoch == self.epoch and self._begun_s is None:
            self._begun_s = now_s

    @validated
    def failed(self, rank: int, epoch: int, why: str, now_s: float) -> Order | None:
        """A trainer has failed; None if that is no news: it was of an epoch that is over, or could not go on
        without those that are departing.
        """
        if self.closed or epoch != self.epoch or self.departing:
            return None
        return self._next(why, now_s, staying=True)

    def _next(self, why: str, now_s: float, *, staying: bool) -> Order:
        if self._begun_s is not None and now_s - self._begun_s >= self._steady_s:
            self.failures = 0
        self.failures += 1
        if self.failures > self._max_restarts:
            tries = f"{self.failures} failures" if self.failures > 1 else "a failure"
            return self._give(
                AbandonJob(f"{tries}, and {self._max_restarts} restarts are allowed; last: {why}")
            )
        return self._begin(why, staying=staying)

    def _begin(self, why: str, *, staying: bool) -> Order:
        self.epoch += 1
        self._begun_s = None
        self._completed.clear()
        gone = tuple(rank for rank in range(self._world_size) if rank not in self.ranks)
        return self._give(BeginEpoch(self.epoch, why, self._patience, gone, staying))

    @validated
    def hung(self, step: int, why: str, now_s: float) -> Order | None:
        """A step of this epoch does not end. If that was so before, the deadline may have been too short."""
        if self.closed or self.departing:
            return None
        again = step <= self._hung_at
        self._patience = min(_PATIENCE_FACTOR * self._patience, _PATIENCE_MAX) if again else 1
        self._hung_at = max(step, self._hung_at)
        return self._stopped_if_abandoned(self._next(why, now_s, staying=False))

    def _stopped_if_abandoned(self, order: Order) -> Order:
        """Where trainers hang, or wait for one that is gone: they would not end by themselves."""
        return self._give(StopJob(order.because)) if isinstance(order, AbandonJob) else order

    @validated
    def store_lost(self, epoch: int, now_s: float) -> Order | None:
        """The store of an epoch has gone: trainers that have not met yet would look for it for minutes."""
        return self.failed(0, epoch, STORE_LOST, now_s)

    @validated
    def completed(self, rank: int, epoch: int) -> Order | None:
        """A trainer has succeeded."""
        if self.closed or epoch != self.epoch or rank not in self.ranks:
            return None
        self._completed.add(rank)
        return self._give(ReleaseHosts()) if len(self._completed) == len(self.ranks) else None

    @validated
    def left(self, ranks: Collection[int], why: str) -> Order | None:
        """Hosts begin no further epoch; their trainers may go on. If the job can go on without them, they are
        departing (`depart`).
        """
        if self.closed or not self._here(ranks):
            return None
        if self._enough_without(self.departing | set(ranks)):
            self.departing |= self._here(ranks)
            return None
        return self._give(AbandonJob(why))

    @validated
    def depart(self, why: str, now_s: float) -> Order | None:
        """The next epoch begins, without those that are departing."""
        if self.closed or not self.departing:
            return None
        return self._without(self.departing, why, now_s)

    @validated
    def lost(self, ranks: Collection[int], why: str, now_s: float) -> Order | None:
        """Hosts have gone, and their trainers with them. After the last order that is as it should be.

        Args:
            ranks: none, if it is not known which, and the job cannot go on.
        """
        gone = self._here(ranks)
        if self.closed or (ranks and not gone):
            return None
        if not gone or not self._enough_without(self.departing | gone):
            return self._give(StopJob(why))
        return self._without(self.departing | gone, why, now_s)

    def _here(self, ranks: Collection[int]) -> set[int]:
        return set(ranks) & set(self.ranks)

    def _enough_without(self, gone: Collection[int]) -> bool:
        return 0 not in gone and len(self.ranks) - len(gone) >= self._min_ranks

    def _without(self, gone: Collection[int], why: str, now_s: float) -> Order:
        self.ranks = tuple(rank for rank in self.ranks if rank not in gone)
        self.departing = set()
        return self._stopped_if_abandoned(self._next(why, now_s, staying=False))

    @property
    def closed(self) -> bool:
        """Whether there is no further epoch."""
        return isinstance(self.last, ReleaseHosts | AbandonJob | StopJob)

    def _give(self, order: Order) -> Order:
        self.last = order
        return order

    def _validate(self) -> None:
        assert 0 <= self.failures <= self._max_restarts + 1
        assert self._completed <= set(self.ranks)
        assert self.departing < set(self.ranks)
        assert 0 in self.ranks
        assert self._min_ranks <= len(self.ranks) <= self._world_size
        assert not isinstance(self.last, BeginEpoch) or self.last.epoch == self.epoch
