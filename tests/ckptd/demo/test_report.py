"""The demo's conclusions: it must be able to fail."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.core.recovery.recovery_phases import RecoveryPhase
from ckptd.demo.kills import plan_kills
from ckptd.demo.lab import Trainer, read_events
from ckptd.demo.report import (
    Kill,
    differing_tensors,
    draw,
    losses_by_step,
    phase_table,
    recoveries,
    redone_steps,
    step_time_ms,
)


def _step(time_s: float, step: int, loss: float, *, pid: int = 1, replaying: bool = False) -> Any:
    return {
        "event": "step",
        "time_s": time_s,
        "step": step,
        "loss": loss,
        "norm": loss,
        "pid": pid,
        "replaying": replaying,
    }


def test_equal_states_have_no_differences() -> None:
    state = {"a": torch.arange(3.0), "b": torch.tensor(1)}
    assert differing_tensors(state, {name: t.clone() for name, t in state.items()}) == []


@pytest.mark.parametrize(
    ("actual", "complaint"),
    [
        ({"a": torch.tensor([0.0, 1.0, 2.5])}, "a: 1 of 3 elements differ"),
        ({"a": torch.tensor([0.0, 1.0, 2.0]).double()}, "a: torch.float32"),
        ({"a": torch.zeros(2)}, "a: torch.float32(3,)"),
        ({}, "a: only in the undisturbed run"),
        ({"a": torch.arange(3.0), "b": torch.zeros(1)}, "b: only in the killed run"),
    ],
)
def test_every_kind_of_difference_is_named(actual: dict[str, torch.Tensor], complaint: str) -> None:
    lines = differing_tensors({"a": torch.arange(3.0)}, actual)
    assert len(lines) == 1
    assert lines[0].startswith(complaint)


def test_a_step_done_again_with_another_loss_is_counted() -> None:
    events = [_step(1, 0, 5.0), _step(2, 1, 4.0), _step(4, 1, 4.0, pid=2), _step(5, 1, 4.5, pid=3)]
    assert redone_steps(events) == (2, 1)
    assert losses_by_step(events) == {0: 5.0, 1: 4.5}


def test_recovery_is_measured_to_the_first_new_iteration() -> None:
    kills = [Kill(10.0, "trainer", 7), Kill(20.0, "daemon", 12), Kill(30.0, "trainer", 15)]
    events = [
        _step(10.01, 7, 1.0),  # it ended while the kill was on its way
        {"event": "attached", "time_s": 12.0},
        _step(12.5, 5, 1.0, replaying=True),
        _step(12.6, 6, 1.0, replaying=True),
        _step(12.7, 7, 1.0),
        _step(13.0, 8, 1.0),
        {"event": "back", "time_s": 13.1, "phases": {"phase_attach_s": 0.5, "phase_replayed_s": 0.25}},
        {"event": "attached", "time_s": 31.0},
        _step(32.0, 14, 1.0),
    ]
    first, second, third = recoveries(kills, events)
    assert first is not None
    assert (first.resumed_at, first.redone, first.start_s, first.back_s) == (5, 3, 2.0, 3.0)
    assert first.phases == {RecoveryPhase.ATTACH: 0.5, RecoveryPhase.REPLAYED: 0.25}
    assert second is None, "a trainer does not recover from the loss of a daemon: it goes on"
    assert third is not None
    assert third.back_s is None, "it never got past the iteration it was killed in"


def test_the_table_of_phases_adds_up_to_the_whole() -> None:
    one = {RecoveryPhase.ATTACH: 0.25, RecoveryPhase.REPLAYED: 0.5}
    other = {RecoveryPhase.IMPORTS: 2.0, RecoveryPhase.ATTACH: 0.125}
    lines = phase_table({"#1": (one, 1.0), "#2": (other, 2.25)}).splitlines()
    assert [line.split() for line in lines if not line.startswith("-")] == [
        ["phase,", "ms", "#1", "#2"],
        ["imports", "-", "2000"],
        ["attach", "250", "125"],
        ["replayed", "500", "-"],
        ["rest", "250", "125"],
        ["back", "1000", "2250"],
    ]


def test_step_time_leaves_out_replay_and_restarts() -> None:
    events = [
        _step(0.0, 0, 1.0),
        _step(0.1, 1, 1.0),
        _step(5.0, 1, 1.0, pid=2, replaying=True),
        _step(9.0, 2, 1.0, pid=2),
        _step(9.1, 3, 1.0, pid=2),
    ]
    assert step_time_ms(events) == pytest.approx(100.0)


@pytest.mark.parametrize("seed", range(20))
def test_kill_plan_holds_what_the_demo_promises(seed: int) -> None:
    plan = plan_kills(random.Random(seed), steps=210, window=4, count=5)
    assert [kill.step for kill in plan] == sorted(kill.step for kill in plan)
    assert sum(kill.victim.startswith("trainer") for kill in plan) >= 5
    assert sum("daemon" in kill.victim for kill in plan) >= 1
    assert plan[-1].during_replay
    assert plan[0].step > 3 * 4
    assert plan[-1].step < 210 - 4
    assert plan == plan_kills(random.Random(seed), steps=210, window=4, count=5)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="more --steps"):
        plan_kills(random.Random(0), steps=40, window=4, count=5)


def test_torn_lines_of_a_killed_writer_are_skipped(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    log.write_bytes(b'{"event": "a"}\n{"event": "tor\n{"event": "b"}\n{"ev')
    assert [event["event"] for event in read_events(log)] == ["a", "b"]
    trainer = Trainer("run", tmp_path, [])
    assert [event["event"] for event in trainer.drain()] == ["a", "b"]
    with log.open("ab") as sink:
        sink.write(b'ent": "c"}\n')
    assert [event["event"] for event in trainer.drain()] == ["a", "b", "c"]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib (extra: demo)")
    losses = {step: 5.0 / (step + 1) for step in range(10)}
    path = tmp_path / "out" / "demo.png"
    draw(path, losses, losses, [Kill(1.0, "trainer", 4)])
    assert path.read_bytes().startswith(b"\x89PNG")
