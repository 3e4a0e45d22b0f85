"""Reading back: every byte where it belongs, in few requests, and damage is named."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.storage.checkpoints.manifest import Extent, RankManifest, StoredObject, StoredSnapshot
from ckptd.storage.checkpoints.names import ObjectName
from ckptd.storage.checkpoints.reader import (
    SPLIT_BYTES,
    SnapshotDamaged,
    plan_reads,
    read_catalog,
    read_identity,
    read_image_bytes,
    read_image_header,
    read_manifest,
    restore_snapshot,
)
from ckptd.storage.checkpoints.sealed_json import ManifestError
from ckptd.storage.image_format import TensorEntry
from ckptd.storage.stores.objects import Damaged, ObjectMissing, Range, Unavailable
from tests.storage.memory_store import MemoryStore
from tests.storage.samples import (
    JOB,
    RUN,
    RUN_ID,
    Writer,
    index_of,
    make_sample,
    read_manifests,
    window,
    write_identity,
)

FROZEN = {"expert.0.w": 1}


@pytest.fixture
def run() -> tuple[MemoryStore, Writer]:
    """Two checkpoints of one rank; the second refers to objects of the first."""
    store = MemoryStore()
    writer = Writer(store)
    write_identity(store)
    for end in (11, 21):
        writer.commit(window(end, seeds=FROZEN))
    return store, writer


def test_a_run_is_read_back_bit_for_bit(run: tuple[MemoryStore, Writer]) -> None:
    store, writer = run
    catalog = read_catalog(store, JOB, RUN)
    assert [c.id.end for c in catalog.committed] == [21, 11]
    identity = read_identity(store, JOB, RUN)
    assert identity is not None
    assert identity.run_id == RUN_ID
    for checkpoint in catalog.committed:
        manifest = read_manifests(store, checkpoint)[0]
        assert manifest.checkpoint == checkpoint.id
        for snapshot in manifest.snapshots:
            into = memoryview(bytearray(b"\xaa" * (snapshot.image_len + 100)))
            restore_snapshot(store, snapshot, into)
            assert into[: snapshot.image_len] == writer.samples[snapshot.iteration].image
            assert into[snapshot.image_len :] == b"\xaa" * 100  # a slot is longer than its image
    used = [len(s.objects) for s in manifest_of_newest(store).snapshots]
    assert max(used) > 1


def manifest_of_newest(store: MemoryStore) -> RankManifest:
    newest = read_catalog(store, JOB, RUN).newest
    assert newest is not None
    return read_manifest(store, newest.manifests[0].key)


def test_objects_are_read_side_by_side(run: tuple[MemoryStore, Writer]) -> None:
    """With a pool, the reads of two objects are under way at the same time."""
    store, writer = run
    together = threading.Barrier(2, timeout=20)

    class Meeting(MemoryStore):
        def read_ranges(self, key: str, ranges: Sequence[Range]) -> None:
            together.wait()
            store.read_ranges(key, ranges)

    snapshot = manifest_of_newest(store).snapshots[0]
    assert len(snapshot.objects) == 2
    into = memoryview(bytearray(snapshot.image_len))
    with ThreadPoolExecutor(2) as pool:
        restore_snapshot(Meeting(), snapshot, into, map_fn=pool.map)
    assert into == writer.samples[snapshot.iteration].image


def test_a_failed_read_is_raised_when_no_other_writes_any_more(
    run: tuple[MemoryStore, Writer],
) -> None:
    store, _ = run
    snapshot = manifest_of_newest(store).snapshots[0]
    first, second = (reads.key for reads in plan_reads(snapshot, 0, snapshot.image_len))
    failed = threading.Event()
    under_way: set[str] = set()

    class Failing(MemoryStore):
        def read_ranges(self, key: str, ranges: Sequence[Range]) -> None:
            if key == first:
                failed.set()
                raise Unavailable(key, "reset")
            under_way.add(key)
            assert failed.wait(20)
            store.read_ranges(key, ranges)
            under_way.discard(key)

    with ThreadPoolExecutor(2) as pool, pytest.raises(Unavailable, match="reset"):
        restore_snapshot(Failing(), snapshot, memoryview(bytearray(snapshot.image_len)), map_fn=pool.map)
    assert under_way == set()
    assert second != first


def test_after_a_failure_nothing_more_is_asked_for(run: tuple[MemoryStore, Writer]) -> None:
    store, _ = run
    snapshot = manifest_of_newest(store).snapshots[0]
    store.delete([snapshot.objects[0].key])
    store.reads.clear()
    with pytest.raises(ObjectMissing):
        restore_snapshot(store, snapshot, memoryview(bytearray(snapshot.image_len)))
    assert store.reads == []


def test_a_buffer_that_is_too_short_is_refused(run: tuple[MemoryStore, Writer]) -> None:
    store, _ = run
    snapshot = manifest_of_newest(store).snapshots[0]
    with pytest.raises(ValueError, match="the buffer"):
        restore_snapshot(store, snapshot, memoryview(bytearray(snapshot.image_len - 1)))


def test_every_flipped_bit_of_an_object_is_found_and_named(
    run: tuple[MemoryStore, Writer],
) -> None:
    """All bytes that the snapshot refers to; the other bytes of an object are the verifier's affair."""
    store, _ = run
    snapshot = manifest_of_newest(store).snapshots[1]
    header = read_image_header(store, snapshot)
    into = memoryview(bytearray(snapshot.image_len))
    rng = random.Random(1)
    for extent in snapshot.extents:
        key = snapshot.objects[extent.object].key
        good = store.objects[key]
        inside = {0, extent.length - 1, *(rng.randrange(extent.length) for _ in range(60))}
        for at in sorted(inside):
            bad = bytearray(good)
            bad[extent.object_offset + at] ^= 1 << rng.randrange(8)
            store.objects[key] = bytes(bad)
            with pytest.raises(SnapshotDamaged) as caught:
                restore_snapshot(store, snapshot, into)
            assert caught.value.iteration == snapshot.iteration
            if extent.image_offset + at < len(header):
                assert caught.value.tensors == ("header",)
                assert key in caught.value.objects  # where it ends may be what is damaged
            else:
                assert caught.value.tensors != ("header",)
                assert caught.value.objects == (key,)
            assert len(caught.value.tensors) == 1
        store.objects[key] = good


