"""Replay begins before its last snapshots are here: nothing may look at them too early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from ckptd.client.recovery.replay import Replay


class OnTheirWay(Replay):
    """Only the first snapshot has arrived."""

    def __init__(self) -> None:
        self._binding = SimpleNamespace(model=nn.Linear(1, 1))  # type: ignore[assignment]
        self._images = [None] * 4  # type: ignore[list-item]

    def _scalars(self, index: int) -> dict[str, Any]:
        assert index == 0, "this would wait for the transfer"
        return {"buckets": {}, "senders": []}


def test_without_ddp_nobody_waits_for_the_newest_snapshot_to_learn_of_buckets() -> None:
    """Every restore waited for the whole transfer, so replay did not overlap with it any more."""
    assert OnTheirWay().bucket_layouts == {}
