"""Exchanging what ranks say; several real ranks are in tests/e2e."""

from __future__ import annotations

import pytest

from ckptd.client.agreement import exchange
from ckptd.client.identity import Identity


def test_alone_one_hears_oneself() -> None:
    assert exchange(Identity("j", "r", 0, 1), b"said") == [b"said"]


def test_several_ranks_without_a_process_group_are_told_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"call init_process_group\(\) before Checkpointer"):
        exchange(Identity("j", "r", 0, 2), b"said")