def test_all_that_is_damaged_is_named(run: tuple[MemoryStore, Writer]) -> None:
    store, writer = run
    snapshot = manifest_of_newest(store).snapshots[0]
    view = writer.samples[snapshot.iteration].view
    for name in ("expert.0.w", "gate.w"):
        at = view.tensor(name).offset
        extent = next(e for e in snapshot.extents if 0 <= at - e.image_offset < e.length)
        stored = snapshot.objects[extent.object]
        bad = bytearray(store.objects[stored.key])
        bad[extent.object_offset + at - extent.image_offset] ^= 1
        store.objects[stored.key] = bytes(bad)
    with pytest.raises(SnapshotDamaged) as caught:
        restore_snapshot(store, snapshot, memoryview(bytearray(snapshot.image_len)))
    assert caught.value.tensors == ("expert.0.w", "gate.w")
    assert set(caught.value.objects) == {stored.key for stored in snapshot.objects}
    assert "iteration 20 is damaged: 'expert.0.w', 'gate.w' in 'moe/run-1/" in str(caught.value)


def test_an_object_that_is_too_short_or_missing_is_the_stores_to_tell(
    run: tuple[MemoryStore, Writer],
) -> None:
    store, _ = run
    snapshot = manifest_of_newest(store).snapshots[0]
    key = snapshot.objects[0].key
    into = memoryview(bytearray(snapshot.image_len))
    store.objects[key] = store.objects[key][:-1]
    with pytest.raises(Damaged):
        restore_snapshot(store, snapshot, into)
    store.delete([key])
    with pytest.raises(ObjectMissing):
        restore_snapshot(store, snapshot, into)


@pytest.mark.parametrize(
    "change",
    [
        {"iteration": 1999},
        {"layout_id": 5},
        {"anchors": 0b11},
        {"num_operators": 3},
        {"header_digest": bytes(16)},
    ],
)
def test_an_image_that_is_not_what_its_manifest_says_is_refused(
    run: tuple[MemoryStore, Writer], change: dict[str, int]
) -> None:
    store, _ = run
    snapshot = replace(manifest_of_newest(store).snapshots[0], **change)  # type: ignore[arg-type]
    with pytest.raises(SnapshotDamaged) as caught:
        restore_snapshot(store, snapshot, memoryview(bytearray(snapshot.image_len)))
    assert caught.value.tensors == ("header",)


