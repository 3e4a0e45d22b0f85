"""Two data-parallel ranks, each with a segment of its own: one is killed, both come back from the
same iteration.
"""

from __future__ import annotations

import pytest

from ckptd.core.slots.slots import SlotState
from ckptd.memory.segment_file import open_segment
from ckptd.storage.image import ImageView
from ckptd.transport.messages import GetSnapshots, Snapshots
from tests.ckptd.running import eventually
from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs
from tests.e2e.ranks import KILL_AT, Ranks, story

RANKS = range(2)


@pytest.mark.slow
@pytest.mark.parametrize("victim", RANKS)
def test_a_killed_rank_takes_both_back_to_the_same_iteration(
    jobs: Jobs, daemon: DaemonProcess, run: str, victim: int
) -> None:
    """Rank 0 and rank 1 may hold different newest snapshots: they agree on one, and both end at the
    exact bits.
    """
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
def test_both_verify_the_window_that_both_hold(jobs: Jobs, run: str) -> None:
    """Rank 1 lags a snapshot behind, and each has captured a half: they replay one window together."""
    outs = Ranks(jobs, run, "--verify", each={1: ("--break-at", "3")}).end()
    certificates = [jobs.report(out)["certificate"] for out in outs]
    assert all("identical to the bit" in told for told in certificates), certificates
    windows = {told.split(" from ")[0] for told in certificates}
    assert len(windows) == 1, certificates


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
    # A rank that waited for the other may have grown its ring: its snapshots lie in two segments.
    segments = [open_segment(p) for p in daemon.segment_dir.glob(f"e2e~{run}~r1~g*.seg")]
    segment, index, header = next(
        (segment, i, h)
        for segment in segments
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
