"""The global batch is the same, in the same order, however many ranks take a share of it."""

from __future__ import annotations

import pytest
import torch

from ckptd.client.elastic.job.global_batch import GlobalBatches, share_of


@pytest.mark.parametrize("total", [0, 1, 7, 8, 100])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 13])
def test_shares_are_all_of_it_once_in_order_and_as_even_as_can_be(total: int, ranks: int) -> None:
    shares = [share_of(total, rank, ranks) for rank in range(ranks)]
    assert [index for share in shares for index in share] == list(range(total))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("total", "rank", "ranks"), [(-1, 0, 1), (4, 2, 2), (4, -1, 2), (4, 0, 0)])
def test_no_such_share(total: int, rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="no such share"):
        share_of(total, rank, ranks)


def test_ranks_of_any_number_take_the_same_batch_together() -> None:
    batches = GlobalBatches(23, 10, seed=4)
    for step in range(12):
        whole = batches.of(step)
        for ranks in (1, 2, 3, 5, 12):
            parts = [batches.mine(step, rank, ranks) for rank in range(ranks)]
            assert torch.equal(torch.cat(parts), whole)


def test_each_pass_has_every_sample_once_in_an_order_of_its_own() -> None:
    batches = GlobalBatches(20, 8, seed=4)
    seen = torch.cat([batches.of(step) for step in range(5)])  # two passes; the third batch spans both
    first, second = seen[:20], seen[20:]
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(20))
    assert first.tolist() != second.tolist()
    assert first.tolist() != sorted(first.tolist())


def test_a_step_is_the_same_whenever_it_is_asked_for() -> None:
    """After a restart nothing of before is known, and a step that is done again sees the same samples."""
    batches = GlobalBatches(11, 4, seed=9)
    steps = [batches.of(step) for step in range(30)]
    for step in (29, 3, 0, 17):
        assert torch.equal(batches.of(step), steps[step])
        assert torch.equal(GlobalBatches(11, 4, seed=9).of(step), steps[step])
    assert not torch.equal(GlobalBatches(11, 4, seed=8).of(0), steps[0])


def test_a_batch_may_be_larger_than_the_data_and_need_not_be_shuffled() -> None:
    assert GlobalBatches(3, 7, shuffle=False).of(1).tolist() == [1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize(("samples", "size"), [(0, 1), (1, 0), (-3, 4)])
def test_nothing_to_train_on(samples: int, size: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        GlobalBatches(samples, size)
