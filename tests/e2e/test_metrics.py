"""Two daemons, replication, a store, and a trainer that is killed: what Prometheus reads is what `ckptctl` shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptd.core.recovery.recovery_phases import RecoveryPhase, phases_in_metrics
from tests.ckptd.nodes import PORT, Net, Node
from tests.ckptd.running import eventually
from tests.ckptd.scraped import Page, metrics_address, promtool, scrape
from tests.e2e.harness import Jobs

TOTAL, KILL_AT = 90, 30  # the second life is long enough for several reports

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    store = tmp_path_factory.mktemp("store")
    often = {"store": f"file://{store}", "persist_every": "4", "persist_every_s": "0"}
    sockets = tmp_path_factory.mktemp("sockets")
    of = {"n0": {"metrics": "127.0.0.1:0", **often}, "n1": {"metrics": f"unix:{sockets}/m"}}
    nodes = Net(2, replicas="1", of=of)
    for one, other in ((nodes[0], nodes[1]), (nodes[1], nodes[0])):
        one.settings["CKPTD_PEERS"] = f"{other.name}=tcp://{other.address}:{PORT}"
    with nodes.up() as running:
        yield running


def shown(node: Node, command: str) -> Any:
    return json.loads(node.ctl(command, "--json").stdout)


def settled(node: Node) -> Callable[[], bool]:
    """Whether all tiers have what the trainer has captured, which waits in its last step."""

    def ask() -> bool:
        status, peers = shown(node, "status"), shown(node, "peers")
        if not any(segment["newest_iteration"] == TOTAL - 2 for segment in status["segments"]):
            return False
        lags = [t["lag_iterations"] for rank in peers["ranks"] for t in rank["targets"]]
        return lags == [0] and all(rank["under_way"] < 0 for rank in status["durable"]["ranks"])

    return ask


@pytest.fixture(scope="module")
def found(net: Net, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, dict[str, Any]]]:
    """A page of n0 after a recovery, and what `ckptctl` showed at that time."""
    folder = tmp_path_factory.mktemp("jobs")
    jobs, node, hold = Jobs(folder, net[0].endpoint), net[0], folder / "hold"
    hold.touch()
    options = ("--total", str(TOTAL), "--run", "run", "--step-ms", "40")
    jobs.run("plain", *options, "--kill-at", str(KILL_AT), expect_killed=True)
    stats = folder / "stats"
    process, out = jobs.start("plain", *options, "--hold", str(hold), "--stats", str(stats))
    try:
        eventually(settled(node), "every tier has caught up")
        page, told = observed(node)
        eventually(lambda: heard(told, stats), "the trainer knows what the daemon does")
        yield page, {**told, "trainer": json.loads(stats.read_text())}
    finally:
        hold.unlink()
        jobs.end(process, out)


def observed(node: Node) -> tuple[Page, dict[str, Any]]:
    """A page, and what `ckptctl` shows before and after."""
    while True:  # what it shows may change between two questions
        before = {name: shown(node, name) for name in ("status", "peers", "snapshots")}
        page = scrape(metrics_address(node.endpoint))
        after = {name: shown(node, name) for name in ("status", "peers", "snapshots")}
        if all(still(before[name]) == still(after[name]) for name in before):
            return page, after


def still(told: Any) -> Any:
    """Without what changes by itself as time passes."""
    if isinstance(told, list):
        return [still(each) for each in told]
    if not isinstance(told, dict):
        return told
    moving = ("uptime_s", "attached_s", "silent_s", "seq", "time_ns", "metrics", "free_bytes", "counters")
    return {key: still(value) for key, value in told.items() if key not in moving and "rss" not in key}


def test_each_tier_is_as_far_behind_as_ckptctl_says(found: tuple[Page, dict[str, Any]]) -> None:
    page, told = found
    (rank,), (session,) = told["snapshots"]["ranks"], told["status"]["sessions"]
    labels = {"job_name": rank["job"], "run": "run", "rank": "0"}
    reached = max(session["step"], *(slot["iteration"] for slot in rank["slots"]))
    (replication,), (durable,) = told["peers"]["ranks"], told["status"]["durable"]["ranks"]
    assert page.by_labels("ckptd_rpo_iterations", **labels) == {
        ("memory",): reached - rank["suffix"][1],
        ("peers",): reached - replication["targets"][0]["current_up_to"],
        ("storage",): reached - durable["committed"],
    }
    assert set(page.by_labels("ckptd_suffix_complete", **labels).values()) == {1.0}
    (seconds,) = page.by_labels("ckptd_iteration_seconds").values()
    assert seconds >= 0.04
    for tier, lost in page.by_labels("ckptd_rpo_iterations", **labels).items():
        assert page.by_labels("ckptd_rpo_seconds", **labels)[tier] == pytest.approx(lost * seconds)
    assert list(page.by_labels("ckptd_persist_lag_iterations").values()) == [durable["lag_iterations"]]
    lags = page.by_labels("ckptd_replication_lag_iterations", **labels)
    assert lags == {("snapshots", "n1"): replication["targets"][0]["lag_iterations"]}


def heard(told: dict[str, Any], stats: Path) -> bool:
    """Whether the trainer knows what other nodes and the store have: the daemon's signs of life tell it."""
    (replication,), (durable,) = told["peers"]["ranks"], told["status"]["durable"]["ranks"]
    logged = json.loads(stats.read_text())
    reached = (logged["ckptd/replica_step"], logged["ckptd/durable_step"])
    return reached == (replication["targets"][0]["current_up_to"], durable["committed"])


