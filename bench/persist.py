"""What it takes to make a checkpoint durable, against a plain fsspec upload of the same bytes in
the same run.

* `persist_vs_plain_upload`: the rate of a store keeper that verifies, stores and commits a
  checkpoint on an S3 server (SeaweedFS on this machine, so its own work is in the rate of both
  sides), over that of s3fs' `pipe_file`. `_local`: the same for a folder, against a plain write
  that is followed by an fsync, without which nothing is durable.
* `persist_cpu_s_per_gib`: CPU seconds of the keeper per GiB, which are taken from training.
* `stall_ms_*`: what the training thread waits per step, with storing as often as the store can take
  it, and without.
* `uploaded_vs_images`: bytes that were sent over bytes of all snapshots in all checkpoints of that training.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.common import (
    GB,
    build_stack,
    clock_ms,
    emit,
    in_shared_environment,
    interleave,
    median,
    own_daemon,
    parser,
    scratch_folder,
)
from bench.stall import OuterClock
from bench.stored import Keeper, Snapshots, images, local_files, s3_files
from ckptd.client import Checkpointer, RunOptions, SnapshotOptions
from ckptd.storage.checkpoints.reader import read_catalog, read_manifest
from ckptd.storage.stores.open_store import open_store
from tests.storage.s3_server import BUCKET, S3Server

__all__ = ["main"]

GIB = 1 << 30
JOB, RUN = "bench-persist", "r1"


def main() -> None:
    in_shared_environment()
    options = parser(__doc__)
    options.add_argument("--size-mib", type=int, default=256, help="of a checkpoint")
    options.add_argument("--state-mib", type=int, default=64, help="of the model that is trained")
    options.add_argument("--steps", type=int, default=60, help="of training, each of both ways")
    args = options.parse_args()
    server = S3Server.start()
    try:
        with scratch_folder() as scratch:
            metrics = uploads(args, server, Path(scratch)) | training(args, server)
    finally:
        server.stop()
    emit("persist", metrics | {"rounds": args.rounds}, as_json=args.json)


# -- uploads ---------------------------------------------------------------------------------------


def uploads(args: Any, server: S3Server, scratch: Path) -> dict[str, float | int | str]:
    """The keeper against plain fsspec, to S3 and to a folder."""
    cpu: dict[str, list[float]] = {}  # the first one is the warm-up
    with ExitStack() as stack:
        memory = stack.enter_context(memory_folder())
        snapshots = stack.enter_context(images(memory, args.size_mib))
        s3 = Keeper(f"s3://{BUCKET}/bench", dict(server.options))
        stack.callback(s3.close)
        local = Keeper(f"file://{scratch}/store", {})
        stack.callback(local.close)
        plain_s3 = f"{BUCKET}/plain"
        variants: dict[str, Callable[[], tuple[float, float]]] = {
            "s3": lambda: s3.store(fresh(), snapshots),
            "s3_plain": lambda: plain(s3_files(server), plain_s3, snapshots),
            "local": lambda: local.store(fresh(), snapshots),
            "local_plain": lambda: plain(local_files(), f"{scratch}/plain", snapshots, sync=True),
        }

        def timed(name: str) -> Callable[[], float]:
            def once() -> float:
                seconds, used_s = variants[name]()
                cpu.setdefault(name, []).append(used_s)
                return seconds

            return once

        samples = interleave({name: timed(name) for name in variants}, rounds=args.rounds)
        size = snapshots.size_bytes
    rates = {name: [size / GB / s for s in values] for name, values in samples.items()}
    out: dict[str, float | int | str] = {
        "persist_vs_plain_upload": _ratio(rates, "s3", "s3_plain"),
        "persist_local_vs_plain_upload": _ratio(rates, "local", "local_plain"),
        "persist_cpu_s_per_gib": median(cpu["s3"][1:]) * GIB / size,
        "plain_upload_cpu_s_per_gib": median(cpu["s3_plain"][1:]) * GIB / size,
        "persist_local_cpu_s_per_gib": median(cpu["local"][1:]) * GIB / size,
        "bytes": size,
    }
    return out | {f"{name}_gb_per_s": median(values) for name, values in rates.items()}


def _ratio(rates: Mapping[str, list[float]], ours: str, theirs: str) -> float:
    return median([a / b for a, b in zip(rates[ours], rates[theirs], strict=True)])


_count = iter(range(1_000_000))


def fresh() -> str:
    """A run of which nothing is stored, so that nothing is spared."""
    return f"run-{next(_count)}"


def plain(files: Any, folder: str, snapshots: Snapshots, *, sync: bool = False) -> tuple[float, float]:
    """The same bytes, one object per snapshot; seconds of wall time, and of this process' CPU time."""
    files.makedirs(folder, exist_ok=True)
    contents = [bytes(view) for view in snapshots.views]
    run = fresh()
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    for index, content in enumerate(contents):
        path = f"{folder}/{run}-{index}"
        files.pipe_file(path, content)
        if sync:
            _sync(path)
    return time.perf_counter() - begun_s, time.process_time() - cpu_s


