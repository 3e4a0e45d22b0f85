"""Replicas that are parked, without pipelines: the one that is lost takes over what its peer has,
and nothing is replayed.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.e2e.localized import damage
from tests.e2e.ranks import Ranks, story
from tests.long import long

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


class Story:
    """Three replicas, of which rank 1 is lost in step 14."""

    def __init__(self, jobs: Jobs, daemon: DaemonProcess) -> None:
        self._jobs, self._daemon, self.run = jobs, daemon, uuid.uuid4().hex[:8]
        self._references = self._life(daemon="none").end()
        # A peer's state is of use to who has its own random state: that of its newest snapshot.
        self._before = self._life(*_PARKS, killed=1, each={1: ("--kill-sealed",)})
        _end_as_torchrun_would(self._before, 1)

    def ends_exact_without_any_replay(self, reason: str) -> None:
        """With their own random state and data position; and without any iteration run again but
        the one that was cut off.
        """
        after = self._life("--seed", "7", *_PARKS)
        outs = after.end()
        told = story(self._daemon, self.run, self._before, after)
        assert reason in told, told  # whole: of a comparison, pytest shows only the ends
        for rank, (reference, out) in enumerate(zip(self._references, outs, strict=True)):
            report = self._jobs.report(out)
            assert (report["resumed_from"], report["replayed_with_frozen"]) == (14, 0), told
            assert differences(reference, out) == [], f"rank {rank}{told}"

    def _life(self, *options: str, **more: Any) -> Ranks:
        return Ranks(self._jobs, self.run, *options, case=_CASE, world_size=3, total=18, kill_at=14, **more)


def test_a_replica_that_is_lost_takes_over_its_peers_state(jobs: Jobs, daemon: DaemonProcess) -> None:
    run = Story(jobs, daemon)
    run.ends_exact_without_any_replay("rank 1 with a peer's state of 14, ranks 0, 2 parked at 14")


@long
def test_where_a_peers_state_is_damaged_another_peers_is_taken(tmp_path: Path) -> None:
    """Also by the one whose state it is."""
    with own_daemon() as daemon:
        run = Story(Jobs(tmp_path, daemon.endpoint), daemon)
        damage(daemon.segment_dir, run.run, 0, "parked")
        run.ends_exact_without_any_replay("ranks 0, 1 with a peer's state of 14, rank 2 parked at 14")
