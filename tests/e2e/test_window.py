"""The window that is chosen without being told: widened while training, and still exact across the change."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon

AFTER = 30  # steps after the change, so that a suffix of the new snapshots is complete


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """One of its own: the session's may be full of other runs, and a wider window is only taken
    where there is memory.
    """
    with own_daemon("--memory", "1GiB") as process:
        yield process


def test_a_window_that_stalls_training_is_widened(jobs: Jobs, tmp_path: Path) -> None:
    """Dense snapshots of a large table stall each step; another generation with a larger window
    replaces them. On a busy machine that takes some fifty steps, and a complete suffix of the new ones more.
    """
    run, at = uuid.uuid4().hex[:8], tmp_path / "at"
    options = ("--run", run, "--set", "window=null")
    widened = ("--total", "1000", "--kill-after-wider-window", str(AFTER), "--progress", str(at))
    jobs.run("large_table", *options, *widened, expect_killed=True)
    killed_at = int(at.read_text().split()[0])
    total = ("--total", str(killed_at + 5))
    reference = jobs.run("large_table", *total, daemon="none")
    resumed = jobs.run("large_table", *options, *total, "--seed", "77")
    report = jobs.report(resumed)
    assert report["window"] >= 2, jobs.log(resumed)
    assert report["resumed_from"] > killed_at - AFTER, jobs.log(resumed)
    assert differences(reference, resumed) == []
