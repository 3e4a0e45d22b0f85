"""The images of an elastic job on this node: their inventory, and the units read from them.

They are files of the daemon, read in place. No daemon is asked: whoever may open a segment can read
it, and replicas of other nodes' segments are such files, too. An image counts if it is sealed and
anchors everything that it contains; a sparse image alone is no state. Images that are read are
verified once, and locked against reuse meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import msgspec
import torch

from ckptd.client import values
from ckptd.client.daemon_link.mapped_segment import SlotFile
from ckptd.client.log_lines import get_logger
from ckptd.client.model.snapshot_layout import DTYPES, STATIC, EntrySource, parse_entry_name
from ckptd.client.ranks.collectives import TryAgain
from ckptd.core.elastic.incarnations import BUFFER, ExpertLayers, HeldImage, NodeHeld, Unit
from ckptd.core.slots.segment_format import FILE_ENDS, REPLICA_ENDS, WORLD_TOPOLOGY, Kind, SlotHeader
from ckptd.core.slots.slots import SlotRecord, SlotState
from ckptd.errors import SegmentError
from ckptd.holdings import header_record
from ckptd.storage.checkpoints.names import incarnation_of_run
from ckptd.storage.image import ImageView, verify
from ckptd.storage.image_format import SCALARS, ImageError, ImageTensor

logger = get_logger(__name__)


ImageKey = tuple[str, int, int]
"""An image on this node: the file, the slot, and the sequence of the slot's content."""

_POLL_S = 0.02
_KINDS: dict[str, Kind] = {
    FILE_ENDS["snapshots"]: "snapshots",
    REPLICA_ENDS["snapshots"]: "snapshots",
    FILE_ENDS["parked"]: "parked",
}


def incarnation_files(folder: Path, job: str, run: str) -> Iterator[tuple[int, SlotFile]]:
    """The files of all incarnations of a run, by name, each with the number of its incarnation."""
    for path in sorted(folder.glob(f"{job}~{run}.w*~r*~g*")):
        kind = _KINDS.get(path.suffix)
        found = incarnation_of_run(path.name.split("~")[1])
        if kind is None or found is None or found[0] != run:
            continue
        try:
            file = SlotFile(path, kind)
        except (OSError, SegmentError, ValueError) as error:  # ValueError: it is empty
            logger.warning("%s is not used: %s", path.name, error)
            continue
        if file.descriptor.topology == WORLD_TOPOLOGY:  # else a user's run has such a name
            yield found[1], file


def settle(folder: Path, job: str, run: str, timeout_s: float) -> None:
    """Wait until the daemon has sealed or freed the slots that dead trainers were filling."""
    deadline = time.monotonic() + timeout_s
    while _unsealed(folder, job, run) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _unsealed(folder: Path, job: str, run: str) -> bool:
    states = {
        header.state
        for _, file in incarnation_files(folder, job, run)
        for index in range(file.num_slots)
        if (header := file.header(index)) is not None
    }
    return bool(states & {SlotState.FILLING, SlotState.FILLED})


# -- the inventory -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class LocalImage:
    """A sealed image on this node, and its entry in the node's report."""

    file: SlotFile
    index: int
    header: SlotHeader
    held: HeldImage

    @property
    def key(self) -> ImageKey:
        """Of this very image: another one in its slot has another sequence."""
        return self.file.path.name, self.index, self.header.sequence

    @property
    def record(self) -> SlotRecord:
        """The slot as the inventory found it."""
        return header_record(self.header, self.file.descriptor.generation, self.index, b"")


