"""Every metric against a node that is made up: its name, its labels, and the value that `ckptctl` would show."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ckptd.client.stats import Stats
from ckptd.core.recovery.recovery_phases import RecoveryHistograms, RecoveryPhase
from ckptd.node.admin import NodeView
from ckptd.node.metrics import METRICS, metric_families
from ckptd.transport import messages as m
from tests.ckptd.scraped import Page, promtool

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
SECOND = 10**9
RANK = ("job", "0", "run")  # the values of the labels, by name
# Each label, with how many values it has at most on a node; those of a run are as many as runs and nodes.
LABELS = {"version", "node", "job_name", "run", "rank", "peer", "tier", "kind", "reason", "socket", "phase"}
LABELS |= {"user", "result"}
UNITS = ("seconds", "bytes", "iterations", "ratio", "bytes_per_second")


def stats_of(**counters: float) -> dict[str, float]:
    stats = Stats(**counters)  # type: ignore[arg-type]
    stats.note_stall(0.0002, 0.0002)
    stats.note_stall(0.002, 0.001)
    stats.note_stall(2.0, 0.0)
    return stats.as_dict()


def session(*, step: int = 20, **counters: float) -> m.SessionStatus:
    return m.SessionStatus(
        "job", "run", 0, 2, 7, step, stats_of(**counters), 1, 8 * MIB, 9 * MIB, 60.0, "pidfd"
    )


def segment(kind: str, mib: int) -> m.SegmentStatus:
    return m.SegmentStatus(
        *(
            "job",
            "run",
            0,
            2,
            0,
            "/path",
            mib * MIB,
            MIB,
            4,
            {"sealed": 4},
            19,
            2,
            3,
            True,
            True,
            0.0,
            "n",
            1,
        ),
        kind=kind,
    )


def slot(iteration: int, at_s: float, state: str = "sealed") -> m.SlotInfo:
    filled_ns = int(at_s * SECOND)
    return m.SlotInfo(0, iteration % 8, state, iteration, -1, 1, MIB, 0, filled_ns, 0, 0, 7, b"\7")


def snapshots(*slots: m.SlotInfo, suffix: tuple[int, int] = (17, 18), policy: str = "") -> m.RankSnapshots:
    return m.RankSnapshots("job", "run", 0, 2, 2, 3, slots, suffix, "", policy=policy)


def durable(**changes: object) -> m.DurableStatus:
    rank = m.DurableRank("job", "run", 0, 12, 7, -1, 0, 0, 4, 1, 2, 100, 3.5, "")
    return m.DurableStatus("file:///s", 99, 100, 0, (msgspec.structs.replace(rank, **changes),))


def target(node: str, up_to: int, *, alive: bool = True, lag: int = 0) -> m.TargetStatus:
    return m.TargetStatus(node, "current", alive, True, 1, up_to, lag, lag * MIB, "")


def status(**changes: object) -> m.Status:
    usual = m.Status(
        *("0.4", "n0", "boot", 1, 5.0, "ipc:///x", "/run", "/seg", 64 * MIB, 32 * MIB, 9 * MIB, 0, 0),
        *(3, 2, 1, 4, (session(),), (), {}),
    )
    return msgspec.structs.replace(usual, **changes)


def peers(*targets: m.TargetStatus, endpoint: str = "tcp://n0:1", kind: str = "snapshots") -> m.Peers:
    ranks = (m.ReplicationStatus("job", "run", 0, 1, 9, targets, kind, 1),) if targets else ()
    known = (
        m.PeerStatus("n1", "tcp://n1:1", {}, True, 0.1, 5 * MIB),
        m.PeerStatus("n2", "", {}, False, 9.0, 0),
    )
    return m.Peers("n0", endpoint, "", known if endpoint else (), ranks, (), {})


VIEW = NodeView(
    status(),
    peers(endpoint=""),
    m.Snapshots((snapshots(slot(17, 100.0), slot(18, 100.5), slot(19, 101.0, "filled")),)),
    RecoveryHistograms(),
)


class Once(Collector):
    def __init__(self, view: NodeView) -> None:
        self._view = view

    def collect(self) -> list[Metric]:
        return list(metric_families(self._view))


def page_of(view: NodeView) -> Page:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Once(view))
    return Page(generate_latest(registry).decode())


def full() -> NodeView:
    """A node on which every metric has a sample."""
    recoveries = RecoveryHistograms()
    recoveries.observe({RecoveryPhase.LOADED: 0.2, RecoveryPhase.REPLAYED: 3.0})
    return NodeView(
        status(
            counters={"local.turned_away.flood": 1},
            durable=durable(),
            sessions=(session(),),
            users=(m.UserStatus(1002, 3 * MIB, 8 * MIB),),
        ),
        peers(target("n1", 18)),
        m.Snapshots((snapshots(slot(17, 1.0), slot(18, 2.0), policy="partial"),)),
        recoveries,
    )


# -- values ---------------------------------------------------------------------------------------


def test_what_a_loss_of_the_trainer_costs_now() -> None:
    page = page_of(VIEW)
    assert page.by_labels("ckptd_iteration") == {RANK: 20}  # reported; the newest slot is of 19
    assert page.by_labels("ckptd_iteration_seconds") == {RANK: 0.5}
    assert page.by_labels("ckptd_suffix_complete") == {(*RANK, "memory"): 1}
    assert page.by_labels("ckptd_rpo_iterations") == {(*RANK, "memory"): 2}
    assert page.by_labels("ckptd_rpo_seconds") == {(*RANK, "memory"): 1.0}


def test_each_tier_that_the_node_has_is_rated_by_itself() -> None:
    targets = (target("n1", 16), target("n2", 19, alive=False), target("n3", -1))
    view = replace(VIEW, status=status(durable=durable()), peers=peers(*targets))
    page = page_of(view)
    assert page.by_labels("ckptd_rpo_iterations", job_name="job", rank="0", run="run") == {
        ("memory",): 2,
        ("peers",): 4,  # n2 has more, and does not answer
        ("storage",): 8,
    }
    assert page.by_labels("ckptd_rpo_seconds", tier="storage") == {RANK: 4.0}


def test_a_tier_that_holds_nothing_is_incomplete_and_has_no_age() -> None:
    view = replace(VIEW, status=status(durable=durable(committed=-1)), peers=peers(target("n1", -1)))
    page = page_of(view)
    assert page.by_labels("ckptd_suffix_complete", job_name="job", rank="0", run="run") == {
        ("memory",): 1,
        ("peers",): 0,
        ("storage",): 0,
    }
    assert set(page.by_labels("ckptd_rpo_iterations")) == {(*RANK, "memory")}


def test_a_rank_without_a_node_for_its_replica_is_incomplete_and_one_that_wants_none_is_not_rated() -> None:
    def page_with(wanted: int) -> Page:
        alone = m.ReplicationStatus("job", "run", 0, 1, 9, (), wanted=wanted)
        return page_of(replace(VIEW, peers=msgspec.structs.replace(peers(), ranks=(alone,))))

    assert page_with(2).by_labels("ckptd_suffix_complete", tier="peers") == {RANK: 0}
    assert page_with(0).by_labels("ckptd_suffix_complete", tier="peers") == {}


def test_a_trainer_that_has_no_snapshot_yet_is_incomplete() -> None:
    page = page_of(replace(VIEW, snapshots=m.Snapshots(())))
    assert page.by_labels("ckptd_suffix_complete") == {(*RANK, "memory"): 0}
    assert page.by_labels("ckptd_iteration") == {}


def test_a_rank_whose_trainer_is_gone_is_rated_by_its_snapshots() -> None:
    page = page_of(replace(VIEW, status=status(sessions=())))
    assert page.by_labels("ckptd_iteration") == {RANK: 19}
    assert page.by_labels("ckptd_rpo_iterations") == {(*RANK, "memory"): 1}
    assert page["ckptd_sessions"] == 0


def test_a_pause_between_two_snapshots_does_not_make_iterations_longer() -> None:
    slots = [slot(i, i * 0.5 + (3600 if i > 5 else 0)) for i in range(10)]
    page = page_of(replace(VIEW, snapshots=m.Snapshots((snapshots(*slots, suffix=(8, 9)),))))
    assert page.by_labels("ckptd_iteration_seconds") == {RANK: 0.5}


def test_one_snapshot_has_an_age_in_iterations_only() -> None:
    page = page_of(replace(VIEW, snapshots=m.Snapshots((snapshots(slot(18, 1.0), suffix=(18, 18)),))))
    assert page.by_labels("ckptd_rpo_iterations") == {(*RANK, "memory"): 2}
    assert page.by_labels("ckptd_rpo_seconds") == {}


def test_stalls_are_a_histogram_of_the_trainer_s() -> None:
    page = page_of(VIEW)
    buckets = {le: n for (_, le, *_), n in page.by_labels("ckptd_stall_seconds_bucket").items()}
    assert buckets["0.00025"] == 0
    assert buckets["0.0005"] == 1
    assert buckets["0.0025"] == 1
    assert (buckets["0.005"], buckets["1.0"], buckets["+Inf"]) == (2, 2, 3)
    assert page.by_labels("ckptd_stall_seconds_sum")[RANK] == pytest.approx(2.0034)


def test_a_trainer_of_another_version_without_buckets_has_no_histogram() -> None:
    old = msgspec.structs.replace(session(), metrics={"snapshots": 3.0})
    page = page_of(replace(VIEW, status=status(sessions=(old,))))
    assert page.by_labels("ckptd_stall_seconds_bucket") == {}
    assert page.by_labels("ckptd_snapshots_total") == {RANK: 3}


def test_captures_and_missing_snapshots() -> None:
    captured = session(
        snapshots=9, snapshot_bytes=10, captured_bytes=90, capture_gb_per_s=1.5, torn=2, no_slot=1
    )
    page = page_of(replace(VIEW, status=status(sessions=(captured,))))
    assert page.by_labels("ckptd_snapshots_total") == {RANK: 9}
    assert page.by_labels("ckptd_captured_bytes_total") == {RANK: 90}
    assert page.by_labels("ckptd_capture_bytes_per_second") == {RANK: 1.5e9}
    missing = page.by_labels("ckptd_snapshots_missing_total", job_name="job", run="run", rank="0")
    assert missing == {("failed",): 0, ("torn",): 2, ("no_slot",): 1, ("undecided",): 0}


def test_only_a_policy_that_loses_updates_has_a_share_of_lost_tokens() -> None:
    lossy = m.Snapshots((snapshots(slot(18, 1.0), policy="partial"),))
    found = status(sessions=(session(lost_tokens_share=0.25),))
    assert page_of(replace(VIEW, status=found)).by_labels("ckptd_lost_tokens_ratio") == {}
    page = page_of(replace(VIEW, status=found, snapshots=lossy))
    assert page.by_labels("ckptd_lost_tokens_ratio") == {RANK: 0.25}


def test_replication_lags_per_peer_and_peers_that_are_away() -> None:
    page = page_of(replace(VIEW, peers=peers(target("n1", 16, lag=3), target("n2", 5, alive=False, lag=14))))
    lags = page.by_labels("ckptd_replication_lag_iterations", job_name="job", rank="0", run="run")
    assert lags == {("snapshots", "n1"): 3, ("snapshots", "n2"): 14}
    assert page.by_labels("ckptd_replication_lag_bytes", peer="n1") == {
        ("job", "snapshots", "0", "run"): 3 * MIB
    }
    assert page.by_labels("ckptd_peer_up") == {("n1",): 1, ("n2",): 0}
    assert page.by_labels("ckptd_peer_free_bytes") == {("n1",): 5 * MIB, ("n2",): 0}


def test_a_lagging_boundary_log_does_not_count_as_snapshots() -> None:
    page = page_of(replace(VIEW, peers=peers(target("n1", 16, lag=3), kind="log")))
    assert page.by_labels("ckptd_replication_lag_iterations") == {("job", "log", "n1", "0", "run"): 3}
    assert page.by_labels("ckptd_suffix_complete", tier="peers") == {}


def test_persistence_lags_and_fails_by_reason() -> None:
    counters = {"event.persist_abandoned": 2, "event.store_keeper_died": 1, "persisted_bytes": 7}
    page = page_of(replace(VIEW, status=status(durable=durable(), counters=counters)))
    assert page.by_labels("ckptd_persist_lag_iterations") == {RANK: 7}
    assert page.by_labels("ckptd_persist_duration_seconds") == {RANK: 3.5}
    assert page["ckptd_store_keeper_up"] == 1
    failures = page.by_labels("ckptd_persist_failures_total")
    assert {reason: n for (reason,), n in failures.items() if n} == {"abandoned": 2, "keeper_died": 1}
    assert page.by_labels("ckptd_put_bytes_total") == {("peers",): 0, ("storage",): 7}


def test_digest_failures_by_tier() -> None:
    counters = {
        "seal.damaged": 1,
        "scrub.damaged": 2,
        "event.replica_forged": 4,
        "fabric.forged": 64,
        "event.fetch_damaged": 8,
        "event.store_damaged": 16,
        "event.checkpoint_damaged": 32,
    }
    found = page_of(replace(VIEW, status=status(counters=counters))).by_labels("ckptd_digest_failures_total")
    assert found == {("memory",): 3, ("replica",): 4, ("network",): 64, ("fetch",): 8, ("storage",): 48}


def test_comparisons_of_replicas_by_result() -> None:
    counters = {"replicas.equal": 7, "event.replicas_differ": 2, "event.replicas_diverged": 1}
    found = page_of(replace(VIEW, status=status(counters=counters))).by_labels(
        "ckptd_replica_comparisons_total"
    )
    assert found == {("equal",): 7, ("differ",): 2, ("diverged",): 1}


def test_audits_by_result() -> None:
    counters = {"event.step_audited": 5, "event.audit_failed": 1}
    found = page_of(replace(VIEW, status=status(counters=counters))).by_labels("ckptd_step_audits_total")
    assert found == {("passed",): 5, ("failed",): 1, ("unclear",): 0}


def test_seals_and_puts_add_up_in_base_units() -> None:
    counters = {
        "sealed_bytes": 5,
        "digest_ns": 1_500_000_000,
        "replicated_bytes": 6,
        "replicated_ns": 250_000_000,
    }
    page = page_of(replace(VIEW, status=status(counters=counters, seal_queue=3)))
    assert (page["ckptd_sealed_bytes_total"], page["ckptd_seal_seconds_total"]) == (5, 1.5)
    assert page.by_labels("ckptd_put_seconds_total") == {("peers",): 0.25}
    assert page["ckptd_slots_unsealed"] == 3


def test_memory_by_kind_adds_up_to_what_is_used() -> None:
    replica = m.HostedReplica("x.rep", "job", "run", 1, 6 * MIB, 1, 9)
    segments = (segment("snapshots", 8), segment("snapshots", 4), segment("log", 2), segment("parked", 3))
    view = replace(
        VIEW,
        status=status(segments=segments),
        peers=msgspec.structs.replace(peers(), replicas=(replica,)),
    )
    page = page_of(view)
    sizes = {kind: size / MIB for (kind,), size in page.by_labels("ckptd_memory_bytes").items()}
    assert sizes == {"snapshots": 12, "log": 2, "parked": 3, "replicas": 6, "other": 9}
    assert sum(sizes.values()) * MIB == view.status.used_bytes
    assert page["ckptd_memory_quota_bytes"] == 64 * MIB
    assert page["ckptd_memory_promised_bytes"] == 9 * MIB
    assert page.by_labels("ckptd_daemon_memory_bytes") == {
        ("anonymous",): 3,
        ("libraries",): 2,
        ("segments",): 1,
    }


def test_recoveries_and_their_phases() -> None:
    recoveries = RecoveryHistograms()
    recoveries.observe({RecoveryPhase.IMPORTS: 3.0, RecoveryPhase.LOADED: 0.25})
    recoveries.observe({RecoveryPhase.LOADED: 0.75})
    page = page_of(replace(VIEW, recoveries=recoveries))
    assert (page["ckptd_recovery_seconds_count"], page["ckptd_recovery_seconds_sum"]) == (2, 4.0)
    loaded = page.by_labels("ckptd_recovery_phase_seconds_bucket", phase="loaded")
    assert (loaded["0.1",], loaded["0.25",], loaded["1.0",], loaded["+Inf",]) == (0, 1, 2, 2)
    counts = page.by_labels("ckptd_recovery_phase_seconds_count")
    assert (counts["imports",], counts["replayed",]) == (1, 0)


def test_refusals_by_reason_are_there_before_the_first() -> None:
    """`increase()` sees nothing in a counter that appears with the value 1."""
    page = page_of(replace(VIEW, status=status(counters={"refused.rank_taken": 2, "refused.made_up": 1})))
    found = {reason: n for (reason,), n in page.by_labels("ckptd_refusals_total").items()}
    assert found.keys() == {str(code) for code in m.RefusalCode}
    assert {reason for reason, n in found.items() if n} == {"rank_taken"}


def test_connections_that_were_turned_away() -> None:
    counters = {
        "local.turned_away.flood": 3,
        "fabric.turned_away.key": 4,
        "fabric.turned_away_from.10.0.0.1": 4,  # an address is no label
    }
    page = page_of(replace(VIEW, status=status(counters=counters)))
    assert page.by_labels("ckptd_turned_away_total") == {("flood", "local"): 3, ("key", "fabric"): 4}


def test_the_users_with_the_most_memory_have_a_series() -> None:
    users = tuple(m.UserStatus(1000 + n, n * MIB, 0 if n else MIB) for n in range(100))
    page = page_of(replace(VIEW, status=status(users=users)))
    sizes = page.by_labels("ckptd_user_memory_bytes")
    assert sizes == {(str(1000 + n),): n * MIB for n in range(36, 100)}
    assert page.by_labels("ckptd_user_quota_bytes").keys() == sizes.keys()


# -- names ----------------------------------------------------------------------------------------


def test_every_metric_has_a_sample_on_a_node_that_does_everything() -> None:
    text = page_of(full()).text
    assert [name for name in METRICS if not re.search(rf"^{name}(_count)?[ {{]", text, re.MULTILINE)] == []


@pytest.mark.parametrize("name", METRICS)
def test_a_name_says_its_unit_and_a_counter_that_it_is_one(name: str) -> None:
    spec = METRICS[name]
    assert re.fullmatch(r"ckptd(_[a-z]+)+", name)
    assert name.endswith("_total") is (spec.type == "counter")
    assert not re.search(r"_(ms|ns|us|kb|mb|gb|s|b|milliseconds|percent)(_|$)", name), "base units only"
    units = [unit for unit in UNITS if f"_{unit}_" in f"{name}_"]
    assert not units or name.removesuffix("_total").endswith(tuple(units)), "the unit stands at the end"
    assert spec.type not in name
    assert spec.meaning.endswith(".")
    assert set(spec.labels) <= LABELS, "a label must have few values: no iteration, no process id"
    if spec.type == "histogram":
        assert name.endswith("_seconds")


def test_promtool_finds_nothing_to_improve() -> None:
    done = promtool("check", "metrics", given=page_of(full()).text)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_documentation_lists_every_metric() -> None:
    """Print the table anew with `python -m tests.ckptd.node.test_metrics`."""
    text = (ROOT / "docs/metrics.md").read_text()
    between = text.split("<!-- metrics -->")[1].split("<!-- end of metrics -->")[0]
    assert between.strip() == table()


def table() -> str:
    lines = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for name, spec in METRICS.items():
        labels = ", ".join(f"`{label}`" for label in spec.labels) or "-"
        lines.append(f"| `{name}` | {spec.type} | {labels} | {spec.meaning} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())  # noqa: T201
