"""A rank that is not lost is parked before its process ends, however that comes about; and what is
parked is what it was, to the bit.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import uuid
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from ckptd.client.daemon_link.snapshot_image import SnapshotImage
from ckptd.client.model.freezing import Tape
from ckptd.client.model.live_state import LiveState
from ckptd.client.model.replicated_params import NOTHING_SHARED
from ckptd.client.recovery.replay import Replay
from ckptd.client.recovery.snapshot_loading import SnapshotLoader
from ckptd.client.schedule.snapshot_plan import plan_from_payload
from ckptd.core.slots.slots import SlotState
from ckptd.ctl.main import main as ckptctl
from ckptd.cuda.engine import CpuEngine, HostMemory
from ckptd.memory.segment_file import open_segment
from ckptd.storage.image import ImageView, verify
from ckptd.transport.messages import GetSnapshots, RankSnapshots, Snapshots
from tests.ckptd.running import eventually
from tests.e2e.harness import DaemonProcess
from tests.e2e.parking_job import READY, Job, Plot, act, unlike
from tests.forked import FORKED

pytestmark = pytest.mark.slow


class Life:
    """The ranks of one life, each with its part of the plot."""

    def __init__(self, daemon: DaemonProcess, folder: Path, **plot: Any) -> None:
        self.daemon, self.folder, self.run = daemon, folder, uuid.uuid4().hex[:8]
        folder.mkdir(exist_ok=True)
        told = Plot(folder, self.run, daemon.endpoint, **plot)
        self.ranks: list[BaseProcess] = [
            FORKED.Process(target=act, args=(replace(told, rank=rank),)) for rank in range(told.world_size)
        ]
        for process in self.ranks:
            process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.ranks:
            process.kill()
            process.join()

    def reach(self, step: int, rank: int = 0) -> None:
        """Wait until this rank is at that step."""

        def there() -> bool:
            path = self.folder / f"at-{rank}"
            text = path.read_text() if path.exists() else ""
            assert self.ranks[rank].is_alive(), self.logs
            return bool(text) and int(text) >= step

        eventually(there, f"rank {rank} is at step {step}", timeout_s=90)

    def exit_codes(self) -> list[int | None]:
        for process in self.ranks:
            process.join(60)
        return [process.exitcode for process in self.ranks]

    @property
    def logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("log-*")))

    def told(self) -> list[RankSnapshots]:
        found = self.daemon.ask(GetSnapshots("e2e", self.run), Snapshots).ranks
        return sorted(found, key=lambda rank: rank.rank)

    def parked(self) -> list[list[int]]:
        """The iterations at which each rank is parked."""
        return [
            sorted(slot.iteration for slot in rank.parked if slot.state == "sealed") for rank in self.told()
        ]

    def restored(self, rank: int, iteration: int) -> Job:
        """A fresh job with what this rank parked as the only image of its replay."""
        (path,) = self.daemon.segment_dir.glob(f"e2e~{self.run}~r{rank}~g*.parked")
        segment = open_segment(path)
        index, header = next(
            (i, h) for i, h in segment.headers() if h.state is SlotState.SEALED and h.iteration == iteration
        )
        image = segment.image(index, header)
        verify(image, header.header_digest)
        fresh = Job(seed=5)
        binding = LiveState(fresh.model, [fresh.optimizer], None)
        told = segment.descriptor
        identity = {"job": told.job, "run": told.run, "rank": str(rank), "world_size": "1"}
        plan = plan_from_payload(binding, told.client, identity, segment.geometry, NOTHING_SHARED)
        base = segment.geometry.slot_offset(index)
        parked = SnapshotImage(iteration, ImageView(image), HostMemory(segment.buffer), base)
        replay = Replay(
            SnapshotLoader(binding, plan.operators, CpuEngine()),
            [parked],
            stateful=fresh.state,
            tape=Tape(),
            freezing="drop",
        )
        assert replay.dense
        replay.load_state()
        replay.load_tensors()
        replay.begin_first_step()
        return fresh

    def top(self, rank: int, step: int) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(self.folder / f"top-{rank}-{step}.pt")
        return found


def assert_parked_as_it_was(life: Life, rank: int, step: int) -> None:
    """And not as it was a step before."""
    parked = life.restored(rank, step).everything()
    assert unlike(parked, life.top(rank, step)) == [], life.logs
    assert {"a.weight", "rng", "seen", "state"} <= set(unlike(parked, life.top(rank, step - 1)))


def test_sigterm_parks_also_a_rank_that_hangs_in_a_receive(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Rank 1's main thread is in gloo, where no handler of Python's runs; rank 0's is in Python.
    Both end as SIGTERM ends a process, unless rank 0 is gone first: then rank 1's receive fails.
    """
    with Life(daemon, tmp_path, world_size=2, hang_at=READY) as life:
        for rank in (0, 1):
            life.reach(READY, rank)
        for process in life.ranks:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)
        first, second = life.exit_codes()
        assert first == -signal.SIGTERM, life.logs
        assert second == -signal.SIGTERM or "Connection closed by peer" in life.logs, life.logs
        assert life.parked() == [[READY], [READY]], life.logs
        for rank in (0, 1):
            assert_parked_as_it_was(life, rank, READY)
    told = daemon.events("parked", life.run)
    assert len(told) == 2
    # The daemon tells of one that ended too quickly.
    ways = (f"parked at iteration {READY} in ", f"parked at iteration {READY}: process ")
    assert all(text.startswith(ways) for text in told)