class Inventory:
    """The images of a run's incarnations in a segment folder.

    Args:
        unusable: images that proved damaged (`LocalImage.key`).
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
        # Of the report: units and lists of them by their index, and the facts of each incarnation.
        self._units: dict[tuple[Unit, int], int] = {}
        self._unit_lists: dict[tuple[int, ...], int] = {}
        self._expected: dict[int, set[Unit]] = {}
        self._ranks: dict[int, int] = {}
        self._layouts: dict[tuple[str, int], int | None] = {}
        numbers: set[int] = set()
        for number, file in incarnation_files(folder, job, run):
            numbers.add(number)
            self._add_file(number, file)
        self._numbers = tuple(sorted(numbers))

    @property
    def of_node(self) -> NodeHeld:
        """The node's report to the ranks of other nodes."""
        return NodeHeld(
            tuple(self._units),
            tuple(self._unit_lists),
            tuple(image.held for image in self.images),
            {number: tuple(sorted(units)) for number, units in sorted(self._expected.items())},
            self._numbers,
            dict(sorted(self._ranks.items())),
        )

    def _add_file(self, number: int, file: SlotFile) -> None:
        name = file.path.name
        try:
            units = _operator_units(file.descriptor.client)
        except (KeyError, TypeError, ValueError) as error:
            logger.warning("%s is not used: its descriptor has no operators (%r)", name, error)
            return
        # The place of a rank's shard among those of all ranks is known from its image.
        units = tuple(unit for unit in units if self._layers.shard_of(unit.param) is None)
        self._ranks[number] = file.descriptor.world_size
        self._expected.setdefault(number, set()).update(units)
        for index in range(file.num_slots):
            header = file.header(index)
            if header is None or header.state is not SlotState.SEALED:
                continue
            if (name, index, header.sequence) in self._unusable:
                continue
            layout = self._layout_of(file, index, header, units)
            if layout is not None:
                parked = file.descriptor.kind == "parked"
                held = HeldImage(number, file.descriptor.rank, header.iteration, parked, layout)
                self.images.append(LocalImage(file, index, header, held))

    def _layout_of(self, file: SlotFile, index: int, header: SlotHeader, units: Sequence[Unit]) -> int | None:
        """The index of the image's list of units; None if the image is not dense or unreadable."""
        key = file.path.name, header.layout_id
        if key not in self._layouts:
            record = header_record(header, file.descriptor.generation, index, b"")
            try:
                # The slot of a replica may be refilled at this moment.
                with file.held(record) as image:
                    if image is None:
                        return None
                    self._layouts[key] = self._layout(ImageView(image), units, file.descriptor.rank)
            except (ImageError, FileNotFoundError) as error:
                logger.warning("slot %d of %s is not used: %s", index, file.path.name, error)
                return None
        return self._layouts[key]

    def _layout(self, view: ImageView, units: Sequence[Unit], rank: int) -> int | None:
        if view.anchors != (1 << view.num_operators) - 1:
            return None
        index = UnitIndex(view, self._layers, rank)
        # An expert's buffers go with it; dense ones differ between ranks and go with the step scalars.
        own = [BUFFER + name for name in index.buffers if self._layers.expert_of(name)]
        covered = index.covered([*units, *map(Unit, own), *index.shards])
        numbers = tuple(self._units.setdefault(unit, len(self._units)) for unit in covered)
        return self._unit_lists.setdefault(numbers, len(self._unit_lists))


def _operator_units(payload: bytes) -> tuple[Unit, ...]:
    """All units of a rank, from the trainer's part of a segment's descriptor."""
    descriptor: dict[str, Any] = values.unpack(payload)
    return tuple(
        Unit(param, start or 0, stop or 0)
        for *_, members in descriptor["operators"]
        for param, start, stop in members
    )


# -- units in an image -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _EntryRows:
    """Rows of one entry of an image.

    Args:
        kind, key: ``param``, ``master``, ``buffer``, or ``optim`` with the name of the state.
        offset, nbytes: the place in the image.
    """

    kind: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class UnitIndex:
    """The entries of an image by parameter.

    Args:
        rank: that recorded the image; gives the place of its shards among those of all ranks.
    """

    def __init__(self, view: ImageView, layers: ExpertLayers, rank: int) -> None:
        self._entries: dict[str, list[tuple[EntrySource, ImageTensor]]] = {}
        self.buffers: dict[str, ImageTensor] = {}
        self.shards: list[Unit] = []
        for entry in view:
            if entry.name in (SCALARS, STATIC):
                continue
            source = parse_entry_name(entry.name, DTYPES.get(entry.dtype, torch.uint8))
            if source.kind == "buffer":
                self.buffers[source.name] = entry
                self._entries[BUFFER + source.name] = [(source, entry)]
            elif source.kind != "packed":
                if layers.shard_of(source.name) is not None:
                    source = _among_all_shards(source, entry, rank)
                    if source.kind == "param":
                        self.shards.append(Unit(source.name, source.start or 0, source.stop or 0))
                self._entries.setdefault(source.name, []).append((source, entry))

    def covered(self, units: Iterable[Unit]) -> list[tuple[Unit, int]]:
        """The units of which the image has all rows, with the bytes of each."""
        found = []
        for unit in units:
            parts = self.parts(unit)
            if any(part.kind in ("param", "buffer") for part in parts):
                found.append((unit, sum(part.nbytes for part in parts)))
        return found

    def parts(self, unit: Unit) -> list[_EntryRows]:
        """The parts of a unit, in the order of the image."""
        parts = (_part(unit, source, entry) for source, entry in self._entries.get(unit.param, ()))
        return [part for part in parts if part is not None]


