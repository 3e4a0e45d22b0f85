"""`ckptctl peers`, `whatif` and `drill` against real daemons of three nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptd.client.elastic.job.placement_report import PlacementTeller, Placing
from ckptd.core.elastic.elastic_types import Cluster, ExpertPlacement
from ckptd.ctl.main import main
from ckptd.ctl.peers_command import ask_whereabouts
from ckptd.transport.wire import ControlClient
from tests.ckptd.export.samples import entries, segment_folder, snapshot
from tests.ckptd.export.shared import Op, client_payload
from tests.ckptd.nodes import Net, Node
from tests.ckptd.peers_harness import Job
from tests.ckptd.running import eventually
from tests.ckptd.snapshots import IMAGE_BYTES

pytestmark = pytest.mark.timeout(90)
WINDOW = 2
LAST = 5


def ctl(node: Node, *args: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ckptd.ctl", *args, "--endpoint", node.endpoint],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr + done.stdout
    return done.stdout if code in (0, 1) else done.stderr


def as_json(node: Node, *args: str, code: int = 0) -> Any:
    return json.loads(ctl(node, *args, "--json", code=code))


@pytest.fixture(scope="module")
def job() -> Iterator[Job]:
    """A rank on each node, n2 alone in its rack; one replica each."""
    racks = {f"n{i}": {"labels": f"rack={'AAB'[i]}"} for i in range(3)}
    with Net(3, of=racks).up() as found:
        job = Job(found, found.nodes, window=WINDOW, replicas=1)
        job.start()
        for iteration in range(LAST + 1):
            job.record(iteration)
            job.await_replicas(iteration, 1)
        eventually(
            lambda: all(r["floor"] == LAST for r in as_json(found[0], "peers")["ranks"]),
            "the floor is known",
        )
        yield job
        job.end()


@pytest.fixture(scope="module")
def net(job: Job) -> Net:
    return job.net


def test_peers_says_what_is_replicated_where(net: Net) -> None:
    found = as_json(net[0], "peers")
    assert found["node"] == "n0"
    assert {p["node"]: (p["alive"], p["labels"]) for p in found["peers"]} == {
        "n1": (True, {"rack": "A"}),
        "n2": (True, {"rack": "B"}),
    }
    (rank,) = found["ranks"]
    (target,) = rank["targets"]
    assert target["node"] == "n2"  # the other rack
    assert (target["current_up_to"], target["lag_iterations"]) == (LAST, 0)
    text = ctl(net[0], "peers")
    assert "rack=B" in text
    assert "job/run rank 0" in text


def test_whatif_names_sources_replay_and_losses(net: Net) -> None:
    found = as_json(net[0], "whatif", "--lose", "node=n1")
    assert found["recoverable"]
    assert (found["start"], found["end"]) == (LAST - 1, LAST)
    lost = next(r for r in found["ranks"] if r["rank"] == 1)
    assert lost["home_lost"]
    assert lost["sources"] == ["n2"]
    assert (lost["replayed"], lost["lost_iterations"]) == (WINDOW - 1, 0)
    assert lost["moved_bytes"] >= WINDOW * IMAGE_BYTES
    assert "recovered from" in ctl(net[0], "whatif", "--lose", "node=n1")


def test_whatif_of_what_cannot_be_survived(net: Net) -> None:
    text = ctl(net[0], "whatif", "--lose", "node=n1,rack=B", code=1)
    assert "NOT RECOVERABLE" in text
    assert "rank 1" in text


def test_whatif_of_an_unknown_place_says_what_there_is(net: Net) -> None:
    assert "rack=Z" in ctl(net[0], "whatif", "--lose", "rack=Z", code=2)


def test_a_drill_brings_a_rank_here_and_leaves_nothing(net: Net) -> None:
    before = {node.name: node.files() for node in net.nodes}
    found = as_json(net[0], "drill", "--rank", "0")
    assert found["recoverable"], found["reason"]
    assert (found["start"], found["end"]) == (LAST - 1, LAST)
    assert found["by_node"].keys() == {"n2"}
    assert found["compared"] == found["bytes"] >= WINDOW * IMAGE_BYTES
    assert "compared with the primary" in ctl(net[0], "drill", "--rank", "0")
    # From another node, where there is no primary to compare with.
    elsewhere = as_json(net[2], "drill", "--rank", "0", "--job", "job", "--run", "run")
    assert elsewhere["recoverable"], elsewhere["reason"]
    assert elsewhere["compared"] == 0
    assert {node.name: node.files() for node in net.nodes} == before
    assert not [p for node in net.nodes for p in node.segment_dir.glob(".drill*")]


def test_a_drill_of_a_rank_that_is_not_there(net: Net) -> None:
    assert "no rank 9" in ctl(net[0], "drill", "--rank", "9", code=1)


def test_several_runs_must_be_told_apart(net: Net) -> None:
    assert "known runs: job/run" in ctl(net[0], "drill", "--rank", "0", "--job", "other", code=4)


@pytest.mark.parametrize(
    "words",
    [
        ("snapshots", "--job", "jobs"),
        ("iterations", "--job", "jobs"),
        ("iterations", "--job", "jobs", "--run", "run"),
        ("admit", "jobs", "run", "n2"),
        ("whatif", "--job", "jobs", "--lose", "node=n1"),
        ("park", "jobs"),
        ("forget", "jobs", "run", "--yes"),
        ("unquarantine", "jobs", "run"),
    ],
)
def test_a_job_that_is_not_known_is_an_error_with_the_near_name(net: Net, words: tuple[str, ...]) -> None:
    error = ctl(net[0], *words, code=4)
    assert "this node knows no job jobs" in error
    assert "did you mean job?; known runs: job/run" in error
    assert (
        ctl(net[0], "snapshots", "--job", "job", "--run", "runs", code=4).count("did you mean job/run?") == 1
    )


def test_an_export_that_lacks_a_ranks_share_says_where_that_is(net: Net, tmp_path: Path) -> None:
    """A snapshot on n0 of which rank 1, on n1 with a replica on n2, captured a share."""
    with segment_folder() as folder:
        told = client_payload([Op("w", None, 1)])
        made = snapshot(folder, LAST, entries(n=torch.zeros(1)), 7, client=told).path
        there = made.rename(net[0].segment_dir / made.name)
    try:
        wanted = ("export", "--to", str(tmp_path / "m"), "--job", "job", "--run", "run")
        text = ctl(net[0], *wanted, "--rank", "7", code=4)
        assert "rank 1 captured w for all ranks" in text
        assert "those of rank 1 may be on n1 or n2" in text
    finally:
        there.unlink()


def test_where_a_rank_trains_is_told_where_nobody_has_its_snapshot(net: Net) -> None:
    with ControlClient(net[0].endpoint, timeout_s=20) as client:
        assert ask_whereabouts(client, "job", "run", LAST + 9) == {r: (f"n{r}",) for r in range(3)}
        found = ask_whereabouts(client, "job", "run", LAST)
        assert {rank: set(nodes) for rank, nodes in found.items()}[0] == {"n0", "n2"}
        assert ask_whereabouts(client, "job", "other", LAST) == {}


def test_elastic_whatif_knows_which_experts_come_from_replicated_snapshots(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    """Expert 0 is on n1 alone; its rank's snapshots are on n2, too, until that is lost as well."""

    def ask(*args: str, code: int = 0) -> Any:
        found = main(["elastic", *args, "--json", "--endpoint", job.net[0].endpoint])
        captured = capsys.readouterr()
        assert found == code, captured.err
        return json.loads(captured.out)

    cluster = Cluster.uniform(3, 2)
    held = ExpertPlacement(np.array([[[0, 2], [1, 0], [0, 1]]]))
    names = tuple(node.name for node in job.homes)
    for trainer in job.trainers:
        teller = PlacementTeller(trainer.memory.session.tell_elastic)
        teller.placed(LAST, Placing(held, cluster, names, [[100, 100]], 2), [[40, 60]])
        assert trainer.memory.session.tell("info", "kind", "read in order", timeout_s=10)
    found = ask("whatif", "--lose", "node=n1")
    assert found["lost_experts"] == [[0, 0]]
    assert found["recoverable"]
    (lost,) = (rank for rank in found["snapshots"]["ranks"] if rank["home_lost"])
    assert lost["sources"] == ["n2"]
    fetches = found["planned"]["move"]["fetches"]
    assert [(one["receiver"], one["source"], one["bytes"]) for one in fetches] == [
        ("n0", "", 100),
        ("n2", "", 100),
    ]
    gone = ask("whatif", "--lose", "node=n1,node=n2", code=1)
    assert gone["recoverable"] is False
    kept = ask("whatif", "--lose", "node=n0")
    assert (kept["recoverable"], kept["lost_experts"]) == (True, [])
