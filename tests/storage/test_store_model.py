"""A model of several ranks that upload, commit, restore and collect garbage, and die at any moment.

Every actor is a generator that yields before each call to the store; who goes on is drawn by lot, and so
is who dies: before the call, or right after it took effect (the answer is lost), or in the middle of a
deletion. The planners, the catalog, the manifests and the reader are the real ones; only the shells are
modelled, and keep to ``docs/format.md`` section 7.

Asserted after every step: no committed checkpoint refers to anything that is missing or changed, whatever
was verified and is newest can be restored bit for bit, and no other checkpoint is ever restored. At last:
nothing lies there that no manifest refers to.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest

from ckptd.storage.checkpoints.catalog import Catalog, CheckpointState, see
from ckptd.storage.checkpoints.manifest import RankManifest, StoredSnapshot
from ckptd.storage.checkpoints.names import CheckpointId, ObjectName, parse
from ckptd.storage.checkpoints.reader import (
    read_catalog,
    read_manifest,
    restore_snapshot,
)
from ckptd.storage.checkpoints.retention import (
    References,
    RetentionPolicy,
    choose_checkpoints,
    plan_retention,
)
from ckptd.storage.checkpoints.upload_plan import PartLimits, StoredIndex, plan_upload
from ckptd.storage.checkpoints.verifier import verify_checkpoint, verify_run
from ckptd.storage.image_format import TensorEntry
from ckptd.storage.stores.objects import ObjectMissing
from tests.storage.memory_store import SECOND_NS, MemoryStore
from tests.storage.samples import (
    JOB,
    RUN,
    Sample,
    index_of,
    make_sample,
    manifest_of,
    read_manifests,
    write_identity,
)

GRACE_NS, SETTLE_NS = 400 * SECOND_NS, 120 * SECOND_NS
ENTRIES = [TensorEntry(f"t{n}", "U8", (200,)) for n in range(4)]
WINDOW, EVERY = 2, 3
STEPS = 1200

PREFIX = f"{JOB}/{RUN}/"

Steps = Generator[None, None, None]


class Dies(Exception):
    """The actor ends in the middle of a call."""


@dataclass
class DyingStore(MemoryStore):
    """Kills whoever deletes, after so many keys of his."""

    def __post_init__(self) -> None:
        super().__init__()
        self.dies_after: int | None = None

    def delete(self, keys: Sequence[str]) -> None:
        limit = self.dies_after
        super().delete(keys[:limit])
        if limit is not None:
            self.dies_after = None
            raise Dies


@dataclass
class World:
    """The run itself: what each rank recorded, in the history that counts and in abandoned ones."""

    rng: random.Random
    world_size: int
    store: DyingStore = field(default_factory=DyingStore)
    epoch: int = 1
    epoch_start: int = -1
    begun: int = 0  # the first iteration of this history
    iteration: int = 0
    samples: dict[tuple[int, int, int], Sample] = field(default_factory=dict)
    verified: set[CheckpointId] = field(default_factory=set)
    parsed: dict[bytes, RankManifest] = field(default_factory=dict)
    restored: int = 0
    given_up: int = 0
    freed: int = 0

    def sample(self, rank: int, iteration: int) -> Sample:
        """The snapshot that a rank took in the present history; contents repeat now and then."""
        place = (rank, iteration, self.epoch)
        if place not in self.samples:
            rng = random.Random(repr(place))
            seeds = {entry.name: rng.choice([1, 2, 3, iteration]) for entry in ENTRIES}
            seeds["t0"] = 0  # frozen, and equal on all ranks
            self.samples[place] = make_sample(
                iteration,
                previous=iteration - 1 if iteration > self.begun else -1,
                rank=rank,
                seeds=seeds,
                entries=ENTRIES,
                anchors=1 << iteration % 2,
                phase=iteration % WINDOW,
                epoch=self.epoch,
                epoch_start=self.epoch_start,
                sequence=iteration + 1000 * self.epoch,
            )
        return self.samples[place]

    def manifest(self, key: str) -> RankManifest:
        """What lies there; parsed once as long as it does not change."""
        data = self.store.objects[key]
        if data not in self.parsed:
            self.parsed[data] = RankManifest.from_bytes(data)
        return self.parsed[data]

    def catalog(self) -> Catalog:
        return read_catalog(self.store, JOB, RUN)

    def recover(self) -> None:
        """All trainers die; the job goes on from memory, or from what is stored, in a new epoch."""
        newest = self.catalog().newest
        at = self.rng.randint(self.begun, self.iteration)
        if newest is not None and self.rng.random() < 0.5:
            at = newest.id.end
            self.restore(newest.id)
        if at < self.begun + WINDOW:
            return
        self.epoch += self.rng.randint(1, 3)
        self.epoch_start, self.begun, self.iteration = at, at + 1, at + 1

    def restore(self, wanted: CheckpointId) -> None:
        catalog = self.catalog()
        checkpoint = next(c for c in catalog.checkpoints if c.id == wanted)
        assert checkpoint.state is CheckpointState.COMMITTED
        manifests = read_manifests(self.store, checkpoint)
        assert sorted(manifests) == list(range(self.world_size))
        for rank, manifest in manifests.items():
            for snapshot in manifest.snapshots:
                into = memoryview(bytearray(snapshot.image_len))
                restore_snapshot(self.store, snapshot, into)
                assert into == self.samples[rank, snapshot.iteration, snapshot.epoch].image
        self.restored += 1


def uploader(world: World, rank: int) -> Steps:
    """A rank's daemon from its start to its death: checkpoint after checkpoint."""
    store, epoch = world.store, world.epoch
    known = {epoch: world.epoch_start}
    yield
    found = see(store.list(PREFIX), JOB, RUN, known_epochs=known).base_of(rank)
    last: str | None = None
    before: list[StoredSnapshot] = []
    done = -1
    if found is not None:
        last = found.manifests[rank].key
        yield
        try:
            manifest = read_manifest(store, last)
        except ObjectMissing:
            return  # deleted meanwhile: its next life looks again
        before, done = list(manifest.snapshots), manifest.end
    while True:
        end = (max(done, world.begun + WINDOW - 2) // EVERY + 1) * EVERY
        while world.iteration < end and world.epoch == epoch:
            yield
        if world.epoch != epoch:
            if world.rng.random() < 0.5:
                return
            end = min(end, done + EVERY)  # a daemon that has not heard of it goes on for a while
            if any((rank, i, epoch) not in world.samples for i in range(end - 1, end + 1)):
                return
        samples = [
            world.samples.get((rank, i, epoch)) or world.sample(rank, i)
            for i in range(end - WINDOW + 1, end + 1)
        ]
        began_ns = store.now_ns
        relied: set[str] = set() if last is None else {last}
        try:
            stored = yield from upload(world, rank, samples, before, relied)
        except ObjectMissing:
            return  # what it relied on was replaced or abandoned: its next life looks again
        manifest = manifest_of(stored, rank=rank, world_size=world.world_size)
        yield
        listed_ns = store.now_ns
        views = see(store.list(PREFIX), JOB, RUN, known_epochs=known)
        if views.refusal(manifest.checkpoint, relied):
            world.given_up += 1
            return
        yield
        late = store.now_ns - began_ns > GRACE_NS // 2
        if late or store.now_ns - listed_ns > SETTLE_NS // 2:
            return  # too late for the promise that what it refers to is there
        store.put(manifest.key, [memoryview(manifest.to_bytes())])
        last, before, done = manifest.key, list(manifest.snapshots), end


def upload(
    world: World,
    rank: int,
    samples: Sequence[Sample],
    before: Sequence[StoredSnapshot],
    relied: set[str],
) -> Generator[None, None, list[StoredSnapshot]]:
    """Store the snapshots of one checkpoint; ``before`` are those of the last manifest."""
    store = world.store
    yield
    index = index_of(store, before)
    yield
    yield from neighbours(world, rank, samples[-1], index, relied)
    stored: list[StoredSnapshot] = []
    for sample in samples:
        known = next((s for s in before if s.header_digest == sample.header_digest), None)
        if known is None:
            plan = plan_upload(
                [sample.image],
                index,
                job=JOB,
                run=RUN,
                rank=rank,
                epoch=sample.epoch,
                sequence=sample.sequence,
                limits=PartLimits(100),
            )
            yield
            info = store.put(plan.key, plan.parts([sample.image]))
            known = sample.stored(plan, info.etag)
            index.add(sample.header, known)
        stored.append(known)
    return stored


def neighbours(world: World, rank: int, last: Sample, index: StoredIndex, relied: set[str]) -> Iterator[None]:
    """Learn from the manifests that other ranks wrote for the same checkpoint."""
    for checkpoint in world.catalog().checkpoints:
        if (checkpoint.id.end, checkpoint.id.epoch) != (last.iteration, last.epoch):
            continue
        for other, info in checkpoint.manifests.items():
            if other == rank or world.rng.random() < 0.5:
                continue
            yield
            try:
                manifest = read_manifest(world.store, info.key)
                headers = [
                    bytes(s.image[: s.view.data_offset])
                    for s in (world.samples[other, m.iteration, m.epoch] for m in manifest.snapshots)
                ]
            except ObjectMissing:
                continue
            relied.add(info.key)
            for header, snapshot in zip(headers, manifest.snapshots, strict=True):
                index.add(header, snapshot)


def collector(world: World) -> Steps:
    """Verifies what is new, then deletes what may go; from a listing that may be old by then."""
    store = world.store
    policy = RetentionPolicy(keep_last=world.rng.randint(1, 2), grace_ns=GRACE_NS, settle_ns=SETTLE_NS)
    while True:
        yield
        catalog = world.catalog()
        now_ns = store.now_ns  # the store's clock
        for checkpoint in catalog.committed[:1]:
            if verify_checkpoint(store, catalog, checkpoint).ok:
                world.verified.add(checkpoint.id)
        yield
        choice = choose_checkpoints(catalog, policy, verified=world.verified, now_ns=now_ns)
        references: dict[str, References] = {}
        for checkpoint in catalog.checkpoints:
            if checkpoint.id in choice.kept:
                for info in checkpoint.manifests.values():
                    yield
                    try:
                        references[info.key] = References.of(read_manifest(store, info.key))
                    except ObjectMissing:
                        continue  # another collector was faster; it counts as unread
        plan = plan_retention(catalog, policy, verified=world.verified, references=references, now_ns=now_ns)
        for deletions in (plan.manifests, plan.objects):
            yield
            if store.now_ns - now_ns > SETTLE_NS // 2:
                break  # what it saw is too old to act upon
            world.freed += len(deletions)
            store.delete([deletion.key for deletion in deletions])


def check(world: World, best: CheckpointId | None) -> CheckpointId | None:
    """What must hold at every moment; ``best`` is what this returned the last time.

    ``best`` may go when a newer one is verified. That one may have been abandoned since by a recovery to
    an earlier iteration; then it stays, and is whole, until the new history has a verified one itself.
    """
    catalog = world.catalog()
    objects = world.store.objects
    whole = [
        c
        for c in catalog.checkpoints
        if c.state is CheckpointState.COMMITTED or (c.complete and c.id in world.verified)
    ]
    for checkpoint in whole:
        for info in checkpoint.manifests.values():
            for snapshot in world.manifest(info.key).snapshots:
                for key, size, _ in snapshot.objects:
                    assert len(objects.get(key, b"")) == size, (checkpoint.id, key)
    if best is not None:
        verified = [c.id for c in whole if c.id in world.verified]
        assert any(c == best or c.end > best.end for c in verified)
    return next((c.id for c in catalog.committed if c.id in world.verified), None)


def finish(world: World) -> None:
    """One more checkpoint of all ranks without any trouble, and all garbage is collected."""
    store = world.store
    store.now_ns += 3 * GRACE_NS
    world.epoch += 10
    world.epoch_start, world.begun = world.iteration, world.iteration + 1
    world.iteration += 3 * EVERY
    for rank in range(world.world_size):
        actor = uploader(world, rank)
        for _ in range(40):
            next(actor)
    for _ in range(2):
        store.now_ns += 2 * GRACE_NS
        actor = collector(world)
        for _ in range(10 + 8 * len(world.catalog().checkpoints) * world.world_size):
            next(actor)
    report = verify_run(store, JOB, RUN)
    assert report.findings == ()
    assert report.whole
    newest = world.catalog().newest
    assert newest is not None
    assert newest.id.epoch == world.epoch
    world.restore(newest.id)


def simulate(seed: int, steps: int) -> World:
    rng = random.Random(seed)
    world = World(rng, rng.choice([1, 2, 3]))
    write_identity(world.store)
    actors: dict[str, Steps] = {}

    def start(name: str) -> None:
        actors[name] = collector(world) if name.startswith("gc") else uploader(world, int(name))

    best: CheckpointId | None = None
    names = [*map(str, range(world.world_size)), "gc1", "gc2"]
    for _ in range(steps):
        world.iteration += rng.random() < 0.15
        world.store.now_ns += rng.choice([0, 0, 0, 0, 1, 1, 2, 8]) * SECOND_NS
        if rng.random() < 0.004:
            world.store.now_ns += 2 * GRACE_NS  # everybody was stopped for a while
        if rng.random() < 0.01:
            world.recover()
        name = rng.choice(names)
        if name not in actors:
            start(name)
        if rng.random() < 0.03:
            world.store.dies_after = rng.randint(0, 4)
        try:
            next(actors[name])
        except (StopIteration, Dies):
            del actors[name]
        world.store.dies_after = None
        if rng.random() < 0.03:
            actors.pop(name, None)
        best = check(world, best)
        if best is not None and rng.random() < 0.02:
            world.restore(best)
    return world


@cache
def outcome(seed: int) -> World:
    """A run of the model, after which all garbage was collected."""
    world = simulate(seed, STEPS)
    finish(world)
    return world


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_whatever_dies_what_is_committed_is_whole(seed: int) -> None:
    assert outcome(seed).restored


@pytest.mark.slow
def test_the_model_goes_where_it_should() -> None:
    """Otherwise the test above would be about nothing."""
    worlds = [outcome(seed) for seed in range(12)]
    assert min(len(world.verified) for world in worlds) >= 5
    assert min(world.restored for world in worlds) >= 10
    assert min(world.freed for world in worlds) >= 20
    assert sum(world.given_up for world in worlds) >= 3
    assert min(world.epoch for world in worlds) >= 5
    assert {world.world_size for world in worlds} == {1, 2, 3}
    objects = [told for w in worlds for m in w.parsed.values() for told in shared(m)]
    names = [(rank, parse(key)) for rank, key in objects]
    assert any(isinstance(name, ObjectName) and name.rank != rank for rank, name in names)
    assert len(objects) > 100


def shared(manifest: RankManifest) -> list[tuple[int, str]]:
    """The older objects to which the snapshots of a manifest refer."""
    return [(manifest.rank, stored.key) for snap in manifest.snapshots for stored in snap.objects[1:]]
