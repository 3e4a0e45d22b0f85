"""A fetch as its holders see it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from ckptd.core.recovery.striping import PART_BYTES
from ckptd.core.slots.segment_format import slot_lock_byte
from ckptd.core.slots.slots import SlotState
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.restore import slot_fetch as fetch_piece
from ckptd.restore.fetched_image import Examined, Wrong
from ckptd.transport.messages import FetchSource
from ckptd.transport.verbs import Completion, Done, Fault, RegionKey
from ckptd.workers import Workers
from tests.ckptd.memory.fresh import put_header
from tests.ckptd.restore.setting import AWAY, MIB, SNAPSHOT, Holder, Setting, check_sealed
from tests.ckptd.snapshots import snapshot_of

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
    setting.holder = Holder(damaged={"a.seg": [len(SNAPSHOT.image) // 2]})
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
    full._limit = 2  # places became free; the work itself is done by hand
    job.tick()
    for _ in ("it is copied", "it is verified"):
        assert not setting.over
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


def test_a_header_that_is_damaged_is_not_fetched(setting: Setting) -> None:
    """A trainer asks for it, and no check before may be trusted with what is written to memory."""
    setting.job(AWAY, packed=bytes(112))
    assert setting.over == ["a slot header in the request is damaged"]


def test_a_holder_that_is_forgotten_when_it_has_opened_its_copy_is_lost(setting: Setting) -> None:
    holder = setting.holder = Holder()
    job = setting.job(AWAY)
    setting.holder = None
    for answer in holder.later:
        answer()
    job.tick()
    assert setting.over == ["iteration 4: no holder is left of away"]
    lost = [e.message for e in setting.events.page(0, 100).events if e.kind == "fetch_source_lost"]
    assert lost == ["iteration 4 from away: its address is not known any more"]
    assert holder.got == []


def test_damage_that_nobody_delivered_fails_the_job(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be verified again and again."""

    def beyond(image: memoryview, *others: object) -> Examined:
        return Examined([Wrong(len(image), len(image) + 1, ("w",))])

    monkeypatch.setattr(fetch_piece, "examine", beyond)
    setting.holder = Holder()
    job = setting.job(AWAY)
    assert "does not match its digests" in setting.finish(job)
    assert setting.holder.closed == [1]


def test_a_slot_that_somebody_else_has_locked_is_left_alone(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not be locked, and was freed all the same: a sealed snapshot was lost."""
    near = setting.holding()
    make = setting.make

    def made(rank: int, **options: Any) -> Segment:
        segment = make(rank, **options)
        if rank == 0:
            sealed = replace(SNAPSHOT.header, state=SlotState.SEALED)
            put_header(segment.buffer, segment.geometry, 0, sealed)
            other.append(os.open(segment.path, os.O_RDWR))
            assert locks.try_lock(other[0], slot_lock_byte(0), exclusive=True)
        return segment

    other: list[int] = []
    monkeypatch.setattr(setting, "make", made)
    job = setting.job(near)
    assert job.over
    assert "locked" in job.reason
    header = job.segment.header(0)
    assert header is not None
    assert header.state is SlotState.SEALED
    os.close(other[0])
