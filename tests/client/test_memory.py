"""A rank's memory from one trainer to the next: what is recovered, and which history begins with it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from ckptd.client.identity import Identity
from ckptd.client.membership import Exchange
from ckptd.client.memory import RankMemory
from ckptd.client.segment import MappedSegment
from ckptd.ring import SlotState
from ckptd.segments import Segment
from tests.ckptd.running import MIB, fill


@pytest.fixture
def run(request: pytest.FixtureRequest) -> str:
    return "".join(c if c.isalnum() else "-" for c in request.node.name)[:60]


def alone(said: bytes) -> list[bytes]:
    return [said]


@contextmanager
def attached(endpoint: str, run: str) -> Iterator[RankMemory]:
    memory = RankMemory(
        Identity("job", run, 0, 1),
        lambda: endpoint,
        needed_bytes=MIB,
        needed_text="for a test",
        topology="dp1",
        version="test",
        timeout_s=20,
    )
    try:
        yield memory
    finally:
        memory.close()


def reserved(memory: RankMemory) -> MappedSegment:
    return memory.reserve(MIB, 4, window=2, num_operators=2, payload=b"\x80")


def record(memory: RankMemory, iteration: int) -> None:
    """A sealed snapshot of the memory's epoch, in the slot of that number."""
    segment = memory.table.segments[-1]
    as_daemon: Segment = segment  # type: ignore[assignment]
    fill(as_daemon, iteration % 4, iteration, anchors=1 << iteration % 2)
    header = segment.header(iteration % 4)
    assert header is not None
    told = replace(header, epoch=memory.table.epoch, epoch_start=memory.table.epoch_start)
    segment.write_header(iteration % 4, told)
    segment.seal(iteration % 4)


def recovered(memory: RankMemory, exchange: Exchange = alone) -> int:
    """The iteration that the memory was recovered at."""
    found = memory.recover(exchange)
    assert not isinstance(found, str), found
    return found[0][-1].iteration


def history(memory: RankMemory) -> tuple[int, int]:
    assert (memory.table.epoch, memory.table.epoch_start) == (memory.epoch, memory.epoch_start)
    return memory.epoch, memory.epoch_start


def test_every_recovery_begins_an_epoch(endpoint: str, run: str) -> None:
    """Epochs grow, and begin at the time: one that nobody here has seen may lie on a node that is away."""
    began = int(time.time())
    with attached(endpoint, run) as memory:
        assert memory.recover(alone) == "no node holds a snapshot of rank 0 (world size 1)"
        first, start = history(memory)
        assert first >= began
        assert start == -1
        reserved(memory)
        assert history(memory) == (first, -1)
        for iteration in (3, 4, 5):
            record(memory, iteration)
    with attached(endpoint, run) as memory:
        assert recovered(memory) == 5
        second, start = history(memory)
        assert second > first
        assert start == 5
        record(memory, 6)
        reserved(memory)
        assert history(memory) == (second, 5), "another generation goes on in the same epoch"
    with attached(endpoint, run) as memory:
        assert recovered(memory) == 6
        third, start = history(memory)
        assert third > second
        assert start == 6


def test_starting_over_begins_an_epoch_at_the_beginning(endpoint: str, run: str) -> None:
    """What was there may still lie on a peer: it must not be taken for this history's."""
    with attached(endpoint, run) as memory:
        memory.recover(alone)
        memory.begin_epoch(4_000_000_000, 2)
        reserved(memory)
        record(memory, 3)
    with attached(endpoint, run) as memory:
        assert "no node holds a complete suffix" in str(memory.recover(alone))
        assert history(memory) == (4_000_000_001, -1)
        memory.forget_everything()
        assert history(memory) == (4_000_000_001, -1)


def test_what_comes_after_the_restored_iteration_is_freed(endpoint: str, run: str) -> None:
    with attached(endpoint, run) as memory:
        memory.recover(alone)
        reserved(memory)
        for iteration in (3, 4, 6):
            record(memory, iteration)
    with attached(endpoint, run) as memory:
        assert recovered(memory) == 4
        states = {r.iteration: r.state for r in memory.table.records()}
        assert states[6] is SlotState.FREE
        assert states[4] is SlotState.SEALED
