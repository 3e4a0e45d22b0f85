"""Where each rank could resume from each tier alone: one computation for metrics and page. Pure."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from ckptd.transport import messages as m


@dataclass(slots=True)
class TierEnds:
    """The iteration at which a rank could resume from each tier alone; -1: at none. None: it does not use the
    tier, or this node does not know.

    Args:
        memory: its own ring, if that is on this node.
        peers: the best replica on a node that answers, if it is to have any.
        storage: the newest checkpoint that all ranks of the run have committed, if there is a store.
    """

    memory: int | None = None
    peers: int | None = None
    storage: int | None = None


@dataclass(frozen=True, slots=True)
class RecoverableAt:
    """The tiers of all ranks of this node, and what is known of the others."""

    of_ranks: dict[tuple[str, str, int], TierEnds] = field(default_factory=lambda: defaultdict(TierEnds))
    of_runs: dict[tuple[str, str], int] = field(default_factory=dict)

    def at(self, job: str, run: str, rank: int) -> TierEnds:
        """The tiers of a rank; a committed checkpoint has all ranks, those of other nodes, too."""
        found = self.of_ranks.get((job, run, rank), TierEnds())
        storage = self.of_runs.get((job, run)) if found.storage is None else found.storage
        return TierEnds(found.memory, found.peers, storage)


def recoverable(status: m.Status, snapshots: m.Snapshots, peers: m.Peers) -> RecoverableAt:
    """The tiers, from the daemon's answers of one moment."""
    found = RecoverableAt()
    for ring in snapshots.ranks:
        found.of_ranks[ring.job, ring.run, ring.rank].memory = ring.suffix[1]
    for replicated in peers.ranks:
        if replicated.kind == "snapshots" and (replicated.wanted or replicated.targets):
            name = replicated.job, replicated.run, replicated.rank
            ends = (target.current_up_to for target in replicated.targets if target.alive)
            found.of_ranks[name].peers = max(ends, default=-1)
    for durable in () if status.durable is None else status.durable.ranks:
        found.of_ranks[durable.job, durable.run, durable.rank].storage = durable.committed
        found.of_runs[durable.job, durable.run] = durable.committed
    return found
