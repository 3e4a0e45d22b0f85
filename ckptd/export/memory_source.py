"""Snapshots in this node's memory as the source of an export: selected, locked against reuse and verified,
with the parameters that other ranks captured.

The snapshots of other ranks are in the segments of ranks that train here, or in replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ckptd.core.export_plan import (
    DamagedSnapshot,
    ExportError,
    JoinedSnapshot,
    RankImage,
    SharedRows,
    join,
    lacking,
    named_ranks,
    ranges,
    with_older,
)
from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import SlotHeader, parse_replica_file_name, slot_lock_byte
from ckptd.core.slots.slots import SlotState
from ckptd.errors import SegmentError
from ckptd.export.source import CHUNK_BYTES, Origin, check_older, facts_of
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment, open_segment
from ckptd.storage.image import ImageView, verify
from ckptd.storage.image_format import ImageError, ImageTensor
from ckptd.units import first_of

_MOST_NAMED = 3

# For an iteration of a run: the nodes that may hold each rank's snapshot, as far as known.
Whereabouts = Callable[[str, str, int], Mapping[int, Sequence[str]]]


def nobody_knows(job: str, run: str, iteration: int) -> Mapping[int, Sequence[str]]:
    """A `Whereabouts` without a daemon: the nodes of other ranks' snapshots are not known."""
    return {}


class SlotSource:
    """A verified snapshot in slots that are locked against reuse (a `TensorSource`).

    Args:
        layers: the images that contain its tensors, by rank.
    """

    def __init__(self, origin: Origin, joined: JoinedSnapshot, layers: Mapping[int, _Layers]) -> None:
        older = {name: layers[rank].older(name) for name, rank in joined.ranks.items()}
        self.origin = replace(origin, older={n: i for n, i in older.items() if i is not None})
        self.facts = joined.facts
        self.tensors: Sequence[ImageTensor] = joined.tensors
        self.scalars_len = layers[origin.rank].views[0].scalars_len
        self._ranks, self._layers = joined.ranks, layers

    def prepare(self, order: Sequence[ImageTensor]) -> None:
        """Do nothing: the snapshot is in memory."""

    def chunks(self, tensor: ImageTensor) -> Iterator[memoryview]:
        """See `TensorSource.chunks`; they were verified before."""
        data = self._layers[self._ranks[tensor.name]].data(tensor.name)
        for begin in range(0, len(data), CHUNK_BYTES):
            yield data[begin : begin + CHUNK_BYTES]


@contextmanager
def open_slot(
    segment_dir: Path,
    iteration: int | None,
    *,
    job: str | None = None,
    run: str | None = None,
    rank: int | None = None,
    whereabouts: Whereabouts = nobody_knows,
    older_experts: bool = False,
) -> Iterator[SlotSource]:
    """Lock the snapshot of ``iteration`` until the end of the block (None: the newest one that this node
    holds completely).

    Args:
        segment_dir: the folder of the segments; no daemon is needed.
        job, run, rank: needed if several of them have such a snapshot.
        whereabouts: returns the nodes that may hold missing parts.
        older_experts: parameters that a partial snapshot lacks are taken from older ones of its chain.
    Raises:
        ExportError: no snapshot matches, or several do, or parts of it are only in other nodes' memory, or
            ``older_experts`` of a snapshot that is not partial.
        DamagedSnapshot: its digests do not match.
    """
    with ExitStack() as opened:
        segments, problems = open_segments(sorted(segment_dir.glob("*.seg")))
        for segment in segments:
            opened.callback(segment.close)
        if not segments:
            why = "; ".join(problems) if problems else "the folder contains no segment"
            raise ExportError(f"nothing to export in {segment_dir}: {why}")
        slots = _choose(segments, iteration, job, run, rank)
        local = _LocalRanks(segment_dir, segments, opened, older_experts=older_experts)
        yield _first_complete(slots, local, opened, whereabouts)


def _choose(
    segments: Sequence[Segment],
    iteration: int | None,
    job: str | None,
    run: str | None,
    rank: int | None,
) -> list[SealedSlot]:
    """The sealed slot that the arguments select; without an iteration all of the rank, newest first."""
    asked = [
        s
        for s in segments
        if job in (None, s.key.job) and run in (None, s.key.run) and rank in (None, s.key.rank)
    ]
    if not asked:
        held = "; ".join(map(str, sorted({s.key for s in segments})))
        raise ExportError(f"no segment in memory is of this job, run and rank; there are: {held}")
    slots = sealed_slots(asked)
    found = [slot for slot in slots if iteration in (None, slot.header.iteration)]
    if not found:
        known = {slot.header.iteration for slot in slots}
        text = f"memory holds iterations {ranges(known)}" if known else "memory holds no sealed snapshot"
        which = "" if iteration is None else f" of iteration {iteration}"
        raise ExportError(f"no sealed snapshot{which} matches; {text}")
    keys = sorted({slot.segment.key for slot in found})
    if len(keys) > 1:
        names = "; ".join(map(str, keys))
        what = "snapshots" if iteration is None else f"snapshots of iteration {iteration}"
        raise ExportError(f"{names} have {what}: choose one with --job, --run and --rank")
    newest: dict[int, SealedSlot] = {}
    for slot in sorted(found, key=lambda slot: slot.header.sequence):
        newest[slot.header.iteration] = slot
    return [newest[number] for number in sorted(newest, reverse=True)]


