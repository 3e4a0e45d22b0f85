"""A fetch as its holders see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from ckptd.events import EventLog
from ckptd.fetching import piece as fetch_piece
from ckptd.fetching.job import FetchJob
from ckptd.memory import locks
from ckptd.memory.ring import SlotState
from ckptd.memory.segment_format import (
    SlotHeader,
    pack_slot_header,
    slot_lock_byte,
    write_slot_header,
)
from ckptd.memory.segments import Segment, SegmentStore
from ckptd.peers.peer_link import PeerLink
from ckptd.recovery.striping import PART_BYTES
from ckptd.transport import peer_messages as p
from ckptd.transport.messages import FetchPiece, FetchSource
from ckptd.transport.verbs import Completion, Done, Fault, RegionKey
from ckptd.workers import Workers
from tests.ckptd.running import descriptor, eventually
from tests.ckptd.snapshots import Snapshot, snapshot_of

MIB = 1 << 20
SNAPSHOT = snapshot_of(4)
AWAY = FetchSource("away", "a.seg", 0)


@dataclass
class Holder:
    """Grants reads, and delivers when it is told to (`later`).

    Args:
        ended: what is got of the first so many reads is refused, as if they had been ended.
        refuses: segments that it knows nothing of.
        others: segments that hold something else.
    """

    ended: int = 0
    refuses: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    snapshot: Snapshot = SNAPSHOT
    boot_id: str = "b1"
    opened: list[p.OpenRead] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    doubted: list[str] = field(default_factory=list)
    got_of: list[int] = field(default_factory=list)
    later: list[Callable[[], None]] = field(default_factory=list)

    def ask(
        self,
        message: p.PeerMessage,
        expect: type,
        done: Callable[[Any], None],
        failed: Callable[[str, str], None],
        *,
        timeout_s: float = 10.0,
    ) -> None:
        assert isinstance(message, p.OpenRead)
        if message.name in self.refuses:
            self.later.append(lambda: failed("unknown", "it is not here"))
            return
        self.opened.append(message)
        header = self.snapshot.header
        if message.name in self.others:
            header = replace(header, header_digest=bytes(len(header.header_digest)))
        reply = p.ReadOpened(
            len(self.opened), bytes(16), len(self.snapshot.image), pack_slot_header(header)
        )
        self.later.append(lambda: done(reply))

    def tell(self, message: p.PeerMessage) -> None:
        if isinstance(message, p.DoubtSlot):
            self.doubted.append(message.name)
            return
        assert isinstance(message, p.CloseRead)
        self.closed.append(message.region)

    def get(
        self, source: RegionKey, target: memoryview, *, offset: int, deadline_s: float, done: Done
    ) -> None:
        fault = Fault.REGION if source.region <= self.ended else None
        self.got_of.append(source.region)
        if fault is None:
            target[:] = self.snapshot.image[offset : offset + len(target)]
        self.later.append(lambda: done(Completion(fault, "", len(target), 0, 0.0)))


@dataclass
class Setting:
    """A job on a node named "here"."""

    store: SegmentStore
    workers: Workers
    holder: Holder | None = None
    events: EventLog = field(default_factory=lambda: EventLog(100))
    over: list[str] = field(default_factory=list)
    doubted: list[tuple[str, int, int]] = field(default_factory=list)
    segments: dict[str, Segment] = field(default_factory=dict)

    def make(self, rank: int, num_slots: int = 2, slot_bytes: int = MIB) -> Segment:
        told = msgspec.structs.replace(
            descriptor(), rank=rank, node_id="here", created_at_ns=1, window=1, num_operators=1
        )
        segment = self.store.create(told, num_slots, slot_bytes)
        self.segments[segment.path.name] = segment
        return segment

    def holding(self, *, damaged: bool = False) -> FetchSource:
        """A copy of the snapshot on this very node."""
        segment = self.make(len(self.segments) + 1)
        image = segment.image(1, SNAPSHOT.header)
        image[:] = SNAPSHOT.image
        image[SNAPSHOT.header.image_len // 2] ^= damaged
        write_slot_header(segment.buffer, segment.geometry, 1, SNAPSHOT.header)
        return FetchSource("here", segment.path.name, 1)

    def job(
        self,
        *sources: FetchSource,
        header: SlotHeader = SNAPSHOT.header,
        workers: Workers | None = None,
        slot_bytes: int = MIB,
    ) -> FetchJob:
        holder = self.holder

        def link(node: str) -> PeerLink | None:
            return None if node == "here" else cast("PeerLink | None", holder)

        job = FetchJob(
            self.make(0, slot_bytes=slot_bytes),
            [FetchPiece(pack_slot_header(header), sources)],
            node="here",
            link=link,
            local=self.segments.get,
            doubt=lambda s, index, sequence: self.doubted.append((s.path.name, index, sequence)),
            verifiers=workers or self.workers,
            map_fn=None,
            events=self.events,
            clock=lambda: 100.0,
            finished=self.over.append,
        )
        job.start()
        return job

    def finish(self, job: FetchJob) -> str:
        """Let everything happen that is under way, and a tick now and then; how the job ended."""

        def finished() -> bool:
            self.deliver()
            self.workers.collect()
            job.tick()
            return bool(self.over)

        eventually(finished, "the fetch ends")
        self.deliver()
        return self.over[0]

    def deliver(self) -> None:
        while self.holder is not None and self.holder.later:
            self.holder.later.pop(0)()

    def lost(self) -> list[str]:
        return [
            event.message
            for event in self.events.page(0, 100).events
            if event.kind == "fetch_source_lost"
        ]


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    workers = Workers("test", 1, 100, lambda: None)
    store = SegmentStore(tmp_path, 64 * MIB, "here", mlock="off", hugepages="off")
    yield Setting(store, workers)
    workers.close(5.0)


def check_sealed(segment: Segment, snapshot: Snapshot = SNAPSHOT) -> None:
    header = segment.header(0)
    assert header is not None
    assert header.state is SlotState.SEALED
    assert bytes(segment.image(0, header)) == snapshot.image
    assert not locks.is_locked(segment.fd, slot_lock_byte(0), exclusive=True)


# -- what holders opened for us ------------------------------------------------------------------


def test_a_holder_that_took_us_for_lost_is_asked_again(setting: Setting) -> None:
    """It ended our reads while we heard of nothing. What it opens for us is of this boot."""
    setting.holder = Holder(ended=2)
    job = setting.job(AWAY)
    assert setting.finish(job) == ""
    assert [message.boot_id for message in setting.holder.opened] == ["b1"] * 3
    assert setting.holder.closed == [1, 2, 3]
    check_sealed(job.segment)


def test_two_parts_that_fail_late_open_one_region_anew_and_nothing_stays_open(
    setting: Setting,
) -> None:
    """The second one's failure is about the region that is gone, not about the one that was opened since."""

    class Late(Holder):
        def get(
            self,
            source: RegionKey,
            target: memoryview,
            *,
            offset: int,
            deadline_s: float,
            done: Done,
        ) -> None:
            super().get(source, target, offset=offset, deadline_s=deadline_s, done=done)
            if self.got_of == [
                1,
                1,
            ]:  # its failure comes after the answer to what the first one asked
                failure = self.later.pop()
                self.later.append(lambda: self.later.append(failure))

    big = snapshot_of(5, size=PART_BYTES + MIB)
    setting.holder = Late(ended=1, snapshot=big)
    job = setting.job(AWAY, header=big.header, slot_bytes=PART_BYTES + 2 * MIB)
    assert setting.finish(job) == ""
    assert sorted(setting.holder.got_of) == [1, 1, 2, 2]
    assert len(setting.holder.opened) == 2
    assert setting.holder.closed == [1, 2]
    check_sealed(job.segment, big)


