"""What boundary logs tell of ranks that do not speak for themselves: a rank that has lost its node,
or whose node is only asked. Pure.

A log's descriptor has the facts of its rank (`ckptd.core.recovery.recovery_facts`), and so has each
replica of it. Facts grow, and with them the log: those of the newest generation count. A replica
may be of an older one. What it tells is therefore taken only if it holds what its rank sent shortly
before the end: then it is what the rank knew there. Whoever is not told of this way has told
nothing, which costs replay and no exactness.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ckptd.core.recovery.held import HeldRecords
from ckptd.core.recovery.recovery_facts import RankFacts, facts_from_wire
from ckptd.core.slots.boundary import outdated
from ckptd.core.slots.ring import epoch_table, live

__all__ = ["facts_from_logs"]

# The step before the last may have been the last one that a rank completed; and its newest log may
# not have been sealed.
_AT_MOST_BEFORE = 2


def facts_from_logs(
    ranks: Collection[int], logs: Iterable[HeldRecords], parked: Iterable[HeldRecords]
) -> dict[int, RankFacts]:
    """By rank: the facts in the log that was filled last, of those who logged up to the newest
    iteration that any rank was parked at.

    Args:
        ranks: those who do not speak for themselves; nothing is read of others, since there may be thousands.
        logs: the boundary logs that nodes hold, replicas included.
        parked: the parked states that they hold; if there is none, nothing is told, and nothing is needed.
    Raises:
        RemoteProtocolError: the facts of a log cannot be read.
    """
    if not ranks:
        return {}
    known, parks = list(logs), list(parked)
    epochs = epoch_table(r for each in (known, parks) for h in each for r in h.records)
    ends = [r.iteration for h in parks for r in live(h.records, epochs) if r.sealed]
    if not ends:
        return {}
    least = max(ends) - _AT_MOST_BEFORE
    newest: dict[int, tuple[Sequence[int], bytes]] = {}
    for h in (h for h in known if h.facts and h.rank in ranks):
        filled = [
            (r.epoch, r.iteration, r.sequence)
            for r in h.records
            if r.sealed and r.iteration >= least and not outdated(r, epochs)
        ]
        if filled:
            newest[h.rank] = max(newest.get(h.rank, ((), b"")), (max(filled), h.facts))
    found = facts_from_wire(told for _, told in newest.values())
    return {rank: facts for rank, facts in found.items() if rank in newest}
