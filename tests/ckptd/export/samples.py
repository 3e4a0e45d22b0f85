"""Snapshots in segments and in stores, made of given tensors, for the tests of exports."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from ckptd.core.slots.segment_format import encode_descriptor, origin_of, replica_file_name
from ckptd.core.slots.slots import SlotState
from ckptd.export.exports import ExportReport, export_file
from ckptd.export.memory_source import open_slot
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.memory.slot_digests import seal_slot
from ckptd.storage.checkpoints.manifest import RankManifest, StoredSnapshot
from ckptd.storage.checkpoints.upload_plan import PartLimits, StoredIndex, plan_upload
from ckptd.storage.image import ImageLayout, seal
from ckptd.storage.image_format import TensorEntry
from ckptd.storage.stores.objects import ObjectStore
from ckptd.storage.strong_digest import strong_digest
from tests.ckptd.running import MIB, descriptor, fill

Tensors = tuple[tuple[str, str, tuple[int, ...], bytes], ...]
NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
SPARSE, DENSE = 0b01, 0b11


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    if not tensor.numel():
        return b""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def entries(**tensors: torch.Tensor) -> Tensors:
    """Tensors as an image is filled with them."""
    return tuple((n, NAMES[t.dtype], tuple(t.shape), raw(t)) for n, t in tensors.items())


@contextmanager
def segment_folder() -> Iterator[Path]:
    """A folder for segments, in memory."""
    path = Path(f"/dev/shm/ckptd-test-export-{secrets.token_hex(6)}")
    path.mkdir(mode=0o700)
    try:
        yield path
    finally:
        for left in path.iterdir():
            left.unlink()
        path.rmdir()


def client_part(operators: Mapping[str, tuple[int, int] | None], **more: Any) -> bytes:
    """What a trainer tells of its operators: one per parameter, whole or of some rows."""
    table = [
        [f"op {name}", "dense", "", None, None, [[name, *(rows or (None, None))]]]
        for name, rows in operators.items()
    ]
    return msgspec.msgpack.encode({"operators": table, **more})


def snapshot(
    folder: Path,
    iteration: int,
    tensors: Tensors,
    rank: int = 0,
    *,
    anchors: int = SPARSE,
    client: bytes = b"",
    scalars_len: int = 0,
    epoch: int = 0,
) -> Segment:
    """One sealed snapshot in a segment of its own."""
    store = SegmentStore(folder, 64 * MIB, "n", mlock="off", hugepages="off")
    store.adopt(0.0)
    told = descriptor(rank=rank, client=client)
    segment = store.create(told, 1, MIB)
    fill(
        segment,
        0,
        iteration,
        tensors=tensors,
        anchors=anchors,
        scalars_len=scalars_len,
        epoch=epoch,
    )
    seal_slot(segment, 0)
    header = segment.header(0)
    assert header is not None
    assert header.state is SlotState.SEALED
    return segment


def as_replica(segment: Segment, folder: Path) -> Path:
    """Move a segment to another folder, as the replica that a daemon would have there."""
    told = segment.descriptor
    name = replica_file_name(told.job, told.run, told.rank, told.generation, origin_of(told))
    segment.path.rename(folder / name)
    return folder / name


def export(folder: Path, iteration: int | None, target: Path, **options: Any) -> ExportReport:
    """The model of a snapshot in memory as one file."""
    which = {key: options.pop(key) for key in ("job", "run", "rank") if key in options}
    with open_slot(folder, iteration, **which) as source:
        return export_file(source, target, **options)


def stored_window(
    store: ObjectStore,
    snapshots: Mapping[int, tuple[Tensors, int]],
    *,
    rank: int = 0,
    world_size: int = 1,
    client: bytes = b"",
    epoch: int = 1,
    scalars_len: int = 0,
) -> RankManifest:
    """A checkpoint of one rank: by iteration its tensors and anchors, uploaded as a daemon does."""
    index, stored = StoredIndex(), []
    before = -1
    for iteration, (tensors, anchors) in snapshots.items():
        layout = ImageLayout.build(
            [TensorEntry(name, dtype, shape) for name, dtype, shape, _ in tensors],
            identity={"job": "job", "run": "run", "rank": str(rank), "world_size": str(world_size)},
            num_operators=2,
            anchors=anchors,
        )
        image = memoryview(bytearray(layout.image_len))
        layout.write_header(image, iteration=iteration, previous=before, scalars_len=scalars_len)
        for name, _, _, data in tensors:
            at = layout.offset_of(name)
            image[at : at + len(data)] = data
        digest = seal(image)
        plan = plan_upload(
            [image],
            index,
            job="job",
            run="run",
            rank=rank,
            epoch=epoch,
            sequence=iteration,
            limits=PartLimits(64),
        )
        info = store.put(plan.key, plan.parts([image]))
        stored.append(
            StoredSnapshot(
                iteration=iteration,
                previous=before,
                sequence=iteration,
                phase=iteration % 2,
                epoch=epoch,
                epoch_start=-1,
                filled_at_ns=1,
                header_digest=digest,
                image_len=layout.image_len,
                layout_id=layout.layout_id,
                num_operators=2,
                anchors=anchors,
                objects=plan.objects(info.etag),
                extents=plan.extents,
                image_digest=strong_digest(image),
            )
        )
        index.add(bytes(image[: layout.data_offset]), stored[-1])
        before = iteration
    told = descriptor(rank=rank, world_size=world_size, client=client)
    manifest = RankManifest(
        job="job",
        run="run",
        run_id="0123abcd",
        rank=rank,
        world_size=world_size,
        window=2,
        every=10,
        written_at_ns=1,
        slot_bytes=1 << 30,
        num_slots=6,
        descriptor=encode_descriptor(told),
        tool="test",
        snapshots=tuple(stored),
    )
    store.put(manifest.key, [memoryview(manifest.to_bytes())])
    return manifest
