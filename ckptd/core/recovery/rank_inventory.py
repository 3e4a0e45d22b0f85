"""The inventory of each rank for a localized recovery: its parked states, snapshots and logs that
count. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckptd.core.recovery.held import HeldRecords
from ckptd.core.recovery.tables import (
    Copy,
    Group,
    Known,
    groups_of,
    nodes_of,
    numbers_by_rank,
    record_of,
    whole_images,
)

__all__ = ["RankHoldings"]


class RankHoldings:
    """The inventory of each rank; snapshots and logs are merged on first use."""

    def __init__(
        self,
        snapshots: Known,
        parked: Known,
        logs: Known,
        limits: Mapping[int, int],
        world_size: int,
        homes: Mapping[int, str],
    ) -> None:
        self.homes = homes
        self.snapshots, self.parked, self.sent = snapshots, parked, logs
        self._limits = limits
        # The tensors sent in a step follow the state before it.
        self._log_limits = {epoch: last - 1 for epoch, last in limits.items()}
        self._snapshots_of, self._logs_of = numbers_by_rank(snapshots), numbers_by_rank(logs)
        self._groups: dict[int, Sequence[Group]] = {}
        self._logs: dict[int, dict[int, tuple[Copy, ...]]] = {}
        self.parks = {
            rank: parks
            for rank, numbers in numbers_by_rank(parked).items()
            if (parks := self._parks(numbers))
        }
        ranks = {*self._snapshots_of, *self._logs_of, *self.parks}
        self.beyond = sorted(rank for rank in ranks if not 0 <= rank < world_size)

    def groups(self, rank: int) -> Sequence[Group]:
        """The snapshots of a rank, by operator table."""
        if rank not in self._groups:
            numbers = self._snapshots_of.get(rank, ())
            self._groups[rank] = groups_of(numbers, self.snapshots, self._limits)
        return self._groups[rank]

    def snapshot(self, rank: int, iteration: int) -> tuple[Copy, ...] | None:
        """The copies of a rank's snapshot of an iteration."""
        found = [g for g in self.groups(rank) if iteration in g.newest]
        if not found:
            return None
        newest = max(found, key=lambda g: (g.newest[iteration].epoch, g.newest[iteration].sequence))
        return newest.copies[iteration]

    def fits(self, rank: int, peer: int, iteration: int) -> bool:
        """Whether a peer's parked state completes a snapshot of the rank: both have the same operator
        table.
        """
        own = self.snapshot(rank, iteration)
        return own is not None and _table_of(self.snapshots[own[0][0]]) == self._parked_table(peer, iteration)

    def stays(self, rank: int, iteration: int) -> bool:
        """Whether the rank was parked on the node on which it will run, as far as that is known."""
        home = self.homes.get(rank)
        return home is None or home in nodes_of(self.parks[rank][iteration], self.parked)

    def goes_on(self, rank: int, iteration: int) -> bool:
        """Whether the rank was parked, and its ring exists or can begin with a snapshot."""
        if iteration not in self.parks.get(rank, ()):
            return False
        return self.stays(rank, iteration) or self.beginning(rank, iteration) is not None

    def beginning(self, rank: int, iteration: int) -> tuple[Copy, ...] | None:
        """The copies of a rank's newest snapshot up to an iteration that has the operator table of its
        parked state of that iteration.
        """
        table = self._parked_table(rank, iteration)
        found = (
            (t, group.copies[t])
            for group in self.groups(rank)
            for t in group.newest
            if t <= iteration and _table_of(self.snapshots[group.copies[t][0][0]]) == table
        )
        return max(found, default=(-1, None))[1]

    def _parked_table(self, rank: int, iteration: int) -> tuple[int, str]:
        return _table_of(self.parked[self.parks[rank][iteration][0][0]])

    def logs(self, rank: int) -> Mapping[int, tuple[Copy, ...]]:
        """The complete logs of a rank that count, by iteration."""
        if rank not in self._logs:
            numbers = self._logs_of.get(rank, ())
            self._logs[rank] = whole_images(numbers, self.sent, self._log_limits)
        return self._logs[rank]

    def has_log(self, rank: int, iteration: int) -> bool:
        """Whether a node holds the rank's log of an iteration."""
        return iteration in self.logs(rank)

    def went_past(self, rank: int, iteration: int, *, or_dense_at: bool = False) -> bool:
        """Whether the rank may have a snapshot after an iteration, or one of it that anchors all operators.

        A fast check that counts stale snapshots, too.
        """
        for number in self._snapshots_of.get(rank, ()):
            h = self.snapshots[number]
            everything = (1 << h.num_operators) - 1
            for r in h.records:
                if r.iteration < iteration or not r.sealed:
                    continue
                if r.iteration > iteration or (or_dense_at and r.anchors & everything == everything):
                    return True
        return False

    def _parks(self, numbers: Iterable[int]) -> dict[int, tuple[Copy, ...]]:
        """The parked states of a rank by iteration; each is complete by itself."""
        images = whole_images(numbers, self.parked, self._limits)
        return {t: copies for t, copies in images.items() if self._anchors_all(copies[0])}

    def _anchors_all(self, copy: Copy) -> bool:
        everything = (1 << self.parked[copy[0]].num_operators) - 1
        return record_of(copy, self.parked).anchors & everything == everything


def _table_of(held: HeldRecords) -> tuple[int, str]:
    """The operator table of its records."""
    return held.num_operators, held.operators_id
