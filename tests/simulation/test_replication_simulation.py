"""Replication, floor and recovery under seeded chaos; the world and its promises are in `replication_world`.

``CKPTD_SIM_REPLICATION_SEEDS`` sets how many seeds are played; ``tests.simulation.campaign`` plays thousands.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from ckptd.replication.replicas import Admit, Deny, Promise, admit
from tests.simulation.replication_world import WorldConfig, play

SEEDS = int(os.environ.get("CKPTD_SIM_REPLICATION_SEEDS", "200"))
# Whatever of this never occurred was not tested.
TROUBLE = (
    "began anew", "busy", "cut off", "daemon crashed", "destroyed", "digest", "fetched", "floor moved",
    "generation dropped", "grown", "growth refused", "hold failed", "missed", "overrode", "promise checked", "quota",
    "recovered", "replica removed", "replicated", "replication_peer_lost", "skipped", "snapshot_suspected", "stale",
    "waited", "widened",
)  # fmt: skip


@pytest.mark.slow
def test_every_promise_holds_through_seeded_chaos() -> None:
    """All seeds in one test, so that the counters can show that every kind of trouble occurred."""
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen.update(play(seed).seen)
    for what in TROUBLE:
        assert seen[what] > 0, f"{SEEDS} seeds never showed: {what} ({dict(seen)})"


@pytest.mark.parametrize("seed", [2086, 5091, 5429, 11445, 13400, 16406])
def test_seeds_that_broke_a_promise_once(seed: int) -> None:
    """Each showed a rule that was wrong; of thousands played it was the only one."""
    play(seed)


def test_a_seed_replays_exactly() -> None:
    assert play(3).trace == play(3).trace


@pytest.mark.parametrize(
    ("config", "seed"),
    [
        (WorldConfig(hard_until_held=False), 54),
        (WorldConfig(reads_anew=False), 181),
        (WorldConfig(carries=False), 138),
        (WorldConfig(counts_span=False), 308),
    ],
    ids=["hard", "anew", "carries", "span"],
)
def test_a_rule_that_is_left_out_is_missed(config: WorldConfig, seed: int) -> None:
    """What each of them says is in `WorldConfig`; the seed is one that shows why."""
    play(seed)
    with pytest.raises(AssertionError, match=r"\([cf]\)"):
        play(seed, config)


@pytest.mark.slow
def test_a_host_that_knows_no_floor_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator must be able to fail: a host that gives away what the floor needs breaks (c)."""

    def careless(*args: Any, promise: Promise, **kwargs: Any) -> Admit | Deny:
        return admit(*args, promise=Promise(1 << 40, 1 << 40), **kwargs)

    monkeypatch.setattr("tests.simulation.hosts.admit", careless)
    with pytest.raises(AssertionError, match=r"\([cd]\)"):
        play_all(range(50))


def play_all(seeds: Iterable[int], config: WorldConfig | None = None) -> None:
    for seed in seeds:
        play(seed, config)
