"""Exchanging inventories; several real ranks are in tests/e2e."""

from __future__ import annotations

import pytest

from ckptd.client.agreement import exchange_inventories
from ckptd.client.identity import Identity
from ckptd.recovery import RankInventory

INVENTORY = RankInventory(3, ())


def test_alone_there_is_nothing_to_exchange() -> None:
    assert exchange_inventories(Identity("j", "r", 0, 1), INVENTORY) == {0: INVENTORY}


def test_several_ranks_without_a_process_group_are_told_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"call init_process_group\(\) before Checkpointer"):
        exchange_inventories(Identity("j", "r", 0, 2), INVENTORY)
