"""A worker is killed in the middle of an iteration, and comes back: real processes, hosts and connections."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.client.pipeline.rerouted_stage import micro_batch_seed
from ckptd.client.rerouting.rerouted_training import ReroutedTraining
from ckptd.core.reroute.pipeline_grid import PipelineGrid, StageCosts
from ckptd.restart_line import EPOCH_VARIABLE, LINE_VARIABLE, HostEnd, inherited_line
from tests.ckptd.host.hosting import Hosting, until
from tests.client.rerouting.rerouted_job import (
    HOLD,
    ITERATIONS,
    MICRO_BATCHES,
    SEED,
    batch,
    loss_of,
    optimizer_of,
    stage_of,
)
from tests.ports import free_port

VICTIM, ITS_ITERATION = 3, 3


@pytest.mark.slow
def test_a_worker_dies_in_mid_iteration_and_comes_back(tmp_path: Path) -> None:
    """Its peer of the stage does its work, and gives it the state; no other process is started anew."""
    place = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": f"{free_port()}", "GLOO_SOCKET_IFNAME": "lo"}
    place |= {"FOLDER": str(tmp_path), "DIES": f"{VICTIM}:{ITS_ITERATION}"}
    logs = [tmp_path / f"host{rank}.log" for rank in range(4)]
    hosts = [_start(tmp_path, log, {**place, "RANK": f"{rank}"}) for rank, log in enumerate(logs)]
    try:
        until(lambda: "rank 3 is back" in logs[0].read_text() or any(h.poll() for h in hosts), "its return")
        (tmp_path / "go_on").touch()
        codes = [host.wait(240) for host in hosts]
    finally:
        for host in hosts:
            host.terminate()
            host.wait(60)
    assert codes == [0] * 4, [log.read_text() for log in logs]
    assert [log.read_text().count(" has failed: ") for log in logs] == [0, 0, 0, 1]
    found = [torch.load(tmp_path / f"final{rank}.pt", weights_only=False) for rank in range(4)]
    wanted, wanted_losses = _undisturbed()
    for rank, each in enumerate(found):
        _assert_equal(each["model"], wanted[rank % 2]["model"], f"rank {rank}: model")
        _assert_equal(each["optimizer"], wanted[rank % 2]["optimizer"], f"rank {rank}: optimizer")
    losses: dict[int, dict[tuple[int, int], float]] = {}
    for each in found:
        for iteration, some in each["losses"].items():
            losses.setdefault(iteration, {}).update(some)
    for iteration, some in losses.items():
        of_the_dead = iteration < ITS_ITERATION
        assert some == {k: v for k, v in wanted_losses[iteration].items() if k[0] == 0 or not of_the_dead}
    missing = found[0]["missing"]
    assert [missing[i] for i in range(ITS_ITERATION, HOLD + 1)] == [(VICTIM,)] * (HOLD + 1 - ITS_ITERATION)
    assert missing[ITERATIONS - 1] == ()
    assert min(found[VICTIM]["losses"]) > HOLD


def _start(folder: Path, log: Path, place: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as sink:
        return subprocess.Popen(
            [sys.executable, "-m", "ckptd.host", "--reroute", "-m", "tests.client.rerouting.rerouted_job"],
            cwd=folder,
            env=Hosting(folder).environment(**place),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )


def _assert_equal(found: Any, wanted: Any, where: str) -> None:
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted), where
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for key in wanted:
            _assert_equal(found[key], wanted[key], f"{where} {key}")
    elif isinstance(wanted, list | tuple):
        for number, pair in enumerate(zip(found, wanted, strict=True)):
            _assert_equal(*pair, f"{where} {number}")
    else:
        assert found == wanted, where


def _undisturbed() -> tuple[list[dict[str, Any]], list[dict[tuple[int, int], float]]]:
    """Both stages, and the losses of each iteration: by autograd alone, in one process."""
    stages = [stage_of(0), stage_of(1)]
    optimizers = [optimizer_of(stage) for stage in stages]
    params = [p for stage in stages for p in stage.parameters()]
    losses: list[dict[tuple[int, int], float]] = []
    for iteration in range(ITERATIONS):
        losses.append({})
        sums = []
        for d in range(2):
            for m in range(MICRO_BATCHES):
                x = data = batch(iteration, d, m)
                for s, stage in enumerate(stages):
                    torch.manual_seed(micro_batch_seed(SEED, iteration, d, m, s))
                    x = stage(x)
                loss = loss_of(x, -data)
                loss.backward()
                losses[-1][d, m] = float(loss.detach())
            sums.append([p.grad.clone() for p in params if p.grad is not None])
            for optimizer, _ in optimizers:
                optimizer.zero_grad()
        for p, first, second in zip(params, *sums, strict=True):
            p.grad = (first / MICRO_BATCHES + second / MICRO_BATCHES) / 2
        for optimizer, schedule in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    states = [
        {"model": stage.state_dict(), "optimizer": optimizer.state_dict()}
        for stage, (optimizer, _) in zip(stages, optimizers, strict=True)
    ]
    return states, losses


# -- what is refused -------------------------------------------------------------------------------------


def _training() -> ReroutedTraining:
    module, rows = stage_of(0), torch.zeros(3, 8)
    optimizer, _ = optimizer_of(module)
    examples = rows, rows.clone().requires_grad_()
    grid = PipelineGrid(2, (StageCosts(1, 1, 1),) * 2, MICRO_BATCHES)
    return ReroutedTraining(module, optimizer, grid, examples=examples, loss_fn=loss_of)


def test_a_process_without_such_a_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LINE_VARIABLE, raising=False)
    inherited_line.cache_clear()
    with pytest.raises(ValueError, match=r"start it with python -m ckptd\.host --reroute"):
        _training()
    inherited_line.cache_clear()


def test_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    host = HostEnd.make()
    inherited_line.cache_clear()
    for name, text in {
        LINE_VARIABLE: f"{host.descriptor}",
        EPOCH_VARIABLE: "0:",
        "RANK": "0",
        "WORLD_SIZE": "6",
    }.items():
        monkeypatch.setenv(name, text)
    line = inherited_line()
    assert line is not None
    with pytest.raises(ValueError, match="2 pipelines of 2 stages are not 6 ranks"):
        _training()
    inherited_line.cache_clear()
    line._socket.close()
    host.close()
