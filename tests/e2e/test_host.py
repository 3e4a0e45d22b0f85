"""Jobs under torchrun whose trainers are hosted, and killed: real torchrun, real SIGKILLs, exact ends.

torchrun may not restart anything here unless a test says so: what comes back was brought back by the hosts.
Processes are forked from one that has torch (`tests.forked_hosts`), in two tests they are fresh interpreters.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.demo.lab import SHARED_CORES
from tests.ckptd.host.hosting import FOREIGN, children_of, gone, until
from tests.e2e.gated_train import GATE
from tests.e2e.harness import DaemonProcess, own_daemon
from tests.e2e.hosted_job import HostedJob
from tests.forked import Forked
from tests.long import long
from tests.ports import free_port

RANKS = 2
STEPS = 72
TRAIN = [
    *("-m", "tests.e2e.gated_train", "--ddp", "--threads", "1", "--batch-size", "1", "--window", "2"),
    *("--steps", str(STEPS), "--period-ms", "30"),
]


def train(
    job: HostedJob,
    run: str,
    daemon: str,
    *options: str,
    gate: int = STEPS,
    env: Mapping[str, str] | None = None,
    **how: Any,
) -> None:
    """Start the demo's training; it waits at the gate until `open_gate`."""
    job.run = run
    open_gate(job, gate)
    job.start(
        *TRAIN,
        "--run",
        run,
        "--daemon",
        daemon,
        *files_of(job),
        *options,
        env={**(env or {}), GATE: str(job.folder / "gate")},
        **{"forked": True, **how},
    )


def open_gate(job: HostedJob, step: int = STEPS) -> None:
    """Let the job do the steps before this one: all, if none is given."""
    new = job.folder / "gate.new"
    new.write_text(str(step))
    new.rename(job.folder / "gate")


def open_gate_further(job: HostedJob) -> None:
    """Let the job do a few more steps: who waits at the gate hears of nothing."""
    open_gate(job, int((job.folder / "gate").read_text()) + 4)


def reaches(job: HostedJob, step: int, daemon: DaemonProcess) -> None:
    """Let the job do this step and a few more, and wait until it can go back to this one."""
    gate = step + 6
    open_gate(job, gate)
    job.reaches(step)
    deadline = time.monotonic() + 2

    def saved() -> bool:
        nonlocal gate, deadline
        if job.can_go_back_to(step, daemon):
            return True
        if time.monotonic() > deadline and gate < STEPS - 10:
            gate, deadline = gate + 2, time.monotonic() + 2  # a slow machine leaves snapshots out
            open_gate(job, gate)
        return False

    job.until(saved, f"snapshots of iteration {step}")


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    """One for each test."""
    with own_daemon("--memory", "1GiB") as process:
        yield process


