"""What a process knows of its own start: how long it has been there, and what the daemon tells of the time before."""

from __future__ import annotations

import time

import pytest

from ckptd.client import phase_clock
from ckptd.client.phase_clock import PhaseClock
from ckptd.core.recovery.recovery_phases import RecoveryPhase
from tests.forked import FORKED

Phase = RecoveryPhase


@pytest.fixture
def first_of_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase_clock, "_traced_in", -1)


@pytest.mark.usefixtures("first_of_process")
def test_the_first_start_of_a_process_begins_with_the_process() -> None:
    clock = PhaseClock()
    assert list(clock.durations) == [Phase.IMPORTS, Phase.PROCESS_GROUPS]
    clock.reach(Phase.ATTACH)
    assert list(clock.durations) == [Phase.IMPORTS, Phase.PROCESS_GROUPS, Phase.ATTACH]
    assert all(seconds >= 0.0 for seconds in clock.durations.values())
    assert " s from process_there to attach: imports " in clock.describe()


@pytest.mark.usefixtures("first_of_process")
def test_what_the_daemon_tells_comes_before_the_process() -> None:
    clock = PhaseClock()
    hours = 1e6
    clock.failed(hours + 2.0, hours)
    found = clock.durations
    assert list(found)[:2] == [Phase.OTHERS_STOPPED, Phase.PROCESS_THERE]
    assert found[Phase.OTHERS_STOPPED] == pytest.approx(2.0)
    assert sum(found.values()) == pytest.approx(hours + 2.0, abs=600.0)


@pytest.mark.usefixtures("first_of_process")
@pytest.mark.parametrize(("failure_ago_s", "others_ago_s"), [(-1.0, -1.0), (0.0, 0.0)])
def test_a_failure_that_is_not_known_or_was_found_too_late_is_left_out(
    failure_ago_s: float, others_ago_s: float
) -> None:
    """The second: the daemon was busy, and found the former process dead when this one attached."""
    clock = PhaseClock()
    clock.failed(failure_ago_s, others_ago_s)
    assert list(clock.durations) == [Phase.IMPORTS, Phase.PROCESS_GROUPS]


@pytest.mark.usefixtures("first_of_process")
def test_a_failure_that_was_told_late_is_still_before_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer was under way for longer than the launcher took to start the process."""
    now_s = time.monotonic()
    monkeypatch.setattr(phase_clock, "_process_age_s", lambda: 1.0)
    clock = PhaseClock()
    monkeypatch.setattr("time.monotonic", lambda: now_s + 600.0)
    clock.failed(300.0, 300.0)
    assert list(clock.durations)[:2] == [Phase.OTHERS_STOPPED, Phase.PROCESS_THERE]
    assert clock.durations[Phase.PROCESS_THERE] == 0.0


@pytest.mark.usefixtures("first_of_process")
def test_alone_on_its_node_it_waited_for_no_other() -> None:
    clock = PhaseClock()
    clock.failed(1e6, -1.0)
    assert list(clock.durations) == [Phase.PROCESS_THERE, Phase.IMPORTS, Phase.PROCESS_GROUPS]


@pytest.mark.usefixtures("first_of_process")
def test_a_later_checkpointer_of_the_process_has_no_phases_before_itself() -> None:
    """Between both the first one has trained."""
    PhaseClock()
    later = PhaseClock()
    later.failed(1e6, 1e6)
    assert later.durations == {}
    later.reach(Phase.ATTACH)
    assert list(later.durations) == [Phase.ATTACH]


@pytest.mark.usefixtures("first_of_process")
def test_a_process_whose_start_is_not_known_begins_with_its_checkpointer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unreadable(*_: object, **__: object) -> str:
        raise PermissionError("hidepid")

    with monkeypatch.context() as without_proc, caplog.at_level("INFO"):
        without_proc.setattr("pathlib.Path.read_text", unreadable)
        clock = PhaseClock()
    assert clock.durations == {}
    assert "the start of this process is not known: hidepid" in caplog.text


def in_a_child(results: object, begun_s: float) -> None:
    clock = PhaseClock()
    results.put((clock.durations, time.monotonic() - begun_s))  # type: ignore[attr-defined]


def test_a_forked_process_begins_with_its_fork_and_has_imported_nothing() -> None:
    """Its server had imported the client before; that is no part of this start."""
    results = FORKED.SimpleQueue()
    process = FORKED.Process(target=in_a_child, args=(results, time.monotonic()))
    process.start()
    durations, at_most_s = results.get()
    process.join(60)
    assert list(durations) == [Phase.PROCESS_GROUPS]
    assert 0.0 <= durations[Phase.PROCESS_GROUPS] <= at_most_s
