"""What a daemon tells the rings of its ranks about the others (docs/replication.md §6)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from ckptd.config.settings import DaemonConfig
from ckptd.core.replication.copies import NO_INTERVAL
from ckptd.core.replication.replicas import Promise
from ckptd.core.sessions import RankKey
from ckptd.core.slots.segment_format import RingHint, SlotHeader, read_ring_hint, slot_lock_byte
from ckptd.core.slots.slots import SlotState
from ckptd.event_log import EventLog
from ckptd.memory import locks
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.node_context import NodeContext
from ckptd.peers.runs import Run
from ckptd.transport.messages import Join, Member, NodeCard
from tests.ckptd.memory.fresh import put_header
from tests.ckptd.running import MIB, descriptor, fill

HERE, AWAY = NodeCard("here"), NodeCard("away", "tcp://127.0.0.1:1")


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(f"/dev/shm/ckptd-test-runs-{uuid.uuid4().hex[:8]}")
    path.mkdir(mode=0o700)
    yield path
    for left in path.iterdir():
        left.unlink()
    path.rmdir()


class Node:
    """A run on one node, without a fabric: ``links`` says which other nodes can be reached."""

    def __init__(self, folder: Path, *links: str, store: SegmentStore | None = None) -> None:
        self.store = store or SegmentStore(folder, 64 * MIB, "here", mlock="off", hugepages="auto")
        self.links = {name: Mock() for name in links}
        self.run = Run(
            "job",
            "run",
            NodeContext(DaemonConfig(), self.store, EventLog(100), Mock(), clock=lambda: 0.0),
            link=self.links.get,
            vouch=Mock(),
        )

    def rank(self, rank: int, *, window: int = 2) -> Segment:
        return self.store.create(descriptor(rank=rank, world_size=2, window=window), 6, MIB)

    def join(self, ranks: tuple[int, ...], *others: Member, epoch: int = 0, start: int = -1) -> None:
        members = (Member(HERE, ranks), *others)
        for rank in ranks:
            assert self.run.join(RankKey("job", "run", rank), Join(epoch, start, members)) == ""

    def seal(self, segment: Segment, *iterations: int, epoch: int = 0) -> None:
        for iteration in iterations:
            anchors = 1 << iteration % 2
            fill(segment, iteration % 6, iteration, anchors=anchors, state=SlotState.SEALED)
            header = segment.header(iteration % 6)
            assert header is not None
            told = replace(header, epoch=epoch)
            put_header(segment.buffer, segment.geometry, iteration % 6, told)
        self.run.sealed(segment.descriptor.rank)


def hint(segment: Segment) -> RingHint:
    return read_ring_hint(segment.buffer)


def test_slots_are_read_again_only_if_something_has_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon read every slot of every run that had ended, each second: with 100 of them an eighth of a core."""
    node = Node(folder)
    first, second = node.rank(0), node.rank(1)
    node.join((0, 1))
    for segment in (first, second):
        node.seal(segment, 3, 4)
    node.run.tick()
    read: list[Path] = []
    header = Segment.header

    def noted(segment: Segment, index: int) -> SlotHeader | None:
        read.append(segment.path)
        return header(segment, index)

    monkeypatch.setattr(Segment, "header", noted)
    node.run.tick()
    assert read == []
    for segment in (first, second):  # by their trainers, which the daemon does not hear of
        fill(segment, 5, 5, anchors=2, state=SlotState.SEALED)
    node.run.tick()
    assert set(read) == {first.path, second.path}
    assert node.run.promise.floor == 5


def test_what_could_not_be_reported_is_reported_at_a_later_tick_although_no_slot_has_changed(
    folder: Path,
) -> None:
    node = Node(folder)
    first, second = node.rank(0), node.rank(1)
    node.join((0, 1))
    node.seal(first, 3, 4)
    with locks.lock_file(second.path, slot_lock_byte(3), exclusive=True):  # its trainer is about to fill it
        node.seal(second, 3, 4)
        for _ in range(2):
            node.run.tick()
            assert node.run.promise.floor == -1
    node.run.tick()
    assert node.run.promise.floor == 4


