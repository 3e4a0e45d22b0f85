"""One rank is lost, the others are parked: only what was lost is had in another way, and the end is the same to the bit."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs
from tests.e2e.ranks import Ranks, story

pytestmark = pytest.mark.slow

_LOST_AT = 14
_PARKS = ("--set", "park=true", "--step-ms", "150")


def _end_as_torchrun_would(life: Ranks, lost: int) -> None:
    """One rank dies; the others fail in a collective, or hang in it until they are told to end."""
    life.started[lost][0].join(90)
    for process, _ in life.started:
        process.terminate()
        process.join(30)
    life.kill()


def _parked_and_lost(jobs: Jobs, daemon: DaemonProcess, case: str) -> tuple[list[int], str]:
    """By rank the steps that were replayed with frozen operators, and what was told. Rank 1 of three is lost."""
    run = uuid.uuid4().hex[:8]

    def life(*options: str, **more: Any) -> Ranks:
        told: dict[str, Any] = {
            "case": case,
            "world_size": 3,
            "total": 18,
            "kill_at": _LOST_AT,
            **more,
        }
        return Ranks(jobs, run, *options, **told)

    references = life(daemon="none").end()
    before = life(*_PARKS, killed=1)
    _end_as_torchrun_would(before, 1)
    after = life("--seed", "7", *_PARKS)
    outs = after.end()
    told = story(daemon, run, before, after)
    for rank, (reference, out) in enumerate(zip(references, outs, strict=True)):
        assert differences(reference, out) == [], f"rank {rank}{told}"
    return [jobs.report(out)["replayed_with_frozen"] for out in outs], told


def test_a_replica_that_is_lost_takes_over_its_peers_state(
    jobs: Jobs, daemon: DaemonProcess
) -> None:
    """With its own random state and data position; and without any iteration run again but the one that was cut off."""
    replayed, told = _parked_and_lost(jobs, daemon, "ddp/lost_before_its_gradients")
    assert "rank 1 with a peer's state of 14, ranks 0, 2 parked at 14" in told
    assert replayed == [0, 0, 0], told


def test_a_stage_that_is_lost_replays_alone_also_with_a_norm_of_all_stages(
    jobs: Jobs, daemon: DaemonProcess
) -> None:
    replayed, told = _parked_and_lost(jobs, daemon, "logged/one_f_one_b")
    assert "ranks 0, 2 parked at 14" in told, told
    assert replayed[0] == replayed[2] == 0 < replayed[1], told
