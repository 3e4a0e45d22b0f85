"""Snapshots go on while workers are lost, and the job comes back from them: real processes and hosts."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptd.client.options import DaemonOptions, RunOptions, SnapshotOptions
from ckptd.client.rerouting import stage_snapshots
from ckptd.client.rerouting.epoch_group import EpochGroup
from ckptd.client.rerouting.stage_snapshots import StageSnapshots, checked_options
from ckptd.client.rerouting.stage_state import StageState
from ckptd.client.rng_state import capture_rng, restore_rng
from tests.ckptd.host.hosting import Hosting, until
from tests.ckptd.nodes import Net, Node
from tests.client.rerouting.rerouted_job import batch, loss_of, optimizer_of, stage_of
from tests.client.rerouting.snapshot_job import ITERATIONS, Drawn, begin_draws, draw
from tests.client.rerouting.undisturbed import assert_equal, undisturbed
from tests.forked_hosts import ForkedProgram
from tests.long import long
from tests.ports import free_port

NEW_START = 75
DENSE = SnapshotOptions(policy="dense")
TOTAL = 2000


class Job:
    """Four workers: two pipelines of two stages, under hosts; rank r has stage r % 2."""

    def __init__(self, folder: Path, endpoints: Sequence[str], replicas: int = 0) -> None:
        self.folder = folder
        self.hosts: list[ForkedProgram] = []
        self._killed: dict[int, int] = {}
        self._daemons = {f"ENDPOINT{rank}": endpoint for rank, endpoint in enumerate(endpoints)}
        self._daemons["REPLICAS"] = f"{replicas}"

    def start(self) -> None:
        """As a launcher does, also after an end with exit code 75."""
        place = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
        place |= {"MASTER_PORT": f"{free_port()}", "GLOO_SOCKET_IFNAME": "lo", "FOLDER": str(self.folder)}
        self.hosts = [self._host(rank, place) for rank in range(4)]

    def _host(self, rank: int, place: dict[str, str]) -> ForkedProgram:
        words = ["-m", "ckptd.host", "--reroute", "--max-restarts", "9"]
        return ForkedProgram(
            [*words, "-m", "tests.client.rerouting.snapshot_job"],
            cwd=self.folder,
            env=Hosting(self.folder).environment(**place, **self._daemons, RANK=f"{rank}"),
            log=self.log(rank),
        )

    def end(self) -> list[int]:
        """Wait for the end of all hosts; their exit codes."""
        return [host.wait(240) for host in self.hosts]

    def stop(self) -> None:
        for host in self.hosts:
            host.terminate()
        for host in self.hosts:
            host.wait(60)

    def kill(self, rank: int, how: str = "die") -> None:
        """The worker, in the middle of an iteration; `told` has nothing of it then.

        Args:
            how: ``go``: when it is to go on with snapshots.
        """
        killed = self.lives(rank)
        (self.folder / f"{how}{rank}.{killed}").touch()
        self._killed[rank] = killed

    def kill_in_next_restore(self, rank: int) -> int:
        """Returns how often it has lived so far."""
        (self.folder / f"restore{rank}.{self.lives(rank) + 1}").touch()
        return self.lives(rank)

    def lives(self, rank: int) -> int:
        return len((self.folder / f"lives{rank}").read_text())

    def log(self, rank: int) -> Path:
        return self.folder / f"host{rank}.log"

    def told(self, rank: int) -> list[dict[str, Any]]:
        """By its newest life; nothing if that was to be killed."""
        path = self.folder / f"progress{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        each = [json.loads(line) for line in lines]
        alive = [one for one in each if one["life"] > self._killed.get(rank, 0)]
        return [one for one in alive if one["life"] == self.lives(rank)]

    def begun(self) -> int:
        """The first iteration that was made after the newest start, by any worker."""
        return int(min(self.told(rank)[0]["iteration"] for rank in range(4)))

    def captures(self, rank: int) -> bool:
        """Whether its newest life has captured its stage more than once, and still does."""
        told = self.told(rank)
        return bool(told) and told[-1]["stats"].get("snapshots", 0) > 1

    def until_captured(self) -> list[int]:
        """Wait until both stages are captured; by whom, by stage."""
        self.until(lambda: all(map(self._captors, range(2))), "snapshots of both stages")
        return [self._captors(stage)[0] for stage in range(2)]

    def _captors(self, stage: int) -> list[int]:
        return [rank for rank in (stage, stage + 2) if self.captures(rank)]

    def until(self, condition: Any, what: str) -> None:
        until(lambda: condition() or any(host.poll() for host in self.hosts), what)
        assert condition(), [self.log(rank).read_text() for rank in range(4)]


@pytest.fixture
def job(tmp_path: Path, endpoint: str) -> Iterator[Job]:
    made = Job(tmp_path, [endpoint] * 4)
    yield made
    made.stop()


def _assert_undisturbed(job: Job) -> None:
    wanted, losses = undisturbed(ITERATIONS)
    before = capture_rng()
    for stage in range(2):
        drawn = Drawn()
        begin_draws(stage)
        for _ in range(ITERATIONS):
            draw(drawn)
        wanted[stage] |= {"drawn": drawn.state_dict(), "rng": capture_rng()}
    restore_rng(before)
    for rank in range(4):
        found = torch.load(job.folder / f"final{rank}.pt", weights_only=False)
        assert_equal(found, wanted[rank % 2], f"rank {rank}:")
    for rank in range(4):
        path = job.folder / f"losses{rank}"
        for line in path.read_text().splitlines() if path.exists() else []:
            for iteration, pipeline, number, loss in json.loads(line):
                assert losses[iteration][pipeline, number] == loss, (iteration, pipeline, number)


@pytest.mark.slow
def test_a_stage_without_workers_comes_back_from_what_others_have_captured(job: Job) -> None:
    """Whoever captures stage 0 is killed, and whoever captures stage 1 in the start that follows; then the
    others do, also after the return of both. Then nobody has stage 1 any more."""
    job.start()
    first, second = job.until_captured()
    job.kill(second, "go")
    job.kill(first)
    other = 2 - first
    job.until(lambda: job.captures(other) and job.captures(4 - second), "snapshots by the others")
    job.until(lambda: job.told(first) and job.told(second), "the return of both")
    assert job.until_captured() == [other, 4 - second]
    reached = job.told(other)[-1]["iteration"]
    job.kill(1)
    job.kill(3)
    assert job.end() == [NEW_START] * 4, [job.log(rank).read_text() for rank in range(4)]
    (job.folder / "go_on").touch()
    job.start()
    assert job.end() == [0] * 4, [job.log(rank).read_text() for rank in range(4)]
    assert job.begun() >= reached - 5
    _assert_undisturbed(job)


@long
@pytest.mark.slow
def test_the_job_comes_back_after_the_loss_of_the_host_of_rank_0_and_of_a_worker_that_restores(
    job: Job,
) -> None:
    job.start()
    captors = job.until_captured()
    reached = job.told(captors[0])[-1]["iteration"]
    lives = job.kill_in_next_restore(1)
    job.hosts[0].send_signal(signal.SIGKILL)
    assert job.end() == [-signal.SIGKILL, *[NEW_START] * 3]
    job.start()
    job.until(
        lambda: job.lives(1) == lives + 2 and job.told(1), "the return of the one that died in its restore"
    )
    (job.folder / "go_on").touch()
    assert job.end() == [0] * 4, [job.log(rank).read_text() for rank in range(4)]
    assert job.begun() >= reached - 5
    _assert_undisturbed(job)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, pytest.param(0, marks=long)])
def test_snapshots_go_on_when_the_node_is_lost_that_had_those_of_a_stage(
    tmp_path: Path, replicas: int
) -> None:
    """With replicas the run goes on from what they have, without from the live state."""
    with Net(3, memory="128MiB").up() as net:
        nodes = [net[0], net[1], net[0], net[2]]
        job = Job(tmp_path, [node.endpoint for node in nodes], replicas)
        try:
            _lose_a_node(job, nodes)
            began_anew = any("a new history begins" in job.log(rank).read_text() for rank in range(4))
            assert began_anew or replicas
        finally:
            job.stop()


@long
@pytest.mark.slow
def test_snapshots_begin_again_when_the_daemon_is_back(tmp_path: Path) -> None:
    """It was away when the workers began to capture after a loss; nobody is lost, or comes back, after that."""
    with Net(1, memory="128MiB").up() as net:
        (node,) = net.nodes
        job = Job(tmp_path, [node.endpoint] * 4)
        try:
            job.start()
            first, second = job.until_captured()
            (job.folder / "slow").touch()  # the iterations must not end before they are captured again
            node.kill()
            job.kill(first)
            job.until(lambda: "trying again in" in job.log(second).read_text(), "the refusal")
            job.until(lambda: bool(job.told(first)), "the return of the worker")
            node.launch()
            job.until_captured()
            (job.folder / "slow").unlink()
            (job.folder / "go_on").touch()
            assert job.end() == [0] * 4, [job.log(rank).read_text() for rank in range(4)]
        finally:
            job.stop()
        _assert_undisturbed(job)


def _lose_a_node(job: Job, nodes: Sequence[Node]) -> None:
    """That of the worker that captures stage 1, with its host, its daemon, and all that is in its memory."""
    job.start()
    _, lost = job.until_captured()
    node, other = nodes[lost], 4 - lost
    node.lose()
    job.kill(lost)  # its files say so
    job.hosts[lost].send_signal(signal.SIGKILL)
    job.hosts.pop(lost).wait(60)
    job.until(lambda: job.captures(other), "snapshots by the other worker of stage 1")
    reached = job.told(other)[-1]["iteration"]
    job.kill(other)
    assert job.end() == [NEW_START] * 3, [job.log(rank).read_text() for rank in range(4)]
    node.launch()
    (job.folder / "go_on").touch()
    job.start()
    assert job.end() == [0] * 4, [job.log(rank).read_text() for rank in range(4)]
    assert job.begun() >= reached - 5
    _assert_undisturbed(job)


# -- one stage, in this process --------------------------------------------------------------------------


class Worker:
    """One of several that have the only stage."""

    def __init__(self, daemon: DaemonOptions, run: str, seed: int = 0) -> None:
        self.module = stage_of(seed)
        self.optimizer, self.schedule = optimizer_of(self.module)
        options = checked_options(run, daemon, DENSE)
        assert options is not None
        state = {"schedule": self.schedule}
        self.snapshots = StageSnapshots(self.module, self.optimizer, state, options, stage=0, stages=1)
        self.state = StageState(self.module, self.optimizer, state)
        self.tops: dict[int, Any] = {}

    @property
    def captured(self) -> float:
        assert self.snapshots.checkpointer is not None
        return self.snapshots.checkpointer.stats()["snapshots"]

    def train(self, iteration: int) -> None:
        self.snapshots.top(iteration)
        self.tops[iteration] = self.state.copy()
        self.snapshots.forward_begins()
        torch.manual_seed(iteration)
        loss_of(self.module(batch(iteration, 0, 0)), batch(iteration, 0, 1)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()


def test_another_worker_goes_on_with_its_live_state(endpoint: str, request: pytest.FixtureRequest) -> None:
    """A third one restores what both have captured."""
    alone, daemon, run = EpochGroup(0), DaemonOptions(endpoint=endpoint), request.node.name[:60]
    first = Worker(daemon, run)
    assert first.snapshots.restore(alone, [0], TOTAL) == 0
    done = _train_until_captured(first, 0)
    first.snapshots.leave()
    second = Worker(daemon, run, seed=1)
    second.state.restore(first.state.copy())
    second.snapshots.go_on(alone, [0], done, TOTAL)
    assert_equal(second.state.copy(), first.state.copy(), "nothing is loaded:")
    done = _train_until_captured(second, done)
    second.snapshots.leave()
    third = Worker(daemon, run, seed=2)
    assert third.snapshots.restore(alone, [0], TOTAL) == done - 1
    assert_equal(third.state.copy(), second.tops[done - 1], "restored:")
    third.snapshots.leave()


def test_a_worker_that_rolls_back_does_not_capture_again_what_is_there(
    endpoint: str, request: pytest.FixtureRequest
) -> None:
    alone, daemon, run = EpochGroup(0), DaemonOptions(endpoint=endpoint), request.node.name[:60]
    worker = Worker(daemon, run)
    worker.snapshots.restore(alone, [0], TOTAL)
    done = _train_until_captured(worker, 0)
    worker.snapshots.leave()
    worker.state.restore(worker.tops[done - 2])
    worker.snapshots.go_on(alone, [0], done - 2, TOTAL)
    before = dict(worker.tops)
    for iteration in (done - 2, done - 1):
        worker.train(iteration)
        assert worker.captured == 0
        assert_equal(worker.tops[iteration], before[iteration], f"{iteration}:")
    done = _train_until_captured(worker, done)
    worker.snapshots.leave()


def test_training_goes_on_where_snapshots_cannot(
    tmp_path: Path, endpoint: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are tried again, later each time, and begin when the daemon is there."""
    monkeypatch.setattr(stage_snapshots, "_FIRST_PAUSE_S", 0.0)
    alone, place = EpochGroup(0), tmp_path / "daemon"
    worker = Worker(DaemonOptions(endpoint=f"ipc://{place}", timeout_s=0.1), "r")

    def waits() -> bool:
        return worker.snapshots.waits

    assert not waits()
    worker.snapshots.go_on(alone, [0], 3, TOTAL)
    assert worker.snapshots.checkpointer is None
    assert "stage 0 is not captured: " in caplog.text
    assert "trying again in 0 s, or when workers are lost or come back" in caplog.text
    worker.train(3)
    assert waits()
    worker.snapshots.leave()
    assert not waits(), "another worker may capture next"
    place.symlink_to(endpoint.removeprefix("ipc://"))
    worker.snapshots.go_on(alone, [0], 4, TOTAL)
    assert not waits()
    _train_until_captured(worker, 4)
    worker.snapshots.leave()


