"""A trained run's snapshots as several ranks would have captured them that share everything: each
operator once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ckptd.core.export_plan import BUFFER, OURS, param_and_key, split_rows
from ckptd.export.memory_source import open_segments, sealed_slots
from ckptd.memory.segment_file import Segment
from ckptd.storage.image import ImageView
from ckptd.storage.image_format import ImageTensor
from ckptd.storage.stores.objects import ObjectStore
from tests.ckptd.export.samples import DENSE, SPARSE, Tensors, snapshot, stored_window
from tests.client.exporting import Trained

_Rows = tuple[int, int] | None


@dataclass
class SharedRun:
    """The snapshots of a run, shared out: operator i is captured by rank i mod ``world``."""

    trained: Trained
    world: int

    def __post_init__(self) -> None:
        segments, _ = open_segments(self.trained.segment_dir.glob("*.seg"))
        self._segments = [s for s in segments if s.key.run == self.trained.run]
        self.told: dict[str, Any] = msgspec.msgpack.decode(self._segments[-1].descriptor.client)
        self.owners = [i % self.world for i in range(len(self.told["operators"]))]
        # By iteration.
        self.views = {
            s.header.iteration: ImageView(s.segment.image(s.index, s.header))
            for s in sealed_slots(self._segments)
        }

    @property
    def client(self) -> bytes:
        """What each rank's trainer tells."""
        return msgspec.msgpack.encode({**self.told, "owners": self.owners})

    def owners_of(self, param: str) -> set[int]:
        """The ranks that capture rows of a parameter."""
        return {rank for rank in range(self.world) if self._mine(rank, param)}

    def into_memory(self, folder: Path) -> list[Segment]:
        """All snapshots of all ranks in segments."""
        return [
            snapshot(
                folder,
                iteration,
                self.tensors(rank, iteration),
                rank,
                anchors=_anchors(view),
                client=self.client,
                scalars_len=view.scalars_len,
            )
            for rank in range(self.world)
            for iteration, view in self.views.items()
        ]

    def into_store(self, store: ObjectStore, iteration: int) -> None:
        """A checkpoint of one dense snapshot."""
        view = self.views[iteration]
        for rank in range(self.world):
            stored_window(
                store,
                {iteration: (self.tensors(rank, iteration), DENSE)},
                rank=rank,
                world_size=self.world,
                client=self.client,
                scalars_len=view.scalars_len,
            )

    def tensors(self, rank: int, iteration: int) -> Tensors:
        """What a rank's image holds."""
        view = self.views[iteration]
        return tuple(part for tensor in view for part in self._parts(rank, tensor, view))

    def _parts(
        self, rank: int, tensor: ImageTensor, view: ImageView
    ) -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
        data = bytes(view.data(tensor.name))
        name, held = split_rows(tensor.name)
        if name.startswith((OURS, BUFFER)):
            yield tensor.name, tensor.dtype, tensor.shape, data
            return
        for rows in self._mine(rank, param_and_key(name)[0]):
            if rows is None:
                yield tensor.name, tensor.dtype, tensor.shape, data
                continue
            first, last = held or (0, tensor.shape[0])
            a, b = max(first, rows[0]), min(last, rows[1])
            if a < b:
                row_bytes = len(data) // (last - first)
                part = data[(a - first) * row_bytes : (b - first) * row_bytes]
                yield f"{name}[{a}:{b}]", tensor.dtype, (b - a, *tensor.shape[1:]), part

    def _mine(self, rank: int, param: str) -> list[_Rows]:
        return [
            None if start is None else (start, stop)
            for operator, owner in zip(self.told["operators"], self.owners, strict=True)
            for name, start, stop in operator[-1]
            if owner == rank and name == param
        ]


def _anchors(view: ImageView) -> int:
    return DENSE if view.anchors == (1 << view.num_operators) - 1 else SPARSE
