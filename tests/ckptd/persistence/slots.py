"""Segments with sealed snapshots of a chain, for the tests of the third tier."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ckptd.core.slots.segment_format import SegmentDescriptor, SlotHeader
from ckptd.core.slots.slots import SlotState, SnapshotKey
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.storage.image import ImageLayout, seal
from ckptd.storage.image_format import TensorEntry
from tests.ckptd import running
from tests.ckptd.memory.fresh import put_header

WINDOW = 2
FROZEN_BYTES, FRESH_BYTES = 300_000, 100_000


def descriptor(
    rank: int = 0, *, world_size: int = 1, partial: bool = False, client: bytes = b""
) -> SegmentDescriptor:
    """Of a rank with two operators; with ``partial``, of two experts and the rest."""
    return running.descriptor(
        rank=rank,
        world_size=world_size,
        node_id="n",
        created_at_ns=1,
        window=WINDOW,
        num_operators=2 + partial,
        client=client,
    )


def segment_store(folder: Path) -> SegmentStore:
    """In a folder of the test's own."""
    folder.mkdir(parents=True, exist_ok=True)
    return SegmentStore(folder, 64 << 20, "n", mlock="off", hugepages="off")


def fill(
    segment: Segment,
    index: int,
    iteration: int,
    *,
    epoch: int = 1,
    seed: int | None = None,
    partial: bool = False,
    scalars: bytes = b"",
) -> SnapshotKey:
    """Seal a snapshot in a slot: a tensor that never changes, and one that is new each time (or of
    this seed).

    Args:
        partial: it also has an expert, one of two in turns, and anchors that and the rest.
        scalars: what its trainer recorded of the step.
    """
    told, turn = segment.descriptor, iteration % WINDOW
    expert = (
        {f"expert.{turn}": np.random.default_rng([iteration, turn]).bytes(FRESH_BYTES)} if partial else {}
    )
    packed = {"ckptd.scalars": scalars} if scalars else {}
    entries = [TensorEntry(name, "U8", (len(data),)) for name, data in {**expert, **packed}.items()]
    layout = ImageLayout.build(
        [TensorEntry("frozen", "U8", (FROZEN_BYTES,)), TensorEntry("fresh", "U8", (FRESH_BYTES,)), *entries],
        identity={
            "job": told.job,
            "run": told.run,
            "rank": str(told.rank),
            "world_size": str(told.world_size),
        },
        num_operators=told.num_operators,
        anchors=1 << turn | (1 << WINDOW) * partial,
    )
    image = segment.image(index, SlotHeader(image_len=layout.image_len))
    layout.write_header(image, iteration=iteration, previous=iteration - 1, scalars_len=len(scalars))
    content = {
        "frozen": np.random.default_rng(0).bytes(FROZEN_BYTES),
        "fresh": np.random.default_rng(iteration if seed is None else seed).bytes(FRESH_BYTES),
        **expert,
        **packed,
    }
    for name, data in content.items():
        at = layout.offset_of(name)
        image[at : at + len(data)] = data
    header = SlotHeader(
        state=SlotState.SEALED,
        iteration=iteration,
        previous=iteration - 1,
        image_len=layout.image_len,
        sequence=iteration + 1,
        layout_id=layout.layout_id,
        writer_pid=os.getpid(),
        phase=iteration % WINDOW,
        header_digest=seal(image),
        epoch=epoch,
    )
    put_header(segment.buffer, segment.geometry, index, header)
    return SnapshotKey(segment.generation, iteration, epoch, iteration + 1)


def three_snapshots(store: SegmentStore) -> Iterator[Segment]:
    """A segment of four slots with iterations 0 to 2, closed afterwards; for fixtures."""
    made = store.create(descriptor(), 4, 1 << 20)
    for iteration in range(3):
        fill(made, iteration, iteration)
    yield made
    made.close()