def test_ranks_of_one_node_keep_what_the_slowest_can_go_back_to(folder: Path) -> None:
    node = Node(folder)
    quick, slow = node.rank(0), node.rank(1)
    node.join((0, 1))
    assert (hint(quick).floor, hint(quick).horizon) == (-1, -1)
    node.seal(quick, 3, 4, 5)
    assert hint(quick) == RingHint(-1, 4, 2, aim=5)  # 4 may become the first floor
    node.seal(slow, 3, 4)
    assert node.run.promise.floor == 4
    node.seal(quick, 6, 7)
    node.run.tick()
    assert hint(quick) == RingHint(4, 4, 2, aim=5)
    assert hint(slow) == RingHint(4, 4, 2, aim=4)
    node.seal(slow, 5, 6)
    assert node.run.promise.floor == 6
    assert (hint(quick).floor, hint(slow).floor) == (6, 6)


def test_a_ring_learns_the_longest_window_of_all_ranks(folder: Path) -> None:
    node = Node(folder)
    short, long = node.rank(0), node.rank(1, window=4)
    node.join((0, 1))
    node.seal(long, 1, 2, 3, 4)
    node.seal(short, 3, 4)
    node.run.tick()
    assert (hint(short).span, hint(long).span) == (4, 4)
    assert node.run.promise.floor == -1  # the short one does not reach back to 1
    node.seal(short, 1, 2)
    assert node.run.promise.floor == 4
    assert hint(short) == RingHint(4, 4, 4, aim=4)


def test_the_ring_of_a_run_of_one_rank_has_no_aim(folder: Path) -> None:
    node = Node(folder)
    segment = node.rank(0)
    node.join((0,))
    node.seal(segment, 3, 4)
    node.run.tick()
    assert hint(segment).aim == -1


def test_a_ring_keeps_the_floor_also_while_another_node_cannot_tell(folder: Path) -> None:
    """It did not, since no floor could move: whatever it gave away was what the other node was left with."""
    node = Node(folder)
    segment = node.rank(0)
    node.join((0,), Member(AWAY, (1,)))
    node.seal(segment, 3, 4)
    node.run.tick()
    before = hint(segment)
    assert before.aim == 4
    node.run.peer_lost("away", "no answer")
    node.run.tick()
    assert hint(segment) == before


def test_a_trainer_of_an_abandoned_history_is_refused(folder: Path) -> None:
    node = Node(folder)
    node.rank(0)
    node.join((0,), epoch=9)
    told = node.run.join(RankKey("job", "run", 0), Join(8, 3, (Member(HERE, (0,)),)))
    assert told == "epoch 8 of job/run rank 0 is over: epoch 9 has begun here"
    assert node.run.epoch == 9


def test_replicas_go_where_there_is_memory_for_them(folder: Path) -> None:
    node = Node(folder, "roomy", "full")
    node.rank(0)
    node.store.quota_bytes = 64 * MIB
    here = NodeCard("here", "tcp://127.0.0.1:1", memory_bytes=64 * MIB)
    roomy, full = (NodeCard(n, "tcp://127.0.0.1:2", memory_bytes=64 * MIB) for n in ("roomy", "full"))
    members = (
        Member(here, (0,), (20 * MIB,)),
        Member(roomy, (1,), (20 * MIB,)),
        Member(full, (2,), (50 * MIB,)),
    )
    assert node.run.join(RankKey("job", "run", 0), Join(0, -1, members, 1)) == ""
    assert node.run.placement.targets[0] == ("roomy",)
    assert node.run.placement.targets[1] == ("here",)


