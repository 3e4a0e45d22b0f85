"""All ranks meet, or all that come hear who did not; also where the store itself is lost, and where
it only is slow.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptd.client.ranks import store_barrier as module
from ckptd.client.ranks.store_barrier import wait_at
from ckptd.errors import DaemonUnavailable
from tests.client.watched_ranks import Ranks, store_process


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True)  # type: ignore[attr-defined]


def meet(store: Any, rank: int, world_size: int, deadline_s: float) -> str:
    """How it ended for this rank."""
    try:
        wait_at(store.clone(), "m", 1, rank=rank, world_size=world_size, deadline_s=deadline_s)
    except DaemonUnavailable as error:
        return str(error)
    return "met"


def test_many_ranks_meet(store: Any) -> None:
    """More than one block of them."""
    with ThreadPoolExecutor(100) as pool:
        found = list(pool.map(lambda rank: meet(store, rank, 100, 30), range(100)))
    assert found == ["met"] * 100


def test_who_is_missing_is_named_and_comes_too_late(store: Any) -> None:
    """Those that waited have given up: a rank that comes afterwards must not go on alone."""
    away = {5, 61, *range(70, 90)}
    with ThreadPoolExecutor(100) as pool:
        came = [rank for rank in range(100) if rank not in away]
        found = set(pool.map(lambda rank: meet(store, rank, 100, 1.0), came))
    (told,) = found
    assert "ranks 5, 61, 70, 71, 72, 73, 74, 75, … of 100 did not come within 1 s" in told
    assert meet(store, 5, 100, 30) == told


def test_a_rank_that_comes_in_the_last_moment_decides_for_all(store: Any) -> None:
    """The verdict is written once: all met, or none did."""
    for number in range(20):
        found: list[str] = []

        def come(rank: int, at: str = f"m{number}", found: list[str] = found) -> None:
            try:
                wait_at(store.clone(), at, 1, rank=rank, world_size=2, deadline_s=0.01)
                found.append("met")
            except DaemonUnavailable:
                found.append("missed")

        first = threading.Thread(target=come, args=(0,))
        first.start()
        first.join(0.001 * number)
        come(1)
        first.join()
        assert len(set(found)) == 1


def test_the_log_says_who_is_waited_for(
    store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once in a while, and by the first rank that is there."""
    monkeypatch.setattr(module, "_WARN_S", 0.2)
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda rank: meet(store, rank, 4, 1.0), [1, 3]))
    assert ["ranks 0, 2 of 4 did not come within 1 s" in said for said in found] == [True] * 2
    told = [record.getMessage() for record in caplog.records]
    assert told == ["ckptd: ranks 0, 2 of 4 did not come yet; waited for since 0 s"]


def test_a_barrier_that_a_lost_rank_ends_is_ended_for_all(store: Any) -> None:
    """Also for those that come later, when it is there again."""
    store.set("gone", "rank 1 of 2 is gone")
    with pytest.raises(DaemonUnavailable, match="rank 1 of 2 is gone"):
        wait_at(store.clone(), "m", 1, rank=0, world_size=2, deadline_s=600, gone_key="gone")
    store.delete_key("gone")
    with pytest.raises(DaemonUnavailable, match="rank 1 of 2 is gone"):
        wait_at(store.clone(), "m", 1, rank=1, world_size=2, deadline_s=600, gone_key="gone")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_whose_store_is_gone_say_so(tmp_path: Path, how: signal.Signals) -> None:
    """A client of torch's store that is asked something waits for ever where the answer never comes."""
    with (
        store_process() as (process, port),
        Ranks(tmp_path, port, ["comes", "late"], quick=6.0) as ranks,
    ):
        assert process.pid is not None
        os.kill(process.pid, how)
        ranks.call()
        why = "it has not answered for 12 s" if how == signal.SIGSTOP else "onnection"
        for said in ranks.ended(0, 1):
            assert "the job's store is gone: " in said
            assert why in said


def test_a_store_that_is_slow_is_waited_for(tmp_path: Path) -> None:
    with (
        store_process() as (process, port),
        Ranks(tmp_path, port, ["comes", "late"], quick=8.0) as ranks,
    ):
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.0)
        os.kill(process.pid, signal.SIGCONT)
        ranks.call()
        assert ranks.ended(0, 1) == [f"heard {[bytes([0]), bytes([1])]}"] * 2
