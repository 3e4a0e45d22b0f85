"""Stages of a pipeline that are lost again and again: seeds, what they met, and rules that are broken on purpose."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation.mutations import caught_after
from tests.simulation.parking_mutations import PARKING_MUTATIONS
from tests.simulation.parking_world import play_parking


def test_what_is_parked_and_logged_brings_lost_stages_back() -> None:
    seen: Counter[str] = Counter()
    for seed in range(20):
        seen.update(play_parking(seed).seen)
    kinds = ("parked", "moved", "copied", "replays")
    for what in (*(f"rank {kind}" for kind in kinds), "localized", "global", "copy discarded", "not parked"):
        assert seen[what] > 0, f"never: {what}: {seen}"


def test_a_seed_replays_exactly() -> None:
    assert play_parking(1).trace == play_parking(1).trace


@pytest.mark.parametrize("name", ["a torn copy is sealed", "any peer will do"])
def test_a_broken_rule_is_caught(name: str) -> None:
    seeds, why = caught_after(PARKING_MUTATIONS[name], limit=10)
    assert seeds > 0, f"10 seeds do not show why {PARKING_MUTATIONS[name].rule}"
    assert "(p" in why
