"""Training jobs whose daemon persists to a real S3 server, which is slow, rude, away, full, or
loses what it was given.

Whatever happens to storage, training goes on and ends at the bits that it would have had; and what
is restored is a checkpoint that was committed and is whole.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ckptd.running import eventually, small_tmpfs
from tests.e2e.bucket import Bucket, puts_manifest, puts_object
from tests.e2e.cases import EXPERTS, LAYERS
from tests.e2e.harness import Jobs, own_daemon
from tests.e2e.s3.training import (
    SOON_S,
    TOTAL,
    Training,
    long,
    needs_server,
    resume,
    wait_committed,
)
from tests.e2e.test_durable import lose_memory, storing
from tests.e2e.test_partial import check_stored_once, partial_options, state_bytes
from tests.storage.fault_proxy import Answer, Fault, FaultProxy, LoseAnswer, Reset, Stall
from tests.storage.s3_server import S3Server

pytestmark = [pytest.mark.slow, needs_server]


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        pytest.param(Answer(503, "SlowDown"), 3, id="throttled"),
        pytest.param(Reset(after=1000), 3, id="reset", marks=long),
        pytest.param(Stall(), 2, id="stalled", marks=long),
        pytest.param(LoseAnswer(), 3, id="answer lost", marks=long),
    ],
)
def test_trouble_in_mid_upload_delays_a_checkpoint_and_nothing_else(
    bucket: Bucket,
    proxy: FaultProxy,
    jobs: Jobs,
    run: str,
    reference: Path,
    fault: Fault,
    times: int,
) -> None:
    proxy.inject(fault, puts_object(after=1), times=times)
    proxy.inject(fault, puts_manifest)
    flags = bucket.flags(endpoint=proxy.endpoint, timeout_s=2.0)
    with own_daemon(*flags) as daemon:
        training = Training(jobs, daemon, run, "--step-ms", "20")
        training.end(reference)
        wait_committed(bucket, run, TOTAL)
        eventually(lambda: bool(daemon.events("persisted", run)), "the daemon knows", SOON_S)
        assert proxy.count(puts_manifest) > 1, "the fault was met"
        lose_memory(daemon)
        resume(jobs, daemon, run, reference, expect=TOTAL)


@long
def test_an_outage_is_told_once_and_training_does_not_notice(
    bucket: Bucket, proxy: FaultProxy, jobs: Jobs, run: str, reference: Path
) -> None:
    """The store answers nothing but 503 for a while; after it, what is newest is stored, and what
    was given up never.
    """
    away = True
    with own_daemon(*bucket.flags(endpoint=proxy.endpoint)) as daemon:
        training = Training(jobs, daemon, run, "--step-ms", "20")
        eventually(lambda: bool(bucket.committed(run)), "a durable checkpoint", timeout_s=SOON_S)
        proxy.inject(Answer(503, "SlowDown"), lambda request: away, times=100_000)
        training.end(reference)
        eventually(lambda: bool(daemon.events("store_paused")), "the outage is told", SOON_S)
        given_up = daemon.events("persist_abandoned", run)
        assert given_up
        assert all("Throttled" in text or "CircuitOpen" in text for text in given_up), given_up
        assert len(daemon.events("store_paused")) == 1
        assert TOTAL not in bucket.committed(run)
        away = False
        eventually(lambda: bool(daemon.events("store_resumed")), "its end is told, too", SOON_S)
        wait_committed(bucket, run, TOTAL)


@long
def test_credentials_that_are_refused_stop_no_training_and_restore_nothing(
    bucket: Bucket, jobs: Jobs, run: str, reference: Path
) -> None:
    """The server itself refuses. A start that would have to begin anew does not: what is durable is
    not known.
    """
    good = bucket.flags()
    bad = tuple(flag.replace(str(bucket.server.options["secret"]), "another") for flag in good)
    assert bad != good
    with own_daemon(*good) as daemon:
        training = Training(jobs, daemon, run, "--step-ms", "100")
        eventually(lambda: bool(bucket.committed(run)), "a durable checkpoint", timeout_s=SOON_S)
        daemon.kill()
        daemon.flags = bad
        daemon.start()
        eventually(lambda: bool(daemon.events("persist.store")), "why nothing is stored", SOON_S)
        why = daemon.events("persist.store")[0]
        assert "Refused" in why
        assert "another" not in why, "no secret is told"
        training.end(reference)
        lose_memory(daemon)
        newest = bucket.committed(run)[0]
        process, out = jobs.start("plain", "--total", str(TOTAL), "--run", run, daemon=daemon.endpoint)
        process.join(SOON_S)
        assert process.exitcode not in (None, 0)
        assert "the store did not answer" in jobs.log(out)
        daemon.flags = good
        lose_memory(daemon)
        resume(jobs, daemon, run, reference, expect=newest)


@long
def test_a_bucket_that_vanishes_and_comes_back_empty_is_filled_anew(
    server: S3Server, jobs: Jobs, run: str, reference: Path
) -> None:
    """What was stored before is gone. Nothing that is committed afterwards may rely on it."""
    bucket = Bucket(server, bucket=f"gone-{uuid.uuid4().hex[:8]}")
    call = raw_s3(server)
    call("create_bucket", Bucket=bucket.bucket)
    with own_daemon(*bucket.flags()) as daemon:
        training = Training(jobs, daemon, run, "--step-ms", "300")
        eventually(lambda: bool(bucket.committed(run)), "a durable checkpoint", timeout_s=SOON_S)
        remove_bucket(call, bucket.bucket)
        eventually(
            lambda: any("ContainerMissing" in e for e in daemon.events("persist_abandoned", run)),
            "why nothing is stored",
            timeout_s=SOON_S,
        )
        call("create_bucket", Bucket=bucket.bucket)
        training.end(reference)
        wait_committed(bucket, run, TOTAL)
        lose_memory(daemon)
        resume(jobs, daemon, run, reference, expect=TOTAL)


def raw_s3(server: S3Server) -> Callable[..., Any]:
    """The server, asked without our code."""
    import s3fs

    own = {name: value for name, value in server.options.items() if name != "region"}
    region = {"region_name": server.options["region"]}
    call: Callable[..., Any] = s3fs.S3FileSystem(**own, client_kwargs=region).call_s3
    return call


def remove_bucket(call: Callable[..., Any], name: str) -> None:
    page = call("list_objects_v2", Bucket=name)
    for each in page.get("Contents", ()):
        call("delete_object", Bucket=name, Key=each["Key"])
    call("delete_bucket", Bucket=name)


def test_a_full_disk_delays_a_checkpoint_and_nothing_else(jobs: Jobs, run: str, reference: Path) -> None:
    """The store is a folder on a file system that fills up; then somebody makes room."""
    with ExitStack() as stack:
        folder = stack.enter_context(small_tmpfs("16M"))
        ballast = folder / "ballast"
        daemon = stack.enter_context(own_daemon(*storing(folder / "store")))
        training = Training(jobs, daemon, run, "--step-ms", "50")
        eventually(lambda: bool(daemon.events("persisted", run)), "a checkpoint", SOON_S)
        fill_up(ballast)
        eventually(
            lambda: any("NoSpace" in text for text in daemon.events("persist_abandoned", run)),
            "why nothing is stored",
            timeout_s=SOON_S,
        )
        training.end(reference)
        ballast.unlink()
        done = f"checkpoint {TOTAL} is durable on all 1 ranks"
        eventually(lambda: done in daemon.events("persisted", run), done, SOON_S)
        lose_memory(daemon)
        resume(jobs, daemon, run, reference, expect=TOTAL)


def fill_up(path: Path) -> None:
    """Take all the room that there is."""
    with path.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            pass


def test_of_partial_snapshots_everything_is_stored_once(bucket: Bucket, jobs: Jobs, run: str) -> None:
    with own_daemon(*bucket.flags()) as daemon:

        def train(total: int) -> Path:
            options = ("--total", str(total), "--run", run, "--seed", str(total))
            return jobs.run("plain", *options, *partial_options(), daemon=daemon.endpoint)

        ended = torch.load(train(TOTAL), weights_only=False)
        wait_committed(bucket, run, TOTAL)
        store = bucket.open()
        check_stored_once(store, run, TOTAL, state_bytes(ended))
        store.close()
        lose_memory(daemon)
        report = jobs.report(train(TOTAL + 4))
    assert report["resumed_from"] == TOTAL
    assert len(report["lost"]["iterations"]) == (EXPERTS - 1) * LAYERS