def _among_all_shards(source: EntrySource, entry: ImageTensor, rank: int) -> EntrySource:
    """A rank's shard with its rows counted among the elements of all shards."""
    assert source.start is None, "of shards all is anchored, as one entry"
    length = entry.shape[0]
    return replace(source, start=rank * length, stop=(rank + 1) * length) if length else source


def _part(unit: Unit, source: EntrySource, entry: ImageTensor) -> _EntryRows | None:
    """The rows of the unit, if the entry has all of them."""
    entry_key = source.kind, source.key, entry.dtype
    if not unit.stop:  # a whole parameter: its entries have no rows in their names
        whole = source.start is None
        return _EntryRows(*entry_key, entry.shape, entry.offset, entry.nbytes) if whole else None
    rows = entry.shape[0] if entry.shape else 1
    first = source.start or 0
    if not first <= unit.start <= unit.stop <= first + rows:
        return None
    row_bytes = entry.nbytes // rows
    count = unit.stop - unit.start
    offset = entry.offset + (unit.start - first) * row_bytes
    return _EntryRows(*entry_key, (count, *entry.shape[1:]), offset, count * row_bytes)


class ParamFacts:
    """Facts of an image about its parameters besides tensors: keys, numbers and plain values of the
    optimizer's state.

    Attributes:
        kept: as gathered by `KeptState`; None: recorded by an earlier version, which did not.
    """

    def __init__(self, view: ImageView) -> None:
        scalars: dict[str, Any] = values.unpack(bytes(view.scalars))
        layout: dict[str, Any] = values.unpack(bytes(view.data(STATIC)))
        self.scalars = scalars
        self._absent = frozenset(scalars["absent"])
        self._layout = layout
        packed = scalars.get("kept")
        self.kept: dict[str, Any] | None = None if packed is None else values.unpack(packed)
        self._numbers: dict[str, dict[str, list[Any]]] = {}
        for dtype, pairs in layout["packed"].items():
            data = bytes(view.data(f"ckptd.optim_scalars/{dtype}"))
            size = DTYPES[dtype].itemsize
            for i, (param, key) in enumerate(pairs):
                on_host = layout["scalars"][param][key][1]
                raw = data[i * size : (i + 1) * size]
                self._numbers.setdefault(param, {})[key] = [dtype, on_host, raw]

    def of(self, param: str) -> dict[str, Any]:
        """For another rank, in the closed set of values.

        ``entries``: nested values in the parameter's state; ``deviating``: its keys, if they are not
        those of the layout, as the only element.
        """
        kept = self.kept or {"entries": {}, "keys": {}}
        return {
            "keys": list(self._layout["keys"].get(param, [])),
            "numbers": self._numbers.get(param, {}),
            "plain": self.scalars["python"].get(param, {}),
            "absent": param in self._absent,
            "entries": kept["entries"].get(param, []),
            "deviating": [kept["keys"][param]] if param in kept["keys"] else [],
        }


# -- reading -----------------------------------------------------------------------------------------


class Unreadable(TryAgain):
    """``image`` cannot be used."""

    def __init__(self, image: LocalImage, why: str) -> None:
        super().__init__(f"{image.file.path.name} slot {image.index}: {why}")
        self.image = image


class UnitHead(msgspec.Struct, frozen=True, array_like=True):
    """The header before the bytes of a unit that is sent.

    Args:
        parts: kind, key, dtype, shape and size of each part; their bytes follow in this order.
        facts: of its parameter, packed (`ParamFacts.of`).
    """

    unit: Unit
    parts: tuple[tuple[str, str, str, tuple[int, ...], int], ...]
    facts: bytes


