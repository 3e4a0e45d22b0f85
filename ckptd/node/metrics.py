"""The metrics of a node for Prometheus: their names, and how they follow from a `NodeView`.

The values are those of `ckptctl status`, `peers` and `snapshots`, and a test compares them. Counters of a
trainer begin anew with its process, and its series end with its session. Labels have a bounded number of
values: runs that are in memory, nodes, and words of this program; never an iteration or a process id.

Tiers: `memory` (the rank's own ring), `peers` (replicas on other nodes, if it is to have any), and `storage`
(durable checkpoints, if there is a store).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ckptd.core.histogram import STALL_BOUNDS_S, buckets_in_metrics
from ckptd.core.snapshot_policy import MISSING_COUNTERS, PolicyKind
from ckptd.dash.recoverable import TierEnds, recoverable
from ckptd.node.admin import NodeView
from ckptd.transport import messages as m
from ckptd.transport.messages import RefusalCode

_Labels = tuple[str, ...]
Family = GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A metric: its type (gauge, counter or histogram), its labels, and its meaning."""

    type: str
    labels: tuple[str, ...]
    meaning: str


_FAMILIES: dict[str, type[Family]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}
_RANK = ("job_name", "run", "rank")  # `job` is the label with which Prometheus names what it scrapes
_TIER = (*_RANK, "tier")
_TARGET = (*_RANK, "kind", "peer")

METRICS = {
    "ckptd_build_info": MetricSpec(
        "gauge", ("version", "node"), "Version and name of this node's daemon; 1."
    ),
    "ckptd_sessions": MetricSpec("gauge", (), "Attached trainers."),
    "ckptd_trainers_lost_total": MetricSpec("counter", (), "Trainers that ended without detaching."),
    "ckptd_iteration": MetricSpec("gauge", _RANK, "The iteration that training has reached."),
    "ckptd_iteration_seconds": MetricSpec(
        "gauge", _RANK, "Median time of an iteration between the snapshots in memory."
    ),
    "ckptd_suffix_complete": MetricSpec(
        "gauge",
        _TIER,
        "1 if the tier has a complete suffix of the rank, so that the rank can resume from it.",
    ),
    "ckptd_rpo_iterations": MetricSpec(
        "gauge", _TIER, "Iterations that are lost if the rank resumes from this tier now."
    ),
    "ckptd_rpo_seconds": MetricSpec(
        "gauge", _TIER, "Training time of these iterations (their number times ckptd_iteration_seconds)."
    ),
    "ckptd_stall_seconds": MetricSpec(
        "histogram", _RANK, "How long snapshots held up the training thread in each iteration."
    ),
    "ckptd_snapshots_total": MetricSpec("counter", _RANK, "Snapshots that were captured."),
    "ckptd_snapshots_missing_total": MetricSpec(
        "counter", (*_RANK, "reason"), "Iterations without a snapshot, by reason."
    ),
    "ckptd_captured_bytes_total": MetricSpec("counter", _RANK, "Bytes of captured snapshots."),
    "ckptd_capture_bytes_per_second": MetricSpec("gauge", _RANK, "Rate of the last capture."),
    "ckptd_slots_unsealed": MetricSpec("gauge", (), "Filled slots that wait for their digests."),
    "ckptd_sealed_bytes_total": MetricSpec("counter", (), "Bytes of snapshots that this daemon sealed."),
    "ckptd_seal_seconds_total": MetricSpec("counter", (), "Time spent on their digests."),
    "ckptd_put_bytes_total": MetricSpec("counter", ("tier",), "Bytes that were sent to a tier."),
    "ckptd_put_seconds_total": MetricSpec(
        "counter", ("tier",), "Time of these transfers to peers; simultaneous ones are added."
    ),
    "ckptd_peer_up": MetricSpec("gauge", ("peer",), "1 if the other node answers."),
    "ckptd_peer_free_bytes": MetricSpec(
        "gauge", ("peer",), "Memory for replicas that the other node offers."
    ),
    "ckptd_replication_lag_iterations": MetricSpec(
        "gauge", _TARGET, "Iterations by which a replica is behind the rank (kind: snapshots or its log)."
    ),
    "ckptd_replication_lag_bytes": MetricSpec("gauge", _TARGET, "Bytes that are still to be sent there."),
    "ckptd_persist_lag_iterations": MetricSpec(
        "gauge", _RANK, "Iterations between the newest snapshot and the newest durable checkpoint."
    ),
    "ckptd_persist_duration_seconds": MetricSpec(
        "gauge", _RANK, "How long the last durable checkpoint took."
    ),
    "ckptd_persist_failures_total": MetricSpec(
        "counter", ("reason",), "Failures on the way to the store, by reason."
    ),
    "ckptd_store_keeper_up": MetricSpec("gauge", (), "1 while the process that accesses the store runs."),
    "ckptd_digest_failures_total": MetricSpec(
        "counter", ("tier",), "Snapshots whose bytes did not match their digests: where they were found."
    ),
    "ckptd_replica_comparisons_total": MetricSpec(
        "counter",
        ("result",),
        "Comparisons of ranks that should hold the same values: equal, differ (newly), or diverged.",
    ),
    "ckptd_step_audits_total": MetricSpec(
        "counter", ("result",), "Steps that ckptctl audit computed again: passed, failed, or unclear."
    ),
    "ckptd_memory_bytes": MetricSpec("gauge", ("kind",), "Segment memory by kind."),
    "ckptd_memory_promised_bytes": MetricSpec("gauge", (), "Memory that attached trainers asked for."),
    "ckptd_memory_quota_bytes": MetricSpec("gauge", (), "Quota of all segments together."),
    "ckptd_user_memory_bytes": MetricSpec(
        "gauge", ("user",), "Segment memory of a user, by number, if users are kept apart (isolate_users)."
    ),
    "ckptd_user_quota_bytes": MetricSpec("gauge", ("user",), "Quota of a user; 0: none of its own."),
    "ckptd_daemon_memory_bytes": MetricSpec("gauge", ("kind",), "Resident memory of the daemon's process."),
    "ckptd_recovery_seconds": MetricSpec(
        "histogram", (), "How long recoveries took until the first new iteration (one for each rank)."
    ),
    "ckptd_recovery_phase_seconds": MetricSpec("histogram", ("phase",), "How long their phases took."),
    "ckptd_lost_tokens_ratio": MetricSpec(
        "gauge", _RANK, "Share of the tokens whose updates recoveries lost (PLT); partial snapshots only."
    ),
    "ckptd_refusals_total": MetricSpec(
        "counter", ("reason",), "Requests of trainers and ckptctl that were refused."
    ),
    "ckptd_turned_away_total": MetricSpec(
        "counter", ("socket", "reason"), "Connections that were closed, by socket (local or fabric)."
    ),
}

