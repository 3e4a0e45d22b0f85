"""Other ranks' snapshots in this node's memory: in their own segments, where they train here, or in replicas."""

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
from ckptd.storage.images.image import ImageView

__all__ = ["RanksHere", "SharesMissing", "Whereabouts", "first_whole", "why_missing"]

_TOLD = 3

# Of a run's iteration: nodes that may have each rank's snapshots, as far as anybody knows.
Whereabouts = Callable[[str, str, int], Mapping[int, Sequence[str]]]


class SharesMissing(Exception):
    """This node does not hold what other ranks captured for a rank.

    ``shares`` are given by rank, ``here`` the iterations of these ranks that this node does hold.
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
    """The segments and replicas of a folder, by rank; replicas are opened when somebody asks for their rank.

    Args:
        segments: those of the folder that are open already; whoever opened them closes them.
        opened: closes what is opened here.
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
        """The copies here of what other ranks captured at the iteration (and in the epoch) of
        ``slot``, by rank.

        Raises:
            SharesMissing: of some rank there is none.
        """
        told = slot.segment.key
        sealed = {rank: sealed_slots(self.of(RankKey(told.job, told.run, rank))) for rank in lacks}
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
    """The first copy that can be held and is what was sealed, until the end of the block.

    Raises:
        ExportError, DamagedSnapshot: there is none; why not the last one.
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
    """In words: what is missing, where it may be, and what to do."""
    slot, ranks = missing.slot, sorted(missing.shares)
    key, iteration = slot.segment.key, slot.header.iteration
    known = whereabouts(key.job, key.run, iteration)
    params = list(dict.fromkeys(s.param for shares in missing.shares.values() for s in shares))
    nodes = [
        f"rank {rank}'s may be on {' or '.join(known[rank])}" for rank in ranks if known.get(rank)
    ]
    unknown = [rank for rank in ranks if not known.get(rank)]
    if unknown:
        nodes.append(f"on which nodes {named_ranks(unknown)} have theirs is not known here")
    held_here = [
        f"of rank {r} it holds {ranges(found)}" for r, found in missing.here.items() if found
    ]
    return ExportError(
        f"{slot} is not whole: {first_of(params, _TOLD)} are captured by {named_ranks(ranks)} for all ranks that "
        f"have them, and this node's memory does not hold that share of iteration {iteration}"
        f"{''.join(f'; {text}' for text in held_here)} ({'; '.join(nodes)}). Choose an iteration of which everything "
        "is here, export on a node that holds them all, or out of storage (--durable, or --store URL)"
    )


def _same(slot: SealedSlot, other: SealedSlot) -> bool:
    return _history(slot.header) == _history(other.header)


def _history(header: SlotHeader) -> tuple[int, int, int]:
    return header.iteration, header.epoch, header.epoch_start


def _is_of(name: str, key: RankKey) -> bool:
    try:
        told = parse_replica_file_name(name)
    except ValueError:
        return False  # not a name that a daemon gives
    return (told.job, told.run, told.rank) == (key.job, key.run, key.rank)
