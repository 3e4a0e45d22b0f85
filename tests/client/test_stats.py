"""The client's counters."""

from __future__ import annotations

from ckptd.client.stats import Stats
from ckptd.core.recovery.recovery_phases import RecoveryPhase


def test_stalls_add_up() -> None:
    stats = Stats()
    stats.note_stall(0.001, 0.003)
    stats.note_stall(0.002, 0.0)
    found = stats.as_dict()
    assert found["stall_ms_last"] == 2.0
    assert found["stall_ms_max"] == 4.0
    assert found["stall_ms_mean"] == 3.0
    assert found["steps"] == 2.0


def test_phases_are_counters_once_they_are_known() -> None:
    stats = Stats()
    assert not [name for name in stats.as_dict() if name.startswith("phase_")]
    stats.phases = {RecoveryPhase.IMPORTS: 3.0, RecoveryPhase.PLAN: 0.5}
    found = stats.as_dict()
    assert (found["phase_imports_s"], found["phase_plan_s"]) == (3.0, 0.5)
    assert "phase_replayed_s" not in found


def test_all_are_numbers_before_anything_happened() -> None:
    found = Stats().as_dict()
    assert found["stall_ms_mean"] == 0.0
    assert all(isinstance(v, float) for v in found.values())
