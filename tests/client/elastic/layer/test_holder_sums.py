"""Which part of a tensor each of its holders adds up. What is added is tested in ``test_layer``."""

from __future__ import annotations

import pytest

from ckptd.client.elastic.layer.expert_tensors import Held


@pytest.mark.parametrize("numel", [0, 1, 2, 7, 12])
@pytest.mark.parametrize("holders", [(4,), (0, 2, 5)])
def test_every_element_is_added_up_by_one_holder_and_as_many_by_each(
    numel: int, holders: tuple[int, ...]
) -> None:
    held = Held(numel, holders)
    elements = [e for rank in holders for e in range(numel)[held.part_of(rank)]]
    assert elements == list(range(numel))
    lengths = [held.length_of(rank) for rank in holders]
    assert max(lengths) - min(lengths) <= 1
