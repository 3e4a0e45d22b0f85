"""A worker is killed in the middle of an iteration, and comes back: real processes, hosts and connections."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ckptd.client.capture.step_state import Stateful
from ckptd.client.options import SnapshotOptions
from ckptd.client.rerouting.rerouted_training import ReroutedTraining
from ckptd.core.reroute.pipeline_grid import PipelineGrid, StageCosts
from ckptd.restart_line import EPOCH_VARIABLE, LINE_VARIABLE, HostEnd, inherited_line
from tests.ckptd.host.hosting import Hosting, children_of, trainers_of, until
from tests.client.rerouting.rerouted_job import (
    HOLD,
    ITERATIONS,
    MICRO_BATCHES,
    loss_of,
    optimizer_of,
    stage_of,
)
from tests.client.rerouting.undisturbed import assert_equal, undisturbed
from tests.forked_hosts import ForkedProgram
from tests.ports import free_port

VICTIM, ITS_ITERATION = 3, 3


@pytest.mark.slow
def test_a_worker_dies_in_mid_iteration_and_comes_back(tmp_path: Path) -> None:
    """Its peer of the stage does its work, and gives it the state; no other process is started anew."""
    with _hosts(tmp_path, VICTIM) as (hosts, logs):
        until(lambda: "rank 3 is back" in logs[0].read_text() or any(h.poll() for h in hosts), "its return")
        (tmp_path / "go_on").touch()
        codes = [host.wait(240) for host in hosts]
    assert codes == [0] * 4, [log.read_text() for log in logs]
    assert [log.read_text().count(" has failed: ") for log in logs] == [0, 0, 0, 1]
    found = [torch.load(tmp_path / f"final{rank}.pt", weights_only=False) for rank in range(4)]
    wanted, wanted_losses = undisturbed(ITERATIONS)
    for rank, each in enumerate(found):
        assert_equal(each["model"], wanted[rank % 2]["model"], f"rank {rank}: model")
        assert_equal(each["optimizer"], wanted[rank % 2]["optimizer"], f"rank {rank}: optimizer")
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


@pytest.mark.slow
def test_the_job_ends_well_without_a_worker_of_rank_0(tmp_path: Path) -> None:
    """Its host knows who is there; it stays while the others do what comes after their loops."""
    for name in ("late", "linger", "go_on"):
        (tmp_path / name).touch()
    with _hosts(tmp_path, 0) as (hosts, logs):
        until(
            lambda: "all iterations are done" in logs[0].read_text() or any(h.poll() for h in hosts),
            "the loops' end",
        )
        until(lambda: hosts[0].poll() is not None or not trainers_of(hosts[0].pid), "its trainer's end")
        (tmp_path / "linger").unlink()
        codes = [host.wait(240) for host in hosts]
    assert codes == [0] * 4, [log.read_text() for log in logs]
    assert sorted(path.name for path in tmp_path.glob("final*.pt")) == [f"final{r}.pt" for r in (1, 2, 3)]


@pytest.mark.slow
def test_nobody_is_missed_because_the_server_of_stores_has_ended(tmp_path: Path) -> None:
    with _hosts(tmp_path, VICTIM) as (hosts, logs):
        until(lambda: "rank 3 is back" in logs[0].read_text() or any(h.poll() for h in hosts), "its return")
        (zygote,) = [pid for name, pid in children_of(hosts[0].pid).items() if name == "ckptd-zygote"]
        server = {**children_of(hosts[0].pid), **children_of(zygote)}["ckptd-store"]
        os.kill(server, signal.SIGKILL)
        until(lambda: "the server of stores has ended" in logs[0].read_text(), "its end")
        (tmp_path / "go_on").touch()
        codes = [host.wait(240) for host in hosts]
    assert codes == [0] * 4, [log.read_text() for log in logs]
    found = [torch.load(tmp_path / f"final{rank}.pt", weights_only=False) for rank in range(4)]
    assert [each["missing"][ITERATIONS - 1] for each in found] == [()] * 4


@pytest.mark.slow
def test_a_job_whose_worker_hangs_ends_for_a_new_start(tmp_path: Path) -> None:
    """Also one that takes no snapshots. Before its fourth iteration a step has no deadline."""
    for name in ("hangs", "go_on"):
        (tmp_path / name).touch()
    with _hosts(tmp_path, VICTIM, HOLD, CKPTD_HOST_STEP_DEADLINE_S="5") as (hosts, logs):
        codes = [host.wait(240) for host in hosts]
    assert codes == [75] * 4, [log.read_text() for log in logs]
    assert "has not gone on" in logs[0].read_text()


@contextmanager
def _hosts(
    folder: Path, victim: int, iteration: int = ITS_ITERATION, **more: str
) -> Iterator[tuple[list[ForkedProgram], list[Path]]]:
    """Four, and their logs."""
    place = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": f"{free_port()}", "GLOO_SOCKET_IFNAME": "lo"}
    place |= {"FOLDER": str(folder), "DIES": f"{victim}:{iteration}", **more}
    logs = [folder / f"host{rank}.log" for rank in range(4)]
    hosts = [_start(folder, log, {**place, "RANK": f"{rank}"}) for rank, log in enumerate(logs)]
    try:
        yield hosts, logs
    finally:
        for host in hosts:
            host.terminate()
            host.wait(60)


def _start(folder: Path, log: Path, place: Mapping[str, str]) -> ForkedProgram:
    words = ["-m", "ckptd.host", "--reroute", "-m", "tests.client.rerouting.rerouted_job"]
    return ForkedProgram(words, cwd=folder, env=Hosting(folder).environment(**place), log=log)


# -- what is refused -------------------------------------------------------------------------------------


def _training(state: Mapping[str, Stateful] | None = None) -> ReroutedTraining:
    module, rows = stage_of(0), torch.zeros(3, 8)
    optimizer, _ = optimizer_of(module)
    examples = rows, rows.clone().requires_grad_()
    grid = PipelineGrid(2, (StageCosts(1, 1, 1),) * 2, MICRO_BATCHES)
    return ReroutedTraining(module, optimizer, grid, examples=examples, loss_fn=loss_of, state=state)


def test_a_process_without_such_a_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LINE_VARIABLE, raising=False)
    inherited_line.cache_clear()
    with pytest.raises(ValueError, match=r"start it with python -m ckptd\.host --reroute"):
        _training()
    inherited_line.cache_clear()


@pytest.fixture
def hosted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As started by a host, as rank 0 of 4."""
    host = HostEnd.make()
    inherited_line.cache_clear()
    place = {LINE_VARIABLE: f"{host.descriptor}", EPOCH_VARIABLE: "0:", "RANK": "0", "WORLD_SIZE": "4"}
    for name, text in place.items():
        monkeypatch.setenv(name, text)
    line = inherited_line()
    assert line is not None
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    inherited_line.cache_clear()
    line._socket.close()
    host.close()


def test_another_number_of_ranks_is_refused(hosted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(ValueError, match="2 pipelines of 2 stages are not 6 ranks"):
        _training()


def test_snapshots_are_asked_for_once_and_before_the_loop(hosted: None) -> None:
    training = _training()
    training.protect(daemon=None)
    assert training.done == 0
    with pytest.raises(ValueError, match="pass snapshots=SnapshotOptions"):
        training.protect("r", snapshots=SnapshotOptions())
    training.protect("r")
    assert (training.done, training.checkpointer) == (-1, None)
    with pytest.raises(ValueError, match=r"protect\(\) comes once, before iterations\(\)"):
        training.protect("r")


def test_a_state_that_cannot_be_captured_is_refused(hosted: None) -> None:
    training = _training({"odd": Odd()})
    with pytest.raises(ValueError, match=r"state\['odd'\]"):
        training.protect("r")


class Odd:
    def state_dict(self) -> dict[str, object]:
        return {"thread": object()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise NotImplementedError
