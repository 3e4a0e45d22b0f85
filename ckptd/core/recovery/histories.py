"""The history of a run that counts, and its inventory (docs/replication.md section 2). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ckptd.core.recovery.held import HeldRecords
from ckptd.core.slots.slots import least_starts, other_histories

__all__ = ["History", "history_of"]


@dataclass(frozen=True, slots=True)
class History:
    """The history of a run that counts.

    Attributes:
        others: the known epochs that do not belong to it.
        begun: its known epochs, with the iteration at which each began.
    """

    others: frozenset[int]
    begun: Mapping[int, int]

    def held(self, held: Iterable[HeldRecords]) -> tuple[HeldRecords, ...]:
        """The inventories without the records of other histories."""
        if not self.others:
            return tuple(held)
        return tuple(
            replace(h, records=tuple(r for r in h.records if r.epoch not in self.others)) for h in held
        )


def history_of(
    held: Iterable[HeldRecords],
    epochs: Iterable[tuple[int, int, int]],
    *,
    complete: bool = False,
) -> History:
    """Choose the history that counts, from the inventories and epochs of the nodes that answered.

    Args:
        complete: every node that may hold something has answered.
        held: snapshots, boundary logs and parked states.
        epochs: from the nodes' records: an epoch, the iteration at which it began, and the epoch
            that it follows (-1: not known).
    """
    known = list(epochs)
    follows: dict[int, int] = {}
    for epoch, _, before in known:
        follows[epoch] = max(before, follows.get(epoch, -1))
    sealed = {record.epoch for h in held for record in h.records}
    empty = follows.keys() - sealed
    others = other_histories(sealed | follows.keys(), follows, empty=empty, complete=complete)
    begun = least_starts(*({epoch: start} for epoch, start, _ in known if epoch not in others))
    return History(frozenset(others), begun)
