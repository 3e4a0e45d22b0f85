"""The control of the window against a simulated device: from 0.1 to 100 GB of state, 20 ms to 30 s an iteration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.simulation.window_loop import (
    FIRST_RUN,
    H100,
    Control,
    Loop,
    Machine,
    Past,
    Shape,
    Told,
    best_window,
)

BOUND = 0.01
STATES_GB = (0.1, 1.0, 4.0, 20.0, 100.0)
ITERATIONS_S = (0.02, 0.088, 0.5, 3.0, 30.0)
MACHINES = {
    "h100": H100,
    "slow digests": replace(H100, digest=8.0),
    "slow link": replace(H100, link=12.0),
    "irregular": replace(H100, digest=16.0, noise=0.03),
}
# Memory for a ring is made beside training, which takes as long as it takes: here it does not.
QUICK = {name: replace(machine, make=1e6) for name, machine in MACHINES.items()}
SHAPES = [(state, iteration) for state in STATES_GB for iteration in ITERATIONS_S]


def lost(told: list[Told]) -> float:
    return sum(t.copy_wait_s + t.seal_wait_s for t in told) / sum(t.iteration_s for t in told)


def play(machine: Machine, shape: Shape, steps: int = 180, *, seed: int = 0) -> Loop:
    loop = Loop(machine, shape, Control(bound=BOUND), seed=seed)
    loop.run(steps)
    return loop


@pytest.mark.parametrize(("state_gb", "iteration_s"), SHAPES)
@pytest.mark.parametrize("name", QUICK)
def test_the_window_is_steady_after_twenty_snapshots_and_costs_nothing_if_any_does(
    name: str, state_gb: float, iteration_s: float
) -> None:
    machine, shape = QUICK[name], Shape(state_gb, iteration_s)
    loop = play(machine, shape)
    best = best_window(machine, shape, bound=BOUND)
    windows = [t.window for t in loop.told]
    assert windows == sorted(windows)
    if best is None:
        assert loop.control.misfit
        return
    assert len(loop.decided) <= 2
    assert all(at <= 20 for at, _ in loop.decided) or windows[-1] - windows[26] <= 2
    assert lost(loop.told[-60:]) <= BOUND
    assert windows[-1] <= 2 * best + 1


def test_the_first_run_on_a_device_is_reproduced() -> None:
    """4 GB of state every 88 ms made an iteration four times as long, at a window of one, for ever."""
    told = Loop(FIRST_RUN, Shape(4.0, 0.088), Past(), trainer_seals=True, window=1).run(200)
    tail = told[-100:]
    assert sum(t.iteration_s for t in tail) / sum(t.plain_s for t in tail) == pytest.approx(
        356 / 88, rel=0.03
    )
    assert sum(t.seal_wait_s for t in tail) / len(tail) == pytest.approx(0.136, rel=0.03)


def test_the_control_mends_the_first_run_without_any_change_of_the_machine() -> None:
    loop = play(replace(FIRST_RUN, make=1e6), Shape(4.0, 0.088), steps=400)
    assert lost(loop.told[-100:]) <= BOUND
    tail = loop.told[-100:]
    assert sum(t.iteration_s for t in tail) / sum(t.plain_s for t in tail) < 1.25
    assert len(loop.decided) <= 3


@pytest.mark.parametrize("seed", range(20))
def test_noise_changes_nothing(seed: int) -> None:
    """A window that costs nothing stays, however long a run is."""
    loop = play(replace(H100, noise=0.03), Shape(4.0, 0.5), steps=2000, seed=seed)
    assert [t.window for t in loop.told] == [1] * 2000


def test_a_slowdown_of_another_cause_is_followed_once() -> None:
    """From step 60 on the model takes twice as long by itself: smaller snapshots do not help, and none follow."""
    shape = Shape(1.0, 0.5)
    control = Control(bound=BOUND)
    loop = Loop(replace(H100, make=1e6), shape, control)
    loop.run(60)
    loop.shape = Shape(1.0, 1.0)
    loop.go_on(600)
    assert len(loop.decided) == 1


def test_where_no_window_is_without_cost_it_says_so() -> None:
    loop = play(replace(H100, make=1e6), Shape(100.0, 0.088))
    assert loop.control.misfit
    assert loop.told[-1].window == 64
