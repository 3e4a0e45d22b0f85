"""Counters of the client: what ``Checkpointer.stats()`` and ``ckptctl status`` show."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from ckptd.core.histogram import STALL_BOUNDS_S, Histogram, bucket_metrics
from ckptd.core.recovery.recovery_phases import RecoveryPhase, phase_metrics

_RECENT_STEPS = 100


@dataclass(slots=True)
class Stats:
    """Counts since the process started; times in the unit of the name's suffix.

    Of a recovery: `attach_s` until the daemon has granted the memory, `recover_plan_s` to learn who holds
    what and to agree, `fetch_first_s` and `fetch_last_s` from the request for remote snapshots until the
    first and the last of them arrived (0 if none did; replay asks for a snapshot when it needs it),
    `restore_s` for the whole start up to the first replayed iteration, `replay_s` from there until the
    state was dense.

    `from_peers`, `from_storage`: how many snapshots of the last recovery other nodes or storage had to
    provide; `epoch`: of the run since then (-1: none yet).

    `phases`: seconds of each phase of this start, once its first new step was done; as numbers,
    `phase_<name>_s` (docs/recovery.md). They are absent before, and so are phases that did not occur.
    `first_new_step_at`: unix time of the last of them; 0 before.

    `stalls`: how long the training thread was held up in each step; as numbers, `stall_le_<bound>_s` is the
    number of steps that were held up for at most this many seconds. `recent_stalls_ms`: those of the last 100
    steps; not a counter.

    `unprotected`: 1 if the attach was refused and the user allowed training to continue.
    `daemon_changes`: how often a daemon with other settings (store, peers, quota) replaced the one before.

    `grown`: enlargements of the ring because another rank lagged behind or had a longer window.
    `snapshot_bytes`: of the newest snapshot, `snapshot_step`: its iteration (-1: none yet); `captured_bytes`:
    of all.
    `redone_iterations`: done before a failure, in no snapshot that the recovery could use, and done again.
    `every`: iterations between two snapshots now.
    `inline_copy`: 1 if copies run in the training thread. `in_bubbles`: 1 if in bubbles of a pipeline;
    `bubble_bytes`: copied there so far; `bubble_fraction`: the measured part of an iteration that is bubble.
    `copy_plans_ms`: time of the training thread that preparing new phases of the schedule has taken. Steps
    towards another order of experts (`reorders`) wait until it is little of the time.
    `switches`: schedule changes that all ranks made together. `undecided`: snapshots left out because this
    rank did not know in time whether there was one.

    Of partial snapshots: `num_experts` of the largest layer, and how many of them a durable checkpoint stores
    (`persist_experts`; 0: all); how many of this rank's are selected by tokens at risk, here or on a rank
    that has them, too (`selectable_experts`; the others take turns). Lost by the recovery with which the
    process began: the updates of this rank's `lost_tokens` (each counted once for each of its experts) in
    `older_experts`; and `lost_tokens_share`, the PLT of all recoveries of the run on all ranks.

    Of the boundary log: logged `log_iterations`, `log_records` and `log_bytes`; its capacity of `log_slots`
    iterations and its `log_memory_bytes`; `log_overrides` iterations overwritten that a recovery together
    with the other ranks may have needed; `log_skipped` iterations without room, `log_failed` that could not
    be copied, `log_outside` records sent outside of a step, `log_compared` records that a replay sent again
    and `log_mismatches` among them.

    Of parking: how often this rank's state was `parked`, the newest `parked_iteration` (-1: none), the
    `park_ms` of the last one, how often it was requested and impossible (`park_refused`), and the
    `park_memory_bytes` that are kept for it.
    """

    snapshots: int = 0
    snapshot_step: int = -1
    snapshot_bytes: int = 0
    captured_bytes: int = 0
    dense_bytes: int = 0
    window: int = 0
    every: int = 0
    failed: int = 0
    torn: int = 0
    no_slot: int = 0
    pending_gradients: int = 0
    chain_breaks: int = 0
    grown: int = 0
    sealed_here: int = 0
    unprotected: int = 0
    daemon_outages: int = 0
    daemon_changes: int = 0
    nan_snapshots: int = 0
    num_experts: int = 0
    persist_experts: int = 0
    selectable_experts: int = 0
    lost_tokens: int = 0
    older_experts: int = 0
    lost_tokens_share: float = 0.0
    redone_iterations: int = 0
    replayed_steps: int = 0
    replay_s: float = 0.0
    attach_s: float = 0.0
    recover_plan_s: float = 0.0
    fetch_first_s: float = 0.0
    fetch_last_s: float = 0.0
    restore_s: float = 0.0
    restored_bytes: int = 0
    from_peers: int = 0
    from_storage: int = 0
    epoch: int = -1
    verified_tensors: int = 0
    reorders: int = 0
    copy_plans_ms: float = 0.0
    switches: int = 0
    undecided: int = 0
    prepare_ms: float = 0.0
    inline_copy: int = 0
    in_bubbles: int = 0
    bubble_bytes: int = 0
    bubble_fraction: float = 0.0
    capture_gb_per_s: float = 0.0
    stall_ms_last: float = 0.0
    stall_ms_max: float = 0.0
    stall_ms_sum: float = 0.0
    boundary_ms_last: float = 0.0
    wait_ms_last: float = 0.0
    steps: int = 0
    log_iterations: int = 0
    log_records: int = 0
    log_bytes: int = 0
    log_slots: int = 0
    log_memory_bytes: int = 0
    log_overrides: int = 0
    log_skipped: int = 0
    log_failed: int = 0
    log_outside: int = 0
    log_compared: int = 0
    log_mismatches: int = 0
    parked: int = 0
    parked_iteration: int = -1
    park_ms: float = 0.0
    park_refused: int = 0
    park_memory_bytes: int = 0
    first_new_step_at: float = 0.0
    phases: Mapping[RecoveryPhase, float] = field(default_factory=dict)
    stalls: Histogram = field(default_factory=lambda: Histogram(STALL_BOUNDS_S))
    recent_stalls_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_STEPS))

    def note_stall(self, boundary_s: float, wait_s: float) -> None:
        """Add one step's time in the training thread: at the loop's top, and before the optimizer's step."""
        self.boundary_ms_last, self.wait_ms_last = boundary_s * 1e3, wait_s * 1e3
        self.stall_ms_last = self.boundary_ms_last + self.wait_ms_last
        self.stall_ms_max = max(self.stall_ms_max, self.stall_ms_last)
        self.stall_ms_sum += self.stall_ms_last
        self.recent_stalls_ms.append(self.stall_ms_last)
        self.steps += 1
        self.stalls.observe(boundary_s + wait_s)

    def as_dict(self) -> dict[str, float]:
        """All counters as numbers, with the mean and the histogram of stalls and the phases of the start."""
        mean = self.stall_ms_sum / self.steps if self.steps else 0.0
        counters = {name: float(getattr(self, name)) for name in _COUNTERS}
        more = phase_metrics(self.phases) | bucket_metrics("stall", self.stalls)
        return {**counters, "stall_ms_mean": mean, **more}


_COUNTERS = [each.name for each in fields(Stats) if each.type in ("int", "float")]
