"""Other ranks' snapshots in this node's memory: in the segments of ranks that train here, or in replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ckptd.core.export.export_errors import ExportError
from ckptd.core.export.export_plan import SharedRows
from ckptd.core.export.wording import first_of, named_ranks, ranges
from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import SlotHeader
from ckptd.core.slots.segment_names import parse_replica_file_name
from ckptd.export.held_slots import (
    SealedSlot,
    held,
    open_segments,
    sealed_slots,
    verify_slot,
)
from ckptd.memory.segment_file import Segment
from ckptd.storage.image import ImageView

__all__ = ["RanksHere", "SharesMissing", "Whereabouts", "first_whole", "why_missing"]

_MOST_NAMED = 3

# For an iteration of a run: the nodes that may hold each rank's snapshot, as far as known.
Whereabouts = Callable[[str, str, int], Mapping[int, Sequence[str]]]


class SharesMissing(Exception):
    """This node does not hold the parameters that other ranks captured for a rank.

    ``shares`` are the missing rows by rank, ``here`` the iterations of these ranks that this node holds.
    """

    def __init__(
        self,
        slot: SealedSlot,
        shares: Mapping[int, Sequence[SharedRows]],
        here: Mapping[int, Sequence[int]],
    ) -> None:
        super().__init__(slot, shares, here)
        self.slot, self.shares, self.here = slot, shares, here


class RanksHere:
    """The segments and replicas of a folder, by rank; replicas are opened on first use.

    Args:
        segments: the segments of the folder that are open already; the caller closes them.
        opened: closes the replicas opened here.
    """

    def __init__(self, folder: Path, segments: Iterable[Segment], opened: ExitStack) -> None:
        self._folder, self._segments, self._opened = folder, list(segments), opened
        self._of_rank: dict[RankKey, list[Segment]] = {}

    def own(self, key: RankKey) -> list[Segment]:
        """A rank's own segments."""
        return [segment for segment in self._segments if segment.key == key]

    def of(self, key: RankKey) -> list[Segment]:
        """A rank's own segments, then its replicas."""
        if key not in self._of_rank:
            replicas, _ = open_segments(self._replica_files(key))
            for replica in replicas:
                self._opened.callback(replica.close)
            self._of_rank[key] = self.own(key) + replicas
        return self._of_rank[key]

    def copies(
        self, slot: SealedSlot, lacks: Mapping[int, Sequence[SharedRows]]
    ) -> dict[int, list[SealedSlot]]:
        """The copies on this node of other ranks' snapshots of the iteration (and epoch) of ``slot``, by
        rank.

        Raises:
            SharesMissing: this node has no copy of some rank.
        """
        own = slot.segment.key
        sealed = {rank: sealed_slots(self.of(RankKey(own.job, own.run, rank))) for rank in lacks}
        found = {r: [s for s in all_of if _same(s, slot)] for r, all_of in sealed.items()}
        missing = {rank: lacks[rank] for rank in lacks if not found[rank]}
        if missing:
            here = {rank: sorted({s.header.iteration for s in sealed[rank]}) for rank in missing}
            raise SharesMissing(slot, missing, here)
        return found

    def _replica_files(self, key: RankKey) -> list[Path]:
        return [path for path in sorted(self._folder.glob("*.rep")) if _is_of(path.name, key)]


@contextmanager
def first_whole(copies: Sequence[SealedSlot]) -> Iterator[tuple[SealedSlot, ImageView]]:
    """Hold the first copy that verifies, until the end of the block.

    Raises:
        ExportError, DamagedSnapshot: no copy verifies; the reason is that of the last one.
    """
    for number, slot in enumerate(copies):
        with ExitStack() as stack:
            try:
                view = stack.enter_context(held(slot))
                verify_slot(slot)
            except ExportError:
                if number == len(copies) - 1:
                    raise
                continue
            yield slot, view
            return
    raise AssertionError("there is a copy at least")


def why_missing(missing: SharesMissing, whereabouts: Whereabouts) -> ExportError:
    """For a message: the missing parameters, the nodes that may hold them, and the remedy."""
    slot, ranks = missing.slot, sorted(missing.shares)
    key, iteration = slot.segment.key, slot.header.iteration
    known = whereabouts(key.job, key.run, iteration)
    params = list(dict.fromkeys(s.param for shares in missing.shares.values() for s in shares))
    nodes = [
        f"those of rank {rank} may be on {' or '.join(known[rank])}" for rank in ranks if known.get(rank)
    ]
    unknown = [rank for rank in ranks if not known.get(rank)]
    if unknown:
        nodes.append(f"this node does not know the nodes that hold those of {named_ranks(unknown)}")
    held_here = [f"of rank {r} it holds {ranges(found)}" for r, found in missing.here.items() if found]
    return ExportError(
        f"{slot} is not whole: {named_ranks(ranks)} captured {first_of(params, _MOST_NAMED)} for "
        "all ranks that "
        f"have them, and this node's memory lacks their snapshots of iteration {iteration}"
        f"{''.join(f'; {text}' for text in held_here)} ({'; '.join(nodes)}). Choose an iteration "
        "that this node holds "
        "completely, export on a node that holds all of it, or export from storage (--durable, or "
        "--store URL)"
    )


def _same(slot: SealedSlot, other: SealedSlot) -> bool:
    return _history(slot.header) == _history(other.header)


def _history(header: SlotHeader) -> tuple[int, int, int]:
    return header.iteration, header.epoch, header.epoch_start


def _is_of(name: str, key: RankKey) -> bool:
    try:
        named = parse_replica_file_name(name)
    except ValueError:
        return False  # not a name that a daemon gives
    return (named.job, named.run, named.rank) == (key.job, key.run, key.rank)
