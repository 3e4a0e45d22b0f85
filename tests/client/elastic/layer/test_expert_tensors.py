"""Rounds of expert tensors, and their parts on holders and owners."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from ckptd.client.elastic.layer import expert_tensors
from ckptd.client.elastic.layer.expert_tensors import ExpertTensor, cut, joined, rounds
from ckptd.core.elastic.incarnations import shard_length


def test_a_round_ends_before_its_busiest_rank_has_too_much() -> None:
    """What is larger than a round has one of its own."""
    sizes = [(4, (0, 1)), (4, (1,)), (3, (0,)), (20, (2,)), (1, (0,)), (1, (2,))]
    listed = [ExpertTensor(n, 0, numel, holders) for n, (numel, holders) in enumerate(sizes)]
    with patch.object(expert_tensors, "_ROUND_BYTES", 16):
        found = [[piece.expert for piece in some] for some in rounds(listed, 3, 2)]
    assert found == [[0, 1, 2], [3, 4], [5]]
    assert list(rounds([], 3, 2)) == []


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("numel", [0, 1, 2, 6, 7, 20])
def test_shards_are_of_one_length_and_give_the_tensor_back(numel: int, ranks: int) -> None:
    flat = torch.arange(1.0, numel + 1)
    shards = cut(flat, ranks)
    assert shards.shape == (ranks, shard_length(numel, ranks))
    assert torch.equal(joined(list(shards), numel), flat)
    assert int((shards != 0).sum()) == numel, "the rest is zeros"


@pytest.mark.parametrize("numel", [0, 1, 2, 7, 12])
@pytest.mark.parametrize("holders", [(4,), (0, 2, 5)])
def test_every_element_is_added_up_by_one_holder_and_as_many_by_each(
    numel: int, holders: tuple[int, ...]
) -> None:
    tensor = ExpertTensor(0, 0, numel, holders)
    parts = [range(numel)[tensor.part_of(rank)] for rank in holders]
    assert [element for part in parts for element in part] == list(range(numel))
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
