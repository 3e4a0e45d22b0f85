"""Which generations of a rank belong together."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import msgspec
import pytest

from ckptd.client.daemon_link.generations import Generations
from ckptd.client.daemon_link.mapped_segment import MappedSegment
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.core.recovery.global_plan import SnapshotCopy, SnapshotToLoad
from ckptd.core.slots.ring import SlotRecord, SlotState
from ckptd.holdings import operators_id
from tests.ckptd.running import MIB
from tests.client.daemon_link.test_rank_memory import attached


@pytest.fixture
def memory(endpoint: str) -> Iterator[RankMemory]:
    with attached(endpoint, uuid.uuid4().hex[:8]) as found:
        yield found


def generation(memory: RankMemory, table: str) -> MappedSegment:
    payload = msgspec.msgpack.encode({"operators": [table]})
    return memory.reserve(MIB, 4, window=1, num_operators=1, payload=payload)


def test_those_with_the_newest_table_are_current(memory: RankMemory) -> None:
    assert Generations().current() == []
    assert Generations().newest is None
    a, b, c, d = (generation(memory, table) for table in "abac")
    found = Generations()
    for segment, current in ((a, [a]), (b, [b]), (c, [c])):
        found.add(segment)
        assert found.current() == current
        assert found.newest is segment
    found.remove(b)
    assert found.current() == [a, c], "nothing unlike lies between them any more"
    found.add(d)
    table_of_a = (1, operators_id(a.descriptor))
    assert found.newer_than_table(table_of_a) == [d]
    assert found.newer_than_table((1, operators_id(d.descriptor))) == []
    assert found.newer_than_table((7, "unknown")) == [], "none is given up for a table not here"


def test_an_own_copy_is_one_on_this_node_that_is_mapped(memory: RankMemory) -> None:
    segment = generation(memory, "a")
    found = Generations()
    name = segment.path.rpartition("/")[2]
    record = SlotRecord(7, 0, SlotState.SEALED, iteration=5)
    elsewhere = SnapshotCopy("elsewhere", name, 1)
    piece = SnapshotToLoad(record, (elsewhere, SnapshotCopy("here", name, 2)))
    assert found.own_copy("here", piece) is None
    found.add(segment)
    own = found.own_copy("here", piece)
    assert own is not None
    assert (own.generation, own.index, own.iteration) == (segment.generation, 2, 5)
    assert found.of(own) is segment
    assert found.own_copy("here", SnapshotToLoad(record, (elsewhere,))) is None


def test_a_run_goes_on_only_in_slots_that_were_made_for_its_window(memory: RankMemory) -> None:
    """A wider window has smaller slots: what is recorded under the old one would not fit into them."""
    payload = msgspec.msgpack.encode({"operators": ["a"]})

    def made(slot_bytes: int, slots: int, window: int) -> MappedSegment:
        return memory.reserve(slot_bytes, slots, window=window, num_operators=1, payload=payload)

    used, grown, wider = made(MIB, 4, 2), made(MIB, 6, 2), made(MIB // 2, 5, 3)
    found = Generations()
    for segment in (used, grown, wider):
        found.add(segment)
    assert found.of_another_window(used) == [wider]
    assert found.of_another_window(wider) == []
