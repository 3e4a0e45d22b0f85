"""A rank that is gone is named to those that wait for it; one that only is slow is waited for. Real
processes, killed and stopped.

No deadline is near: waits here would last ten minutes.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptd.client.ranks import store_barrier
from ckptd.client.ranks.store_barrier import FailureDetector
from tests.client.watched_ranks import Ranks, store_process

BROKE = "rank 1 of {} (127.0.0.1) is gone: its connection broke"


@pytest.fixture
def port() -> Iterator[int]:
    with store_process() as (_, port):
        yield port


@pytest.mark.parametrize("waiting", [True, False])
def test_one_that_is_killed_is_named_to_all_others(tmp_path: Path, port: int, waiting: bool) -> None:
    """The fault of a real stretch of a trace: hosts lost before their ranks came, and the others
    did nothing until a host came.
    """
    doing = ["comes" if waiting else "late", "late", "comes" if waiting else "late"]
    with Ranks(tmp_path, port, doing) as ranks:
        if waiting:
            time.sleep(0.3)
        ranks.kill(1)
        ranks.call()
        for said in ranks.ended(0, 2):
            assert BROKE.format(3) in said
            assert "wait for the other ranks" in said


def test_of_several_that_are_killed_one_is_named(tmp_path: Path, port: int) -> None:
    """Who watches rank 2 is gone itself."""
    with Ranks(tmp_path, port, ["comes", "late", "late", "comes"]) as ranks:
        ranks.kill(1)
        ranks.kill(2)
        assert all(BROKE.format(4) in said for said in ranks.ended(0, 3))


def test_one_that_does_not_answer_is_waited_for(tmp_path: Path, port: int) -> None:
    """Stopped for longer than silence would last if it counted: as one that computes without
    letting any thread of its own run.
    """
    with Ranks(tmp_path, port, ["comes", "late", "comes"], quick=1.0) as ranks:
        ranks.kill(1, signal.SIGSTOP)
        time.sleep(3.0)
        ranks.call()
        ranks.kill(1, signal.SIGCONT)
        heard = f"heard {[bytes([rank]) for rank in range(3)]}"
        assert ranks.ended(0, 1, 2) == [heard] * 3


@pytest.mark.parametrize("killed", [True, False])
def test_where_no_connection_can_be_made_silence_counts(tmp_path: Path, port: int, killed: bool) -> None:
    """Nothing can be concluded from a connection that never was there."""
    with Ranks(tmp_path, port, ["beside", "unreachable", "comes"], quick=2.0) as ranks:
        if killed:
            ranks.kill(1)
            expected = "rank 1 of 3 (127.0.0.1) is gone: no sign of it for 2 s"
            assert all(expected in said for said in ranks.ended(0, 2))
            return
        time.sleep(5.0)
        ranks.call()
        assert all(said.startswith("heard") for said in ranks.ended(0, 1, 2))


class Next:
    """The rank after this one, as far as rank 0 can see it: where it listens, and that it does."""

    def __init__(self, store: Any) -> None:
        self.host, self.port = "127.0.0.1", 0
        self.listen()
        store.set("ranks/at/1", f"{self.host} {self.port}")

    def listen(self) -> None:
        self.listening = socket.create_server((self.host, self.port))
        self.port = self.listening.getsockname()[1]
        self.listening.settimeout(30)

    def connected(self) -> socket.socket:
        return self.listening.accept()[0]


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True)  # type: ignore[attr-defined]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_barrier, "_BEAT_S", 0.2)


def until(store: Any, key: str, there: bool) -> None:
    deadline = time.monotonic() + 60
    while store.check([key]) != there:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.usefixtures("quick")
def test_a_connection_that_breaks_and_can_be_made_again_says_nothing(store: Any) -> None:
    after = Next(store)
    watch = FailureDetector(store, "ranks", rank=0, world_size=2)
    for _ in range(3):
        after.connected().close()
    held = after.connected()  # it came again each time
    assert not store.check([watch.gone_key])
    watch.close()
    assert held.recv(1) == b""  # it hangs up when it is closed
    held.close()
    after.listening.close()


@pytest.mark.usefixtures("quick")
def test_one_that_is_found_again_is_not_gone_any_more(store: Any) -> None:
    after = Next(store)
    watch = FailureDetector(store, "ranks", rank=0, world_size=2)
    held = after.connected()
    after.listening.close()
    held.close()
    until(store, watch.gone_key, there=True)
    after.listen()
    held = after.connected()
    until(store, watch.gone_key, there=False)
    watch.close()
    held.close()
    after.listening.close()


@pytest.mark.usefixtures("quick")
def test_what_another_rank_says_is_left(store: Any) -> None:
    """Two are gone, and the one whose sign stands in the store is not the one that comes back."""
    after = Next(store)
    watch = FailureDetector(store, "ranks", rank=0, world_size=2)
    held = after.connected()
    after.listening.close()
    held.close()
    until(store, watch.gone_key, there=True)
    store.set(watch.gone_key, "rank 7 is gone")
    after.listen()
    held = after.connected()
    watch.close()
    assert held.recv(1) == b""
    assert store.get(watch.gone_key) == b"rank 7 is gone"
    held.close()
    after.listening.close()


@pytest.mark.usefixtures("quick")
def test_what_an_earlier_life_left_in_the_store_does_not_count(store: Any) -> None:
    """An agent of torchrun may keep one store for all of them: an address at which nobody listens
    any more, and a rank that was gone.
    """
    before = Next(store)
    before.listening.close()
    store.set("ranks/gone", "rank 1 is gone")
    watch = FailureDetector(store, "ranks", rank=0, world_size=2)
    until(store, watch.gone_key, there=False)
    after = Next(store)
    held = after.connected()
    assert not store.check([watch.gone_key])
    watch.close()
    assert held.recv(1) == b""
    held.close()
    after.listening.close()


@pytest.mark.usefixtures("quick")
def test_ranks_that_are_connected_leave_the_store_alone(store: Any) -> None:
    """It is gone before the last of them at the end of most jobs, and each question to it would be
    a warning of torch.
    """
    watches = [FailureDetector(store, "ranks", rank=rank, world_size=2) for rank in range(2)]
    for watch in watches:
        deadline = time.monotonic() + 60
        while watch._connection is None or watch._watched_by is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    time.sleep(0.5)
    beats = [store.add(f"ranks/beats/{rank}", 0) for rank in range(2)]
    time.sleep(1.0)
    assert [store.add(f"ranks/beats/{rank}", 0) for rank in range(2)] == beats
    for watch in watches:
        watch.close()


def test_other_stores_watch_nobody(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)  # type: ignore[attr-defined]
    watch = FailureDetector(store, "ranks", rank=0, world_size=2)
    assert not store.check([watch.gone_key, "ranks/at/0"])
    watch.close()