# Counters of the daemon for each value of a label.
_DIGEST_FAILURES = {
    "memory": ("seal.damaged", "scrub.damaged"),
    "replica": ("event.replica_damaged", "event.replica_forged"),
    "network": ("fabric.bad_digests", "fabric.forged"),
    "fetch": ("event.fetch_damaged", "event.fetch_forged"),
    "storage": ("event.checkpoint_damaged", "event.store_damaged"),
}
_PERSIST_FAILURES = {
    "abandoned": ("event.persist_abandoned",),
    "incomplete": ("event.persist_incomplete",),
    "fenced": ("event.persist.fenced",),
    "keeper_died": ("event.store_keeper_died",),
    "not_opened": ("persist_not_opened",),
    "store_away": ("event.store_paused",),
    "unusable": ("event.storage_unusable",),
}
_COMPARISONS = {
    "equal": ("replicas.equal",),
    "differ": ("event.replicas_differ",),
    "diverged": ("event.replicas_diverged",),
}
_AUDITS = {
    "passed": ("event.step_audited",),
    "failed": ("event.audit_failed",),
    "unclear": ("event.audit_unclear",),
}
_MAX_USERS = 64  # those with the most memory
_PUTS = {"peers": "replicated", "storage": "persisted"}


def metrics_text(view: NodeView) -> bytes:
    """The page that Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_OneView(view))
    return generate_latest(registry)


class _OneView(Collector):
    def __init__(self, view: NodeView) -> None:
        self._view = view

    def collect(self) -> Iterable[Metric]:
        return metric_families(self._view)


def metric_families(view: NodeView) -> list[Family]:
    """All metrics with their samples."""
    page = _Page()
    _describe_node(page, view)
    _describe_events(page, view.status.counters)
    _describe_recoveries(page, view)
    for session in view.status.sessions:
        _describe_trainer(page, session)
    _describe_ranks(page, view)
    _describe_replication(page, view.peers)
    _describe_storage(page, view.status)
    return list(page.families.values())


class _Page:
    """All families; samples are added with the values of their labels."""

    def __init__(self) -> None:
        self.families = {
            name: _FAMILIES[spec.type](name, spec.meaning, labels=spec.labels)
            for name, spec in METRICS.items()
        }

    def add(self, name: str, value: float, *labels: str) -> None:
        family = self.families[name]
        assert not isinstance(family, HistogramMetricFamily)
        family.add_metric(labels, value)

    def add_histogram(
        self, name: str, buckets: Iterable[tuple[float, float]], count: float, total: float, *labels: str
    ) -> None:
        family = self.families[name]
        assert isinstance(family, HistogramMetricFamily)
        named = [(str(bound), number) for bound, number in buckets]
        family.add_metric(labels, [*named, ("+Inf", count)], total)


def _labels(rank: m.SessionStatus | m.RankSnapshots | m.ReplicationStatus | m.DurableRank) -> _Labels:
    return rank.job, rank.run, str(rank.rank)


# -- the node -------------------------------------------------------------------------------------


def _describe_node(page: _Page, view: NodeView) -> None:
    status = view.status
    page.add("ckptd_build_info", 1, status.version, status.node_id)
    page.add("ckptd_sessions", len(status.sessions))
    page.add("ckptd_slots_unsealed", status.seal_queue)
    for kind, size in _memory_by_kind(view).items():
        page.add("ckptd_memory_bytes", size, kind)
    page.add("ckptd_memory_promised_bytes", status.promised_bytes)
    page.add("ckptd_memory_quota_bytes", status.quota_bytes)
    for user in sorted(status.users, key=lambda one: -one.used_bytes)[:_MAX_USERS]:
        page.add("ckptd_user_memory_bytes", user.used_bytes, str(user.user))
        page.add("ckptd_user_quota_bytes", user.quota_bytes, str(user.user))
    page.add("ckptd_daemon_memory_bytes", status.rss_anon_bytes, "anonymous")
    page.add("ckptd_daemon_memory_bytes", status.rss_file_bytes, "libraries")
    page.add("ckptd_daemon_memory_bytes", status.rss_shmem_bytes, "segments")


def _memory_by_kind(view: NodeView) -> dict[str, int]:
    """Bytes of the segments; ``other`` are copies for readers, and what is being made."""
    sizes = Counter({"snapshots": 0, "log": 0, "parked": 0, "replicas": 0})
    for segment in view.status.segments:
        sizes[segment.kind] += segment.total_bytes
    for replica in view.peers.replicas:
        sizes["replicas"] += replica.total_bytes
    return sizes | {"other": max(0, view.status.used_bytes - sizes.total())}


def _describe_events(page: _Page, counters: Mapping[str, int]) -> None:
    page.add("ckptd_trainers_lost_total", counters.get("event.trainer_gone", 0))
    page.add("ckptd_sealed_bytes_total", counters.get("sealed_bytes", 0))
    page.add("ckptd_seal_seconds_total", counters.get("digest_ns", 0) / 1e9)
    for tier, name in _PUTS.items():
        page.add("ckptd_put_bytes_total", counters.get(f"{name}_bytes", 0), tier)
    page.add("ckptd_put_seconds_total", counters.get("replicated_ns", 0) / 1e9, "peers")
    for code in RefusalCode:
        page.add("ckptd_refusals_total", counters.get(f"refused.{code}", 0), code)
    for label, value, names in (
        *(("ckptd_digest_failures_total", *each) for each in _DIGEST_FAILURES.items()),
        *(("ckptd_persist_failures_total", *each) for each in _PERSIST_FAILURES.items()),
        *(("ckptd_replica_comparisons_total", *each) for each in _COMPARISONS.items()),
        *(("ckptd_step_audits_total", *each) for each in _AUDITS.items()),
    ):
        page.add(label, sum(counters.get(name, 0) for name in names), value)
    for name, count in counters.items():
        socket, _, reason = name.partition(".turned_away.")
        if reason:
            page.add("ckptd_turned_away_total", count, socket, reason)


def _describe_recoveries(page: _Page, view: NodeView) -> None:
    whole = view.recoveries.whole
    page.add_histogram("ckptd_recovery_seconds", whole.buckets, whole.count, whole.total)
    for phase, found in view.recoveries.phases.items():
        page.add_histogram("ckptd_recovery_phase_seconds", found.buckets, found.count, found.total, phase)


# -- a rank ---------------------------------------------------------------------------------------


def _describe_trainer(page: _Page, session: m.SessionStatus) -> None:
    """Its own counters, once it has reported them."""
    found, labels = session.metrics, _labels(session)
    if not found:
        return
    page.add("ckptd_snapshots_total", found.get("snapshots", 0), *labels)
    page.add("ckptd_captured_bytes_total", found.get("captured_bytes", 0), *labels)
    page.add("ckptd_capture_bytes_per_second", found.get("capture_gb_per_s", 0) * 1e9, *labels)
    for reason in MISSING_COUNTERS:
        page.add("ckptd_snapshots_missing_total", found.get(reason, 0), *labels, reason)
    if buckets := buckets_in_metrics("stall", STALL_BOUNDS_S, found):
        total_s = found.get("stall_ms_sum", 0) / 1e3
        page.add_histogram("ckptd_stall_seconds", buckets, found.get("steps", 0), total_s, *labels)


def _describe_ranks(page: _Page, view: NodeView) -> None:
    sessions = {_labels(session): session for session in view.status.sessions}
    tiers = recoverable(view.status, view.snapshots, view.peers)
    for rank in view.snapshots.ranks:
        labels = _labels(rank)
        session = sessions.pop(labels, None)
        ends = tiers.at(rank.job, rank.run, rank.rank)
        _describe_progress(page, rank, -1 if session is None else session.step, ends)
        if rank.policy == PolicyKind.PARTIAL and session is not None:
            page.add("ckptd_lost_tokens_ratio", session.metrics.get("lost_tokens_share", 0.0), *labels)
    for labels in sessions:  # attached, and without a snapshot yet
        page.add("ckptd_suffix_complete", 0, *labels, "memory")


def _describe_progress(page: _Page, rank: m.RankSnapshots, step: int, ends: TierEnds) -> None:
    labels, seconds = _labels(rank), _iteration_seconds(rank.slots)
    reached = max(step, *(slot.iteration for slot in rank.slots if slot.state != "free"), -1)
    page.add("ckptd_iteration", reached, *labels)
    if seconds is not None:
        page.add("ckptd_iteration_seconds", seconds, *labels)
    for tier in ("memory", "peers", "storage"):
        if (iteration := getattr(ends, tier)) is None:
            continue
        page.add("ckptd_suffix_complete", iteration >= 0, *labels, tier)
        if iteration >= 0:
            lost = max(0, reached - iteration)
            page.add("ckptd_rpo_iterations", lost, *labels, tier)
            if seconds is not None:
                page.add("ckptd_rpo_seconds", lost * seconds, *labels, tier)


def _iteration_seconds(slots: Iterable[m.SlotInfo]) -> float | None:
    """The median, so that a pause between two snapshots does not count; None: fewer than two are known."""
    filled = sorted((s.iteration, s.filled_at_ns) for s in slots if s.state in ("filled", "sealed"))
    steps = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(filled) if b[0] > a[0]]
    return max(0.0, median(steps) / 1e9) if steps else None


# -- peers and storage ----------------------------------------------------------------------------


def _describe_replication(page: _Page, peers: m.Peers) -> None:
    for peer in peers.peers:
        page.add("ckptd_peer_up", peer.alive, peer.node)
        page.add("ckptd_peer_free_bytes", peer.free_bytes, peer.node)
    for rank in peers.ranks:
        for target in rank.targets:
            labels = (*_labels(rank), rank.kind, target.node)
            page.add("ckptd_replication_lag_iterations", target.lag_iterations, *labels)
            page.add("ckptd_replication_lag_bytes", target.lag_bytes, *labels)


def _describe_storage(page: _Page, status: m.Status) -> None:
    if status.durable is None:
        return
    page.add("ckptd_store_keeper_up", status.durable.keeper_pid > 0)
    for rank in status.durable.ranks:
        page.add("ckptd_persist_lag_iterations", rank.lag_iterations, *_labels(rank))
        page.add("ckptd_persist_duration_seconds", rank.last_s, *_labels(rank))
