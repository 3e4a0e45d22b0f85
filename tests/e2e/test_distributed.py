"""Two data-parallel ranks, each with a segment of its own: one is killed, both come back from the same iteration."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType

import pytest

from ckptd.memory.ring import SlotState
from ckptd.memory.segments import open_segment
from ckptd.storage.image import ImageView
from ckptd.transport.messages import Events, GetEvents, GetSnapshots, Snapshots
from tests.ckptd.running import eventually
from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs

TOTAL, KILL_AT = 15, 11
RANKS = range(2)


class Ranks:
    """Both ranks of one life, started as torchrun would: its environment, gloo over the loopback interface."""

    def __init__(
        self,
        jobs: Jobs,
        run: str,
        *options: str,
        daemon: str | None = None,
        killed: int | None = None,
        each: Mapping[int, tuple[str, ...]] = MappingProxyType({}),
    ) -> None:
        self._jobs = jobs
        store = jobs.folder / f"store-{uuid.uuid4().hex[:8]}"
        self.started: list[tuple[BaseProcess, Path]] = []
        for rank in RANKS:
            dies = ("--kill-at", str(KILL_AT), "--kill-point", "backward") if rank == killed else ()
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(RANKS)),
                "GLOO_SOCKET_IFNAME": "lo",
            }
            self.started.append(
                jobs.start(
                    "drop",
                    *("--total", str(TOTAL), "--run", run, "--store", str(store)),
                    *(*options, *dies, *each.get(rank, ())),
                    daemon=daemon,
                    name=f"rank{rank}",
                    environment=environment,
                )
            )

    @property
    def logs(self) -> str:
        """What both have written so far."""
        return "\n".join(f"-- log of {out.stem}\n{self._jobs.log(out)}" for _, out in self.started)

    def end(self) -> list[Path]:
        """Wait for the orderly end of both."""
        return [self._jobs.end(process, out, timeout_s=90) for process, out in self.started]

    def end_by_the_death_of(self, rank: int) -> None:
        """Wait until that rank has killed itself; the other hangs in a collective, or fails, and is killed too."""
        process, out = self.started[rank]
        process.join(90)
        died = process.exitcode
        for other, _ in self.started:
            other.kill()
            other.join()
        assert died == -signal.SIGKILL, self._jobs.log(out)


def story(daemon: DaemonProcess, run: str, *lives: Ranks) -> str:
    """What all ranks and the daemon have told, for the message of a test that fails."""
    events = [
        f"{e.level} {e.kind} rank {e.rank}: {e.message}"
        for e in daemon.ask(GetEvents(limit=10_000), Events).events
        if e.run == run or run in e.message
    ]
    return "\n".join(["", *(life.logs for life in lives), "-- events of the daemon", *events])


@pytest.fixture
def run() -> str:
    return uuid.uuid4().hex[:8]


@pytest.mark.slow
@pytest.mark.parametrize("victim", RANKS)
def test_a_killed_rank_takes_both_back_to_the_same_iteration(
    jobs: Jobs, daemon: DaemonProcess, run: str, victim: int
) -> None:
    """Rank 0 and rank 1 may hold different newest snapshots: they agree on one, and both end at the exact bits."""
    references = Ranks(jobs, run, daemon="none").end()
    before = Ranks(jobs, run, killed=victim)
    before.end_by_the_death_of(victim)
    after = Ranks(jobs, run, "--seed", "7")
    outs = after.end()
    resumed = {jobs.report(out)["resumed_from"] for out in outs}
    assert len(resumed) == 1, story(daemon, run, before, after)
    assert resumed <= set(range(KILL_AT - 2, KILL_AT + 1)), story(daemon, run, before, after)
    for reference, out in zip(references, outs, strict=True):
        assert differences(reference, out) == []


@pytest.mark.slow
def test_damage_on_one_rank_takes_both_to_the_next_older_suffix(
    jobs: Jobs, daemon: DaemonProcess, run: str
) -> None:
    """Only rank 1 sees that its newest snapshot is damaged; rank 0 must follow it to an older one."""
    references = Ranks(jobs, run, daemon="none").end()
    before = Ranks(jobs, run, killed=1)
    before.end_by_the_death_of(1)

    def settled() -> bool:
        found = daemon.ask(GetSnapshots("e2e", run), Snapshots).ranks
        return all(s.state not in ("filling", "filled") for r in found for s in r.slots)

    eventually(settled, "slots settled after the death of both")
    ends = [r.suffix[1] for r in daemon.ask(GetSnapshots("e2e", run), Snapshots).ranks]
    common = min(ends)
    (path,) = daemon.segment_dir.glob(f"e2e~{run}~r1~g*.seg")
    segment = open_segment(path)
    index, header = next(
        (i, h)
        for i, h in segment.headers()
        if h.state is SlotState.SEALED and h.iteration == common
    )
    image = segment.image(index, header)
    victim = max(ImageView(image), key=lambda entry: entry.nbytes)
    image[victim.offset] ^= 1
    after = Ranks(jobs, run, "--seed", "7")
    outs = after.end()
    resumed = {jobs.report(out)["resumed_from"] for out in outs}
    assert resumed == {common - 1}, story(daemon, run, before, after)
    (message,) = daemon.events("digest_mismatch", run)
    assert victim.name in message
    for reference, out in zip(references, outs, strict=True):
        assert differences(reference, out) == []
