"""A snapshot was sealed wrong: its digests fit, and no replay reproduces it. The job used to die of
it at every restart, for ever.

Now the second replay that comes to the same result quarantines what was replayed, on every holder,
and the start after that goes back to what is older, at the exact bits. Lives are restarted by hand
here, as torchrun would do it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ckptd.transport.messages import GetSnapshots, ReplayFailure, Snapshots
from tests.ckptd.running import eventually
from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.e2e.ranks import Ranks, story
from tests.e2e.test_durable import committed, lose_memory

# The suffix of a window of 2 is 10 and 11, and replay begins at 9: what is wrong in 10 shows at 11.
TORN, KILL_AT, TOTAL = 10, 11, 15
WINDOW_2 = ("--set", "window=2", "--total", str(TOTAL))
# So that what is filled there is sealed, too.
KILLED = ("--kill-at", str(KILL_AT), "--kill-point", "after", "--kill-delay-ms", "500")
# Slots for older snapshots: with W = 2 and none more, one that a busy machine leaves out could leave no
# whole suffix before the wrong snapshots.
LONG_RING = (
    *("--memory", "256MiB", "--replication-slack", "4"),
    *("--peer-listen", "tcp://127.0.0.1:0", "--peer-security", "plain"),
)
FIRST, SECOND = "This is the first failure", "Two replays had the same result"


def fails(jobs: Jobs, *options: str, case: str = "plain", daemon: str | None = None) -> str:
    """A life that ends with an error; its log."""
    process, out = jobs.start(case, *options, daemon=daemon)
    process.join(90)
    assert process.exitcode == 1, jobs.log(out)
    return jobs.log(out)


def failures(daemon: DaemonProcess, run: str) -> tuple[ReplayFailure, ...]:
    """What the daemon keeps of replays that did not reproduce."""
    told = daemon.ask(GetSnapshots("e2e", run), Snapshots).replays
    return told[0].failures if told else ()


def states(daemon: DaemonProcess, run: str) -> dict[str, list[int]]:
    """Iterations by the state of their slots, over all ranks."""
    found: dict[str, list[int]] = {}
    for rank in daemon.ask(GetSnapshots("e2e", run), Snapshots).ranks:
        for slot in rank.slots:
            found.setdefault(slot.state, []).append(slot.iteration)
    return {state: sorted(iterations) for state, iterations in found.items()}


def ctl(daemon: DaemonProcess, *arguments: str) -> str:
    """What ``ckptctl`` prints."""
    command = [sys.executable, "-m", "ckptd.ctl", *arguments, "--endpoint", daemon.endpoint]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_a_snapshot_that_was_sealed_wrong_costs_two_replays_and_an_older_suffix_is_exact(
    jobs: Jobs, daemon: DaemonProcess, run: str
) -> None:
    """The daemon, too, is killed in between: what the first replay showed must outlive it."""
    options = (*WINDOW_2, "--run", run)
    with own_daemon(*LONG_RING) as own:
        reference = jobs.run("plain", *WINDOW_2, daemon="none")
        jobs.run("plain", *options, *KILLED, "--tear-at", str(TORN), expect_killed=True, daemon=own.endpoint)
        assert FIRST in fails(jobs, *options, "--seed", "77", daemon=own.endpoint)
        own.kill()
        own.start()
        assert [f.verdict for f in failures(own, run)] == ["suspected"]
        assert SECOND in fails(jobs, *options, "--seed", "78", daemon=own.endpoint)
        assert states(own, run)["quarantined"] == [9, 10, 11]
        shown = ctl(own, "snapshots", "--job", "e2e", "--run", run)
        (failure,) = failures(own, run)
        (told,) = failure.ranks
        assert "operator" in told.what
        for word in ("quarantined: replay of iteration 10", told.what, told.expected, told.got):
            assert word in shown
        resumed = jobs.run("plain", *options, "--seed", "79", daemon=own.endpoint)
        assert jobs.report(resumed)["resumed_from"] == 8, jobs.log(resumed)
        assert "iterations 9 to 11 are quarantined" in jobs.log(resumed)
        assert differences(reference, resumed) == []
        assert [f.verdict for f in failures(own, run)] == ["left"]


def test_where_one_rank_is_wrong_all_go_back(jobs: Jobs, run: str) -> None:
    """Only rank 1 recorded something wrong. The other hears of it at the same boundary, neither
    hangs, and both go back alike.
    """
    with own_daemon(*LONG_RING) as daemon:
        jobs.endpoint = daemon.endpoint
        dense = ("--set", "window=2")
        references = Ranks(jobs, run, *dense, daemon="none").end()
        linger = ("--kill-delay-ms", "500")
        before = Ranks(jobs, run, *dense, killed=1, each={1: ("--tear-at", "10", *linger)})
        before.end_by_the_death_of(1)
        lives = [before]
        for wanted in (FIRST, SECOND):
            lives.append(Ranks(jobs, run, *dense, "--seed", str(70 + len(lives))))
            lives[-1].end_by_themselves()
            for process, out in lives[-1].started:
                assert process.exitcode == 1, story(daemon, run, *lives)
                assert wanted in jobs.log(out), story(daemon, run, *lives)
        quarantined = states(daemon, run)["quarantined"]
        assert sorted(2 * [*set(quarantined)]) == quarantined, "of both ranks"
        assert 10 in quarantined
        after = Ranks(jobs, run, *dense, "--seed", "79")
        outs = after.end()
        resumed = {jobs.report(out)["resumed_from"] for out in outs}
        assert len(resumed) == 1, story(daemon, run, *lives, after)
        # How far back depends on what a busy machine has left out; not on what is wrong.
        assert resumed <= set(range(min(quarantined))), story(daemon, run, *lives, after)
        for reference, out in zip(references, outs, strict=True):
            assert differences(reference, out) == []


def test_what_peers_hold_of_it_is_quarantined_too(jobs: Jobs, daemon: DaemonProcess, run: str) -> None:
    """Two nodes, each with replicas of the other's rank: the wrong snapshots lie twice, and neither
    copy is taken again.
    """
    peers = ("--memory", "256MiB", "--peer-listen", "tcp://127.0.0.1:0", "--peer-security", "plain")
    window = ("--set", "window=2", "--set", "replicas=1")
    with own_daemon(*peers) as one, own_daemon(*peers) as other:
        nodes = {0: ("--daemon", one.endpoint), 1: ("--daemon", other.endpoint)}
        references = Ranks(jobs, run, *window, daemon="none").end()
        torn = (*nodes[1], "--tear-at", str(TORN), "--kill-delay-ms", "1000")
        before = Ranks(jobs, run, *window, killed=1, each={0: nodes[0], 1: torn})
        before.end_by_the_death_of(1)
        lives = [before]
        for wanted in (FIRST, SECOND):
            lives.append(Ranks(jobs, run, *window, "--seed", str(70 + len(lives)), each=nodes))
            lives[-1].end_by_themselves()
            assert wanted in lives[-1].logs, story(other, run, *lives)
        for node in (one, other):
            ends = [f"~r{rank}~" for rank in (0, 1)]
            told = node.events("slots_quarantined", run)
            assert all(any(end in t for t in told) for end in ends), story(node, run, *lives)
        after = Ranks(jobs, run, *window, "--seed", "79", each=nodes)
        outs = after.end()
        resumed = {jobs.report(out)["resumed_from"] for out in outs}
        assert len(resumed) == 1, story(other, run, *lives, after)
        # How far back depends on what a busy machine has left out; not on what is wrong.
        assert resumed <= set(range(TORN)), story(other, run, *lives, after)
        for reference, out in zip(references, outs, strict=True):
            assert differences(reference, out) == []


def test_where_memory_has_nothing_else_storage_has(
    jobs: Jobs, daemon: DaemonProcess, run: str, tmp_path: Path
) -> None:
    """What is durable of the wrong iterations is passed over as well: it is the checkpoint before that one."""
    store = tmp_path / "store"
    often = ("--persist-every", "5", "--persist-every-s", "0", "--persist-keep-last", "4")
    options = ("--total", "15", "--run", run)
    with own_daemon("--memory", "256MiB", "--store", f"file://{store}", *often) as own:
        reference = jobs.run("plain", "--total", "15", daemon="none")
        slow = ("--step-ms", "300", "--tear-at", "9")
        jobs.run("plain", *options, *slow, *KILLED, expect_killed=True, daemon=own.endpoint)
        eventually(lambda: committed(store, run)[:2] == [10, 5], f"{committed(store, run)}")
        lose_memory(own)
        assert FIRST in fails(jobs, *options, "--seed", "77", daemon=own.endpoint)
        assert SECOND in fails(jobs, *options, "--seed", "78", daemon=own.endpoint)
        resumed = jobs.run("plain", *options, "--seed", "79", daemon=own.endpoint)
        assert jobs.report(resumed)["resumed_from"] == 5, jobs.log(resumed)
        assert differences(reference, resumed) == []


def test_where_nothing_else_is_left_somebody_decides(jobs: Jobs, daemon: DaemonProcess, run: str) -> None:
    """A start that can only take what no replay reproduces says so, with the commands; and both of
    them do what it says.
    """
    options = ("--total", "15", "--run", run)
    jobs.run("plain", *options, *KILLED, "--tear-at", "9", expect_killed=True)
    assert FIRST in fails(jobs, *options, "--seed", "77")
    assert SECOND in fails(jobs, *options, "--seed", "78")
    bytes_before = states(daemon, run)["quarantined"]
    for seed in ("79", "80"):  # it does not change by itself
        log = fails(jobs, *options, "--seed", seed)
        assert "CorruptionError: recover [job=e2e" in log
        assert "there is no state left that a replay reproduces" in log
        assert "operator" in log
        for command in (f"`ckptctl unquarantine e2e {run}`", f"`ckptctl forget e2e {run}`"):
            assert command in log
    assert states(daemon, run)["quarantined"] == bytes_before, "nothing was overwritten"
    told = ctl(daemon, "unquarantine", "e2e", run)
    assert f"{len(bytes_before)} snapshots of this node are no longer quarantined" in told
    assert "quarantined" not in states(daemon, run)
    taken = jobs.run("plain", *options, "--seed", "81", "--set", 'on_mismatch="warn"')
    assert jobs.report(taken)["resumed_from"] == 11, jobs.log(taken)


def test_a_program_that_is_not_deterministic_quarantines_nothing(
    jobs: Jobs, daemon: DaemonProcess, run: str
) -> None:
    """Each replay comes to something else: that is no evidence against what was recorded, and a
    program that was mended resumes.
    """
    options = ("--total", "15", "--run", run)
    reference = jobs.run("drop", "--total", "15", daemon="none")
    jobs.run("drop", *options, *KILLED, expect_killed=True)
    without = ("--leave-out", "determinism")
    assert FIRST in fails(jobs, *options, *without, "--seed", "77", case="drop")
    for seed in ("78", "79"):
        log = fails(jobs, *options, *without, "--seed", seed, case="drop")
        assert "the program is not deterministic. Nothing is quarantined" in log
    assert [f.verdict for f in failures(daemon, run)] == ["unstable"]
    assert "quarantined" not in states(daemon, run)
    resumed = jobs.run("drop", *options, "--seed", "80")
    assert jobs.report(resumed)["resumed_from"] == 11, jobs.log(resumed)
    assert differences(reference, resumed) == []
    assert failures(daemon, run) == ()
