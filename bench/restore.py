"""How fast a snapshot gets from its slot into the live tensors, against the memory-copy limit.

Three things are measured in alternation, on the same state and with the same number of threads:

* the limit: one contiguous copy of as many bytes, out of the very same slot into warm memory;
* restore: every tensor of the slot into its live tensor, by the copy engine that recovery uses
  (`restore_vs_memcpy`). The live tensors exist and were used, as in a trainer that takes a step back;
* `torch.load` and `load_state_dict` of the same state from a file that the page cache holds.

From storage (an S3 server on this machine): a checkpoint's images into slots, verified, against
fsspec's `cat_ranges` of the same objects, in alternation (`restore_storage_vs_plain_reads`).

`restore_first_*` is what a fresh process sees while it attaches: besides the copies, digests are verified
and the optimizer's state is created, in memory that nobody has touched before.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common import (
    GB,
    MIB,
    MoEStack,
    build_stack,
    clock_ms,
    copy_gb_per_s,
    emit,
    in_shared_environment,
    interleave,
    median,
    own_daemon,
    parser,
    scratch_folder,
    state_bytes,
)
from bench.stored import Keeper, cat_ranges, images, s3_files
from ckptd.client import Checkpointer, RunOptions, SnapshotOptions
from ckptd.client.daemon_link.mapped_segment import MappedSegment
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.core.slots.slots import SlotState
from ckptd.cuda.cuda_engine import make_engine
from ckptd.cuda.engine import CopyEngine, CopyItem
from ckptd.storage.checkpoints.reader import read_catalog, read_manifest, restore_snapshot
from ckptd.storage.image import ImageView
from ckptd.storage.stores.open_store import open_store
from ckptd.transport.messages import GetStatus, Status
from ckptd.transport.wire import ControlClient
from tests.storage.s3_server import BUCKET, S3Server, weed

__all__ = ["main"]

JOB, RUN = "bench-restore", "r1"
MAX_STEPS = 60
STORED_MIB = 256  # the server keeps it on the disk


@dataclass(slots=True)
class Job:
    """A model with its optimizer, trained for a few steps under ckptd."""

    model: MoEStack
    optimizer: torch.optim.Optimizer
    ckpt: Checkpointer | None

    @classmethod
    def attach(cls, args: Any, endpoint: str, *, seed: int) -> Job:
        torch.manual_seed(seed)
        model = build_stack(args.state_mib)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        ckpt = Checkpointer(
            model,
            optimizer,
            run=RunOptions(job=JOB, name=RUN),
            daemon=endpoint,
            snapshots=SnapshotOptions(window=1),
        )
        return cls(model, optimizer, ckpt)

    def train(self, count: int, *, snapshots: int = 0) -> None:
        """At least `count` iterations, and until this process has taken so many `snapshots`."""
        assert self.ckpt is not None, "train() after detach()"
        steps = iter(self.ckpt.steps(10**9))
        next(steps)
        for done in range(MAX_STEPS):
            if done >= count and self.ckpt.stats()["snapshots"] >= snapshots:
                return
            self.model(torch.randn(64, self.model.width)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            next(steps)
        raise RuntimeError(f"no {snapshots} snapshots in {MAX_STEPS} iterations: {self.ckpt.stats()}")

    def detach(self) -> None:
        """Leave the daemon; the model and the optimizer stay as they are."""
        if self.ckpt is not None:
            self.ckpt.close()
        self.ckpt = None
        gc.collect()  # views into the segment keep it mapped, and its owner lock held

    def live(self, kind: str, name: str, key: str) -> Tensor | None:
        """The live tensor behind an entry of an image; None for what is not a tensor of the state."""
        params = dict(self.model.named_parameters())
        if kind == "param":
            return params[name]
        if kind == "optim":
            found: Tensor = self.optimizer.state[params[name]][key]
            return found
        return None


@contextmanager
def newest_slot(endpoint: str) -> Iterator[SnapshotImage]:
    """The newest sealed snapshot of the run, mapped as a trainer maps it."""
    with ControlClient(endpoint) as client:
        status = client.ask(GetStatus(), Status)
    (info,) = [s for s in status.segments if (s.job, s.run) == (JOB, RUN)]
    segment = MappedSegment(info.path, info.generation)
    view: ImageView | None = None
    try:
        headers = [(segment.header(index), index) for index in range(info.num_slots)]
        sealed = [(h.iteration, h, i) for h, i in headers if h and h.state is SlotState.SEALED]
        iteration, header, index = max(sealed, key=lambda item: item[0])
        view = ImageView(segment.slot(index)[: header.image_len])
        yield SnapshotImage(iteration, view, segment.memory, segment.slot_base(index))
    finally:
        del view
        gc.collect()  # views into the mapping must be gone before it is closed
        segment.close()


def storage_metrics(size_mib: int, rounds: int) -> dict[str, float | int | str]:
    """Reading back what a store keeper has stored, against plain reads of the same objects."""
    server = S3Server.start()
    with ExitStack() as stack:
        stack.callback(server.stop)
        url, options = f"s3://{BUCKET}/restore", dict(server.options)
        folder = Path(stack.enter_context(scratch_folder()))
        snapshots = stack.enter_context(images(folder, size_mib))
        keeper = Keeper(url, options)
        stack.callback(keeper.close)
        keeper.store(RUN, snapshots)
        store = open_store(url, options)
        stack.callback(store.close)
        (checkpoint,) = read_catalog(store, "job", RUN).committed
        stored = read_manifest(store, checkpoint.manifests[0].key).snapshots
        slots = [memoryview(bytearray(b"\1") * s.image_len) for s in stored]  # touched, as slots are
        pool = stack.enter_context(ThreadPoolExecutor(4))
        files = s3_files(server)

        def restore() -> None:
            for snapshot, slot in zip(stored, slots, strict=True):
                restore_snapshot(store, snapshot, slot, map_fn=pool.map)

        def plain() -> None:
            for snapshot in stored:
                for each in snapshot.objects:
                    cat_ranges(files, f"{BUCKET}/restore/{each.key}", each.size)

        variants = {"ours": lambda: clock_ms(restore), "plain": lambda: clock_ms(plain)}
        samples = interleave(variants, rounds=rounds)
        if any(slot != view for slot, view in zip(slots, snapshots.views, strict=True)):
            raise RuntimeError("what was read from storage is not what was stored")
        size = snapshots.size_bytes
    ratios = [theirs / ours for ours, theirs in zip(samples["ours"], samples["plain"], strict=True)]
    return {
        "restore_storage_vs_plain_reads": median(ratios),
        "restore_storage_gb_per_s": size / GB / (median(samples["ours"]) / 1e3),
        "plain_reads_gb_per_s": size / GB / (median(samples["plain"]) / 1e3),
        "restore_storage_bytes": size,
    }


def copy_items(job: Job, image: SnapshotImage) -> list[CopyItem]:
    items = []
    for source, entry in image.sources():
        live = job.live(source.kind, source.name, source.key)
        if live is not None:
            stored = image.view.tensor(entry)
            items.append(
                CopyItem(
                    live.detach(),
                    source.start,
                    source.stop,
                    source.dtype,
                    stored.offset,
                    stored.nbytes,
                )
            )
    return items


def first_restore(args: Any, endpoint: str, seed: int) -> tuple[Job, float]:
    """Attach a fresh model to what is there; the seconds that took."""
    begun = time.perf_counter()
    job = Job.attach(args, endpoint, seed=seed)
    return job, time.perf_counter() - begun


def main() -> None:
    in_shared_environment()
    options = parser(__doc__)
    options.add_argument("--state-mib", type=int, default=1024)
    options.add_argument("--threads", type=int, default=2, help="as many as recovery copies with")
    args = options.parse_args()
    torch.set_num_threads(min(args.threads, len(os.sched_getaffinity(0))))
    with own_daemon(memory_mib=args.state_mib * 5 + 64) as endpoint, scratch_folder() as scratch:
        metrics = measure(args, endpoint, Path(scratch) / "state.pt")
    if weed() is not None:
        metrics |= storage_metrics(min(args.state_mib, STORED_MIB), args.rounds)
    emit("restore", metrics, as_json=args.json)


def measure(args: Any, endpoint: str, path: Path) -> dict[str, float | int | str]:
    job, _ = first_restore(args, endpoint, seed=0)
    job.train(6, snapshots=3)
    torch.save({"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}, path)
    dense_bytes = state_bytes(job.model, job.optimizer)
    job.detach()
    attach_s, first_s, first_bytes = [], [], []
    for number in range(min(3, args.rounds)):
        job, took_s = first_restore(args, endpoint, seed=number + 1)
        if job.ckpt is None or job.ckpt.resumed_from is None:
            raise RuntimeError("a fresh attach did not resume: there is nothing to measure")
        stats = job.ckpt.stats()
        attach_s.append(took_s)
        first_s.append(stats["restore_s"])
        first_bytes.append(stats["restored_bytes"])
        job.train(2)
        job.detach()
    engine = make_engine(torch.device("cpu"))
    try:
        with newest_slot(endpoint) as image:
            samples, size = compare(args, job, image, engine, path)
    finally:
        engine.close()
    rates = {name: [size / GB / (ms / 1e3) for ms in values] for name, values in samples.items()}
    limit = rates["memcpy"]
    ratios = [ours / best for ours, best in zip(rates["restore"], limit, strict=True)]
    first_gb_per_s = median(first_bytes) / GB / median(first_s)
    return {
        "restore_vs_memcpy": median(ratios),
        "restore_vs_torch_load": median(samples["torch.load"]) / median(samples["restore"]),
        "restore_gb_per_s": median(rates["restore"]),
        "memcpy_gb_per_s": median(limit),
        "torch_load_gb_per_s": median(rates["torch.load"]),
        "torch_load_mmap_gb_per_s": median(rates["torch.load mmap"]),
        "restore_ms": median(samples["restore"]),
        "torch_load_ms": median(samples["torch.load"]),
        "restore_first_s": median(first_s),
        "build_and_attach_s": median(attach_s),
        "restore_first_gb_per_s": first_gb_per_s,
        "restore_first_vs_memcpy": first_gb_per_s / median(limit),
        "restore_first_vs_torch_load": median(samples["torch.load"]) / 1e3 / median(first_s),
        "bytes": size,
        "state_mib": dense_bytes / MIB,
        "threads": args.threads,
        "rounds": args.rounds,
    }


def compare(
    args: Any, job: Job, image: SnapshotImage, engine: CopyEngine, path: Path
) -> tuple[dict[str, list[float]], int]:
    """Milliseconds per variant, and the bytes that each of them moves."""
    items = copy_items(job, image)
    size = sum(item.nbytes for item in items)
    begin = image.base + min(item.offset for item in items)
    slot = image.memory.tensor[begin : begin + size]
    check_restored(items, image, engine)

    def memcpy_ms() -> float:
        return 1e3 * size / GB / copy_gb_per_s(size, threads=args.threads, source=slot)

    def load(*, mmap: bool) -> None:
        state = torch.load(path, weights_only=True, mmap=mmap)
        job.model.load_state_dict(state["model"])
        job.optimizer.load_state_dict(state["optimizer"])

    variants: dict[str, Callable[[], float]] = {
        "memcpy": memcpy_ms,
        "restore": lambda: clock_ms(lambda: engine.restore(items, image.memory, image.base)),
    }
    samples = interleave(variants, rounds=args.rounds)
    # Loading replaces the optimizer's tensors, so it comes after everything that copies into them.
    samples |= interleave(
        {
            "torch.load": lambda: clock_ms(lambda: load(mmap=False)),
            "torch.load mmap": lambda: clock_ms(lambda: load(mmap=True)),
        },
        rounds=args.rounds,
    )
    return samples, size


def check_restored(items: list[CopyItem], image: SnapshotImage, engine: CopyEngine) -> None:
    """A rate counts only if the bytes arrive: spoil the tensors, restore, compare with the slot."""
    with torch.no_grad():
        for item in items:
            item.view().zero_()
    engine.restore(items, image.memory, image.base)
    for item in items:
        view = item.view()
        stored = image.memory.view(image.base + item.offset, item.nbytes, item.dtype, view.shape)
        if not torch.equal(view, stored):
            raise RuntimeError(f"restore left a tensor of shape {tuple(view.shape)} unequal")


if __name__ == "__main__":
    main()
