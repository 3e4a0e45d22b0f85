"""The steps towards another order, which every rank takes alike."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ckptd.client import values
from ckptd.client.schedule import schedule_change
from ckptd.client.schedule.schedule_change import (
    ScheduleAgreement,
    ScheduleStart,
    differing,
    of_parked,
    orders_towards,
)
from ckptd.core.schedule import plan_schedule
from ckptd.core.snapshot_policy import OperatorCost, OperatorKind, Schedule
from ckptd.core.switching import Apply, Change, Discard, Prepare, Switching
from tests.ckptd.running import eventually

COSTS = [OperatorCost(f"e{i}", OperatorKind.EXPERT, 100 + i, 10) for i in range(12)]
ROOM = 2_000


def four_phases() -> Schedule:
    return plan_schedule(COSTS, budget_bytes=None, order=list(range(12)), window=4)


@pytest.mark.parametrize("seed", range(20))
def test_an_order_is_reached_and_nothing_is_postponed_by_more_than_a_phase_at_once(
    seed: int,
) -> None:
    """So any window and one snapshot more anchor everything, across every step."""
    order = random.Random(seed).sample(range(12), 12)
    schedule = four_phases()
    steps = orders_towards(schedule, COSTS, order, capacity_bytes=ROOM)
    assert steps
    assert len(set(steps)) == len(steps)
    before = schedule.phases
    for after in steps:
        was = {op: phase for phase, ops in enumerate(before) for op in ops}
        assert all(phase <= was[op] + 1 for phase, ops in enumerate(after) for op in ops)
        before = after
    reached = [op for phase in steps[-1] for op in phase]
    places = {op: place for place, op in enumerate(order)}
    early, late = set(reached[:3]), set(reached[-3:])
    assert max(places[op] for op in early) < min(places[op] for op in late)


def test_there_is_no_step_to_the_order_that_is() -> None:
    assert orders_towards(four_phases(), COSTS, range(12), capacity_bytes=ROOM) == ()


@pytest.mark.parametrize("order", [range(11), [0] * 12, range(13)])
def test_an_order_of_other_operators_is_refused(order: list[int]) -> None:
    with pytest.raises(ValueError, match="there are 12"):
        orders_towards(four_phases(), COSTS, order, capacity_bytes=ROOM)


def parked(iteration: int, phase: int, span: int = 3, stride: int = 1) -> ScheduleStart:
    return ScheduleStart([(iteration, phase)], span, stride)


def suffix(*phases: int, start: int = 0) -> ScheduleStart:
    return ScheduleStart(list(enumerate(phases, start)))


@pytest.mark.parametrize(
    "told",
    [
        [parked(10, 1), parked(11, 2), suffix(2, 0, 1, start=8)],
        [suffix(2, 0, 1, start=8), parked(10, 1)],
        [parked(12, 1, stride=4), ScheduleStart([(4, 2), (8, 0)])],
        [parked(10, 0, span=1), suffix(0, 0, start=9)],
    ],
)
def test_what_agrees(told: list[ScheduleStart]) -> None:
    assert differing(told) == ""


@pytest.mark.parametrize(
    "told",
    [
        [parked(10, 1), suffix(1, 2, 0, start=8)],  # another base
        [parked(10, 1), parked(10, 1, span=4)],
        [parked(10, 1), parked(10, 1, stride=2)],
        [parked(10, 0, span=5), suffix(0, 1, 2, start=7)],  # from the window before: 10 begins one
        [parked(10, 0, span=2), suffix(0, 1, 2, start=7)],
        [parked(10, 0, span=1), suffix(0, 1, 2, start=7)],
        [parked(10, 1), ScheduleStart()],
        [suffix(0, 1, 2)],
    ],
)
def test_what_differs(told: list[ScheduleStart]) -> None:
    assert differing(told).startswith("rank ")


@pytest.mark.parametrize(
    ("policy", "phases", "span"), [("sliding", 3, 3), ("dense", 1, 5), ("sliding", 4, 0)]
)
def test_what_a_parked_rank_tells(policy: str, phases: int, span: int) -> None:
    """Nothing, if its ring is of another window than what was parked."""
    scalars = {"phases": [[0]] * phases, "stride": 2}
    recorded = 1 if policy == "dense" else 3
    payload = values.pack({"policy": policy, "every": 5, "phases": [[0]] * recorded}, "a plan")
    told = of_parked(10, 1, scalars, payload)
    assert told == (ScheduleStart([(10, 1)], span, 2) if span else ScheduleStart())
    if policy == "dense":  # the interval has changed since the ring was made
        assert of_parked(10, 1, {**scalars, "every": 8}, payload).span == 8


WORLD = 4
WIDER = Change("too slow", window=6, order=(2, 0, 1), table="t")


class Rank:
    """A trainer that does as it is told, an iteration at a time."""

    def __init__(self, find_store: Callable[[], Any], prefix: str = "ckptd/j/r/7/switch") -> None:
        machine = Switching(patience_s=60, apart_s=0.0, apart_max_s=0.0)
        self.switches = ScheduleAgreement(find_store, prefix=prefix, world_size=WORLD, machine=machine)
        self.iteration = 0
        self.applied: list[Apply] = []
        self.discarded: list[Discard] = []
        self.refuses = ""

    def step(self) -> None:
        for effect in self.switches.boundary(self.iteration, iteration_s=0.01):
            match effect:
                case Prepare():
                    if self.refuses:
                        self.switches.unable(effect.number, self.refuses)
                    else:
                        self.switches.prepared(effect.number)
                case Apply():
                    self.applied.append(effect)
                case Discard():
                    self.discarded.append(effect)
        self.iteration += 1


@pytest.fixture(params=["tcp", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "file":
        return dist.FileStore(str(tmp_path / "store"), WORLD)  # type: ignore[attr-defined]
    return dist.TCPStore("127.0.0.1", 0, is_master=True)  # type: ignore[attr-defined]


@pytest.fixture
def ranks(store: Any) -> Iterator[list[Rank]]:
    found = [Rank(lambda: store) for _ in range(WORLD)]
    yield found
    for rank in found:
        rank.switches.close()


def train_until(ranks: list[Rank], done: Callable[[], bool], what: str) -> None:
    def look() -> bool:
        for rank in ranks:
            rank.step()
        return done()

    eventually(look, what, timeout_s=60)


def test_all_go_over_at_one_iteration(ranks: list[Rank]) -> None:
    assert ranks[2].switches.wish(WIDER)
    train_until(ranks, lambda: all(r.applied for r in ranks), "changed")
    (first,) = ranks[0].applied
    assert first.change == WIDER
    assert all(r.applied == [first] for r in ranks)
    assert not any(r.discarded for r in ranks)


def test_two_that_wish_get_one_after_the_other(ranks: list[Rank]) -> None:
    """Whoever comes second takes part in the first one's, and may wish again."""
    others = Change("dense", policy="dense")
    assert ranks[0].switches.wish(WIDER)
    assert ranks[1].switches.wish(others)
    train_until(ranks, lambda: all(r.applied for r in ranks), "changed")
    second = others if ranks[0].applied[0].change == WIDER else WIDER
    train_until(ranks, lambda: ranks[3].switches.wish(second), "the next one is taken")
    train_until(ranks, lambda: all(len(r.applied) == 2 for r in ranks), "changed again")
    assert ranks[0].applied[1].change == second
    assert ranks[0].applied[1].at > ranks[0].applied[0].at


