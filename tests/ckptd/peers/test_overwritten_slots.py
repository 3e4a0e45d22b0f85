"""A daemon promises what a ring holds at the very moment at which the trainer of that ring gives a slot away.

The trainer reads the hints, chooses a slot by them, takes its lock, and writes its header. The
daemon writes the hints, looks at the slots, and tells its word. Here each possible moment is
played, on a real segment, with the trainer's code and the daemon's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from ckptd.client.capture.slot_writer import Capture
from ckptd.client.daemon_link.mapped_segment import MappedSegment, SlotTable
from ckptd.client.stats import Stats
from ckptd.core.replication.replicas import spanning_suffix
from ckptd.core.slots.ring import newest_by_iteration
from ckptd.core.slots.segment_format import SlotHeader
from ckptd.core.slots.slots import SlotState
from ckptd.memory.inventory import records_of
from ckptd.memory.segment_file import Segment
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
    assert hint(segment).aim == 5

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
