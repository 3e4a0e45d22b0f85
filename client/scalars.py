"""What a logger shows of a rank: TensorBoard, Weights & Biases, the logs of Trainers (docs/observability.md).

One flat dict of numbers with stable names, which are documented in `SCALARS`. It is made of what this process
knows already: its own counters, and what the daemon's last answer to a ping said. So the training thread may
ask for it in any step; that takes some microseconds, no message and no lock. A scalar that does not apply
(no store, no peers, no recovery) or is not known yet is absent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ckptd.client.stats import Stats
from ckptd.core.recovery.recovery_phases import RecoveryPhase
from ckptd.core.snapshot_policy import MISSING_COUNTERS

SCALARS = {
    "ckptd/stall_ms": "How long snapshots held up the training thread in a step: mean of the last 100 steps.",
    "ckptd/stall_ms_max": "The longest of these 100.",
    "ckptd/snapshot_step": "The newest snapshot in this node's memory.",
    "ckptd/snapshot_lag": "Steps that are lost if this process ends now: those since that snapshot.",
    "ckptd/replica_step": "The newest step at which this rank could resume from another node.",
    "ckptd/replica_lag": "Steps that are lost if this node is lost now.",
    "ckptd/durable_step": "The newest step that all ranks have in storage.",
    "ckptd/durable_lag": "Steps that are lost if the memory of all nodes is lost now.",
    "ckptd/snapshots_missing": "Steps of this process whose snapshot was to be taken, and is missing.",
    "ckptd/daemon_outages": "How often the daemon was away since this process began.",
    "ckptd/unprotected": "1 if training goes on without a daemon (`DaemonOptions(required=False)`), else 0.",
    "ckptd/recovery_s": "Seconds of the last recovery of this process, up to its first new step.",
    "ckptd/replayed_steps": "Steps that recoveries of this process replayed from snapshots.",
    "ckptd/lost_steps": "Steps that no usable snapshot held when the run failed: done again, as new ones.",
    "ckptd/plt": "Share of the tokens whose updates the recoveries of the run lost (partial snapshots only).",
}


@dataclass(frozen=True, slots=True)
class TierSteps:
    """At which iteration a rank could resume from other nodes, and from storage; -1: at none."""

    replica: int = -1
    durable: int = -1


class ScalarWriter(Protocol):
    """What `write_scalars` calls of ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> object:
        """Write one value."""
        ...


def scalars_of(stats: Stats, step: int, tiers: TierSteps, *, lossy: bool) -> dict[str, float]:
    """The scalars of a rank at the top of ``step`` or within it.

    Args:
        lossy: its snapshots are partial, so that recoveries lose updates.
    """
    found = {
        "ckptd/snapshots_missing": float(sum(getattr(stats, name) for name in MISSING_COUNTERS)),
        "ckptd/daemon_outages": float(stats.daemon_outages),
        "ckptd/unprotected": float(stats.unprotected),
    }
    if recent := tuple(stats.recent_stalls_ms):  # a copy: another thread may ask
        found["ckptd/stall_ms"] = sum(recent) / len(recent)
        found["ckptd/stall_ms_max"] = max(recent)
    reached = {"snapshot": stats.snapshot_step, "replica": tiers.replica, "durable": tiers.durable}
    for tier, iteration in reached.items():
        if iteration >= 0:
            found[f"ckptd/{tier}_step"] = float(iteration)
            found[f"ckptd/{tier}_lag"] = float(max(0, step - iteration))
    if RecoveryPhase.LOADED in stats.phases:
        found["ckptd/recovery_s"] = sum(stats.phases.values())
        found["ckptd/replayed_steps"] = float(stats.replayed_steps)
        found["ckptd/lost_steps"] = float(stats.redone_iterations)
    if lossy:
        found["ckptd/plt"] = stats.lost_tokens_share
    return found


def write_scalars(writer: ScalarWriter, scalars: dict[str, float], step: int) -> None:
    """Write the scalars to TensorBoard as those of ``step``; its writer has a thread that makes the file."""
    for name, value in scalars.items():
        writer.add_scalar(name, value, step)