def _sync(path: str) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def memory_folder() -> Iterator[Path]:
    """Where a daemon would have its segments."""
    import tempfile

    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="ckptd-bench-", dir=shm if shm.is_dir() else None) as d:
        yield Path(d)


# -- training --------------------------------------------------------------------------------------


class Job:
    """A model that is trained under a daemon; each step tells what the training thread waited for."""

    def __init__(self, args: Any, endpoint: str) -> None:
        torch.manual_seed(0)
        self.model = build_stack(args.state_mib)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._clock = OuterClock(self.optimizer)
        self._clock.before()
        self.ckpt = Checkpointer(
            self.model,
            self.optimizer,
            run=RunOptions(job=JOB, name=RUN),
            daemon=endpoint,
            snapshots=SnapshotOptions(window=4),
        )
        self._clock.after()
        self._steps = iter(self.ckpt.steps(10**9))
        self._inputs = torch.randn(256, self.model.width)

    def step(self) -> float:
        top_ms = clock_ms(lambda: next(self._steps))
        self.model(self._inputs).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return top_ms + self._clock.waited_ms


def training(args: Any, server: S3Server) -> dict[str, float | int | str]:
    """Two jobs step by step in turns, one of which is stored as often as the store can take it."""
    url, options = f"s3://{BUCKET}/training", dict(server.options)
    memory = args.state_mib * 14 + 64
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    with ExitStack() as stack:
        without = Job(args, stack.enter_context(own_daemon(memory)))
        with settings(store=url, store_options=json.dumps(options), persist_every_s="0"):
            stored = Job(args, stack.enter_context(own_daemon(memory)))
        for job in (without, stored):
            stack.callback(job.ckpt.close)
        samples = interleave({"without": without.step, "stored": stored.step}, rounds=args.steps, warmup=16)
        store = open_store(url, options)
        stack.callback(store.close)
        deadline_s = time.monotonic() + 120
        while not read_catalog(store, JOB, RUN).committed and time.monotonic() < deadline_s:
            time.sleep(0.2)
        sent, images_bytes, num = stored_bytes(store)
    return {
        "stall_ms_stored": median(samples["stored"]),
        "stall_ms_without": median(samples["without"]),
        "stall_ms_added": median(samples["stored"]) - median(samples["without"]),
        "stall_ms_max_stored": max(samples["stored"]),
        "stall_ms_max_without": max(samples["without"]),
        "checkpoints": num,
        "uploaded_bytes_per_checkpoint": sent / max(1, num),
        "image_bytes_per_checkpoint": images_bytes / max(1, num),
        "uploaded_vs_images": sent / max(1, images_bytes),
        "state_mib": args.state_mib,
    }


@contextmanager
def settings(**values: str) -> Iterator[None]:
    """Of the daemons that are started meanwhile."""
    names = {f"CKPTD_{key.upper()}": value for key, value in values.items()}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]


def stored_bytes(store: Any) -> tuple[int, int, int]:
    """Bytes of all objects that the committed checkpoints consist of, and of their images; how many
    checkpoints.
    """
    objects: dict[str, int] = {}
    images_bytes, committed = 0, read_catalog(store, JOB, RUN).committed
    for checkpoint in committed:
        for info in checkpoint.manifests.values():
            for snapshot in read_manifest(store, info.key).snapshots:
                images_bytes += snapshot.image_len
                objects |= {stored.key: stored.size for stored in snapshot.objects}
    return sum(objects.values()), images_bytes, len(committed)


if __name__ == "__main__":
    main()