def test_the_trainer_logs_the_same(found: tuple[Page, dict[str, Any]]) -> None:
    logged, step = found[1]["trainer"], TOTAL - 1
    for tier in ("replica", "durable", "snapshot"):
        assert logged[f"ckptd/{tier}_lag"] == step - logged[f"ckptd/{tier}_step"]
    assert logged["ckptd/recovery_s"] == pytest.approx(sum(phases_in_metrics(logged).values()))
    assert logged["ckptd/replayed_steps"] > 0


def test_memory_and_sessions_are_those_of_ckptctl(found: tuple[Page, dict[str, Any]]) -> None:
    page, told = found
    status = told["status"]
    assert page["ckptd_sessions"] == len(status["sessions"]) == 1
    assert page["ckptd_memory_quota_bytes"] == status["quota_bytes"]
    assert page["ckptd_memory_promised_bytes"] == status["promised_bytes"]
    sizes = page.by_labels("ckptd_memory_bytes")
    assert sum(sizes.values()) == status["used_bytes"]
    assert sizes["snapshots",] == sum(
        s["total_bytes"] for s in status["segments"] if s["kind"] == "snapshots"
    )
    counters = status["counters"]
    assert page["ckptd_trainers_lost_total"] == counters["event.trainer_gone"] == 1
    puts = page.by_labels("ckptd_put_bytes_total")
    assert puts == {("peers",): counters["replicated_bytes"], ("storage",): counters["persisted_bytes"]}
    assert all(size > 0 for size in puts.values())
    assert page.by_labels("ckptd_put_seconds_total")["peers",] > 0


def test_the_trainer_s_stalls_are_a_histogram(found: tuple[Page, dict[str, Any]]) -> None:
    page, told = found
    (session,) = told["status"]["sessions"]
    (count,) = page.by_labels("ckptd_stall_seconds_count").values()
    (total,) = page.by_labels("ckptd_stall_seconds_sum").values()
    assert count == session["metrics"]["steps"] > 0
    assert total == pytest.approx(session["metrics"]["stall_ms_sum"] / 1e3)
    (captured,) = page.by_labels("ckptd_captured_bytes_total").values()
    (snapshots,) = page.by_labels("ckptd_snapshots_total").values()
    assert captured == session["metrics"]["captured_bytes"]
    assert captured > (snapshots - 1) * session["metrics"]["snapshot_bytes"] / 2, "of all, not of the newest"


def test_a_recovery_counts_in_each_of_its_phases(found: tuple[Page, dict[str, Any]]) -> None:
    page, told = found
    phases = phases_in_metrics(told["status"]["sessions"][0]["metrics"])
    assert RecoveryPhase.LOADED in phases
    assert page["ckptd_recovery_seconds_count"] == 1
    assert page["ckptd_recovery_seconds_sum"] == pytest.approx(sum(phases.values()))
    counts = page.by_labels("ckptd_recovery_phase_seconds_count")
    assert {phase for (phase,), n in counts.items() if n == 1} == {str(phase) for phase in phases}
    sums = page.by_labels("ckptd_recovery_phase_seconds_sum")
    assert sums["loaded",] == pytest.approx(phases[RecoveryPhase.LOADED])


def test_the_other_node_shows_what_it_hosts(net: Net, found: tuple[Page, dict[str, Any]]) -> None:
    page = scrape(metrics_address(net[1].endpoint))
    replicas = shown(net[1], "peers")["replicas"]
    assert page.by_labels("ckptd_memory_bytes")["replicas",] == sum(r["total_bytes"] for r in replicas) > 0
    assert found[0].by_labels("ckptd_peer_up") == {("n1",): 1}
    assert page["ckptd_sessions"] == 0


def test_promtool_reads_the_page(found: tuple[Page, dict[str, Any]]) -> None:
    done = promtool("check", "metrics", given=found[0].text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