def test_the_survivor_of_a_kill_whose_receive_fails_is_parked(daemon: DaemonProcess, tmp_path: Path) -> None:
    with Life(daemon, tmp_path, world_size=2, die_at=READY) as life:
        assert life.exit_codes() == [-signal.SIGKILL, 1], life.logs
        assert life.parked() == [[], [READY]], life.logs
        assert_parked_as_it_was(life, 1, READY)
        assert f"the loop is left in the middle of step {READY}" in life.logs


def test_what_is_asked_for_or_overdue_is_parked_and_training_goes_on(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """And a worker that is forked, and ended with SIGTERM, parks nothing and ends nobody."""
    options = {"park_after_s": 1.0}
    plot = {"wait_at": READY + 1, "fork_at": READY, "total": 200, "options": options}
    with Life(daemon, tmp_path, world_size=2, **plot) as life:
        life.reach(READY)
        child = tmp_path / "child"
        eventually(lambda: child.exists() and child.read_text() != "", "the worker has ended")
        assert child.read_text() == str(-signal.SIGTERM)
        assert "SIGTERM" not in life.logs
        overdue = READY + 1
        life.reach(overdue)
        eventually(lambda: all(overdue in found for found in life.parked()), "they are overdue")
        for rank in (0, 1):
            assert_parked_as_it_was(life, rank, overdue)
        (tmp_path / "go_on").touch()
        life.reach(overdue + 1)
        told = io.StringIO()
        with contextlib.redirect_stdout(told):
            code = ckptctl(["park", "e2e", life.run, "--json", "--endpoint", daemon.endpoint])
        found = json.loads(told.getvalue())["ranks"]
        assert (code, [r["rank"] for r in found]) == (0, [0, 1]), (found, life.logs)
        assert all(r["iteration"] > overdue for r in found), found
        assert life.exit_codes() == [0, 0], life.logs


def test_the_users_handler_and_wakeup_descriptor_get_what_is_theirs(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    with Life(daemon, tmp_path, handler=True, hang_at=READY, options={"park": True}) as life:
        life.reach(READY)
        (process,) = life.ranks
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        assert life.exit_codes() == [3], life.logs
        assert life.parked() == [[READY]], life.logs
        assert (tmp_path / "woken").read_bytes() == bytes([signal.SIGTERM])
        assert "SIGTERM" in life.logs


def test_killed_in_the_middle_of_parking_it_leaves_what_was_parked_before(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """It is overdue once, and parked; and again in the next step, where the copy never ends."""
    plot = {"wait_at": READY, "gate_at": READY + 1, "hang_at": READY + 1}
    options = {"park": True, "park_after_s": 1.0}
    with Life(daemon, tmp_path, **plot, options=options) as life:
        life.reach(READY)
        eventually(lambda: READY in life.parked()[0], "it is overdue")
        (tmp_path / "go_on").touch()
        life.reach(READY + 1)
        eventually(lambda: (tmp_path / "copying").exists(), "it is being parked")
        (process,), (rank,) = life.ranks, life.told()
        assert sorted(slot.state for slot in rank.parked) == ["filling", "sealed"]
        process.kill()
        process.join()

        def settled() -> bool:
            (rank,) = life.told()
            return sorted(slot.state for slot in rank.parked) == ["free", "sealed"]

        eventually(settled, "the daemon has freed it")
        assert life.parked() == [[READY]]
        assert_parked_as_it_was(life, 0, READY)
