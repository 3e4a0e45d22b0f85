"""Random subsets of all faults, the least that a failing seed needs, and rules that are broken on purpose.

``CKPTD_SIM_SWARM_SEEDS`` sets how many seeds are played; ``tests.simulation.campaign`` plays thousands.
"""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest

from ckptd.core.replication.replicator import Replicator
from tests.simulation.campaign import coverage_table, waivers
from tests.simulation.model import Hint, WorldConfig
from tests.simulation.mutations import MUTATIONS, QUICK, Mutation, caught_after
from tests.simulation.shrinker import described, shrink
from tests.simulation.swarm import CONDITIONS, PHASES, STRIKES, Swarm, coverage_key, play_swarm
from tests.simulation.torn_hints import torn

SEEDS = int(os.environ.get("CKPTD_SIM_SWARM_SEEDS", "40"))


@pytest.mark.slow
def test_every_promise_holds_under_any_subset_of_faults() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen.update(play_swarm(seed).seen)
    told = f"\n{coverage_table(seen)}\n{waivers(seen)}"
    for fault in (*STRIKES, *CONDITIONS):
        assert any(seen[coverage_key(fault, phase)] for phase in PHASES), f"never: {fault}{told}"
    for phase in PHASES:
        assert any(seen[coverage_key(fault, phase)] for fault in STRIKES), f"never: {phase}{told}"
    for what in ("losses asked", "waived: rot", "waived: no memory", "died while filling", "hint torn"):
        assert seen[what] > 0, f"never: {what}{told}"
    excused = sum(count for what, count in seen.items() if what.startswith("waived"))
    assert excused < seen["losses asked"] / 10, told


def test_a_swarm_replays_exactly_and_a_left_out_strike_leaves_the_others_as_they_are() -> None:
    assert play_swarm(4).trace == play_swarm(4).trace
    world = Swarm(4)
    without = Swarm(4, WorldConfig(strikes=frozenset({1})))
    assert [s for s in without.fates if s.number == 1] == [s for s in world.fates if s.number == 1]
    without.play()
    struck = [line for line in without.trace if "strike" in line]
    assert len(struck) <= 1


def test_what_a_replicator_remembers_is_what_it_would_compute_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aim, word, and what targets need are kept until something changes of which they follow."""
    validate, compared = Replicator._validate, Counter[str]()

    def compare(self: Replicator) -> None:
        validate(self)
        copies, agreed = self._copies, self._agreed
        assert self.word == self._promisable()
        for target in copies.targets:
            missing, target._missing_of = target._needed(), None
            assert missing == target._needed()
        if agreed is not None and self._settled == self._facts():
            compared["settled"] += 1
            stood = copies.aim, copies.blocked
            copies.take_aim(agreed.floor, agreed.horizon, [target.copies for target in self._counted()])
            assert stood == (copies.aim, copies.blocked)
            assert self._promisable().last <= copies.vouched

    monkeypatch.setattr(Replicator, "_validate", compare)
    for seed in range(4):
        play_swarm(seed)
    assert compared["settled"] > 100


def test_a_failing_seed_is_made_small() -> None:
    """Of a play that fails where two faults meet, these two are left, and hardly any time."""
    seed = next(s for s in range(200) if {"daemon dies", "ranks apart"} <= {*Swarm(s).faults})

    def play(seed: int, config: WorldConfig) -> None:
        world = Swarm(seed, config)
        wanted = {"daemon dies", "ranks apart"} <= world.faults
        numbers = [s.number for s in world.fates if s.fault == "daemon dies"]
        assert not (wanted and numbers[0] in (world.config.strikes or ())), "(c) both"

    small, failure = shrink(seed, play=play)
    assert failure == "(c)"
    assert small.faults == frozenset({"daemon dies", "ranks apart"})
    assert len(small.strikes or ()) == 1
    assert small.most_nodes == 2
    assert f"play_swarm({seed}, " in described(seed, small)


def test_a_seed_that_does_not_fail_is_not_made_small() -> None:
    with pytest.raises(ValueError, match="does not fail"):
        shrink(0, play=lambda seed, config: None)


@pytest.mark.parametrize("name", [name for name in MUTATIONS if name in QUICK])
def test_a_broken_rule_is_caught(name: str) -> None:
    seeds, why = caught_after(MUTATIONS[name], limit=50)
    assert seeds > 0, f"50 seeds do not show why {MUTATIONS[name].rule}"
    assert "Error" in why


def test_what_breaks_nothing_is_not_caught() -> None:
    assert caught_after(Mutation("nothing"), limit=2) == (-1, "")


def test_a_torn_hint_is_a_mixture_of_the_old_and_the_new_one() -> None:
    """No field has another value than that of one of them, but for what must not be mixed."""
    before, after = Hint(7, 9, 3, 1, 11), Hint(12, 13, 4, 2, 15)
    found = {torn(before, after, random.Random(seed)) for seed in range(100)}
    assert before in found
    assert len(found) > 3
    for hint in found:
        assert all(value in (old, new, -1) for value, old, new in zip(hint, before, after, strict=True))
