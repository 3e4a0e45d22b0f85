"""What the benchmarks of storage share: sealed images in a segment, a store keeper that is driven
as a daemon does, plain uploads and reads.

The plain side is fsspec as a user calls it: `pipe_file` of bytes that lie in memory, and
`cat_ranges` of 16 MiB ranges.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from bench.common import MIB
from ckptd.core.slots.segment_format import SlotHeader, encode_descriptor, write_slot_header
from ckptd.core.slots.slots import SlotState, SnapshotKey
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.persistence import keeper_wire as w
from ckptd.storage.image import ImageLayout, seal
from ckptd.storage.image_format import TensorEntry
from tests.ckptd.persistence.slots import WINDOW, descriptor
from tests.storage.s3_server import S3Server

__all__ = [
    "Keeper",
    "Snapshots",
    "cat_ranges",
    "images",
    "local_files",
    "s3_files",
]

JOB = "job"
PART_BYTES = 16 * MIB
FLYING = 2  # snapshots of a rank that a daemon has on their way at a time
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_TENSOR_BYTES = (3 * MIB, 1 * MIB, 300_000)


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Sealed images of one rank: consecutive iterations, in slots 0, 1, and so on."""

    segment: Segment
    ids: tuple[SnapshotKey, ...]
    views: tuple[memoryview, ...]

    @property
    def size_bytes(self) -> int:
        return sum(len(view) for view in self.views)


@contextmanager
def images(folder: Path, size_mib: int, count: int = WINDOW) -> Iterator[Snapshots]:
    """Images of `size_mib` together, as many tensors of mixed sizes with random content."""
    store = SegmentStore(folder, (size_mib + 64) * 2 * MIB, "n", mlock="off", hugepages="off")
    each = size_mib * MIB // count
    segment = store.create(descriptor(), count, each + 4 * MIB)
    try:
        ids, views = zip(*[_fill(segment, index, each) for index in range(count)], strict=True)
        yield Snapshots(segment, ids, views)
    finally:
        store.remove(segment)


def _fill(segment: Segment, index: int, size: int) -> tuple[SnapshotKey, memoryview]:
    entries: list[TensorEntry] = []
    left = size
    while left > 0:
        nbytes = min(left, _TENSOR_BYTES[len(entries) % len(_TENSOR_BYTES)])
        entries.append(TensorEntry(f"t{len(entries)}", "U8", (nbytes,)))
        left -= nbytes
    iteration, told = index + 1, segment.descriptor
    identity = {"job": told.job, "run": told.run, "rank": "0", "world_size": "1"}
    layout = ImageLayout.build(entries, identity=identity, num_operators=2, anchors=1 << iteration % WINDOW)
    image = segment.image(index, SlotHeader(image_len=layout.image_len))
    layout.write_header(image, iteration=iteration, previous=iteration - 1, scalars_len=0)
    random = np.random.default_rng(iteration)
    for entry in entries:
        at = layout.offset_of(entry.name)
        image[at : at + entry.nbytes] = random.bytes(entry.nbytes)
    header = SlotHeader(
        state=SlotState.SEALED,
        iteration=iteration,
        previous=iteration - 1,
        image_len=layout.image_len,
        sequence=iteration + 1,
        layout_id=layout.layout_id,
        writer_pid=os.getpid(),
        phase=iteration % WINDOW,
        header_digest=seal(image),
        epoch=1,
    )
    write_slot_header(segment.buffer, segment.geometry, index, replace(header, state=SlotState.FILLING))
    write_slot_header(segment.buffer, segment.geometry, index, header)
    return SnapshotKey(segment.generation, iteration, 1, iteration + 1), image


class Keeper:
    """A real store keeper process, asked as a daemon asks it.

    Raises (all calls):
        RuntimeError: it refused, or ended.
    """

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "ckptd.persistence.keeper", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
            )
        self._channel = w.Channel(ours, w.decode_from_keeper)
        retain = w.Retain(1000, 0, 0.0)
        self._channel.send(w.Configure(url, options, "auto", 4, 0.0, 600.0, False, retain))
        self._ids = 0

    def store(self, run: str, snapshots: Snapshots) -> tuple[float, float]:
        """Store and commit one checkpoint of a run of its own; seconds of wall time, and of the
        keeper's CPU time.
        """
        name = w.RankName(JOB, run, 0)
        self._wait([self._ask(w.OpenRank, name, 1, -1)])
        begun_s, cpu_s = time.perf_counter(), self._cpu_s()
        flying: list[int] = []
        path = str(snapshots.segment.path)
        for index, snapshot in enumerate(snapshots.ids):
            if len(flying) == FLYING:
                self._wait([flying.pop(0)])
            flying.append(self._ask(w.StoreSlot, name, snapshot, path, index))
        self._wait(flying)
        self._wait([self._commit(name, snapshots)])
        return time.perf_counter() - begun_s, self._cpu_s() - cpu_s

    def _commit(self, name: w.RankName, snapshots: Snapshots) -> int:
        geometry, ids = snapshots.segment.geometry, snapshots.ids
        return self._ask(
            w.CommitRank,
            name,
            1,
            ids[-1].iteration,
            1,
            list(ids),
            encode_descriptor(snapshots.segment.descriptor),
            geometry.slot_bytes,
            WINDOW,
            geometry.num_slots,
        )

    def close(self) -> None:
        self._channel.close()
        self._process.wait(30)

    def _ask(self, kind: Callable[..., Any], *fields: Any) -> int:
        self._ids += 1
        self._channel.send(kind(self._ids, *fields))
        return self._ids

    def _wait(self, numbers: Sequence[int]) -> None:
        left = set(numbers)
        while left:
            message = self._channel.receive()
            if message is None or isinstance(message, w.KeeperFailed):
                raise RuntimeError(f"the store keeper has failed: {message}")
            left.discard(getattr(message, "id", 0))

    def _cpu_s(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * _TICK_S


def s3_files(server: S3Server) -> Any:
    """The S3 server as a plain fsspec file system."""
    options = dict(server.options)
    region = {"region_name": options.pop("region")}
    return fsspec.filesystem("s3", **options, client_kwargs=region, skip_instance_cache=True)


def local_files() -> Any:
    """This machine's files, in the same way."""
    return fsspec.filesystem("file")


def cat_ranges(files: Any, path: str, size: int) -> None:
    """Read a whole object by ranges, as many at a time as fsspec likes."""
    starts = list(range(0, size, PART_BYTES))
    ends = [min(size, start + PART_BYTES) for start in starts]
    found = files.cat_ranges([path] * len(starts), starts, ends, on_error="raise")
    if sum(map(len, found)) != size:
        raise RuntimeError(f"{path}: {sum(map(len, found))} of {size} bytes were read")
