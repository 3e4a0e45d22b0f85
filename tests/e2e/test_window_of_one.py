"""A window of 1 needs no replay, and used to get none: nothing was compared, and whatever no
snapshot holds was silently different after a resume.

Now a resume begins one snapshot earlier wherever that one is to be had, and compares all that comes
of it with the newest one.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckptd.core.slots.slots import SlotState
from ckptd.ctl import daemon_commands
from ckptd.memory.segment_file import open_segment
from ckptd.saved import saved_iterations
from ckptd.storage.image import ImageView
from ckptd.transport.messages import GetSnapshots, Snapshots
from tests.ckptd.running import eventually
from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.e2e.ranks import Ranks, story
from tests.e2e.test_quarantine import FIRST, SECOND, fails, failures

KILL_AT, TOTAL = 11, 15
WINDOW_1 = ("--set", "window=1", "--total", str(TOTAL))
KILLED = ("--kill-at", str(KILL_AT), "--kill-point", "after", "--kill-delay-ms", "500")


def sealed(daemon: DaemonProcess, run: str, rank: int = 0) -> dict[int, Path]:
    """The iterations that a daemon holds of a rank of its own, once none is in the making, and where."""

    def settled() -> bool:
        found = daemon.ask(GetSnapshots("e2e", run), Snapshots).ranks
        return all(s.state not in ("filling", "filled") for r in found for s in r.slots)

    eventually(settled, "slots settled after the trainer's death")
    found: dict[int, Path] = {}
    for path in daemon.segment_dir.glob(f"e2e~{run}~r{rank}~g*.seg"):
        headers = open_segment(path).headers()
        found |= {h.iteration: path for _, h in headers if h.state is SlotState.SEALED}
    return dict(sorted(found.items()))


def damage(daemon: DaemonProcess, run: str, iteration: int) -> None:
    """Flip a bit of a tensor of that snapshot in memory."""
    segment = open_segment(sealed(daemon, run)[iteration])
    for index, header in segment.headers():
        if header.iteration == iteration and header.state is SlotState.SEALED:
            image = segment.image(index, header)
            image[max(ImageView(image), key=lambda entry: entry.nbytes).offset] ^= 1


def told(log: str) -> tuple[int, int]:
    """Iterations replayed and tensors compared, by the log."""
    found = re.search(
        r"resumed at iteration \d+: replayed (\d+) iterations? in .*compared (\d+) tensors?", log
    )
    assert found is not None, log
    return int(found[1]), int(found[2])


@pytest.mark.parametrize(
    ("case", "replayed"),
    [("window1", 1), ("dense", 1), ("dense_every", 3), ("two_updates", 1), ("masters", 1)],
)
def test_a_resume_replays_and_compares_though_it_needs_no_replay(
    jobs: Jobs, daemon: DaemonProcess, run: str, case: str, replayed: int
) -> None:
    """Every leaf is compared: weights, all optimizer state (Adam's steps, too), buffers.
    ``dense_every`` replays three iterations for it.

    `ckptctl` tells before what the start will do: it left out the iterations that only compare.
    """
    window = () if case.startswith("dense") else ("--set", "window=1")
    options = (*window, "--total", str(TOTAL))
    reference = jobs.run(case, *options, daemon="none")
    jobs.run(case, *options, "--run", run, *KILLED, expect_killed=True)
    newest = max(sealed(daemon, run))
    foretold = daemon_commands.snapshots_text(
        daemon.ask(GetSnapshots("e2e", run), Snapshots), operators=False
    )
    back = saved_iterations("e2e", run, daemon=daemon.endpoint)[0]
    resumed = jobs.run(case, *options, "--run", run, "--seed", "77")
    report = jobs.report(resumed)
    assert f"by replaying {replayed} iteration" in foretold
    assert f"{replayed} of them only to verify" in foretold
    assert (back.iteration, back.replay_from) == (newest, newest - replayed)
    assert report["resumed_from"] is not None, jobs.log(resumed)
    assert report["replayed_steps"] == replayed, jobs.log(resumed)
    assert report["verified_tensors"] > 40, jobs.log(resumed)
    assert f"replayed {replayed} iteration" in report["describe"]
    assert f"compared {report['verified_tensors']:.0f} tensors, 0 mismatches" in report["describe"]
    assert differences(reference, resumed) == []


@pytest.mark.parametrize("hidden", ["count_updates", "own_generator"])
def test_what_no_snapshot_holds_is_told_instead_of_trained_on(
    jobs: Jobs, daemon: DaemonProcess, run: str, hidden: str
) -> None:
    """A counter in a closure, a generator of the program's own: the resumed job used to go on with
    other numbers, and to end well.

    The program repeats itself, so the second start takes the snapshots for wrong. Later starts do
    not slip back to an iteration of which nothing can be compared.
    """
    options = (*WINDOW_1, "--run", run, "--hidden", hidden)
    jobs.run("plain", *options, *KILLED, expect_killed=True)
    for seed, wanted in (("77", FIRST), ("78", SECOND)):
        log = fails(jobs, *options, "--seed", seed)
        assert "ReplayMismatch: replay of iteration" in log
        assert wanted in log
    assert [f.verdict for f in failures(daemon, run)] == ["quarantined"]
    for seed in ("79", "80"):
        log = fails(jobs, *options, "--seed", seed)
        assert "CorruptionError: recover [job=e2e" in log
        assert f"`ckptctl unquarantine e2e {run}`" in log


def test_a_program_that_differs_each_time_quarantines_nothing(
    jobs: Jobs, daemon: DaemonProcess, run: str
) -> None:
    options = (*WINDOW_1, "--run", run, "--hidden", "clock")
    jobs.run("plain", *options, *KILLED, expect_killed=True)
    assert FIRST in fails(jobs, *options, "--seed", "77")
    assert "the program is not deterministic" in fails(jobs, *options, "--seed", "78")
    assert [f.verdict for f in failures(daemon, run)] == ["unstable"]
    # Whoever knows better says so.
    resumed = jobs.run("plain", *options, "--seed", "79", "--set", "verify_iterations=0")
    assert jobs.report(resumed)["replayed_steps"] == 0
    assert "nothing can be compared with a replay (verify_iterations=0)" in jobs.log(resumed)


def test_where_there_is_one_snapshot_only_the_log_says_that_nothing_was_compared(
    jobs: Jobs, daemon: DaemonProcess, run: str
) -> None:
    options = (*WINDOW_1, "--run", run)
    reference = jobs.run("plain", *WINDOW_1, daemon="none")
    killed = (
        "--patient-until",
        "3",
        "--kill-at",
        "1",
        "--kill-point",
        "after",
        "--kill-delay-ms",
        "500",
    )
    jobs.run("plain", *options, *killed, expect_killed=True)
    assert list(sealed(daemon, run)) == [1]
    resumed = jobs.run("plain", *options, "--seed", "77")
    report = jobs.report(resumed)
    assert (report["resumed_from"], report["replayed_steps"]) == (1, 0)
    log = jobs.log(resumed)
    assert "nothing can be compared with a replay (no snapshot of rank 0 before iteration 1 leads" in log
    assert differences(reference, resumed) == []


def test_iterations_further_apart_than_asked_for_are_not_replayed(jobs: Jobs, run: str) -> None:
    """``every`` may be large: no more than ``verify_iterations`` are done again just to compare."""
    options = ("--total", str(TOTAL), "--run", run, "--set", "verify_iterations=2")
    reference = jobs.run("dense_every", "--total", str(TOTAL), daemon="none")
    jobs.run("dense_every", *options, *KILLED, expect_killed=True)
    resumed = jobs.run("dense_every", *options, "--seed", "77")
    assert jobs.report(resumed)["replayed_steps"] == 0
    assert "3 iterations older, and verify_iterations=2" in jobs.log(resumed)
    assert differences(reference, resumed) == []


@pytest.mark.parametrize("case", ["drop", "zero/plain"])
def test_two_ranks_replay_and_compare(jobs: Jobs, daemon: DaemonProcess, run: str, case: str) -> None:
    """What the ranks have alike is captured by one of them, and what one updates is sent to the
    other: each compares what it recorded.
    """
    options = ("--set", "window=1")
    references = Ranks(jobs, run, *options, case=case, daemon="none").end()
    before = Ranks(jobs, run, *options, case=case, killed=1)
    before.end_by_the_death_of(1)
    after = Ranks(jobs, run, *options, "--seed", "7", case=case)
    outs = after.end()
    reports = [jobs.report(out) for out in outs]
    assert len({report["resumed_from"] for report in reports}) == 1, story(daemon, run, before, after)
    assert all(report["replayed_steps"] == 1 for report in reports), story(daemon, run, before, after)
    assert all(report["verified_tensors"] > 20 for report in reports), reports
    for reference, out in zip(references, outs, strict=True):
        assert differences(reference, out) == []


def test_one_rank_with_something_hidden_stops_both(jobs: Jobs, daemon: DaemonProcess, run: str) -> None:
    """Gradients are averaged before they are changed on rank 1: only its state differs, and both are told."""
    options = ("--set", "window=1")
    hidden = {1: ("--hidden", "own_generator")}
    before = Ranks(jobs, run, *options, killed=1, each=hidden)
    before.end_by_the_death_of(1)
    after = Ranks(jobs, run, *options, "--seed", "7", each=hidden)
    after.end_by_themselves()
    for process, out in after.started:
        assert process.exitcode == 1, story(daemon, run, before, after)
        assert "ReplayMismatch" in jobs.log(out), story(daemon, run, before, after)


def test_the_snapshot_before_is_damaged_and_nowhere_else(jobs: Jobs, daemon: DaemonProcess, run: str) -> None:
    """It is only for comparing: without it the job comes back all the same, and says that nothing
    was compared.
    """
    options = (*WINDOW_1, "--run", run)
    reference = jobs.run("plain", *WINDOW_1, daemon="none")
    jobs.run("plain", *options, *KILLED, expect_killed=True)
    newest = max(sealed(daemon, run))
    for older in list(sealed(daemon, run))[:-1]:
        damage(daemon, run, older)
    resumed = jobs.run("plain", *options, "--seed", "77")
    report = jobs.report(resumed)
    assert (report["resumed_from"], report["replayed_steps"]) == (newest, 0), jobs.log(resumed)
    assert "nothing can be compared with a replay (" in jobs.log(resumed)
    assert differences(reference, resumed) == []


def test_the_snapshot_before_is_damaged_here_and_a_peer_has_it(
    jobs: Jobs, daemon: DaemonProcess, run: str
) -> None:
    """It is brought from the replica, and the newest one, which lies here, is compared with what comes of it."""
    peers = ("--memory", "256MiB", "--peer-listen", "tcp://127.0.0.1:0", "--peer-security", "plain")
    window = ("--set", "window=1", "--set", "replicas=1")
    with own_daemon(*peers) as one, own_daemon(*peers) as other:
        nodes = {0: ("--daemon", one.endpoint), 1: ("--daemon", other.endpoint)}
        references = Ranks(jobs, run, *window, daemon="none").end()
        linger = ("--kill-delay-ms", "1000")
        before = Ranks(jobs, run, *window, killed=1, each={0: nodes[0], 1: (*nodes[1], *linger)})
        before.end_by_the_death_of(1)
        # A rank may have a snapshot of the step in which the other one died, which that one has not.
        newest = min(max(sealed(one, run)), max(sealed(other, run, rank=1)))
        for older in sealed(one, run):
            if older < newest:
                damage(one, run, older)
        after = Ranks(jobs, run, *window, "--seed", "79", each=nodes)
        outs = after.end()
        reports = [jobs.report(out) for out in outs]
        assert one.events("digest_mismatch", run), story(one, run, before, after)
        assert all(r["replayed_steps"] >= 1 for r in reports), story(one, run, before, after)
        assert all(r["verified_tensors"] > 20 for r in reports), story(one, run, before, after)
        for reference, out in zip(references, outs, strict=True):
            assert differences(reference, out) == []
