"""When experts are placed anew: transcripts of decisions, and what holds for any course of events."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptd.core.elastic.elastic_types import Cluster
from ckptd.core.elastic.rebalance_policy import (
    Action,
    Decision,
    Event,
    Forecast,
    NodesSeen,
    Placed,
    PlacementTimes,
    StepDone,
    TimesConfig,
)
from ckptd.errors import LocalProtocolError
from tests.long import LONG

SLOTS = 6


def _seen(nodes: str) -> NodesSeen:
    """One node for each letter."""
    return NodesSeen(tuple(nodes), Cluster.uniform(len(nodes), SLOTS) if nodes else None)


def _times(nodes: str, *, num_experts: int = 16, config: TimesConfig | None = None) -> PlacementTimes:
    first = _seen(nodes)
    assert first.cluster is not None
    return PlacementTimes(config or TimesConfig(), first.nodes, first.cluster, num_experts=num_experts)


def _play(times: PlacementTimes, *events: tuple[float, Event]) -> list[tuple[Action, str, int]]:
    decisions = [times.handle(event, now_s=now_s) for now_s, event in events]
    return [(d.action, d.reason, d.threshold) for d in decisions]


def test_a_loss_is_answered_at_once_and_the_threshold_falls_with_the_slots() -> None:
    times = _times("abcdef")
    fewer = "every expert on 1 node only, not on 2: the slots hold no more"
    assert _play(times, (0, _seen("abcdef"))) == [(Action.KEEP, "the nodes are those of the placement", 2)]
    assert _play(times, (5, _seen("abcde")), (6, _seen("abcde"))) == [
        (
            Action.PLACE,
            f"gone: f; left: 5 nodes with 30 slots in a layer for 16 experts; {fewer}",
            1,
        ),
        (Action.WAIT, "a placement is being applied", 1),
    ]
    assert _play(times, (7, Placed(40)), (8, StepDone(41))) == [
        (Action.KEEP, "the nodes are those of the placement", 1),
        (Action.KEEP, "the load was not looked at", 1),
    ]


def test_too_few_slots_are_refused_until_enough_nodes_are_there() -> None:
    times = _times("abc")
    refusal = (
        "2 nodes with 12 slots in a layer, and 16 experts need one each: wait for nodes with 4 more, or "
        "give ranks more slots"
    )
    assert _play(times, (0, _seen("ab")), (1, _seen("ab"))) == [(Action.REFUSE, refusal, 0)] * 2
    action, reason, _ = _play(times, (2, _seen("")))[0]
    assert action is Action.REFUSE
    assert reason.startswith("no node has a slot, and 16 experts need one each: wait for nodes with 16 more")
    with pytest.raises(LocalProtocolError, match="StepDone while halted"):
        times.handle(StepDone(8), now_s=3)
    # Nothing runs, so nobody waits for more.
    action, reason, threshold = _play(times, (4, _seen("abd")))[0]
    assert action is Action.PLACE
    assert reason.startswith(
        "enough nodes again: 3 nodes with 18 slots in a layer for 16 experts; every expert on 1"
    )
    assert threshold == 1


def test_nodes_that_come_are_gathered() -> None:
    """Two minutes after the last arrival; the third node starts them again."""
    times = _times("abcdef", config=TimesConfig(gather_s=120, gather_most_s=600))
    said = _play(
        times,
        (0, _seen("abcdefg")),
        (100, _seen("abcdefgh")),
        (120, StepDone(3)),
        (219, StepDone(4)),
        (220, StepDone(5)),
    )
    assert said == [
        (Action.WAIT, "came: g; used in 120 s unless more come", 2),
        (Action.WAIT, "came: g, h; used in 120 s unless more come", 2),
        (Action.WAIT, "came: g, h; used in 100 s unless more come", 2),
        (Action.WAIT, "came: g, h; used in 1 s unless more come", 2),
        (Action.PLACE, "came: g, h; now: 8 nodes with 48 slots in a layer for 16 experts", 2),
    ]


def test_the_first_does_not_wait_for_ever() -> None:
    """A node every 100 s; the first came at 0 and is used at 250."""
    times = _times("abc", config=TimesConfig(gather_s=120, gather_most_s=250, threshold=1))
    said = _play(times, (0, _seen("abcd")), (100, _seen("abcde")), (200, _seen("abcdef")))
    assert [action for action, _, _ in said] == [Action.WAIT] * 3
    assert said[-1][1] == "came: d, e, f; used in 50 s unless more come"
    assert _play(times, (250, _seen("abcdef")))[0][0] is Action.PLACE


def test_who_comes_and_goes_is_forgotten() -> None:
    times = _times("abcdef")
    said = _play(times, (0, _seen("abcdefg")), (50, _seen("abcdef")), (130, _seen("abcdefg")))
    assert said[1][:2] == (Action.KEEP, "the nodes are those of the placement")
    assert said[2][1] == "came: g; used in 120 s unless more come"


def test_a_loss_takes_along_who_was_waited_for() -> None:
    times = _times("abcdef")
    said = _play(times, (0, _seen("abcdefg")), (1, _seen("bcdefg")), (2, Placed(9)))
    assert [action for action, _, _ in said] == [Action.WAIT, Action.PLACE, Action.KEEP]
    assert said[1][1] == "gone: a; left: 6 nodes with 36 slots in a layer for 16 experts"


def test_nodes_that_vanish_while_a_placement_is_applied() -> None:
    """The next plan starts from what is there; who comes meanwhile is gathered afterwards."""
    times = _times("abcdef")
    said = _play(
        times,
        (0, _seen("abcde")),
        (1, _seen("abcdeg")),  # comes, but the plan is made without it
        (2, _seen("abcde")),  # so it matters nothing that it goes
        (3, _seen("bcde")),
        (4, _seen("bcdeh")),
        (5, Placed(20)),
        (125, StepDone(21)),
    )
    assert [action for action, _, _ in said] == [
        Action.PLACE,
        Action.WAIT,
        Action.WAIT,
        Action.PLACE,
        Action.WAIT,
        Action.WAIT,
        Action.PLACE,
    ]
    assert said[3][1].startswith("gone: a; left: 4 nodes")
    assert said[5][1] == "came: h; used in 119 s unless more come"


def _forecast(now: float, after: float, *, remaining: int = 10_000, move_s: float = 20) -> Forecast:
    return Forecast(0.5, now, after, remaining, move_s)


def test_a_better_balance_is_worth_its_cost_or_not() -> None:
    """Half a second a step; a factor of 2.0 that falls to 1.5 saves an eighth of one."""
    config = TimesConfig(horizon_steps=1000, margin=0.5)
    gain = "straggler factor 2.000, then 1.500: saves"

    def decide(forecast: Forecast) -> Decision:
        return _times("abcdef", config=config).handle(StepDone(50, forecast), now_s=0)

    assert decide(_forecast(2, 1.5)) == Decision(Action.PLACE, f"it pays: {gain} 125.0 s, costs 20.0 s", 2)
    # 200 steps save 25 s, which is more than 20 s, but not by half.
    assert decide(_forecast(2, 1.5, remaining=200)) == Decision(
        Action.KEEP, f"it does not pay: {gain} 25.0 s, costs 20.0 s", 2
    )
    assert decide(_forecast(2, 1.5, remaining=241)).action is Action.PLACE
    assert decide(_forecast(2, 1.5, move_s=100)).action is Action.KEEP
    assert decide(_forecast(1.5, 2, move_s=0)).action is Action.KEEP
    assert decide(_forecast(2, 2, move_s=0)).action is Action.KEEP, "nothing gained is no reason"


def test_every_so_many_steps() -> None:
    """As Lazarus does it, but not for nothing."""
    times = _times("abcdef", config=TimesConfig(every_steps=200, check_steps=150))
    assert [step for step in range(0, 320, 10) if times.wants_forecast(step)] == [
        150,
        *range(200, 320, 10),
    ]
    little = _forecast(1.5, 1.4)
    assert _play(times, (0, StepDone(199, _forecast(1.01, 1.0))))[0][0] is Action.KEEP
    assert _play(times, (0, StepDone(200, _forecast(1.0, 1.0))))[0][0] is Action.KEEP
    cheap = _forecast(1.01, 1.0, move_s=1000)
    assert _play(times, (0, StepDone(201, cheap)))[0][1].startswith("200 steps are over: ")
    assert not times.wants_forecast(300), "a placement is being applied"
    times.handle(Placed(210), now_s=1)
    assert not times.wants_forecast(210)
    assert times.wants_forecast(360)
    assert times.handle(StepDone(360, little), now_s=2).action is Action.PLACE


def test_the_load_waits_for_nodes_that_are_waited_for() -> None:
    times = _times("abcdef")
    times.handle(_seen("abcdefg"), now_s=0)
    assert not times.wants_forecast(50)
    assert times.handle(StepDone(50, _forecast(9, 1)), now_s=1).action is Action.WAIT


@pytest.mark.parametrize(
    ("before", "event", "state"),
    [
        ([], Placed(3), "Placed while steady"),
        ([_seen("abcdefg")], Placed(3), "Placed while gathering"),
        ([_seen("abcde")], StepDone(3), "StepDone while placing"),
        ([_seen("a")], Placed(3), "Placed while halted"),
    ],
)
def test_what_cannot_happen_is_our_bug(before: list[Event], event: Event, state: str) -> None:
    times = _times("abcdef")
    for earlier in before:
        times.handle(earlier, now_s=0)
    with pytest.raises(LocalProtocolError, match=state):
        times.handle(event, now_s=1)


@pytest.mark.parametrize(
    "options",
    [
        {"threshold": 0},
        {"check_steps": 0},
        {"horizon_steps": 0},
        {"every_steps": -1},
        {"margin": -0.1},
        {"margin": float("nan")},
        {"gather_s": -1.0},
        {"gather_s": 10.0, "gather_most_s": 5.0},
        {"gather_s": float("nan")},
        {"gather_most_s": float("inf")},
    ],
)
def test_bad_settings_are_named(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(reversed(options))):
        TimesConfig(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "numbers",
    [
        (float("nan"), 1, 1, 1, 1),
        (1, float("inf"), 1, 1, 1),
        (1, 1, float("nan"), 1, 1),
        (1, 0, 0, 1, 1),
        (1, 1, 1, -1, 1),
        (1, 1, 1, 1, -1),
    ],
)
def test_bad_forecasts_are_named(numbers: tuple[float, float, float, int, float]) -> None:
    with pytest.raises(ValueError, match="Forecast"):
        Forecast(*numbers)


def test_bad_beginnings_are_named() -> None:
    two = Cluster.uniform(2, SLOTS)
    with pytest.raises(ValueError, match="2 nodes with 12 slots in a layer, and 16 experts need one"):
        PlacementTimes(TimesConfig(), ("a", "b"), two, num_experts=16)
    with pytest.raises(ValueError, match="num_experts=0"):
        PlacementTimes(TimesConfig(), ("a", "b"), two, num_experts=0)
    for nodes in (("a",), ("a", "a"), ()):
        with pytest.raises(ValueError, match="each is named, once"):
            PlacementTimes(TimesConfig(), nodes, two, num_experts=1)


@st.composite
def courses(draw: st.DrawFn) -> list[str]:
    """Sets of nodes, seen one after the other: each a subset of six."""
    return draw(
        st.lists(
            st.lists(st.sampled_from("abcdef"), unique=True).map(lambda some: "".join(sorted(some))),
            min_size=1,
            max_size=12,
        )
    )


@settings(max_examples=3000 if LONG else 60, deadline=None)
@given(courses(), st.integers(0, 40), st.integers(0, 40), st.data())
def test_no_node_is_idle_for_long_and_none_that_is_gone_is_used(
    course: list[str], gather_s: int, more_s: int, data: st.DataObject
) -> None:
    """Whatever comes and goes: what is placed is always on nodes that are there when that is decided."""
    config = TimesConfig(gather_s=gather_s, gather_most_s=gather_s + more_s)
    times = _times("abc", num_experts=12, config=config)
    clock = itertools.count(step=7)
    placed, placing, seen, halted = set("abc"), False, set("abc"), False
    idle_since: float | None = None
    for nodes in course:
        now_s = next(clock)
        seen = set(nodes)
        decision = times.handle(_seen(nodes), now_s=now_s)
        assert (decision.action is Action.REFUSE) == (len(seen) * SLOTS < 12)
        halted = decision.action is Action.REFUSE
        if halted:
            continue
        assert decision.threshold == min(2, len(seen) * SLOTS // 12)
        if placed - seen:
            assert decision.action is Action.PLACE
        if decision.action is Action.PLACE:
            placed, placing, idle_since = set(seen), True, None
        elif not placed >= seen and idle_since is None:
            idle_since = now_s
        elif placed >= seen:
            idle_since = None
        if placing and data.draw(st.booleans()):
            if times.handle(Placed(1), now_s=now_s).action is Action.PLACE:
                placed, idle_since = set(seen), None
            else:
                placing = False
        if not placing and idle_since is not None:
            assert now_s < idle_since + config.gather_most_s
    if halted:
        return
    if placing:
        placing = times.handle(Placed(1), now_s=next(clock)).action is Action.PLACE
    if not placing and placed != seen:
        late = times.handle(StepDone(2), now_s=next(clock) + config.gather_most_s)
        assert late.action is Action.PLACE


def test_slots_that_differ_lower_the_threshold_too() -> None:
    """Sixteen slots for eight experts, but one node has nine of them: only seven are on a second node."""
    uneven = NodesSeen(("a", "b"), Cluster(np.array([9, 7])))
    times = PlacementTimes(TimesConfig(), ("a", "b"), Cluster.uniform(2, 8), num_experts=8)
    assert times.handle(uneven, now_s=0).threshold == 1