def test_bytes_behind_the_image_are_no_part_of_it(run: tuple[MemoryStore, Writer]) -> None:
    store, _ = run
    snapshot = manifest_of_newest(store).snapshots[0]
    key, size, etag = snapshot.objects[0]
    store.objects[key] += b"more"
    last = Extent(snapshot.image_len, 4, 0, size)
    longer = replace(
        snapshot,
        image_len=snapshot.image_len + 4,
        objects=(StoredObject(key, size + 4, etag), *snapshot.objects[1:]),
        extents=(*snapshot.extents, last),
    )
    with pytest.raises(SnapshotDamaged, match="header"):
        restore_snapshot(store, longer, memoryview(bytearray(longer.image_len)))


@pytest.mark.parametrize("junk", [b"\xff" * 8, b"\0" * 8, (2**20 * 64 - 8).to_bytes(8, "little")])
def test_a_header_that_cannot_be_is_damage(run: tuple[MemoryStore, Writer], junk: bytes) -> None:
    store, _ = run
    snapshot = manifest_of_newest(store).snapshots[0]
    extent = snapshot.extents[0]
    key = snapshot.objects[extent.object].key
    data = bytearray(store.objects[key])
    data[extent.object_offset : extent.object_offset + 8] = junk
    store.objects[key] = bytes(data)
    with pytest.raises(SnapshotDamaged, match="'header'"):
        read_image_header(store, snapshot)
    with pytest.raises(SnapshotDamaged, match="'header'"):
        restore_snapshot(store, snapshot, memoryview(bytearray(snapshot.image_len)))


def test_a_long_header_takes_a_second_request() -> None:
    entries = [TensorEntry(f"layers.{n}.experts.weight", "F32", (1,)) for n in range(3000)]
    store = MemoryStore()
    writer = Writer(store)
    sample = make_sample(5, entries=entries)
    stored = writer.upload(sample)
    assert len(sample.header) > 256 << 10
    assert read_image_header(store, stored) == sample.header
    assert [offset for _, offset, _ in store.reads] == [0, 256 << 10]


def test_dedup_survives_a_restart(run: tuple[MemoryStore, Writer]) -> None:
    """The index that is read from the store plans as the one that was kept in memory."""
    store, writer = run
    catalog = read_catalog(store, JOB, RUN)
    last = catalog.last_of(0)
    assert last is not None
    manifest = read_manifest(store, last.manifests[0].key)
    restarted = Writer(store, index=index_of(store, manifest.snapshots))
    sample = make_sample(31, seeds=FROZEN)
    stored = restarted.upload(sample)
    assert len(stored.objects) == 2
    assert stored == writer.upload(sample)
    into = memoryview(bytearray(stored.image_len))
    restore_snapshot(store, stored, into)
    assert into == sample.image


def test_a_manifest_that_lies_where_it_does_not_belong_is_refused(
    run: tuple[MemoryStore, Writer],
) -> None:
    store, _ = run
    newest, older = read_catalog(store, JOB, RUN).committed
    store.objects[newest.manifests[0].key] = store.objects[older.manifests[0].key]
    with pytest.raises(ManifestError, match="belong to"):
        read_manifests(store, newest)
    store.objects[newest.manifests[0].key] = b"{}"
    with pytest.raises(ManifestError, match=newest.manifests[0].key):
        read_manifest(store, newest.manifests[0].key)


def test_an_identity_is_absent_or_that_of_the_run(run: tuple[MemoryStore, Writer]) -> None:
    store, _ = run
    assert read_identity(store, "other", RUN) is None
    store.objects[f"other/{RUN}/run.json"] = store.objects[f"{JOB}/{RUN}/run.json"]
    with pytest.raises(ManifestError, match="is that of moe/run-1"):
        read_identity(store, "other", RUN)