class _Opened:
    """An image that is locked and verified."""

    def __init__(self, image: LocalImage, layers: ExpertLayers, held: ExitStack) -> None:
        try:
            data = held.enter_context(image.file.held(image.record))
        except FileNotFoundError as error:
            raise Unreadable(image, "its file was freed meanwhile") from error
        if data is None:
            raise Unreadable(image, "it has just been overwritten")
        try:
            verify(data, image.header.header_digest)
            self.view = ImageView(data)
        except ImageError as error:
            raise Unreadable(image, str(error)) from error
        self.data = data
        self.index = UnitIndex(self.view, layers, image.held.rank)
        self.facts = ParamFacts(self.view)


class LocalState:
    """This node's part of a state; a context manager.

    Args:
        images: of that iteration and incarnation.
    Raises:
        Unreadable: an image that is needed is damaged or was overwritten.
        TryAgain: an image that is needed was freed since the inventory.
    """

    def __init__(self, images: Sequence[LocalImage], layers: ExpertLayers) -> None:
        # Parked states first: they contain all that their rank had.
        self._images = sorted(images, key=lambda i: (not i.held.parked, i.held.rank, i.key))
        self._layers = layers
        self._held = ExitStack()
        self._opened: dict[ImageKey, _Opened] = {}
        self._indices: dict[ImageKey, UnitIndex | None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock all images."""
        self._opened.clear()
        self._indices.clear()
        self._held.close()

    def open_for(self, units: Sequence[Unit], ranks: Sequence[int]) -> None:
        """Lock and verify the images of these units, and of the step scalars of these ranks."""
        for unit in units:
            self._of(unit)
        for rank in ranks:
            self._of_rank(rank)

    def unit(self, unit: Unit) -> Iterator[bytes | memoryview]:
        """The unit as it is sent: the length of its header, the header, and the bytes of its parts."""
        opened = self._of(unit)
        parts = opened.index.parts(unit)
        entries = tuple((p.kind, p.key, p.dtype, p.shape, p.nbytes) for p in parts)
        facts = values.pack(opened.facts.of(unit.param), unit.param)
        head = msgspec.msgpack.encode(UnitHead(unit, entries, facts))
        yield len(head).to_bytes(4, "little")
        yield head
        for part in parts:
            yield opened.data[part.offset : part.offset + part.nbytes]

    def scalars(self, rank: int) -> bytes:
        """The step scalars and dense buffers of a rank, and its optimizers' state of no parameter, packed."""
        opened = self._of_rank(rank)
        kept = opened.facts.kept
        found: dict[str, Any] = {
            "rank": rank,
            "kept": None if kept is None else {k: kept[k] for k in ("attributes", "groups", "foreign")},
            "scalars": {k: opened.facts.scalars[k] for k in ("groups", "state", "rng")}
            | {"program": opened.facts.scalars.get("program", {})},  # not recorded by 0.4
            "buffers": {
                name: [entry.dtype, list(entry.shape), bytes(opened.view.data(entry.name))]
                for name, entry in opened.index.buffers.items()
                if self._layers.expert_of(name) is None
            },
        }
        return values.pack(found, "step scalars")

    def state(self, rank: int) -> dict[str, bytes]:
        """The user's objects as this rank recorded them, packed, by name."""
        found: dict[str, bytes] = self._of_rank(rank).facts.scalars["state"]
        return found

    def _of(self, unit: Unit) -> _Opened:
        for image in self._images:
            index = self._index(image)
            if index is not None and index.covered([unit]):
                return self._open(image)
        raise TryAgain(f"{unit} is in no image here any more")

    def _index(self, image: LocalImage) -> UnitIndex | None:
        """The units of an image by its unverified header; None if the image was overwritten."""
        if image.key not in self._indices:
            index = None
            try:
                # Locked: a slot may be refilled at this moment.
                with image.file.held(image.record) as data:
                    if data is not None:
                        index = UnitIndex(ImageView(data), self._layers, image.held.rank)
            except (ImageError, FileNotFoundError) as error:
                raise Unreadable(image, str(error)) from error
            self._indices[image.key] = index
        return self._indices[image.key]

    def _of_rank(self, rank: int) -> _Opened:
        for image in self._images:
            if image.held.rank == rank:
                return self._open(image)
        raise TryAgain(f"no image of rank {rank} is here any more")

    def _open(self, image: LocalImage) -> _Opened:
        if image.key not in self._opened:
            self._opened[image.key] = _Opened(image, self._layers, self._held)
        return self._opened[image.key]
