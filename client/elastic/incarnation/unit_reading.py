"""Units read out of images on this node: verified once, and held against reuse for as long as they
are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Self

import msgspec

from ckptd.client import values
from ckptd.client.elastic.incarnation.image_inventory import ImageKey, LocalImage
from ckptd.client.elastic.incarnation.state_units import ParamFacts, UnitIndex
from ckptd.client.ranks.collectives import TryAgain
from ckptd.core.elastic.incarnations import ExpertLayers, Unit
from ckptd.storage.image import ImageView, verify
from ckptd.storage.image_format import ImageError

__all__ = ["LocalState", "UnitHead", "Unreadable"]


class Unreadable(TryAgain):
    """An image cannot be used: ``image`` is which."""

    def __init__(self, image: LocalImage, why: str) -> None:
        super().__init__(f"{image.file.path.name} slot {image.index}: {why}")
        self.image = image


class UnitHead(msgspec.Struct, frozen=True, array_like=True):
    """What comes before the bytes of a unit on its way.

    Args:
        parts: kind, key, dtype and shape of each; their bytes follow in this order.
        facts: of its parameter, packed (`ParamFacts.of`).
    """

    unit: Unit
    parts: tuple[tuple[str, str, str, tuple[int, ...], int], ...]
    facts: bytes


class _Opened:
    """An image that is held."""

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
    """What this node holds of one iteration of one world; use as a context manager.

    Args:
        images: those of that iteration and world.
    Raises:
        Unreadable: one of them that is wanted is damaged, or was overwritten.
        TryAgain: what is wanted was freed between two looks at the folder.
    """

    def __init__(self, images: Sequence[LocalImage], layers: ExpertLayers) -> None:
        # Parked states first: they have everything that their rank had.
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
        """Let go of all images."""
        self._opened.clear()
        self._indices.clear()
        self._held.close()

    def open_for(self, units: Sequence[Unit], ranks: Sequence[int]) -> None:
        """Hold and verify what these units, and the step scalars of these ranks, will be read from."""
        for unit in units:
            self._of(unit)
        for rank in ranks:
            self._of_rank(rank)

    def unit(self, unit: Unit) -> Iterator[bytes | memoryview]:
        """The unit as it travels: the length of its head, the head, and the bytes of its parts."""
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
        """Step scalars and dense buffers of a rank, and what its optimizers keep of no parameter, packed."""
        opened = self._of_rank(rank)
        kept = opened.facts.kept
        found: dict[str, Any] = {
            "rank": rank,
            "kept": None if kept is None else {k: kept[k] for k in ("attributes", "groups", "foreign")},
            "scalars": {k: opened.facts.scalars[k] for k in ("groups", "state", "rng")}
            | {"program": opened.facts.scalars.get("program", {})},  # absent in what 0.4 recorded
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
        """What is in an image by its header as it stands, so that only those are verified that are
        read; None if it was overwritten.
        """
        if image.key not in self._indices:
            index = None
            try:
                # Held: a slot may be filled anew at this moment.
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
