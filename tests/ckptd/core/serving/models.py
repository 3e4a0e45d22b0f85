"""Small decoder models, for tests."""

from __future__ import annotations

from typing import Any

from ckptd.core.serving.served_model import ServedModel
from ckptd.core.serving.unit_placement import UnitPlacement

__all__ = ["decoder", "total_spread"]


def decoder(layers: int = 2, kv_heads: int = 3, **more: Any) -> ServedModel:
    """Two query heads for each KV head, hidden 10, a dense MLP of 12 columns in blocks of 4."""
    given: dict[str, Any] = {
        "family": "llama",
        "layers": layers,
        "query_heads": 2 * kv_heads,
        "kv_heads": kv_heads,
        "head_dim": 4,
        "hidden": 10,
        "columns": 12,
        "column_block": 4,
    }
    return ServedModel(**(given | more))


def total_spread(placement: UnitPlacement) -> int:
    """By how many units of their own the fullest device exceeds the emptiest, over all layers."""
    owners = [owner for row in placement.owners for owner in row]
    totals = [owners.count(device) for device in placement.devices]
    return max(totals) - min(totals)
