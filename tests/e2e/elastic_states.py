"""What ranks of an elastic job were, put together and compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.e2e.compare import same_values

__all__ = ["joined_shards", "same"]


def joined_shards(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Every parameter of which there are shards, and its optimizer state, whole; numbers after a
    check that they are the same on all ranks.
    """
    found: dict[str, Any] = {}
    for name, part in ranks[0]["parts"].items():
        parts = [rank["parts"][name] for rank in ranks]
        numel = ranks[0]["numels"][name.partition("/")[0]]
        if part.ndim:
            row = torch.cat(parts)
            assert not row[numel:].count_nonzero(), f"the padding of {name}"
            found[f"shards of {name}"] = row[:numel]
        else:
            assert all(same(part, one) for one in parts), name
            found[f"shards of {name}"] = part
    return found


def same(one: Any, other: Any) -> bool:
    """To the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and same_values(one, other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
