"""The scripts of `deploy/slurm`, as shipped, under a real Slurm: kills, requeues, preemption."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.demo.lab import read_events
from tests.ckptd.running import eventually
from tests.e2e.compare import differences
from tests.long import long
from tests.slurm import SCRIPTS, Slurm, why_no_slurm
from tests.systemd import ENVIRONMENT, PYTHON, Systemd

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm() or "there is one"),
]
RUN, SEGMENTS = "run/ckptd-slurm", "dev/shm/ckptd-slurm"
SRUN = "srun python -m ckptd.host TRAIN"
TOTAL, HURT_AT, STEP_MS = 60, 20, 50


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Systemd() as machine:
        yield Slurm(machine)


class Training:
    """A job under hosts, started by `srun` alone.

    Args:
        script: how a batch script starts it; ``TRAIN`` stands for the program and its arguments.
    """

    def __init__(
        self, slurm: Slurm, name: str, *options: str, script: str = SRUN, ranks: int = 1, daemon: str = "auto"
    ) -> None:
        self._slurm, self.ranks = slurm, ranks
        self._folder = slurm.machine.root / "tmp" / name
        arguments = f"--case plain --total {TOTAL} --step-ms {STEP_MS} --run {name} --daemon {daemon}"
        train = f"-m tests.e2e.host_job {arguments} --folder /tmp/{name}"
        exports = " ".join((*ENVIRONMENT, "OMP_NUM_THREADS=1", f"PATH={PYTHON}/bin:$PATH"))
        slurm.run("install", "-d", "-o", "alice", f"/tmp/{name}")
        text = f"mkdir -p /tmp/{name}/bin; ln -sf {PYTHON}/bin/python3 /tmp/{name}/bin/python\n"
        text += f"export {exports} && PATH=/tmp/{name}/bin:$PATH\n{script.replace('TRAIN', train)}"
        self.job = slurm.submit(text, f"--ntasks={ranks}", "--requeue", *options)

    @property
    def output(self) -> str:
        return self._slurm.output(self.job)

    def events(self, rank: int, kind: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self._folder / f"{rank}.jsonl") if e["event"] == kind]

    def reach(self, step: int, life: int = 1) -> None:
        def reached() -> bool:
            assert self._slurm.state(self.job) not in ("FAILED", "COMPLETED"), self.output
            return all(
                len(self.events(rank, "attached")) >= life
                and max((e["step"] for e in self.events(rank, "step")), default=-1) >= step
                for rank in range(self.ranks)
            )

        eventually(reached, f"step {step}: {self.output}", timeout_s=120)

    def end(self) -> None:
        self._slurm.until(self.job, "COMPLETED")

    def resumed_from(self) -> list[set[int | None]]:
        """Of each life, what its ranks resumed from."""
        lives = zip(*(self.events(rank, "attached") for rank in range(self.ranks)), strict=True)
        return [{event["resumed_from"] for event in life} for life in lives]

    def states(self, to: Path) -> list[Path]:
        to.mkdir()
        return [Path(shutil.copy(self._folder / f"{rank}.pt", to)) for rank in range(self.ranks)]


def exact(training: Training, reference: Training, folder: Path) -> None:
    for one, other in zip(training.states(folder / "one"), reference.states(folder / "other"), strict=True):
        assert differences(one, other) == []


@pytest.fixture(scope="module")
def reference(slurm: Slurm) -> Training:
    """Undisturbed, without a daemon; it trains beside the first test."""
    return Training(slurm, "reference", daemon="none")


def assert_near(resumed_from: set[int | None], step: int) -> None:
    """All ranks have resumed there, and not from the beginning."""
    (resumed,) = resumed_from
    assert resumed is not None
    assert resumed > step - 10


def daemons(slurm: Slurm) -> list[str]:
    """The jobs that have one."""
    return sorted(path.name for path in (slurm.machine.root / RUN).glob("[0-9]*"))


def test_a_requeued_job_finds_its_memory_and_ends_with_the_same_bits(
    slurm: Slurm, reference: Training, tmp_path: Path
) -> None:
    """`srun` alone starts the hosts: nothing says RANK, WORLD_SIZE or MASTER_ADDR. The prolog starts the
    daemon, the epilog keeps it for the requeue, and ends it with the job; also if Slurm leaves out the second
    prolog.
    """
    training = Training(slurm, "requeued")
    training.reach(HURT_AT)
    folder = slurm.machine.root / SEGMENTS / training.job
    slurm.requeue(training.job)
    assert list(folder.glob("*.seg")), "the epilog has kept them"
    slurm.start_now(training.job)
    training.end()
    reference.end()
    first, second = training.resumed_from()
    assert first == {None}
    assert_near(second, HURT_AT)
    exact(training, reference, tmp_path)
    eventually(lambda: daemons(slurm) == [], "the epilog ends the daemon")
    assert not folder.exists()


@long
def test_steps_that_are_killed_are_tried_again_by_the_example_script(
    slurm: Slurm, two_ranks: Training, tmp_path: Path
) -> None:
    """`train.sbatch` as shipped, on one node without devices; the daemon is killed, too, and comes back."""
    training = Training(slurm, "tried", "--gpus-per-node=0", script=example(slurm), ranks=2)
    training.reach(HURT_AT)
    slurm.run("scancel", "--signal=KILL", f"{training.job}.0")
    training.reach(2 * HURT_AT, life=2)
    slurm.run("pkill", "--signal=KILL", "--full", "ckptd run", user="alice")
    slurm.run("scancel", "--signal=KILL", f"{training.job}.1")
    training.end()
    assert "try 1 has ended with exit code 137" in training.output
    first, second, third = training.resumed_from()
    assert first == {None}
    assert_near(second, HURT_AT)
    assert_near(third, 2 * HURT_AT)
    two_ranks.end()
    exact(training, two_ranks, tmp_path)


@long
def test_a_job_that_gets_sigterm_requeues_itself(slurm: Slurm, two_ranks: Training, tmp_path: Path) -> None:
    """As before its time limit (`--signal=TERM@…`)."""
    training = Training(slurm, "limited", "--gpus-per-node=0", script=example(slurm), ranks=2)
    training.reach(HURT_AT)
    slurm.run("scancel", "--signal=TERM", f"{training.job}.0")
    slurm.until(training.job, "PENDING")
    training.end()
    _, second = training.resumed_from()
    assert_near(second, HURT_AT)
    two_ranks.end()
    exact(training, two_ranks, tmp_path)
    eventually(lambda: training.job not in daemons(slurm), "the epilog ends the daemon")


@long
def test_a_preempted_job_comes_back(slurm: Slurm, two_ranks: Training, tmp_path: Path) -> None:
    training = Training(slurm, "preempted", "--gpus-per-node=0", script=example(slurm), ranks=2)
    training.reach(HURT_AT)
    urgent = slurm.submit("sleep 2", "--partition=urgent", "--exclusive")
    slurm.until(urgent, "COMPLETED")
    training.end()
    _, second = training.resumed_from()
    assert_near(second, HURT_AT)
    two_ranks.end()
    exact(training, two_ranks, tmp_path)


@long
def test_a_cancelled_job_leaves_nothing(slurm: Slurm) -> None:
    training = Training(slurm, "cancelled", "--gpus-per-node=0", script=example(slurm), ranks=2)
    training.reach(HURT_AT)
    slurm.run("scancel", training.job)
    slurm.until(training.job, "CANCELLED")
    eventually(lambda: training.job not in daemons(slurm), "the epilog ends the daemon")
    assert not (slurm.machine.root / SEGMENTS / training.job).exists()
    assert len(training.resumed_from()) == 1


def example(slurm: Slurm) -> str:
    """The lines of `train.sbatch`; options of `sbatch` in it give way to those of the command line."""
    text = (slurm.machine.root / SCRIPTS.lstrip("/") / "train.sbatch").read_text()
    lines = [line for line in text.splitlines() if not line.startswith(("#!", "#SBATCH"))]
    return "set -- TRAIN\n" + "\n".join(lines)


@pytest.fixture(scope="module")
def two_ranks(slurm: Slurm) -> Training:
    """Undisturbed, without a daemon."""
    return Training(slurm, "two_ranks", daemon="none", ranks=2)


@long
def test_the_daemon_of_the_node_serves_all_jobs() -> None:
    """`ckptd.service` as shipped, of another user than the jobs'; the prolog starts it where it is down."""
    with Systemd() as machine:
        slurm = Slurm(machine, settings=("CKPTD_SLURM_DAEMON=node", "CKPTD_SLURM_REQUIRED=yes"))
        assert machine.shows("ckptd", "ActiveState") == "inactive"
        job = slurm.submit("srun ckptctl status && env | grep CKPTD_")
        slurm.until(job, "COMPLETED")
        assert "ipc:///run/ckptd/ckptd.sock" in slurm.output(job)
        assert "CKPTD_DAEMON_USER=ckptd" in slurm.output(job)
        assert machine.shows("ckptd", "ActiveState") == "active", "the epilog leaves it"
        assert not (machine.root / RUN).exists()
        machine.ctl("stop", "ckptd")
        machine.run("rm", "/etc/systemd/system/ckptd.service")
        machine.ctl("daemon-reload")
        slurm.submit("true")
        eventually(lambda: slurm.nodes_that_are("drain") == ["n1"], "a failed prolog drains the node")


