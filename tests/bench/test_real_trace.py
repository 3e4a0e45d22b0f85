"""A stretch of a trace with real processes: what is concluded from the logs, by hand, and a short
stretch (left to a campaign).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import real_trace
from bench.spot.measured import (
    Life,
    Pauses,
    account,
    lives_of,
    measured_job,
    pauses_of,
    wrong_losses,
)
from bench.spot.real import Places, Setting, play, strategies, undisturbed
from bench.spot.simulation import Mode, simulate
from bench.spot.trace import Change, Membership, Trace
from examples.moe_elastic.demo import CLOSE
from tests.bench.test_plots import drawn
from tests.long import long

# --- the stretch -----------------------------------------------------------------------------------------


def test_a_trace_is_scaled_down_to_the_nearest_number() -> None:
    trace = Trace((Change(0, 12), Change(5, 11), Change(6, 6), Change(7, 5), Change(8, 1)), 10)
    assert trace.scaled(5).changes == (Change(0, 5), Change(6, 3), Change(7, 2), Change(8, 0))
    with pytest.raises(ValueError, match="no node"):
        Trace((), 10).scaled(5)


def test_most_happens_where_most_changes_stand() -> None:
    hasty = [Change(n, 3 + n % 2) for n in range(5)]
    calm = [Change(100, 1), Change(110, 2), Change(120, 3), Change(130, 2)]
    trace = Trace((*hasty, *calm), 200)
    assert trace.busiest_s(30, fewest=2, stand_s=5) == 110
    assert trace.busiest_s(30, fewest=1, stand_s=5) == 100
    assert trace.busiest_s(30, fewest=2, stand_s=0.5) == 0
    with pytest.raises(ValueError, match="not in this trace"):
        trace.busiest_s(30, fewest=5, stand_s=5)
    with pytest.raises(ValueError, match="not in this trace"):
        trace.busiest_s(201, fewest=1, stand_s=5)


def test_nodes_that_come_take_the_hosts_that_are_free() -> None:
    places = Places(3)
    assert places.change(Membership(0, frozenset(), (0, 1, 2))) == ([], [0, 1, 2])
    assert places.change(Membership(1, frozenset({2, 0}), ())) == ([0, 2], [])
    assert places.where == {1: 1}
    assert places.change(Membership(2, frozenset(), (3,))) == ([], [0])
    assert places.change(Membership(3, frozenset({1}), ())) == ([1], [])
    assert places.change(Membership(4, frozenset(), (4, 5))) == ([], [2, 1])
    assert places.where == {3: 0, 4: 2, 5: 1}


def setting(*changes: tuple[float, int], end_s: float, hosts: int = 3) -> Setting:
    stretch = Trace(tuple(Change(*change) for change in changes), end_s)
    return Setting(stretch, hosts, seed=0, batch=40, sample_ms=20.0, every=10)


def test_what_cannot_be_played_is_refused() -> None:
    with pytest.raises(ValueError, match="of at most 3"):
        setting((0, 4), end_s=10)
    with pytest.raises(ValueError, match="too few for 8 experts"):
        setting((0, 1), end_s=10, hosts=1)


def test_how_the_strategies_are_started() -> None:
    every = strategies(setting((0, 5), end_s=10, hosts=5))
    assert {name: (s.nnodes, s.fewest, s.every, s.replicas) for name, s in every.items()} == {
        "ours": ("2:5", 2, 10, 1),
        "lazarus_alone": ("2:5", 2, 50, 0),
        "fixed_reconfigured": ("2:5", 2, 10, None),
        "fixed_checkpoints": ("4", 4, 10, None),
    }


# --- what the logs tell ----------------------------------------------------------------------------------

BEGUN_S = 1000.0
STRETCH = Trace((Change(0, 2), Change(10, 1), Change(14, 2)), 40)
LIVES = (
    Life(2, 4, 2, "nothing", ((0, 5), (1, 6), (2, 7), (3, 8), (4, 9)), (0.5,)),
    Life(20, 23, 2, "disk", ((3, 24), (4, 25.0), (5, 26.0), (6, 27.0)), ()),
)


def _events() -> list[dict[str, Any]]:
    """The logs of both lives, by two ranks of which the second is half a second behind, and what
    else they tell.
    """
    found = []
    for number, life in enumerate(LIVES):
        for rank, late_s in ((0, 0.0), (1, -0.5)):
            told: list[tuple[str, float, Mapping[str, Any]]] = [("met", life.met_s, {})]
            ready = {"ranks": life.ranks, "source": life.source, "step": life.done_s[0][0]}
            told.append(("ready", life.ready_s, ready))
            told += [("step", at_s + 0.5, {"step": step, "loss": 1.0}) for step, at_s in life.done_s]
            if rank == 0:
                told += [("saved", 7.2, {"seconds": s}) for s in life.saves_s]
            found += [
                {"event": event, "life": number, "time_s": BEGUN_S + at_s + late_s, **more}
                for event, at_s, more in told
            ]
    return found


def test_lives_are_read_from_the_logs_of_all_ranks() -> None:
    events = _events()
    cut = {"event": "met", "life": 7, "time_s": BEGUN_S + 12}  # came to nothing
    half = {"event": "ready", "life": 8, "time_s": BEGUN_S + 30, "ranks": 2, "source": "disk"}
    after = {"event": "step", "life": 1, "time_s": BEGUN_S + 41, "step": 7, "loss": 1.0}
    assert lives_of([*reversed(events), cut, half, after], BEGUN_S, 40) == list(LIVES)


def test_where_the_time_went() -> None:
    """Two hosts train until one is lost at 10; at 14 there are two again, and both start from disk,
    three steps back.
    """
    found = account(LIVES, STRETCH, fewest=2)
    assert found.seconds == {
        "train": (10 - 4) + (27 - 23),
        "restore": 2 + 3,
        "restart": 2 + (20 - 14) + (40 - 27),
        "halt": 4,
    }
    assert sum(found.seconds.values()) == STRETCH.end_s
    assert list(found.useful_s) == [5, 6, 7, 8, 9, 26, 27]
    assert (found.useful, found.computed, found.rollbacks) == (7, 9, 1)
    assert [found.useful_between(*span) for span in ((0, 6), (6, 10), (10, 40))] == [1, 4, 2]


def test_an_iteration_that_the_end_cuts_off_is_training_and_a_silent_job_is_none() -> None:
    first = LIVES[0]
    until_the_end = account(LIVES, Trace(STRETCH.changes, 28.5), fewest=2)
    assert until_the_end.seconds["train"] == 6 + 28.5 - 23
    changed = Trace((*STRETCH.changes, Change(29, 1)), 40)
    assert account(LIVES, changed, fewest=1).seconds["train"] == 6 + 29 - 23
    assert account((first,), STRETCH, fewest=3).seconds == {
        "train": 6,
        "restore": 2,
        "restart": 0,
        "halt": 32,
    }
    assert account((), STRETCH, fewest=2).seconds == {
        "train": 0,
        "restore": 0,
        "restart": 36,
        "halt": 4,
    }
    assert LIVES[1].iteration_s == 1


def test_pauses_are_those_of_single_changes() -> None:
    assert pauses_of(LIVES, STRETCH, fewest=1) == Pauses(4, None, None)  # two changes at once
    assert pauses_of(LIVES, STRETCH, fewest=2) == Pauses(4, None, 23 - 14)  # it had halted
    lost, came = Trace((Change(0, 2), Change(10, 1)), 40), Trace((Change(0, 1), Change(10, 2)), 40)
    assert pauses_of(LIVES, lost, fewest=1) == Pauses(4, 13, None)
    assert pauses_of(LIVES, came, fewest=1) == Pauses(4, None, 13)
    assert pauses_of(LIVES, lost, fewest=2) == Pauses(4, None, None)
    assert pauses_of((), lost, fewest=1) == Pauses(None, None, None)
    early = Trace((Change(0, 2), Change(1, 3), Change(10, 2)), 40)
    assert pauses_of(LIVES, early, fewest=1) == Pauses(None, 13, None)
    assert pauses_of(LIVES, early, fewest=3) == Pauses(4 - 1, None, None)


def test_the_simulation_gets_what_was_measured() -> None:
    """Iterations of a second on two hosts; a pause of 13 s after a loss, 3 of them to notice it,
    and half a second for a state on disk.
    """
    found = account(LIVES, STRETCH, fewest=2)
    sizes = {"batch": 40, "experts": 8, "layers": 2, "slots": 4}
    job = measured_job(found, Pauses(4, 13, 10), elastic=True, **sizes)
    assert job is not None
    assert (job.node_samples_per_s, job.iteration_s(2, 1.0), job.iteration_s(4, 1.0)) == (
        20,
        1,
        0.5,
    )
    assert (job.detect_s, job.groups_s) == (3, 10)
    assert job.save_s == pytest.approx(0.5)
    assert (
        measured_job(account((), STRETCH, fewest=2), Pauses(None, None, None), elastic=True, **sizes) is None
    )
    calm = setting((0, 2), (50, 3), end_s=100)
    mode = simulate(calm.membership, 100, strategies(calm)["ours"].predicted(job))
    assert mode.seconds(Mode.PAUSE) == pytest.approx(10 + job.load_s(2, 4) + 10)
    assert mode.seconds(Mode.HALT) == 0


def test_losses_that_are_wrong_are_told_and_those_of_repeated_steps_count() -> None:
    def step(number: int, loss: float) -> dict[str, Any]:
        return {"event": "step", "step": number, "loss": loss}

    expected = {0: 4.0, 1: 3.0, 2: 2.0}
    right = [step(0, 4.0), step(1, 3.0 * (1 + CLOSE / 2)), step(2, 2.0), {"event": "met"}]
    assert wrong_losses(expected, right, close=CLOSE) == []
    assert wrong_losses(expected, [*right, step(1, 3.1), step(1, 3.0)], close=CLOSE) == [
        "loss of step 1: 3.1, undisturbed 3.0"
    ]
    told = wrong_losses(expected, [step(0, float("nan")), step(3, 1.0)], close=CLOSE)
    assert told[:2] == ["step 1 was not done", "step 2 was not done"]
    assert "step 0: nan" in told[2]
    assert "step 3: 1.0, undisturbed None" in told[3]


def test_a_stretch_is_drawn(tmp_path: Path) -> None:
    calm = setting((0, 2), (14, 3), end_s=40)
    found = account(LIVES, calm.stretch, fewest=2)
    job = measured_job(found, Pauses(4, 13, 10), batch=40, experts=8, layers=2, slots=4, elastic=True)
    assert job is not None
    predicted = simulate(calm.membership, 40, strategies(calm)["ours"].predicted(job))
    outcome = real_trace.Outcome(found, Pauses(4, 13, 10), job, predicted, 0.0, 0)
    real_trace.plot(tmp_path / "a.png", calm, {"ours": outcome})
    real_trace.plot(
        tmp_path / "b.png",
        calm,
        {"ours": real_trace.Outcome(found, Pauses(4, 13, 10), None, None, 0.0, 0)},
    )
    assert drawn(tmp_path / "a.png") != drawn(tmp_path / "b.png")


# --- real processes --------------------------------------------------------------------------------------


@long
@pytest.mark.parametrize("name", ["ours", "lazarus_alone", "fixed_reconfigured"])
def test_a_short_stretch_is_trained_right(tmp_path: Path, name: str) -> None:
    """Three hosts, one is lost, one comes; every step is done, and has the loss that it has without all that."""
    played_setting = setting((0, 3), (60, 2), (110, 3), end_s=160)
    strategy = strategies(played_setting)[name]
    (tmp_path / "run").mkdir()
    (tmp_path / "undisturbed").mkdir()
    played = play(played_setting, strategy, tmp_path / "run", lambda text: None)
    steps = [e["step"] for e in played.events if e["event"] == "step"]
    expected = undisturbed(max(steps) + 1, 40, tmp_path / "undisturbed", timeout_s=100)
    assert wrong_losses(expected, played.events, close=CLOSE) == []
    lives = lives_of(played.events, played.begun_s, 160)
    trained = [life for life in lives if life.done_s]
    assert len(trained) >= 3, lives
    found = account(lives, played_setting.stretch, fewest=strategy.fewest)
    if name == "fixed_reconfigured":
        assert [life.ranks for life in trained] == [2] * len(trained)
        assert found.rollbacks >= 2
    else:
        assert {life.ranks for life in trained} == {2, 3}
        assert found.rollbacks == 0
