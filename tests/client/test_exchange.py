"""All ranks hear what each has to say; real process groups, and a meeting that one does not come to."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptd.client import exchange as module
from ckptd.client.exchange import exchange, meet_at
from ckptd.client.identity import Identity
from ckptd.errors import DaemonUnavailable
from tests.forked import FORKED

WORLD = 3


def said_by(rank: int, turn: int) -> bytes:
    """Of very different lengths; one has nothing to say."""
    return bytes([rank]) * [0, 1, 70_000][(rank + turn) % 3]


def turns(rank: int) -> None:
    module._ROUND_BYTES = 3 * 10_000  # so that a payload takes several rounds
    for turn in range(4):
        heard = exchange(Identity("j", "r", rank, WORLD), said_by(rank, turn))
        assert heard == [said_by(r, turn) for r in range(WORLD)]
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    assert not store.check(["ckptd/j/r/exchange/2/verdict"])
    assert store.check(["ckptd/j/r/exchange/4/verdict"])


def one_stays_away(rank: int) -> None:
    if rank == 1:
        return
    with pytest.raises(DaemonUnavailable, match=r"rank 1 of 3 did not come within 1 s"):
        exchange(Identity("j", "r", rank, WORLD), b"", deadline_s=1.0)


def _in_rank(work: Callable[[int], None], rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD
        )
        work(rank)
    except BaseException:
        Path(folder, f"failed{rank}").write_text(traceback.format_exc())
        raise


@pytest.mark.slow
@pytest.mark.parametrize("work", [turns, one_stays_away])
def test_in_a_process_group(work: Callable[[int], None], tmp_path: Path) -> None:
    ranks = [
        FORKED.Process(target=_in_rank, args=(work, rank, str(tmp_path))) for rank in range(WORLD)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    told = [path.read_text() for path in tmp_path.glob("failed*")]
    assert [process.exitcode for process in ranks] == [0] * WORLD, told


def test_alone_one_hears_oneself() -> None:
    assert exchange(Identity("j", "r", 0, 1), b"said") == [b"said"]


def test_several_ranks_without_a_process_group_are_told_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"call init_process_group\(\) before Checkpointer"):
        exchange(Identity("j", "r", 0, 2), b"said")


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True)  # type: ignore[attr-defined]


def meet(store: Any, rank: int, world_size: int, deadline_s: float) -> str:
    """How it ended for this rank."""
    try:
        meet_at(store.clone(), "m", 1, rank=rank, world_size=world_size, deadline_s=deadline_s)
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
                meet_at(store.clone(), at, 1, rank=rank, world_size=2, deadline_s=0.01)
                found.append("met")
            except DaemonUnavailable:
                found.append("missed")

        first = threading.Thread(target=come, args=(0,))
        first.start()
        first.join(0.001 * number)
        come(1)
        first.join()
        assert len(set(found)) == 1
