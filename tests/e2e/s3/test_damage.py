"""What is stored in a real S3 server is damaged or lost: a restore passes it over for what is
older, and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckptd.storage.checkpoints.reader import read_manifest
from ckptd.storage.stores.objects import ObjectStore
from tests.ckptd.running import eventually
from tests.e2e.bucket import Bucket
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.e2e.s3.training import SOON_S, TOTAL, long, needs_server, resume
from tests.storage.s3_server import S3Server

pytestmark = [pytest.mark.slow, needs_server]


@pytest.fixture(scope="module")
def killed(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bucket, str]:
    """A run with two durable checkpoints, whose trainer and daemon are gone."""
    bucket, run = Bucket(server), "killed"
    with own_daemon(*bucket.flags()) as daemon:
        jobs = Jobs(tmp_path_factory.mktemp("killed"), daemon.endpoint)
        options = ("--total", str(TOTAL), "--run", run, "--kill-at", "30", "--step-ms", "200")
        jobs.run("plain", *options, expect_killed=True)
        eventually(lambda: len(bucket.committed(run)) > 1, "two durable checkpoints", SOON_S)
        eventually(lambda: daemon_idle(daemon, bucket, run), "nothing is under way", SOON_S)
    return bucket, run


def daemon_idle(daemon: DaemonProcess, bucket: Bucket, run: str) -> bool:
    """Every checkpoint that was begun has been told of."""
    told = daemon.events("persisted", run)
    return len(told) == len(bucket.committed(run))


def copied(origin: Bucket, run: str) -> Bucket:
    """Another prefix with the same content."""
    target = Bucket(origin.server, origin.bucket)
    source, store = origin.open(), target.open()
    try:
        for info in source.list(""):
            store.put(info.key, [memoryview(source.read(info.key, limit=1 << 30))])
    finally:
        source.close()
        store.close()
    return target


class Newest:
    """The newest checkpoint of a run, to be damaged; ``own`` is an object to which no older one refers."""

    def __init__(self, store: ObjectStore, bucket: Bucket, run: str) -> None:
        self.store = store
        newest, older = bucket.catalog(run).committed[:2]
        self.key, self.older_key = newest.manifests[0].key, older.manifests[0].key
        self.manifest = read_manifest(store, self.key)
        older_keys = read_manifest(store, self.older_key).object_keys
        self.own = max(self.manifest.object_keys - older_keys)
        self.other = max(older_keys)

    def read(self, key: str) -> bytearray:
        return bytearray(self.store.read(key, limit=1 << 30))

    def put(self, key: str, data: bytes | bytearray) -> None:
        self.store.put(key, [memoryview(data)])


def flip_in_data(newest: Newest) -> None:
    data = newest.read(newest.own)
    data[-50] ^= 1
    newest.put(newest.own, data)


def flip_in_header(newest: Newest) -> None:
    data = newest.read(newest.own)
    data[200] ^= 1
    newest.put(newest.own, data)


def truncate(newest: Newest) -> None:
    newest.put(newest.own, newest.read(newest.own)[:-1])


def swap(newest: Newest) -> None:
    newest.put(newest.own, newest.read(newest.other))


def lose_object(newest: Newest) -> None:
    newest.store.delete([newest.own])


def lose_manifest(newest: Newest) -> None:
    newest.store.delete([newest.key])


def flip_in_manifest(newest: Newest) -> None:
    data = newest.read(newest.key)
    data[len(data) // 2] ^= 1
    newest.put(newest.key, data)


def older_manifest_in_its_place(newest: Newest) -> None:
    newest.put(newest.key, newest.read(newest.older_key))


def manifest_of_another_run(newest: Newest) -> None:
    """Complete in itself: as if two runs of one name had been copied into one folder."""
    lose_manifest(newest)
    stray = replace(newest.manifest, run_id="0123456789abcdef")
    newest.put(stray.key, stray.to_bytes())


@pytest.mark.parametrize(
    "damage",
    [
        flip_in_data,
        pytest.param(flip_in_header, marks=long),
        pytest.param(truncate, marks=long),
        swap,
        lose_object,
        lose_manifest,
        flip_in_manifest,
        older_manifest_in_its_place,
        manifest_of_another_run,
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_an_older_one(
    killed: tuple[Bucket, str],
    jobs: Jobs,
    reference: Path,
    damage: Callable[[Newest], None],
) -> None:
    origin, run = killed
    bucket = copied(origin, run)
    older = bucket.committed(run)[1]
    store = bucket.open()
    try:
        newest = Newest(store, bucket, run)
        damage(newest)
    finally:
        store.close()
    with own_daemon(*bucket.flags()) as daemon:
        resume(jobs, daemon, run, reference, expect=older)
        told = [text for kind in ("checkpoint_damaged",) for text in daemon.events(kind)]
    if damage is not lose_manifest:  # then nobody can know that there was one
        assert any(f"iteration {newest.manifest.end} " in text for text in told), told
