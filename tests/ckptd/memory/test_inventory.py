"""What the daemon reads of the trainer's part of a descriptor, and of step scalars."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.ctl.daemon_commands import snapshots_text
from ckptd.memory import inventory
from ckptd.memory.inventory import MOST_LOST, held_segment, operator_names, rank_snapshots, records_of
from ckptd.memory.segment_file import Segment
from ckptd.storage.image import ImageView
from ckptd.transport.messages import Snapshots
from tests.ckptd.persistence.slots import descriptor, fill, segment_store


@pytest.mark.parametrize(
    ("told", "names"),
    [
        ({"operators": ["a", {"name": "b"}, ["c", "dense"]]}, ("a", "b", "c")),
        (
            {"operators": [["a"], ["b"], ["c"]], "owners": [-1, 4, 0]},
            ("a", "b (rank 4)", "c"),
        ),
        ({"operators": ["a", "b", "c"], "owners": [0]}, ("a", "b", "c")),
        ({"operators": ["a"]}, ("operator 0", "operator 1", "operator 2")),
        (None, ("operator 0", "operator 1", "operator 2")),
    ],
)
def test_operators_are_named_with_the_rank_whose_images_hold_them(told: Any, names: tuple[str, ...]) -> None:
    assert operator_names(msgspec.msgpack.encode(told), 3, rank=0) == names


@pytest.mark.parametrize("policy", ["partial", "selected", "sliding"])
def test_segments_of_partial_snapshots_are_reported_as_such(policy: str, tmp_path: Path) -> None:
    told = descriptor(client=msgspec.msgpack.encode({"policy": policy, "operators": []}))
    segment = segment_store(tmp_path).create(told, 2, 1 << 16)
    try:
        assert held_segment(segment, own=True).partial == (policy == "partial")
    finally:
        segment.close()


def scalars(**experts: Any) -> bytes:
    return msgspec.msgpack.encode({"rng": [1], "experts": {"given": {}, "lost_iterations": 1.0, **experts}})


@pytest.fixture
def segment(tmp_path: Path) -> Iterator[Segment]:
    told = descriptor(partial=True, client=msgspec.msgpack.encode({"policy": "partial", "operators": []}))
    made = segment_store(tmp_path).create(told, 4, 1 << 20)
    yield made
    made.close()


def told_of(segment: Segment, *, operators: bool = False) -> tuple[float, dict[str, float], str]:
    found = rank_snapshots([segment], operators=operators)
    text = snapshots_text(Snapshots((found,)), operators=operators)
    return found.plt, {one.expert: one.tokens for one in found.lost}, text


def test_the_newest_snapshot_says_what_each_expert_has_lost(segment: Segment) -> None:
    lost = {"0.experts": [0.0, 7.0, 0.0], "1.experts": [5.0, 1234.0]}
    fill(segment, 0, 4, partial=True, scalars=scalars(plt=0.01, lost={}))
    assert told_of(segment)[:2] == (0.01, {})
    fill(segment, 1, 5, partial=True, scalars=scalars(plt=0.041029, lost=lost))
    plt, experts, text = told_of(segment)
    assert plt == 0.041029
    assert list(experts.items()) == [("1.experts.1", 1234.0), ("0.experts.1", 7.0), ("1.experts.0", 5.0)]
    assert "lost so far: PLT 4.1029%; most by 1.experts.1 (1,234), 0.experts.1 (7), 1.experts.0 (5)" in text


def test_all_are_told_to_whoever_asks_for_operators(segment: Segment) -> None:
    fill(segment, 0, 4, partial=True, scalars=scalars(plt=0.5, lost={"l": [float(n) for n in range(40)]}))
    assert len(told_of(segment)[1]) == MOST_LOST
    assert len(told_of(segment, operators=True)[1]) == 39, "one has lost nothing"


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"\xff",
        msgspec.msgpack.encode({"rng": [1], "experts": None}),
        scalars(plt="much", lost={}),
        scalars(plt=math.nan, lost={"l": [math.nan, -1.0, math.inf]}),
        scalars(plt=2.0, lost={}),
    ],
)
def test_what_says_nothing_of_it_has_lost_nothing(segment: Segment, says: bytes) -> None:
    fill(segment, 0, 4, partial=True, scalars=says)
    plt, experts, text = told_of(segment)
    assert (plt, experts) == (0.0, {})
    assert "lost so far" not in text


def test_exact_snapshots_are_not_looked_into(tmp_path: Path) -> None:
    told = descriptor(partial=True, client=msgspec.msgpack.encode({"policy": "sliding", "operators": []}))
    segment = segment_store(tmp_path).create(told, 4, 1 << 20)
    try:
        fill(segment, 0, 4, partial=True, scalars=scalars(plt=0.5, lost={"l": [1.0]}))
        assert told_of(segment)[:2] == (0.0, {})
    finally:
        segment.close()


def test_the_image_of_a_sealed_slot_is_read_once_for_what_it_anchors(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was parsed for every slot, at every look: most of a daemon's time with a large ring."""
    fill(segment, 1, 1)
    fill(segment, 2, 2)
    read: list[int] = []

    def noted(image: memoryview) -> Any:
        read.append(len(image))
        return ImageView(image)

    monkeypatch.setattr(inventory, "ImageView", noted)
    before = records_of([segment])
    assert (len(read), records_of([segment])) == (2, before)
    assert len(read) == 2
    fill(segment, 1, 7)
    after = {record.iteration: record.anchors for record in records_of([segment]) if record.sealed}
    assert len(read) == 3
    assert set(after) == {2, 7}
    assert all(after.values())
