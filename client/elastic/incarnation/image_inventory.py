"""What lies on this node of the worlds of a job: files of the daemon's, looked at in place.

Nothing here asks a daemon: whoever may open a segment can read it, and replicas of other nodes'
segments are such files, too. An image counts if it is sealed and anchors everything that it holds;
a sparse one alone is no state.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckptd.client.daemon_link.mapped_segment import SlotFile
from ckptd.client.elastic.incarnation.state_units import UnitIndex, operator_units
from ckptd.client.log_lines import get_logger
from ckptd.core.elastic.incarnations import BUFFER, ExpertLayers, HeldImage, NodeHeld, Unit
from ckptd.core.slots.ring import SlotRecord, SlotState
from ckptd.core.slots.segment_format import WORLD_TOPOLOGY, SlotHeader
from ckptd.core.slots.segment_names import FILE_ENDS, REPLICA_ENDS, Kind
from ckptd.errors import SegmentError
from ckptd.holdings import header_record
from ckptd.storage.checkpoints import names
from ckptd.storage.checkpoints.names import run_of_incarnation
from ckptd.storage.images.image import ImageView
from ckptd.storage.images.image_format import ImageError

__all__ = ["ImageKey", "Inventory", "LocalImage", "run_of_incarnation", "settle", "world_files"]

logger = get_logger(__name__)

ImageKey = tuple[str, int, int]
"""Names an image on this node: the file, the slot, and the sequence of what is in it."""

_POLL_S = 0.02
_KINDS: dict[str, Kind] = {
    FILE_ENDS["snapshots"]: "snapshots",
    REPLICA_ENDS["snapshots"]: "snapshots",
    FILE_ENDS["parked"]: "parked",
}


def incarnation_of_run(run: str, name: str) -> int | None:
    """The number of the world, if this is the name of one of this run's."""
    found = names.incarnation_of_run(name)
    return found[1] if found is not None and found[0] == run else None


@dataclass(frozen=True, slots=True, eq=False)
class LocalImage:
    """A sealed image on this node, and what the other nodes need to know of it."""

    file: SlotFile
    index: int
    header: SlotHeader
    held: HeldImage

    @property
    def key(self) -> ImageKey:
        """Names this very image: another one in its slot has another sequence."""
        return self.file.path.name, self.index, self.header.sequence

    @property
    def record(self) -> SlotRecord:
        """The slot as it was when it was looked at."""
        return header_record(self.header, self.file.descriptor.generation, self.index, b"")


@dataclass(slots=True)
class _Table:
    """What a node tells, while it is put together."""

    units: dict[tuple[Unit, int], int] = field(default_factory=dict)
    layouts: dict[tuple[int, ...], int] = field(default_factory=dict)
    expected: dict[int, set[Unit]] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)

    def layout(self, units: Sequence[tuple[Unit, int]]) -> int:
        numbers = tuple(self.units.setdefault(unit, len(self.units)) for unit in units)
        return self.layouts.setdefault(numbers, len(self.layouts))


class Inventory:
    """What a segment folder holds of the worlds of a run.

    Args:
        unusable: images that turned out to be damaged (`LocalImage.key`).
    """

    def __init__(
        self,
        folder: Path,
        job: str,
        run: str,
        layers: ExpertLayers,
        unusable: frozenset[ImageKey] = frozenset(),
    ) -> None:
        self.images: list[LocalImage] = []
        self._layers, self._unusable = layers, unusable
        self._table = _Table()
        self._layouts: dict[tuple[str, int], int | None] = {}
        worlds: set[int] = set()
        for world, file in world_files(folder, job, run):
            worlds.add(world)
            self._look(world, file)
        self._worlds = tuple(sorted(worlds))

    @property
    def of_node(self) -> NodeHeld:
        """What the ranks of other nodes need to know of it."""
        table = self._table
        return NodeHeld(
            tuple(table.units),
            tuple(table.layouts),
            tuple(image.held for image in self.images),
            {world: tuple(sorted(units)) for world, units in sorted(table.expected.items())},
            self._worlds,
            dict(sorted(table.ranks.items())),
        )

    def _look(self, world: int, file: SlotFile) -> None:
        name = file.path.name
        try:
            units = operator_units(file.descriptor.client)
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("%s is not used: its descriptor tells no operators (%r)", name, error)
            return
        # Where a rank's shard lies among those of all, its image tells.
        units = tuple(unit for unit in units if self._layers.shard_of(unit.param) is None)
        self._table.ranks[world] = file.descriptor.world_size
        self._table.expected.setdefault(world, set()).update(units)
        for index in range(file.num_slots):
            header = file.header(index)
            if header is None or header.state is not SlotState.SEALED:
                continue
            if (name, index, header.sequence) in self._unusable:
                continue
            layout = self._layout_of(file, index, header, units)
            if layout is not None:
                parked = file.descriptor.kind == "parked"
                held = HeldImage(world, file.descriptor.rank, header.iteration, parked, layout)
                self.images.append(LocalImage(file, index, header, held))

    def _layout_of(self, file: SlotFile, index: int, header: SlotHeader, units: Sequence[Unit]) -> int | None:
        """The number of the units that the image covers; None if it is not dense, or cannot be read."""
        key = file.path.name, header.layout_id
        if key not in self._layouts:
            record = header_record(header, file.descriptor.generation, index, b"")
            try:
                # A replica's slot may be filled anew at this moment.
                with file.held(record) as image:
                    if image is None:
                        return None
                    self._layouts[key] = self._layout(ImageView(image), units, file.descriptor.rank)
            except (ImageError, FileNotFoundError) as error:
                logger.warning("slot %d of %s is not used: %s", index, file.path.name, error)
                return None
        return self._layouts[key]

    def _layout(self, view: ImageView, units: Sequence[Unit], rank: int) -> int | None:
        index_of = UnitIndex(view, self._layers, rank)
        # Buffers of an expert go with it; those of the dense part differ between ranks, and go with
        # the step scalars.
        own = [BUFFER + name for name in index_of.buffers if self._layers.expert_of(name)]
        covered = index_of.covered([*units, *map(Unit, own), *index_of.shards])
        dense = view.anchors == (1 << view.num_operators) - 1
        return self._table.layout(covered) if dense else None


def settle(folder: Path, job: str, run: str, timeout_s: float) -> None:
    """Wait until the daemon has sealed, or given up, what trainers that are gone were filling."""
    deadline = time.monotonic() + timeout_s
    while _unsealed(folder, job, run) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _unsealed(folder: Path, job: str, run: str) -> bool:
    states = {
        header.state
        for _, file in world_files(folder, job, run)
        for index in range(file.num_slots)
        if (header := file.header(index)) is not None
    }
    return bool(states & {SlotState.FILLING, SlotState.FILLED})


def world_files(folder: Path, job: str, run: str) -> Iterator[tuple[int, SlotFile]]:
    """The files of all worlds of a run, by name, each with the number of its world."""
    for path in sorted(folder.glob(f"{job}~{run}.w*~r*~g*")):
        kind = _KINDS.get(path.suffix)
        world = incarnation_of_run(run, path.name.split("~")[1])
        if kind is None or world is None:
            continue
        try:
            file = SlotFile(path, kind)
        except (OSError, SegmentError, ValueError) as error:  # ValueError: it is empty
            logger.warning("%s is not used: %s", path.name, error)
            continue
        if file.descriptor.topology == WORLD_TOPOLOGY:  # a user's own run may be named as if it were a world
            yield world, file
