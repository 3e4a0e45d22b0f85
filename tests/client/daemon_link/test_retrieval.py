"""Waiting for snapshots that the daemon brings here: until they are sealed, or there is no hope."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ckptd.client.daemon_link import retrieval
from ckptd.client.daemon_link.rank_memory import RankMemory
from ckptd.client.daemon_link.retrieval import Arrivals
from ckptd.client.stats import Stats
from ckptd.core.slots.slots import SlotRecord, SlotState
from ckptd.errors import AttachRefused, DaemonUnavailable
from ckptd.transport.messages import FetchState
from tests.client.daemon_link.test_rank_memory import attached, record, reserved

RECORD = SlotRecord(0, 3, SlotState.SEALED, iteration=3, image_len=1)


class Answers:
    """A session whose daemon says this of the fetch."""

    def __init__(self, state: FetchState | AttachRefused) -> None:
        self._state = state

    def fetch_state(self, generation: int) -> FetchState:
        assert generation == 0
        if isinstance(self._state, AttachRefused):
            raise self._state
        return self._state


@pytest.fixture
def memory(endpoint: str) -> Iterator[RankMemory]:
    with attached(endpoint, uuid.uuid4().hex[:8]) as found:
        reserved(found)
        yield found


def arrivals(memory: RankMemory, state: FetchState | AttachRefused, stats: Stats) -> Arrivals:
    segment = memory.table.segments[-1]
    return Arrivals(Answers(state), segment, stats, asked_s=time.perf_counter() - 5)


RUNNING = FetchState("running", "", 0, 17, 100, {})


def test_looking_at_an_image_waits_until_it_is_there(memory: RankMemory) -> None:
    record(memory, 2)
    (sealed,) = (r for r in memory.table.records() if r.state is SlotState.SEALED)
    stats = Stats()
    coming = arrivals(memory, RUNNING, stats)
    image = coming.image(3, replace(sealed, iteration=3, index=3))
    assert image.iteration == 3
    timer = threading.Timer(0.1, lambda: record(memory, 3))
    timer.start()
    assert image.view.iteration == 3
    timer.join()
    assert 5.1 < stats.fetch_first_s == stats.fetch_last_s < 60, "since it was asked for"
    first = stats.fetch_first_s
    assert coming.image(2, sealed).view.iteration == 2
    assert stats.fetch_first_s == first < stats.fetch_last_s


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (
            FetchState("failed", "no holder is left", 0, 0, 100, {}),
            "iteration 3 could not be brought here: no holder is left",
        ),
        (AttachRefused("not_found", "nothing is fetched"), r"\(not_found\): nothing is fetched"),
    ],
)
def test_there_is_no_hope(
    memory: RankMemory,
    monkeypatch: pytest.MonkeyPatch,
    state: FetchState | AttachRefused,
    reason: str,
) -> None:
    monkeypatch.setattr(retrieval, "_ASK_S", 0.0)
    with pytest.raises(DaemonUnavailable, match=reason):
        _ = arrivals(memory, state, Stats()).image(3, RECORD).view


def test_what_stands_still_for_long_is_given_up(memory: RankMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval, "_ASK_S", 0.0)
    monkeypatch.setattr(retrieval, "_STALLED_S", 0.05)
    with pytest.raises(DaemonUnavailable, match="iteration 3: nothing arrived"):
        _ = arrivals(memory, RUNNING, Stats()).image(3, RECORD).view