def _first_complete(
    slots: Sequence[SealedSlot], local: _LocalRanks, opened: ExitStack, whereabouts: Whereabouts
) -> SlotSource:
    """The first of these snapshots that this node holds completely; ``opened`` releases it."""
    first: _SharesMissing | None = None
    for slot in slots:
        try:
            return opened.enter_context(_completed(slot, local))
        except _SharesMissing as missing:
            first = first or missing
    assert first is not None, "there is a slot at least"
    raise _why_missing(first, whereabouts)


@contextmanager
def _completed(slot: SealedSlot, local: _LocalRanks) -> Iterator[SlotSource]:
    """A snapshot with the parameters that other ranks captured for it, locked and verified."""
    descriptor = slot.segment.descriptor
    with ExitStack() as opened:
        view = opened.enter_context(_locked(slot))
        facts = facts_of(descriptor.client, descriptor.rank)
        if local.older_experts:
            check_older(facts)
        own = opened.enter_context(_layered(slot, view, local.own(slot.segment.key), local))
        lacks = lacking(own.tensors, facts.shares)
        copies = local.copies(slot, lacks)
        _verify_slot(slot)
        layers = {descriptor.rank: own}
        images: dict[int, RankImage] = {}
        for rank, found in copies.items():
            copy, other = opened.enter_context(_first_verified(found))
            segments = local.of(copy.segment.key)
            layers[rank] = opened.enter_context(_layered(copy, other, segments, local))
            images[rank] = _rank_image(layers[rank], segments)
        joined = join(descriptor.rank, _rank_image(own, local.own(slot.segment.key)), facts, lacks, images)
        origin = Origin(
            descriptor.job,
            descriptor.run,
            descriptor.rank,
            descriptor.world_size,
            slot.header.iteration,
            "memory",
            tuple(images),
        )
        yield SlotSource(origin, joined, layers)


@dataclass(frozen=True)
class _Layers:
    """The image of a rank's snapshot, and older ones for the experts that it lacks, the newest first; all are
    locked.

    ``iterations``: of each image; ``numbers``: which image, by the name of a tensor of an older one.
    """

    views: Sequence[ImageView]
    iterations: Sequence[int]
    tensors: Sequence[ImageTensor]
    numbers: Mapping[str, int]

    def data(self, name: str) -> memoryview:
        """The tensor's bytes."""
        return self.views[self.numbers.get(name, 0)].data(name)

    def older(self, name: str) -> int | None:
        """The iteration of a tensor of an older image; None: it is of the snapshot itself."""
        number = self.numbers.get(name)
        return None if number is None else self.iterations[number]


@contextmanager
def _layered(
    slot: SealedSlot, view: ImageView, segments: Iterable[Segment], local: _LocalRanks
) -> Iterator[_Layers]:
    """A locked snapshot, and if older experts are wanted, older ones of its chain, locked and verified."""
    chain = _older(slot, sealed_slots(segments)) if local.older_experts else []
    with ExitStack() as opened:
        views = [view]
        for older in chain:
            views.append(opened.enter_context(_locked(older)))
            _verify_slot(older)
        tensors, numbers = with_older([each.entries for each in views])
        iterations = [each.header.iteration for each in (slot, *chain)]
        yield _Layers(views, iterations, tensors, numbers)


def _older(slot: SealedSlot, slots: Sequence[SealedSlot]) -> list[SealedSlot]:
    """The snapshots before this one in its chain, also of earlier epochs, the newest first, that are here."""
    found = [slot]
    while 0 <= found[-1].header.previous < found[-1].header.iteration:
        last = found[-1].header
        before = [
            each
            for each in slots
            if each.header.iteration == last.previous and each.header.epoch <= last.epoch
        ]
        if not before:
            break
        found.append(max(before, key=lambda each: (each.header.epoch, each.header.sequence)))
    return found[1:]


# -- sealed slots ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SealedSlot:
    """A snapshot in a slot, with its header at the time of reading."""

    segment: Segment
    index: int
    header: SlotHeader

    @property
    def history(self) -> tuple[int, int, int]:
        """Equal for snapshots of one iteration of one history."""
        return self.header.iteration, self.header.epoch, self.header.epoch_start

    def __str__(self) -> str:
        """The name of the snapshot in messages."""
        return f"rank {self.segment.key.rank}'s snapshot of iteration {self.header.iteration}"


