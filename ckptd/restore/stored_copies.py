"""The same snapshot in storage, for a fetch to whose plan it was not needed (docs/replication.md §7)."""

from __future__ import annotations

from collections.abc import Callable

from ckptd.core.recovery.held import STORE_NODE
from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import SlotHeader, unpack_slot_header
from ckptd.peers.holder import Holder
from ckptd.transport.messages import FetchSource, GetHoldings, Holdings

__all__ = ["find_stored"]


def find_stored(
    link: Holder,
    key: RankKey,
    header: SlotHeader,
    found: Callable[[list[FetchSource]], None],
    failed: Callable[[str], None],
) -> None:
    """Ask storage which committed checkpoints have this very snapshot of this rank; one of the two
    is called, later.
    """
    link.ask(
        GetHoldings(key.job, key.run),
        Holdings,
        lambda told: found(_copies(told, key.rank, header)),
        lambda code, reason: failed(f"{code}: {reason}"),
    )


def _copies(told: Holdings, rank: int, header: SlotHeader) -> list[FetchSource]:
    return [
        FetchSource(STORE_NODE, segment.name, slot.slot)
        for segment in told.segments
        if segment.rank == rank
        for slot in segment.slots
        if (stored := unpack_slot_header(slot.header)) is not None
        and stored.header_digest == header.header_digest
    ]
