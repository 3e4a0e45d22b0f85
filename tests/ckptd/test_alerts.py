"""The alert rules and the dashboard of `deploy/`: their metrics exist, and each alert is fired by a fault of
real daemons, and by no other fault.

Pages are scraped from a healthy node and after a fault. `promtool` is given both as an hour each: gauges
stay, counters go on as they did between two scrapes. So no test waits for the minutes of a rule.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from prometheus_client.samples import Sample

from ckptd.client.stats import Stats
from ckptd.core.slots.segment_format import encode_descriptor
from ckptd.memory.segment_file import open_segment
from ckptd.node.metrics import METRICS
from ckptd.transport import messages as m
from ckptd.transport.wire import RefusedError
from tests.ckptd.nodes import Net
from tests.ckptd.peers_harness import Job
from tests.ckptd.replicated_ranks import PARAMS, ReplicatedRanks
from tests.ckptd.running import MIB, attach, descriptor, eventually, fill, reserve
from tests.ckptd.scraped import Page, metrics_address, promtool, scrape
from tests.ckptd.snapshots import flip

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = DEPLOY / "alerts.yml"
ALERTS = re.findall(r"alert: (\w+)", RULES.read_text())
PHASE_MIN = 60
LAST = 5  # iteration that every tier has
HEALTHY_S = 0.0002  # what a snapshot costs an iteration


class World:
    """A job of one rank on each node, replicated and durable; the metrics are those of the first node.

    Attributes:
        step, stall_s: what trainers report, of each iteration.
    """

    def __init__(self, net: Net) -> None:
        self.net, self.node = net, net[0]
        self.job = Job(net, net.nodes, replicas=1)
        self.stats = [Stats() for _ in net.nodes]
        self.step, self.stall_s = 0, HEALTHY_S
        self._address = metrics_address(self.node.endpoint)

    def begin(self) -> None:
        self.job.start()
        for self.step in range(LAST + 1):
            self.job.record(self.step)
            self.job.await_replicas(self.step, 1)
        self.report()
        self.until(lambda p: complete(p) == {"memory", "peers", "storage"}, "all tiers are complete")

    def report(self) -> None:
        """What all trainers report about an iteration."""
        for trainer, stats in zip(self.job.trainers, self.stats, strict=True):
            stats.note_stall(self.stall_s, 0.0)
            trainer.memory.session.report(self.step, stats.as_dict())

    @property
    def page(self) -> Page:
        return scrape(self._address)

    def until(self, holds: Callable[[Page], bool], what: str) -> None:
        """Scrape until it shows in the metrics."""
        eventually(lambda: holds(self.page), what)

    def observe(self) -> Observed:
        """Two pages, with an iteration between them."""
        before, begun_s = self.page, time.monotonic()
        count = self.stats[0].steps + 1
        self.report()
        self.until(
            lambda p: p.by_labels("ckptd_stall_seconds_count", rank="0").get(("job", "run")) == count,
            "reports",
        )
        return Observed(before, self.page, time.monotonic() - begun_s)

    def end(self) -> None:
        for node in self.net.nodes:
            node.unpause()
        self.job.end()


def complete(page: Page) -> set[str]:
    """The tiers of which all ranks of the node have a complete suffix."""
    found = page.by_labels("ckptd_suffix_complete")
    return {tier for *_, tier in found} - {tier for (*_, tier), whole in found.items() if not whole}


@dataclass(frozen=True)
class Observed:
    before: Page
    after: Page
    seconds: float

    def values(self) -> dict[str, tuple[float, float]]:
        """Of each series its value, and how much a counter grows in a minute."""
        first = {_series(sample): sample.value for sample in self.before.samples}
        found = {}
        for sample in self.after.samples:
            series = _series(sample)
            start = first.get(series, sample.value)
            counts = sample.name.endswith(("_total", "_bucket", "_count", "_sum"))
            grown = (sample.value - start) / self.seconds * 60 if counts else 0.0
            found[series] = (start, grown)
        return found


def _series(sample: Sample) -> str:
    told = {**sample.labels, "job": "ckptd", "instance": "n0"}
    return sample.name + "{" + ",".join(f"{label}={json.dumps(text)}" for label, text in told.items()) + "}"


@contextmanager
def world(folder: Path, num_nodes: int, **settings: str) -> Iterator[World]:
    often = {"store": f"file://{folder}/store", "persist_every": "2", "persist_every_s": "0"}
    usual = {"metrics": "127.0.0.1:0", "memory": "32MiB", **often}
    with Net(num_nodes, **(usual | settings)).up() as net:  # type: ignore[arg-type]
        made = World(net)
        made.begin()
        yield made
        made.end()


# -- faults, each until it shows in the metrics ---------------------------------------------------


def snapshots_stop(it: World) -> None:
    """Training goes on without snapshots."""
    it.step = 1_000_000
    it.report()
    it.until(lambda p: max(p.by_labels("ckptd_rpo_iterations").values()) > 1000, "iterations are unprotected")


def rank_has_no_snapshot(it: World) -> None:
    with it.node.client() as client:
        attach(client, run="other")
    it.until(lambda p: "memory" not in complete(p), "the new rank has nothing")


def peer_is_slow(it: World) -> None:
    """A large snapshot occupies the link for seconds; the next one is a hundred iterations on."""
    it.job[0].record(LAST + 1, size=900_000)
    it.step = LAST + 100
    it.job[0].record(it.step)
    it.until(lambda p: max(p.by_labels("ckptd_replication_lag_iterations").values()) > 50, "a lag")


def peer_is_lost(it: World) -> None:
    (target,) = it.page.by_labels("ckptd_replication_lag_bytes", rank="0")
    name = target[2]
    next(node for node in it.net.nodes if node.name == name).pause()
    it.until(lambda p: p.by_labels("ckptd_peer_up")[name,] == 0, "it is known to be away")
    it.until(lambda p: "peers" in complete(p), "another node has its replica")


def keeper_dies(it: World) -> None:
    with it.node.client() as client:
        durable = client.ask(m.GetStatus(), m.Status).durable
    assert durable is not None
    os.kill(durable.keeper_pid, signal.SIGKILL)
    it.until(lambda p: sum(p.by_labels("ckptd_persist_failures_total").values()) > 0, "its death is counted")


def replica_is_damaged(it: World) -> None:
    assert flip(it.net[1].replicas(0), [LAST]) == 1
    it.node.ctl("drill", "--rank", "0", check=False)
    it.until(lambda p: sum(p.by_labels("ckptd_digest_failures_total").values()) > 0, "the drill finds it")


def ranks_become_unlike(it: World) -> None:
    with ReplicatedRanks(it.node) as ranks:
        for iteration in range(4):
            ranks.record(iteration)
        ranks.record(4, unlike=[(1, PARAMS[0])])
        it.until(
            lambda p: p.by_labels("ckptd_replica_comparisons_total")["differ",] > 0, "the comparison finds it"
        )
        it.until(lambda p: complete(p) == {"memory", "peers", "storage"}, "all tiers are complete")


def memory_is_used_up(it: World) -> None:
    with it.node.client() as client:
        attach(client, run="large", needed_bytes=MIB)
        free = 32 * MIB - int(sum(it.page.by_labels("ckptd_memory_bytes").values()))
        segment = reserve(client, run="large", slots=free // MIB - 3)
        fill(segment, 0, 1)
        client.send(m.Filled(0, 0, 1))
        it.until(
            lambda p: "memory" in complete(p) and len(p.by_labels("ckptd_iteration")) == 2, "it is sealed"
        )
        segment.close()


def snapshots_hold_up_training(it: World) -> None:
    it.stall_s = 2.0


def job_is_too_large(it: World) -> None:
    with it.node.client() as client, pytest.raises(RefusedError, match="quota"):
        attach(client, run="huge", needed_bytes=1 << 40)
    it.until(lambda p: p.by_labels("ckptd_refusals_total")["quota",] > 0, "the refusal is counted")


def updates_are_lost(it: World) -> None:
    with it.node.client() as client:
        attach(client, run="lossy", needed_bytes=MIB)
        told = msgspec.msgpack.encode({"operators": [], "policy": "partial"})
        lossy = descriptor(run="lossy", client=told)
        reply = client.ask(m.Reserve(MIB, 4, encode_descriptor(lossy)), m.Reserved)
        segment = open_segment(Path(reply.segment.path))
        fill(segment, 0, 1)
        client.send(m.Filled(0, 0, 1))
        client.send(m.Report(1, {"lost_tokens_share": 0.05}))
        it.until(lambda p: bool(p.by_labels("ckptd_lost_tokens_ratio")), "the share is known")
        it.until(lambda p: "memory" in complete(p), "it is sealed")
        segment.close()


@dataclass(frozen=True)
class Fault:
    happen: Callable[[World], None]
    num_nodes: int = 2
    peer_bandwidth: str = "0"


FAULTS = {
    "CkptdRpoHigh": Fault(snapshots_stop),
    "CkptdSuffixIncomplete": Fault(rank_has_no_snapshot),
    "CkptdReplicationLagging": Fault(peer_is_slow, peer_bandwidth="200KB"),
    "CkptdPeerDown": Fault(peer_is_lost, num_nodes=3),
    "CkptdPersistFailing": Fault(keeper_dies),
    "CkptdDigestFailure": Fault(replica_is_damaged),
    "CkptdReplicasDiffer": Fault(ranks_become_unlike),
    "CkptdMemoryNearQuota": Fault(memory_is_used_up),
    "CkptdTrainerStalls": Fault(snapshots_hold_up_training),
    "CkptdTrainersRefused": Fault(job_is_too_large),
    "CkptdLostTokens": Fault(updates_are_lost),
}


def test_each_alert_has_a_fault() -> None:
    assert list(FAULTS) == ALERTS


@pytest.mark.slow
@pytest.mark.parametrize("alert", FAULTS)
def test_a_fault_fires_its_alert_and_no_other(alert: str, tmp_path: Path) -> None:
    promtool("--version")  # skips before daemons are started
    fault = FAULTS[alert]
    with world(tmp_path, fault.num_nodes, peer_bandwidth=fault.peer_bandwidth) as it:
        healthy = it.observe()
        fault.happen(it)
        hurt = it.observe()
    file = tmp_path / "test.json"
    file.write_text(json.dumps(rule_test(healthy, hurt, alert)))
    done = promtool("test", "rules", str(file))
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{hurt.before.text}"


def rule_test(healthy: Observed, hurt: Observed, alert: str) -> dict[str, object]:
    """A test file of promtool: an hour of health, an hour with the fault."""
    first, then = healthy.values(), hurt.values()
    nothing = f"_x{PHASE_MIN}"
    series = [
        {
            "series": name,
            "values": " ".join(
                f"{now[name][0]:.6f}+{now[name][1]:.6f}x{PHASE_MIN - 1}" if name in now else nothing
                for now in (first, then)
            ),
        }
        for name in first | then
    ]
    fired = "group by (alertname) (max_over_time(ALERTS{alertstate='firing'}[59m]))"
    expected = [{"labels": f'{{alertname="{alert}"}}', "value": 1}]
    tests = [
        {"expr": fired, "eval_time": f"{PHASE_MIN - 1}m", "exp_samples": []},
        {"expr": fired, "eval_time": f"{2 * PHASE_MIN - 1}m", "exp_samples": expected},
    ]
    group = {"interval": "1m", "input_series": series, "promql_expr_test": tests}
    return {"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [group]}


# -- what can be checked without a fault ----------------------------------------------------------


def test_promtool_accepts_the_rules_and_their_own_tests() -> None:
    assert promtool("check", "rules", str(RULES)).returncode == 0
    done = promtool("test", "rules", str(DEPLOY / "alerts_test.yml"))
    assert done.returncode == 0, done.stdout + done.stderr


def metrics_in(text: str) -> set[str]:
    """The metrics that are named there; histograms by their name."""
    found = set(re.findall(r"\bckptd_[a-z_]+", text))
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in found}


@pytest.mark.parametrize("file", ["alerts.yml", "alerts_test.yml", "grafana/ckptd.json"])
def test_every_metric_that_is_named_exists(file: str) -> None:
    named = metrics_in((DEPLOY / file).read_text())
    assert len(named) >= 8
    assert named <= METRICS.keys()


def test_prometheus_can_parse_every_query_of_the_dashboard(tmp_path: Path) -> None:
    panels = json.loads((DEPLOY / "grafana/ckptd.json").read_text())["panels"]
    assert len({panel["title"] for panel in panels}) == len(panels) > 8
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    known = {"$__rate_interval": "5m", "$__range": "6h", "$instance": ".*", "$job_name": ".*", "$run": ".*"}
    for variable, value in known.items():
        queries = [query.replace(variable, value) for query in queries]
    file = tmp_path / "rules.json"
    rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(queries)]
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = promtool("check", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [query for query in queries if "$" in query]
