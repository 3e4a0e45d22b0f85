"""Which digests of an image are those of tensors that other ranks hold, too."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import xxhash

from ckptd.core.replication.replica_comparison import DIGEST_BYTES
from ckptd.core.slots.segment_format import ReplicaGroup, decode_descriptor, encode_descriptor
from ckptd.core.slots.slots import SlotState
from ckptd.memory import replicated_digests
from ckptd.memory.replicated_digests import ReplicatedDigests, ReplicatedSets
from ckptd.memory.segment_store import SegmentStore
from ckptd.memory.slot_digests import SealVerdict, seal_slot
from ckptd.storage.image_format import TensorEntry
from tests.ckptd.memory.fresh import DESCRIPTOR
from tests.ckptd.running import MIB, descriptor, fill
from tests.ckptd.snapshots import sealed_snapshot

DP, TP = (1, 3, 5), (2, 3)
TOLD = msgspec.structs.replace(
    DESCRIPTOR, replica_groups=(ReplicaGroup(DP, ("w", "e")), ReplicaGroup(TP, ("norm",)))
)
CONTENT = [
    (TensorEntry(name, "U8", (len(name),)), name.encode())
    for name in (
        *("w", "master/w", "optim/exp_avg/w", "e[0:4]", "optim/exp_avg/e[0:4]", "norm", "alone"),
        *("optim/exp_avg/alone", "buffer/w", "ckptd.scalars", "ckptd.optim_scalars/F32"),
    )
]


def found(told: object = TOLD, known: ReplicatedSets | None = None) -> tuple[ReplicatedDigests, ...]:
    image = memoryview(sealed_snapshot(7, CONTENT).image)
    sets: ReplicatedSets = {} if known is None else known
    return replicated_digests.replicated_digests(told, image, sets)  # type: ignore[arg-type]


def test_digests_are_those_of_the_bytes_by_name() -> None:
    dp, tp = found()
    names = ("e[0:4]", "master/w", "optim/exp_avg/e[0:4]", "optim/exp_avg/w", "w")
    assert (dp.of.ranks, dp.of.names) == (DP, names)
    assert dp.digests == b"".join(xxhash.xxh3_128_digest(n.encode())[:DIGEST_BYTES] for n in names)
    assert (tp.of.ranks, tp.of.names) == (TP, ("norm",))
    assert dp.of.group != tp.of.group


def test_a_rank_outside_of_a_group_and_a_descriptor_without_groups_have_none() -> None:
    assert found(msgspec.structs.replace(TOLD, replica_groups=(ReplicaGroup((0, 1), ("w",)),))) == ()
    assert found(DESCRIPTOR) == ()


def test_the_sets_of_a_layout_are_found_once_and_named_by_their_tensors() -> None:
    known: ReplicatedSets = {}
    first = found(known=known)
    assert [a.of is b.of for a, b in zip(first, found(known=known), strict=True)] == [True, True]
    other = found(msgspec.structs.replace(TOLD, rank=5))[0]
    assert (other.of.group, other.of.number) == (first[0].of.group, first[0].of.number)
    fewer = found(msgspec.structs.replace(TOLD, replica_groups=(ReplicaGroup(DP, ("w",)),)))[0]
    assert fewer.of.group == first[0].of.group
    assert fewer.of.number != first[0].of.number


def test_a_segment_remembers_a_bounded_number_of_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order of anchors that changes for weeks makes ever new ones."""
    monkeypatch.setattr(replicated_digests, "_MAX_LAYOUTS", 3)
    known: ReplicatedSets = dict.fromkeys(range(3), ())
    assert len(found(known=known)) == 2
    assert len(known) == 1


def test_of_too_many_tensors_the_first_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicated_digests, "MAX_REPLICATED_TENSORS", 2)
    assert found()[0].of.names == ("e[0:4]", "master/w")


def test_groups_travel_in_the_descriptor() -> None:
    assert decode_descriptor(encode_descriptor(TOLD)) == TOLD


@pytest.mark.parametrize("by", ["daemon", "trainer"])
def test_a_seal_has_them_whoever_sealed(tmp_path: Path, by: str) -> None:
    """A trainer seals by itself while the daemon is slow: its iterations are compared, too."""
    store = SegmentStore(tmp_path, 64 * MIB, "here", mlock="off", hugepages="off")
    told = msgspec.structs.replace(descriptor(), replica_groups=(ReplicaGroup((0, 1), ("w",)),))
    segment = store.create(told, 2, MIB)
    fill(segment, 0, 7, tensors=(("w", "U8", (3,), b"abc"),), epoch=2)
    first = seal_slot(segment, 0)
    outcome = first if by == "daemon" else seal_slot(segment, 0)
    header = segment.header(0)
    assert header is not None
    assert header.state is SlotState.SEALED
    assert outcome.verdict is (SealVerdict.SEALED if by == "daemon" else SealVerdict.CHANGED)
    assert (outcome.iteration, outcome.epoch) == (7, 2)
    (one,) = outcome.replicated
    assert (one.of.names, one.digests) == (("w",), xxhash.xxh3_128_digest(b"abc")[:DIGEST_BYTES])
    segment.close()
