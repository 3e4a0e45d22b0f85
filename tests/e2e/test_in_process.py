"""Ranks that stay when another one fails: real torchrun, real SIGKILLs, exact ends."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from ckptd.host.hangs.hang_inquiry import TrainerState
from ckptd.host.hangs.trainer_watch import state_of
from tests.ckptd.host.hosting import children_of
from tests.e2e.harness import DaemonProcess
from tests.e2e.hosted_job import HostedJob
from tests.e2e.test_host import (
    RANKS,
    STEPS,
    assert_same_end,
    daemon,
    job,
    open_gate,
    open_gate_further,
    reaches,
    train,
    undisturbed,
)
from tests.long import long

__all__ = ["daemon", "job", "undisturbed"]


def kill(job: HostedJob, *ranks: int) -> None:
    """SIGKILL their trainers, and wait until each rank trains again."""
    before = [len(job.events(rank, "back")) for rank in range(RANKS)]
    for pid in [job.trainer(rank) for rank in ranks]:
        os.kill(pid, signal.SIGKILL)
    open_gate_further(job)
    job.until(
        lambda: all(len(job.events(rank, "back")) > count for rank, count in enumerate(before)),
        "the next life",
    )


def stays(job: HostedJob) -> list[tuple[int, int]]:
    """Rank and epoch of each restart in a process."""
    found = re.findall(r"rank (\d): epoch (\d+): trainer \d+ has stayed", job.output)
    return [(int(rank), int(epoch)) for rank, epoch in found]


@pytest.mark.slow
def test_those_that_are_left_stay_and_end_exactly(
    job: HostedJob, undisturbed: HostedJob, daemon: DaemonProcess
) -> None:
    variables = {"CKPTD_HOST_MAX_RESTARTS": "9"}
    train(job, "stays", daemon.endpoint, "--in-process", gate=0, env=variables)
    reaches(job, 8, daemon)
    first = job.trainer(0)
    kill(job, 1)
    second = job.trainer(1)
    reaches(job, 16, daemon)
    held = len(os.listdir(f"/proc/{first}/fd"))
    kill(job, 1)  # the same process stays twice
    assert job.trainer(0) == first, job.output
    assert len(os.listdir(f"/proc/{first}/fd")) <= held + 2, "what the last life held is given back"
    reaches(job, 24, daemon)
    third = job.trainer(1)
    kill(job, 0)  # the one that has stayed
    assert job.trainer(1) == third != second
    reaches(job, 32, daemon)
    kill(job, 0, 1)
    open_gate(job)
    assert job.end() == 0, job.output
    assert_same_end(job, undisturbed)
    assert stays(job) == [(0, 1), (0, 2), (1, 3)], job.output
    assert "THIS PROGRAM DIFFERS" not in job.output, "options are the script's, not those of the broken step"


@long
@pytest.mark.slow
def test_a_rank_that_hangs_is_ended_and_so_are_the_others(
    job: HostedJob, undisturbed: HostedJob, daemon: DaemonProcess
) -> None:
    """It is not known for sure who hangs: nobody stays."""
    variables = {"CKPTD_HOST_STEP_DEADLINE_S": "5", "CKPTD_HOST_MAX_RESTARTS": "99"}
    train(job, "stopped", daemon.endpoint, "--in-process", gate=STEPS // 2, env=variables)
    job.reaches(8, daemon)
    before = job.lives()
    os.kill(job.trainer(1), signal.SIGSTOP)
    open_gate(job)
    job.until(lambda: job.lives() > before, "the next life")
    assert job.end() == 0, job.output
    assert_same_end(job, undisturbed)
    assert stays(job) == [], job.output


SCRIPT = """
import os, sys, time, torch, torch.distributed as dist
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from ckptd.client import Checkpointer, RecoveryOptions, RunOptions, SnapshotOptions

mode, hurt = sys.argv[2], Path(sys.argv[3])

class Loader:
    def __iter__(self):
        yield from range(100)
    def state_dict(self):
        return {}
    def load_state_dict(self, state):
        pass

def connect():
    global net
    dist.init_process_group("gloo")
    if mode == "fails" and restarted and hurt.exists():
        raise OSError("no network here")
    net = DistributedDataParallel(model)
    return net

restarted = False
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
net = connect()
restarted = True
rank = dist.get_rank()
optimizer = torch.optim.AdamW(net.parameters())
ckpt = Checkpointer(
    net, optimizer, state={"loader": Loader()} if mode == "iterated" else {}, daemon=sys.argv[1],
    run=RunOptions(job="stays", name=mode), snapshots=SnapshotOptions(window=2),
    recovery=RecoveryOptions(in_process=connect),
)
first = net
data = torch.randn(500, 8, generator=torch.Generator().manual_seed(7)).tolist()
shuffled = DataLoader(
    data, batch_size=4, shuffle=True, num_workers=2, collate_fn=torch.tensor,
    generator=torch.Generator().manual_seed(rank),
)
batches = ckpt.batches(shuffled) if mode.startswith("batches") else None
for step in ckpt.steps(60):
    with ckpt.restartable():
        if mode == "fails" and step == 30 and rank == 1 and not hurt.with_suffix(".first").exists():
            hurt.with_suffix(".first").touch()
            raise ValueError("a bad batch")
        if step == (45 if mode == "fails" else 30) and rank == 1 and not hurt.exists():
            hurt.touch()
            os.kill(os.getpid(), 9)
        used = first if mode == "keeps-the-old" else net
        batch = torch.ones(4, 8) if batches is None else next(batches)
        used(batch).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05 if mode == "killed" else 0.01)
