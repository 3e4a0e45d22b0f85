"""Replicas that are parked, without pipelines: the one that is lost takes over what its peer has, and nothing is replayed."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs
from tests.e2e.ranks import Ranks, story

pytestmark = pytest.mark.slow

_CASE = "ddp/lost_before_its_gradients"
_PARKS = ("--set", "park=true", "--step-ms", "150")


def _end_as_torchrun_would(life: Ranks, lost: int) -> None:
    """One rank dies; the others fail in a collective, or hang in it until they are told to end."""
    life.started[lost][0].join(90)
    for process, _ in life.started:
        process.terminate()
        process.join(30)
    life.kill()


def test_a_replica_that_is_lost_takes_over_its_peers_state(
    jobs: Jobs, daemon: DaemonProcess
) -> None:
    """With its own random state and data position; and without any iteration run again but the one that was cut off."""
    run = uuid.uuid4().hex[:8]

    def life(*options: str, **more: Any) -> Ranks:
        return Ranks(jobs, run, *options, case=_CASE, world_size=3, total=18, kill_at=14, **more)

    references = life(daemon="none").end()
    before = life(*_PARKS, killed=1)
    _end_as_torchrun_would(before, 1)
    after = life("--seed", "7", *_PARKS)
    outs = after.end()
    told = story(daemon, run, before, after)
    assert "rank 1 with a peer's state of 14, ranks 0, 2 parked at 14" in told
    for rank, (reference, out) in enumerate(zip(references, outs, strict=True)):
        report = jobs.report(out)
        assert (report["resumed_from"], report["replayed_with_frozen"]) == (14, 0), told
        assert differences(reference, out) == [], f"rank {rank}{told}"