def test_a_restarted_daemon_goes_on_from_the_floor_that_stands_beside_the_slots(
    folder: Path,
) -> None:
    node = Node(folder)
    segments = node.rank(0), node.rank(1)
    node.join((0, 1), epoch=5)
    for segment in segments:
        node.seal(segment, 3, 4, epoch=5)
    assert node.run.promise.floor == 4
    again = Node(folder, store=node.store)
    again.join((0,), Member(AWAY, (1,)), epoch=5)
    assert again.run.promise == Promise(4)
    assert again.run.span == 2
    # A recovery that went back further has left that history.
    later = Node(folder, store=node.store)
    later.join((0, 1), epoch=6, start=3)
    assert later.run.promise.floor == -1


@pytest.mark.parametrize(("follows", "floor"), [(5, 4), (6, -1)])
def test_a_floor_counts_only_if_this_node_took_part_in_the_epoch_before(
    folder: Path, follows: int, floor: int
) -> None:
    """In between the run may have begun anew: iteration 4 of today is not that of then."""
    node = Node(folder)
    segments = node.rank(0), node.rank(1)
    node.join((0, 1), epoch=5)
    for segment in segments:
        node.seal(segment, 3, 4, epoch=5)
    later = Node(folder, store=node.store)
    told = Join(7, 4, (Member(HERE, (0, 1)),), follows=follows)
    assert later.run.join(RankKey("job", "run", 0), told) == ""
    assert later.run.promise.floor == floor


def test_a_ring_keeps_its_aim_while_its_target_is_away(folder: Path) -> None:
    """The replicas of one rank were behind; the others gave away, for want of slots, what their one
    target held as well. Then one node was lost, which was such a target and the slow one's own: of
    no iteration was all left (elastic campaign, seeds 202 and 205). And once a daemon was down for
    longer than its deadline, every ring gave the floor away: the loss of either node was then the
    loss of everything.
    """
    node, here = Node(folder, "away"), Member(NodeCard("here", "tcp://127.0.0.1:2"), (0, 1))
    segments = node.rank(0), node.rank(1)
    other = Member(NodeCard("away", "tcp://127.0.0.1:1"), (2,))
    for rank, segment in enumerate(segments):
        node.seal(segment, 3, 4, epoch=5)
        assert node.run.join(RankKey("job", "run", rank), Join(5, -1, (here, other), 1, follows=0)) == ""
    assert [hint(s).aim for s in segments] == [4, 4]
    node.run.peer_lost("away", "no answer")
    node.run.tick()
    assert [hint(s).aim for s in segments] == [4, 4]


def test_a_rank_whose_target_is_away_promises_nothing_by_itself(folder: Path) -> None:
    """Both nodes did not hear one another, and each rank vouched for what it alone had. When they
    met again the floor was announced at the newest snapshot, of which there was one copy each; the
    older one, of which there were two, was given away.
    """
    node, here = Node(folder, "away"), Member(NodeCard("here", "tcp://127.0.0.1:2"), (0,))
    segment = node.rank(0)
    other = Member(NodeCard("away", "tcp://127.0.0.1:1"), (1,))
    node.seal(segment, 3, 4, epoch=5)
    assert node.run.join(RankKey("job", "run", 0), Join(5, -1, (here, other), 1, follows=0)) == ""
    node.run.peer_lost("away", "no answer")
    node.run.tick()
    core = node.run.ranks[0].core
    assert core.sole
    assert core.word == NO_INTERVAL


def test_a_restarted_daemon_keeps_what_the_one_before_it_had_promised(folder: Path) -> None:
    """Another rank's word may come at any time, and then what was promised is the floor."""
    node, here = Node(folder), Member(HERE, (0,))
    segment = node.rank(0)
    node.seal(segment, 3, 4, epoch=5)
    join = Join(5, -1, (here, Member(AWAY, (1,))), 1, follows=0)
    assert node.run.join(RankKey("job", "run", 0), join) == ""
    assert (hint(segment).aim, hint(segment).horizon) == (4, 4)
    node.seal(segment, 5, 6, 7, epoch=5)
    again = Node(folder, store=node.store)
    assert again.run.join(RankKey("job", "run", 0), join) == ""
    assert (hint(segment).aim, hint(segment).horizon) == (4, 4)