bits = hash(bytes(model.weight.detach().numpy().tobytes()))
sys.stdout.write(f"complete {rank} {os.getpid()} {ckpt.resumed_from is not None} {bits}\\n")
ckpt.close()
"""


# The digests of bytes are those of other processes, too.
HASHED = {"PYTHONHASHSEED": "0"}


def end_of(job: HostedJob, daemon: DaemonProcess, mode: str, **how: bool) -> str:
    """The output of a job that is hurt once, and comes to its end."""
    script = job.folder / "train.py"
    script.write_text(SCRIPT)
    variables = {"CKPTD_HOST_MAX_RESTARTS": "9", **HASHED}
    job.start(str(script), daemon.endpoint, mode, str(job.folder / "hurt"), env=variables, **how)
    assert job.end() == 0, job.output
    complete = re.findall(r"complete (\d) (\d+) True (.*)", job.output)
    assert len(complete) == RANKS, job.output
    assert len({weights for _, _, weights in complete}) == 1, job.output
    return job.output


@pytest.mark.slow
def test_an_error_ends_one_rank_only_and_a_restart_that_goes_wrong_the_other(
    job: HostedJob, daemon: DaemonProcess
) -> None:
    """The second time the process that stays cannot connect: the hosts start all ranks again."""
    output = end_of(job, daemon, "fails", forked=True)
    assert "ValueError: a bad batch" in output
    assert stays(job)[:2] == [(0, 1), (0, 2)], output
    assert "OSError: no network here" in output
    # The other rank fails, too, when this one has left, and may be noticed first.
    assert re.search(r"epoch 3 begins: rank \d: exit code 1", output), output


@long
@pytest.mark.slow
def test_a_script_that_keeps_what_is_from_before_the_restart(job: HostedJob, daemon: DaemonProcess) -> None:
    """And the hosts start all ranks again."""
    output = end_of(job, daemon, "keeps-the-old")
    assert "is from before the restart" in output
    assert stays(job)[0] == (0, 1)
    assert re.search(r"epoch 2 begins: rank \d: exit code 1", output), output


@long
@pytest.mark.slow
def test_batches_go_back_with_the_rest(job: HostedJob, daemon: DaemonProcess, tmp_path: Path) -> None:
    """A shuffled loader with workers: whoever stays sees the batches that it would have seen."""
    output = end_of(job, daemon, "batches", forked=True)
    assert stays(job) == [(0, 1)], output
    undisturbed = HostedJob(tmp_path / "undisturbed", RANKS)
    try:
        script = undisturbed.folder / "train.py"
        script.write_text(SCRIPT)
        (undisturbed.folder / "hurt").touch()
        words = (daemon.endpoint, "batches-undisturbed", str(undisturbed.folder / "hurt"))
        undisturbed.start(str(script), *words, env=HASHED, forked=True)
        assert undisturbed.end() == 0, undisturbed.output
        bits = set(re.findall(r"complete \d \d+ \w+ (.*)", undisturbed.output))
        assert bits == set(re.findall(r"complete \d \d+ \w+ (.*)", output)), undisturbed.output
    finally:
        undisturbed.close()


@long
@pytest.mark.slow
def test_what_cannot_be_set_back_does_not_stay(job: HostedJob, daemon: DaemonProcess) -> None:
    output = end_of(job, daemon, "iterated")
    assert "no restart in this process: state['loader'] is iterated by the script" in output
    assert stays(job) == []


@long
@pytest.mark.slow
def test_a_trainer_that_is_slow_to_come_is_ended(job: HostedJob, daemon: DaemonProcess) -> None:
    """It does not answer: stopped, it reads nothing; what it has said before counts for nothing."""
    script = job.folder / "train.py"
    script.write_text(SCRIPT)
    (job.folder / "hurt").touch()
    job.start(
        str(script),
        daemon.endpoint,
        "killed",
        str(job.folder / "hurt"),
        env={"CKPTD_HOST_MAX_RESTARTS": "9", "CKPTD_HOST_STOP_S": "1"},
    )
    job.until(lambda: "a new run begins" in job.output, "training")
    hosts = job.hosts()
    (pid,) = [pid for name, pid in children_of(hosts[0]).items() if not name.startswith("ckptd-")]
    os.kill(pid, signal.SIGSTOP)
    job.until(lambda: state_of(pid) is TrainerState.STOPPED, "its stop")
    (other,) = [pid for name, pid in children_of(hosts[1]).items() if not name.startswith("ckptd-")]
    os.kill(other, signal.SIGKILL)
    assert job.end() == 0, job.output
    assert stays(job) in ([], [(0, 2)]), job.output
