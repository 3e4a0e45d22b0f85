"""A step is computed again by another process, from copies of two sealed snapshots, and compared bit for bit.

The trainer is held within its last step, so that what it has sealed stays where it is.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ckptd.ctl.audit.audit_run import Audited, audit_step
from ckptd.ctl.command import CommandError
from ckptd.transport.messages import GetSnapshots, GetStatus, Snapshots, Status
from tests.e2e.audits import NEWEST, audit, held, options
from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.long import long

pytestmark = pytest.mark.slow

EMBED = "embed.weight"
EXPERT = "blocks.0.moe.experts.1"
AUDITS = 5  # of one training


def named(found: Audited) -> dict[str, int]:
    """What differs, with its number of wrong bits; the largest difference first."""
    return {d.what: d.bits for of_rank in found.differences.values() for d in of_rank}


def audited_slots(daemon: DaemonProcess, run: str) -> list[int]:
    ranks = daemon.ask(GetSnapshots("e2e", run), Snapshots).ranks
    return [slot.iteration for rank in ranks for slot in rank.slots if slot.audited]


def test_a_flipped_bit_is_named_and_the_step_before_was_right(
    jobs: Jobs, daemon: DaemonProcess, run: str
) -> None:
    """A moment of Adam, between the update and the next step; and a gradient, just before its use."""
    flips = {
        f"{NEWEST - 1}:exp_avg_sq/{EMBED}": ({f"operator embed: optim exp_avg_sq of {EMBED}"}, "--flip-at"),
        f"{NEWEST - 1}:grad/{EMBED}": (
            {f"operator embed: {what} of {EMBED}" for what in ("param", "optim exp_avg", "optim exp_avg_sq")},
            "--flip-in",
        ),
    }
    for number, (flip, (wanted, option)) in enumerate(flips.items()):
        its_run = f"{run}-{number}"
        settings = options(its_run, 1)
        with held(jobs, daemon, "plain", *settings, option, flip, run=its_run):
            found = audit(jobs, daemon, "plain", *settings, run=its_run)
        assert (found.start, found.end) == (NEWEST - 1, NEWEST)
        assert (found.passed, found.certain) == (False, True), found.verdict
        assert set(named(found)) == wanted
        assert f"Only {EMBED} differs" in found.verdict
        assert all(d.differing == 1 for d in found.differences[0])


def ctl(daemon: DaemonProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`ckptctl`, and what it prints."""
    command = [sys.executable, "-m", "ckptd.ctl", "--endpoint", daemon.endpoint, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_a_clean_step_is_audited_on_the_command_line_and_training_goes_on(
    jobs: Jobs, daemon: DaemonProcess, run: str
) -> None:
    """The program ends before its own end: it leaves no final state. Its run may have another name there, as one
    that a launcher gives.
    """
    settings = options(run, 1)
    left = jobs.folder / "audited.pt"
    job = (*("plain", "--out", str(left), "--daemon", daemon.endpoint), *options("other", 1))
    program = ("--", sys.executable, "-m", "tests.e2e.job", *job)
    with held(jobs, daemon, "plain", *settings, run=run) as outs:
        found = ctl(daemon, "--json", "audit", "--job", "e2e", "--run", run, *program)
        assert found.returncode == 0, found.stderr
        answer = json.loads(found.stdout)
        assert (answer["passed"], answer["start"], answer["end"]) == (True, NEWEST - 1, NEWEST)
        assert audited_slots(daemon, run) == [NEWEST]
        told = [audits for audits in daemon.ask(GetStatus(), Status).audits if audits.run == run]
        assert [(one.passed, one.failed, one.newest) for one in told] == [(1, 0, NEWEST)]
    assert not left.exists()
    reference = jobs.run("plain", *settings, daemon="none")
    assert differences(reference, outs[0]) == []
    assert not list(Path("/dev/shm").glob(f"ckptd-audit-*/e2e~{run}~*"))


@long
@pytest.mark.parametrize("window", [1, 4])
def test_data_parallel_ranks_are_audited_together(
    jobs: Jobs, daemon: DaemonProcess, run: str, window: int
) -> None:
    """Each parameter is captured by one rank; what one rank computes wrong is in what it captured."""
    settings = options(run, window)
    with held(jobs, daemon, "plain", *settings, run=run, world_size=2):
        found = audit(jobs, daemon, "plain", *settings, run=run, world_size=2)
    assert found.passed, found
    assert (found.start, found.end) == (NEWEST - window, NEWEST)
    flipped = f"{run}-flipped"
    settings = options(flipped, window)
    flip = ("--flip-at", f"{NEWEST - 1}:{EMBED}")
    with held(jobs, daemon, "plain", *settings, *flip, run=flipped, world_size=2):
        found = audit(jobs, daemon, "plain", *settings, run=flipped, world_size=2)
    assert (found.passed, found.certain) == (False, True), found
    assert [what for what in named(found) if EMBED in what] == [*named(found)]


@long
def test_the_output_of_an_expert_and_a_sparse_window(jobs: Jobs, daemon: DaemonProcess, run: str) -> None:
    """What is wrong in a forward is in all gradients: the iteration is certain, and the verdict says so."""
    for number, (what, window) in enumerate({f"output/{EXPERT}": 1, f"grad/{EXPERT}.0.weight": 4}.items()):
        its_run = f"{run}-{number}"
        settings = options(its_run, window)
        flip = ("--flip-in", f"{NEWEST - 1}:{what}")
        with held(jobs, daemon, "plain", *settings, *flip, run=its_run):
            found = audit(jobs, daemon, "plain", *settings, run=its_run)
        assert (found.passed, found.certain) == (False, True), found
        assert {d.iteration for d in found.differences[0]} == {NEWEST}
        if window > 1:
            assert f"Only {EXPERT}.0.weight differs" in found.verdict
        else:
            assert "Many values differ" in found.verdict


@long
@pytest.mark.parametrize(
    "case",
    ["fused", "tied", "batch_norm", "checkpoint", "adamw_fused", "sgd", "muon", "own_optimizer", "drop"],
)
def test_clean_steps_of_many_programs_are_no_alarm(
    jobs: Jobs, daemon: DaemonProcess, run: str, case: str
) -> None:
    for window in (1, 3):
        its_run = f"{run}-{window}"
        settings = options(its_run, window)
        with held(jobs, daemon, case, *settings, run=its_run):
            found = audit(jobs, daemon, case, *settings, run=its_run)
        assert found.passed, found


@long
def test_a_node_with_replicas_audits_ranks_of_others(jobs: Jobs, run: str) -> None:
    """Rank 1 trains on another node, and this one holds its replica."""
    peers = ("--memory", "256MiB", "--peer-listen", "tcp://127.0.0.1:0", "--peer-security", "plain")
    with own_daemon(*peers) as one, own_daemon(*peers) as other:
        settings = options(run, 1, "--set", "replicas=1")
        with held(jobs, one, "plain", *settings, run=run, world_size=2, other=other):
            found = audit(jobs, one, "plain", *settings, run=run, world_size=2)
    assert found.passed, found


@long
def test_audits_beside_a_training_that_goes_on(jobs: Jobs, daemon: DaemonProcess, run: str) -> None:
    """The ring moves on while its snapshots are chosen, held and copied."""
    settings = ("--total", "100000", "--run", run, "--set", "window=1", "--step-ms", "20")
    process, out = jobs.start("plain", *settings, daemon=daemon.endpoint)
    try:
        ends = [0]
        for _ in range(AUDITS):
            found = audit(jobs, daemon, "plain", *settings, run=run, newer_than=ends[-1])
            assert found.passed, found
            ends.append(found.end)
        assert ends == sorted({*ends})
        assert process.exitcode is None, jobs.log(out)
    finally:
        process.kill()
        process.join()


def test_what_cannot_be_audited_is_refused_with_the_reason(
    jobs: Jobs, daemon: DaemonProcess, run: str
) -> None:
    with pytest.raises(CommandError, match="has no snapshot of it"):
        audit_step(
            *(daemon.segment_dir, jobs.folder, "e2e", run),
            lambda environment: 0,
            verify_iterations=16,
            wait_s=0,
        )
    settings = options(run, 4)
    jobs.run("plain", "--total", "3", *settings[2:], daemon=daemon.endpoint)
    with pytest.raises(CommandError, match=r"no step of .* can be audited"):
        audit_step(
            *(daemon.segment_dir, jobs.folder, "e2e", run),
            lambda environment: 0,
            verify_iterations=16,
            wait_s=0,
        )
