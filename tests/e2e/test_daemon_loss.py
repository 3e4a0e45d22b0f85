"""Losing the daemon in mid-training costs a warning and a metric: training and snapshots go on."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.client import Checkpointer, DaemonOptions, RunOptions
from ckptd.errors import DaemonUnavailable
from ckptd.transport.messages import (
    GetSnapshots,
    GetStatus,
    SessionStatus,
    Snapshots,
    Status,
)
from ckptd.transport.wire import RequestTimeout
from tests.ckptd.running import eventually
from tests.e2e.compare import differences
from tests.e2e.harness import DaemonProcess, Jobs, own_daemon


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """One that may be killed, in place of the session's."""
    with own_daemon() as process:
        yield process


class Trainer:
    """A job that runs beside the test, tells its counters at every step, and ends with the test."""

    def __init__(self, request: pytest.FixtureRequest, jobs: Jobs, *options: str) -> None:
        request.addfinalizer(self.kill)
        self.jobs = jobs
        self.stats_file = jobs.folder / "stats.json"
        self.process: BaseProcess
        self.process, self.out = jobs.start("plain", "--stats", str(self.stats_file), *options)

    def stats(self) -> dict[str, Any]:
        """The counters of the newest step."""
        found: dict[str, Any] = json.loads(self.stats_file.read_text())
        return found

    def reaches(self, what: str, *, above: float) -> None:
        """Wait until a counter is above a number; the trainer must be alive until then."""

        def reached() -> bool:
            assert self.process.is_alive(), self.jobs.log(self.out)
            return self.stats_file.exists() and self.stats()[what] > above

        eventually(reached, f"{what} above {above}", timeout_s=120)

    def end(self) -> Path:
        """Wait for its orderly end."""
        return self.jobs.end(self.process, self.out)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def session(daemon: DaemonProcess, run: str) -> SessionStatus | None:
    """The run's trainer, as the daemon sees it."""
    found = daemon.ask(GetStatus(), Status).sessions
    return next((s for s in found if s.run == run), None)


def test_snapshots_without_a_daemon_are_recovered_by_the_next_one(
    request: pytest.FixtureRequest, jobs: Jobs, daemon: DaemonProcess
) -> None:
    """The trainer seals its own slots while the daemon is dead; then it dies too, and a new daemon
    adopts them.
    """
    trainer = Trainer(request, jobs, "--run", "orphan", "--total", "100000", "--step-ms", "5")
    trainer.reaches("snapshots", above=8)
    daemon.kill()
    at_loss = trainer.stats()["step"]
    trainer.reaches("sealed_here", above=8)
    trainer.reaches("step", above=at_loss + 20)
    trainer.reaches("daemon_outages", above=0)
    assert trainer.stats()["chain_breaks"] == 0
    trainer.kill()
    daemon.start()
    (rank,) = daemon.ask(GetSnapshots("e2e", "orphan"), Snapshots).ranks
    assert rank.suffix[1] > at_loss + 10, rank.reason
    total = str(rank.suffix[1] + 6)
    reference = jobs.run("plain", "--total", total, daemon="none")
    resumed = jobs.run("plain", "--run", "orphan", "--total", total, "--seed", "7")
    assert jobs.report(resumed)["resumed_from"] >= rank.suffix[1]
    assert differences(reference, resumed) == []


def test_a_restarted_daemon_gets_its_trainer_back(
    request: pytest.FixtureRequest, jobs: Jobs, daemon: DaemonProcess
) -> None:
    """The session attaches again by itself: ``ckptctl status`` shows it, and the new daemon seals."""
    trainer = Trainer(request, jobs, "--run", "reattach", "--total", "150", "--step-ms", "50")
    trainer.reaches("snapshots", above=8)
    daemon.kill()
    trainer.reaches("daemon_outages", above=0)
    daemon.start()

    def is_back() -> bool:
        found = session(daemon, "reattach")
        return found is not None and found.step > 0 and found.pid == trainer.process.pid

    eventually(is_back, "the session of the trainer in the restarted daemon")
    sealed = daemon.ask(GetStatus(), Status).counters.get("seal.sealed", 0)
    eventually(
        lambda: daemon.ask(GetStatus(), Status).counters.get("seal.sealed", 0) > sealed + 5,
        "slots sealed by the restarted daemon",
    )
    out = trainer.end()
    report = jobs.report(out)
    assert report["daemon_outages"] == 1
    assert (report["chain_breaks"], report["failed"], report["no_slot"]) == (0, 0, 0)
    reference = jobs.run("plain", "--total", "150", daemon="none")
    assert differences(reference, out) == []


def test_a_daemon_that_hangs_does_not_stall_training(
    request: pytest.FixtureRequest, jobs: Jobs, daemon: DaemonProcess
) -> None:
    """SIGSTOPped, it keeps its socket and its locks and answers nothing: steps and snapshots go on
    regardless.
    """
    trainer = Trainer(request, jobs, "--run", "hang", "--total", "200", "--step-ms", "25")
    trainer.reaches("snapshots", above=8)
    daemon.pause()
    paused = trainer.stats()
    trainer.reaches("step", above=paused["step"] + 75)
    assert trainer.stats()["snapshots"] > paused["snapshots"] + 65
    daemon.unpause()

    def is_back() -> bool:
        found = session(daemon, "hang")
        return found is not None and found.step > paused["step"] + 75

    eventually(is_back, "a report of the trainer after the pause")
    out = trainer.end()
    report = jobs.report(out)
    assert (report["chain_breaks"], report["failed"], report["no_slot"]) == (0, 0, 0)
    reference = jobs.run("plain", "--total", "200", daemon="none")
    assert differences(reference, out) == []


