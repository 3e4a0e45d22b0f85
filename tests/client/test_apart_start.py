"""The start of a localized recovery, over two real ranks of one node: what does not hold must end in the recovery of all, not in an error."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptd.client import apart_start, values
from ckptd.client.agreement import Exchange
from ckptd.client.apart_start import ApartStart, begin_apart, come_together
from ckptd.client.fed_logs import FedLogs
from ckptd.client.memory import RankMemory
from ckptd.client.park_memory import parked_records
from ckptd.client.parked_copy import ParkedCopy
from ckptd.errors import AttachRefused, DaemonUnavailable
from ckptd.memory.ring import SlotState
from ckptd.memory.segment_format import HINT_APART, HINT_APART_AGAIN
from ckptd.recovery.localized import LocalizedPlan, RankKind
from ckptd.recovery.plan import Piece, Source
from tests.ckptd.running import MIB, fill
from tests.client.meeting import outcomes
from tests.client.test_memory import attached, record
from tests.client.test_recovery import payload, two_ranks

__all__: list[str] = []

CUT_OFF = 4


def park(memory: RankMemory, iteration: int, phase: int = 0) -> None:
    """A sealed parked state of the memory's epoch."""
    told_of_stages = {0: None}  # as where DTensors are sent
    found = {"phases": [[0], [1]], "stride": 1, "stages": told_of_stages}
    scalars = values.pack(found, "step scalars")
    told: Any = (("ckptd.scalars", "U8", (len(scalars),), scalars),)
    asked = memory.reserve_beside("parked", MIB, 2, payload(4), window=2, num_operators=2)
    segment: Any = memory.add_beside(asked.result(60))
    fill(segment, 0, iteration, anchors=3, tensors=told, scalars_len=len(scalars))
    header = segment.header(0)
    of_now = replace(header, epoch=memory.epoch, epoch_start=memory.epoch_start, phase=phase)
    segment.write_header(0, of_now)
    segment.seal(0)


@pytest.fixture
def run(endpoint: str, request: pytest.FixtureRequest) -> str:
    """A run whose two ranks are replicas; rank 0 was parked, in the phase that a test may say, rank 1 was killed in the same step."""
    run = uuid.uuid4().hex[:8]
    with two_ranks(endpoint, run) as memories:
        outcomes([memory.recover for memory in memories])
        for memory in memories:
            memory.reserve(MIB, 4, window=2, num_operators=2, payload=payload(4))
            for iteration in (CUT_OFF - 1, CUT_OFF):
                record(memory, iteration)
        park(memories[0], CUT_OFF, getattr(request, "param", 0))
    return run


@pytest.fixture
def ranks(endpoint: str, run: str) -> Iterator[list[RankMemory]]:
    with two_ranks(endpoint, run) as memories:
        yield memories


Alike = tuple[tuple[int, ...], tuple[int, ...]]


def begin(
    ranks: list[RankMemory], alike: Alike = ((1,), (0,))
) -> list[ApartStart | Exception | None]:
    def of(rank: int) -> Callable[[Exchange], ApartStart | None]:
        return lambda exchange: begin_apart(ranks[rank], exchange, alike[rank])

    return outcomes([of(rank) for rank in range(2)])


def started(found: list[ApartStart | Exception | None]) -> list[ApartStart]:
    assert all(isinstance(one, ApartStart) for one in found), found
    return [one for one in found if isinstance(one, ApartStart)]


def test_a_replica_that_was_killed_copies_from_the_one_that_was_parked(
    ranks: list[RankMemory],
) -> None:
    parked, copied = started(begin(ranks))
    assert (parked.mine.kind, copied.mine.kind) == (RankKind.PARKED, RankKind.COPIED)
    assert [image.iteration for start in (parked, copied) for image in start.images] == [4, 4]
    assert [memory.hint for memory in ranks] == [HINT_APART] * 2
    for memory, start in zip(ranks, (parked, copied), strict=True):
        come_together(memory, start)
        assert start.images == []  # whoever still holds the start does not hold a model with it
    assert [memory.hint for memory in ranks] == [0, 0]