@long
def test_hosts_of_two_nodes_meet_by_the_variables_of_srun(two_ranks: Training, tmp_path: Path) -> None:
    """Each node has folders of its own; ranks and hosts meet at the name of the first one."""
    per_node = [
        f"CKPTD_SLURM_RUN=/{RUN}-$SLURMD_NODENAME",
        f"CKPTD_SLURM_SEGMENTS=/{SEGMENTS}-$SLURMD_NODENAME",
    ]
    with Systemd() as machine:
        slurm = Slurm(machine, 2, settings=per_node)
        training = Training(slurm, "nodes", "--nodes=2", "--ntasks-per-node=1", ranks=2)
        training.reach(HURT_AT)
        for rank, name in enumerate(slurm.names):
            files = (machine.root / f"{SEGMENTS}-{name}" / training.job).glob("*.seg")
            assert {file.name.split("~")[2] for file in files} == {f"r{rank}"}
        slurm.run("kill", "-KILL", str(training.events(1, "step")[-1]["pid"]))
        training.end()
        assert "rank 0: all 2 hosts have joined" in training.output
        assert "epoch 1 begins: rank 1: SIGKILL" in training.output
        first, second = training.resumed_from()
        assert first == {None}
        assert_near(second, HURT_AT)
        two_ranks.end()
        exact(training, two_ranks, tmp_path)


