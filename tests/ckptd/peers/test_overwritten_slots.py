"""A daemon promises what a ring holds at the very moment at which the trainer of that ring gives a slot away.

The trainer reads the hints, chooses a slot by them, takes its lock, and writes its header. The
daemon writes the hints, looks at the slots, and tells its word. Here each possible moment is
played, on a real segment, with the trainer's code and the daemon's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from ckptd.client.capture.slot_writer import Capture
from ckptd.client.daemon_link.mapped_segment import MappedSegment, SlotTable
from ckptd.client.stats import Stats
from ckptd.core.replication.copies import Interval
from ckptd.core.replication.replicas import Promise, spanning_suffix
from ckptd.core.replication.target import TargetOpened
from ckptd.core.sessions import RankKey
from ckptd.core.slots.ring import newest_by_iteration
from ckptd.core.slots.segment_format import SlotHeader, slot_lock_byte
from ckptd.core.slots.slots import SlotState
from ckptd.memory import locks
from ckptd.memory.inventory import records_of
from ckptd.memory.segment_file import Segment
from ckptd.peers.runs import Run
from ckptd.transport.messages import Join, Member, NodeCard
from tests.ckptd.peers.test_runs import Node, folder, hint

__all__ = ["folder"]

MOMENTS = ("before the lock", "after the lock", "before the header")


class Trainer:
    """The ring of one rank as its trainer sees it; ``at`` the moment something else happens, once."""

    def __init__(self, mapped: MappedSegment) -> None:
        self.mapped, self.moment, self.happens = mapped, "", lambda: None
        self.stats = Stats()
        binding = Mock()
        binding.buffers.return_value = {}
        self.capture = Capture(
            binding,
            SlotTable([mapped]),
            Mock(),
            Mock(connected=True, **{"submit.return_value": False}),
            num_operators=2,
            stats=self.stats,
            filled=Mock(),
            restless=set(),
        )
        self._lock, mapped.try_lock_slot = mapped.try_lock_slot, self._try_lock  # type: ignore[method-assign]

    def _try_lock(self, index: int) -> bool:
        self.reach("before the lock")
        taken = self._lock(index)
        self.reach("after the lock")
        return taken

    def reach(self, moment: str) -> None:
        if moment == self.moment:
            self.moment = ""
            self.happens()

    def snapshot(self, iteration: int, moment: str, happens: Callable[[], None]) -> int | None:
        """Begin a snapshot; the iteration whose slot it takes, None if it takes none."""
        self.moment, self.happens = moment, happens
        index = self.capture._claim(self.mapped)
        self.reach("before the header")
        assert not self.moment, "it was reached"
        if index is None:
            return None
        before = self.mapped.header(index)
        header = SlotHeader(SlotState.FILLING, iteration, iteration - 1, sequence=iteration + 1)
        self.mapped.begin_filling(index, header)
        return None if before is None else before.iteration


@contextmanager
def trainer(segment: Segment) -> Iterator[Trainer]:
    mapped = MappedSegment(str(segment.path), segment.generation)
    try:
        yield Trainer(mapped)
    finally:
        mapped.close()


@contextmanager
def being_read(slots: Sequence[tuple[Path, int]]) -> Iterator[None]:
    """Somebody reads these, so that the trainer passes over them."""
    with ExitStack() as stack:
        for path, index in slots:
            lock = locks.lock_file(path, slot_lock_byte(index), exclusive=False)
            assert stack.enter_context(lock)
        yield


def holds(segment: Segment, end: int) -> bool:
    newest = newest_by_iteration(records_of([segment]))
    return spanning_suffix(newest, 2, 2, end=end) is not None


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_floor_is_announced_of_no_suffix_that_was_just_given_away(folder: Path, moment: str) -> None:
    """Two ranks of one node, whose rings are all that there is. The ring of rank 0 keeps the floor,
    4, and its aim, 5; its trainer chose to overwrite iteration 6, and before it had written the
    header rank 1 came up, floor and aim moved on, and the daemon promised 7, for which 6 was there
    still. The floor was announced at 6, which rank 0 did not have any more: the promise was broken
    with everybody alive.
    """
    node = Node(folder)
    segment, slow = node.rank(0), node.rank(1)
    node.join((0, 1))
    node.seal(segment, 3, 4, 5)
    node.seal(slow, 3, 4)
    node.seal(segment, 6, 7, 8)
    assert node.run.promise.floor == 4
    assert (hint(segment).sole, hint(segment).aim) == (True, 5)

    def comes_up() -> None:
        node.seal(slow, 5, 6)

    with trainer(segment) as training:
        lost = training.snapshot(9, moment, comes_up)
        node.run.tick()
        assert holds(segment, node.run.promise.floor), (lost, node.run.promise)
        assert holds(slow, node.run.promise.floor)
        assert node.run.promise.floor >= 5, "the run goes on"
        if moment == "before the lock":
            assert (lost, node.run.promise.floor) == (3, 6), "another one was chosen"


def both_know(run: Run, segment: Segment, **held: tuple[int, ...]) -> None:
    """Each of these nodes answers, and says which of the ring's snapshots it holds."""
    records = {record.iteration: record for record in records_of([segment])}
    for name, iterations in held.items():
        told = tuple(records[iteration] for iteration in iterations)
        run.ranks[0].feed(TargetOpened(name, segment.generation, 1, told, "boot"))


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_ring_that_becomes_one_of_two_copies_while_it_gives_a_slot_away(folder: Path, moment: str) -> None:
    """Two nodes hold the floor, 4, so the ring may give away what it likes; one of them holds 5 and
    6, too. While that trainer was about to overwrite 5 (3 and 4 were being uploaded), the other
    node was lost: the hint `sole` came up, and the rank gave its word for 6, on the strength of a
    node and of its own ring, which had no 5 any more: the loss of that node would have been the
    loss of the floor.
    """
    node = Node(folder, "one", "other")
    segment = node.rank(0)
    here = Member(NodeCard("here", "tcp://127.0.0.1:2"), (0,))
    members = (
        here,
        Member(NodeCard("one", "tcp://127.0.0.1:1"), (1,)),
        Member(NodeCard("other", "tcp://127.0.0.1:3"), (2,)),
    )
    node.seal(segment, 3, 4, 5, 6, 7, 8)
    assert node.run.join(RankKey("job", "run", 0), Join(0, -1, members, 2)) == ""
    both_know(node.run, segment, one=(3, 4, 5, 6), other=(3, 4))
    node.run.promise = Promise(4, 4)
    node.run.ranks[0].agreed(node.run.promise)
    node.run.tick()
    core = node.run.ranks[0].core
    assert core.word == Interval(4, 4)
    assert not hint(segment).sole
    tree = node.run._tree
    assert tree is not None
    uploads = [(segment.path, index) for index in (3, 4)]
    with (
        trainer(segment) as training,
        being_read(uploads),
        patch.object(tree, "set_rank", wraps=tree.set_rank) as tell,
    ):
        lost = training.snapshot(9, moment, lambda: node.run.peer_lost("other", "no answer"))
        node.run.tick()
        assert hint(segment).sole
        promised = max((call.args[1] for call in tell.call_args_list), default=-1)
        assert promised <= 4 or holds(segment, promised), (lost, tell.call_args_list)
        if moment == "before the lock":
            assert (lost, promised) == (None, 6), "what is promised stays"
