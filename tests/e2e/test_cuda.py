"""Real training on a CUDA device: killed abruptly, resumed by a fresh process, identical to the bit."""

from __future__ import annotations

import signal
import time
import uuid
from pathlib import Path

import pytest
import torch

from tests.e2e.compare import differences
from tests.e2e.cuda_cases import CUDA_CASES
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon
from tests.e2e.ranks import Ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

ON = ("--device", "cuda")
# The arithmetic of the CPU's cases, of which each may take another path on a device.
_ALIKE = (
    "plain",
    "fused",
    "drop",
    "fused_drop",
    "tied",
    "batch_norm",
    "frozen_param",
    "checkpoint",
    "reentrant",
    "adamw_fused",
    "adamw_fused_slices",
    "amsgrad",
    "sgd",
    "adafactor",
    "muon",
    "own_optimizer",
    "two_updates",
    "plateau",
    "moved_storage",
    "uneven",
    "late_state",
    "autocast",
    "autocast_fused",
    "scaler",
    "masters",
    "masters_given",
    "bf16",
    "accumulate",
    "spread",
    "aligned",
    "dense",
    "window1",
    "window7",
    "auto_window",
    "table",
)
_TOTALS = {"auto_window": 34, "spread": 30, "aligned": 18}
_KILLS = {"auto_window": 30, "late_state": 13, "spread": 25}


@pytest.mark.parametrize("case", [*_ALIKE, *CUDA_CASES])
def test_resumes_at_the_exact_bits(jobs: Jobs, case: str) -> None:
    run, total = uuid.uuid4().hex[:8], str(_TOTALS.get(case, 15))
    kill = str(_KILLS.get(case, 11))
    reference = jobs.run(case, *ON, "--total", total, daemon="none")
    jobs.run(
        case,
        *(*ON, "--total", total, "--run", run, "--kill-at", kill, "--kill-point", "backward"),
        expect_killed=True,
    )
    resumed = jobs.run(case, *ON, "--total", total, "--run", run, "--seed", "77", "--verify")
    report = jobs.report(resumed)
    assert report["resumed_from"] is not None, jobs.log(resumed)
    assert report["torn"] == 0, jobs.log(resumed)
    assert differences(reference, resumed) == []
    assert report["identical"], report["certificate"]


def test_what_is_left_out_is_noticed(jobs: Jobs) -> None:
    """The negative control: without the frozen weights the end differs, and replay says so."""
    run = uuid.uuid4().hex[:8]
    reference = jobs.run("fused", *ON, "--total", "15", daemon="none")
    jobs.run("fused", *ON, "--total", "15", "--run", run, "--kill-at", "11", expect_killed=True)
    without = ("--leave-out", "frozen weights")
    process, out = jobs.start("fused", *ON, "--total", "15", "--run", run, *without)
    process.join(120)
    assert process.exitcode == 1
    assert "ReplayMismatch: replay of iteration" in jobs.log(out)
    warns = ("--set", 'on_mismatch="warn"')
    other = jobs.run("fused", *ON, "--total", "15", "--run", run, *without, *warns)
    assert differences(reference, other) != []


@pytest.mark.parametrize("case", ["plain", "cuda_behind"])
def test_parked_on_sigterm_and_resumed_without_replay(jobs: Jobs, tmp_path: Path, case: str) -> None:
    """Two ranks are told to end inside a step, with work queued on the device: the state at its top
    is parked.
    """
    run = uuid.uuid4().hex[:8]
    references = Ranks(jobs, run, *ON, case=case, daemon="none").end()
    progress = [tmp_path / f"progress-{rank}" for rank in range(2)]
    each = {rank: ("--progress", str(path)) for rank, path in enumerate(progress)}
    lingers = ("--linger-at", "11", "--patient-until", "11", "--set", "park=true")
    life = Ranks(jobs, run, *ON, *lingers, case=case, each=each)
    for path in progress:
        _until(path, 11)
    time.sleep(0.5)
    for process, _ in life.started:
        process.terminate()
    for process, _ in life.started:
        process.join(60)
        assert process.exitcode in (-signal.SIGTERM, 128 + signal.SIGTERM), life.logs
    resumed = Ranks(jobs, run, *ON, "--seed", "77", case=case)
    for reference, out in zip(references, resumed.end(), strict=True):
        report = jobs.report(out)
        assert report["resumed_from"] == 11, resumed.logs
        assert report["replayed_steps"] == 0, resumed.logs
        assert differences(reference, out) == []


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        ("fsdp/plain", 1),
        ("fsdp/mixed_precision", 1),
        ("fsdp/listed_experts", 1),
        ("fsdp/adamw_fused", 1),
        ("ddp/plain", 1),
        ("ddp/plain", 2),
        ("ddp/bucket_view", 2),
        ("ddp/no_sync", 2),
    ],
)
def test_parallel_jobs(jobs: Jobs, case: str, ranks: int) -> None:
    """One rank over NCCL; two that share the device, over gloo."""
    run, kill_at = uuid.uuid4().hex[:8], 14
    about = {"case": case, "world_size": ranks, "total": 18, "kill_at": kill_at}
    references = Ranks(jobs, run, *ON, **about, daemon="none").end()  # type: ignore[arg-type]
    Ranks(jobs, run, *ON, **about, killed=ranks - 1).end_by_the_death_of(ranks - 1)  # type: ignore[arg-type]
    life = Ranks(jobs, run, *ON, "--seed", "7", **about)  # type: ignore[arg-type]
    outs = life.end()
    resumed = {jobs.report(out)["resumed_from"] for out in outs}
    assert len(resumed) == 1, life.logs
    assert resumed <= set(range(kill_at - 3, kill_at + 1)), life.logs
    for reference, out in zip(references, outs, strict=True):
        assert jobs.report(out)["replayed_with_frozen"] > 0, life.logs
        assert differences(reference, out) == []


def test_the_daemon_dies_and_comes_back_in_mid_run(tmp_path: Path) -> None:
    """Its memory outlives it; pinned slots stay pinned."""
    with own_daemon() as daemon:
        jobs = Jobs(tmp_path, daemon.endpoint)
        reference = jobs.run("plain", *ON, "--total", "60", daemon="none")
        progress = tmp_path / "progress"
        process, out = jobs.start(
            "plain", *ON, "--total", "60", "--run", "d", "--step-ms", "50", "--progress", str(progress)
        )
        _until(progress, 20)
        daemon.kill()
        _until(progress, 30)
        restarted = DaemonProcess(daemon.runtime_dir, daemon.segment_dir, *daemon.flags)
        with restarted.running():
            _until(progress, 45)
            process.kill()
            process.join()
            resumed = jobs.run("plain", *ON, "--total", "60", "--run", "d", "--seed", "77")
    assert jobs.report(resumed)["resumed_from"] >= 40, jobs.log(out)
    assert differences(reference, resumed) == []


def _until(progress: Path, step: int) -> None:
    deadline = time.monotonic() + 90
    while not progress.exists() or int(progress.read_text().split()[0]) < step:
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.02)
