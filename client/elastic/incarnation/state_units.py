"""Which bytes of an image are a unit: the entries that hold its rows, and where within them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ckptd.client import values
from ckptd.client.model.snapshot_layout import DTYPES, SCALARS, STATIC, EntrySource, parse_entry_name
from ckptd.core.elastic.incarnations import BUFFER, ExpertLayers, Unit
from ckptd.storage.images.image import ImageView
from ckptd.storage.images.image_format import ImageTensor

__all__ = ["EntryRows", "ParamFacts", "UnitIndex", "operator_units"]


def operator_units(payload: bytes) -> tuple[Unit, ...]:
    """All units that a rank has, of the trainer's part of a segment's descriptor.

    Raises:
        KeyError, TypeError, ValueError: it tells of no operators.
    """
    descriptor: dict[str, Any] = values.unpack(payload)
    return tuple(
        Unit(param, start or 0, stop or 0)
        for *_, members in descriptor["operators"]
        for param, start, stop in members
    )


@dataclass(frozen=True, slots=True)
class EntryRows:
    """Rows of one entry.

    Args:
        kind, key: what it is of the parameter: ``param``, ``master``, or ``optim`` with the name of
            the state; or a ``buffer``.
        offset, nbytes: where it lies in the image.
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
        rank: whose image it is: which of the shards of an expert are in it.
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
                    source = _of_whole(source, entry, rank)
                    if source.kind == "param":
                        self.shards.append(Unit(source.name, source.start or 0, source.stop or 0))
                self._entries.setdefault(source.name, []).append((source, entry))

    def covered(self, units: Iterable[Unit]) -> list[tuple[Unit, int]]:
        """Those of the units whose rows are all here, with the bytes that they take."""
        found = []
        for unit in units:
            parts = self.parts(unit)
            if any(part.kind in ("param", "buffer") for part in parts):
                found.append((unit, sum(part.nbytes for part in parts)))
        return found

    def parts(self, unit: Unit) -> list[EntryRows]:
        """What there is of a unit, in the order of the image."""
        parts = (_part(unit, s, entry) for s, entry in self._entries.get(unit.param, ()))
        return [part for part in parts if part is not None]


def _of_whole(source: EntrySource, entry: ImageTensor, rank: int) -> EntrySource:
    """A rank's shard, by its elements among those of all shards."""
    assert source.start is None, "of shards all is anchored, as one entry"
    length = entry.shape[0]
    return replace(source, start=rank * length, stop=(rank + 1) * length) if length else source


def _part(unit: Unit, source: EntrySource, entry: ImageTensor) -> EntryRows | None:
    """The rows of the unit, if the entry has all of them."""
    entry_key = source.kind, source.key, entry.dtype
    if not unit.stop:  # all of it: its entries have no rows in their names
        whole = source.start is None
        return EntryRows(*entry_key, entry.shape, entry.offset, entry.nbytes) if whole else None
    rows = entry.shape[0] if entry.shape else 1
    first = source.start or 0
    if not first <= unit.start <= unit.stop <= first + rows:
        return None
    row_bytes = entry.nbytes // rows
    count = unit.stop - unit.start
    offset = entry.offset + (unit.start - first) * row_bytes
    return EntryRows(*entry_key, (count, *entry.shape[1:]), offset, count * row_bytes)


class ParamFacts:
    """What an image tells of its parameters beside their tensors: keys, numbers and plain values of
    the optimizer's state.
    """

    def __init__(self, view: ImageView) -> None:
        scalars: dict[str, Any] = values.unpack(bytes(view.data(SCALARS)[: view.scalars_len]))
        layout: dict[str, Any] = values.unpack(bytes(view.data(STATIC)))
        self.scalars = scalars
        self._absent = frozenset(scalars["absent"])
        self._layout = layout
        packed = scalars.get("kept")
        # What `KeptState` gathered; None: an earlier version did not.
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
        """For another rank, in the closed set of values."""
        return {
            "keys": list(self._layout["keys"].get(param, [])),
            "numbers": self._numbers.get(param, {}),
            "plain": self.scalars["python"].get(param, {}),
            "absent": param in self._absent,
            **self._kept_of(param),
        }

    def _kept_of(self, param: str) -> dict[str, Any]:
        """Nested values in its state, and its keys where they are others than the layout tells:
        none, or the only one.
        """
        if self.kept is None:
            return {"entries": [], "deviating": []}
        keys = self.kept["keys"]
        return {
            "entries": self.kept["entries"].get(param, []),
            "deviating": [keys[param]] if param in keys else [],
        }
