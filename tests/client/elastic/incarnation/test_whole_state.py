"""Experts on shards in an elastic job, on three ranks of gloo: errors are raised on all, and training equals that
of one process.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.client.elastic.job.shard_ranks import (
    EXPERTS,
    RANKS,
    WIDTH,
    Expert,
    Found,
    crowded,
    run_all,
    sgd,
)
from tests.client.gloo_ranks import run_in_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("sharding")
    run_in_ranks(run_all, RANKS, folder, str(folder))
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize(
    ("work", "words"),
    [
        ("one_has_shards", "rank 0 called checkpointer(), rank 1 shards()"),
        ("not_by_element", "must update each element by itself"),
        ("a_tensor_that_cannot_be_cut", "must update each element by itself"),
        ("other_masters", "rank 2: other layers or masters than rank 0"),
        ("buffers", "has buffers, which have no optimizer"),
        ("twice", "call shards() once in an incarnation"),
        ("an_optimizer_that_knows_the_experts", "make it after shards()"),
    ],
)
def test_what_cannot_be_is_refused_on_all_ranks(found: list[Found], work: str, words: str) -> None:
    for one in found:
        assert one[work].startswith("ValueError"), one[work]
        assert words in one[work]


def test_the_norm_counts_each_element_once_and_the_steps_are_those_of_one_place(
    found: list[Found],
) -> None:
    experts = nn.ModuleList(Expert(number) for number in range(EXPERTS))
    torch.manual_seed(1)
    gate = nn.Linear(WIDTH, EXPERTS, dtype=torch.float64)
    params = [*gate.parameters(), *experts.parameters()]
    optimizer, norms = sgd(params), []
    for step in range(3):
        for rank in range(RANKS):
            generator = torch.Generator().manual_seed(10 * step + rank)
            tokens = torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)
            weights, chosen = gate(tokens).softmax(-1).topk(2)
            each = torch.stack([expert(tokens) for expert in experts], 1)
            picked = each.gather(1, chosen.unsqueeze(-1).expand(-1, -1, WIDTH))
            (picked * weights.unsqueeze(-1)).sum(1).square().sum().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    assert min(norms) > 0.5, "gradients were clipped"
    for one in found:
        assert one["trained"]["norms"] == pytest.approx(norms, rel=1e-10)
        assert torch.allclose(one["trained"]["gate"], gate.weight, rtol=1e-10)
        for number, weight in one["trained"]["experts"].items():
            assert torch.allclose(weight, experts[number].up.weight, rtol=1e-10), number
            full = found[0]["trained"]["full"]
            assert torch.equal(full[f"moe.{number}.up.weight"], weight), "a model file has it"


def test_experts_are_where_they_were_last_placed(found: list[Found]) -> None:
    first, second, third, fourth = found[0]["trained"]["placements"]
    assert np.array_equal(second, crowded().numpy())
    for placed in (first, third, fourth):
        assert (placed.sum(axis=0) >= 1).all()
        assert (placed.sum(axis=1) <= 3).all(), "no rank has more than its slots"
        assert placed.sum() == 3 * RANKS, "all slots are used"
    for one in found[1:]:
        assert all(map(np.array_equal, one["trained"]["placements"], found[0]["trained"]["placements"]))