@long
def test_a_daemon_that_does_not_stop_is_killed_and_not_started_again() -> None:
    """Its memory takes longer to free than the prolog's loop waits before it starts a daemon again."""
    with Systemd() as machine:
        slurm = Slurm(machine)
        slow = '#!/bin/sh\n[ "$1" != -rf ] || sleep 5\nexec /bin/rm "$@"\n'
        machine.run("bash", "-c", 'printf %s "$0" >/usr/local/sbin/rm && chmod 755 /usr/local/sbin/rm', slow)
        job = slurm.submit("sleep 600")
        socket = machine.root / RUN / job / "ckptd.sock"
        eventually(socket.exists, f"its daemon: {slurm.logs()}")
        daemon = ("--full", "ckptd run", "--uid", "alice")
        machine.run("pkill", "--signal=STOP", *daemon)
        slurm.run("scancel", job)
        eventually(lambda: daemons(slurm) == [], "the epilog kills it", timeout_s=180)
        assert machine.run("pgrep", "--list-full", *daemon, check=False).stdout == ""
        assert not (machine.root / SEGMENTS / job).exists()


@long
def test_the_memory_of_a_job_that_does_not_come_back_is_freed() -> None:
    with Systemd() as machine:
        slurm = Slurm(machine, settings=["CKPTD_SLURM_KEEP_S=4"])
        job = slurm.submit("sleep 60", "--requeue")
        slurm.until(job, "RUNNING")
        eventually(lambda: daemons(slurm) == [job], "its daemon")
        slurm.requeue(job)
        slurm.run("scontrol", "hold", job)
        assert daemons(slurm) == [job]
        eventually(lambda: daemons(slurm) == [], "it is stopped")
        assert not (machine.root / SEGMENTS / job).exists()
