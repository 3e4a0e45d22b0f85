"""The choice between copying beside training and in it, fed with made-up iteration times."""

from __future__ import annotations

import random

from ckptd.client.copymode import CopyModeChooser


def _drive(chooser: CopyModeChooser, threaded_s: float, inline_s: float, noise: float, steps: int) -> None:
    rng = random.Random(7)
    for _ in range(steps):
        base = inline_s if chooser.inline else threaded_s
        chooser.note(base * (1 + rng.uniform(0, noise)))


def test_threaded_stays_where_a_core_is_free() -> None:
    chooser = CopyModeChooser()
    _drive(chooser, 0.100, 0.110, 0.02, 40)
    assert chooser.decided
    assert not chooser.inline


def test_inline_wins_where_training_keeps_every_core_busy() -> None:
    chooser = CopyModeChooser()
    _drive(chooser, 0.120, 0.105, 0.02, 40)
    assert chooser.decided
    assert chooser.inline
    assert "threaded" in chooser.reason


def test_a_tie_leaves_the_trainer_alone() -> None:
    chooser = CopyModeChooser()
    _drive(chooser, 0.100, 0.0999, 0.0, 40)
    assert not chooser.inline


def test_a_slow_drift_does_not_decide() -> None:
    """Iterations grow by a few percent over the trial; blocks alternate, so neither mode is blamed for it."""
    chooser = CopyModeChooser()
    for i in range(40):
        chooser.note((0.1 + i * 1e-4) * (1.05 if chooser.inline else 1.0))
    assert not chooser.inline


def test_the_decision_is_looked_at_again() -> None:
    chooser = CopyModeChooser(again_after=50)
    _drive(chooser, 0.1, 0.2, 0.0, 40)
    assert chooser.decided
    _drive(chooser, 0.2, 0.1, 0.0, 100)
    assert chooser.decided
    assert chooser.inline