def open_segments(paths: Iterable[Path]) -> tuple[list[Segment], list[str]]:
    """The segments that can be read, and the errors of the others."""
    found: list[Segment] = []
    problems: list[str] = []
    for path in paths:
        try:
            found.append(open_segment(path, readonly=True))
        except (OSError, ValueError, SegmentError) as error:
            problems.append(f"{path.name}: {error}")
    return found, problems


def sealed_slots(segments: Iterable[Segment]) -> list[SealedSlot]:
    """All sealed slots."""
    return [
        SealedSlot(segment, index, header)
        for segment in segments
        for index, header in segment.headers()
        if header.state is SlotState.SEALED
    ]


@contextmanager
def _locked(slot: SealedSlot) -> Iterator[ImageView]:
    """Lock the slot until the end of the block, and return its image, which is not verified yet."""
    lock = slot_lock_byte(slot.index)
    with locks.lock_file(slot.segment.path, lock, exclusive=False) as taken:
        if not taken or slot.segment.header(slot.index) != slot.header:
            raise ExportError(f"{slot} has just been overwritten; choose a newer one")
        try:
            view = ImageView(slot.segment.image(slot.index, slot.header))
        except ImageError as error:
            raise DamagedSnapshot(f"{slot} is damaged: {error}") from error
        yield view


def _verify_slot(slot: SealedSlot) -> None:
    """Check that a locked slot is, bit for bit, the sealed image."""
    try:
        verify(slot.segment.image(slot.index, slot.header), slot.header.header_digest)
    except ImageError as error:
        raise DamagedSnapshot(f"{slot} is damaged: {error}") from error


@contextmanager
def _first_verified(copies: Sequence[SealedSlot]) -> Iterator[tuple[SealedSlot, ImageView]]:
    """Lock the first copy that verifies, until the end of the block."""
    for number, slot in enumerate(copies):
        with ExitStack() as stack:
            try:
                view = stack.enter_context(_locked(slot))
                _verify_slot(slot)
            except ExportError:
                if number == len(copies) - 1:
                    raise
                continue
            yield slot, view
            return
    raise AssertionError("there is a copy at least")


def _rank_image(layers: _Layers, segments: Iterable[Segment]) -> RankImage:
    """The facts of a locked snapshot, together with the other snapshots of its rank in these segments."""
    view = layers.views[0]
    dense = view.anchors == (1 << view.num_operators) - 1
    return RankImage(layers.tensors, dense, [found.entries for found in _images(segments)])


def _images(segments: Iterable[Segment]) -> Iterator[ImageView]:
    for slot in sealed_slots(segments):
        try:
            view = ImageView(slot.segment.image(slot.index, slot.header))
        except ImageError:
            continue  # damaged or being overwritten: it would only have shown a dtype
        if slot.segment.header(slot.index) == slot.header:
            yield view


# -- other ranks' snapshots -----------------------------------------------------------------------


class _SharesMissing(Exception):
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


class _LocalRanks:
    """The segments and replicas of a folder, by rank; replicas are opened on first use.

    Args:
        segments: the segments of the folder that are open already; the caller closes them.
        opened: closes the replicas opened here.
        older_experts: of partial snapshots older ones are wanted, too.
    """

    def __init__(
        self, folder: Path, segments: Iterable[Segment], opened: ExitStack, *, older_experts: bool
    ) -> None:
        self.older_experts = older_experts
        self._folder, self._segments, self._opened = folder, list(segments), opened
        self._of_rank: dict[RankKey, list[Segment]] = {}

    def own(self, key: RankKey) -> list[Segment]:
        """A rank's own segments."""
        return [segment for segment in self._segments if segment.key == key]

    def of(self, key: RankKey) -> list[Segment]:
        """A rank's own segments, then its replicas."""
        if key not in self._of_rank:
            files = [path for path in sorted(self._folder.glob("*.rep")) if _is_of(path.name, key)]
            replicas, _ = open_segments(files)
            for replica in replicas:
                self._opened.callback(replica.close)
            self._of_rank[key] = self.own(key) + replicas
        return self._of_rank[key]

    def copies(
        self, slot: SealedSlot, lacks: Mapping[int, Sequence[SharedRows]]
    ) -> dict[int, list[SealedSlot]]:
        """The copies here of other ranks' snapshots of the same iteration and epoch, by rank."""
        own = slot.segment.key
        sealed = {rank: sealed_slots(self.of(RankKey(own.job, own.run, rank))) for rank in lacks}
        found = {r: [s for s in all_of if s.history == slot.history] for r, all_of in sealed.items()}
        missing = {rank: lacks[rank] for rank in lacks if not found[rank]}
        if missing:
            here = {rank: sorted({s.header.iteration for s in sealed[rank]}) for rank in missing}
            raise _SharesMissing(slot, missing, here)
        return found


def _is_of(name: str, key: RankKey) -> bool:
    try:
        named = parse_replica_file_name(name)
    except ValueError:
        return False  # not a name that a daemon gives
    return (named.job, named.run, named.rank) == (key.job, key.run, key.rank)


def _why_missing(missing: _SharesMissing, whereabouts: Whereabouts) -> ExportError:
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
