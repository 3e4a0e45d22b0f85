"""Replication, floor and recovery under seeded chaos; the world and its promises are in `replication_world`.

``CKPTD_SIM_REPLICATION_SEEDS`` sets how many seeds are played; ``tests.simulation.campaign`` plays thousands.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from ckptd.replicas import Admit, Deny, Promise, admit
from tests.simulation.replication_world import WorldConfig, play

SEEDS = int(os.environ.get("CKPTD_SIM_REPLICATION_SEEDS", "200"))
# Whatever of this never occurred was not tested.
TROUBLE = (
    "began anew", "busy", "cut off", "daemon crashed", "destroyed", "digest", "fetched", "floor moved",
    "hold failed", "overrode", "replication_peer_lost", "promise checked", "quota", "recovered", "replica removed",
    "replicated", "skipped", "snapshot_suspected", "stale",
)  # fmt: skip


@pytest.mark.slow
def test_every_promise_holds_through_seeded_chaos() -> None:
    """All seeds in one test, so that the counters can show that every kind of trouble occurred."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen.update(play(seed).seen)
    for what in TROUBLE:
        assert seen[what] > 0, f"{SEEDS} seeds never showed: {what} ({dict(seen)})"


def test_a_seed_replays_exactly() -> None:
    assert play(3).trace == play(3).trace


@pytest.mark.slow
def test_a_floor_that_is_merely_the_smallest_newest_end_is_caught() -> None:
    """A rank that began anew holds no suffix that ends at another rank's older end."""
    with pytest.raises(AssertionError, match=r"\([cf]\)"):
        play_all(range(200), WorldConfig(interval_floor=False))


def test_epochs_that_are_merely_counted_are_caught() -> None:
    """Who holds records of epoch n may be away at the next recovery: then there are two epochs n."""
    play(5040)
    with pytest.raises(AssertionError, match=r"\(c\)"):
        play(5040, WorldConfig(unique_epochs=False))


@pytest.mark.slow
def test_a_host_that_knows_no_floor_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator must be able to fail: a host that gives away what the floor needs breaks (c)."""

    def careless(*args: Any, promise: Promise, **kwargs: Any) -> Admit | Deny:
        return admit(*args, promise=Promise(1 << 40, 1 << 40), **kwargs)

    monkeypatch.setattr("tests.simulation.replication_world.admit", careless)
    with pytest.raises(AssertionError, match=r"\([cd]\)"):
        play_all(range(50))


def play_all(seeds: Iterable[int], config: WorldConfig | None = None) -> None:
    for seed in seeds:
        play(seed, config)
