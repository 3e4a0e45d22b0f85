"""Hosts (`ckptd.host`) on two nodes under torchrun: what they bring back, and what they leave to torchrun."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ckptd.host.hosting import gone, trainers_of
from tests.cluster.daemons import provision_keys
from tests.cluster.hosts import Cluster, Host
from tests.cluster.network import why_no_namespaces
from tests.cluster.torchrun import SETTINGS, TorchrunJob
from tests.cluster.training import ClusterTraining, undisturbed
from tests.long import long

NUM_RANKS = 2
TOTAL = 160

pytestmark = pytest.mark.slow


class HostedRun(ClusterTraining):
    """One rank on each node, hosted."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        super().__init__(
            cluster,
            folder,
            num_ranks=NUM_RANKS,
            total=TOTAL,
            settings={"replicas": "1", "memory": "64MiB", "peer_deadline_s": "1"},
            soon_s=150.0,
            launch=["ckptd.host", "-m"],
        )
        provision_keys(self.daemons.values())

    def log(self, node: Host) -> str:
        return (self.folder / f"{node.name}.log").read_text(errors="replace")

    def hosts(self, node: Host) -> list[int]:
        return [pid for pid in node.pids() if _name(pid) == "ckptd-host"]

    def trainer(self, node: Host) -> int:
        (host,) = self.hosts(node)
        (pid,) = trainers_of(host)
        return pid

    def node_of(self, rank: int) -> Host:
        """By its last life."""
        name = self.events(rank, "meeting")[-1]["host"]
        return next(node for node in self.cluster.hosts if node.name == name)

    def train_together(self, step: int, starts: int = 1) -> None:
        """Wait until the job has done an iteration, and its hosts have found each other, as often as this."""
        self.reach(step)
        self.until(
            lambda: sum(self.log(node).count("hosts have joined") for node in self.cluster.hosts) == starts,
            "hosts that have joined",
        )

    def begin_epoch(self, epoch: int) -> None:
        """Wait until it begins on each node."""
        self.until(
            lambda: all(f": epoch {epoch} begins" in self.log(node) for node in self.cluster.hosts),
            f"epoch {epoch}",
        )

    def until(self, condition: Callable[[], bool], what: str) -> None:
        self.job.until(condition, what, timeout_s=self.soon_s)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return undisturbed(tmp_path_factory.mktemp("undisturbed"), num_ranks=NUM_RANKS, total=TOTAL)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[HostedRun]:
    with Cluster(NUM_RANKS) as cluster, HostedRun(cluster, tmp_path) as made:
        yield made


def test_killed_ranks_of_both_nodes_come_back_exactly(run: HostedRun, reference: Path) -> None:
    """And torchrun notices nothing: its agents have started one host each."""
    run.train_together(12)
    hosts = {node.name: run.hosts(node) for node in run.cluster.hosts}
    for epoch, rank in enumerate((1, 0), start=1):
        newest = run.newest_step
        os.kill(run.trainer(run.node_of(rank)), signal.SIGKILL)
        run.begin_epoch(epoch)
        run.reach(newest + 6)
    run.check_end(reference)
    for node in run.cluster.hosts:
        assert re.findall(r": epoch (\d) begins", run.log(node)) == [*"12"], run.job.logs()
        assert len(hosts[node.name]) == 1
    assert len(run.events(0, "meeting")) == 3


@pytest.mark.parametrize("rank", [pytest.param(0, marks=long), 1])
def test_a_killed_host_ends_all_and_torchrun_starts_them_again(
    run: HostedRun, reference: Path, rank: int
) -> None:
    run.train_together(12)
    lost, other = run.node_of(rank), run.node_of(1 - rank)
    (survivor,), trainer = run.hosts(other), run.trainer(other)
    (victim,) = run.hosts(lost)
    os.kill(victim, signal.SIGKILL)
    run.until(lambda: gone(survivor) and gone(trainer), "the end of the other host and its trainer")
    assert f"the host of rank {rank} is lost" in run.log(other), run.job.logs()
    newest = run.newest_step
    run.train_together(newest + 6, starts=2)
    os.kill(run.trainer(run.node_of(1)), signal.SIGKILL)
    run.begin_epoch(1)
    run.check_end(reference)


@long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_falls_silent_is_known_within_seconds(run: HostedRun, reference: Path, rank: int) -> None:
    """Nothing says that its connections end, and gloo would wait for half an hour."""
    if why := why_no_namespaces():
        pytest.skip(f"nodes cannot be cut off here: {why}")
    run.train_together(12)
    lost, other = run.node_of(rank), run.node_of(1 - rank)
    (survivor,), trainer = run.hosts(other), run.trainer(other)
    lost.destroy(silent=True)
    run.job.lost(lost)
    run.until(lambda: gone(survivor) and gone(trainer), "the end of the other host and its trainer")
    assert f"the host of rank {rank} is lost" in run.log(other), run.job.logs()
    newest = run.newest_step
    run.return_empty(lost)
    run.reach(newest + 6)
    run.check_end(reference)


