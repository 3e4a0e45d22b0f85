"""The verifier: whatever is wrong with what is stored is found, and named."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from ckptd.storage.checkpoints.manifest import Extent, RankManifest
from ckptd.storage.checkpoints.names import ManifestName, ObjectName, parse
from ckptd.storage.checkpoints.reader import read_catalog
from ckptd.storage.checkpoints.verifier import (
    Finding,
    Progress,
    Severity,
    VerifyReport,
    check_tensors,
    stream_buffers,
    verify_checkpoint,
    verify_run,
    verify_store,
)
from ckptd.storage.image_format import TensorEntry, parse_header, render_header, tag_of
from ckptd.storage.stores.objects import Range, Unavailable
from ckptd.storage.stores.open_store import open_store
from tests.storage.memory_store import MemoryStore
from tests.storage.samples import (
    JOB,
    RUN,
    Writer,
    make_sample,
    manifest_of,
    window,
    write_identity,
)

FROZEN = {"expert.0.w": 1}


@pytest.fixture
def store() -> MemoryStore:
    """Two checkpoints of two ranks. The second consists of parts, of which one refers to another rank."""
    return make_store()


def make_store(job: str = JOB, store: MemoryStore | None = None) -> MemoryStore:
    store = store or MemoryStore()
    write_identity(store, job)
    writers = [Writer(store, rank=r, world_size=2, job=job) for r in (0, 1)]
    writers[1].index = writers[0].index
    for end in (11, 21):
        for writer in writers:
            samples = window(end, seeds=FROZEN, rank=writer.rank, job=job)
            writer.commit(samples)
    return store


def objects_of(store: MemoryStore) -> list[str]:
    return [key for key in store.objects if isinstance(parse(key), ObjectName)]


def manifests_of(store: MemoryStore) -> list[str]:
    return [key for key in store.objects if isinstance(parse(key), ManifestName)]


def errors(report: VerifyReport) -> list[Finding]:
    return [f for f in report.findings if f.severity is Severity.ERROR]


def test_what_is_whole_is_found_whole(store: MemoryStore) -> None:
    report = verify_run(store, JOB, RUN)
    assert report.findings == ()
    assert report.ok
    assert [(job, run, c.end) for job, run, c in report.whole] == [(JOB, RUN, 21), (JOB, RUN, 11)]
    assert report.num_objects == len(objects_of(store)) == 8
    assert report.read_bytes == sum(len(store.objects[key]) for key in objects_of(store))
    sizes = {key: len(store.objects[key]) for key in objects_of(store)}
    assert min(sizes.values()) < max(sizes.values()) - 1000  # some of them are parts


def test_a_quick_look_reads_no_object(store: MemoryStore) -> None:
    report = verify_run(store, JOB, RUN, full=False)
    assert (report.ok, report.read_bytes, len(report.whole)) == (True, 0, 2)
    assert store.reads == []


def test_threads_find_the_same(store: MemoryStore) -> None:
    bad = bytearray(store.objects[objects_of(store)[0]])
    bad[-1] ^= 1
    store.objects[objects_of(store)[0]] = bytes(bad)
    with ThreadPoolExecutor(4) as pool:
        threaded = verify_run(store, JOB, RUN, map_fn=pool.map)
    alone = verify_run(store, JOB, RUN)
    assert threaded.findings == alone.findings
    assert threaded.whole == alone.whole


def test_any_flipped_bit_of_any_object_is_found(store: MemoryStore) -> None:
    """Header, padding, data; of images and of parts. Sampled; the ends and the header densely."""
    rng = random.Random(7)
    for key in objects_of(store):
        good = store.objects[key]
        header = 8 + int.from_bytes(good[:8], "little")
        places = {*range(10), header - 1, header, len(good) - 1}
        places |= {rng.randrange(header) for _ in range(40)}
        places |= {rng.randrange(header, len(good)) for _ in range(40)}
        for at in sorted(places):
            bad = bytearray(good)
            bad[at] ^= 1 << rng.randrange(8)
            store.objects[key] = bytes(bad)
            report = verify_run(store, JOB, RUN)
            assert key in {finding.key for finding in errors(report)}, (key, at)
            assert len(report.whole) < 2
        store.objects[key] = good
    assert verify_run(store, JOB, RUN).ok


def test_the_damaged_tensor_is_named(store: MemoryStore) -> None:
    key = objects_of(store)[0]
    header = parse_header(store.objects[key][: 8 + int.from_bytes(store.objects[key][:8], "little")])
    for tensor in header.tensors:
        if tensor.nbytes:
            good = store.objects[key]
            bad = bytearray(good)
            bad[tensor.offset + tensor.nbytes // 2] ^= 4
            store.objects[key] = bytes(bad)
            found = errors(verify_run(store, JOB, RUN))
            assert found == [Finding(Severity.ERROR, key, "its digest does not match", tensor.name)]
            store.objects[key] = good


def test_any_flipped_bit_of_any_manifest_is_found(store: MemoryStore) -> None:
    rng = random.Random(8)
    for key in (*manifests_of(store), f"{JOB}/{RUN}/run.json"):
        good = store.objects[key]
        for at in rng.sample(range(len(good)), 60):
            bad = bytearray(good)
            bad[at] ^= 1 << rng.randrange(8)
            store.objects[key] = bytes(bad)
            found = errors(verify_run(store, JOB, RUN, full=False))
            assert [finding.key for finding in found] == [key]
        store.objects[key] = good


Damage = Callable[[MemoryStore, str], object]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "missing": (lambda store, key: store.delete([key]), "it is missing"),
    "truncated": (
        lambda store, key: store.objects.update({key: store.objects[key][:-1]}),
        "but its manifest says",
    ),
    "extended": (
        lambda store, key: store.objects.update({key: store.objects[key] + b"\0"}),
        "but its manifest says",
    ),
    "emptied": (lambda store, key: store.objects.update({key: b""}), "it has 0 bytes"),
}


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_missing_or_of_another_length_is_found(store: MemoryStore, damage: str, full: bool) -> None:
    change, what = DAMAGES[damage]
    for number in range(len(objects_of(store))):
        broken = make_store()
        key = objects_of(broken)[number]
        change(broken, key)
        found = errors(verify_run(broken, JOB, RUN, full=full))
        assert [finding.key for finding in found] == [key]
        assert what in found[0].what


def test_objects_that_are_swapped_are_found(store: MemoryStore) -> None:
    """Same length, and each a good object by itself: but not the one that its key names."""
    one, two = objects_of(store)[1:3]
    assert len(store.objects[one]) == len(store.objects[two])
    store.objects[one], store.objects[two] = store.objects[two], store.objects[one]
    found = errors(verify_run(store, JOB, RUN))
    assert {finding.key for finding in found} == {one, two}
    assert found[0].what == "the header is not the one that the key names"
    assert verify_run(store, JOB, RUN, full=False).ok  # this needs reading


def test_manifests_that_are_swapped_or_missing_are_found(store: MemoryStore) -> None:
    keys = manifests_of(store)
    good = dict(store.objects)
    store.objects[keys[0]], store.objects[keys[1]] = good[keys[1]], good[keys[0]]
    found = errors(verify_run(store, JOB, RUN))
    assert {finding.key for finding in found} == {keys[0], keys[1]}
    assert all("its contents belong to" in finding.what for finding in found)
    store.objects = dict(good)
    catalog = read_catalog(store, JOB, RUN)
    store.delete([catalog.checkpoints[0].manifests[1].key])
    found = errors(verify_checkpoint(store, catalog, catalog.checkpoints[0]))
    assert [f.key for f in found] == [catalog.checkpoints[0].manifests[1].key]


def rewrite(store: MemoryStore, key: str, change: Callable[[RankManifest], RankManifest]) -> str:
    """Put a changed manifest where it belongs, which may be elsewhere."""
    manifest = change(RankManifest.from_bytes(store.objects.pop(key)))
    store.put(manifest.key, [memoryview(manifest.to_bytes())])
    return manifest.key


def changed_snapshot(manifest: RankManifest, **changes: Any) -> RankManifest:
    first = replace(manifest.snapshots[0], **changes)
    return replace(manifest, snapshots=(first, *manifest.snapshots[1:]))


def test_a_manifest_that_lies_is_found(store: MemoryStore) -> None:
    """Good by its digest, and at the right place; but not true."""
    good = dict(store.objects)
    key = manifests_of(store)[0]
    manifest = RankManifest.from_bytes(good[key])
    first = manifest.snapshots[0]
    other = RankManifest.from_bytes(good[manifests_of(store)[1]]).snapshots[0]
    lies: dict[str, tuple[dict[str, Any], str]] = {
        "digest": ({"header_digest": bytes(16)}, "'header'"),
        "anchors": (
            {"anchors": 0b11},
            "anchors is 'AQ==' in the image",
        ),
        "another rank's image": (
            {
                "objects": other.objects,
                "extents": other.extents,
                "image_len": other.image_len,
                "header_digest": other.header_digest,
            },
            "in the image and '0' in the manifest",
        ),
        "other extents": (
            {
                "extents": (
                    first.extents[0]._replace(length=first.image_len - 40),
                    Extent(first.image_len - 40, 40, 0, first.image_len - 80),
                )
            },
            "its extent points to other bytes",
        ),
    }
    for lie, (changes, what) in lies.items():
        store.objects = dict(good)
        told = changed_snapshot(manifest, **changes)

        def lying(_: RankManifest, told: RankManifest = told) -> RankManifest:
            return told

        at = rewrite(store, key, lying)
        found = errors(verify_run(store, JOB, RUN))
        assert found, lie
        assert {finding.key for finding in found} == {at}
        assert any(what in finding.what for finding in found), (lie, found)


def test_a_manifest_of_another_run_of_the_same_name_is_found(store: MemoryStore) -> None:
    for key in manifests_of(store)[:2]:
        rewrite(store, key, lambda manifest: replace(manifest, run_id="another"))
    found = errors(verify_run(store, JOB, RUN))
    assert len(found) == 2
    assert "it is of run another, not 0123abcd" in found[0].what


def test_a_run_without_identity_is_a_warning(store: MemoryStore) -> None:
    store.delete([f"{JOB}/{RUN}/run.json"])
    (finding,) = verify_run(store, JOB, RUN).findings
    assert str(finding) == "warning: moe/run-1/run.json: it is missing"


def test_what_else_lies_there_is_told(store: MemoryStore) -> None:
    store.put(f"{JOB}/{RUN}/notes.txt", [memoryview(b"x")])
    orphan = ObjectName(JOB, RUN, 3, 0, 7, 3, "0" * 16).key
    store.put(orphan, [memoryview(b"x")])
    writer = Writer(store, rank=0, world_size=2)
    unfinished = writer.commit(window(31))
    report = verify_run(store, JOB, RUN)
    assert report.ok
    assert [(f.severity, f.key) for f in report.findings] == [
        (Severity.WARNING, unfinished.key.rpartition("/")[0]),
        (Severity.INFO, orphan),
        (Severity.INFO, f"{JOB}/{RUN}/notes.txt"),
    ]
    assert report.findings[0].what == "incomplete: 1 of 2 ranks are missing: 1"
    catalog = read_catalog(store, JOB, RUN)
    assert not verify_checkpoint(store, catalog, catalog.checkpoints[0]).ok
    assert verify_checkpoint(store, catalog, catalog.checkpoints[1]).ok


def test_a_stale_checkpoint_is_mentioned_and_not_verified(store: MemoryStore) -> None:
    for rank in (0, 1):
        samples = window(16, epoch=9, epoch_start=14, rank=rank)
        Writer(store, rank=rank, world_size=2).commit(samples)
    report = verify_run(store, JOB, RUN)
    assert report.ok
    assert [f.what for f in report.findings] == ["stale: a later history began at iteration 14, before 21"]
    assert [c.end for _, _, c in report.whole] == [16, 11]


def test_a_whole_store_is_verified(store: MemoryStore) -> None:
    make_store("other", store)
    store.put("readme.txt", [memoryview(b"x")])
    damaged = objects_of(store)[-1]
    assert damaged.startswith("other/")
    store.objects[damaged] = store.objects[damaged][:-1] + b"\xff"
    report = verify_store(store)
    assert {finding.key for finding in errors(report)} == {damaged}
    assert [f.key for f in report.findings if f.severity is Severity.INFO] == ["readme.txt"]
    assert report.num_objects == 16
    assert {job for job, _, _ in report.whole} == {JOB, "other"}
    assert sum(job == JOB for job, _, _ in report.whole) == 2


def test_progress_is_told(store: MemoryStore) -> None:
    reported: list[Progress] = []
    report = verify_run(store, JOB, RUN, progress=reported.append)
    assert reported[-1].read_bytes == report.read_bytes
    assert [p.read_bytes for p in reported] == sorted(p.read_bytes for p in reported)
    assert {p.key for p in reported} == set(objects_of(store))


def test_a_store_that_fails_is_not_damage(store: MemoryStore) -> None:
    class Failing(MemoryStore):
        def read_ranges(self, key: str, ranges: Sequence[Range]) -> None:
            raise Unavailable(key, "timeout")

    failing = Failing()
    failing.objects, failing.modified = store.objects, store.modified
    with pytest.raises(Unavailable):
        verify_run(failing, JOB, RUN)


@pytest.mark.parametrize(("size", "count"), [(1, 1), (7, 3), (64, 2), (1 << 16, 4)])
def test_tensors_are_digested_whatever_the_buffers(size: int, count: int) -> None:
    """Tensors larger than a buffer, several in one, and empty ones at every place."""
    entries = [TensorEntry(f"t{n}", "U8", (length,)) for n, length in enumerate([0, 5, 0, 0, 200, 1, 64, 0])]
    sample = make_sample(1, entries=entries)
    header = parse_header(sample.header)
    store = MemoryStore()
    store.put("a/object", [sample.image])
    memory = stream_buffers(size, count)
    told: list[int] = []
    assert check_tensors(store, "a/object", header, memory, told.append) == []
    assert sum(told) == 270
    bad = bytearray(sample.image)
    for name in ("t1", "t6"):
        bad[sample.view.tensor(name).offset] ^= 1
    store.put("a/object", [memoryview(bad)])
    assert check_tensors(store, "a/object", header, memory, told.append) == ["t1", "t6"]


def test_a_wrong_digest_of_an_empty_tensor_is_found() -> None:
    header = parse_header(make_sample(1, entries=[TensorEntry("e", "U8", (0,))]).header)
    assert header.digests == (xxhash.xxh3_128_digest(b""),)
    wrong = replace(header, digests=(bytes(16),))
    memory = stream_buffers(8, 1)
    assert check_tensors(MemoryStore(), "a/object", wrong, memory, lambda _: None) == ["e"]


def test_an_object_whose_header_lies_about_its_length_is_found() -> None:
    """An object that some other tool wrote: its key fits its header, but bytes are missing."""
    store = MemoryStore()
    sample = make_sample(5, anchors=0b11)
    parsed = parse_header(sample.header)
    header = render_header(parsed.metadata, parsed.tensors)
    key = ObjectName(JOB, RUN, 5, 0, 7, 5, tag_of(header)).key
    store.put(key, [memoryview(header), sample.image[parsed.data_offset : -1]])
    size = len(store.objects[key])
    plan_less = Writer(MemoryStore()).upload(sample)
    stored = replace(
        plan_less,
        objects=(plan_less.objects[0]._replace(key=key, size=size),),
        extents=(Extent(0, size, 0, 0),),
        image_len=size,
    )
    manifest = manifest_of([stored])
    store.put(manifest.key, [memoryview(manifest.to_bytes())])
    found = errors(verify_run(store, JOB, RUN))
    assert [f.key for f in found] == [key]
    assert found[0].what == f"the object has {size} bytes, but its header says {size + 1}"


def test_a_run_in_a_folder_is_verified(tmp_path: Path) -> None:
    """Everything above is about a store in memory; this one is about files."""
    store = open_store(tmp_path.as_uri())
    write_identity(store)
    for writer in (Writer(store, rank=rank, world_size=2) for rank in (0, 1)):
        for end in (11, 21):
            writer.commit(window(end, seeds=FROZEN, rank=writer.rank))
    report = verify_run(store, JOB, RUN)
    assert report.findings == ()
    assert (len(report.whole), report.num_objects) == (2, 8)
    key = max(info.key for info in store.list("") if info.key.endswith(".safetensors"))
    file = tmp_path / key
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    found = errors(verify_run(store, JOB, RUN))
    assert [finding.key for finding in found] == [key]
    store.delete([key])
    assert [f.what for f in errors(verify_run(store, JOB, RUN, full=False))] == ["it is missing"]
    store.close()
