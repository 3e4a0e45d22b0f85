"""The simulation of spot traces: instances worked out by hand, and what holds for any trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import traces
from bench.spot.model import Job
from bench.spot.simulation import Halt, Mode, Result, Switch, View, simulate
from bench.spot.strategies import Elastic, Fixed, Gather
from bench.spot.trace import Change, Membership, Trace, memberships, parse
from bench.traces import STORED, UNITS
from ckptd.core.elastic.elastic_types import Cluster
from ckptd.core.elastic.rebalance_policy import (
    Action,
    NodesSeen,
    PlacementTimes,
    StepDone,
    TimesConfig,
)

# --- traces ----------------------------------------------------------------------------------------------


def test_a_trace_is_a_step_function() -> None:
    trace = parse("0,0\n10,0\n10,3\n20,3\n20,2\n20,4\n30,4\n")
    assert trace.changes == (Change(10, 3), Change(20, 2), Change(20, 4))
    assert (trace.end_s, trace.most) == (30, 4)
    assert parse("0.5,1\n1,1", unit_s=3600).changes == (Change(1800, 1),)
    assert trace.at_most(2).changes == (Change(10, 2),)
    assert trace.stretch(15, 25, speed=2) == Trace((Change(0, 3), Change(2.5, 2), Change(2.5, 4)), 5)
    assert trace.stretch(5, 9).changes == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("1,2\nx", "row 2 is 'x'"),
        ("1,2,3", "row 1"),
        ("1,-2", "0 or more"),
        ("nan,2", "0 or more"),
        ("5,1\n4,2", "row 2 is '4,2': before the row above"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse(text)


def test_a_stretch_outside_the_trace_is_refused() -> None:
    for wanted in ((5, 31, 1), (5, 5, 1), (-1, 5, 1), (0, 5, 0)):
        with pytest.raises(ValueError, match="the trace has 0 to 30 s"):
            Trace((Change(0, 1),), 30).stretch(wanted[0], wanted[1], speed=wanted[2])


def test_nodes_that_come_are_new_and_those_that_go_were_there() -> None:
    trace = parse("0,3\n1,3\n1,1\n2,1\n2,4\n3,4")
    for seed in range(5):
        first, second, third = memberships(trace, seed)
        assert (first.came, third.came) == ((0, 1, 2), (3, 4, 5))
        assert len(second.lost) == 2
        assert second.lost < {0, 1, 2}
    assert len({memberships(trace, seed)[1].lost for seed in range(20)}) == 3


@pytest.mark.parametrize("name", sorted(STORED))
def test_the_stored_traces_are_whole(name: str) -> None:
    path, unit = STORED[name]
    trace = parse(path.read_text(), unit_s=UNITS[unit])
    found = {"g4dn": (33, 12, 45_668), "p2": (196, 16, 319_302)}[name]
    assert (len(trace.changes), trace.most, round(trace.end_s)) == found


# --- the simulation, by hand -----------------------------------------------------------------------------


class Scripted:
    """Answers as it was told, and notes what it was asked."""

    def __init__(self, *answers: Switch | Halt | None, wakes: tuple[float, ...] = ()) -> None:
        self.answers, self.wakes = list(answers), list(wakes)
        self.seen: list[View] = []
        self.settled_s: list[float] = []

    def react(self, view: View) -> Switch | Halt | None:
        self.seen.append(view)
        self.wakes = [wake for wake in self.wakes if wake > view.now_s]
        return self.answers.pop(0)

    def settled(self, now_s: float) -> None:
        self.settled_s.append(now_s)

    def wake_s(self) -> float:
        return min(self.wakes, default=math.inf)


COME, GO = Membership(0.0, frozenset(), (0, 1)), Membership(10.5, frozenset({0}), ())


def test_a_loss_cuts_off_an_iteration_and_some_are_repeated() -> None:
    strategy = Scripted(Switch(2, 0, 2, 1.0, "start"), Switch(4, 5, 1, 2.0, "back"))
    result = simulate([COME, GO], 30, strategy)
    # From 2 to 10.5 s 8.5 iterations at 1 s; from 14.5 to 30 s 7.75 at 2 s, from the fifth on: the
    # twelfth is the last whole one.
    assert strategy.seen[1].completed == 8
    assert strategy.seen[1].mode is Mode.TRAIN
    assert strategy.settled_s == [2, 14.5]
    assert (result.useful, result.computed) == (12, 8.5 + 7.75)
    assert [result.seconds(mode) for mode in Mode] == [24, 6, 0]
    assert result.useful_between(0, 10) == 8
    assert result.useful_between(10, 20.5) == 0  # 6, 7 and 8 again
    assert result.useful_between(20.5, 24.5) == 2
    assert [(p.start_s, p.end_s) for p in result.periods] == [
        (0, 2),
        (2, 10.5),
        (10.5, 14.5),
        (14.5, 30),
    ]


def test_a_loss_in_a_pause_is_a_new_question() -> None:
    again = Membership(12.0, frozenset({1}), ())
    strategy = Scripted(Switch(2, 0, 2, 1.0, "a"), Switch(4, 5, 1, 2.0, "b"), Halt("nobody"))
    result = simulate([COME, GO, again], 20, strategy)
    last = strategy.seen[2]
    assert (last.mode, last.completed, last.ready_s) == (Mode.PAUSE, 5, 14.5)
    assert last.alive == frozenset()
    assert strategy.settled_s == [2]
    assert [result.seconds(mode) for mode in Mode] == [8.5, 3.5, 8]
    assert result.useful == 8


def test_whoever_wants_to_be_woken_is() -> None:
    strategy = Scripted(Switch(0, 0, 2, 1.0, "a"), None, Switch(1, 7, 2, 0.5, "b"), wakes=(4.0, 7.5))
    result = simulate([COME], 10, strategy)
    assert [view.now_s for view in strategy.seen] == [0, 4, 7.5]
    assert result.useful == 7 + 3


def test_a_strategy_that_cheats_is_refused() -> None:
    for wrong in (Switch(0, 9, 1, 1.0, ""), Switch(-1, 0, 1, 1.0, ""), Switch(0, 0, 1, 0.0, "")):
        with pytest.raises(ValueError, match="with 8 iterations completed"):
            simulate([COME, GO], 20, Scripted(Switch(2, 0, 2, 1.0, "a"), wrong))
    with pytest.raises(ValueError, match="go that are not there"):
        simulate([COME, Membership(1, frozenset({7}), ())], 20, Scripted(Halt("")))
    with pytest.raises(ValueError, match="or come twice"):
        simulate([COME, Membership(1, frozenset(), (1,))], 20, Scripted(Halt("")))
    late = Membership(5, frozenset(), (2,))
    with pytest.raises(ValueError, match="an event at 5 s"):
        simulate([COME, GO, late], 20, Scripted(Halt(""), Halt("")))


@given(st.lists(st.floats(0, 300), min_size=1, max_size=8))
@settings(max_examples=50, deadline=None)
def test_nodes_are_waited_for_as_in_a_running_job(gaps: list[float]) -> None:
    """Against the state machine of the elastic module: it says WAIT before that time, and PLACE at it."""
    times = PlacementTimes(TimesConfig(), ("0",), Cluster.uniform(1, 4), num_experts=4)
    gather, now_s = Gather(120, 600), 0.0
    assert gather.due_s == math.inf
    for number, gap_s in enumerate(gaps, start=1):
        if now_s + gap_s >= gather.due_s:
            break
        now_s += gap_s
        gather.came(now_s)
        seen = NodesSeen(tuple(map(str, range(number + 1))), Cluster.uniform(number + 1, 4))
        assert times.handle(seen, now_s=now_s).action is Action.WAIT
    before = times.handle(StepDone(1), now_s=math.nextafter(gather.due_s, 0))
    assert before.action is Action.WAIT
    assert times.handle(StepDone(2), now_s=gather.due_s).action is Action.PLACE


# --- the strategies, by hand -----------------------------------------------------------------------------

# 2 experts with as many tokens each: 20 bytes of state, written in 2 s. An iteration takes 16 s
# divided by the nodes.
TINY = Job(
    layers=1,
    experts=2,
    slots=1,
    expert_bytes=5,
    dense_bytes=10,
    batch=16,
    node_samples_per_s=1,
    skew=(8, 8),
    detect_s=1,
    groups_s=2,
    plan_s=0,
    process_s=3,
    node_bytes_per_s=5,
    store_bytes_per_s=10,
    snapshot_overhead=0,
)


def events(*changes: tuple[float, set[int], tuple[int, ...]]) -> list[Membership]:
    return [Membership(at_s, frozenset(lost), came) for at_s, lost, came in changes]


def pauses(result: Result) -> list[tuple[str, float]]:
    return [(p.why, round(p.end_s - p.start_s, 6)) for p in result.periods if p.mode is Mode.PAUSE]


def test_fixed_groups_go_back_to_their_last_checkpoint() -> None:
    """Two nodes, 8.04 s an iteration with its share of 2 s of saving every 50."""
    strategy = Fixed(TINY, group=2, reconfigures=False)
    # Start: processes 3, groups 2, both nodes read 15 bytes: 3. Then 60 iterations and a bit.
    lost_s = 8 + 60.5 * 8.04
    result = simulate(events((0, set(), (0, 1)), (lost_s, {0}, ()), (900, set(), (2,))), 1000, strategy)
    assert pauses(result) == [("started", 8), ("from storage", 8)]
    assert strategy.rollbacks == 1
    # Halted until 900, then from the 50th: 92 s are 11 iterations, of which the first 10 are repeated.
    assert result.useful == 61
    assert result.seconds(Mode.HALT) == pytest.approx(900 - lost_s)


def test_fixed_groups_that_reconfigure_go_on_while_each_place_is_held() -> None:
    strategy = Fixed(TINY, group=2, reconfigures=True)
    # Nodes 0 and 2 take place 0, 1 and 3 place 1 (as dealt out): without 0, one group is left.
    result = simulate(events((0, set(), (0, 1, 2, 3)), (500, {0}, ())), 600, strategy)
    (_, first), (why, again) = pauses(result)
    assert (first, why) == (11.0, "reconfigured")
    assert again in (3, 4)  # detect 1, groups 2; a second for an expert if a node changes its place
    assert strategy.rollbacks == 0
    assert result.periods[-1].used == 2
    # Both nodes of one place: nobody has its experts any more.
    strategy = Fixed(TINY, group=2, reconfigures=True)
    simulate(events((0, set(), (0, 1, 2, 3)), (100, set(), ())), 101, strategy)
    place = {node for node, at in strategy._places.items() if at == 0}
    strategy = Fixed(TINY, group=2, reconfigures=True)
    result = simulate(events((0, set(), (0, 1, 2, 3)), (500, place, ())), 600, strategy)
    assert pauses(result)[1] == ("from storage", 1 + 3 + 2 + 3)
    assert strategy.rollbacks == 1


def test_fixed_groups_must_share_the_experts() -> None:
    with pytest.raises(ValueError, match="groups of 3"):
        Fixed(TINY, group=3, reconfigures=True)


def lost_together(snapshots: bool, lost: set[int]) -> tuple[Elastic, Result]:
    strategy = Elastic(TINY, snapshots=snapshots)
    return strategy, simulate(events((0, set(), (0, 1, 2, 3)), (1000, lost, ())), 1100, strategy)


def holders() -> tuple[set[int], set[int]]:
    """Two nodes have one expert, two the other."""
    strategy, _ = lost_together(True, set())
    assert strategy._held is not None
    first = {n for n in range(4) if strategy._held.counts[0, n, 0]}
    return first, set(range(4)) - first


def test_replicas_let_the_job_go_on_where_it_was() -> None:
    first, second = holders()
    assert len(first) == len(second) == 2
    lost = {min(first), min(second)}
    for snapshots, process_s in ((True, 3), (False, 0)):
        strategy, result = lost_together(snapshots, lost)
        assert pauses(result)[1] == ("placed anew", 1 + process_s + 2)  # both have their expert
        before, after = (p for p in result.periods if p.mode is Mode.TRAIN)
        assert after.first == math.floor(before.last)
        assert strategy.rollbacks == 0


def test_an_expert_without_a_replica_comes_from_a_snapshot_or_from_storage() -> None:
    first, _ = holders()
    ours, result = lost_together(True, first)
    # One node fetches 5 bytes at 5 a second; three iterations of two nodes are replayed at 0.89; one is lost.
    iteration_s = 16 / 2
    why, took_s = pauses(result)[1]
    assert why == "from snapshots"
    assert took_s == pytest.approx(1 + 3 + 2 + 1 + 3 * 0.89 * iteration_s)
    before, after = (p for p in result.periods if p.mode is Mode.TRAIN)
    assert after.first == math.floor(before.last) - 1
    assert (ours.from_snapshots, ours.rollbacks) == (1, 0)
    alone, result = lost_together(False, first)
    assert pauses(result)[1] == ("from storage", 1 + 3 + 2 + 3)
    before, after = (p for p in result.periods if p.mode is Mode.TRAIN)
    assert after.first == math.floor(before.last) // 250 * 250
    assert alone.rollbacks == 1


def test_a_snapshot_dies_with_the_node_that_keeps_it() -> None:
    first, second = holders()
    kept = [_source_without(first | {more}) for more in sorted(second)]
    assert sorted(kept) == ["snapshots", "storage"]
    for more, source in zip(sorted(second), kept, strict=True):
        strategy = Elastic(TINY, snapshots=True)
        # One node is left, which has no room for both experts, until another comes.
        lost = (1000.0, first | {more}, ())
        changes = events((0, set(), (0, 1, 2, 3)), lost, (1010, set(), (4,)))
        result = simulate(changes, 1100, strategy)
        assert result.seconds(Mode.HALT) == 10
        assert (strategy.from_snapshots, strategy.rollbacks) == (
            source == "snapshots",
            source == "storage",
        )


def _source_without(lost: set[int]) -> str:
    strategy, _ = lost_together(True, set())
    return strategy._source(frozenset(range(4)) - lost)


def test_nodes_that_come_are_used_after_a_while_and_cost_no_iteration() -> None:
    strategy = Elastic(TINY, snapshots=True)
    result = simulate(events((0, set(), (0, 1)), (1000, set(), (2, 3))), 2000, strategy)
    assert [p.used for p in result.periods if p.mode is Mode.TRAIN] == [2, 4]
    paused = [p for p in result.periods if p.mode is Mode.PAUSE][1]
    assert (paused.start_s, paused.end_s) == (1120, 1120 + 3 + 2 + 1)
    assert result.computed - result.useful < 2  # two were cut off


# --- any trace -------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[Job], Elastic | Fixed]] = {
    "ours": lambda job: Elastic(job, snapshots=True),
    "alone": lambda job: Elastic(job, snapshots=False),
    "reconfigured": lambda job: Fixed(job, group=2, reconfigures=True),
    "checkpoints": lambda job: Fixed(job, group=2, reconfigures=False),
}


@given(
    st.lists(st.tuples(st.floats(0.1, 400), st.integers(0, 6)), min_size=1, max_size=15),
    st.sampled_from(sorted(MAKERS)),
    st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_what_holds_for_any_trace(steps: list[tuple[float, int]], name: str, seed: int) -> None:
    at_s = 0.0
    changes: list[Change] = []
    for gap_s, nodes in steps:
        at_s += gap_s
        if nodes != (changes[-1].nodes if changes else 0):
            changes.append(Change(at_s, nodes))
    trace = Trace(tuple(changes), at_s + 500)
    joined = memberships(trace, seed)
    result = simulate(joined, trace.end_s, MAKERS[name](TINY))
    again = simulate(joined, trace.end_s, MAKERS[name](TINY))
    assert result == again
    edges = [p.start_s for p in result.periods] + [trace.end_s]
    assert [p.end_s for p in result.periods] == edges[1:]  # no gap, no overlap
    if changes:
        assert edges[0] == changes[0].at_s
    assert 0 <= result.useful <= result.computed + 1e-6
    # Never faster than all live nodes together at no cost.
    capacity = 0.0
    ends = [*(c.at_s for c in changes[1:]), trace.end_s][: len(changes)]
    for change, until_s in zip(changes, ends, strict=True):
        capacity += change.nodes * (until_s - change.at_s) * TINY.node_samples_per_s / TINY.batch
    assert result.computed <= capacity + 1e-6
    halves = result.useful_between(0, trace.end_s / 2) + result.useful_between(trace.end_s / 2, trace.end_s)
    assert halves == pytest.approx(result.useful)


def test_a_trace_of_ones_own_is_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an hour on four nodes, one of which goes: nobody does more than four nodes could."""
    file = tmp_path / "mine.csv"
    file.write_text("0,4\n0.4,4\n0.4,3\n0.5,3\n")
    options = ["--trace", str(file), "--unit", "h", "--seeds", "1", "--json"]
    monkeypatch.setattr("sys.argv", ["traces", *options])
    traces.main()
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
    assert metrics["mine_hours_with_nodes"] == 0.5
    mean_nodes = (4 * 0.4 + 3 * 0.1) / 0.5
    assert metrics["mine_ideal_samples_per_s"] == pytest.approx(mean_nodes * 4 / 0.827)
    ours, alone = metrics["mine_ours_goodput"], metrics["mine_lazarus_alone_goodput"]
    assert 0 < ours < metrics["mine_ideal_samples_per_s"]
    assert alone > 0
    assert metrics["mine_fixed_checkpoints_halt"] == pytest.approx(0.2)  # three nodes are no group of four
    assert metrics["mine_ours_halt"] == 0