def test_one_node_may_hold_two_copies_and_one_refusal_gives_up_one(setting: Setting) -> None:
    setting.holder = Holder(refuses=("b.rep",))
    job = setting.job(FetchSource("away", "b.rep", 0), AWAY)
    assert setting.finish(job) == ""
    assert len(setting.lost()) == 1
    assert [message.name for message in setting.holder.opened] == ["a.seg"]
    check_sealed(job.segment)


def test_both_copies_of_one_node_are_closed_and_one_that_is_named_twice_is_opened_once(
    setting: Setting,
) -> None:
    setting.holder = Holder()
    job = setting.job(AWAY, FetchSource("away", "b.rep", 0), AWAY)
    assert setting.finish(job) == ""
    assert len(setting.holder.opened) == 2
    assert sorted(setting.holder.closed) == [1, 2]
    assert job.state.by_node == {"away": len(SNAPSHOT.image)}


def test_a_copy_that_is_damaged_is_doubted_and_the_other_one_of_its_node_delivers(
    setting: Setting,
) -> None:
    @dataclass
    class Liar(Holder):
        def get(
            self,
            source: RegionKey,
            target: memoryview,
            *,
            offset: int,
            deadline_s: float,
            done: Done,
        ) -> None:
            super().get(source, target, offset=offset, deadline_s=deadline_s, done=done)
            if source.region == 1:
                target[len(target) // 2] ^= 1

    setting.holder = Liar()
    job = setting.job(AWAY, FetchSource("away", "b.rep", 0))
    assert setting.finish(job) == ""
    assert setting.holder.doubted == ["a.seg"]
    assert setting.holder.got_of == [1, 2]
    check_sealed(job.segment)


def test_what_is_of_no_use_is_closed(setting: Setting) -> None:
    setting.holder = Holder(others=("b.rep",))
    job = setting.job(FetchSource("away", "b.rep", 0), AWAY)
    assert setting.finish(job) == ""
    assert sorted(setting.holder.closed) == [1, 2]
    assert "something else" in setting.lost()[0]


@pytest.mark.parametrize("how", ["job over", "node lost"])
def test_what_is_opened_too_late_is_closed(setting: Setting, how: str) -> None:
    setting.holder = Holder()
    job = setting.job(AWAY)
    if how == "job over":
        job.close()
    else:
        job.peer_lost("away")
    assert len(setting.over) == 1
    setting.deliver()
    assert setting.holder.closed == [1]
    assert not setting.holder.got_of


class Waits:
    """A transfer that is cancelled, and whose last byte lands when the test wants."""

    def __init__(self, done: Done) -> None:
        self.done, self.cancelled = done, False

    def cancel(self) -> None:
        self.cancelled = True

    def land(self) -> None:
        self.done(Completion(Fault.CANCELLED, "", 0, 0, 0.0))


@dataclass
class Slow(Holder):
    """Delivers nothing by itself."""

    under_way: list[Waits] = field(default_factory=list)

    def get(  # type: ignore[override]
        self, source: RegionKey, target: memoryview, *, offset: int, deadline_s: float, done: Done
    ) -> Waits:
        self.under_way.append(Waits(done))
        return self.under_way[-1]


def test_a_slot_stays_locked_while_bytes_are_landing_though_the_job_is_over(
    setting: Setting,
) -> None:
    holder = setting.holder = Slow()
    job = setting.job(AWAY)
    setting.deliver()
    job.close()
    (transfer,) = holder.under_way
    assert transfer.cancelled
    assert locks.is_locked(job.segment.fd, slot_lock_byte(0), exclusive=True)
    assert holder.closed == []
    transfer.land()
    assert not locks.is_locked(job.segment.fd, slot_lock_byte(0), exclusive=True)
    assert holder.closed == [1]


def test_when_a_holder_fails_for_good_its_other_parts_are_cancelled(setting: Setting) -> None:
    """Or they would land in an image that is verified, or that is sealed."""
    big = snapshot_of(5, size=PART_BYTES + MIB)
    holder = setting.holder = Slow(snapshot=big)
    quiet = FetchSource("away", "b.rep", 0)
    setting.job(AWAY, quiet, header=big.header, slot_bytes=PART_BYTES + 2 * MIB)
    holder.later.pop()  # it does not answer yet: the job goes on
    setting.deliver()
    other = holder.under_way[1]
    for _ in range(3):
        failing = next(t for t in reversed(holder.under_way) if t is not other)
        failing.done(Completion(Fault.DIGEST, "", 0, 0, 0.0))
    assert other.cancelled
    assert not setting.over


# -- copies on this node -------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_damaged_copy_on_this_node_is_doubted_and_another_one_taken(
    setting: Setting, elsewhere: bool
) -> None:
    """Unless it is quarantined, each plan wants it again. The good one is away, or a second one here."""
    bad = setting.holding(damaged=True)
    setting.holder = Holder()
    job = setting.job(bad, AWAY if elsewhere else setting.holding())
    assert setting.finish(job) == ""
    assert setting.doubted == [(bad.segment, 1, SNAPSHOT.header.sequence)]
    assert len(setting.holder.opened) == elsewhere
    check_sealed(job.segment)


