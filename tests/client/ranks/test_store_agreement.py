"""Ranks agree through a store, beside training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptd.client.identity import Identity
from ckptd.client.ranks.store_agreement import StoreAgreement, play
from ckptd.core.switching import propose_largest
from tests.ckptd.running import eventually

WORLD = 5


@pytest.fixture(params=["tcp", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), WORLD)  # type: ignore[attr-defined]
    return dist.TCPStore("127.0.0.1", 0, is_master=True)  # type: ignore[attr-defined]


def ranks(store: Any, count: int = WORLD) -> list[StoreAgreement]:
    return [
        StoreAgreement(store, Identity("job", "run", rank, WORLD), prefix="ckptd/job/run/7")
        for rank in range(count)
    ]


def propose(store: Any, key: str, mine: tuple[int, ...], *, rank: int, world_size: int) -> None:
    prefix, _, what = key.rpartition("/")
    play(store, prefix, propose_largest(what, mine, rank=rank, ranks=world_size))


def test_the_largest_of_each_number_counts_on_every_rank(store: Any) -> None:
    everybody = ranks(store)
    for rank, together in enumerate(everybody):
        assert together.largest("budget") is None
        together.propose("budget", (-100 - rank, 7 * rank % 4))
    eventually(lambda: all(t.largest("budget") for t in everybody), "agreed")
    assert {t.largest("budget") for t in everybody} == {(-100, 3)}


def test_nothing_is_agreed_before_the_last_rank_has_told(store: Any) -> None:
    early = ranks(store, WORLD - 1)
    for together in early:
        together.propose("window", (4,))
    eventually(lambda: store.add("ckptd/job/run/7/window/count", 0) == WORLD - 1, "all have told")
    assert not store.check(["ckptd/job/run/7/window/decided"])
    assert {t.largest("window") for t in early} == {None}
    propose(store, "ckptd/job/run/7/window", (6,), rank=WORLD - 1, world_size=WORLD)
    eventually(lambda: all(t.largest("window") == (6,) for t in early), "agreed")


def test_one_rank_that_tells_twice_does_not_speak_for_another(store: Any) -> None:
    for rank in (0, 0, 1, 2, 3):
        propose(store, "p/key", (rank,), rank=rank, world_size=WORLD)
    assert not store.check(["p/key/decided"])


def test_another_epoch_is_another_agreement(store: Any) -> None:
    for rank in range(WORLD):
        propose(store, "ckptd/job/run/6/window", (9,), rank=rank, world_size=WORLD)
    (one,) = ranks(store, 1)
    one.propose("window", (2,))
    eventually(lambda: store.add("ckptd/job/run/7/window/count", 0) == 1, "it has told")
    assert one.largest("window") is None
    one.close()


def test_a_store_that_fails_is_told_and_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    class Gone:
        def compare_set(self, *_: object) -> bytes:
            raise RuntimeError("Connection reset by peer")

    (one,) = ranks(Gone(), 1)
    with caplog.at_level(logging.ERROR):
        one.propose("window", (2,))
        eventually(lambda: bool(caplog.records), "told")
    told = "this rank could not agree on the window with the others: Connection reset by peer"
    assert told in caplog.text
    assert one.largest("window") is None


def test_some_ranks_agree_without_the_others(store: Any) -> None:
    """Data-parallel peers of one pipeline stage, say."""
    first, second, *_ = ranks(store)
    first.propose("shares-a", (5, -5), among=2)
    second.propose("shares-a", (7, -7), among=2)
    eventually(lambda: second.largest("shares-a") == (7, -5), "agreed")
    eventually(lambda: first.largest("shares-a") == (7, -5), "agreed")