def test_one_that_cannot_keeps_all_where_they_are(ranks: list[Rank]) -> None:
    ranks[3].refuses = "rank 3 cannot: no memory"
    assert ranks[0].switches.wish(WIDER)
    train_until(ranks, lambda: all(r.discarded for r in ranks), "dropped")
    assert {r.discarded[0].why for r in ranks} == {"rank 3 cannot: no memory"}
    assert not any(r.applied for r in ranks)


def test_a_store_that_is_gone_is_told_once_and_changes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = []

    def gone() -> Any:
        asked.append(1)
        raise RuntimeError("Connection reset by peer")

    with caplog.at_level(logging.ERROR):
        rank = Rank(gone)
        eventually(lambda: len(asked) >= 4, "asked again", timeout_s=30)
    rank.switches.close()
    rank.step()
    assert rank.switches.knows(rank.iteration)
    (told,) = caplog.records
    assert "Connection reset by peer; the schedule stays as it is" in told.getMessage()


def test_the_store_is_not_asked_any_more_after_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may be about to end, and its end would wait for the answer."""
    monkeypatch.setattr(schedule_change, "_RETRY_S", 600.0)
    monkeypatch.setattr(schedule_change, "_RETRY_MAX_S", 600.0)
    asked: list[threading.Thread] = []

    def gone() -> Any:
        asked.append(threading.current_thread())
        raise RuntimeError("Connection reset by peer")

    rank = Rank(gone)
    eventually(lambda: bool(asked), "asked")
    rank.switches.close()
    asked[0].join()
    assert len(asked) == 1


def test_only_outcomes_stay_in_the_store() -> None:
    """Proposals may be long; a rank in doubt must find the outcome whenever it comes back."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # type: ignore[attr-defined]
    ranks = [Rank(lambda: store) for _ in range(WORLD)]

    def changed(times: int) -> Callable[[], bool]:
        return lambda: all(len(r.applied) == times for r in ranks)

    for number in range(1, 4):
        train_until(ranks, lambda: ranks[0].switches.wish(WIDER), "taken")
        train_until(ranks, changed(number), "changed")
    for rank in ranks:
        rank.switches.close()

    def kept(number: int) -> set[str]:
        names = ("proposal", "ready", "all", "at", "promised", "outcome")
        return {n for n in names if store.check([f"ckptd/j/r/7/switch/{number}/{n}"])}

    assert kept(1) == {"outcome"}
    assert kept(2) == kept(3) == {"proposal", "ready", "all", "at", "promised", "outcome"}