def _train_until_captured(worker: Worker, begin: int) -> int:
    """The number of iterations that are done then."""
    for iteration in range(begin, TOTAL):
        worker.train(iteration)
        if worker.captured > 2:
            return iteration + 1
        time.sleep(0.01)  # slots are made beside training
    raise AssertionError("no snapshots")


# -- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"snapshots": SnapshotOptions()}, "pass snapshots=SnapshotOptions"),
        (
            {"snapshots": SnapshotOptions(policy="dense", every="checkfreq")},
            "every='checkfreq'.*N a number of iterations",
        ),
        ({"snapshots": SnapshotOptions(policy="partial")}, "are dense"),
        (
            {"snapshots": SnapshotOptions(policy="dense", to_peers="gradients")},
            "pass to_peers='state'",
        ),
        ({"run": RunOptions(rank=1, world_size=4)}, "the ranks of the run are the stages"),
        ({"daemon": "nowhere"}, "daemon='nowhere'"),
    ],
)
def test_what_cannot_be_combined_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        checked_options(**({"run": None, "daemon": "auto", "snapshots": DENSE} | arguments))


def test_without_a_daemon_there_are_no_snapshots() -> None:
    assert checked_options(None, None, DENSE) is None
    assert checked_options(None, DaemonOptions(endpoint=None), SnapshotOptions()) is None
    found = checked_options("r", "auto", DENSE)
    assert found is not None
    assert found.run.name == "r"
