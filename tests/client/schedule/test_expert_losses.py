"""Tokens whose updates are lost, counted over several recoveries and ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ckptd.client.model.operators import Operator, ParameterRows
from ckptd.client.schedule.expert_losses import RECORDED, CapacityBoost, ExpertLosses, LostUpdates
from ckptd.core.durable_experts import DurableTurns
from ckptd.core.snapshot_policy import OperatorKind, PartialScope

OPERATORS = [
    Operator("dense", OperatorKind.DENSE, (ParameterRows("dense"),)),
    *(
        Operator(f"experts.{i}", OperatorKind.EXPERT, (ParameterRows(f"experts.{i}"),), expert=("experts", i))
        for i in range(3)
    ),
]


class Counts:
    """A counter of tokens that a test sets."""

    def __init__(self, *counts: float) -> None:
        self.counts: Any = list(counts)

    def totals(self) -> dict[str, Any]:
        return {"experts": self.counts}

    def resume(self, totals: dict[str, list[float]]) -> None:
        self.counts = totals["experts"]


class Ranks:
    """Gathers what this rank and others tell."""

    def __init__(self, *others: Any) -> None:
        self.others = others

    def gather(self, mine: Any, kind: type) -> list[Any]:
        assert isinstance(mine, kind)
        self.mine = mine
        return [mine, *self.others]


def recovered(
    losses: ExpertLosses, snapshots: dict[int, Any], iterations: Sequence[int], *others: Any
) -> tuple[Any, Any]:
    """The losses of a recovery that takes expert i from the snapshot of ``iterations[i]``."""
    ranks: Any = Ranks(*others)
    end = max(snapshots)
    found = losses.resume(
        OPERATORS,
        {i: {RECORDED: scalars} for i, scalars in snapshots.items()},
        {0: end, **{i + 1: at for i, at in enumerate(iterations)}},
        ranks,
        PartialScope.BOTH,
    )
    return found, ranks.mine


def snapshot(counts: Counts, losses: ExpertLosses) -> dict[str, Any]:
    return copy.deepcopy(losses.record())


def test_a_snapshot_says_what_storage_shall_have_of_experts() -> None:
    counter: Any = Counts(1, 2, 3)
    assert ExpertLosses(counter).record()["durable"] is None
    found = ExpertLosses(counter, DurableTurns(2, 8, 0.01)).record()
    assert found["durable"] == {"experts": 2, "of": 8, "limit": 0.01}


@pytest.mark.parametrize("fused", [False, True])
def test_two_recoveries_count_no_token_twice(fused: bool) -> None:
    counter: Any = Counts()

    def count(*counts: float) -> None:
        counter.counts = torch.tensor(counts, dtype=torch.float64) if fused else list(counts)

    losses = ExpertLosses(counter)
    taken = {}
    for iteration, counts in ((8, (10, 0, 5)), (9, (12, 3, 5)), (10, (20, 4, 6))):
        count(*counts)
        taken[iteration] = snapshot(counter, losses)
    found, _ = recovered(losses, taken, (8, 10, 9))
    assert found.tokens == {"experts.0": 10, "experts.2": 1}
    assert found.iterations == {"experts.0": 8, "experts.2": 9}
    assert found.plt == found.cumulative_plt == 11 / 30
    assert losses.lost_iterations == 10 * 11 / 30
    assert counter.counts == [20, 4, 6]
    assert losses.captured == {("experts", 0): 20, ("experts", 1): 4, ("experts", 2): 6}
    assert (
        "weights and optimizer state of 2 of 3 experts are those of earlier iterations, from 8 on"
        in found.text
    )
    assert found.text.endswith("; here most by experts.0 (10, of iteration 8), experts.2 (1, of iteration 9)")

    # Expert 0 was in no snapshot between the recoveries: the 10 tokens are lost once.
    count(24, 4, 9)
    taken = {8: taken[8], 11: snapshot(counter, losses)}
    found, _ = recovered(losses, taken, (8, 11, 11))
    assert found.tokens == {"experts.0": 4}
    assert found.plt == 4 / 37
    assert found.cumulative_plt == 15 / 37


def test_the_sums_of_all_ranks_count() -> None:
    one, other = ExpertLosses(Counts(10, 10, 10)), ExpertLosses(Counts(30, 0, 0))  # type: ignore[arg-type]
    taken = [{4: losses.record(), 5: losses.record()} for losses in (one, other)]
    taken[1][4] = {**taken[1][4], "given": {"experts": [20, 0, 0]}}
    _, told = recovered(other, taken[1], (4, 5, 5))
    found, _ = recovered(one, taken[0], (4, 5, 5), told)
    assert found.tokens == {}
    assert found.plt == 10 / 60


def test_without_counts_each_iteration_counts_alike() -> None:
    """Nobody counts in a compiled model."""
    losses = ExpertLosses(Counts(0, 0, 0))  # type: ignore[arg-type]
    taken = {10: losses.record(), 12: losses.record()}
    found, _ = recovered(losses, taken, (10, 12, 12))
    assert found.plt == 2 / 2 / 12
    assert "an estimate" in found.text


class TestCapacityBoost:
    def test_a_tenth_more_until_the_lost_tokens_are_made_up_for(self) -> None:
        boost = CapacityBoost()
        boost.add(None)
        boost.add(LostUpdates({"experts.0": 15}, {"experts.0": 3}, 0.1, 0.1, ""))
        assert boost.capacity("experts.0", 100) == 110
        assert boost.capacity("experts.1", 100) == 100
        boost.processed("experts.0", 80, 100)
        assert boost.left == {"experts.0": 15}
        boost.processed("experts.0", 110, 100)
        assert boost.capacity("experts.0", 100) == 105
        boost.processed("experts.0", 105, 100)
        assert boost.left == {}

    def test_what_is_left_survives_a_failure_that_loses_more(self) -> None:
        boost, after = CapacityBoost(0.5), CapacityBoost(0.5)
        boost.add(LostUpdates({"a": 4}, {"a": 1}, 0.1, 0.1, ""))
        after.load_state_dict(boost.state_dict())
        after.add(LostUpdates({"a": 3, "b": 2}, {"a": 1, "b": 1}, 0.1, 0.2, ""))
        assert after.left == {"a": 7, "b": 2}

    @pytest.mark.parametrize("share", [0.0, -1.0, float("nan")])
    def test_a_share_of_nothing_is_refused(self, share: float) -> None:
        with pytest.raises(ValueError, match="pass the part of a capacity that is added"):
            CapacityBoost(share)
