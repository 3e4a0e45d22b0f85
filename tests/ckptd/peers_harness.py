"""Trainers without torch that attach, fill and recover through the real client, on the nodes of a `Net`.

A `Job` is the ranks of one run. What it records is remembered, so that a test can compare whatever
is sealed anywhere with what was written.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from ckptd.client.daemon_link.mapped_segment import MappedSegment
from ckptd.client.daemon_link.rank_memory import MemoryNeed, RankMemory
from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.identity import Identity
from ckptd.client.options import DaemonOptions
from ckptd.client.ranks.collectives import Collectives
from ckptd.client.recovery.global_recovery import Recovered, recover_global
from ckptd.core.slots.ring import choose_slot, slots_for_window
from ckptd.core.slots.segment_format import SlotHeader, parse_replica_file_name, parse_segment_file_name
from ckptd.core.slots.slots import SlotState
from ckptd.storage.image import ImageLayout
from ckptd.storage.image_format import TensorEntry
from tests.ckptd.forging import plant
from tests.ckptd.nodes import Net, Node
from tests.ckptd.running import eventually
from tests.ckptd.snapshots import IMAGE_BYTES, Snapshot, content_of, sealed_in

__all__ = ["Job", "Trainer"]

T = TypeVar("T")


class Trainer:
    """One rank: real client, made-up state."""

    def __init__(self, job: Job, rank: int, node: Node) -> None:
        self.job, self.rank, self.node = job, rank, node
        self.window = job.windows[rank]
        self.memory = RankMemory(
            Identity(job.name, job.run, rank, job.world_size),
            DaemonOptions(endpoint=node.endpoint, timeout_s=20, replicas=job.replicas),
            MemoryNeed(job.num_slots * job.slot_bytes, "for a test"),
            topology=f"dp{job.world_size}",
            version="test",
        )
        self.last = -1

    def reserve(self) -> MappedSegment:
        """Waits for the memory as long as it takes: on a busy machine it is not there when the
        client stops waiting.
        """
        job, session = self.job, self.memory.session
        while True:
            try:
                return self.memory.reserve(
                    job.slot_bytes,
                    job.num_slots,
                    window=self.window,
                    num_operators=self.window,
                    payload=b"\x80",
                )
            except TimeoutError:
                eventually(lambda: not session.reserving, f"memory for rank {self.rank}")

    def record(self, iteration: int, *, size: int = IMAGE_BYTES) -> Snapshot:
        """Fill a slot as the recorder does, and wait until it is sealed."""
        segment, index = self._claim()
        self._write(segment, index, iteration, size)
        header = segment.header(index)
        assert header is not None
        self.memory.session.filled(segment.generation, index, iteration)
        eventually(
            lambda: self._state(segment, index) is SlotState.SEALED,
            f"rank {self.rank} iteration {iteration} is sealed",
        )
        sealed = segment.header(index)
        assert sealed is not None
        written = Snapshot(sealed, bytes(segment.slot(index)[: sealed.image_len]))
        self.job.written[self.rank, *written.name] = written
        self.last = iteration
        return written

    def _state(self, segment: MappedSegment, index: int) -> SlotState | None:
        header = segment.header(index)
        return None if header is None else header.state

    def _claim(self) -> tuple[MappedSegment, int]:
        table, segment = self.memory.table, self.memory.table.segments[-1]
        busy: set[tuple[int, int]] = set()
        while True:
            records = table.records()
            choice = choose_slot(
                records,
                self.window,
                busy=busy,
                generation=segment.generation,
                protected=table.promised(records, self.window),
                epochs=table.epochs,
            )
            assert choice.index is not None, choice.reason
            if segment.try_lock_slot(choice.index):
                return segment, choice.index
            busy.add((segment.generation, choice.index))

    def _write(self, segment: MappedSegment, index: int, iteration: int, size: int) -> None:
        table, window = self.memory.table, self.window
        layout = ImageLayout.build(
            [TensorEntry(name, "U8", (size,)) for name in self.job.tensors],
            identity={"job": self.job.name, "run": self.job.run, "rank": str(self.rank)},
            num_operators=window,
            anchors=1 << iteration % window,
        )
        header = SlotHeader(
            state=SlotState.FILLING,
            iteration=iteration,
            previous=self.last,
            image_len=layout.image_len,
            sequence=table.next_sequence(),
            layout_id=layout.layout_id,
            filled_at_ns=time.time_ns(),
            writer_pid=os.getpid(),
            epoch=table.epoch,
            epoch_start=table.epoch_start,
        )
        segment.begin_filling(index, header)
        slot = segment.slot(index)
        layout.write_header(slot, iteration=iteration, previous=self.last, scalars_len=0)
        random = np.random.default_rng((self.rank, iteration, table.epoch))
        for name in self.job.tensors:
            offset = layout.offset_of(name)
            slot[offset : offset + size] = random.bytes(size)
            plant(slot, offset)
        segment.write_header(index, replace(header, state=SlotState.FILLED))
        segment.unlock_slot(index)

    def own(self) -> dict[tuple[int, int, int], Snapshot]:
        """What its own segments hold sealed."""
        found: dict[tuple[int, int, int], Snapshot] = {}
        for path in self.node.segment_dir.glob(f"{self.job.name}~{self.job.run}~r{self.rank}~*.seg"):
            found |= sealed_in(path)
        return found


class Job:
    """The ranks of one run.

    Args:
        homes: the node of each rank.
        tensors: of each snapshot, all of one size.
        window: how many snapshots anchor everything; also the number of operators. One for all ranks, or of each.
    """

    def __init__(
        self,
        net: Net,
        homes: Sequence[Node],
        *,
        run: str = "run",
        window: int | Sequence[int] = 1,
        replicas: int | None = None,
        slot_bytes: int = 1 << 20,
        slack: int = 2,
        tensors: Sequence[str] = ("w",),
    ) -> None:
        self.name, self.run, self.net, self.homes = "job", run, net, list(homes)
        self.windows = [window] * len(homes) if isinstance(window, int) else list(window)
        self.replicas, self.slot_bytes, self.tensors = replicas, slot_bytes, tuple(tensors)
        self.num_slots = slots_for_window(max(self.windows), slack)
        self.written: dict[tuple[int, int, int, int], Snapshot] = {}
        self.trainers: list[Trainer] = []

    @property
    def world_size(self) -> int:
        return len(self.homes)

    def __getitem__(self, rank: int) -> Trainer:
        return self.trainers[rank]

    def attach(self) -> None:
        """All ranks attach to the daemons of their nodes."""
        self.trainers = [Trainer(self, rank, node) for rank, node in enumerate(self.homes)]

    def together(self, work: Callable[[Trainer], T]) -> list[T]:
        """The same on every rank, at the same time; the results by rank."""
        with ThreadPoolExecutor(self.world_size) as pool:
            return list(pool.map(work, self.trainers))

    def recover(self) -> list[Recovered | str]:
        """What each rank's memory says; collective."""
        rounds = _Rounds(self.net, [node.name for node in self.homes])
        return self.together(lambda t: recover_global(t.memory, rounds.ranks_of(t.rank)))

    def start(self) -> None:
        """Attach, find nothing to recover, reserve."""
        self.attach()
        for found in self.recover():
            assert isinstance(found, str), found
        self.together(Trainer.reserve)

    def resume(self) -> int:
        """Attach and recover; the iteration that all ranks go on from. Every byte is compared with
        what was written.
        """
        self.attach()
        ends = set()
        for trainer, found in zip(self.trainers, self.recover(), strict=True):
            assert not isinstance(found, str), found
            images = found.images
            self.check_images(trainer.rank, images)
            trainer.last = images[-1].iteration
            ends.add(trainer.last)
        assert len(ends) == 1, f"ranks resume from different iterations: {ends}"
        return ends.pop()

    def check_images(self, rank: int, images: Sequence[SnapshotImage]) -> None:
        """What is to be replayed is what was written, and anchors everything."""
        anchored = 0
        for image in images:
            view = image.view  # waits until it is there
            told = [s for (r, i, _, _), s in self.written.items() if (r, i) == (rank, view.iteration)]
            found = b"".join(bytes(view.data(tensor.name)) for tensor in view)
            assert any(s.image.endswith(found) for s in told), f"iteration {view.iteration}"
            anchored |= 1 << view.iteration % self.windows[rank]
        assert anchored == (1 << self.windows[rank]) - 1

    def record(self, *iterations: int, size: int = IMAGE_BYTES) -> None:
        """All ranks record these iterations, one after the other."""
        for iteration in iterations:
            self.together(lambda t, i=iteration: t.record(i, size=size))  # type: ignore[misc]

    def end(self) -> None:
        """The trainers leave; what they recorded stays."""
        if self.trainers:
            self.together(lambda t: t.memory.close())
        self.trainers = []

    # -- what lies where -------------------------------------------------------------------------

    def holders(self, rank: int, iteration: int) -> list[Node]:
        """The running nodes that hold a true replica of this snapshot, compared byte for byte."""
        return [n for n in self.net.nodes if n is not self.homes[rank] and self._holds(n, rank, iteration)]

    def _holds(self, node: Node, rank: int, iteration: int) -> bool:
        for path in node.replicas(rank):
            for snapshot in sealed_in(path).values():
                if snapshot.header.iteration == iteration and self._true(rank, snapshot):
                    return True
        return False

    def _true(self, rank: int, snapshot: Snapshot) -> bool:
        told = self.written.get((rank, *snapshot.name))
        return (
            told is not None
            and told.image == snapshot.image
            and content_of(told.header) == content_of(snapshot.header)
        )

    def await_replicas(self, iteration: int, copies: int, *, ranks: Sequence[int] | None = None) -> None:
        """Until so many nodes hold this snapshot of every rank."""
        for rank in range(self.world_size) if ranks is None else ranks:
            eventually(
                lambda r=rank: len(self.holders(r, iteration)) >= copies,  # type: ignore[misc]
                f"{copies} replicas of iteration {iteration} of rank {rank}",
            )

    def check_all(self) -> int:
        """Whatever is sealed anywhere is what was written; returns how many replicas of snapshots
        were compared.
        """
        compared = 0
        for node in self.net.nodes:
            for path in node.files():
                rank = _rank_of(path)
                for snapshot in sealed_in(path).values():
                    told = self.written[rank, *snapshot.name]
                    assert told.image == snapshot.image, f"{node.name} {path.name} {snapshot.name}"
                    assert content_of(told.header) == content_of(snapshot.header)
                    compared += path.suffix == ".rep"
        return compared


def _rank_of(path: Path) -> int:
    parse = parse_replica_file_name if path.suffix == ".rep" else parse_segment_file_name
    return parse(path.name).rank


class _Rounds:
    """Collective calls of ranks as threads; node cards are seen through the reader's proxies."""

    def __init__(self, net: Net, names: Sequence[str]) -> None:
        self._net, self._names = net, names
        self._said: list[bytes] = [b""] * len(names)
        self._barrier = threading.Barrier(len(names), timeout=60)

    def ranks_of(self, rank: int) -> Collectives:
        def exchange(said: bytes) -> list[bytes]:
            self._said[rank] = said
            self._barrier.wait()
            heard = [self._translated(rank, data) for data in self._said]
            self._barrier.wait()  # nobody speaks again before everybody has heard
            return heard

        return Collectives(exchange, rank=rank, node=self._names[rank])

    def _translated(self, reader: int, data: bytes) -> bytes:
        try:
            said = msgspec.msgpack.decode(data)
        except msgspec.MsgspecError:
            return data
        return msgspec.msgpack.encode(self._net.seen_from(self._names[reader], said))
