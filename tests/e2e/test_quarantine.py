"""A snapshot was sealed wrong: its digests fit, and no replay reproduces it. The job used to die of it at every restart, for ever.

Now the second replay that comes to the same result quarantines what was replayed, on every holder, and the start after that goes
back to what is older, at the exact bits. Lives are restarted by hand here, as torchrun would do it.
"""

from __future__ import annotations

import subprocess
import sys
import uuid

import pytest

from ckptd.transport.messages import GetSnapshots, ReplayFailure, Snapshots
from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.e2e.ranks import Ranks, story

# The suffix of a window of 2 is 10 and 11: what is wrong in 10 shows at 11.
TORN, KILL_AT, TOTAL = 10, 11, 15
WINDOW_2 = ("--set", "window=2", "--total", str(TOTAL))
# So that what is filled there is sealed, too.
KILLED = ("--kill-at", str(KILL_AT), "--kill-point", "after", "--kill-delay-ms", "500")
FIRST, SECOND = "This was the first time", "Two replays came to the same result"


@pytest.fixture
def run() -> str:
    return uuid.uuid4().hex[:8]


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
    with own_daemon("--memory", "256MiB", "--peer-listen", "tcp://127.0.0.1:0", "--peer-security", "plain", "--replication-slack", "4") as own:  # fmt: skip
        reference = jobs.run("plain", *WINDOW_2, daemon="none")
        jobs.run("plain", *options, *KILLED, "--tear-at", str(TORN), expect_killed=True, daemon=own.endpoint)  # fmt: skip
        assert FIRST in fails(jobs, *options, "--seed", "77", daemon=own.endpoint)
        own.kill()
        own.start()
        assert [f.verdict for f in failures(own, run)] == ["suspected"]
        assert SECOND in fails(jobs, *options, "--seed", "78", daemon=own.endpoint)
        assert states(own, run)["quarantined"] == [10, 11]
        shown = ctl(own, "snapshots", "--job", "e2e", "--run", run)
        (failure,) = failures(own, run)
        (told,) = failure.ranks
        assert "operator" in told.what
        for word in ("quarantined: replay of iteration 10", told.what, told.expected, told.got):
            assert word in shown
        resumed = jobs.run("plain", *options, "--seed", "79", daemon=own.endpoint)
        assert jobs.report(resumed)["resumed_from"] == 9, jobs.log(resumed)
        assert "iterations 10 to 11 are quarantined" in jobs.log(resumed)
        assert differences(reference, resumed) == []
        assert [f.verdict for f in failures(own, run)] == ["left"]


def test_where_one_rank_is_wrong_all_go_back(jobs: Jobs, daemon: DaemonProcess, run: str) -> None:
    """Only rank 1 recorded something wrong. The other hears of it at the same boundary, neither hangs, and both go back alike."""
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
    assert resumed == {min(quarantined) - 1}, story(daemon, run, *lives, after)
    for reference, out in zip(references, outs, strict=True):
        assert differences(reference, out) == []
