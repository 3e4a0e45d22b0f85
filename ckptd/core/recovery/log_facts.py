"""Facts in boundary logs about ranks that cannot report themselves: ranks that lost their node, or
whose node is only asked. Pure.

The descriptor of a log and of each of its replicas contains the facts of its rank
(`ckptd.core.recovery.recovery_facts`). The facts of the newest generation count, because facts grow. A
replica may belong to an older generation; its facts are used only if it contains tensors that the rank
sent shortly before the end. A rank without such a log has no facts, which costs replay but no exactness.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ckptd.core.recovery.held import HeldRecords
from ckptd.core.recovery.recovery_facts import RankFacts, facts_from_wire
from ckptd.core.slots.boundary import outdated
from ckptd.core.slots.ring import epoch_table, live

__all__ = ["facts_from_logs"]

# A rank's last completed step may be the one before the last; and its newest log may not have been sealed.
_AT_MOST_BEFORE = 2


def facts_from_logs(
    ranks: Collection[int], logs: Iterable[HeldRecords], parked: Iterable[HeldRecords]
) -> dict[int, RankFacts]:
    """The facts by rank, from each rank's newest log, if it reaches the newest iteration at which
    any rank was parked.

    Args:
        ranks: the ranks that cannot report themselves; other logs, possibly thousands, are not read.
        logs: the boundary logs that nodes hold, including replicas.
        parked: the parked states that they hold; without any, no facts are needed.
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
    found = facts_from_wire(fact for _, fact in newest.values())
    return {rank: facts for rank, facts in found.items() if rank in newest}
