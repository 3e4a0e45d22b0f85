"""Small sealed images, and runs of them uploaded by the real planner."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckptd.storage.checkpoints.catalog import StoredCheckpoint
from ckptd.storage.checkpoints.manifest import RankManifest, StoredSnapshot
from ckptd.storage.checkpoints.reader import read_image_header, read_manifest
from ckptd.storage.checkpoints.sealed_json import RunIdentity
from ckptd.storage.checkpoints.upload_plan import PartLimits, StoredIndex, UploadPlan, plan_upload
from ckptd.storage.image import ImageLayout, ImageView, seal
from ckptd.storage.image_format import TensorEntry
from ckptd.storage.stores.objects import ObjectStore
from ckptd.storage.strong_digest import strong_digest

JOB, RUN, RUN_ID = "moe", "run-1", "0123abcd"

TENSORS = (
    TensorEntry("expert.0.w", "F32", (64, 8)),
    TensorEntry("expert.1.w", "F32", (64, 8)),
    TensorEntry("gate.w", "BF16", (33,)),
    TensorEntry("nothing", "F32", (0, 4)),
    TensorEntry("mask", "BOOL", (17,)),
    TensorEntry("ckptd.scalars", "U8", (40,)),
)


@dataclass
class Sample:
    """A sealed image and what its slot would say of it."""

    image: memoryview
    header_digest: bytes
    iteration: int
    previous: int
    epoch: int = 7
    epoch_start: int = -1
    phase: int = 0
    sequence: int = 0

    @property
    def view(self) -> ImageView:
        return ImageView(self.image)

    @property
    def header(self) -> bytes:
        return bytes(self.image[: self.view.data_offset])

    def stored(self, plan: UploadPlan, etag: str = "") -> StoredSnapshot:
        """As a manifest tells of it, once the plan was carried out."""
        view = self.view
        return StoredSnapshot(
            iteration=self.iteration,
            previous=self.previous,
            sequence=self.sequence,
            phase=self.phase,
            epoch=self.epoch,
            epoch_start=self.epoch_start,
            filled_at_ns=123,
            header_digest=self.header_digest,
            image_len=view.image_len,
            layout_id=view.layout_id,
            num_operators=view.num_operators,
            anchors=view.anchors,
            objects=plan.objects(etag),
            extents=plan.extents,
            image_digest=strong_digest(self.image),
        )


def make_sample(
    iteration: int,
    *,
    previous: int = -1,
    rank: int = 0,
    seeds: Mapping[str, int] | None = None,
    entries: Iterable[TensorEntry] = TENSORS,
    anchors: int = 0b11,
    epoch: int = 7,
    epoch_start: int = -1,
    phase: int = 0,
    sequence: int | None = None,
    spare: int = 0,
    job: str = JOB,
) -> Sample:
    """An image whose tensors are random; those in ``seeds`` depend on their name and seed alone."""
    identity = {"job": job, "run": RUN, "rank": str(rank), "world_size": "2"}
    layout = ImageLayout.build(entries, identity=identity, num_operators=2, anchors=anchors)
    buf = memoryview(bytearray(layout.image_len + spare))
    layout.write_header(buf, iteration=iteration, previous=previous, scalars_len=5)
    for entry in layout.entries:
        seed = (seeds or {}).get(entry.name)
        source = (rank, epoch, iteration, entry.name) if seed is None else (seed, entry.name)
        data = random.Random(repr(source)).randbytes(entry.nbytes)
        if entry.dtype == "BOOL":
            data = bytes(byte & 1 for byte in data)
        at = layout.offset_of(entry.name)
        buf[at : at + entry.nbytes] = data
    digest = seal(buf)
    number = iteration if sequence is None else sequence
    return Sample(buf, digest, iteration, previous, epoch, epoch_start, phase, number)


def manifest_of(
    snapshots: Iterable[StoredSnapshot],
    *,
    rank: int = 0,
    world_size: int = 1,
    job: str = JOB,
    run_id: str = RUN_ID,
) -> RankManifest:
    return RankManifest(
        job=job,
        run=RUN,
        run_id=run_id,
        rank=rank,
        world_size=world_size,
        window=2,
        every=10,
        written_at_ns=456,
        slot_bytes=1 << 20,
        num_slots=6,
        descriptor=b"\x00opaque",
        tool="ckptd 0.3.0",
        snapshots=tuple(snapshots),
    )


@dataclass
class Writer:
    """One rank that uploads as a daemon does, without any failure."""

    store: ObjectStore
    rank: int = 0
    world_size: int = 1
    job: str = JOB
    run_id: str = RUN_ID
    min_tensor_bytes: int = 64
    index: StoredIndex = field(default_factory=StoredIndex)
    samples: dict[int, Sample] = field(default_factory=dict)

    def upload(self, sample: Sample) -> StoredSnapshot:
        plan = plan_upload(
            [sample.image],
            self.index,
            job=self.job,
            run=RUN,
            rank=self.rank,
            epoch=sample.epoch,
            sequence=sample.sequence,
            limits=PartLimits(self.min_tensor_bytes),
        )
        info = self.store.put(plan.key, plan.parts([sample.image]))
        stored = sample.stored(plan, info.etag)
        self.index.add(sample.header, stored)
        self.samples[sample.iteration] = sample
        return stored

    def commit(self, samples: Iterable[Sample]) -> RankManifest:
        stored = [self.upload(sample) for sample in samples]
        manifest = manifest_of(
            stored,
            rank=self.rank,
            world_size=self.world_size,
            job=self.job,
            run_id=self.run_id,
        )
        self.store.put(manifest.key, [memoryview(manifest.to_bytes())])
        return manifest


def window(end: int, *, size: int = 2, **options: object) -> list[Sample]:
    """Consecutive snapshots up to ``end``, which anchor both operators together."""
    first = end - size + 1
    return [
        make_sample(
            i,
            previous=i - 1 if i > first else -1,
            phase=i % size,
            anchors=0b11 if size == 1 else 1 << (i % 2),
            **options,  # type: ignore[arg-type]
        )
        for i in range(first, end + 1)
    ]


def write_identity(store: ObjectStore, job: str = JOB) -> None:
    identity = RunIdentity(job, RUN, RUN_ID, 1, "ckptd 0.3.0")
    store.put(f"{job}/{RUN}/run.json", [memoryview(identity.to_bytes())])


def read_manifests(store: ObjectStore, checkpoint: StoredCheckpoint) -> dict[int, RankManifest]:
    """The manifests of a checkpoint, by rank."""
    return {rank: read_manifest(store, entry.key) for rank, entry in checkpoint.manifests.items()}


def index_of(store: ObjectStore, snapshots: Iterable[StoredSnapshot]) -> StoredIndex:
    """An index of the tensors of these snapshots."""
    index = StoredIndex()
    for snapshot in snapshots:
        index.add(read_image_header(store, snapshot), snapshot)
    return index
