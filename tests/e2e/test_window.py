"""The window that is chosen without being told: widened while training, and still exact across the change."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """One of its own: the session's may be full of other runs, and a wider window is only taken
    where there is memory.
    """
    with own_daemon("--memory", "1GiB") as process:
        yield process


def test_a_window_that_stalls_training_is_widened(jobs: Jobs) -> None:
    """Dense snapshots of a large table stall each step; another generation with a larger window
    replaces them. On a busy machine that takes some fifty steps, and a complete suffix of the new ones more.
    """
    run = uuid.uuid4().hex[:8]
    options = ("--total", "155", "--run", run, "--set", "window=null")
    reference = jobs.run("large_table", "--total", "155", daemon="none")
    jobs.run("large_table", *options, "--kill-at", "150", expect_killed=True)
    resumed = jobs.run("large_table", *options, "--seed", "77")
    report = jobs.report(resumed)
    assert report["window"] >= 2, jobs.log(resumed)
    assert report["resumed_from"] >= 100, jobs.log(resumed)
    assert differences(reference, resumed) == []
