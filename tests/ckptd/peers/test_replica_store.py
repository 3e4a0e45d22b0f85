"""Replicas that an earlier daemon left, as files: what is taken over, put right, or put aside."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptd.core.slots.segment_format import (
    SlotHeader,
    origin_of,
    replica_file_name,
)
from ckptd.core.slots.slots import SlotState
from ckptd.memory.segment_file import Segment
from ckptd.memory.segment_store import SegmentStore
from ckptd.peers.replica_store import ReplicaStore
from tests.ckptd.memory.fresh import put_header
from tests.ckptd.running import descriptor
from tests.ckptd.snapshots import states_in

DESCRIPTOR = descriptor(node_id="away", created_at_ns=1, window=1, num_operators=1)


@pytest.fixture
def store(tmp_path: Path) -> SegmentStore:
    return SegmentStore(tmp_path, 1 << 30, "node", mlock="off", hugepages="off")


def make(store: SegmentStore, num_slots: int = 3) -> Segment:
    """A replica as a daemon leaves it."""
    plan = ReplicaStore(store).plan(DESCRIPTOR, num_slots, 4096, origin_of(DESCRIPTOR))
    segment = store.build(plan)
    store.enter(plan, segment)
    return segment


def other_version(path: Path) -> None:
    path.write_bytes(b"CKPTDSEG" + (1).to_bytes(4, "little") + bytes(8192))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def of_another_name(path: Path) -> None:
    path.write_bytes(path.with_name(next(path.parent.glob("*.rep")).name).read_bytes())


@pytest.mark.parametrize("damage", [other_version, empty, of_another_name])
def test_a_replica_that_cannot_be_believed_is_put_aside_and_the_rest_is_served(
    store: SegmentStore, damage: object
) -> None:
    """Such a file, of another version for example, kept the daemon from ever starting again."""
    good = make(store).path
    path = store.folder / replica_file_name("job", "run", 7, 0, "0" * 16)
    assert callable(damage)
    damage(path)
    adopted = ReplicaStore(store).adopt()
    found, bad, damaged = adopted.segments, adopted.bad, adopted.damaged
    assert [segment.path for segment in found] == [good]
    aside = path.with_name(path.name + ".bad")
    assert [name for name, _ in bad] == [aside]
    assert aside.exists()
    assert not path.exists()
    assert damaged == []


def test_slots_that_nobody_goes_on_with_are_free_again(store: SegmentStore) -> None:
    """A slot with a damaged header, too: it was neither granted nor reported ever again."""
    segment = make(store, 4)
    states = (SlotState.SEALED, SlotState.FILLING, SlotState.SEALED, SlotState.FILLED)
    for index, state in enumerate(states):
        header = SlotHeader(state=state, iteration=index, image_len=100)
        put_header(segment.buffer, segment.geometry, index, header)
    at = segment.geometry.header_offset(2)
    segment.buffer[at + 8] ^= 1
    assert segment.header(2) is None
    adopted = ReplicaStore(store).adopt()
    (found,), bad, damaged = adopted.segments, adopted.bad, adopted.damaged
    assert not bad
    assert damaged == [(found, 2)]
    free = SlotState.FREE
    assert states_in(segment.path) == [SlotState.SEALED, free, free, free]
    assert ReplicaStore(store).adopt().damaged == [], "it is reported once"
