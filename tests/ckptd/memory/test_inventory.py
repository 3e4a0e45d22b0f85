"""What the daemon reads of the trainer's part of a descriptor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckptd.memory.inventory import held_segment, operator_names
from tests.ckptd.persistence.slots import descriptor, segment_store


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
