"""All ranks hear what each has to say; real process groups."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from ckptd.client.identity import Identity
from ckptd.client.ranks import rank_exchange as module
from ckptd.client.ranks.rank_exchange import exchange
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
