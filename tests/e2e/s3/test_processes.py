"""Training jobs whose daemon or store keeper dies, or stops, while it persists to a real S3 server."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ckptd.storage.checkpoints.reader import read_manifest
from tests.ckptd.running import eventually
from tests.e2e.bucket import Bucket, keeper_pid, puts_object
from tests.e2e.harness import Jobs, own_daemon
from tests.e2e.s3.training import SOON_S, TOTAL, Training, needs_server, resume, wait_committed
from tests.e2e.test_durable import lose_memory
from tests.storage.fault_proxy import FaultProxy, Request, Stall

pytestmark = [pytest.mark.slow, needs_server]


def test_a_daemon_killed_in_mid_upload_goes_on_where_it_was(
    bucket: Bucket, proxy: FaultProxy, jobs: Jobs, run: str, reference: Path
) -> None:
    """What was in the store when it died is not sent again."""
    stalled = True

    def late(request: Request) -> bool:
        return stalled and request.method == "PUT" and "/000000000005/" not in request.path

    proxy.inject(Stall(), lambda request: late(request) and puts_object()(request), times=100_000)
    flags = bucket.flags(endpoint=proxy.endpoint, persist_every="8")
    with own_daemon(*flags) as daemon:
        # So slow that these iterations are still in memory when the daemon is back and the trainer
        # has found it.
        training = Training(jobs, daemon, run, "--step-ms", "1500")
        eventually(lambda: len(bucket.objects(run)) == 1, "one of four snapshots", SOON_S)
        stored = bucket.objects(run)
        stalled = False
        daemon.kill()
        daemon.start()
        eventually(lambda: 8 in bucket.committed(run), "checkpoint 8 is durable", SOON_S)
        training.process.kill()
        training.process.join()
        sent = [request.path for request in proxy.requests if request.method == "PUT"]
        for key in stored:
            assert sum(path.endswith(key) for path in sent) == 1, key
        assert stored <= references(bucket, run, 8)
        lose_memory(daemon)
        resume(jobs, daemon, run, reference, expect=bucket.committed(run)[0])


def references(bucket: Bucket, run: str, end: int) -> set[str]:
    """The objects that a checkpoint of one rank is made of."""
    found = next(c for c in bucket.catalog(run).committed if c.id.end == end)
    store = bucket.open()
    try:
        return set(read_manifest(store, found.manifests[0].key).object_keys)
    finally:
        store.close()


def test_a_keeper_that_is_killed_is_replaced_and_training_does_not_notice(
    bucket: Bucket, jobs: Jobs, run: str, reference: Path
) -> None:
    with own_daemon(*bucket.flags()) as daemon:
        assert daemon.process is not None
        training = Training(jobs, daemon, run, "--step-ms", "50")
        eventually(lambda: bool(bucket.objects(run)), "an upload", timeout_s=SOON_S)
        os.kill(keeper_pid(daemon.process.pid), signal.SIGKILL)
        eventually(lambda: bool(daemon.events("store_keeper_died")), "its death is told", SOON_S)
        assert "SIGKILL" in daemon.events("store_keeper_died")[0]
        report = training.end(reference)
        assert report["no_slot"] == report["failed"] == 0
        wait_committed(bucket, run, TOTAL)


def test_a_keeper_that_hangs_holds_up_no_snapshot(
    bucket: Bucket, jobs: Jobs, run: str, reference: Path
) -> None:
    """It is stopped with SIGSTOP in the middle of its work, for longer than the ring has slots."""
    with own_daemon(*bucket.flags()) as daemon:
        assert daemon.process is not None
        training = Training(jobs, daemon, run, "--step-ms", "30")
        eventually(lambda: bool(bucket.objects(run)), "an upload", timeout_s=SOON_S)
        keeper = keeper_pid(daemon.process.pid)
        os.kill(keeper, signal.SIGSTOP)
        try:
            report = training.end(reference)
        finally:
            os.kill(keeper, signal.SIGCONT)
        assert report["no_slot"] == report["failed"] == 0
        wait_committed(bucket, run, TOTAL)
        lose_memory(daemon)
        resume(jobs, daemon, run, reference, expect=TOTAL)