def test_a_copy_on_this_node_waits_for_a_worker(setting: Setting) -> None:
    """Workers that are full are no reason to give it up: it may be the only one."""
    full = Workers("full", 0, 0, lambda: None)
    job = setting.job(setting.holding(), workers=full)
    assert not setting.over
    job.tick()
    assert not setting.over
    full._limit = 1  # a place became free; the job itself is done by hand
    job.tick()
    task = full._todo.get_nowait()
    assert task is not None
    task.done(task.task())
    assert setting.over == [""]
    assert not setting.lost()
    check_sealed(job.segment)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_copy_on_this_node_that_cannot_be_read_is_given_up_and_not_the_job(
    setting: Setting, elsewhere: bool
) -> None:
    gone = setting.holding()
    setting.segments[gone.segment].path.unlink()
    setting.holder = Holder()
    job = setting.job(gone, *[AWAY][:elsewhere])
    reason = setting.finish(job)
    assert "FileNotFoundError" in setting.lost()[0]
    if elsewhere:
        assert reason == ""
        check_sealed(job.segment)
    else:
        assert "no holder is left of here" in reason


@pytest.mark.parametrize("fails", [True, False])
def test_a_slot_stays_locked_while_a_worker_still_writes_it_though_the_job_is_over(
    setting: Setting, fails: bool
) -> None:
    """Else the next trainer's snapshot is overwritten by the rest of the copy."""
    by_hand = Workers("by hand", 0, 1, lambda: None)
    source = setting.holding()
    job = setting.job(source, workers=by_hand)
    segment = job.segment
    job.close()
    assert setting.over == ["cancelled"]
    assert locks.is_locked(segment.fd, slot_lock_byte(0), exclusive=True)
    task = by_hand._todo.get_nowait()
    assert task is not None
    if fails:
        task.failed(OSError("mine"))
    else:
        task.done(task.task())
    header = segment.header(0)
    assert header is not None
    assert header.state is SlotState.FREE
    assert not locks.is_locked(segment.fd, slot_lock_byte(0), exclusive=True)
    assert setting.over == ["cancelled"]
    assert not setting.doubted


# -- what cannot be ------------------------------------------------------------------------------


@pytest.mark.parametrize("image_len", [0, MIB + 1, (1 << 62) - 1])
def test_an_image_that_fits_into_no_slot_fails_the_job(setting: Setting, image_len: int) -> None:
    """An empty one was verified for ever; a huge one was cut into parts on the loop thread."""
    setting.holder = Holder()
    job = setting.job(AWAY, header=replace(SNAPSHOT.header, image_len=image_len))
    assert setting.over == [f"an image of {image_len} bytes fits into no slot here"]
    assert job.state.state == "failed"
    assert not setting.holder.opened


def test_damage_that_nobody_delivered_fails_the_job(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be verified again and again."""

    def beyond(image: memoryview, digest: bytes, map_fn: object) -> Sequence[tuple[int, int]]:
        return [(len(image), len(image) + 1)]

    monkeypatch.setattr(fetch_piece, "wrong_ranges", beyond)
    setting.holder = Holder()
    job = setting.job(AWAY)
    assert "does not match its digests" in setting.finish(job)
    assert setting.holder.closed == [1]
