"""The in-process SDK: ``from ckptd.client import Checkpointer``."""

from ckptd.client.checkpointer import Checkpointer
from ckptd.client.options import (
    DaemonOptions,
    LayoutOptions,
    PartialOptions,
    RecoveryOptions,
    RunOptions,
    SnapshotOptions,
)
from ckptd.client.phase_clock import note_imported
from ckptd.client.recovery.replay import ReplayMismatch
from ckptd.client.recovery.verification import Certificate
from ckptd.client.scalars import write_scalars
from ckptd.client.schedule.expert_losses import CapacityBoost, LostUpdates
from ckptd.saved import SavedIteration, saved_iterations

__all__ = [
    "CapacityBoost",
    "Certificate",
    "Checkpointer",
    "DaemonOptions",
    "LayoutOptions",
    "LostUpdates",
    "PartialOptions",
    "RecoveryOptions",
    "ReplayMismatch",
    "RunOptions",
    "SavedIteration",
    "SnapshotOptions",
    "saved_iterations",
    "write_scalars",
]

note_imported()