@pytest.mark.parametrize("comes_back", ["same", "another"])
def test_a_daemon_that_hangs_while_it_makes_memory_does_not_stall_training(
    request: pytest.FixtureRequest, jobs: Jobs, daemon: DaemonProcess, comes_back: str
) -> None:
    """It hangs between attach and the first snapshot: unprotected, training goes on, and is
    protected when it is back.

    The trainer used to wait for two minutes for an answer that a daemon killed meanwhile would never give.
    """
    trainer = Trainer(
        request,
        jobs,
        *("--run", "unlucky", "--total", "100000", "--step-ms", "20", "--set", "window=null"),
    )
    eventually(lambda: trainer.stats_file.exists(), "the first step")
    daemon.pause()
    trainer.reaches("step", above=150)
    assert trainer.stats()["snapshots"] == 0
    if comes_back == "same":
        daemon.unpause()
    else:
        daemon.kill()
        daemon.start()
    trainer.reaches("snapshots", above=0)


def test_no_daemon_at_the_start_is_an_error_with_a_hint(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(DaemonUnavailable, match=r"ckptd run.*ckptctl doctor"):
        Checkpointer(
            model,
            optimizer,
            run=RunOptions(job="e2e", name="alone"),
            daemon=DaemonOptions(endpoint=f"ipc://{tmp_path}/s", timeout_s=0.3),
        )


@pytest.fixture
def in_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ckptd-auto-", dir="/dev/shm") as folder:
        yield Path(folder)


def test_auto_starts_a_daemon_that_outlives_the_trainer(tmp_path: Path, in_memory: Path) -> None:
    """No set-up at all: the first trainer starts a daemon, is killed, and the second one resumes from it."""
    runtime, segments = in_memory / "run", in_memory / "segments"
    for folder in (runtime, segments):
        folder.mkdir(mode=0o700)
    environment = {
        "CKPTD_RUNTIME_DIR": str(runtime),
        "CKPTD_SEGMENT_DIR": str(segments),
        "CKPTD_MEMORY": "64MiB",
    }
    jobs = Jobs(tmp_path, "auto")
    started = DaemonProcess(runtime, segments)  # to ask it; the trainer starts it
    first, first_out = jobs.start(
        "plain", "--run", "auto", "--total", "15", "--kill-at", "11", environment=environment
    )
    first.join(60)
    try:
        assert first.exitcode == -signal.SIGKILL, jobs.log(first_out)
        second, out = jobs.start(
            "plain", "--run", "auto", "--total", "15", "--seed", "7", environment=environment
        )
        jobs.end(second, out)
        status = started.ask(GetStatus(), Status)
        assert status.segment_dir == str(segments)
    finally:
        pid = started.ask(GetStatus(), Status).pid
        os.kill(pid, signal.SIGTERM)
        eventually(lambda: not Path(f"/proc/{pid}").exists(), "the end of the daemon")
    assert jobs.report(out)["resumed_from"] is not None
    reference = jobs.run("plain", "--total", "15", daemon="none")
    assert differences(reference, out) == []


@pytest.mark.slow
def test_a_reload_takes_other_settings_and_loses_no_snapshot(
    request: pytest.FixtureRequest, jobs: Jobs, tmp_path: Path
) -> None:
    """SIGHUP ended the daemon at once. Settings that are unusable change nothing."""
    settings = tmp_path / "ckptd.toml"
    settings.write_text('memory = "256MiB"\n')
    with own_daemon("--config", str(settings)) as daemon:
        jobs.endpoint = daemon.endpoint
        assert daemon.process is not None
        run = "reloaded"
        trainer = Trainer(request, jobs, "--run", run, "--total", "100000", "--step-ms", "50")
        trainer.reaches("snapshots", above=8)

        settings.write_text('memory = "a lot"\n')
        daemon.process.send_signal(signal.SIGHUP)
        eventually(lambda: bool(daemon.events("not_reloaded")), "the event not_reloaded", timeout_s=20)
        assert "memory" in daemon.events("not_reloaded")[0]
        status = daemon.ask(GetStatus(), Status)
        assert (status.pid, status.quota_bytes) == (daemon.process.pid, 256 << 20)

        settings.write_text('memory = "300MiB"\n')
        for _ in range(2):  # also while the first one is under way
            daemon.process.send_signal(signal.SIGHUP)

        def reloaded() -> bool:
            try:
                return daemon.ask(GetStatus(), Status).quota_bytes == 300 << 20
            except (DaemonUnavailable, RequestTimeout):  # the process that was asked is replaced
                return False

        eventually(reloaded, "the new quota", timeout_s=120)
        assert daemon.process.poll() is None
        assert daemon.ask(GetStatus(), Status).pid == daemon.process.pid
        before = trainer.stats()
        trainer.reaches("snapshots", above=before["snapshots"] + 8)
        trainer.kill()
        total = json.loads(trainer.stats_file.read_text())["step"] + 20
        resumed = jobs.run("plain", "--run", run, "--seed", "7", "--total", str(total))
        assert jobs.report(resumed)["resumed_from"] > before["step"]
        assert differences(jobs.run("plain", "--total", str(total), daemon="none"), resumed) == []
