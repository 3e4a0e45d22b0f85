"""Snapshots as tests compare them: what a segment file holds, and ones that no trainer made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckptd.core.slots.segment_format import SlotHeader
from ckptd.core.slots.slots import SlotState
from ckptd.memory.segment_file import open_segment
from ckptd.storage.image import ImageLayout, ImageView, seal
from ckptd.storage.image_format import TensorEntry
from ckptd.storage.strong_digest import strong_digest
from tests.ckptd.forging import FORGEABLE_BYTES, plant

__all__ = [
    "IMAGE_BYTES",
    "Snapshot",
    "content_of",
    "flip",
    "flip_tensor",
    "sealed_in",
    "sealed_snapshot",
    "snapshot_of",
    "states_in",
]

IMAGE_BYTES = 200_000


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sealed slot: its header without what differs between copies, and its image."""

    header: SlotHeader
    image: bytes

    @property
    def digest(self) -> str:
        """The cryptographic digest that its sender tells."""
        return strong_digest(self.image)

    @property
    def name(self) -> tuple[int, int, int]:
        return self.header.iteration, self.header.epoch, self.header.sequence


def sealed_in(path: Path) -> dict[tuple[int, int, int], Snapshot]:
    """What a segment file holds sealed, by iteration, epoch and sequence; read as it is now."""
    found = {}
    try:
        segment = open_segment(path)
    except FileNotFoundError:
        return {}
    try:
        for index, header in segment.headers():
            if header.state is SlotState.SEALED:
                image = bytes(segment.image(index, header))
                if segment.header(index) == header:  # else it was reused while we looked
                    found[header.iteration, header.epoch, header.sequence] = Snapshot(header, image)
    finally:
        segment.close()
    return found


def content_of(header: SlotHeader) -> tuple[object, ...]:
    """What every copy of a snapshot has in common."""
    h = header
    identity = (h.iteration, h.previous, h.epoch, h.epoch_start, h.sequence, h.phase)
    return (*identity, h.image_len, h.layout_id, h.header_digest)


def snapshot_of(
    iteration: int, *, size: int = IMAGE_BYTES, tensors: Sequence[str] = ("w",), anchors: int = 1
) -> Snapshot:
    """A sealed snapshot that no trainer made, of an epoch 1; each of its tensors has ``size`` bytes."""
    random = np.random.default_rng(iteration)
    content = []
    for name in tensors:
        data = bytearray(random.bytes(size))
        if size >= FORGEABLE_BYTES:
            plant(data)
        content.append((TensorEntry(name, "U8", (size,)), bytes(data)))
    return sealed_snapshot(iteration, content, anchors=anchors)


def sealed_snapshot(
    iteration: int, content: Sequence[tuple[TensorEntry, bytes]], *, anchors: int = 1
) -> Snapshot:
    """A sealed snapshot of these tensors and their bytes, of an epoch 1 and with one operator."""
    layout = ImageLayout.build(
        [entry for entry, _ in content], identity={"job": "job"}, num_operators=1, anchors=anchors
    )
    image = bytearray(layout.image_len)
    layout.write_header(memoryview(image), iteration=iteration, previous=-1, scalars_len=0)
    for entry, data in content:
        at = layout.offset_of(entry.name)
        image[at : at + len(data)] = data
    header = SlotHeader(
        state=SlotState.SEALED,
        iteration=iteration,
        previous=-1,
        image_len=layout.image_len,
        sequence=iteration + 1,
        layout_id=layout.layout_id,
        writer_pid=os.getpid(),
        header_digest=seal(memoryview(image)),
        epoch=1,
    )
    return Snapshot(header, bytes(image))


def flip_tensor(paths: Sequence[Path], iteration: int, name: str) -> None:
    """Change a byte in the middle of a tensor of the one sealed snapshot of this iteration in these
    segment files.
    """
    changed = 0
    for path in paths:
        segment = open_segment(path)
        for index, header in segment.headers():
            if header.state is SlotState.SEALED and header.iteration == iteration:
                image = segment.image(index, header)
                tensor = ImageView(image).tensor(name)
                image[tensor.offset + tensor.nbytes // 2] ^= 1
                changed += 1
                image.release()
        segment.close()
    assert changed == 1


def states_in(path: Path) -> list[SlotState]:
    """The state of every readable slot of a segment file."""
    segment = open_segment(path)
    try:
        return [SlotState(header.state) for _, header in segment.headers()]
    finally:
        segment.close()


def flip(paths: Sequence[Path], iterations: Sequence[int]) -> int:
    """Change a byte in the middle of these snapshots in these segment files; returns how many were changed."""
    changed = 0
    for path in paths:
        segment = open_segment(path)
        for index, header in segment.headers():
            if header.state is SlotState.SEALED and header.iteration in iterations:
                segment.image(index, header)[header.image_len // 2] ^= 1
                changed += 1
        segment.close()
    return changed
