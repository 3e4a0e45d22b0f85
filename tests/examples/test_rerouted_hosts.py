"""Whoever waits for something of a job hears of its end."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from examples.rerouted_hosts import ReroutedHosts, RunEnded


@pytest.fixture
def ended(tmp_path: Path) -> ReroutedHosts:
    """A job whose only host has ended in order."""
    hosts = ReroutedHosts("job", tmp_path, 1, ["module"])
    hosts.hosts[0] = subprocess.Popen(["true"])
    hosts.hosts[0].wait()
    (tmp_path / "host-r0.log").write_text("the end")
    return hosts


def test_what_a_job_has_not_reached_at_its_end_is_not_waited_for(ended: ReroutedHosts) -> None:
    with pytest.raises(RunEnded, match=r"job: the return was not reached; .*the end"):
        ended.until(lambda: False, "the return")


def test_what_it_reached_last_counts(ended: ReroutedHosts) -> None:
    looks = iter([False, True, True])
    ended.until(lambda: next(looks), "the end")
    ended.wait()