def test_bytes_beyond_the_image_cannot_be_read(run: tuple[MemoryStore, Writer]) -> None:
    store, _ = run
    snapshot = manifest_of_newest(store).snapshots[0]
    for begin, length in ((-1, 1), (snapshot.image_len, 1)):
        with pytest.raises(ValueError, match="of an image of"):
            read_image_bytes(store, snapshot, begin, memoryview(bytearray(length)))


def snapshot_of(extents: list[Extent], sizes: list[int]) -> StoredSnapshot:
    """A snapshot of which only the extents matter."""
    objects = tuple(
        StoredObject(ObjectName(JOB, RUN, 1, 0, 7, n, f"{n:016x}").key, size, "")
        for n, size in enumerate(sizes)
    )
    length = sum(extent.length for extent in extents)
    return StoredSnapshot(1, -1, 0, 0, 7, -1, 0, bytes(16), length, 0, 0, 0, objects, tuple(extents))


def test_large_extents_are_split_and_read_in_place() -> None:
    length = 2 * SPLIT_BYTES + 5
    snapshot = snapshot_of([Extent(0, length, 0, 64)], [length + 64])
    (reads,) = plan_reads(snapshot, 0, length)
    assert [(read.offset, read.length) for read in reads.reads] == [
        (64, SPLIT_BYTES),
        (64 + SPLIT_BYTES, SPLIT_BYTES),
        (64 + 2 * SPLIT_BYTES, 5),
    ]
    assert not any(read.staged for read in reads.reads)


def test_small_neighbours_are_read_at_once() -> None:
    """1,000 small tensors of a part, apart from one another in the image: a request, not 1,000."""
    extents = []
    for n in range(1000):
        extents += [Extent(n * 200, 100, 0, n * 100), Extent(n * 200 + 100, 100, 1, n * 300)]
    snapshot = snapshot_of(extents, [100_000, 300_000])
    reads = plan_reads(snapshot, 0, 200_000)
    assert [len(of.reads) for of in reads] == [1, 1]
    assert [of.reads[0].staged for of in reads] == [True, True]


def test_what_lies_far_apart_or_is_large_is_read_by_itself() -> None:
    large = 2 << 20
    snapshot = snapshot_of(
        [Extent(0, 10, 0, 0), Extent(10, 10, 0, 200_000), Extent(20, large, 0, 200_010 + 64)],
        [8 << 20],
    )
    (reads,) = plan_reads(snapshot, 0, 20 + large)
    assert [(r.offset, r.length, r.staged) for r in reads.reads] == [
        (0, 10, False),
        (200_000, 10, False),
        (200_074, large, False),
    ]


def test_what_is_held_beside_the_image_is_bounded() -> None:
    """600,000 bytes here and 600,000 there, 400 times: joined, but not all in memory at once."""
    size = 600_000
    extents = [Extent(n * size, size, 0, (n * 7 % 400) * size) for n in range(400)]
    snapshot = snapshot_of(extents, [400 * size])
    batches = plan_reads(snapshot, 0, 400 * size)
    staged = [sum(read.length for read in of.reads if read.staged) for of in batches]
    assert len(batches) > 1
    assert max(staged) <= 64 << 20
    assert sum(len(of.reads) for of in batches) <= 400 // 13 + 1


@settings(deadline=None)
@given(st.data())
def test_any_range_of_any_extents_is_read(data: st.DataObject) -> None:
    objects = [random.Random(n).randbytes(data.draw(st.integers(1, 3000))) for n in range(3)]
    extents: list[Extent] = []
    at = 0
    for number in (0, 1, 2, *data.draw(st.lists(st.integers(0, 2), max_size=12))):
        length = data.draw(st.integers(1, len(objects[number])))
        offset = data.draw(st.integers(0, len(objects[number]) - length))
        extents.append(Extent(at, length, number, offset))
        at += length
    snapshot = snapshot_of(extents, [len(content) for content in objects])
    store = MemoryStore()
    for stored, content in zip(snapshot.objects, objects, strict=True):
        store.put(stored.key, [memoryview(content)])
    image = b"".join(objects[e.object][e.object_offset :][: e.length] for e in extents)
    begin = data.draw(st.integers(0, at))
    end = data.draw(st.integers(begin, at))
    into = memoryview(bytearray(end - begin))
    read_image_bytes(store, snapshot, begin, into)
    assert into == image[begin:end]