@long
def test_an_agent_that_is_told_to_end_leaves_nothing_behind(run: HostedRun, reference: Path) -> None:
    run.train_together(12)
    node = run.node_of(1)
    (host,), trainer = run.hosts(node), run.trainer(node)
    agent = int(Path(f"/proc/{host}/stat").read_text().rsplit(")", 1)[1].split()[1])
    run.job.lost(node)
    os.kill(agent, signal.SIGTERM)
    run.until(
        lambda: all(map(gone, (agent, host, trainer))), "the end of the agent, its host and its trainer"
    )
    newest = run.newest_step
    run.job.join(node)
    run.reach(newest + 6)
    run.check_end(reference)


WORLDS = """
import os, sys, time, torch, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert int(total) == dist.get_world_size()
place = "-".join(os.environ[name] for name in ("WORLD_SIZE", "RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"))
(Path(sys.argv[1]) / f"{place}-{os.getpid()}").touch()
while not (Path(sys.argv[1]) / "stop").exists():
    time.sleep(0.05)
"""


def test_an_elastic_job_loses_a_node_and_gains_one(tmp_path: Path) -> None:
    """For the loss torchrun is not needed; for a node that comes it is, and zygotes are taken over."""
    if why := why_no_namespaces():
        pytest.skip(f"nodes cannot be cut off here: {why}")
    script, found = tmp_path / "worlds.py", tmp_path / "found"
    script.write_text(WORLDS)
    found.mkdir()
    with Cluster(3) as cluster:
        job = TorchrunJob(
            cluster,
            ["-m", "--", "ckptd.host", "--min-ranks", "2", str(script), str(found)],
            nnodes="2:3",
            folder=tmp_path,
            env=lambda node: {"CKPTD_RUNTIME_DIR": str(node.runtime_dir)},
            settings={**SETTINGS, "--rdzv-conf": f"{SETTINGS['--rdzv-conf']},last_call_timeout=3"},
        )

        def logs() -> dict[str, str]:
            return {node.name: (tmp_path / f"{node.name}.log").read_text() for node in cluster.hosts}

        def met(ranks: int, since: set[Path]) -> Callable[[], bool]:
            places = {f"{ranks}-{rank}-{rank}-{ranks}" for rank in range(ranks)}
            return lambda: places <= {path.name.rpartition("-")[0] for path in set(found.iterdir()) - since}

        try:
            job.start()
            job.until(met(3, set()), "three ranks", timeout_s=150)
            job.until(lambda: "hosts have joined" in "".join(logs().values()), "hosts", timeout_s=150)
            before = set(found.iterdir())
            coordinator = next(name for name, log in logs().items() if "hosts have joined" in log)
            lost = next(node for node in cluster.hosts if node.name != coordinator)
            left = [node for node in cluster.hosts if node is not lost]
            hosts = [pid for node in left for pid in node.pids() if _name(pid) == "ckptd-host"]
            lost.destroy(silent=True)
            job.lost(lost)
            job.until(met(2, before), "two ranks", timeout_s=150)
            assert not any(map(gone, hosts)), "torchrun has not started anything"
            lost.boot()
            job.join(lost)
            before = set(found.iterdir())
            job.until(met(3, before), "three ranks again", timeout_s=150)
            for node in left:
                assert "2 ranks are left" in logs()[node.name], job.logs()
                assert "the zygote of the last start is used" in logs()[node.name], job.logs()
            (found / "stop").touch()
            job.wait(timeout_s=150)
        finally:
            job.stop()


WAITS = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
(folder / f"{os.environ['RANK']}-{os.getpid()}").touch()
while not (folder / "stop").exists():
    time.sleep(0.05)
"""


def test_a_store_with_the_place_of_an_earlier_start(tmp_path: Path) -> None:
    """By default all rendezvous of torchrun share one store, so the second start finds the key of the first."""
    (tmp_path / "waits.py").write_text(WAITS)
    with Cluster(NUM_RANKS) as cluster:
        job = TorchrunJob(
            cluster,
            ["-m", "--", "ckptd.host", str(tmp_path / "waits.py"), str(tmp_path)],
            nnodes=NUM_RANKS,
            folder=tmp_path,
            env=lambda node: {
                "CKPTD_RUNTIME_DIR": str(node.runtime_dir),
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0",
            },
        )

        def log() -> str:
            return "".join((tmp_path / f"{node.name}.log").read_text() for node in cluster.hosts)

        def hosts() -> list[int]:
            return [pid for node in cluster.hosts for pid in node.pids() if _name(pid) == "ckptd-host"]

        try:
            job.start()
            for start in (1, 2, 3):
                job.until(lambda n=start: log().count("hosts have joined") == n, "hosts", timeout_s=150)  # type: ignore[misc]
                old = hosts()
                if start < 3:
                    os.kill(old[start % 2], signal.SIGKILL)
                    job.until(lambda pids=old: all(map(gone, pids)), "the end of all hosts", timeout_s=150)  # type: ignore[misc]
            os.kill(int(max(tmp_path.glob("1-*"), key=os.path.getmtime).name[2:]), signal.SIGKILL)
            job.until(lambda: log().count("epoch 1 begins") == NUM_RANKS, "epoch 1", timeout_s=150)
            (tmp_path / "stop").touch()
            job.wait(timeout_s=150)
        finally:
            job.stop()