@pytest.fixture
def job(tmp_path: Path, daemon: DaemonProcess) -> Iterator[HostedJob]:
    made = HostedJob(tmp_path / "hosted", RANKS)
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> HostedJob:
    """The same training without ckptd, without hosts and without torchrun."""
    made = HostedJob(tmp_path_factory.mktemp("undisturbed") / "plain", RANKS)
    meeting = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    kept = {name: text for name, text in os.environ.items() if not name.startswith(FOREIGN)}
    ranks = []
    for rank in range(RANKS):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
        words = [*TRAIN[1:], "--run", "none", "--daemon", "none", *files_of(made)]
        ranks.append(Forked(become, words, env={**kept, **SHARED_CORES, **meeting, **place}))
    said = [rank.communicate(200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, said
    return made


def become(words: list[str]) -> None:
    """``python -m`` with these words, in a fork."""
    sys.argv = ["-m", *words[1:]]
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def files_of(job: HostedJob) -> tuple[str, ...]:
    return ("--log", str(job.folder / "log.jsonl"), "--final", str(job.folder / "final.pt"))


def assert_same_end(job: HostedJob, undisturbed: HostedJob) -> None:
    for rank in range(RANKS):
        ours, theirs = job.final(rank), undisturbed.final(rank)
        assert ours.keys() == theirs.keys()
        different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
        assert different == [], job.output


@pytest.mark.slow
def test_killed_trainers_and_zygotes_come_back_exactly(
    job: HostedJob, undisturbed: HostedJob, daemon: DaemonProcess
) -> None:
    train(job, "hosted", daemon.endpoint, gate=0, env={"CKPTD_HOST_MAX_RESTARTS": "9"})
    reaches(job, 8, daemon)
    job.kill(1)
    reaches(job, 14, daemon)
    job.kill(*range(RANKS))  # two at once
    reaches(job, 20, daemon)
    job.kill(0)
    job.kill(0)  # in its replay, most often
    reaches(job, 26, daemon)
    host = job.hosts()[1]
    os.kill(children_of(host)["ckptd-zygote"], signal.SIGKILL)
    os.kill(job.trainer(1), signal.SIGKILL)  # while there is no zygote
    open_gate(job)
    assert job.end() == 0, job.output
    assert_same_end(job, undisturbed)
    epochs = re.findall(r"rank 0: epoch (\d) begins", job.output)
    assert epochs == [*"12345"], job.output
    assert len({e["pid"] for e in job.events(0, "attached")}) == 6
    resumed = job.events(1, "finished")[0]["resumed_from"]
    assert resumed >= 20


@pytest.mark.slow
def test_a_killed_host_is_torchruns_affair(
    job: HostedJob, undisturbed: HostedJob, daemon: DaemonProcess
) -> None:
    train(job, "next-tier", daemon.endpoint, gate=0, max_restarts=1)
    reaches(job, 10, daemon)
    trainers = [job.trainer(rank) for rank in range(RANKS)]
    before = job.hosts()
    os.kill(before[0], signal.SIGKILL)  # that of the coordinator
    open_gate(job)
    job.until(lambda: all(map(gone, trainers)), "the end of all trainers")
    assert job.end() == 0, job.output
    assert_same_end(job, undisturbed)
    assert all(map(gone, before.values()))


@pytest.mark.slow
def test_nothing_outlives_a_killed_torchrun(job: HostedJob, daemon: DaemonProcess) -> None:
    train(job, "orphans", daemon.endpoint, gate=STEPS // 2, forked=False)
    job.reaches(6)
    everything = [job.trainer(rank) for rank in range(RANKS)]
    for pid in job.hosts().values():
        everything += [pid, *children_of(pid).values()]
    assert job.process is not None
    job.process.kill()
    job.process.wait()
    until(lambda: all(map(gone, everything)), "the end of all processes")
    assert "torchrun has died" in job.output


PARKED = r"parked at iteration .*: SIGTERM"
PARKS = """
import sys, time, torch, torch.distributed as dist
from ckptd.client import Checkpointer, RecoveryOptions, RunOptions
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = Checkpointer(model, optimizer, run=RunOptions(job="parks", name="run"), daemon=sys.argv[1],
                    recovery=RecoveryOptions(park=True))
print(f"rank {rank} resumes at {ckpt.resumed_from}", flush=True)
for done, step in enumerate(ckpt.steps(10**9)):
    model(torch.ones(4, 16)).sum().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
    if done == 30:
        print(f"rank {rank} trains", flush=True)
"""


@pytest.mark.slow
def test_survivors_park_and_preemption_parks_all(job: HostedJob, daemon: DaemonProcess) -> None:
    script = job.folder / "parks.py"
    script.write_text(PARKS)
    job.start(str(script), daemon.endpoint, forked=True)
    job.until(lambda: job.output.count("trains") == RANKS, "training")
    hosts = job.hosts()
    (victim,) = [pid for name, pid in children_of(hosts[1]).items() if not name.startswith("ckptd-")]
    os.kill(victim, signal.SIGKILL)
    job.until(lambda: job.output.count("trains") == 2 * RANKS, "training after a failure")
    assert job.output.count("parked at iteration") == 1, job.output
    everything = [pid for host in hosts.values() for pid in (host, *children_of(host).values())]
    assert job.process is not None
    before = len(re.findall(PARKED, job.output))
    job.process.terminate()
    assert job.end() != 0
    until(lambda: all(map(gone, everything)), "the end of all processes")
    # Who sees the others end leaves its loop, and parks once more.
    assert len(re.findall(PARKED, job.output)) == before + RANKS, job.output
    assert "epoch 2 begins" not in job.output
    parked = max(map(int, re.findall(r"parked at iteration (\d+)", job.output)))
    job.start(str(script), daemon.endpoint, forked=True)
    job.until(lambda: job.output.count("trains") == 3 * RANKS, "training after preemption")
    resumed = [int(n) for n in re.findall(r"resumes at (\d+)", job.output)[-RANKS:]]
    assert min(resumed) >= parked - 1, job.output


CRASHES = """
import os, sys, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    dist.init_process_group("gloo")
    print("life", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    if dist.get_rank() == 1:
        raise ValueError(f"own error of life {os.environ['TORCHELASTIC_RESTART_COUNT']}")
    dist.barrier()
if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_a_crash_loop_ends_with_the_scripts_own_error(job: HostedJob) -> None:
    """torchrun reports it as if there were no host, from the file that `record` wrote."""
    script = job.folder / "crashes.py"
    script.write_text(CRASHES)
    job.start("--max-restarts", "2", str(script))
    assert job.end() == 1
    assert job.output.count("ValueError: own error of life") >= 3
    report = job.output[job.output.index("Root Cause") :]
    assert "own error of life 2" in report
    (error,) = (job.folder / "logs").rglob("1/error.json")
    assert "own error of life 2" in json.loads(error.read_text())["message"]["message"]
    assert "3 failures, and 2 restarts are allowed" in job.output


@long
@pytest.mark.slow
def test_a_stopped_trainer_is_found_named_and_replaced(
    job: HostedJob, undisturbed: HostedJob, daemon: DaemonProcess
) -> None:
    """The others wait for it in a collective, for half an hour by gloo's default."""
    variables = {"CKPTD_HOST_STEP_DEADLINE_S": "5", "CKPTD_HOST_MAX_RESTARTS": "99"}
    train(job, "stopped", daemon.endpoint, gate=STEPS // 2, env=variables)
    job.reaches(8, daemon)
    before = job.lives()
    os.kill(job.trainer(1), signal.SIGSTOP)
    open_gate(job)
    job.until(lambda: job.lives() > before, "the next life")
    assert job.end() == 0, job.output
    assert_same_end(job, undisturbed)
    assert re.search(r"epoch \d begins: step \d+ of rank \d has not gone on .* rank 1 is stopped", job.output)


HANGS = """
import os, sys, threading, torch, torch.distributed as dist
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel
from ckptd.client import Checkpointer, RunOptions, SnapshotOptions
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
ckpt = Checkpointer(
    model, optimizer, daemon=sys.argv[1], run=RunOptions(job="hangs", name="hangs"),
    snapshots=SnapshotOptions(window=2),
)
for step in ckpt.steps(40):
    hung = Path(sys.argv[2])
    if step == 20 and dist.get_rank() == 1 and not hung.exists():
        hung.touch()
        threading.Event().wait()  # a data pipeline that never comes
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
sys.stdout.write(f"complete {dist.get_rank()} {ckpt.resumed_from}\\n")  # one write: ranks share the pipe
ckpt.close()
"""


@pytest.mark.slow
def test_a_rank_whose_data_never_comes_is_named(job: HostedJob, daemon: DaemonProcess) -> None:
    script = job.folder / "train.py"
    script.write_text(HANGS)
    variables = {"CKPTD_HOST_STEP_DEADLINE_S": "5", "CKPTD_HOST_MAX_RESTARTS": "99"}
    job.start(str(script), daemon.endpoint, str(job.folder / "hung"), env=variables, forked=True)
    assert job.end() == 0, job.output
    assert "rank 1 is in step 20 before its first forward, and the others have come further" in job.output
    assert sorted(re.findall(r"complete (\d)", job.output)) == ["0", "1"], job.output