@pytest.mark.parametrize("error", [TimeoutError, OSError, KeyError])
def test_whatever_goes_wrong_on_one_rank_all_recover_together(
    ranks: list[RankMemory], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """It would go wrong in the same way at each start. The recovery of all ranks together needs nothing of it."""

    def broken(*_: object) -> None:
        raise error("of no use")

    monkeypatch.setattr("ckptd.client.apart_start.ParkedCopy.read", broken)
    assert begin(ranks) == [None, None]
    assert [memory.hint for memory in ranks] == [0, 0]


@pytest.mark.parametrize("run", [1], indirect=True)
def test_where_schedules_would_differ_all_recover_together(ranks: list[RankMemory]) -> None:
    """The ranks went over to another window, and the last that rank 1 has is from before."""
    assert begin(ranks) == [None, None]


def test_stages_whose_shapes_are_unknown_run_with_their_neighbours_only(
    ranks: list[RankMemory],
) -> None:
    """They would rehearse, and ask neighbours that are not there; where all begin together, they may."""

    def trials(rank: int, exchange: Exchange) -> list[bool]:
        view = ranks[rank].see(exchange, alike=(1 - rank,))
        plan = apart_start._plan(view, 2)
        assert isinstance(plan, LocalizedPlan)
        mine = plan.per_rank[rank]
        return [apart_start._Trial(ranks[rank], mine, view, apart).again for apart in (False, True)]

    found = outcomes([lambda e, r=r: trials(r, e) for r in range(2)])  # type: ignore[misc]
    assert found[0] == [False, True]


def test_a_start_that_fails_in_the_end_gives_back_what_it_had(
    ranks: list[RankMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The locks on neighbours' logs, say, in a process that goes on without us."""
    closed = list[FedLogs]()
    monkeypatch.setattr(FedLogs, "close", lambda feeds: closed.append(feeds))

    def refuse(*_: object) -> None:
        raise AttachRefused("stale_epoch", "the run was recovered again")

    monkeypatch.setattr(ranks[1].session, "join", refuse)
    assert [type(one) for one in begin(ranks)] == [DaemonUnavailable, AttachRefused]
    assert len(closed) == 2


def test_a_hint_does_not_outlive_what_was_parked(endpoint: str) -> None:
    """Else the next localized recovery, which may be right, would be the last attempt."""
    with two_ranks(endpoint, uuid.uuid4().hex[:8]) as memories:
        outcomes([memory.recover for memory in memories])
        memories[1].reserve(MIB, 4, window=2, num_operators=2, payload=payload(4))
        memories[1].leave_hint(HINT_APART)
        assert begin(memories) == [None, None]
        assert memories[1].hint == 0


def test_what_a_dead_trainer_parked_and_nobody_has_sealed_yet_is_waited_for(endpoint: str) -> None:
    with attached(endpoint, uuid.uuid4().hex[:8]) as memory:
        asked = memory.reserve_beside("parked", MIB, 2, payload(4), window=2, num_operators=2)
        segment: Any = memory.add_beside(asked.result(60))
        fill(segment, 0, CUT_OFF, anchors=3)
        memory.settle_filled(0.01)
        assert segment.header(0).state is SlotState.SEALED


def test_after_two_that_came_to_no_end_all_recover_together(endpoint: str, run: str) -> None:
    hints = []
    for _ in range(3):
        with two_ranks(endpoint, run) as memories:
            found = begin(memories)
            hints.append([memory.hint for memory in memories])
    assert found == [None, None]
    assert hints == [[HINT_APART] * 2, [HINT_APART | HINT_APART_AGAIN] * 2, [0, 0]]


def test_what_another_run_has_parked_is_not_read(endpoint: str, ranks: list[RankMemory]) -> None:
    """Segments are named by nodes. This one lies here, and is whole, but the daemon would not have given it either."""
    with attached(endpoint, uuid.uuid4().hex[:8]) as other:
        park(other, CUT_OFF)
        segment = other.parks.newest
        assert segment is not None
        (record,) = parked_records(other)
    source = Source(ranks[1].session.node_id, Path(segment.path).name, 0)
    with pytest.raises(AttachRefused, match="no segment of"):
        ParkedCopy.read(ranks[1].session, Piece(record, (source,)), ())


def test_one_rank_has_nobody_to_be_apart_from(endpoint: str) -> None:
    with attached(endpoint, uuid.uuid4().hex[:8]) as memory:
        assert begin_apart(memory, lambda said: [said], ()) is None
